//! What patterns cost, relative to dense attention and to their pairs.
//!
//! ```text
//! cargo run --release -p longspan --example pattern_cost -- TOKENS DIM HEADS TYPE ROUNDS [PATTERN]…
//! ```
//!
//! For each pattern and pass: the share of active pairs; the time relative to `full` of the same
//! length, divided by that share, in natural order, as components, and as the cost model chooses.
//! Rounds of all are interleaved; times are the best of them. From 131,072 tokens on, dense attention
//! is timed on an eighth of the query rows.

#![expect(clippy::print_stdout, reason = "the figures are the program's result")]

use std::time::Instant;

use half::bf16;
use longspan::{
    Attention, Dims, Element, Gradients, Hook, Inputs, Layout, Options, Order, Output, Pattern,
    Shape, Tensor,
};

const PATTERNS: [&str; 6] = [
    "strided(64)",
    "strided(64) | window(64, 64)",
    "causal & (window(64, 0) | strided(128))",
    "dilated(2048, 4)",
    "dilated(2048, 4) | window(64, 64)",
    "hierarchical([(64, 1, 1), (512, 4, 16), (4096, 16, 64)])",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [tokens, dim, heads, dtype, rounds, patterns @ ..] = &args[..] else {
        return Err("usage: pattern_cost TOKENS DIM HEADS f32|bf16 ROUNDS [PATTERN]…".into());
    };
    let dims = Dims { batch: 1, tokens: tokens.parse()?, heads: heads.parse()?, dim: dim.parse()? };
    let mut patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
    if patterns.is_empty() {
        patterns = PATTERNS.to_vec();
    }
    let rounds = rounds.parse()?;
    match dtype.as_str() {
        "f32" => run::<f32>(dims, rounds, &patterns),
        "bf16" => run::<bf16>(dims, rounds, &patterns),
        _ => Err("TYPE is f32 or bf16".into()),
    }
}

/// An attention, its tensors and the best time of each pass.
struct Case<E> {
    attention: Attention,
    q: Tensor<E>,
    output: Output<E>,
    dout: Tensor<E>,
    gradients: Gradients<E>,
    best: [f64; 2],
}

fn run<E: Element>(
    dims: Dims,
    rounds: usize,
    patterns: &[&str],
) -> Result<(), Box<dyn std::error::Error>> {
    let tokens = dims.tokens;
    let options = Options::default();
    let make = |tokens: usize, seed: usize| -> Result<Tensor<E>, longspan::Error> {
        let dims = Dims { tokens, ..dims };
        let number = |i: usize| E::from_f32(((i * 7 + seed) as f32 * 0.37).sin());
        Tensor::new((0..dims.elements().unwrap_or(0)).map(number).collect(), dims, Order::Bhsd)
    };
    let (k, v) = (make(tokens, 1)?, make(tokens, 2)?);
    let dense = if tokens < 1 << 17 { tokens } else { tokens / 8 };
    let case = |layout: Layout, split| -> Result<Case<E>, longspan::Error> {
        let queries = layout.queries();
        let q = make(queries, 3)?;
        let attention = Attention::new(layout).options(options.clone().split(split));
        let output = attention.forward(Inputs::new(q.view(), k.view(), v.view()))?;
        let gradients = attention.zero_gradients(&Inputs::new(q.view(), k.view(), v.view()))?;
        let dout = make(queries, 4)?;
        Ok(Case { attention, q, output, dout, gradients, best: [f64::INFINITY; 2] })
    };
    let full = Layout::compile(&Pattern::full(), &Shape::new(dense, tokens))?;
    let mut cases = vec![case(full, None)?];
    let mut shares = Vec::new();
    for pattern in patterns {
        let start = Instant::now();
        let shape = Shape::new(tokens, tokens);
        let layout = || Layout::compile(&pattern.parse()?, &shape);
        let built = layout()?;
        let natural = start.elapsed();
        built.split()?;
        let all = start.elapsed();
        let pairs = built.counts()?.active_pairs as f64 / (tokens as f64).powi(2);
        println!(
            "{pattern}: {:.2} % of the pairs, built in {natural:.1?}, {all:.1?}",
            100.0 * pairs
        );
        shares.push(pairs);
        for split in [Some(false), Some(true), None] {
            cases.push(case(layout()?, split)?);
        }
    }
    for _ in 0..rounds {
        for case in &mut cases {
            let Case { attention, q, output, dout, gradients, best } = case;
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            let start = Instant::now();
            attention.forward_into(inputs, output.as_mut(), Hook::none())?;
            best[0] = best[0].min(start.elapsed().as_secs_f64());
            let start = Instant::now();
            let (into, hook) = (gradients.as_mut(), Hook::none());
            attention.backward_into(inputs, &*output, dout.view(), into, hook)?;
            best[1] = best[1].min(start.elapsed().as_secs_f64());
        }
    }
    let whole = cases[0].best.map(|best| best * tokens as f64 / dense as f64);
    println!("dense: forward {:.2} ms, backward {:.2} ms", whole[0] * 1e3, whole[1] * 1e3);
    println!("time of dense ÷ pairs: natural, components, chosen (forward; backward)");
    for ((pattern, pairs), cases) in patterns.iter().zip(&shares).zip(cases[1..].chunks(3)) {
        let ratio = |pass: usize| {
            let one = |case: &Case<E>| format!("{:6.2}", case.best[pass] / whole[pass] / pairs);
            cases.iter().map(one).collect::<Vec<_>>().join(" ")
        };
        println!("{};  {}   {pattern}", ratio(0), ratio(1));
    }
    Ok(())
}
