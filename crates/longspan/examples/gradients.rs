//! Forward and backward pass over a sliding window with attention sinks.
//!
//! ```sh
//! cargo run --release -p longspan --example gradients
//! ```

#![expect(clippy::print_stdout, reason = "the norms are the example's result")]

use longspan::{Attention, Dims, Inputs, Layout, Order, Pattern, Shape, Tensor};

fn main() -> Result<(), longspan::Error> {
    let tokens = 4_096;
    let pattern: Pattern = "causal & (window(256, 0) | sinks(16))".parse()?;
    let layout = Layout::compile(&pattern, &Shape::new(tokens, tokens))?;
    println!("{pattern}: {:.2} % of all pairs", 100.0 * layout.density()?);

    let dims = Dims { batch: 1, tokens, heads: 4, dim: 64 };
    let wave = |step: f32| (0..4_096 * 4 * 64).map(|i| (i as f32 * step).sin()).collect();
    let tensor = |step| Tensor::new(wave(step), dims, Order::Bshd);
    let (q, k, v, dout) = (tensor(0.7)?, tensor(1.1)?, tensor(1.3)?, tensor(1.7)?);
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };

    let attention = Attention::new(layout);
    let output = attention.forward(inputs)?;
    let gradients = attention.backward(inputs, &output, dout.view())?;
    for (name, gradient) in [("dq", gradients.dq), ("dk", gradients.dk), ("dv", gradients.dv)] {
        let squares: f32 = gradient.as_slice().iter().map(|x| x * x).sum();
        println!("|{name}| = {:.4}", squares.sqrt());
    }
    Ok(())
}
