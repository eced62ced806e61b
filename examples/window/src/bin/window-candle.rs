//! A causal window with sinks, forward and backward, on candle's tensors.

use candle_core::{Device, Result, Tensor, Var};
use longspan::{Options, Padding, Shape};
use longspan_candle::{SparseAttention, attention_with_lse};

const TOKENS: usize = 301;
const HEAD_DIM: usize = 16;

/// The same numbers in every program of this folder.
fn tensor(seed: usize, heads: usize) -> Result<Var> {
    let value = |i: usize| ((7 * i + 13 * seed) % 31) as f32 / 16.0 - 0.9375;
    let values: Vec<f32> = (0..heads * TOKENS * HEAD_DIM).map(value).collect();
    Var::from_vec(values, (1, heads, TOKENS, HEAD_DIM), &Device::Cpu)
}

fn squares(tensor: &Tensor) -> Result<f64> {
    let values = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.iter().map(|&x| f64::from(x) * f64::from(x)).sum())
}

fn main() -> Result<()> {
    let sparse: SparseAttention = "causal & (window(64, 0) | sinks(4))".parse()?;
    let sparse = sparse.options(Options::default().scale(0.3).softcap(5.0).threads(2));
    let shape = Shape::new(TOKENS, TOKENS);
    let attention = sparse.compile(&shape, 4, &Padding::None(1))?;
    let counts = attention.layouts().get(0, 0).counts().map_err(candle_core::Error::wrap)?;

    let (q, k, v) = (tensor(0, 4)?, tensor(1, 2)?, tensor(2, 2)?);
    let (out, lse) = attention_with_lse(&attention, &q, &k, &v)?;
    let loss = (&out * tensor(3, 4)?.as_tensor())?.sum_all()?;
    let gradients = loss.backward()?;
    let gradient = |var: &Var| squares(gradients.get(var).expect("a gradient of every input"));

    println!(
        r#"{{"active_pairs": {}, "out": {}, "lse": {}, "dq": {}, "dk": {}, "dv": {}}}"#,
        counts.active_pairs,
        squares(&out)?,
        squares(&lse)?,
        gradient(&q)?,
        gradient(&k)?,
        gradient(&v)?,
    );
    Ok(())
}
