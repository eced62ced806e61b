//! Dilated attention on candle's tensors: the bits that Longspan has without candle, the paper's
//! equations in f64, and finite differences.

use crate::common::{compare, difference, numbers, random, tolerance};
use candle_core::{DType, Device, Error, Result, Tensor, Var};
use longspan_candle::longspan::{Branch, Dilated, Dims, Inputs, Order, Pattern, Tensor as Plain};
use longspan_candle::{DilatedAttention, attention_with_lse};
use longspan_testing::{LongNet, Precision, Problem, Rule, Sizes, normals};

/// Branches and sizes that divide by nothing: short last segments, more rate than heads, queries
/// that no branch has, key heads that are shared.
fn cases() -> Vec<(LongNet, Sizes)> {
    let case = |branches: &[(i64, i64)], within, tokens, (heads_q, heads_kv)| {
        let net = LongNet { branches: branches.to_vec(), within, also: None, once: false };
        let sizes = Sizes {
            batch: 2,
            tokens_q: tokens,
            tokens_k: tokens,
            heads_q,
            heads_kv,
            dim_k: 16,
            dim_v: 16,
        };
        (net, sizes)
    };
    vec![
        case(&[(32, 1), (64, 2), (128, 4)], Rule::Causal, 150, (4, 4)),
        case(&[(32, 1), (64, 2), (128, 4)], Rule::Full, 131, (4, 2)),
        case(&[(50, 3), (70, 4)], Rule::Causal, 101, (5, 1)),
        case(&[(200, 1)], Rule::Full, 70, (1, 1)),
    ]
}

fn dilated(net: &LongNet) -> Dilated {
    let branches = net.branches.iter().map(|&(w, r)| Branch::new(w as u64, r as u64).unwrap());
    let within: Pattern = net.within.to_string().parse().unwrap();
    Dilated::new(branches).unwrap().within(within)
}

fn tensor(data: &[f32], shape: [usize; 4], dtype: DType) -> Result<Tensor> {
    Tensor::from_slice(data, &shape, &Device::Cpu)?.to_dtype(dtype)
}

/// Output, log-sum-exp and gradients, through both, of every element type.
#[test]
fn the_papers_equations() -> Result<()> {
    let types = [
        (DType::F32, Precision::F32),
        (DType::BF16, Precision::Bf16),
        (DType::F16, Precision::F16),
    ];
    for ((net, sizes), (dtype, precision)) in
        cases().into_iter().flat_map(|case| types.map(|types| (case.clone(), types)))
    {
        let mut problem = Problem::normal(sizes, 11);
        problem.dlse = Some(normals(13, sizes.rows()));
        let problem = problem.rounded(precision);
        let expected = net.equations(&problem);

        let Sizes { batch, tokens_q, tokens_k, heads_q, heads_kv, dim_k, dim_v } = sizes;
        let shapes = [
            [batch, heads_q, tokens_q, dim_k],
            [batch, heads_kv, tokens_k, dim_k],
            [batch, heads_kv, tokens_k, dim_v],
        ];
        let var = |data, shape| Var::from_tensor(&tensor(data, shape, dtype)?);
        let inputs =
            [var(&problem.q, shapes[0])?, var(&problem.k, shapes[1])?, var(&problem.v, shapes[2])?];
        let [q, k, v] = &inputs;
        let attention = DilatedAttention::from(dilated(&net));
        let (out, lse) = attention_with_lse(attention.dilated(), q, k, v)?;
        assert_eq!(numbers(&out)?, numbers(&attention.forward(q, k, v)?)?);

        let wide =
            |data: &[f64], like: &Tensor| Tensor::from_slice(data, like.shape(), &Device::Cpu);
        let Tolerances { out: near, gradient } = tolerances(dtype, &net);
        compare("out", &out, &wide(&expected.out, &out)?, near);
        compare("lse", &lse, &wide(&expected.lse, &lse)?, tolerances(DType::F32, &net).out);

        let dout = tensor(&problem.dout, [batch, heads_q, tokens_q, dim_v], DType::F64)?;
        let loss = (out.to_dtype(DType::F64)? * dout)?.sum_all()?;
        // Rows that see nothing have a log-sum-exp of −∞, and no gradient.
        let dlse = problem.dlse.as_deref().unwrap();
        let finite = numbers(&lse)?.into_iter().map(f64::is_finite).collect::<Vec<_>>();
        let dlse: Vec<f32> =
            dlse.iter().zip(&finite).map(|(&d, &finite)| if finite { d } else { 0.0 }).collect();
        let finite = Tensor::from_vec(
            finite.into_iter().map(u8::from).collect(),
            lse.shape(),
            &Device::Cpu,
        )?;
        let lse = finite.where_cond(&lse, &lse.zeros_like()?)?;
        let dlse = Tensor::from_vec(dlse, lse.shape(), &Device::Cpu)?.to_dtype(DType::F64)?;
        let loss = (loss + (lse.to_dtype(DType::F64)? * dlse)?.sum_all()?)?;
        let gradients = loss.backward()?;
        let expected = [&expected.dq, &expected.dk, &expected.dv];
        for ((name, input), expected) in ["dq", "dk", "dv"].into_iter().zip(&inputs).zip(expected) {
            let found = gradients.get(input).expect("a gradient");
            assert_eq!((found.dims(), found.dtype()), (input.dims(), dtype));
            compare(name, found, &wide(expected, input)?, gradient);
        }
    }
    Ok(())
}

struct Tolerances {
    out: f64,
    gradient: f64,
}

/// As everywhere here; a branch more is a merge more, one rounding each. Gradients through output and
/// log-sum-exp arrive in two passes, and their sum is rounded again: twice as much.
fn tolerances(dtype: DType, net: &LongNet) -> Tolerances {
    let one = tolerance(dtype);
    let merges = net.branches.len() as f64 * 2_f64.powi(-24);
    Tolerances { out: one.out + merges, gradient: 2.0 * (one.gradient + merges) }
}

/// What candle computes is what `Dilated` computes, to the bit, wherever the numbers lie.
#[test]
fn the_same_bits() -> Result<()> {
    for (net, sizes) in cases() {
        let Sizes { batch, tokens_q: tokens, heads_q, heads_kv, dim_k, .. } = sizes;
        let engine = dilated(&net);
        let attention = DilatedAttention::from(dilated(&net));
        // As projections make them: tokens before heads.
        let make = |seed, heads| Var::from_tensor(&random(seed, (batch, tokens, heads, dim_k))?);
        let inputs = [make(1, heads_q)?, make(2, heads_kv)?, make(3, heads_kv)?];
        let plain = |x: &Tensor| -> Result<Plain<f32>> {
            let (batch, tokens, heads, dim) = x.dims4()?;
            let dims = Dims { batch, tokens, heads, dim };
            let data = x.flatten_all()?.to_vec1::<f32>()?;
            Plain::new(data, dims, Order::Bshd).map_err(Error::wrap)
        };

        let [q, k, v] = inputs.each_ref().map(|input| input.transpose(1, 2));
        let out = attention.forward(&q?, &k?, &v?)?.transpose(1, 2)?;
        assert!(out.is_contiguous(), "the output lies as the queries do");
        // The gradient of Σ out² / 2.
        let found = (out.sqr()? * 0.5)?.sum_all()?.backward()?;

        let (q, k, v) = (plain(&inputs[0])?, plain(&inputs[1])?, plain(&inputs[2])?);
        let views = Inputs { q: q.view(), k: k.view(), v: v.view() };
        let output = engine.forward(Inputs::new(views.q, views.k, views.v)).unwrap();
        let (saved, gradient) = (&output, output.out.view());
        let expected = engine.backward(views, saved, gradient).unwrap();
        assert_eq!(plain(&out)?, output.out);
        for (input, expected) in inputs.iter().zip([expected.dq, expected.dk, expected.dv]) {
            assert_eq!(plain(found.get(input).expect("a gradient"))?, expected);
        }
    }
    Ok(())
}

/// Along a random direction the loss changes as fast as its gradient says.
#[test]
fn finite_differences() -> Result<()> {
    for (net, sizes) in cases() {
        let Sizes { batch, tokens_q: tokens, heads_q, heads_kv, dim_k, .. } = sizes;
        let attention = DilatedAttention::from(dilated(&net));
        let make = |seed, heads| random(seed, (batch, heads, tokens, dim_k));
        let inputs = [make(1, heads_q)?, make(2, heads_kv)?, make(3, heads_kv)?];
        let weights = make(4, heads_q)?.to_dtype(DType::F64)?;
        let loss = |[q, k, v]: [&Tensor; 3]| -> Result<Tensor> {
            let out = attention.forward(q, k, v)?.to_dtype(DType::F64)?;
            (out * &weights)?.sum_all()
        };
        for (index, input) in inputs.iter().enumerate() {
            let var = Var::from_tensor(input)?;
            let put = |x: &Tensor| {
                let mut all = inputs.clone();
                all[index] = x.clone();
                let [q, k, v] = all.each_ref();
                loss([q, k, v])
            };
            let gradients = put(&var)?.backward()?;
            let (_, heads, _, _) = input.dims4()?;
            let direction = make(7 + index as u64, heads)?;
            let gradient = gradients.get(&var).expect("a gradient");
            let expected: f64 =
                (gradient * &direction)?.to_dtype(DType::F64)?.sum_all()?.to_scalar()?;
            // The third derivative costs step², rounding 2⁻²⁴ √numbers / step: equal about here.
            let step = 2_f64.powi(-8);
            let at = |step: f64| put(&(input + (&direction * step)?)?)?.to_scalar::<f64>();
            let slope = (at(step)? - at(-step)?) / (2.0 * step);
            let scale = numbers(gradient)?.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!(
                (slope - expected).abs() < 2e-3 * scale,
                "{net:?}, input {index}: {slope}, expected {expected} of {scale}"
            );
        }
    }
    Ok(())
}

/// Other options than the defaults reach the kernels, and sizes that don't fit are refused.
#[test]
fn options_and_refusals() -> Result<()> {
    let (net, _) = cases().remove(0);
    let x = random(1, (1, 4, 90, 8))?;
    let plain = DilatedAttention::from(dilated(&net)).forward(&x, &x, &x)?;
    let scaled = DilatedAttention::from(dilated(&net).scale(0.9)).forward(&x, &x, &x)?;
    // A tenth less of scores near 1 moves outputs of unit scale by percents.
    let difference = difference(&plain, &scaled)?;
    assert!((1e-2..f64::INFINITY).contains(&difference), "{difference}");

    let attention = DilatedAttention::from(dilated(&net));
    let message = |result: Result<Tensor>| result.unwrap_err().to_string();
    let double = x.to_dtype(DType::F64)?;
    assert!(message(attention.forward(&double, &double, &double)).contains("q holds f64"));
    let flat = x.flatten_to(1)?;
    assert!(message(attention.forward(&flat, &x, &x)).contains("(batch, heads, tokens, dim)"));
    let three = x.narrow(1, 0, 3)?;
    assert!(message(attention.forward(&x, &three, &three)).contains("4 query heads and 3 key"));
    Ok(())
}
