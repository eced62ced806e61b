//! Simulation: from communication plans and a machine to timelines.
//!
//! ```text
//! a hop        | pack |  compute the previous hop   |  wait  | unpack |
//! its messages        |  latency, bytes ÷ bandwidth          |
//! ```
//!
//! A message starts when both its ranks have reached its step. All sends of a rank in a step share
//! its link, and all receives do. Steps are simulated in ascending order for all ranks: a rank only
//! waits for earlier steps. A rank that isn't simulated is assumed to be in step with its peers.

use std::collections::BTreeMap;

use longspan_ring::{CommunicationPlan, PlannedHop, Work};

use super::machine::{Machine, Rate};

/// One hop of a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Span {
    pub(crate) start: f64,
    /// Time in kernels.
    pub(crate) computing: f64,
    /// End of computing.
    pub(crate) computed: f64,
    /// End of all transfers.
    pub(crate) arrived: f64,
    /// End of unpacking.
    pub(crate) end: f64,
    pub(crate) has_messages: bool,
}

/// The timeline of a rank in a pass.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Timeline {
    pub(crate) rank: usize,
    pub(crate) spans: Vec<Span>,
    /// In kernels.
    pub(crate) computing: f64,
    /// Packing, checking, copying.
    pub(crate) handling: f64,
    /// Waiting for messages with nothing to compute.
    pub(crate) waiting: f64,
    /// Transfer time without delays of other ranks.
    pub(crate) transfer: f64,
    /// The part of it that doesn't overlap with computing.
    pub(crate) exposed: f64,
}

impl Timeline {
    pub(crate) fn end(&self) -> f64 {
        self.spans.last().map_or(0.0, |span| span.end)
    }

    /// Share of the transfer time that overlaps with computing; `None` without transfers.
    pub(crate) fn hidden_share(&self) -> Option<f64> {
        (self.transfer > 0.0).then(|| 1.0 - self.exposed / self.transfer)
    }

    pub(crate) fn hops(&self) -> usize {
        self.spans.iter().filter(|span| span.has_messages).count()
    }
}

/// Time per unit of work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) rate: Rate,
    /// FLOPs per pair, all batch entries.
    pub(crate) flops_per_pair: f64,
}

impl Pace {
    pub(crate) fn seconds(&self, work: &Work) -> f64 {
        const BLOCK: f64 = 64.0 * 64.0;
        let full = work.full_pairs as f64 / self.rate.full;
        // Pairs outside Full blocks can't be more than those of their blocks.
        let partial = work.partial_blocks as f64 * BLOCK / self.rate.partial;
        self.flops_per_pair * (full + partial)
    }
}

/// One pass of all simulated ranks; each has its stages.
pub(crate) fn simulate(
    passes: &[(usize, &[PlannedHop])],
    pace: Pace,
    machine: &Machine,
) -> Vec<Timeline> {
    let index: BTreeMap<usize, usize> =
        passes.iter().enumerate().map(|(index, (rank, _))| (*rank, index)).collect();
    let mut timelines: Vec<_> =
        passes.iter().map(|(rank, _)| Timeline { rank: *rank, ..Timeline::default() }).collect();
    let mut steps: BTreeMap<u32, Vec<(usize, &PlannedHop)>> = BTreeMap::new();
    for (number, (_, stages)) in passes.iter().enumerate() {
        for stage in *stages {
            steps.entry(stage.label).or_default().push((number, stage));
        }
    }
    let handling = |bytes: u64| bytes as f64 * machine.handling_seconds_per_byte;
    for stages in steps.values() {
        // When each rank has packed its messages.
        let mut there: BTreeMap<usize, (f64, &PlannedHop)> = BTreeMap::new();
        for &(number, stage) in stages {
            let packed = timelines[number].end() + handling(stage.sent());
            there.insert(number, (packed, stage));
        }
        let ready = |peer: usize, else_at: f64| {
            let peer = index.get(&peer).and_then(|number| there.get(number));
            peer.map_or(else_at, |(packed, _)| *packed)
        };
        for (&number, &(packed, stage)) in &there {
            let rank = passes[number].0;
            let incoming = flow(machine, &stage.receives, |peer| (peer, rank));
            let outgoing = flow(machine, &stage.sends, |peer| (rank, peer));
            let mut arrived = packed;
            for (peer, bytes) in &stage.receives {
                // The slower end determines the rate: the sender's other messages share its link.
                let sender = index.get(peer).and_then(|number| there.get(number));
                let busy =
                    sender.map_or(0.0, |(_, other)| flow(machine, &other.sends, |to| (*peer, to)));
                let takes = machine.link(*peer, rank).seconds(*bytes).max(incoming).max(busy);
                arrived = arrived.max(ready(*peer, packed).max(packed) + takes);
            }
            for (peer, _) in &stage.sends {
                arrived = arrived.max(ready(*peer, packed).max(packed) + outgoing);
            }
            let computing = pace.seconds(&stage.work);
            let computed = packed + computing;
            let timeline = &mut timelines[number];
            let start = timeline.end();
            let until = arrived.max(computed);
            let end = until + handling(stage.received());
            let transfer = incoming.max(outgoing);
            timeline.computing += computing;
            timeline.handling += packed - start + (end - until);
            timeline.waiting += until - computed;
            timeline.transfer += transfer;
            timeline.exposed += (until - computed).min(transfer);
            let has_messages = !(stage.sends.is_empty() && stage.receives.is_empty());
            timeline.spans.push(Span { start, computing, computed, arrived, end, has_messages });
        }
    }
    timelines
}

/// Transfer time of messages of one direction on a rank's links, near and far: a latency per message,
/// and their bytes.
fn flow(
    machine: &Machine,
    messages: &[(usize, u64)],
    ends: impl Fn(usize) -> (usize, usize),
) -> f64 {
    let mut links = [0.0; 2];
    for &(peer, bytes) in messages {
        let (from, to) = ends(peer);
        let link = machine.link(from, to);
        let busy = &mut links[usize::from(Some(link) == machine.far)];
        *busy += link.latency_seconds + bytes as f64 / link.bytes_per_second;
    }
    links.into_iter().fold(0.0, f64::max)
}

/// Peak bytes of messages on a rank: those in flight, both directions, and those being computed.
pub(crate) fn peak_held(stages: &[PlannedHop]) -> u64 {
    let before = std::iter::once(0).chain(stages.iter().map(PlannedHop::received));
    stages
        .iter()
        .zip(before)
        .map(|(stage, before)| stage.sent() + stage.received() + before)
        .max()
        .unwrap_or(0)
}

/// Both passes of every outline, by pass.
pub(crate) fn passes(outlines: &[CommunicationPlan]) -> [Vec<(usize, &[PlannedHop])>; 2] {
    let pick = |of: fn(&CommunicationPlan) -> &[PlannedHop]| {
        outlines.iter().map(|o| (o.rank, of(o))).collect()
    };
    [pick(|outline| &outline.forward), pick(|outline| &outline.backward)]
}

#[cfg(test)]
mod tests {
    use super::super::machine::Link;
    use super::*;

    fn machine(handling: f64) -> Machine {
        Machine {
            name: "test".into(),
            sources: Vec::new(),
            memory_bytes: 1e9,
            kernels: Vec::new(),
            handling_seconds_per_byte: handling,
            ranks_per_node: None,
            near: Link { latency_seconds: 1.0, bytes_per_second: 100.0 },
            far: None,
        }
    }

    fn work(pairs: u128) -> Work {
        Work { pairs, full_pairs: pairs, ..Work::default() }
    }

    const PACE: Pace = Pace { rate: Rate { full: 1.0, partial: 1.0 }, flops_per_pair: 1.0 };

    fn stage(label: u32, to: &[(usize, u64)], from: &[(usize, u64)], pairs: u128) -> PlannedHop {
        PlannedHop { label, sends: to.to_vec(), receives: from.to_vec(), work: work(pairs) }
    }

    #[test]
    fn hops_take_the_longer_of_computing_and_transfer() {
        // 1 s latency and 4 s for 400 bytes, beside 3 s or 9 s of computing.
        for (pairs, until, exposed) in [(3, 5.0, 2.0), (9, 9.0, 0.0)] {
            let stages = [stage(1, &[], &[(1, 400)], pairs), stage(u32::MAX, &[], &[], 2)];
            let timeline = &simulate(&[(0, &stages)], PACE, &machine(0.0))[0];
            assert_eq!((timeline.end(), timeline.exposed), (until + 2.0, exposed));
            assert_eq!((timeline.transfer, timeline.hops()), (5.0, 1));
            assert_eq!(timeline.computing, pairs as f64 + 2.0);
        }
    }

    #[test]
    fn a_rank_waits_for_one_that_is_late() {
        let early = [stage(1, &[], &[(1, 100)], 0)];
        let late = [stage(0, &[], &[], 7), stage(1, &[(0, 100)], &[], 0)];
        let timelines = simulate(&[(0, &early), (1, &late)], PACE, &machine(0.0));
        assert_eq!((timelines[0].end(), timelines[0].waiting), (9.0, 9.0));
        // Lateness is no transfer: of 9 s only 2 were a message's.
        assert_eq!((timelines[0].transfer, timelines[0].exposed), (2.0, 2.0));
    }

    #[test]
    fn messages_share_connection_and_handling_hides_nothing() {
        let stages = [stage(1, &[(1, 100), (2, 300)], &[(1, 100)], 1)];
        let timeline = &simulate(&[(0, &stages)], PACE, &machine(0.01))[0];
        // 4 s of packing, 6 s on the way (two latencies), 1 s of unpacking.
        assert_eq!((timeline.end(), timeline.handling), (11.0, 5.0));
        assert_eq!(timeline.hidden_share(), Some(1.0 - 5.0 / 6.0));
        assert_eq!(peak_held(&stages), 500);
    }

    #[test]
    fn blocks_with_masks_cost_all_of_their_pairs() {
        let pace = Pace { rate: Rate { full: 4096.0, partial: 2048.0 }, flops_per_pair: 2.0 };
        let work = Work { pairs: 4096 + 10, full_pairs: 4096, partial_blocks: 3 };
        assert_eq!(pace.seconds(&work), 2.0 * (1.0 + 3.0 * 2.0));
    }
}
