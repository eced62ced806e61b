//! The report of a benchmark, as text or JSON.

use std::io::{Result, Write};
use std::num::NonZeroUsize;

use longspan::{Isa, Order, Precision};
use longspan_pattern::Heads;
use serde::Serialize;

use super::PassResult;
use super::problem::{Problem, Sizes};
use crate::number::{bytes, count, percent, shortened, significant};
use crate::table;

/// Characters kept of a pattern's text.
const TEXT: usize = 200;

/// Settings of all passes.
pub(super) struct About<'a> {
    pub(super) pattern: &'a Heads,
    pub(super) tokens: usize,
    pub(super) block: usize,
    /// The instruction set of the kernels that ran.
    pub(super) isa: Isa,
    pub(super) precision: Precision,
    pub(super) threads: NonZeroUsize,
    pub(super) problem: &'a Problem,
}

/// Statistics of one pass.
#[derive(Serialize)]
struct Statistics {
    pass: &'static str,
    /// The best call.
    ms: f64,
    median_ms: f64,
    calls: usize,
    layout_ms: f64,
    /// FLOPs on active pairs per second, of the best call.
    gflops: f64,
    /// The best FMA peak between the calls.
    peak_gflops: f64,
    median_peak_gflops: f64,
    peak_share: f64,
    /// The same of medians, which are less noisy on a busy machine.
    median_peak_share: f64,
    /// The best peak of the matrix unit, where it is used.
    matrix_peak_gflops: Option<f64>,
    matrix_peak_share: Option<f64>,
    /// Bytes of keys and values read per second, where queries are few.
    read_gbps: Option<f64>,
    /// The best bandwidth between the calls.
    read_peak_gbps: Option<f64>,
    read_share: Option<f64>,
    /// Growth of the process.
    peak_bytes: Option<u64>,
    tensor_bytes: u64,
    peak_to_tensors: Option<f64>,
}

impl Statistics {
    fn of(result: &PassResult) -> Self {
        let samples = &result.samples;
        // A coarse clock may measure 0.
        let seconds = samples.best_seconds().max(1e-9);
        let gflops = result.flops as f64 / seconds / 1e9;
        let read = samples.bandwidth();
        let read_gbps = read.map(|(bytes, _)| bytes as f64 / seconds / 1e9);
        let read_peak_gbps = read.map(|(_, peak)| peak);
        let share = |(got, peak): (f64, f64)| got / peak;
        let ratio = |peak| peak as f64 / result.tensor_bytes as f64;
        Statistics {
            pass: result.pass,
            ms: seconds * 1e3,
            median_ms: samples.median_seconds() * 1e3,
            calls: samples.seconds.len(),
            layout_ms: result.layout_ms,
            gflops,
            peak_gflops: samples.peak(),
            median_peak_gflops: samples.median_peak(),
            peak_share: gflops / samples.peak(),
            median_peak_share: gflops * seconds / samples.median_seconds() / samples.median_peak(),
            matrix_peak_gflops: samples.matrix_peak(),
            matrix_peak_share: samples.matrix_peak().map(|peak| gflops / peak),
            read_gbps,
            read_peak_gbps,
            read_share: read_gbps.zip(read_peak_gbps).map(share),
            peak_bytes: result.peak_bytes,
            tensor_bytes: result.tensor_bytes,
            peak_to_tensors: result.peak_bytes.filter(|_| result.tensor_bytes > 0).map(ratio),
        }
    }
}

#[derive(Serialize)]
struct Object<'a> {
    version: &'static str,
    pattern: &'a str,
    tokens: usize,
    queries: usize,
    keys: usize,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    dtype: String,
    block: usize,
    order: &'static str,
    density: f64,
    isa: String,
    precision: String,
    threads: usize,
    #[serde(flatten)]
    statistics: Statistics,
}

/// One object per pass and line.
pub(super) fn json(about: &About<'_>, results: &[PassResult], out: &mut impl Write) -> Result<()> {
    let pattern = shortened(about.pattern, TEXT);
    let sizes = &about.problem.sizes;
    for result in results {
        let object = Object {
            version: env!("CARGO_PKG_VERSION"),
            pattern: &pattern,
            tokens: about.tokens,
            queries: sizes.queries,
            keys: sizes.keys,
            batch: sizes.batch,
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            head_dim: sizes.dim,
            value_dim: sizes.value_dim,
            dtype: sizes.element.to_string(),
            block: about.block,
            order: match about.problem.order {
                Order::Bshd => "bthd",
                Order::Bhsd => "bhtd",
            },
            density: about.problem.density,
            isa: about.isa.to_string(),
            precision: about.precision.to_string(),
            threads: about.threads.get(),
            statistics: Statistics::of(result),
        };
        writeln!(out, "{}", serde_json::to_string(&object)?)?;
    }
    Ok(())
}

/// A summary and a table with one line per pass.
pub(super) fn table(about: &About<'_>, results: &[PassResult], out: &mut impl Write) -> Result<()> {
    let Problem { sizes, order, density, .. } = about.problem;
    let Sizes { element, batch, queries, keys, heads, kv_heads, dim, value_dim } = *sizes;
    let mut line = |name: &str, text: String| writeln!(out, "{name:<15}{text}");
    line("pattern", shortened(about.pattern, TEXT))?;
    let tokens = format!("{} × {}", count(queries, "query"), count(keys, "key"));
    line("tokens", format!("{tokens}, {} of all pairs", percent(*density)))?;
    let axes = match order {
        Order::Bshd => "[batch, token, head, dim]",
        Order::Bhsd => "[batch, head, token, dim]",
    };
    let heads = match kv_heads == heads {
        true => count(heads, "head"),
        false => {
            format!("{} on {}", count(heads, "head"), count(kv_heads, "KV head"))
        }
    };
    let dims = match value_dim == dim {
        true => format!("head dim {dim}"),
        false => format!("head dim {dim}, values {value_dim}"),
    };
    line("tensors", format!("{element}, batch {batch}, {heads}, {dims}, {axes}"))?;
    line("blocks", format!("{0} × {0} tokens", about.block))?;
    let threads = count(about.threads.get(), "thread");
    line("computed with", format!("{}, {} precision, {threads}", about.isa, about.precision))?;
    if cfg!(debug_assertions) {
        line("built", "without optimization: times are not representative".into())?;
    }

    let header = [
        "pass",
        "best ms",
        "median ms",
        "calls",
        "GFLOP/s",
        "FMA peak",
        "share",
        "layout ms",
        "memory",
        "tensors",
        "ratio",
    ];
    let all: Vec<Statistics> = results.iter().map(Statistics::of).collect();
    let mut rows = vec![header.map(String::from)];
    rows.extend(all.iter().map(|statistics| {
        let unknown = || "unknown".to_string();
        [
            statistics.pass.to_string(),
            significant(statistics.ms),
            significant(statistics.median_ms),
            statistics.calls.to_string(),
            significant(statistics.gflops),
            significant(statistics.peak_gflops),
            percent(statistics.peak_share),
            significant(statistics.layout_ms),
            statistics.peak_bytes.map_or_else(unknown, |peak| bytes(peak as usize)),
            bytes(statistics.tensor_bytes as usize),
            statistics.peak_to_tensors.map_or_else(unknown, |ratio| format!("{ratio:.2}")),
        ]
    }));
    writeln!(out)?;
    table::print(&rows, 1, out)?;
    for statistics in &all {
        if let (Some(peak), Some(share)) =
            (statistics.matrix_peak_gflops, statistics.matrix_peak_share)
        {
            let (pass, got, peak) =
                (statistics.pass, significant(statistics.gflops), significant(peak));
            let share = percent(share);
            writeln!(out, "{pass} reaches {got} of the AMX peak's {peak} GFLOP/s, {share}")?;
        }
        let reads = (statistics.read_gbps, statistics.read_peak_gbps, statistics.read_share);
        if let (Some(got), Some(peak), Some(share)) = reads {
            let (pass, got, peak) = (statistics.pass, significant(got), significant(peak));
            let share = percent(share);
            writeln!(out, "{pass} reads keys and values at {got} of {peak} GB/s, {share}")?;
        }
    }
    Ok(())
}
