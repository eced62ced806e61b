//! The report of all ranks, as text or JSON.

use std::io::{Result, Write};

use longspan_ring::Reduction;
use serde::Serialize;

use super::check::Checked;
use super::job::{Job, Outcome, RankStats};
use crate::choice;
use crate::number::{bytes, count, percent, shortened, significant, thousands};
use crate::table;

/// Characters kept of a pattern's text.
const TEXT: usize = 200;

/// The transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Carrier {
    Threads,
    #[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "built without MPI"))]
    Mpi,
}

/// Bytes are per forward and backward pass, summed over all ranks unless noted.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    version: &'static str,
    pattern: String,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: String,
    isa: String,
    /// Per rank.
    threads: usize,
    carrier: Carrier,
    shards: &'static str,
    fold: &'static str,
    ranks: usize,
    /// The fastest forward and backward pass, on the slowest rank.
    ms: f64,
    forward_ms: f64,
    backward_ms: f64,
    bytes_received: u64,
    bytes_needed: u64,
    /// Largest number of bytes sent per rank ÷ the mean.
    sending_imbalance: Option<f64>,
    /// Most bytes of remote data that one rank holds at a time.
    peak_held_bytes: u64,
    /// `None` without messages.
    hidden_share: Option<f64>,
    waiting_ms: f64,
    transfer_ms: f64,
    /// Largest number of pairs per rank ÷ the mean; `None` without pairs.
    imbalance: Option<f64>,
    /// Only with `--check`, as the fields below.
    max_error: Option<f64>,
    bits_equal: Option<bool>,
    gradient_bits_equal: Option<bool>,
    error_of_limit: Option<f64>,
    checked_heads: Option<usize>,
    #[serde(skip)]
    shares: &'a [RankStats],
    #[serde(skip)]
    wrong: &'a [String],
}

fn ms(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

impl<'a> Report<'a> {
    pub(super) fn new(
        job: &Job,
        outcome: &'a Outcome,
        checked: Option<&'a Checked>,
        carrier: Carrier,
    ) -> Self {
        let shares = &outcome.shares[..];
        let sum = |of: fn(&RankStats) -> u64| shares.iter().map(of).sum::<u64>();
        let most = |of: fn(&RankStats) -> u64| shares.iter().map(of).max().unwrap_or(0);
        let uneven = |of: fn(&RankStats) -> u64| {
            let mean = sum(of) as f64 / shares.len() as f64;
            (mean > 0.0).then(|| most(of) as f64 / mean)
        };
        let (waiting, alone) = (sum(|share| share.waiting), sum(|share| share.alone));
        let needed = sum(|share| share.needed);
        let hidden = (needed > 0).then(|| (1.0 - waiting as f64 / alone.max(1) as f64).max(0.0));
        Report {
            version: env!("CARGO_PKG_VERSION"),
            pattern: shortened(&job.sparsity, TEXT),
            tokens: job.tokens,
            heads: job.heads,
            kv_heads: job.kv_heads,
            head_dim: job.dim,
            dtype: job.element.to_string(),
            isa: choice::kernel_isa(job.isa, job.element).to_string(),
            threads: job.threads.get(),
            carrier,
            shards: job.map.name(),
            fold: match job.fold {
                Reduction::Overlapped => "overlapped",
                Reduction::Reproducible => "reproducible",
            },
            ranks: shares.len(),
            ms: ms(most(|share| share.forward + share.backward)),
            forward_ms: ms(most(|share| share.forward)),
            backward_ms: ms(most(|share| share.backward)),
            bytes_received: sum(|share| share.received),
            bytes_needed: needed,
            sending_imbalance: uneven(|share| share.sent),
            peak_held_bytes: most(|share| share.peak_held),
            hidden_share: hidden,
            waiting_ms: ms(waiting) / shares.len() as f64,
            transfer_ms: ms(alone) / shares.len() as f64,
            imbalance: uneven(|share| share.pairs),
            max_error: checked.map(|checked| checked.max_error),
            bits_equal: checked.map(|checked| checked.bits_equal),
            gradient_bits_equal: checked.map(|checked| checked.gradient_bits_equal),
            error_of_limit: checked.map(|checked| checked.of_limit),
            checked_heads: checked.map(|checked| checked.heads),
            shares,
            wrong: checked.map_or(&[], |checked| &checked.wrong[..]),
        }
    }

    /// One JSON object and a line break.
    pub(super) fn json(&self, out: &mut impl Write) -> Result<()> {
        writeln!(out, "{}", serde_json::to_string(self)?)
    }

    /// A summary, and a table with one line per rank.
    pub(super) fn table(&self, out: &mut impl Write) -> Result<()> {
        let mut line = |name: &str, text: String| writeln!(out, "{name:<15}{text}");
        line("pattern", self.pattern.clone())?;
        line("tokens", thousands(self.tokens))?;
        let heads = match self.kv_heads == self.heads {
            true => count(self.heads, "head"),
            false => {
                format!("{} on {}", count(self.heads, "head"), count(self.kv_heads, "KV head"))
            }
        };
        line("tensors", format!("{}, {heads}, head dim {}", self.dtype, self.head_dim))?;
        let carrier = match self.carrier {
            Carrier::Threads => "threads of one process",
            Carrier::Mpi => "MPI processes",
        };
        let (ranks, threads) = (count(self.ranks, "rank"), count(self.threads, "thread"));
        line("ranks", format!("{ranks}, {carrier}, {}, {threads} each", self.isa))?;
        line("shards", format!("{}, {} order", self.shards, self.fold))?;
        let (forward, backward) = (significant(self.forward_ms), significant(self.backward_ms));
        line("time", format!("{forward} ms forward, {backward} ms backward"))?;
        let received = format!("{} bytes received", thousands(self.bytes_received));
        line("messages", format!("{received}, {} needed", thousands(self.bytes_needed)))?;
        if let Some(hidden) = self.hidden_share {
            let (transfer, waiting) = (significant(self.transfer_ms), significant(self.waiting_ms));
            let times = format!("{transfer} ms of transfer per rank, {waiting} ms waited");
            line("hidden", format!("{} ({times})", percent(hidden)))?;
        }
        if let Some(imbalance) = self.imbalance {
            line("imbalance", format!("{imbalance:.3} (most pairs per rank ÷ mean)"))?;
        }
        if let (Some(error), Some(of_limit), Some(heads)) =
            (self.max_error, self.error_of_limit, self.checked_heads)
        {
            let verdict = if self.wrong.is_empty() { "right" } else { "WRONG" };
            let limit = format!("{} of the limit on {}", percent(of_limit), count(heads, "head"));
            line("check", format!("{verdict}: at most {error:.2e} from one process; {limit}"))?;
            let bits = match (self.bits_equal, self.gradient_bits_equal) {
                (Some(true), Some(true)) => "equal to one process",
                (Some(true), _) => "forward equal to one process, backward different",
                _ => "different from one process",
            };
            line("bits", bits.to_owned())?;
        }
        if cfg!(debug_assertions) {
            line("built", "without optimization: times are not representative".into())?;
        }

        let header = ["rank", "tokens", "pairs", "received", "sent", "held", "ms", "waited ms"];
        let mut rows = vec![header.map(String::from)];
        rows.extend(self.shares.iter().enumerate().map(|(rank, share)| {
            [
                rank.to_string(),
                thousands(share.tokens),
                thousands(share.pairs),
                bytes(share.received as usize),
                bytes(share.sent as usize),
                bytes(share.peak_held as usize),
                significant(ms(share.forward + share.backward)),
                significant(ms(share.waiting)),
            ]
        }));
        writeln!(out)?;
        table::print(&rows, 0, out)
    }
}
