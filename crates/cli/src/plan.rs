//! `longspan plan`: what a ring would take, before anybody rents it.
//!
//! ```text
//! pattern, shards ──Outlines──▶ the schedule of some ranks ──simulate──▶ timelines ──▶ report
//!                                          machine ──────────────┘
//! ```

mod advice;
mod calibrate;
mod machine;
mod report;
mod simulate;

use std::io::{Write, stdout};
use std::path::Path;

use anyhow::{Context, Result};
use longspan::{ElementType, Heads};
use longspan_ring::{Outline, Outlines, Problem, Shards};

use crate::args::{Map, Network, Plan};
use crate::compile::{self, BadInput};
use crate::plot::{self, Format};
use crate::progress::Stage;
use machine::Link;
pub(crate) use machine::Machine;
use simulate::Pace;
pub(crate) use simulate::{Span, Timeline};

/// Query heads where neither an option nor the pattern says how many.
const HEADS: usize = 8;
/// Ranks up to which all are simulated.
const ALL: usize = 64;
/// Ranks that are simulated of more.
const SOME: usize = 8;
/// Blocks of queries that are looked at to find the rank that has most to do.
const ROWS: u64 = 1 << 18;

/// What is planned.
pub(crate) struct Sizes {
    pub(crate) tokens: u64,
    pub(crate) ranks: usize,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) element: ElementType,
}

/// A pass of all simulated ranks.
pub(crate) struct PassPlan {
    pub(crate) name: &'static str,
    pub(crate) timelines: Vec<Timeline>,
    /// Bytes that each of them receives.
    pub(crate) received: Vec<u64>,
    /// Bytes that one needs at most: tensors, sums and messages.
    pub(crate) memory: u64,
}

impl PassPlan {
    /// The rank that ends last.
    pub(crate) fn slowest(&self) -> &Timeline {
        let last = self.timelines.iter().max_by(|a, b| a.end().total_cmp(&b.end()));
        last.expect("at least one rank")
    }
}

/// All that there is to say.
pub(crate) struct Planned {
    pub(crate) pattern: Heads,
    pub(crate) map: Map,
    pub(crate) sizes: Sizes,
    pub(crate) machine: Machine,
    /// Largest ÷ mean of the pairs that ranks compute.
    pub(crate) imbalance: f64,
    pub(crate) passes: [PassPlan; 2],
}

/// `longspan plan`
pub(crate) fn run(args: &Plan) -> Result<()> {
    if args.calibrate {
        return calibrate::run(args);
    }
    let format = args.plot.as_deref().map(format_of).transpose()?;
    let planned = plan(args)?;
    if let (Some(path), Some(format)) = (&args.plot, format) {
        let picture = plot::timelines(&planned, format)?;
        std::fs::write(path, &picture.file)
            .with_context(|| format!("can't write {}", path.display()))?;
    }
    let mut out = stdout().lock();
    match args.json {
        true => report::json(&planned, &mut out)?,
        false => report::table(&planned, args.plot.as_deref(), &mut out)?,
    }
    out.flush()?;
    Ok(())
}

fn format_of(path: &Path) -> Result<Format> {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("svg") => Ok(Format::Svg),
        Some("png") => Ok(Format::Png),
        _ => {
            let message =
                format!("--plot {}: expected a name that ends in .svg or .png", path.display());
            Err(BadInput(message).into())
        }
    }
}

fn plan(args: &Plan) -> Result<Planned> {
    let pattern = compile::patterns(args.pattern.as_deref().unwrap_or_default())?;
    let sizes = sizes(args, &pattern)?;
    let machine = machine(args)?;
    let kernel = machine.kernel(sizes.element)?.clone();

    let stage = Stage::new("dealing out tokens");
    let shards = shards(args, &pattern, &sizes)?;
    drop(stage);
    let problem = Problem::new(pattern.clone(), shards)
        .batch(sizes.batch)
        .heads(sizes.heads, sizes.kv_heads)
        .dims(sizes.dim, sizes.value_dim)
        .element(sizes.element);
    let (outlines, imbalance) = outlines(args, &problem, &sizes)?;

    let Sizes { dim, value_dim, batch, .. } = sizes;
    let flops = [dim + value_dim, 3 * dim + 2 * value_dim].map(|dims| 2.0 * (dims * batch) as f64);
    let rates = [kernel.forward, kernel.backward];
    let names = ["forward", "backward"];
    let stages = simulate::passes(&outlines);
    let passes = [0, 1].map(|pass| {
        let pace = Pace { rate: rates[pass], flops_a_pair: flops[pass] };
        let tensors = [forward_bytes, backward_bytes][pass];
        let received = |(_, stages): &(usize, &[longspan_ring::Stage])| {
            stages.iter().map(longspan_ring::Stage::received).sum::<u64>()
        };
        let memory = |outline: &Outline| {
            let stages = [&outline.forward, &outline.backward][pass];
            tensors(&sizes, outline.tokens) + simulate::most_held(stages)
        };
        PassPlan {
            name: names[pass],
            timelines: simulate::simulate(&stages[pass], pace, &machine),
            received: stages[pass].iter().map(received).collect(),
            memory: outlines.iter().map(memory).max().unwrap_or(0),
        }
    });
    Ok(Planned { pattern, map: args.shards, sizes, machine, imbalance, passes })
}

fn sizes(args: &Plan, pattern: &Heads) -> Result<Sizes> {
    let heads = args.heads.or(pattern.count()).unwrap_or(HEADS);
    let kv_heads = args.kv_heads.unwrap_or(heads);
    pattern.get(0, heads)?;
    if !heads.is_multiple_of(kv_heads) {
        let rule = format!("{heads} query heads on {kv_heads} key heads, expected a multiple");
        return Err(BadInput(rule).into());
    }
    let dim = args.head_dim.get();
    Ok(Sizes {
        tokens: args.tokens.unwrap_or(0),
        ranks: args.ranks.map_or(1, std::num::NonZeroUsize::get),
        batch: args.batch.get(),
        heads,
        kv_heads,
        dim,
        value_dim: args.value_dim.map_or(dim, std::num::NonZeroUsize::get),
        element: args.dtype,
    })
}

/// The machine, with the network that was asked for.
fn machine(args: &Plan) -> Result<Machine> {
    let mut machine = Machine::find(&args.machine)?;
    let asked = args.network.is_some() || args.gbits.is_some() || args.latency_us.is_some();
    if asked || machine.ranks_a_node.is_some() && machine.far.is_none() {
        let (mut link, source) = machine::network(args.network.unwrap_or(Network::FourHundred));
        if args.network.is_some() || args.gbits.is_none() || args.latency_us.is_none() {
            machine.sources.push(source.into());
        }
        if let Some(gbits) = args.gbits {
            link = Link { bytes_a_second: gbits * 1e9 / 8.0, ..link };
        }
        if let Some(us) = args.latency_us {
            link = Link { latency_seconds: us * 1e-6, ..link };
        }
        machine.far = Some(link);
        // A rank a machine, unless a machine has several by nature.
        machine.ranks_a_node = machine.ranks_a_node.or(Some(1));
    }
    if let Some(per_node) = args.per_node {
        if machine.far.is_none() {
            let rule = "--per-node without a network: add --network, or --gbits and --latency-us";
            return Err(BadInput(rule.into()).into());
        }
        machine.ranks_a_node = Some(per_node.get());
    }
    Ok(machine)
}

fn shards(args: &Plan, pattern: &Heads, sizes: &Sizes) -> Result<Shards> {
    Ok(args.shards.shards(pattern, sizes.tokens, sizes.ranks, args.grain)?)
}

/// Outlines of the ranks to simulate, and how unevenly all ranks compute.
fn outlines(args: &Plan, problem: &Problem, sizes: &Sizes) -> Result<(Vec<Outline>, f64)> {
    let ranks = sizes.ranks;
    let mut outlines = Outlines::new(problem)?;
    let most = if ranks <= ALL { ranks } else { SOME };
    let most = args.sample.map_or(most, |sample| sample.get().min(ranks));
    let stage = Stage::share("weighing ranks");
    let mut loads = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        stage.at(rank as u64, ranks as u64);
        loads.push(outlines.pairs(rank, (ROWS / ranks as u64).max(16))?);
    }
    drop(stage);

    let stage = Stage::share("working out the schedule");
    let chosen = choose(&loads, most);
    let mut made = Vec::with_capacity(chosen.len());
    for (done, &rank) in chosen.iter().enumerate() {
        stage.at(done as u64, chosen.len() as u64);
        made.push(outlines.rank(rank)?);
    }
    // Where all are known, so is work that queries take with them to other ranks.
    if chosen.len() == ranks {
        let pairs =
            |outline: &Outline| outline.forward.iter().map(|stage| stage.work.pairs).sum::<u128>();
        loads = made.iter().map(pairs).collect();
    }
    let total: u128 = loads.iter().sum();
    let largest = loads.iter().copied().max().unwrap_or(0);
    let imbalance = if total == 0 { 1.0 } else { largest as f64 * ranks as f64 / total as f64 };
    Ok((made, imbalance))
}

/// So many ranks, ascending: the ones with most and least to do, and others evenly spaced.
fn choose(loads: &[u128], most: usize) -> Vec<usize> {
    let ranks = loads.len();
    if most >= ranks {
        return (0..ranks).collect();
    }
    let by_load = |rank: &usize| loads[*rank];
    let mut chosen = vec![(0..ranks).max_by_key(by_load).unwrap_or(0)];
    if most > 1 {
        chosen.extend((0..ranks).min_by_key(by_load));
    }
    let spaced = (0..most).map(|n| n * (ranks - 1) / (most - 1).max(1));
    for rank in spaced {
        if chosen.len() < most && !chosen.contains(&rank) {
            chosen.push(rank);
        }
    }
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Bytes of queries, keys, values and output, the state that they grow from, and row statistics.
fn forward_bytes(sizes: &Sizes, tokens: u64) -> u64 {
    let Sizes { batch, heads, kv_heads, dim, value_dim, .. } = *sizes;
    let (queries, keys) = (batch * heads, batch * kv_heads);
    let numbers = queries * (dim + value_dim) + keys * (dim + value_dim);
    let sums = queries * (value_dim + 2) + 2 * queries;
    tokens * (numbers * sizes.element.size() + sums * size_of::<f32>()) as u64
}

/// Bytes of the same tensors, their gradients, and sums of gradients in f32.
fn backward_bytes(sizes: &Sizes, tokens: u64) -> u64 {
    let Sizes { batch, heads, kv_heads, dim, value_dim, .. } = *sizes;
    let (queries, keys) = (batch * heads, batch * kv_heads);
    let numbers = 2 * queries * (dim + value_dim) + 2 * keys * (dim + value_dim);
    let sums = queries * dim + keys * (dim + value_dim) + 3 * queries;
    tokens * (numbers * sizes.element.size() + sums * size_of::<f32>()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_heaviest_rank_is_chosen() {
        let loads = [5, 1, 5, 9, 5, 5, 0, 5, 5, 5];
        assert_eq!(choose(&loads, 1), [3]);
        assert_eq!(choose(&loads, 2), [3, 6]);
        assert_eq!(choose(&loads, 4), [0, 3, 6, 9]);
        assert_eq!(choose(&loads, 99).len(), 10);
        assert!(choose(&[7; 100], 8).len() == 8);
    }
}
