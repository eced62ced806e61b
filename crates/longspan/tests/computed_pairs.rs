//! Scores that kernels compute for strided and dilated patterns, active or not.

#![expect(clippy::print_stdout, reason = "figures, with --no-capture")]

use longspan::fault::take_pairs;
use longspan::{Attention, Dims, Inputs, Layout, Order, Shape, Tensor};

const TOKENS: usize = 16_384;

/// Patterns, and the most scores per active pair, forward and backward. What is beyond 1 are blocks at the
/// edges of windows and of causal views, where keys that no query of a group attends to are left out.
const PATTERNS: [(&str, [f64; 2]); 5] = [
    ("strided(64)", [1.02, 1.02]),
    ("dilated(2048, 4)", [1.02, 1.02]),
    ("strided(64) | window(64, 64)", [1.20, 1.20]),
    ("dilated(2048, 4) | window(64, 64)", [1.20, 1.20]),
    ("causal & (window(64, 0) | strided(128))", [1.40, 1.40]),
];

/// One test: the count is that of the process.
#[test]
fn scores_are_little_more_than_the_active_pairs() {
    let dims = Dims { batch: 1, tokens: TOKENS, heads: 1, dim: 16 };
    let [q, k, v, dout] =
        [0.1, 0.2, 0.3, 0.4].map(|x| Tensor::filled(x, dims, Order::Bhsd).unwrap());
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    for (text, most) in PATTERNS {
        let layout = Layout::compile(&text.parse().unwrap(), &Shape::new(TOKENS, TOKENS)).unwrap();
        let active = layout.counts().unwrap().active_pairs as f64;
        let attention = Attention::new(layout);
        take_pairs();
        let output = attention.forward(inputs).unwrap();
        let forward = take_pairs() as f64 / active;
        attention.backward(inputs, &output, dout.view()).unwrap();
        let backward = take_pairs() as f64 / active;
        println!("{text}: {forward:.3} forward, {backward:.3} backward");
        assert!(1.0 <= forward && forward <= most[0], "{text}: {forward} forward");
        assert!(1.0 <= backward && backward <= most[1], "{text}: {backward} backward");
    }
}
