//! The report of a plan, as text or JSON.

use std::io::{Result, Write};
use std::path::Path;

use serde::Serialize;

use super::advice::{Limit, advise};
use super::simulate::Timeline;
use super::{PassPlan, Planned, Sizes};
use crate::number::{bytes, count, percent, shortened, significant};
use crate::table;

/// Characters kept of a pattern's text.
const TEXT: usize = 200;

/// Statistics of one pass: of the rank that ends last, unless noted.
#[derive(Serialize)]
struct Statistics {
    pass: &'static str,
    ms: f64,
    slowest_rank: usize,
    computing_ms: f64,
    handling_ms: f64,
    waiting_ms: f64,
    transfer_ms: f64,
    /// Share of the transfer time that overlaps with computing.
    hidden_share: Option<f64>,
    /// Steps with messages.
    hops: usize,
    compute_ms_per_hop: f64,
    transfer_ms_per_hop: f64,
    bytes_per_hop: f64,
    /// Bytes that a rank receives: on average, and at most, of those simulated.
    bytes_received: f64,
    bytes_received_most: u64,
    /// Messages that a rank receives, at most, of those simulated.
    messages: u64,
    memory_bytes: u64,
}

impl Statistics {
    fn of(pass: &PassPlan) -> Self {
        let slowest: &Timeline = pass.slowest();
        let hops = slowest.hops();
        let per_hop = |sum: f64| sum / hops.max(1) as f64;
        let index = pass.timelines.iter().position(|timeline| timeline.rank == slowest.rank);
        let received = index.map_or(0, |index| pass.received[index]);
        let sum: u64 = pass.received.iter().sum();
        Statistics {
            pass: pass.name,
            ms: slowest.end() * 1e3,
            slowest_rank: slowest.rank,
            computing_ms: slowest.computing * 1e3,
            handling_ms: slowest.handling * 1e3,
            waiting_ms: slowest.waiting * 1e3,
            transfer_ms: slowest.transfer * 1e3,
            hidden_share: slowest.hidden_share(),
            hops,
            compute_ms_per_hop: per_hop(slowest.computing) * 1e3,
            transfer_ms_per_hop: per_hop(slowest.transfer) * 1e3,
            bytes_per_hop: per_hop(received as f64),
            bytes_received: sum as f64 / pass.received.len().max(1) as f64,
            bytes_received_most: pass.received.iter().copied().max().unwrap_or(0),
            messages: pass.messages.iter().copied().max().unwrap_or(0),
            memory_bytes: pass.memory,
        }
    }
}

#[derive(Serialize)]
struct Object<'a> {
    version: &'static str,
    pattern: &'a str,
    tokens: usize,
    ranks: usize,
    /// Simulated ranks.
    simulated: usize,
    shards: &'static str,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    dtype: String,
    machine: &'a super::Machine,
    imbalance: f64,
    memory_bytes: u64,
    ms: f64,
    passes: Vec<Statistics>,
    limit: Limit,
    advice: Vec<String>,
}

/// One object.
pub(super) fn json(planned: &Planned, out: &mut impl Write) -> Result<()> {
    let Sizes { tokens, ranks, batch, heads, kv_heads, dim, value_dim, element } = planned.sizes;
    let (limit, advice) = advise(planned);
    let passes: Vec<_> = planned.passes.iter().map(Statistics::of).collect();
    let object = Object {
        version: env!("CARGO_PKG_VERSION"),
        pattern: &shortened(&planned.sparsity, TEXT),
        tokens,
        ranks,
        simulated: planned.passes[0].timelines.len(),
        shards: planned.map.name(),
        batch,
        heads,
        kv_heads,
        head_dim: dim,
        value_dim,
        dtype: element.to_string(),
        machine: &planned.machine,
        imbalance: planned.imbalance,
        memory_bytes: passes.iter().map(|pass| pass.memory_bytes).max().unwrap_or(0),
        ms: passes.iter().map(|pass| pass.ms).sum(),
        passes,
        limit,
        advice,
    };
    writeln!(out, "{}", serde_json::to_string(&object)?)
}

/// A summary, a table with one line per pass, and advice.
pub(super) fn table(planned: &Planned, plot: Option<&Path>, out: &mut impl Write) -> Result<()> {
    let Sizes { tokens, ranks, batch, heads, kv_heads, dim, value_dim, element } = planned.sizes;
    let mut line = |name: &str, text: String| writeln!(out, "{name:<15}{text}");
    line("pattern", shortened(&planned.sparsity, TEXT))?;
    let (ranks_named, shards) = (count(ranks, "rank"), planned.map.name());
    line("tokens", format!("{} over {ranks_named}, {shards}", count(tokens, "token")))?;
    let heads = format!("{} on {}", count(heads, "head"), count(kv_heads, "KV head"));
    let dims = match value_dim == dim {
        true => format!("head dim {dim}"),
        false => format!("head dim {dim}, values {value_dim}"),
    };
    line("tensors", format!("{element}, batch {batch}, {heads}, {dims}"))?;
    let machine = &planned.machine;
    let near = format!("{} GB/s within a node", significant(machine.near.bytes_per_second / 1e9));
    let links = match machine.far {
        None => near,
        Some(far) => {
            let speed = significant(far.bytes_per_second * 8.0 / 1e9);
            let latency = significant(far.latency_seconds * 1e6);
            format!("{near}, {speed} Gbit/s and {latency} µs between nodes")
        }
    };
    line("machine", format!("{}: {links}", machine.name))?;
    let simulated = planned.passes[0].timelines.len();
    if simulated < ranks {
        let text = format!("{} of {ranks_named}, the others assumed to be in step", simulated);
        line("simulated", text)?;
    }
    let limit = bytes(machine.memory_bytes as usize);
    let memory = planned.passes.iter().map(|pass| pass.memory).max().unwrap_or(0);
    line("memory/rank", format!("{} of {limit}", bytes(memory as usize)))?;
    line("imbalance", format!("{} times the mean at most", significant(planned.imbalance)))?;

    let header = [
        "pass",
        "ms",
        "computing",
        "waiting",
        "handling",
        "hidden",
        "hops",
        "ms per hop",
        "transfer per hop",
        "bytes per hop",
        "bytes in",
        "messages in",
    ];
    let mut rows = vec![header.map(String::from)];
    let all: Vec<_> = planned.passes.iter().map(Statistics::of).collect();
    rows.extend(all.iter().map(|statistics| {
        [
            statistics.pass.to_string(),
            significant(statistics.ms),
            significant(statistics.computing_ms),
            significant(statistics.waiting_ms),
            significant(statistics.handling_ms),
            statistics.hidden_share.map_or("-".into(), percent),
            statistics.hops.to_string(),
            significant(statistics.compute_ms_per_hop),
            significant(statistics.transfer_ms_per_hop),
            bytes(statistics.bytes_per_hop as usize),
            bytes(statistics.bytes_received_most as usize),
            statistics.messages.to_string(),
        ]
    }));
    writeln!(out)?;
    table::print(&rows, 1, out)?;
    writeln!(out)?;
    let (limit, advice) = advise(planned);
    writeln!(out, "{:<15}{}", "limit", limit.name())?;
    for (index, text) in advice.iter().enumerate() {
        writeln!(out, "{:<15}{text}", if index == 0 { "to change" } else { "" })?;
    }
    for (index, source) in machine.sources.iter().enumerate() {
        writeln!(out, "{:<15}{source}", if index == 0 { "figures" } else { "" })?;
    }
    if let Some(path) = plot {
        writeln!(out, "{:<15}{}", "picture", path.display())?;
    }
    Ok(())
}
