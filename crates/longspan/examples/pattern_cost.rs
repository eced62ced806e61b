//! What patterns cost, relative to dense attention and to their pairs.
//!
//! ```text
//! cargo run --release -p longspan --example pattern_cost -- \
//!     TOKENS DIM HEADS f32|bf16 ROUNDS chosen|both PATTERN…
//! ```
//!
//! One line of JSON per pattern and pass: active pairs, build time of layouts in milliseconds, bytes of
//! inputs, results and workspace, milliseconds of dense attention and of the pattern as the cost model
//! chooses (`chosen`), and, with `both` in place of `chosen` and where it has terms in an order of
//! their own, in the order of tokens (`natural`) and as components (`split`). Rounds of all are
//! interleaved; times are the best of them. `full` is timed on an eighth of the query rows from 131,072
//! tokens on.

#![expect(clippy::print_stdout, reason = "the figures are the program's result")]

use std::time::Instant;

use longspan::{
    Attention, Dims, Element, Gradients, Hook, Inputs, Layout, Order, Output, Pass, Pattern, Shape,
    Tensor,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Query rows of dense attention are an eighth of the tokens from here on.
const LONG: usize = 1 << 17;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [tokens, dim, heads, dtype, rounds, orders, patterns @ ..] = &args[..] else {
        let usage = "pattern_cost TOKENS DIM HEADS f32|bf16 ROUNDS chosen|both PATTERN…";
        return Err(format!("usage: {usage}").into());
    };
    let both = match orders.as_str() {
        "chosen" => false,
        "both" => true,
        _ => return Err("expected chosen or both".into()),
    };
    let dims = Dims { batch: 1, tokens: tokens.parse()?, heads: heads.parse()?, dim: dim.parse()? };
    let rounds = rounds.parse()?;
    match dtype.as_str() {
        "f32" => run::<f32>(dims, rounds, both, patterns),
        "bf16" => run::<half::bf16>(dims, rounds, both, patterns),
        _ => Err("expected f32 or bf16".into()),
    }
}

/// Shorter passes are timed three times per round.
const SHORT: f64 = 0.05;

/// An attention, and the best time of each pass.
struct Case {
    pattern: usize,
    name: &'static str,
    attention: Attention,
    best: [f64; 2],
}

/// What a case reads and writes, besides keys and values.
struct Tensors<E> {
    q: Tensor<E>,
    dout: Tensor<E>,
    output: Output<E>,
    gradients: Gradients<E>,
}

impl Case {
    fn run<E: Element>(
        &mut self,
        of: &mut Tensors<E>,
        k: &Tensor<E>,
        v: &Tensor<E>,
    ) -> Outcome<()> {
        let (attention, Tensors { q, dout, output, gradients }) = (&self.attention, of);
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        time(&mut self.best[0], || attention.forward_into(inputs, output.as_mut(), Hook::none()))?;
        time(&mut self.best[1], || {
            let (into, hook) = (gradients.as_mut(), Hook::none());
            attention.backward_into(inputs, &*output, dout.view(), into, hook)
        })
    }
}

fn time(best: &mut f64, mut pass: impl FnMut() -> longspan::Result<()>) -> Outcome<()> {
    for _ in 0..3 {
        let start = Instant::now();
        pass()?;
        let seconds = start.elapsed().as_secs_f64();
        *best = best.min(seconds);
        if seconds > SHORT {
            break;
        }
    }
    Ok(())
}

fn run<E: Element>(dims: Dims, rounds: usize, both: bool, patterns: &[String]) -> Outcome<()> {
    let tokens = dims.tokens;
    let make = |tokens: usize, seed: usize| -> longspan::Result<Tensor<E>> {
        let dims = Dims { tokens, ..dims };
        let number = |i: usize| E::from_f32(((i * 7 + seed) as f32 * 0.37).sin());
        Tensor::new((0..dims.elements().unwrap_or(0)).map(number).collect(), dims, Order::Bhsd)
    };
    let (k, v) = (make(tokens, 1)?, make(tokens, 2)?);
    let tensors = |queries: usize| -> Outcome<Tensors<E>> {
        let (q, dout) = (make(queries, 3)?, make(queries, 4)?);
        let gradients = Gradients::zeros(&Inputs::new(q.view(), k.view(), v.view()))?;
        let output = Output::zeros(q.view().dims(), Order::Bhsd)?;
        Ok(Tensors { q, dout, output, gradients })
    };
    let case = |pattern, name, layout: Layout, split: Option<bool>| {
        let attention = Attention::new(layout).split(split);
        Case { pattern, name, attention, best: [f64::INFINITY; 2] }
    };
    let queries = if tokens < LONG { tokens } else { tokens / 8 };
    let full = Layout::compile(&Pattern::full(), &Shape::new(queries, tokens))?;
    let mut dense = case(usize::MAX, "dense", full, None);
    let (mut cases, mut about) = (Vec::new(), Vec::new());
    for (index, text) in patterns.iter().enumerate() {
        let (pattern, shape): (Pattern, _) = (text.parse()?, Shape::new(tokens, tokens));
        let compile = || Layout::compile(&pattern, &shape);
        let start = Instant::now();
        let layout = compile()?;
        let has_split = layout.split()?.is_some();
        let built = start.elapsed().as_secs_f64();
        let pairs = layout.counts()?.active_pairs;
        let chosen = case(index, "chosen", layout, None);
        let needed = |pass| chosen.attention.bytes_needed::<E>([dims; 3], pass);
        about.push((pairs, built, [needed(Pass::Forward)?, needed(Pass::Backward)?]));
        cases.push(chosen);
        if has_split && both {
            cases.push(case(index, "natural", compile()?, Some(false)));
            cases.push(case(index, "split", compile()?, Some(true)));
        }
    }
    let mut all = tensors(tokens)?;
    let mut few = if queries < tokens { Some(tensors(queries)?) } else { None };
    for _ in 0..rounds {
        dense.run(few.as_mut().unwrap_or(&mut all), &k, &v)?;
        for case in &mut cases {
            case.run(&mut all, &k, &v)?;
        }
    }
    let inputs_bytes = 3 * dims.elements().unwrap_or(0) * size_of::<E>();
    let dense = dense.best.map(|best| best * tokens as f64 / queries as f64);
    for (index, (pattern, (pairs, built, needed))) in patterns.iter().zip(about).enumerate() {
        for (pass, name) in ["forward", "backward"].into_iter().enumerate() {
            print!("{{\"pattern\": {pattern:?}, \"tokens\": {tokens}, \"dim\": {}, ", dims.dim);
            print!("\"heads\": {}, \"dtype\": \"{}\", \"pass\": \"{name}\", ", dims.heads, E::TYPE);
            let [built, dense] = [built, dense[pass]].map(|seconds| seconds * 1e3);
            print!("\"pairs\": {pairs}, \"build\": {built}, \"dense\": {dense}");
            let bytes = inputs_bytes + needed[pass];
            print!(", \"bytes\": {bytes}");
            for case in cases.iter().filter(|case| case.pattern == index) {
                print!(", \"{}\": {}", case.name, case.best[pass] * 1e3);
            }
            println!("}}");
        }
    }
    Ok(())
}
