//! Sink logits against candle's own operations in f64: a softmax with one column more.

mod common;

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use common::random;
use longspan_candle::longspan::{Attention, Dilated, Layout, Options, Pattern, Shape};
use longspan_candle::{
    SparseAttention, attention_with_lse, attention_with_sinks, attention_with_sinks_and_lse,
};
use longspan_testing::assert_close;

const HEADS: usize = 4;
const TOKENS: usize = 70;
const LOGITS: [f32; HEADS] = [0.5, -1.0, 2.5, 0.0];

fn causal() -> Arc<Attention> {
    let shape = Shape::new(TOKENS, TOKENS);
    Arc::new(Attention::new(Layout::compile(&Pattern::causal(), &shape).unwrap()))
}

fn inputs(dtype: DType) -> Result<[Var; 4]> {
    let make =
        |seed, heads| Var::from_tensor(&random(seed, (2, heads, TOKENS, 8))?.to_dtype(dtype)?);
    let logits = Tensor::new(&LOGITS, &Device::Cpu)?.to_dtype(dtype)?;
    Ok([make(1, HEADS)?, make(2, 2)?, make(3, 2)?, Var::from_tensor(&logits)?])
}

/// Output and log-sum-exp; keys count `times`, the sink once.
fn dense([q, k, v, sinks]: [&Tensor; 4], times: f64) -> Result<(Tensor, Tensor)> {
    let wide = |x: &Tensor| x.to_dtype(DType::F64);
    let shared = |x: &Tensor| -> Result<Tensor> {
        let (b, h, t, d) = x.dims4()?;
        x.unsqueeze(2)?.expand((b, h, HEADS / h, t, d))?.reshape((b, HEADS, t, d))
    };
    let (q, k, v, sinks) = (wide(q)?, shared(&wide(k)?)?, shared(&wide(v)?)?, wide(sinks)?);
    let scores = ((q.matmul(&k.t()?)? / 8f64.sqrt())? + times.ln())?;
    let later: Vec<f64> = (0..TOKENS * TOKENS)
        .map(|n| if n % TOKENS > n / TOKENS { f64::NEG_INFINITY } else { 0.0 })
        .collect();
    let mask = Tensor::from_vec(later, (TOKENS, TOKENS), &Device::Cpu)?;
    let scores = scores.broadcast_add(&mask)?;
    let column = sinks.reshape((1, HEADS, 1, 1))?.broadcast_as((2, HEADS, TOKENS, 1))?;
    let lse = Tensor::cat(&[&scores, &column.contiguous()?], D::Minus1)?.exp()?.sum(D::Minus1)?;
    let lse = lse.log()?;
    let p = scores.broadcast_sub(&lse.unsqueeze(D::Minus1)?)?.exp()?;
    Ok((p.matmul(&v.contiguous()?)?, lse))
}

fn numbers(x: &Tensor) -> Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Outputs, and gradients of a loss through both of them.
fn compare(
    got: (Tensor, Tensor),
    expected: (Tensor, Tensor),
    of: &[Var; 4],
    most: f64,
) -> Result<()> {
    let loss = |(out, lse): &(Tensor, Tensor)| -> Result<Tensor> {
        let wide = |x: &Tensor| x.to_dtype(DType::F64);
        wide(out)?.sqr()?.sum_all()? + (wide(lse)?.sqr()? * 0.5)?.sum_all()?
    };
    let close = |name: &str, got: &Tensor, expected: &Tensor| -> Result<()> {
        let (got, expected) = (numbers(got)?, numbers(expected)?);
        let scale = expected.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
        assert_close(name, &got, &expected, most * scale);
        Ok(())
    };
    close("out", &got.0, &expected.0)?;
    close("lse", &got.1, &expected.1)?;
    let (a, b) = (loss(&got)?.backward()?, loss(&expected)?.backward()?);
    for (name, var) in ["dq", "dk", "dv", "dsink_logits"].into_iter().zip(of) {
        let (a, b) = (a.get(var).expect("a gradient"), b.get(var).expect("a gradient"));
        assert_eq!((a.dtype(), a.dims()), (var.dtype(), var.dims()));
        close(name, a, b)?;
    }
    Ok(())
}

/// Twelve unit roundoffs of the largest element: results and the outputs that gradients are taken from
/// are rounded, on matrix units probabilities too.
fn most(dtype: DType) -> f64 {
    12.0 * match dtype {
        DType::BF16 => 0.5_f64.powi(8),
        DType::F16 => 0.5_f64.powi(11),
        _ => 0.5_f64.powi(21),
    }
}

#[test]
fn gradients_of_all_four() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let vars = inputs(dtype)?;
        let [q, k, v, sinks] = &vars;
        let got = attention_with_sinks_and_lse(&causal(), q, k, v, sinks)?;
        let expected = dense([q, k, v, sinks].map(|var| var.as_tensor()), 1.0)?;
        // The output alone is the same.
        let out = attention_with_sinks(&causal(), q, k, v, sinks)?;
        assert_eq!(numbers(&out)?, numbers(&got.0)?);
        compare(got, expected, &vars, most(dtype))?;
    }
    Ok(())
}

/// A second backward pass over the same graph begins anew.
#[test]
fn gradients_are_not_added_up() -> Result<()> {
    let [q, k, v, sinks] = inputs(DType::F32)?;
    let loss = attention_with_sinks(&causal(), &q, &k, &v, &sinks)?.sqr()?.sum_all()?;
    let run = || numbers(loss.backward()?.get(&sinks).expect("a gradient"));
    let first = run()?;
    assert!(first.iter().all(|x| x.abs() > 1e-3), "{first:?}");
    assert_eq!(run()?, first);
    Ok(())
}

#[test]
fn constant_logits_are_options() -> Result<()> {
    let [q, k, v, sinks] = inputs(DType::F32)?;
    let expected = attention_with_sinks(&causal(), &q, &k, &v, &sinks)?;
    let attention: SparseAttention = "causal".parse()?;
    let attention = attention.options(Options::default().sink_logits(LOGITS));
    assert_eq!(numbers(&attention.forward(&q, &k, &v)?)?, numbers(&expected)?);
    // Logits without a gradient do not make one.
    let fixed = sinks.as_detached_tensor();
    let out = attention_with_sinks(&causal(), &q, &k, &v, &fixed)?;
    assert_eq!(numbers(&out)?, numbers(&expected)?);
    assert!(out.sum_all()?.backward()?.get(&q).is_some());
    Ok(())
}

/// Once per row, not once per branch.
#[test]
fn dilated_branches() -> Result<()> {
    let vars = inputs(DType::F32)?;
    let [q, k, v, sinks] = &vars;
    let branches = [(TOKENS as u64, 1), (TOKENS as u64, 1)];
    let dilated = Arc::new(Dilated::new(branches).unwrap().within(Pattern::causal()));
    let got = attention_with_sinks_and_lse(&dilated, q, k, v, sinks)?;
    let (_, without) = attention_with_lse(&dilated, q, k, v)?;
    assert_ne!(numbers(&got.1)?, numbers(&without)?);
    let expected = dense([q, k, v, sinks].map(|var| var.as_tensor()), 2.0)?;
    compare(got, expected, &vars, most(DType::F32))
}

#[test]
fn what_is_refused() -> Result<()> {
    let [q, k, v, _] = inputs(DType::F32)?;
    for (wrong, message) in [
        (Tensor::zeros(2, DType::F32, &Device::Cpu)?, "sink_logits has shape [2], expected [4]"),
        (Tensor::zeros((4, 1), DType::F32, &Device::Cpu)?, "one per query head"),
        (Tensor::full(f32::NAN, 4, &Device::Cpu)?, "a sink logit is NaN"),
    ] {
        let error = attention_with_sinks(&causal(), &q, &k, &v, &wrong).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    Ok(())
}
