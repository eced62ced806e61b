//! How many threads a call could use: its tasks, timed on one thread, replayed on many.
//!
//! ```text
//! cargo run --release -p longspan --features fault-injection --example replay -- \
//!     TOKENS DIM HEADS f32|bf16 ROUNDS PATTERN…
//! ```
//!
//! Threads claim tasks in their order. A task of the backward pass waits for its turn at each part of dQ,
//! until the task before it in that part's chain has had its own. Both are replayed with the times of the
//! fastest of several rounds; what is no task takes as long on many threads as on one. The speed-up is what
//! the graph of tasks allows: caches, memory and clock rates that threads share are not in it.
//!
//! `dilated(w:r, …)` as a pattern is LongNet's attention with these branches.

#![expect(clippy::print_stdout, reason = "the figures are the program's result")]

use std::collections::HashMap;
use std::time::Instant;

use longspan::fault::{Piece, record_pieces, take_pieces};
use longspan::{
    Attention, Dilated, Dims, Element, Gradients, Hook, Inputs, Layout, Order, Output,
    OutputGradient, Pattern, Shape, Tensor,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const THREADS: [usize; 6] = [2, 4, 8, 16, 32, 64];

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [tokens, dim, heads, dtype, rounds, patterns @ ..] = &args[..] else {
        return Err("usage: replay TOKENS DIM HEADS f32|bf16 ROUNDS PATTERN…".into());
    };
    let dims = Dims { batch: 1, tokens: tokens.parse()?, heads: heads.parse()?, dim: dim.parse()? };
    let rounds = rounds.parse()?;
    println!("| pattern | pass | tasks | 1 thread, ms | speed-up on {THREADS:?} threads |");
    println!("|---|---|---|---|---|");
    for pattern in patterns {
        match dtype.as_str() {
            "f32" => run::<f32>(dims, rounds, pattern)?,
            "bf16" => run::<half::bf16>(dims, rounds, pattern)?,
            _ => return Err("expected f32 or bf16".into()),
        }
    }
    Ok(())
}

/// What computes both passes.
enum Engine {
    Pattern(Attention),
    Dilated(Dilated),
}

impl Engine {
    fn of(text: &str, tokens: usize) -> Outcome<Self> {
        let Some(branches) = text.strip_prefix("dilated(").and_then(|x| x.strip_suffix(')')) else {
            let layout = Layout::compile(&text.parse::<Pattern>()?, &Shape::new(tokens, tokens))?;
            layout.transpose()?;
            return Ok(Engine::Pattern(Attention::new(layout).threads(1)));
        };
        let branches = branches.split(',').map(|branch| {
            let (segment, rate) = branch.trim().split_once(':').ok_or("expected segment:rate")?;
            Ok((segment.parse()?, rate.parse()?))
        });
        let branches = branches.collect::<Outcome<Vec<(u64, u64)>>>()?;
        Ok(Engine::Dilated(Dilated::new(branches)?.threads(1)))
    }

    fn forward<E: Element>(&self, inputs: Inputs<'_, E>, out: &mut Output<E>) -> Outcome<()> {
        match self {
            Engine::Pattern(engine) => engine.forward_into(inputs, out.as_mut(), Hook::none())?,
            Engine::Dilated(engine) => engine.forward_into(inputs, out.as_mut(), Hook::none())?,
        }
        Ok(())
    }

    fn backward<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        out: &Output<E>,
        into: &mut Gradients<E>,
    ) -> Outcome<()> {
        let gradient = OutputGradient { dout: out.out.view(), dlse: None };
        match self {
            Engine::Pattern(engine) => {
                engine.backward_into(inputs, out, gradient, into.as_mut(), Hook::none())?;
            }
            Engine::Dilated(engine) => {
                engine.backward_into(inputs, out, gradient, into.as_mut(), Hook::none())?;
            }
        }
        Ok(())
    }
}

fn run<E: Element>(dims: Dims, rounds: usize, pattern: &str) -> Outcome<()> {
    let engine = Engine::of(pattern, dims.tokens)?;
    let tensor = |seed: usize| {
        let number = |i: usize| E::from_f32(((i * 7 + seed) as f32 * 0.37).sin());
        let numbers = (0..dims.elements().unwrap_or(0)).map(number);
        Tensor::new(numbers.collect(), dims, Order::Bhsd)
    };
    let (q, k, v) = (tensor(1)?, tensor(2)?, tensor(3)?);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let mut out = Output::zeros(dims, Order::Bhsd)?;
    let mut into = Gradients::zeros(&inputs)?;
    engine.forward(inputs, &mut out)?;
    let forward = recorded(rounds, || engine.forward(inputs, &mut out))?;
    let backward = recorded(rounds, || engine.backward(inputs, &out, &mut into))?;
    for (pass, (seconds, pieces)) in [("forward", forward), ("backward", backward)] {
        let busy: f64 = pieces.iter().map(|piece| piece.seconds).sum();
        let serial = (seconds - busy).max(0.0);
        let tasks = pieces.iter().filter(|piece| piece.chain.is_none()).count();
        let speed_up = |threads| seconds / (serial + replayed(&pieces, threads));
        let speed_ups = THREADS.map(|threads| format!("{:.1}", speed_up(threads))).join(", ");
        println!("| `{pattern}` | {pass} | {tasks} | {:.1} | {speed_ups} |", seconds * 1e3);
    }
    Ok(())
}

/// The fastest of several calls, and its pieces.
fn recorded(rounds: usize, mut call: impl FnMut() -> Outcome<()>) -> Outcome<(f64, Vec<Piece>)> {
    let mut best = (f64::INFINITY, Vec::new());
    for _ in 0..rounds {
        record_pieces();
        let start = Instant::now();
        call()?;
        let seconds = start.elapsed().as_secs_f64();
        let pieces = take_pieces();
        if seconds < best.0 {
            best = (seconds, pieces);
        }
    }
    Ok(best)
}

/// Seconds that the tasks take on so many threads.
fn replayed(pieces: &[Piece], threads: usize) -> f64 {
    let mut total = 0.0;
    for set in pieces.chunk_by(|a, b| a.set == b.set) {
        let mut free = vec![0.0_f64; threads];
        let mut chains: HashMap<usize, f64> = HashMap::new();
        for task in set.chunk_by(|a, b| a.task == b.task) {
            let thread = (0..threads).min_by(|&a, &b| free[a].total_cmp(&free[b])).expect("one");
            let mut now = free[thread];
            for piece in task {
                // A task that waits for its turn waits for ones that were claimed before it.
                let turn = piece.chain.map(|chain| chains.entry(chain).or_default());
                now = now.max(turn.as_deref().copied().unwrap_or(0.0)) + piece.seconds;
                if let Some(turn) = turn {
                    *turn = now;
                }
            }
            free[thread] = now;
        }
        total += free.into_iter().fold(0.0, f64::max);
    }
    total
}
