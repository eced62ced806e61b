//! The bottleneck of a plan, and advice.

use serde::Serialize;

use super::Planned;
use super::simulate::Timeline;
use crate::args::Map;
use crate::number::{bytes, significant, thousands};

/// The bottleneck of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Limit {
    /// Memory is exceeded.
    Memory,
    /// Exposed transfers, limited by bandwidth.
    Communication,
    /// Exposed transfers, limited by latency.
    Latency,
    /// Ranks wait for the one with the most work.
    Imbalance,
    /// Packing, checking and copying messages.
    Handling,
    /// The kernels.
    Computing,
}

impl Limit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Limit::Memory => "memory",
            Limit::Communication => "communication",
            Limit::Latency => "latency",
            Limit::Imbalance => "imbalance",
            Limit::Handling => "handling of messages",
            Limit::Computing => "computing",
        }
    }
}

/// Share of the time from which something other than computing is the bottleneck.
const NOTABLE: f64 = 0.1;
/// Most ranks of a ring.
const MOST_RANKS: f64 = 4_096.0;
/// Bound on the imbalance of balanced shards.
const EVEN: f64 = 1.05;

/// The bottleneck, and advice by importance.
pub(crate) fn advise(planned: &Planned) -> (Limit, Vec<String>) {
    let sum = |of: fn(&Timeline) -> f64| -> f64 {
        planned.passes.iter().map(|pass| of(pass.slowest())).sum()
    };
    let whole = sum(Timeline::end).max(f64::MIN_POSITIVE);
    let (computing, transfer) = (sum(|t| t.computing), sum(|t| t.transfer));
    let (exposed, handling) = (sum(|t| t.exposed), sum(|t| t.handling));
    let hops: usize = planned.passes.iter().map(|pass| pass.slowest().hops()).sum();
    let link = planned.machine.far.unwrap_or(planned.machine.near);
    let latency = hops as f64 * link.latency_seconds;
    let ranks = planned.sizes.ranks;
    let mut advice = Vec::new();
    let mut limit = Limit::Computing;

    let memory = planned.passes.iter().map(|pass| pass.memory).max().unwrap_or(0);
    let has = planned.machine.memory_bytes;
    if memory as f64 > has {
        limit = Limit::Memory;
        let least = (ranks as f64 * memory as f64 / has).ceil() as u64;
        let (needs, has) = (bytes(memory as usize), bytes(has as usize));
        let halves = match planned.sizes.element {
            longspan::ElementType::F32 => ", or bf16, which halves tensors",
            _ => "",
        };
        let least = thousands(least);
        advice.push(format!("a rank needs {needs} of {has}: use {least} ranks{halves}"));
    }
    if planned.imbalance > EVEN {
        if limit == Limit::Computing && planned.imbalance > 1.0 + NOTABLE {
            limit = Limit::Imbalance;
        }
        let worst = significant(planned.imbalance);
        advice.push(match planned.map {
            Map::Balanced => {
                format!(
                    "one rank computes {worst} times the mean: use a smaller --grain or fewer ranks"
                )
            }
            _ => format!("one rank computes {worst} times the mean: use --shards balanced"),
        });
    }
    if exposed > NOTABLE * whole {
        if limit == Limit::Computing {
            limit = if latency > transfer / 2.0 { Limit::Latency } else { Limit::Communication };
        }
        let faster = significant(transfer / computing.max(f64::MIN_POSITIVE));
        advice.push(match latency > transfer / 2.0 {
            true => format!(
                "{} hops of {} µs latency aren't hidden: use fewer ranks, so that each computes longer",
                thousands(hops),
                significant(link.latency_seconds * 1e6)
            ),
            false => format!(
                "transfers take {faster} times as long as computing: use a faster network, fewer \
                 ranks (more computing per rank, about the same bytes), or fewer KV heads"
            ),
        });
    }
    if handling > NOTABLE * whole {
        if limit == Limit::Computing {
            limit = Limit::Handling;
        }
        advice.push(
            "packing and copying messages takes long: use fewer ranks, or fewer KV heads".into(),
        );
    }
    if limit == Limit::Computing && transfer > 0.0 {
        let up_to = (ranks as f64 * computing / transfer).min(MOST_RANKS) as u64;
        if up_to > 2 * ranks as u64 {
            let up_to = thousands(up_to);
            advice.push(format!(
                "messages are hidden: more ranks make it faster, to about {up_to} at this length"
            ));
        }
    }
    if advice.is_empty() {
        advice.push("nothing".into());
    }
    (limit, advice)
}
