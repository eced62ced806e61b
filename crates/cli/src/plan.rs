//! `longspan plan`: a prediction of memory, messages and time of a ring.
//!
//! ```text
//! pattern, shards ──▶ communication plans of some ranks ──simulate──▶ timelines ──▶ report
//!                                          machine ──────────────┘
//! ```

mod advice;
mod calibrate;
mod machine;
mod report;
mod simulate;
mod timeline;

use std::io::{Write, stdout};
use std::path::Path;

use anyhow::{Context, Result};
use longspan::{ElementType, Heads};
use longspan_ring::{CommunicationPlan, CommunicationPlanner, PlannedHop, Problem, Sparsity, Wire};

use crate::args::{Map, Network, Plan};
use crate::compile::{self, BadInput};
use crate::plot::{self, Format};
use crate::progress::Stage;
use machine::Link;
use machine::Machine;
use simulate::Pace;
use simulate::{Span, Timeline};

/// Ranks up to which all are simulated.
const ALL: usize = 64;
/// Ranks that are simulated of a larger number.
const SOME: usize = 8;
/// Blocks of queries that are sampled to find the rank with the most work.
const ROWS: usize = 1 << 18;

/// Sizes of the problem.
pub(crate) struct Sizes {
    pub(crate) tokens: usize,
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
    /// Bytes that each rank receives.
    pub(crate) received: Vec<u64>,
    /// Messages that each rank receives.
    pub(crate) messages: Vec<u64>,
    /// Peak bytes per rank: tensors, accumulators and messages.
    pub(crate) memory: u64,
}

impl PassPlan {
    /// The rank that ends last.
    pub(crate) fn slowest(&self) -> &Timeline {
        let last = self.timelines.iter().max_by(|a, b| a.end().total_cmp(&b.end()));
        last.expect("at least one rank")
    }
}

/// A plan.
pub(crate) struct Planned {
    pub(crate) sparsity: Sparsity,
    pub(crate) map: Map,
    pub(crate) sizes: Sizes,
    pub(crate) machine: Machine,
    /// Largest number of pairs per rank ÷ the mean.
    pub(crate) imbalance: f64,
    pub(crate) passes: [PassPlan; 2],
}

/// `longspan plan`
pub(crate) fn run(args: &Plan) -> Result<()> {
    if args.calibrate {
        if args.branches.are_given() || args.wire.wire != Wire::Exact {
            let rule = "--calibrate measures this machine, whatever is planned later: remove \
                        --branches and --wire";
            return Err(BadInput(rule.into()).into());
        }
        return calibrate::run(args);
    }
    if args.threads.is_some() || args.out.is_some() {
        let rule =
            "--threads and --out are those of a measurement: add --calibrate, or remove them";
        return Err(BadInput(rule.into()).into());
    }
    let format = args.plot.as_deref().map(format_of).transpose()?;
    let planned = match args.memory {
        Some(memory) => longest(args, memory as u64)?,
        None => plan(args, args.tokens.unwrap_or(0))?,
    };
    if let (Some(path), Some(format)) = (&args.plot, format) {
        let picture = plot::render(&timeline::compose(&planned), format)?;
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

/// The plan of the longest sequence whose ranks need no more memory than given, to one percent.
fn longest(args: &Plan, memory: u64) -> Result<Planned> {
    let pattern = compile::patterns(args.pattern.as_deref().unwrap_or_default())?;
    let one = sizes(args, &pattern, 1)?;
    // Messages take more than tensors alone.
    let unit = one.ranks * args.grain.max(1);
    let most = memory / backward_bytes(&one, 1).max(1) * one.ranks as u64;
    let (mut fits, mut too_long) = (None, most as usize / unit + 1);
    let mut units = too_long - 1;
    while units > 0 {
        let planned = plan(args, units * unit)?;
        let needed = planned.passes.iter().map(|pass| pass.memory).max().unwrap_or(0);
        let least = fits.as_ref().map_or(0, |(units, _)| *units);
        let least = if needed <= memory {
            fits = Some((units, planned));
            units
        } else {
            too_long = units;
            least
        };
        if too_long - least <= (too_long / 100).max(1) {
            break;
        }
        units = least.midpoint(too_long);
    }
    fits.map(|(_, planned)| planned).ok_or_else(|| {
        let per_rank = crate::number::bytes(memory as usize);
        let message = format!(
            "--memory of {per_rank}: no sequence fits, not even {}; give ranks more memory, or use \
             fewer heads",
            crate::number::count(unit, "token")
        );
        BadInput(message).into()
    })
}

fn plan(args: &Plan, tokens: usize) -> Result<Planned> {
    let pattern = compile::patterns(args.pattern.as_deref().unwrap_or_default())?;
    let sizes = sizes(args, &pattern, tokens)?;
    let sparsity = args.branches.sparsity(pattern)?;
    let machine = machine(args)?;
    let kernel = machine.kernel(sizes.element)?.clone();

    let stage = Stage::new("sharding");
    let shards = args.shards.shards(&sparsity, sizes.tokens, sizes.ranks, args.grain)?;
    drop(stage);
    let problem = Problem::new(sparsity.clone(), shards)
        .batch(sizes.batch)
        .heads(sizes.heads, sizes.kv_heads)
        .dims(sizes.dim, sizes.value_dim)
        .element(sizes.element)
        .wire(args.wire.wire);
    let (outlines, imbalance) = outlines(args, &problem, &sizes)?;

    let Sizes { dim, value_dim, batch, .. } = sizes;
    let flops = [dim + value_dim, 3 * dim + 2 * value_dim].map(|dims| 2.0 * (dims * batch) as f64);
    let rates = [kernel.forward, kernel.backward];
    let names = ["forward", "backward"];
    let stages = simulate::passes(&outlines);
    let passes = [0, 1].map(|pass| {
        let pace = Pace { rate: rates[pass], flops_per_pair: flops[pass] };
        let tensors = [forward_bytes, backward_bytes][pass];
        let received = |(_, stages): &(usize, &[PlannedHop])| {
            stages.iter().map(PlannedHop::received).sum::<u64>()
        };
        let messages = |(_, stages): &(usize, &[PlannedHop])| {
            stages.iter().map(|stage| stage.receives.len() as u64).sum::<u64>()
        };
        let memory = |outline: &CommunicationPlan| {
            let stages = [&outline.forward, &outline.backward][pass];
            tensors(&sizes, outline.tokens) + simulate::peak_held(stages)
        };
        PassPlan {
            name: names[pass],
            timelines: simulate::simulate(&stages[pass], pace, &machine),
            received: stages[pass].iter().map(received).collect(),
            messages: stages[pass].iter().map(messages).collect(),
            memory: outlines.iter().map(memory).max().unwrap_or(0),
        }
    });
    Ok(Planned { sparsity, map: args.shards, sizes, machine, imbalance, passes })
}

fn sizes(args: &Plan, pattern: &Heads, tokens: usize) -> Result<Sizes> {
    let (heads, kv_heads) = args.tensors.heads(pattern);
    pattern.get(0, heads)?;
    if !heads.is_multiple_of(kv_heads) {
        let rule = format!("{heads} query heads on {kv_heads} KV heads, expected a multiple");
        return Err(BadInput(rule).into());
    }
    let dim = args.tensors.head_dim();
    Ok(Sizes {
        tokens,
        ranks: args.ranks.map_or(1, std::num::NonZeroUsize::get),
        batch: args.batch.get(),
        heads,
        kv_heads,
        dim,
        value_dim: args.value_dim.map_or(dim, std::num::NonZeroUsize::get),
        element: args.tensors.dtype,
    })
}

/// The machine, with the network of the options.
fn machine(args: &Plan) -> Result<Machine> {
    let mut machine = Machine::find(&args.machine)?;
    let asked = args.network.is_some() || args.gbits.is_some() || args.latency_us.is_some();
    if asked || machine.ranks_per_node.is_some() && machine.far.is_none() {
        let (mut link, source) = machine::network(args.network.unwrap_or(Network::FourHundred));
        if args.network.is_some() || args.gbits.is_none() || args.latency_us.is_none() {
            machine.sources.push(source.into());
        }
        if let Some(gbits) = args.gbits {
            link = Link { bytes_per_second: gbits * 1e9 / 8.0, ..link };
        }
        if let Some(us) = args.latency_us {
            link = Link { latency_seconds: us * 1e-6, ..link };
        }
        machine.far = Some(link);
        // One rank per node, unless the machine has several.
        machine.ranks_per_node = machine.ranks_per_node.or(Some(1));
    }
    if let Some(per_node) = args.per_node {
        if machine.far.is_none() {
            let rule = "--per-node without a network: add --network, or --gbits and --latency-us";
            return Err(BadInput(rule.into()).into());
        }
        machine.ranks_per_node = Some(per_node.get());
    }
    Ok(machine)
}

/// Communication plans of the ranks to simulate, and the imbalance of all ranks.
fn outlines(
    args: &Plan,
    problem: &Problem,
    sizes: &Sizes,
) -> Result<(Vec<CommunicationPlan>, f64)> {
    let ranks = sizes.ranks;
    let mut outlines = CommunicationPlanner::new(problem)?;
    let most = if ranks <= ALL { ranks } else { SOME };
    let most = args.sample.map_or(most, |sample| sample.get().min(ranks));
    let stage = Stage::share("counting pairs per rank");
    let mut loads = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        stage.at(rank as u64, ranks as u64);
        loads.push(outlines.pairs(rank, (ROWS / ranks).max(16))?);
    }
    drop(stage);

    let stage = Stage::share("computing the schedule");
    let chosen = choose(&loads, most);
    let mut made = Vec::with_capacity(chosen.len());
    for (done, &rank) in chosen.iter().enumerate() {
        stage.at(done as u64, chosen.len() as u64);
        made.push(outlines.rank(rank)?);
    }
    // With all plans, the pairs of remote queries are known too.
    if chosen.len() == ranks {
        let pairs = |outline: &CommunicationPlan| {
            outline.forward.iter().map(|stage| stage.work.pairs).sum::<u128>()
        };
        loads = made.iter().map(pairs).collect();
    }
    let total: u128 = loads.iter().sum();
    let largest = loads.iter().copied().max().unwrap_or(0);
    let imbalance = if total == 0 { 1.0 } else { largest as f64 * ranks as f64 / total as f64 };
    Ok((made, imbalance))
}

/// `most` ranks, ascending: those with the most and the least work, and others evenly spaced.
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

/// Bytes of queries, keys, values and output, the softmax state, and row statistics.
fn forward_bytes(sizes: &Sizes, tokens: usize) -> u64 {
    let Sizes { batch, heads, kv_heads, dim, value_dim, .. } = *sizes;
    let (queries, keys) = (batch * heads, batch * kv_heads);
    let elements = queries * (dim + value_dim) + keys * (dim + value_dim);
    let sums = queries * (value_dim + 2) + 2 * queries;
    (tokens * (elements * sizes.element.size() + sums * size_of::<f32>())) as u64
}

/// Bytes of the same tensors, their gradients, and f32 accumulators.
fn backward_bytes(sizes: &Sizes, tokens: usize) -> u64 {
    let Sizes { batch, heads, kv_heads, dim, value_dim, .. } = *sizes;
    let (queries, keys) = (batch * heads, batch * kv_heads);
    let elements = 2 * queries * (dim + value_dim) + 2 * keys * (dim + value_dim);
    let sums = queries * dim + keys * (dim + value_dim) + 3 * queries;
    (tokens * (elements * sizes.element.size() + sums * size_of::<f32>())) as u64
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
