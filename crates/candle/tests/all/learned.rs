//! Sink logits, tables and slopes that are tensors: against the f64 oracle and finite differences.

use std::sync::Arc;

use crate::common::numbers;
use candle_core::{DType, Device, Result, Tensor, Var};
use longspan_candle::longspan::{
    Attend, Attention, BiasTable, Dilated, Dropout, Layout, Options, Pattern, Shape,
};
use longspan_candle::{
    Learned, SparseAttention, attention, attention_with_learned, attention_with_learned_and_lse,
};
use longspan_testing::{
    AttentionCase, LongNet, Precision, Problem, Rule, Sample, Table, Transform, assert_close, truth,
};

const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const DIM: usize = 8;
const LOGITS: [f32; HEADS] = [0.5, -1.0, 2.5, 0.0];
const SLOPES: [f32; HEADS] = [0.5, 0.25, -0.0625, 1.0];
const LEFT: usize = 5;
const RIGHT: usize = 2;
const CAP: f32 = 3.0;
const DROPOUT: (f64, u64) = (0.25, 7);

/// Learned are sinks, table and slopes; softcap and dropout are options.
fn problem(tokens: usize, dtype: DType) -> Problem {
    let precision = match dtype {
        DType::BF16 => Precision::Bf16,
        DType::F16 => Precision::F16,
        _ => Precision::F32,
    };
    let mut table = Table::normal(HEADS, LEFT, RIGHT, 3);
    table.values.iter_mut().for_each(|value| *value = precision.round(f64::from(*value)));
    let case = AttentionCase {
        batch: 2,
        heads_q: HEADS,
        heads_kv: KEY_HEADS,
        dim_k: DIM,
        dim_v: DIM,
        transform: Transform {
            softcap: Some(CAP),
            slopes: SLOPES.to_vec(),
            table: Some(table),
            dropout: Some(DROPOUT),
        },
        sink_logits: Some(LOGITS.to_vec()),
        lse_gradient: true,
        ..AttentionCase::new("learned", window(), tokens as u64)
    };
    case.problem().rounded(precision)
}

fn window() -> Rule {
    Rule::Window { left: 40, right: 9 }
}

fn options() -> Options {
    let (p, seed) = DROPOUT;
    Options::default().softcap(CAP).dropout(Dropout::new(p, seed).unwrap())
}

fn windowed(tokens: usize) -> Arc<Attention> {
    let shape = Shape::new(tokens, tokens);
    let pattern: Pattern = window().to_string().parse().unwrap();
    Arc::new(Attention::new(Layout::compile(&pattern, &shape).unwrap()).options(options()))
}

/// q, k, v, sink logits, table and slopes of a problem.
struct Vars {
    all: [Var; 6],
}

const NAMES: [&str; 6] = ["dq", "dk", "dv", "dsink_logits", "dbias_table", "dalibi_slopes"];

impl Vars {
    fn of(problem: &Problem, dtype: DType) -> Result<Self> {
        let tokens = problem.sizes.tokens_q;
        let make = |values: &[f32], shape: &[usize]| {
            Var::from_tensor(&Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(dtype)?)
        };
        let keys = [2, KEY_HEADS, tokens, DIM];
        let table = &problem.transform.table.as_ref().unwrap().values;
        let all = [
            make(&problem.q, &[2, HEADS, tokens, DIM])?,
            make(&problem.k, &keys)?,
            make(&problem.v, &keys)?,
            make(&LOGITS, &[HEADS])?,
            make(table, &[HEADS, LEFT + 1 + RIGHT])?,
            make(&SLOPES, &[HEADS])?,
        ];
        Ok(Vars { all })
    }

    fn learned(&self) -> Learned {
        let [_, _, _, sinks, table, slopes] = &self.all;
        Learned::default().sink_logits(sinks).bias_table(table, RIGHT).alibi_slopes(slopes)
    }

    fn run<R: Attend + 'static>(&self, attention: &Arc<R>) -> Result<(Tensor, Tensor)> {
        let [q, k, v, ..] = &self.all;
        attention_with_learned_and_lse(attention, q, k, v, &self.learned())
    }

    /// `Σ out · dout + Σ lse · dlse`, whose gradients are those of the problem.
    fn loss(&self, problem: &Problem, (out, lse): &(Tensor, Tensor)) -> Result<Tensor> {
        let weighted = |x: &Tensor, weights: &[f32]| {
            let weights = Tensor::from_slice(weights, x.shape(), &Device::Cpu)?;
            (x.to_dtype(DType::F64)? * weights.to_dtype(DType::F64)?)?.sum_all()
        };
        weighted(out, &problem.dout)? + weighted(lse, problem.dlse.as_ref().unwrap())?
    }

    /// Gradients of the loss, each with dtype and shape of its tensor.
    fn gradients(&self, loss: &Tensor) -> Result<[Vec<f64>; 6]> {
        let found = loss.backward()?;
        let one = |var: &Var| {
            let gradient = found.get(var).expect("a gradient");
            assert_eq!((gradient.dtype(), gradient.dims()), (var.dtype(), var.dims()));
            numbers(gradient).unwrap()
        };
        Ok(self.all.each_ref().map(one))
    }
}

/// Twelve unit roundoffs of the largest element, or of 1: results and the outputs that gradients are
/// taken from are rounded, on matrix units probabilities too, and candle adds up the gradients through
/// output and log-sum-exp.
fn most(dtype: DType) -> f64 {
    12.0 * match dtype {
        DType::BF16 => 0.5_f64.powi(8),
        DType::F16 => 0.5_f64.powi(11),
        _ => 0.5_f64.powi(21),
    }
}

fn close(name: &str, got: &[f64], expected: &[f64], most: f64) {
    let scale = expected.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
    assert_close(name, got, expected, most * scale);
}

/// Results and gradients of everything against the oracle.
fn check<R: Attend + 'static>(attention: &Arc<R>, problem: &Problem, dtype: DType) -> Result<()> {
    let vars = Vars::of(problem, dtype)?;
    let got = vars.run(attention)?;
    let expected = truth(problem, Sample::ALL).values;
    close("out", &numbers(&got.0)?, &expected.out, most(dtype));
    close("lse", &numbers(&got.1)?, &expected.lse, most(DType::F32));
    let gradients = vars.gradients(&vars.loss(problem, &got)?)?;
    let expected = [
        expected.dq,
        expected.dk,
        expected.dv,
        expected.dsink_logits,
        expected.dbias_table,
        expected.dalibi_slopes,
    ];
    for ((name, got), expected) in NAMES.into_iter().zip(gradients).zip(expected) {
        close(&format!("{name}, {dtype:?}"), &got, &expected, most(dtype));
    }
    // The output alone is the same.
    let [q, k, v, ..] = &vars.all;
    let out = attention_with_learned(attention, q, k, v, &vars.learned())?;
    assert_eq!(numbers(&out)?, numbers(&got.0)?);
    Ok(())
}

#[test]
fn oracle() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        check(&windowed(70), &problem(70, dtype), dtype)?;
    }
    Ok(())
}

/// Biases in every branch, sinks once per row.
#[test]
fn oracle_of_dilated_branches() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let branches = [(32, 1), (70, 3)];
        let within: Pattern = window().to_string().parse().unwrap();
        let dilated = Dilated::new(branches.map(|(segment, rate)| (segment as u64, rate as u64)));
        let dilated = dilated.unwrap().within(within).options(options());
        let net =
            LongNet { branches: branches.to_vec(), within: window(), also: None, once: false };
        let mut problem = problem(70, dtype);
        problem.seen = net.seen(&problem);
        check(&Arc::new(dilated), &problem, dtype)?;
    }
    Ok(())
}

/// Central differences, element by element. Third derivatives are of the order of the cube of a
/// typical distance, 6³, so that a difference is off by 6³ · step² / 6 = 6e-4; the loss is a sum of
/// 1,700 rounded terms, off by 3e-6, which the step makes 4e-4.
#[test]
fn finite_differences() -> Result<()> {
    let (problem, step) = (problem(24, DType::F32), 0.5_f64.powi(8));
    let (vars, attention) = (Vars::of(&problem, DType::F32)?, windowed(24));
    let loss = || vars.loss(&problem, &vars.run(&attention)?);
    let gradients = vars.gradients(&loss()?)?;
    for n in 3..6 {
        let var = &vars.all[n];
        let values = numbers(var)?;
        let at = |index: usize, step: f64| -> Result<f64> {
            let mut values = values.clone();
            values[index] += step;
            let moved = Tensor::from_vec(values, var.shape(), &Device::Cpu)?;
            var.set(&moved.to_dtype(DType::F32)?)?;
            loss()?.to_scalar()
        };
        let differences = (0..values.len())
            .map(|index| Ok((at(index, step)? - at(index, -step)?) / (2.0 * step)))
            .collect::<Result<Vec<f64>>>()?;
        at(0, 0.0)?;
        assert!(differences.iter().any(|x| x.abs() > 0.1), "{}: {differences:?}", NAMES[n]);
        close(NAMES[n], &gradients[n], &differences, 2e-3);
    }
    Ok(())
}

/// A second backward pass over the same graph restarts at 0.
#[test]
fn gradients_are_not_added_up() -> Result<()> {
    let problem = problem(30, DType::F32);
    let vars = Vars::of(&problem, DType::F32)?;
    let loss = vars.loss(&problem, &vars.run(&windowed(30))?)?;
    let first = vars.gradients(&loss)?;
    assert!(first[3].iter().all(|x| x.abs() > 1e-3), "{first:?}");
    assert_eq!(vars.gradients(&loss)?, first);
    Ok(())
}

/// Tensors without a gradient and options are the same constants, and each of the others has its own
/// gradient whichever it is.
#[test]
fn constants() -> Result<()> {
    let problem = problem(30, DType::F32);
    let vars = Vars::of(&problem, DType::F32)?;
    let [q, k, v, sinks, table, slopes] = &vars.all;
    let expected = vars.run(&windowed(30))?;
    let gradients = vars.gradients(&expected.0.sum_all()?)?;

    let Table { values, left, right } = problem.transform.table.clone().unwrap();
    let options = options()
        .sink_logits(LOGITS)
        .alibi_slopes(SLOPES)
        .bias_table(BiasTable::new(&values, left, right).unwrap());
    let sparse: SparseAttention = window().to_string().parse()?;
    let sparse = sparse.options(options.clone());
    assert_eq!(numbers(&sparse.forward(q, k, v)?)?, numbers(&expected.0)?);

    let fixed = Arc::new(windowed(30).with_options(|_| options));
    for (n, learned) in [
        (3, Learned::default().sink_logits(sinks).alibi_slopes(&slopes.as_detached_tensor())),
        (4, Learned::default().bias_table(table, RIGHT)),
        (5, Learned::default().alibi_slopes(slopes)),
    ] {
        let out = attention_with_learned(&fixed, q, k, v, &learned)?;
        assert_eq!(numbers(&out)?, numbers(&expected.0)?, "{}", NAMES[n]);
        let found = out.sum_all()?.backward()?;
        for (m, var) in vars.all.iter().enumerate() {
            let gradient = found.get(var).map(numbers).transpose()?;
            let is_learned = m < 3 || m == n;
            assert_eq!(gradient, is_learned.then(|| gradients[m].clone()), "{}", NAMES[m]);
        }
    }
    let none = attention_with_learned(&fixed, q, k, v, &Learned::default())?;
    assert_eq!(numbers(&none)?, numbers(&attention(&fixed, q, k, v)?)?);
    Ok(())
}

#[test]
fn what_is_refused() -> Result<()> {
    let vars = Vars::of(&problem(30, DType::F32), DType::F32)?;
    let [q, k, v, ..] = &vars.all;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let wrong = Tensor::full(f32::NAN, 4, &Device::Cpu)?;
    let learned = Learned::default;
    for (learned, message) in [
        (learned().sink_logits(&zeros(&[2])), "sink_logits has shape [2], expected [4]"),
        (learned().sink_logits(&zeros(&[4, 1])), "one per query head"),
        (learned().sink_logits(&wrong), "a sink logit is NaN"),
        (learned().alibi_slopes(&zeros(&[1])), "alibi_slopes has shape [1], expected [4]"),
        (learned().alibi_slopes(&wrong), "a slope is NaN"),
        (learned().bias_table(&zeros(&[2, 8]), 3), "[2, 8], expected [4, left + 1 + 3]"),
        (learned().bias_table(&zeros(&[4, 3]), 3), "[4, 3], expected [4, left + 1 + 3]"),
        (learned().bias_table(&zeros(&[4]), 0), "bias_table has shape [4]"),
        (learned().bias_table(&wrong.reshape((4, 1))?, 0), "a value of the bias table is NaN"),
    ] {
        let error = attention_with_learned(&windowed(30), q, k, v, &learned).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    Ok(())
}
