//! Layouts are compiled once for all modules that share them.

use std::sync::Arc;

use crate::common::{numbers, random};
use candle_core::{Result, Tensor};
use longspan_candle::SparseAttention;
use longspan_candle::longspan::LayoutCache;

/// More rows of blocks than the cache lets pass.
const TOKENS: usize = 500;

fn input(batch: usize, tokens: usize) -> Result<Tensor> {
    random(9, (batch, 2, tokens, 8))
}

#[test]
fn lengths_are_compiled_once() -> Result<()> {
    let cache = Arc::new(LayoutCache::new(1 << 20));
    let layer =
        || Ok::<_, candle_core::Error>("causal".parse::<SparseAttention>()?.cache(cache.clone()));
    let layers = [layer()?, layer()?];
    for (batch, tokens) in [(1, TOKENS), (1, TOKENS), (2, TOKENS), (1, TOKENS + 1), (1, TOKENS)] {
        let x = input(batch, tokens)?;
        for layer in &layers {
            assert_eq!(layer.forward(&x, &x, &x)?.dims(), x.dims());
        }
    }
    assert_eq!(cache.stats().misses, 2);
    Ok(())
}

#[test]
fn threads_share_layer() -> Result<()> {
    let layer: SparseAttention = "causal & window(100, 0)".parse()?;
    let lengths = [TOKENS, TOKENS + 1, TOKENS, TOKENS + 2];
    let run = |tokens| {
        let x = input(1, tokens)?;
        numbers(&layer.forward(&x, &x, &x)?)
    };
    let alone = lengths.into_iter().map(run).collect::<Result<Vec<_>>>()?;
    let together = std::thread::scope(|scope| {
        let threads = lengths.map(|tokens| scope.spawn(move || run(tokens)));
        threads.map(|thread| thread.join().expect("no panic"))
    });
    for (alone, together) in alone.into_iter().zip(together) {
        assert_eq!(alone, together?);
    }
    Ok(())
}
