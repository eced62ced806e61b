//! Sink logits: they count once per row, whatever the row's keys are spread over.
//!
//! Results against the oracle are in `right.rs` and `half.rs`, whose cases have sinks; dilated
//! attention is in `dilated.rs`, threads are in `deterministic.rs`.

use std::sync::Arc;

use half::bf16;
use longspan::{
    Attention, Dims, Error, GradientsMut, Hook, Inputs, Isa, Layout, Order, Output, OutputGradient,
    OutputRef, Pattern, RowStatistics, Shape, State, Tensor, ViewMut,
};
use longspan_testing::{AttentionCase, Rule, assert_close, normals};

use crate::common::*;

const HEADS: usize = 2;
const LOGITS: [f32; HEADS] = [0.5, -1.25];

fn dims(tokens: usize) -> Dims {
    Dims { batch: 2, tokens, heads: HEADS, dim: 8 }
}

fn tensor(tokens: usize, seed: u64) -> Tensor<f32> {
    let numbers = normals(seed, dims(tokens).elements().unwrap());
    Tensor::new(numbers, dims(tokens), Order::Bhsd).unwrap()
}

/// The sum that gradients are of: `Σ out · dout + Σ lse · dlse`.
fn loss(output: &Output, dout: &Tensor<f32>, dlse: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    dot(output.out.as_slice(), dout.as_slice()) + dot(&output.lse, dlse)
}

#[test]
fn gradients_are_those_of_finite_differences() {
    // The first query sees no key: a row with a sink alone.
    let pattern: Pattern = "causal & ~sinks(1)".parse().unwrap();
    let layout = Arc::new(Layout::compile(&pattern, &Shape::new(40, 40)).unwrap());
    let (q, k, v, dout) = (tensor(40, 1), tensor(40, 2), tensor(40, 3), tensor(40, 4));
    let dlse = normals(5, 2 * HEADS * 40);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let run = |logits: [f32; HEADS]| {
        let attention = Attention::new(layout.clone()).sink_logits(logits);
        let output = attention.forward(inputs).unwrap();
        (attention, output)
    };
    let (attention, output) = run(LOGITS);
    assert_eq!(&output.lse[..1], &LOGITS[..1]);
    let gradient = OutputGradient { dout: dout.view(), dlse: Some(&dlse) };
    let gradients = attention.backward(inputs, &output, gradient).unwrap();
    let exact = gradients.dsink_logits.expect("there are sinks");
    // 80 rows: the difference has an error of 80 · step² / 6, and of 160 · 6e-8 / (2 · step) by
    // rounding of results around 1.
    let step = 1.0 / 64.0;
    for head in 0..HEADS {
        let at = |by: f32| {
            let mut logits = LOGITS;
            logits[head] += by;
            loss(&run(logits).1, &dout, &dlse)
        };
        let difference = (at(step) - at(-step)) / (2.0 * f64::from(step));
        let error = (difference - f64::from(exact[head])).abs();
        assert!(error < 4e-3, "head {head}: {difference} against {}", exact[head]);
        assert!(exact[head].abs() > 0.1, "head {head}: {} says nothing", exact[head]);
    }
}

/// Rows without keys, to the bit.
#[test]
fn rows_without_keys_are_their_sink() {
    let pattern: Pattern = "~full".parse().unwrap();
    let x = tensor(70, 1);
    let inputs = Inputs::new(x.view(), x.view(), x.view());
    let dlse = normals(2, 2 * HEADS * 70);
    for isa in Isa::available() {
        let layout = Layout::compile(&pattern, &Shape::new(70, 70)).unwrap();
        let attention = Attention::new(layout).sink_logits(LOGITS).isa(isa);
        let output = attention.forward(inputs).unwrap();
        assert!(output.out.as_slice().iter().all(|&x| x.to_bits() == 0), "{isa}");
        assert!(output.lse_lo.iter().all(|&x| x == 0.0), "{isa}");
        for (row, lse) in output.lse.iter().enumerate() {
            assert_eq!(*lse, LOGITS[row / 70 % HEADS], "{isa}");
        }
        let gradient = OutputGradient { dout: x.view(), dlse: Some(&dlse) };
        let gradients = attention.backward(inputs, &output, gradient).unwrap();
        for gradient in [&gradients.dq, &gradients.dk, &gradients.dv] {
            assert!(gradient.as_slice().iter().all(|&x| x == 0.0), "{isa}");
        }
        let sums = (0..HEADS).map(|head| {
            let rows = (0..2).flat_map(|entry| &dlse[(entry * HEADS + head) * 70..][..70]);
            rows.map(|&x| f64::from(x)).sum::<f64>() as f32
        });
        assert_eq!(gradients.dsink_logits, Some(sums.collect()), "{isa}");
    }
}

/// −∞ is no sink, to the bit; so is a logit too low to matter.
#[test]
fn no_sink_is_minus_infinity() {
    let case = AttentionCase {
        heads_q: 4,
        lse_gradient: true,
        batch: 2,
        ..AttentionCase::new("none", Rule::Causal, 130)
    };
    fn run<E: Number>(case: &AttentionCase, logit: Option<f32>, isa: Isa) -> (Vec<u32>, Vec<f32>) {
        let case = AttentionCase { sink_logits: logit.map(|x| vec![x; 4]), ..case.clone() };
        let problem = case.unmasked().rounded(E::PRECISION);
        let placement = Placement::Contiguous(Order::Bshd);
        let tensors = TensorsOf::<E>::of(&problem, placement);
        let attention = attention(&case, isa, 1);
        let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
        let all = [got.out, got.lse, got.dq, got.dk, got.dv].concat();
        (bits(&all), got.dsink_logits)
    }
    for isa in Isa::available() {
        let (plain, none) = run::<f32>(&case, None, isa);
        assert!(none.is_empty());
        assert_eq!(run::<f32>(&case, Some(f32::NEG_INFINITY), isa), (plain.clone(), vec![0.0; 4]));
        assert_eq!(run::<f32>(&case, Some(-1e30), isa).0, plain, "{isa}");
        let (plain, _) = run::<bf16>(&case, None, isa);
        assert_eq!(run::<bf16>(&case, Some(f32::NEG_INFINITY), isa).0, plain, "{isa}");
        // And it is not for nothing.
        assert_ne!(run::<bf16>(&case, Some(0.0), isa).0, plain, "{isa}");
    }
}

/// A sink that outweighs every key, or is outweighed by them, where exponentials would overflow.
#[test]
fn far_above_and_below_all_scores() {
    let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: 1 };
    let layout = Arc::new(Layout::compile(&Pattern::full(), &Shape::new(1, 1)).unwrap());
    // A key of this score and value 2 beside this sink: output and log-sum-exp.
    for (score, sink, out, lse) in [
        (0.0, 3e38, 0.0, 3e38),
        (3e38, -3e38, 2.0, 3e38),
        (-3e38, -3e38, 1.0, -3e38),
        (1e4, 1e4, 1.0, 1e4 + std::f32::consts::LN_2),
        (-1e4, -1e4 + 20.0, 2.0 * (-20.0_f32).exp(), -1e4 + 20.0),
        (f32::NEG_INFINITY, -5.0, 0.0, -5.0),
    ] {
        let x = |x: f32| Tensor::new(vec![x], dims, Order::Bhsd).unwrap();
        let (q, k, v) = (x(1.0), x(score), x(2.0));
        let attention = Attention::new(layout.clone()).scale(1.0).sink_logits([sink]);
        for isa in Isa::available() {
            let attention =
                Attention::new(attention.layouts().clone()).scale(1.0).sink_logits([sink]).isa(isa);
            let got = attention.forward(Inputs::new(q.view(), k.view(), v.view())).unwrap();
            let (got_out, got_lse) = (got.out.as_slice()[0], got.lse[0]);
            let near = |a: f32, b: f32| (a - b).abs() <= 2e-7 * b.abs();
            assert!(near(got_out, out), "{isa}, {score}, {sink}: {got_out}, expected {out}");
            assert!(near(got_lse, lse), "{isa}, {score}, {sink}: {got_lse}, expected {lse}");
        }
    }
}

/// Log-sum-exps are a double-f32 with sinks too: the low part is what rounding leaves out.
#[test]
fn low_parts_are_what_rounding_leaves_out() {
    let tokens = 300;
    let dims = Dims { batch: 1, tokens, heads: 1, dim: 1 };
    let layout = Layout::compile(&Pattern::causal(), &Shape::new(300, 300)).unwrap();
    let layout = Arc::new(layout);
    // Scores of 0, so that row `i` has `i + 1` keys of weight 1: its sum is exact.
    let zeros = Tensor::filled(0.0_f32, dims, Order::Bhsd).unwrap();
    for sink in [7.0_f32, 0.25, -3.0, 100.0] {
        for isa in Isa::available() {
            let attention = Attention::new(layout.clone()).sink_logits([sink]).isa(isa);
            let inputs = Inputs::new(zeros.view(), zeros.view(), zeros.view());
            let output = attention.forward(inputs).unwrap();
            for row in 0..tokens {
                let (high, low) = (f64::from(output.lse[row]), f64::from(output.lse_lo[row]));
                // The sink is a factor apart, so that a large one has no overflow.
                let sink = f64::from(sink);
                let exact = sink + ((row + 1) as f64 * (-sink).exp()).ln_1p();
                // The low part is an f32: half an ulp of 100 is 4e-6, and of that 2⁻²⁴.
                assert!((high + low - exact).abs() < 1e-12, "{isa}, {sink}, row {row}");
                assert!(low.abs() <= 4e-6);
            }
            assert!(output.lse_lo.iter().any(|&low| low != 0.0) || sink == 100.0);
        }
    }
}

fn some_keys(inputs: Inputs<'_>, keys: std::ops::Range<usize>) -> Inputs<'_> {
    Inputs { k: inputs.k.tokens(keys.clone()), v: inputs.v.tokens(keys), ..inputs }
}

/// Keys in pieces: a state has no sink before it is finished, and gets it once.
#[test]
fn states_get_their_sink_when_finished() {
    let tokens = 90;
    let (q, k, v, dout) = (tensor(tokens, 1), tensor(tokens, 2), tensor(tokens, 3), tensor(90, 4));
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let attention = |first: usize, keys: usize| {
        let shape = Shape::new(90, keys).query_offset(0).key_offset(first as i64);
        let layout = Layout::compile(&Pattern::causal(), &shape).unwrap();
        Attention::new(layout)
    };
    let whole = attention(0, tokens).sink_logits(LOGITS);
    let output = whole.forward(inputs).unwrap();

    let pieces = [(0, 31), (31, 40), (71, 19)];
    let (mut state, mut plain) = (State::empty(dims(90)).unwrap(), State::empty(dims(90)).unwrap());
    for (first, keys) in pieces {
        let inputs = some_keys(inputs, first..first + keys);
        let piece = attention(first, keys);
        piece.extend(inputs, &mut plain, Hook::none()).unwrap();
        piece.sink_logits(LOGITS).extend(inputs, &mut state, Hook::none()).unwrap();
    }
    assert_eq!(state, plain, "a state has no sink");
    let mut finished = Output::zeros(dims(90), Order::Bhsd).unwrap();
    whole.finish_state(&state, finished.as_mut(), Hook::none()).unwrap();
    assert_close("out", finished.out.as_slice(), output.out.as_slice(), 1e-6);
    assert_close("lse", &finished.lse, &output.lse, 1e-6);
    // Without its sink a row is another one.
    let without = state.finish(Order::Bhsd).unwrap();
    assert!(without.lse.iter().zip(&output.lse).all(|(without, with)| without < with));

    // Gradients in pieces too.
    let expected = whole.backward(inputs, &output, dout.view()).unwrap();
    let mut deltas = vec![0.0; finished.lse.len()];
    longspan::row_deltas(&finished, dout.view(), &mut deltas).unwrap();
    let lse_lo = Some(&finished.lse_lo[..]);
    let rows = RowStatistics { lse: &finished.lse, lse_lo, delta: &deltas };
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0; 2 * HEADS * 90 * 8]);
    for (first, keys) in pieces {
        let some = some_keys(inputs, first..first + keys);
        let [mut part_k, mut part_v] = [(); 2].map(|()| vec![0.0; 2 * HEADS * keys * 8]);
        let gradients = GradientsMut::new(
            ViewMut::new(&mut dq, dims(90), Order::Bhsd).unwrap(),
            ViewMut::new(&mut part_k, dims(keys), Order::Bhsd).unwrap(),
            ViewMut::new(&mut part_v, dims(keys), Order::Bhsd).unwrap(),
        );
        let piece = attention(first, keys).sink_logits(LOGITS);
        piece.accumulate(some, dout.view(), rows, gradients, Hook::none()).unwrap();
        for (all, part) in [(&mut dk, &part_k), (&mut dv, &part_v)] {
            for head in 0..2 * HEADS {
                let part = &part[head * keys * 8..][..keys * 8];
                all[(head * 90 + first) * 8..][..keys * 8].copy_from_slice(part);
            }
        }
    }
    let mut dsink_logits = [f32::NAN; HEADS];
    whole.sink_gradients(dims(90), rows, &mut dsink_logits, Hook::none()).unwrap();
    assert_close("dq", &dq, expected.dq.as_slice(), 2e-6);
    assert_close("dk", &dk, expected.dk.as_slice(), 2e-6);
    assert_close("dv", &dv, expected.dv.as_slice(), 2e-6);
    assert_close("dsink_logits", &dsink_logits, &expected.dsink_logits.unwrap(), 1e-5);
}

#[test]
fn what_is_refused() {
    let layout = Arc::new(Layout::compile(&Pattern::causal(), &Shape::new(5, 5)).unwrap());
    let x = tensor(5, 1);
    let inputs = Inputs::new(x.view(), x.view(), x.view());
    let plain = Attention::new(layout.clone());
    let with = |logits: &[f32]| Attention::new(layout.clone()).sink_logits(logits);
    for len in [0, 1, 3] {
        let error = with(&vec![0.0; len]).forward(inputs).unwrap_err();
        assert_eq!(error, Error::Length { what: "sink_logits", len, expected: 2 });
        assert!(error.to_string().contains("sink_logits"), "{error}");
        let state = State::empty(dims(5)).unwrap();
        let mut output = Output::<f32>::zeros(dims(5), Order::Bhsd).unwrap();
        let finished = with(&vec![0.0; len]).finish_state(&state, output.as_mut(), Hook::none());
        assert_eq!(finished.unwrap_err(), error);
    }
    for value in [f32::NAN, f32::INFINITY] {
        let error = with(&[0.0, value]).forward(inputs).unwrap_err();
        assert!(matches!(error, Error::Number { what: "a sink logit", .. }), "{error}");
    }

    let attention = with(&LOGITS);
    let output = attention.forward(inputs).unwrap();
    let (saved, gradient) = (OutputRef::from(&output), OutputGradient::from(x.view()));
    let mut gradients = plain.backward(inputs, saved, gradient).unwrap();
    assert_eq!(gradients.dsink_logits, None);
    let mut into = |attention: &Attention, len: usize| {
        gradients.dsink_logits = Some(vec![7.0; len]);
        let result =
            attention.backward_into(inputs, saved, gradient, gradients.as_mut(), Hook::none());
        (result, gradients.dsink_logits.take().unwrap())
    };
    let (error, list) = into(&plain, 2);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Unexpected { what: "dsink_logits", .. }), "{error}");
    assert_eq!(list, [7.0; 2]);
    let (error, _) = into(&attention, 3);
    let expected = Error::Length { what: "dsink_logits", len: 3, expected: 2 };
    assert_eq!(error.unwrap_err(), expected);
    let (done, list) = into(&attention, 2);
    done.unwrap();
    assert_eq!(Some(list), attention.backward(inputs, saved, gradient).unwrap().dsink_logits);

    // What some keys of a row add is no gradient of its sink.
    let (lse, delta) = (&output.lse, &vec![0.0; output.lse.len()]);
    let rows = RowStatistics { lse, lse_lo: None, delta };
    gradients.dsink_logits = Some(vec![0.0; 2]);
    let result = attention.accumulate(inputs, x.view(), rows, gradients.as_mut(), Hook::none());
    let error = result.unwrap_err();
    assert!(error.to_string().contains("sink_gradients"), "{error}");
    let mut list = [0.0; HEADS];
    let result = plain.sink_gradients(dims(5), rows, &mut list, Hook::none());
    assert!(matches!(result, Err(Error::Unexpected { what: "dsink_logits", .. })));
    let result = attention.sink_gradients(dims(4), rows, &mut list, Hook::none());
    assert!(matches!(result, Err(Error::Length { what: "lse", .. })));

    // A list that is read as well.
    let mut shared = vec![0.0; 2 * HEADS * 5];
    let mut other = tensor(5, 2);
    let (mut dk, mut dv) = (tensor(5, 3), tensor(5, 4));
    // SAFETY: the views are never written: the call is refused.
    let list = unsafe { std::slice::from_raw_parts_mut(shared.as_mut_ptr(), HEADS) };
    let into = GradientsMut {
        dsink_logits: Some(list),
        ..GradientsMut::new(other.view_mut(), dk.view_mut(), dv.view_mut())
    };
    let gradient = OutputGradient { dlse: Some(&shared), ..gradient };
    let result = attention.backward_into(inputs, saved, gradient, into, Hook::none());
    let expected = Error::Overlap { first: "dsink_logits", second: "dlse" };
    assert_eq!(result.unwrap_err(), expected);
}
