//! Trains one layer of sparse attention, with candle's gradients and plain gradient descent, to
//! say which token stood five places back.
//!
//! ```sh
//! cargo run --release -p longspan-candle --example train
//! ```
//!
//! Queries and keys see positions only, values see tokens only; so the layer has to find out where
//! to look, within a window of 16, and what to say about what it finds there. A guess costs
//! ln 8 ≈ 2.08.

#![expect(clippy::print_stdout, reason = "it is what the example is for")]

use candle_core::{D, DType, Device, Result, Tensor, Var};
use longspan_candle::SparseAttention;

const TOKENS: usize = 1_024;
const WORDS: usize = 8;
const HEADS: usize = 2;
const DIM: usize = 16;
const BACK: usize = 5;
const STEPS: usize = 150;
const RATE: f64 = 2.0;

fn main() -> Result<()> {
    train(|step, loss| {
        if step % 15 == 0 {
            println!("step {step:>3}: loss {loss:.4}");
        }
    })
}

/// Tells `report` the loss before each step.
fn train(mut report: impl FnMut(usize, f32)) -> Result<()> {
    let attention: SparseAttention = "causal & window(15, 0)".parse()?;
    let device = Device::Cpu;

    // A linear congruential generator, which any machine repeats: 0 to 65,535.
    let mut state = 1_u32;
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    let text: Vec<u32> = (0..TOKENS).map(|_| number() % WORDS as u32).collect();
    let words = one_hot(&text, &device)?;
    let targets = one_hot(&text[..TOKENS - BACK], &device)?;
    let positions = positions(&device)?;

    // Between −0.5 and 0.5.
    let mut weight = |rows, columns| {
        let data = (0..rows * columns).map(|_| number() as f32 / 65_536.0 - 0.5);
        Var::from_vec(data.collect::<Vec<_>>(), (rows, columns), &device)
    };
    let query = weight(DIM, HEADS * DIM)?;
    let key = weight(DIM, HEADS * DIM)?;
    let value = weight(WORDS, HEADS * DIM)?;
    let output = weight(HEADS * DIM, WORDS)?;

    for step in 0..=STEPS {
        // (tokens, heads · dim) as (batch, heads, tokens, dim): a view, which attention reads.
        let heads = |x: Tensor| x.reshape((1, TOKENS, HEADS, DIM))?.transpose(1, 2);
        let q = heads(positions.matmul(&query)?)?;
        let k = heads(positions.matmul(&key)?)?;
        let v = heads(words.matmul(&value)?)?;
        let seen = attention.forward(&q, &k, &v)?;
        let logits = seen.transpose(1, 2)?.reshape((TOKENS, HEADS * DIM))?.matmul(&output)?;

        // Cross entropy: log-sum-exp of the logits less the logit of what was there.
        let logits = logits.narrow(0, BACK, TOKENS - BACK)?;
        let right = (&logits * &targets)?.sum(D::Minus1)?;
        let loss = (logits.log_sum_exp(D::Minus1)? - right)?.mean_all()?;
        report(step, loss.to_scalar()?);

        let gradients = loss.backward()?;
        for weight in [&query, &key, &value, &output] {
            let gradient = gradients.get(weight).expect("the loss depends on every weight");
            weight.set(&(weight.as_tensor() - (gradient * RATE)?)?)?;
        }
    }
    Ok(())
}

fn one_hot(text: &[u32], device: &Device) -> Result<Tensor> {
    let ids = Tensor::from_slice(text, (text.len(), 1), device)?;
    let all = Tensor::arange(0, WORDS as u32, device)?.unsqueeze(0)?;
    ids.broadcast_eq(&all)?.to_dtype(DType::F32)
}

/// Sines and cosines of every position, with periods from 4 to 32 tokens.
fn positions(device: &Device) -> Result<Tensor> {
    let angle = |position: usize, pair: usize| {
        let period = 4.0 * 8_f32.powf(pair as f32 / (DIM / 2 - 1) as f32);
        std::f32::consts::TAU * position as f32 / period
    };
    let numbers = |position: usize| {
        (0..DIM / 2).flat_map(move |pair| {
            let (sin, cos) = angle(position, pair).sin_cos();
            [sin, cos]
        })
    };
    let data = (0..TOKENS).flat_map(numbers).collect::<Vec<f32>>();
    Tensor::from_vec(data, (TOKENS, DIM), device)
}

#[test]
fn it_learns() -> Result<()> {
    let mut losses = Vec::new();
    train(|_, loss| losses.push(loss))?;
    let (first, last) = (losses[0], losses[STEPS]);
    // From a guess to nearly always right.
    assert!((first - (WORDS as f32).ln()).abs() < 0.3 && last < 0.1, "from {first} to {last}");
    Ok(())
}
