//! What all ranks found, for people and for programs.

use std::io::{Result, Write};

use longspan_ring::Fold;
use serde::Serialize;

use super::check::Checked;
use super::job::{Found, Job, Share};
use crate::number::{bytes, count, percent, shortened, significant, thousands};
use crate::table;

/// Characters kept of a pattern's text.
const TEXT: usize = 200;

/// What carries messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Carrier {
    Threads,
    #[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "built without MPI"))]
    Mpi,
}

/// Bytes are those of one forward and one backward pass, of all ranks unless it says otherwise.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    version: &'static str,
    pattern: String,
    tokens: u64,
    heads: usize,
    key_heads: usize,
    dim: usize,
    dtype: String,
    isa: String,
    /// Of each rank.
    threads: usize,
    carrier: Carrier,
    shards: &'static str,
    fold: &'static str,
    ranks: usize,
    /// Of the fastest forward and backward pass, on the slowest rank.
    ms: f64,
    forward_ms: f64,
    backward_ms: f64,
    bytes_received: u64,
    bytes_needed: u64,
    /// The most that one rank sends ÷ the mean.
    sending_imbalance: Option<f64>,
    /// The most that one rank holds of others at a time.
    most_held_bytes: u64,
    /// Nothing where nothing travels.
    hidden_share: Option<f64>,
    waiting_ms: f64,
    transfer_ms: f64,
    /// The most pairs that one rank computes ÷ the mean; nothing where there are none.
    imbalance: Option<f64>,
    /// With `--check` alone, as those below.
    max_error: Option<f64>,
    bits_equal: Option<bool>,
    gradient_bits_equal: Option<bool>,
    error_of_limit: Option<f64>,
    checked_heads: Option<usize>,
    #[serde(skip)]
    shares: &'a [Share],
    #[serde(skip)]
    wrong: &'a [String],
}

fn ms(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

impl<'a> Report<'a> {
    pub(super) fn new(
        job: &Job,
        found: &'a Found,
        checked: Option<&'a Checked>,
        carrier: Carrier,
    ) -> Self {
        let shares = &found.shares[..];
        let sum = |of: fn(&Share) -> u64| shares.iter().map(of).sum::<u64>();
        let most = |of: fn(&Share) -> u64| shares.iter().map(of).max().unwrap_or(0);
        let uneven = |of: fn(&Share) -> u64| {
            let mean = sum(of) as f64 / shares.len() as f64;
            (mean > 0.0).then(|| most(of) as f64 / mean)
        };
        let (waiting, alone) = (sum(|share| share.waiting), sum(|share| share.alone));
        let needed = sum(|share| share.needed);
        let hidden = (needed > 0).then(|| (1.0 - waiting as f64 / alone.max(1) as f64).max(0.0));
        Report {
            version: env!("CARGO_PKG_VERSION"),
            pattern: shortened(&job.patterns, TEXT),
            tokens: job.tokens,
            heads: job.heads,
            key_heads: job.key_heads,
            dim: job.dim,
            dtype: job.element.to_string(),
            isa: job.isa.to_string(),
            threads: job.threads.get(),
            carrier,
            shards: job.map.name(),
            fold: match job.fold {
                Fold::Overlapped => "overlapped",
                Fold::Reproducible => "reproducible",
            },
            ranks: shares.len(),
            ms: ms(most(|share| share.forward + share.backward)),
            forward_ms: ms(most(|share| share.forward)),
            backward_ms: ms(most(|share| share.backward)),
            bytes_received: sum(|share| share.received),
            bytes_needed: needed,
            sending_imbalance: uneven(|share| share.sent),
            most_held_bytes: most(|share| share.most_held),
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

    /// A summary, and a table with a line for each rank.
    pub(super) fn table(&self, out: &mut impl Write) -> Result<()> {
        let mut line = |name: &str, text: String| writeln!(out, "{name:<15}{text}");
        line("pattern", self.pattern.clone())?;
        line("tokens", thousands(self.tokens))?;
        let heads = match self.key_heads == self.heads {
            true => count(self.heads as u64, "head"),
            false => format!(
                "{} on {}",
                count(self.heads as u64, "head"),
                count(self.key_heads as u64, "key head")
            ),
        };
        line("tensors", format!("{}, {heads}, head dim {}", self.dtype, self.dim))?;
        let carrier = match self.carrier {
            Carrier::Threads => "threads of one process",
            Carrier::Mpi => "processes of MPI",
        };
        let (ranks, threads) =
            (count(self.ranks as u64, "rank"), count(self.threads as u64, "thread"));
        line("ranks", format!("{ranks}, {carrier}, {}, {threads} each", self.isa))?;
        line("shards", format!("{}, {} order", self.shards, self.fold))?;
        let (forward, backward) = (significant(self.forward_ms), significant(self.backward_ms));
        line("time", format!("{forward} ms forward, {backward} ms backward"))?;
        let received = format!("{} bytes received", thousands(self.bytes_received));
        line("messages", format!("{received}, {} needed", thousands(self.bytes_needed)))?;
        if let Some(hidden) = self.hidden_share {
            let (transfer, waiting) = (significant(self.transfer_ms), significant(self.waiting_ms));
            let times = format!("{transfer} ms of transfer a rank, {waiting} ms waited");
            line("hidden", format!("{} ({times})", percent(hidden)))?;
        }
        if let Some(imbalance) = self.imbalance {
            line("imbalance", format!("{imbalance:.3} (most pairs of a rank ÷ mean)"))?;
        }
        if let (Some(error), Some(of_limit), Some(heads)) =
            (self.max_error, self.error_of_limit, self.checked_heads)
        {
            let verdict = if self.wrong.is_empty() { "right" } else { "WRONG" };
            let limit =
                format!("{} of the limit on {}", percent(of_limit), count(heads as u64, "head"));
            line("check", format!("{verdict}: {error:.2e} from one process at most; {limit}"))?;
            let bits = match (self.bits_equal, self.gradient_bits_equal) {
                (Some(true), Some(true)) => "those of one process",
                (Some(true), _) => "those of one process forward, others backward",
                _ => "others than those of one process",
            };
            line("bits", bits.to_owned())?;
        }
        if cfg!(debug_assertions) {
            line("built", "without optimisation: these times mean little".into())?;
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
                bytes(share.most_held as usize),
                significant(ms(share.forward + share.backward)),
                significant(ms(share.waiting)),
            ]
        }));
        writeln!(out)?;
        table::print(&rows, 0, out)
    }
}
