//! Four ranks in one process, one thread per rank: each holds a quarter of the sequence and computes
//! its own rows.
//!
//! ```sh
//! cargo run --release -p longspan-ring --example threads
//! ```

#![expect(clippy::print_stdout, reason = "the ranks' results are the example's result")]

use longspan::{Dims, Inputs, Order, Pattern, Tensor};
use longspan_ring::{Local, Options, Problem, Result, Ring, Shards};

const RANKS: usize = 4;
const TOKENS: usize = 4_096;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let pattern: Pattern = "causal & window(512, 0)".parse()?;
    let shards = Shards::contiguous(TOKENS, RANKS, 64)?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Local::ranks(RANKS)
            .into_iter()
            .map(|transport| {
                let problem = Problem::new(pattern.clone(), shards.clone()).dims(32, 32);
                scope.spawn(move || one_rank(transport, problem))
            })
            .collect();
        for (rank, thread) in ranks.into_iter().enumerate() {
            let sum = thread.join().expect("a rank panicked")?;
            println!("rank {rank}: {} rows, sum of the output {sum:.4}", TOKENS / RANKS);
        }
        Ok(())
    })
}

fn one_rank(transport: Local, problem: Problem) -> Result<f32> {
    let mut ring = Ring::new(transport, problem, Options::default())?;
    let dims = Dims { batch: 1, tokens: TOKENS / RANKS, heads: 1, dim: 32 };
    let data = (0..TOKENS / RANKS * 32).map(|i| (i as f32).sin()).collect();
    let x = Tensor::new(data, dims, Order::Bshd)?;
    let output = ring.forward(Inputs::new(x.view(), x.view(), x.view()))?;
    Ok(output.out.as_slice().iter().sum())
}
