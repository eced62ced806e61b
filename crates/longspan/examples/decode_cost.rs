//! What compiling a layout costs beside a step of decoding.
//!
//! ```text
//! cargo run --release -p longspan --example decode_cost -- CONTEXT HEADS KEY_HEADS DIM
//! ```

#![expect(clippy::print_stdout, reason = "the figures are the program's result")]

use std::time::Instant;

use longspan::{Dims, Inputs, KvCache, Layout, Order, Pattern, Shape, Tensor};

/// The best of some rounds of `times` calls each, in seconds per call.
fn best(times: u32, mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        let start = Instant::now();
        (0..times).for_each(|_| work());
        best = best.min(start.elapsed().as_secs_f64() / f64::from(times));
    }
    best
}

fn main() -> longspan::Result<()> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|argument| argument.parse().expect("a number")).collect();
    let [context, heads, key_heads, dim] = numbers[..] else {
        panic!("expected CONTEXT HEADS KEY_HEADS DIM");
    };
    let tensor =
        |tokens, heads| Tensor::filled(0.1_f32, Dims { batch: 1, tokens, heads, dim }, Order::Bhsd);
    for text in [
        "causal",
        "causal & (window(4096, 0) | sinks(64))",
        "causal & (window(1024, 0) | sinks(64))",
    ] {
        let pattern: Pattern = text.parse()?;
        let mut cache = KvCache::new(pattern.clone()).capacity(context + 400);
        for _ in 0..context.div_ceil(4096) {
            let x = tensor(4096.min(context), key_heads)?;
            cache.append(x.view(), x.view())?;
        }
        let (q, k) = (tensor(1, heads)?, tensor(1, key_heads)?);
        let inputs = Inputs::new(q.view(), k.view(), k.view());
        let step = best(10, || {
            cache.step(inputs).expect("as before");
        });
        let keys = cache.len(0);
        let compile = best(100, || {
            Layout::compile(&pattern, &Shape::new(1, keys)).expect("as before");
        });
        println!(
            "{text}: {keys} tokens, {} slots, a step {:.1} µs, a layout {:.2} µs, {:.2} %",
            cache.slots(),
            step * 1e6,
            compile * 1e6,
            100.0 * compile / step,
        );
    }
    Ok(())
}
