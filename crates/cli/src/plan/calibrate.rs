//! `longspan plan --calibrate`: micro-benchmarks of this machine.
//!
//! | what | how |
//! |---|---|
//! | rate in Full blocks | `full`, one call after another |
//! | rate in Partial blocks | `window(63, 0)`, which has Partial blocks only |
//! | latency, bandwidth | hops of small and large messages between two threads |
//! | handling | a pass between two threads with much to send and little to compute, less the same alone |
//!
//! Ranks on one machine share its cores, caches and memory: with `--per-node N`, N ranks compute
//! concurrently, and the rate is per rank.
//!
//! The planned ring itself is never run.

use std::io::{Write, stdout};
use std::num::NonZeroUsize;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Result;
use longspan::{
    Attention, Dims, Element, ElementType, GradientsMut, Hook, Inputs, Layout, Order,
    OutputGradient, OutputMut, OutputRef, Pattern, RowStatistics, Shape, State, Tensor, Threads,
    row_deltas,
};
use longspan_ring::{
    Buffer, Hop, Incoming, Local, Options, Outgoing, Problem, Ring, Shards, Transport,
};

use super::machine::{Kernel, Link, Machine, Rate};
use crate::args::Plan;
use crate::element::with_element;
use crate::number::{bytes, count, significant};
use crate::progress::Stage;
use crate::{choice, machine as host, random, table};

/// Query heads of the measurements: enough work for every thread.
const HEADS: usize = 8;
/// Tokens of the dense call.
const DENSE: usize = 1_024;
/// Tokens of the call without Full blocks.
const MASKED: usize = 8_192;
/// Measurement intervals per kind of call, their length, and their minimum number of calls.
const INTERVALS: usize = 4;
const INTERVAL: Duration = Duration::from_millis(250);
const MIN_CALLS: usize = 4;

/// `longspan plan --calibrate`
pub(super) fn run(args: &Plan) -> Result<()> {
    let isa = choice::isa(None)?.value;
    let threads = choice::threads(args.threads)?.value;
    let ranks = args.per_node.unwrap_or(NonZeroUsize::MIN);
    let dim = args.tensors.head_dim();
    let mut kernels = Vec::new();
    for element in [ElementType::F32, ElementType::Bf16, ElementType::F16] {
        let stage = Stage::new(format!("measuring kernels on {element}"));
        kernels.push(with_element!(element, E => kernel::<E>(dim, threads, ranks))?);
        drop(stage);
    }
    let stage = Stage::new("measuring messages");
    let near = link();
    let handling = handling(ranks.get().max(2))?;
    drop(stage);
    let memory = [host::memory("MemTotal"), host::memory_limit()].into_iter().flatten().min();
    let cpu = host::cpu_model().unwrap_or_else(|| "a CPU".into());
    let each = count(threads.get(), "thread");
    let each = match ranks.get() {
        1 => each,
        ranks => format!("{ranks} concurrent ranks of {each}"),
    };
    let used = format!("{isa}, {each}, head dim {dim}");
    let machine = Machine {
        name: "this".into(),
        sources: vec![format!("measured here: {cpu}, {used}")],
        memory_bytes: memory.unwrap_or(u64::MAX) as f64,
        kernels,
        handling_seconds_per_byte: handling,
        ranks_per_node: None,
        near,
        far: None,
    };
    let path = machine.save(args.out.as_deref())?;

    let mut out = stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&machine)?)?;
        return Ok(out.flush()?);
    }
    writeln!(out, "{:<15}{cpu}, {used}", "machine")?;
    if cfg!(debug_assertions) {
        writeln!(out, "{:<15}without optimization: rates are not representative", "built")?;
    }
    let speed = significant(near.bytes_per_second / 1e9);
    let latency = significant(near.latency_seconds * 1e6);
    writeln!(out, "{:<15}{speed} GB/s, {latency} µs between threads", "messages")?;
    let each = significant(handling * 1e9);
    writeln!(out, "{:<15}{each} ns per byte to pack, check and unpack", "")?;
    writeln!(out, "{:<15}{}", "memory", bytes(machine.memory_bytes as usize))?;
    writeln!(out, "{:<15}{}", "saved to", path.display())?;
    writeln!(out)?;
    let header = ["GFLOP/s", "forward", "masked", "backward", "masked", ""];
    let mut rows = vec![header.map(String::from)];
    rows.extend(machine.kernels.iter().map(|Kernel { dtype, forward, backward }| {
        let giga = |rate: f64| significant(rate / 1e9);
        let rates = [forward.full, forward.partial, backward.full, backward.partial].map(giga);
        let [a, b, c, d] = rates;
        [dtype.clone(), a, b, c, d, String::new()]
    }));
    table::print(&rows, 1, &mut out)?;
    Ok(out.flush()?)
}

/// Rates of the kernels for one dtype, per rank, with `ranks` ranks computing concurrently.
fn kernel<E: Element>(dim: usize, threads: NonZeroUsize, ranks: NonZeroUsize) -> Result<Kernel> {
    let (full, masked) = (Pattern::full(), Pattern::window(63, 0)?);
    let together = Barrier::new(ranks.get());
    let measure = || -> Result<[[f64; 2]; 2]> {
        let dense = passes::<E>(&full, DENSE, dim, threads, &together)?;
        Ok([dense, passes::<E>(&masked, MASKED, dim, threads, &together)?])
    };
    let found = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks.get()).map(|_| scope.spawn(measure)).collect();
        let joined = ranks.into_iter().map(|rank| rank.join().expect("a rank that ends"));
        joined.collect::<Result<Vec<_>>>()
    })?;
    let typical = |kind: usize, pass: usize| median(found.iter().map(|r| r[kind][pass]).collect());
    let rate = |pass: usize| Rate { full: typical(0, pass), partial: typical(1, pass) };
    Ok(Kernel { dtype: E::TYPE.to_string(), forward: rate(0), backward: rate(1) })
}

/// FLOP/s forward and backward, over all pairs of the pattern's active blocks; called as by a ring,
/// into a softmax state and into accumulators.
fn passes<E: Element>(
    pattern: &Pattern,
    tokens: usize,
    dim: usize,
    threads: NonZeroUsize,
    together: &Barrier,
) -> Result<[f64; 2]> {
    let layout = Layout::compile(pattern, &Shape::new(tokens, tokens))?;
    let pairs = layout.counts()?.active_blocks() as f64 * 64.0 * 64.0 * HEADS as f64;
    let attention = Attention::new(layout).threads(threads.get());
    let dims = Dims { batch: 1, tokens, heads: HEADS, dim };
    let order = Order::Bhsd;
    let numbers = HEADS * tokens * dim;
    let make = |seed| Tensor::new(random::normals::<E>(seed, numbers, threads), dims, order);
    let (q, k, v, dout) = (make(0)?, make(1)?, make(2)?, make(3)?);
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let mut state = State::empty(dims)?;
    let forward = typical(together, || attention.extend(inputs, &mut state, Hook::none()))?;

    let rows = HEADS * tokens;
    let (mut lse, mut rest, mut delta) = (vec![0.0; rows], vec![0.0; rows], vec![0.0; rows]);
    let mut out = Tensor::<E>::zeros(dims, order)?;
    let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: Some(&mut rest) };
    attention.forward_into(inputs, output, Hook::none())?;
    let (saved, gradient) = (
        OutputRef { out: out.view(), lse: &lse, lse_lo: Some(&rest) },
        OutputGradient { dout: dout.view(), dlse: None },
    );
    row_deltas(saved, gradient, &mut delta)?;
    let zeros = || Tensor::<f32>::zeros(dims, order);
    let (mut dq, mut dk, mut dv) = (zeros()?, zeros()?, zeros()?);
    let rows = RowStatistics { lse: &lse, lse_lo: Some(&rest), delta: &delta };
    let backward = typical(together, || {
        let into = GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
        attention.accumulate(inputs, dout.view(), rows, into, Hook::none())
    })?;
    let flops = pairs * dim as f64;
    Ok([4.0 * flops / forward, 10.0 * flops / backward])
}

/// Seconds per call: the mean over the best of a few intervals in which all ranks compute. Where
/// ranks share cores, single calls vary widely.
fn typical(
    together: &Barrier,
    mut call: impl FnMut() -> longspan::Result<()>,
) -> longspan::Result<f64> {
    // All ranks make the same calls, and fail alike.
    call()?;
    let mut best = f64::INFINITY;
    for _ in 0..INTERVALS {
        together.wait();
        let (start, mut calls) = (Instant::now(), 0);
        while calls < MIN_CALLS || start.elapsed() < INTERVAL {
            call()?;
            calls += 1;
        }
        best = best.min(start.elapsed().as_secs_f64() / calls as f64);
    }
    // A coarse clock may measure 0.
    Ok(best.max(1e-9))
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers[numbers.len() / 2].max(1e-9)
}

/// Latency and bandwidth of messages between threads.
fn link() -> Link {
    let hop = |size: usize, times: usize| {
        let mut ends = Local::ranks(2).into_iter();
        let work = |mut transport: Local| {
            let peer = 1 - transport.rank();
            let mut sends = [Outgoing { to: peer, bytes: Buffer::zeroed(size) }];
            let mut receives = [Incoming { from: peer, bytes: Buffer::zeroed(size) }];
            let mut seconds = Vec::new();
            for _ in 0..times {
                let start = Instant::now();
                let timeout = Duration::from_secs(60);
                let hop = Hop { sends: &mut sends, receives: &mut receives, timeout };
                if transport.hop(hop, &mut |_| ()).is_err() {
                    break;
                }
                seconds.push(start.elapsed().as_secs_f64());
            }
            seconds
        };
        std::thread::scope(|scope| {
            let (first, second) = (ends.next(), ends.next());
            let other = scope.spawn(move || second.map(work));
            let seconds = first.map(work).unwrap_or_default();
            drop(other);
            median(if seconds.is_empty() { vec![1e-6] } else { seconds })
        })
    };
    const LARGE: usize = 16 << 20;
    let latency_seconds = hop(8, 2_000);
    let seconds = (hop(LARGE, 12) - latency_seconds).max(1e-9);
    Link { latency_seconds, bytes_per_second: LARGE as f64 / seconds }
}

/// CPU seconds per byte of a message, between `ranks` ranks.
fn handling(ranks: usize) -> Result<f64> {
    const TOKENS: usize = 64;
    const BATCH: usize = 16;
    const TIMES: usize = 9;
    // Wall time of a forward pass less that in kernels.
    let beside = |ranks: usize| -> Result<(f64, u64)> {
        let shards = Shards::contiguous(ranks * TOKENS, ranks, TOKENS)?;
        let problem = Problem::new(Pattern::full(), shards).batch(BATCH).heads(16, 16).dims(64, 64);
        let run = |transport: Local| -> longspan_ring::Result<(Vec<f64>, u64)> {
            let threads = Threads::Count(1);
            let options = Options { threads, ..Options::default() };
            let mut ring = Ring::new(transport, problem.clone(), options)?;
            let dims = Dims { batch: BATCH, tokens: TOKENS, heads: 16, dim: 64 };
            let x = Tensor::filled(0.5_f32, dims, Order::Bhsd)?;
            let mut seconds = Vec::new();
            for _ in 0..TIMES {
                let (start, before) = (Instant::now(), ring.tally());
                ring.forward(Inputs::new(x.view(), x.view(), x.view()))?;
                let computing = ring.tally().computing - before.computing;
                seconds.push(start.elapsed().saturating_sub(computing).as_secs_f64());
            }
            let tally = ring.tally();
            Ok((seconds, (tally.sent + tally.received) / TIMES as u64))
        };
        let run = &run;
        let found = std::thread::scope(|scope| {
            let ranks = Local::ranks(ranks).into_iter();
            let ranks: Vec<_> =
                ranks.map(|transport| scope.spawn(move || run(transport))).collect();
            ranks.into_iter().next().map(|rank| rank.join().expect("a rank that ends"))
        });
        let (seconds, moved) = found.expect("at least one rank")?;
        Ok((median(seconds), moved))
    };
    let ((alone, _), (together, moved)) = (beside(1)?, beside(ranks)?);
    Ok((together - alone).max(0.0) / moved as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_handling_take_time() {
        let link = link();
        assert!(link.latency_seconds > 0.0 && link.latency_seconds < 1.0, "{link:?}");
        assert!(link.bytes_per_second > 1e6, "{link:?}");
        assert!(handling(2).unwrap() < 1e-6 && handling(3).unwrap() < 1e-6);
    }
}
