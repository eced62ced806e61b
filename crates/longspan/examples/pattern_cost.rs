//! What patterns cost, relative to dense attention and to their pairs.
//!
//! ```text
//! cargo run --release -p longspan --example pattern_cost -- TOKENS DIM HEADS f32|bf16 ROUNDS PATTERN…
//! ```
//!
//! One line of JSON per pattern and pass: active pairs, build time of layouts in milliseconds,
//! milliseconds of dense attention and of the pattern as the cost model chooses (`chosen`), and, where
//! it has terms in an order of their own, in the order of tokens (`natural`) and as components
//! (`split`). Rounds of all are interleaved; times are the best of them. `full` is timed on an eighth of
//! the query rows from 131,072 tokens on.

#![expect(clippy::print_stdout, reason = "the figures are the program's result")]

use std::time::Instant;

use longspan::{
    Attention, Dims, Element, Gradients, Hook, Inputs, Layout, Options, Order, Output, Pattern,
    Shape, Tensor,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Query rows of dense attention are an eighth of the tokens from here on.
const LONG: usize = 1 << 17;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [tokens, dim, heads, dtype, rounds, patterns @ ..] = &args[..] else {
        return Err("usage: pattern_cost TOKENS DIM HEADS f32|bf16 ROUNDS PATTERN…".into());
    };
    let dims = Dims { batch: 1, tokens: tokens.parse()?, heads: heads.parse()?, dim: dim.parse()? };
    let rounds = rounds.parse()?;
    match dtype.as_str() {
        "f32" => run::<f32>(dims, rounds, patterns),
        "bf16" => run::<half::bf16>(dims, rounds, patterns),
        _ => Err("expected f32 or bf16".into()),
    }
}

/// An attention, its tensors, and the best time of each pass.
struct Case<E> {
    pattern: usize,
    name: &'static str,
    attention: Attention,
    q: Tensor<E>,
    dout: Tensor<E>,
    output: Output<E>,
    gradients: Gradients<E>,
    best: [f64; 2],
}

impl<E: Element> Case<E> {
    fn run(&mut self, k: &Tensor<E>, v: &Tensor<E>) -> Outcome<()> {
        let Case { attention, q, dout, output, gradients, best, .. } = self;
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let start = Instant::now();
        attention.forward_into(inputs, output.as_mut(), Hook::none())?;
        best[0] = best[0].min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let (into, hook) = (gradients.as_mut(), Hook::none());
        attention.backward_into(inputs, &*output, dout.view(), into, hook)?;
        best[1] = best[1].min(start.elapsed().as_secs_f64());
        Ok(())
    }
}

fn run<E: Element>(dims: Dims, rounds: usize, patterns: &[String]) -> Outcome<()> {
    let tokens = dims.tokens;
    let make = |tokens: usize, seed: usize| -> longspan::Result<Tensor<E>> {
        let dims = Dims { tokens, ..dims };
        let number = |i: usize| E::from_f32(((i * 7 + seed) as f32 * 0.37).sin());
        Tensor::new((0..dims.elements().unwrap_or(0)).map(number).collect(), dims, Order::Bhsd)
    };
    let (k, v) = (make(tokens, 1)?, make(tokens, 2)?);
    let options = Options::default();
    let case = |pattern, name, layout: Layout, split: Option<bool>| -> Outcome<Case<E>> {
        let (q, dout) = (make(layout.queries(), 3)?, make(layout.queries(), 4)?);
        let attention = Attention::new(layout).options(options.clone().split(split));
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let output = Output::zeros(q.view().dims(), Order::Bhsd)?;
        let gradients = attention.zero_gradients(&inputs)?;
        let best = [f64::INFINITY; 2];
        Ok(Case { pattern, name, attention, q, dout, output, gradients, best })
    };
    let queries = if tokens < LONG { tokens } else { tokens / 8 };
    let full = Layout::compile(&Pattern::full(), &Shape::new(queries, tokens))?;
    let mut cases = vec![case(usize::MAX, "dense", full, None)?];
    let mut about = Vec::new();
    for (index, text) in patterns.iter().enumerate() {
        let (pattern, shape): (Pattern, _) = (text.parse()?, Shape::new(tokens, tokens));
        let compile = || Layout::compile(&pattern, &shape);
        let start = Instant::now();
        let layout = compile()?;
        let has_split = layout.split()?.is_some();
        let built = start.elapsed().as_secs_f64();
        about.push((layout.counts()?.active_pairs, built));
        cases.push(case(index, "chosen", layout, None)?);
        if has_split {
            cases.push(case(index, "natural", compile()?, Some(false))?);
            cases.push(case(index, "split", compile()?, Some(true))?);
        }
    }
    for _ in 0..rounds {
        for case in &mut cases {
            case.run(&k, &v)?;
        }
    }
    let dense = cases[0].best.map(|best| best * tokens as f64 / queries as f64);
    for (index, (pattern, (pairs, built))) in patterns.iter().zip(about).enumerate() {
        for (pass, name) in ["forward", "backward"].into_iter().enumerate() {
            print!("{{\"pattern\": {pattern:?}, \"tokens\": {tokens}, \"dim\": {}, ", dims.dim);
            print!("\"heads\": {}, \"dtype\": \"{}\", \"pass\": \"{name}\", ", dims.heads, E::TYPE);
            print!(
                "\"pairs\": {pairs}, \"build\": {}, \"dense\": {}",
                built * 1e3,
                dense[pass] * 1e3
            );
            for case in cases.iter().filter(|case| case.pattern == index) {
                print!(", \"{}\": {}", case.name, case.best[pass] * 1e3);
            }
            println!("}}");
        }
    }
    Ok(())
}
