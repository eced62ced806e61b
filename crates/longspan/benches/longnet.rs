//! Dilated attention at the paper's five branches, from 8 k tokens on, beside dense attention of the
//! same head dim and the peak of multiply-adds.
//!
//! ```text
//! cargo bench -p longspan --bench longnet -- [--tokens 8192,65536] [--heads 4] [--dim 64] \
//!     [--threads 2] [--rounds 3] [--causal] [--union]
//! ```
//!
//! Every round measures the peak, dense attention at 4,096 tokens and then each length, so that all
//! see the same minutes; the best of the rounds counts. Time a token is time ÷ (tokens × heads).
//! Pairs are those that branches let through; where a key counts twice, it was computed twice.

// This is a program that prints.
#![allow(clippy::print_stdout)]

use std::num::NonZeroUsize;
use std::time::Instant;

use longspan::{
    Attention, Branch, Dilated, Dims, GradientsMut, Hook, Inputs, Isa, Layout, Order,
    OutputGradient, OutputMut, OutputRef, Overlap, Pattern, Result, Shape, Tensor, Threads, limits,
};

/// The paper's branches.
const BRANCHES: [(u64, u64); 5] = [(2_048, 1), (4_096, 2), (8_192, 4), (16_384, 6), (32_768, 12)];
/// Tokens of dense attention.
const DENSE: usize = 4_096;

struct Options {
    tokens: Vec<usize>,
    heads: usize,
    dim: usize,
    threads: NonZeroUsize,
    rounds: usize,
    causal: bool,
    union: bool,
}

/// Seconds of both passes, the best so far.
#[derive(Clone, Copy)]
struct Times {
    forward: f64,
    backward: f64,
}

/// What has both passes.
enum Engine {
    Dense(Attention),
    Dilated(Dilated),
}

impl Engine {
    fn forward(&self, inputs: Inputs<'_>, output: OutputMut<'_>) -> Result<()> {
        match self {
            Engine::Dense(attention) => attention.forward_into(inputs, output, Hook::none()),
            Engine::Dilated(dilated) => dilated.forward_into(inputs, output, Hook::none()),
        }
    }

    fn backward(
        &self,
        inputs: Inputs<'_>,
        saved: OutputRef<'_>,
        gradient: OutputGradient<'_>,
        into: GradientsMut<'_>,
    ) -> Result<()> {
        match self {
            Engine::Dense(attention) => {
                attention.backward_into(inputs, saved, gradient, into, Hook::none())
            }
            Engine::Dilated(dilated) => {
                dilated.backward_into(inputs, saved, gradient, into, Hook::none())
            }
        }
    }

    /// Both passes once, layouts and scratch made before.
    fn time(&self, options: &Options, tokens: usize) -> Result<Times> {
        let dims = Dims { batch: 1, tokens, heads: options.heads, dim: options.dim };
        let tensor = |phase: f32| {
            let numbers = (0..tokens * dims.heads * dims.dim)
                .map(|n| 1.5 * ((n % 1_000_003) as f32 * 0.37 + phase).sin())
                .collect();
            Tensor::new(numbers, dims, Order::Bshd)
        };
        let (q, k, v, dout) = (tensor(0.0)?, tensor(1.0)?, tensor(2.0)?, tensor(3.0)?);
        let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
        let mut out = Tensor::zeros(dims, Order::Bshd)?;
        let mut lse = vec![0.0; dims.heads * tokens];
        let mut lse_lo = lse.clone();
        let start = Instant::now();
        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: Some(&mut lse_lo) };
        self.forward(inputs, output)?;
        let forward = start.elapsed().as_secs_f64();
        let zeros = || Tensor::zeros(dims, Order::Bshd);
        let (mut dq, mut dk, mut dv) = (zeros()?, zeros()?, zeros()?);
        let start = Instant::now();
        let into = GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
        let (lse, lse_lo) = (&lse[..], Some(&lse_lo[..]));
        let (saved, gradient) = (
            OutputRef { out: out.view(), lse, lse_lo },
            OutputGradient { dout: dout.view(), dlse: None },
        );
        self.backward(inputs, saved, gradient, into)?;
        Ok(Times { forward, backward: start.elapsed().as_secs_f64() })
    }
}

/// Pairs that all branches let through, of all heads.
fn pairs(options: &Options, tokens: usize) -> f64 {
    let mut pairs = 0.0;
    for (segment, rate) in BRANCHES.map(|(w, r)| (w as usize, r as usize)) {
        for head in 0..options.heads {
            for start in (0..tokens).step_by(segment) {
                let end = tokens.min(start + segment);
                let seen = (start + head % rate..end).step_by(rate).len() as f64;
                pairs += if options.causal { seen * (seen + 1.0) / 2.0 } else { seen * seen };
            }
        }
    }
    pairs
}

fn options() -> Options {
    let mut options = Options {
        tokens: vec![8_192, 32_768, 131_072],
        heads: 4,
        dim: 64,
        threads: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        rounds: 2,
        causal: false,
        union: false,
    };
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(name) = arguments.next() {
        let mut number = || -> usize {
            let text = arguments.next().unwrap_or_default();
            text.parse().unwrap_or_else(|_| panic!("{name} {text:?}, expected a number"))
        };
        match name.as_str() {
            "--heads" => options.heads = number(),
            "--dim" => options.dim = number(),
            "--rounds" => options.rounds = number(),
            "--threads" => options.threads = NonZeroUsize::new(number()).expect("at least 1"),
            "--causal" => options.causal = true,
            "--union" => options.union = true,
            "--tokens" => {
                let list = arguments.next().unwrap_or_default();
                let number = |n: &str| n.parse().expect("--tokens is a list of numbers");
                options.tokens = list.split(',').map(number).collect();
            }
            other => panic!("unknown option {other}; the header of this file lists them"),
        }
    }
    options
}

fn main() -> Result<()> {
    let options = options();
    let isa = *Isa::available().last().expect("there is always one");
    let threads = Threads::Count(options.threads.get());
    let within = if options.causal { Pattern::causal() } else { Pattern::full() };
    let layout = Layout::compile(&within, &Shape::new(DENSE, DENSE))?;
    let dense = Engine::Dense(Attention::new(layout).threads(threads));
    let branches: Result<Vec<Branch>> = BRANCHES.iter().map(|&(w, r)| Branch::new(w, r)).collect();
    let overlap = if options.union { Overlap::Union } else { Overlap::Weighted };
    let dilated = Dilated::new(branches?)?.within(within).overlap(overlap).threads(threads);
    let dilated = Engine::Dilated(dilated);

    let mut peak = 0.0_f64;
    let lengths = std::iter::once(DENSE).chain(options.tokens.iter().copied());
    let mut best: Vec<(usize, Option<Times>)> = lengths.map(|tokens| (tokens, None)).collect();
    for _ in 0..options.rounds {
        for (place, (tokens, best)) in best.iter_mut().enumerate() {
            peak = peak.max(limits::fma_peak(isa, options.threads)?);
            let times = if place == 0 { &dense } else { &dilated }.time(&options, *tokens)?;
            let before = best.unwrap_or(times);
            *best = Some(Times {
                forward: before.forward.min(times.forward),
                backward: before.backward.min(times.backward),
            });
            eprintln!("{tokens} tokens: {:.2} s, {:.2} s", times.forward, times.backward);
        }
    }

    let Options { heads, dim, .. } = options;
    println!(
        "{heads} heads of {dim}, f32, {} threads, {isa}, FMA peak {peak:.0} GFLOP/s",
        options.threads
    );
    println!();
    println!(
        "| tokens | forward, µs a token | share of peak | backward, µs a token | share of peak |"
    );
    println!("|---|---|---|---|---|");
    for (place, (tokens, times)) in best.iter().enumerate() {
        let Some(times) = times else { continue };
        let dense = place == 0;
        let of = |n: usize| (n * n) as f64 * heads as f64 * if options.causal { 0.5 } else { 1.0 };
        let pairs = if dense { of(*tokens) } else { pairs(&options, *tokens) };
        let share = |flops: f64, seconds: f64| pairs * flops * dim as f64 / seconds / peak / 1e7;
        let token = |seconds: f64| seconds * 1e6 / (tokens * heads) as f64;
        println!(
            "| {tokens}{} | {:.2} | {:.0} % | {:.2} | {:.0} % |",
            if dense { ", dense" } else { "" },
            token(times.forward),
            share(4.0, times.forward),
            token(times.backward),
            share(10.0, times.backward),
        );
    }
    Ok(())
}
