//! A causal window with sinks, forward and backward, on slices.

use longspan::{Attention, Dims, Inputs, Layout, Order, Pattern, Shape, Tensor};

const TOKENS: usize = 301;
const HEAD_DIM: usize = 16;

/// The same numbers in every program of this folder.
fn tensor(seed: usize, heads: usize) -> longspan::Result<Tensor<f32>> {
    let dims = Dims { batch: 1, tokens: TOKENS, heads, dim: HEAD_DIM };
    let value = |i: usize| ((7 * i + 13 * seed) % 31) as f32 / 16.0 - 0.9375;
    Tensor::new((0..heads * TOKENS * HEAD_DIM).map(value).collect(), dims, Order::Bhsd)
}

fn squares(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x) * f64::from(x)).sum()
}

fn main() -> longspan::Result<()> {
    let pattern: Pattern = "causal & (window(64, 0) | sinks(4))".parse()?;
    let layout = Layout::compile(&pattern, &Shape::new(TOKENS, TOKENS))?;
    let active_pairs = layout.counts()?.active_pairs;
    let attention = Attention::new(layout).scale(0.3).softcap(5.0).threads(2);

    let (q, k, v) = (tensor(0, 4)?, tensor(1, 2)?, tensor(2, 2)?);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let output = attention.forward(inputs)?;
    let gradients = attention.backward(inputs, &output, tensor(3, 4)?.view())?;

    println!(
        r#"{{"active_pairs": {active_pairs}, "out": {}, "lse": {}, "dq": {}, "dk": {}, "dv": {}}}"#,
        squares(output.out.as_slice()),
        squares(&output.lse),
        squares(gradients.dq.as_slice()),
        squares(gradients.dk.as_slice()),
        squares(gradients.dv.as_slice()),
    );
    Ok(())
}
