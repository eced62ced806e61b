//! Schedule: which messages one rank sends and receives in which step, and what it computes meanwhile.
//! Passes execute it; `planner` reports it.
//!
//! A step is a label that both ranks of a message know. In a hop a rank sends and receives all
//! messages of the next label, and computes on the messages of the one before:
//!
//! ```text
//! hop of step 1   | hop of step 2          | hop of step 3
//! local keys      | received in step 1     | received in step 2
//! ```
//!
//! Local keys also fill hops that have nothing else to compute: see [`local`].
//!
//! Keys that rank `s` sends directly to rank `r` have step `(r − s) mod ranks`, so that in a step no
//! rank sends to two. The result for a message of step `t` is sent in step `t + 2`. Labels increase
//! along every chain of messages, and a rank executes its labels in order: every wait depends on
//! smaller labels only, so there is no deadlock.
//!
//! For reproducible reductions the label of keys, including local ones, is their place in the
//! sequence: every rank reduces them in ascending order, tile by tile.

mod local;
mod step;

use std::ops::Range;

use longspan::{Positions, Progression};

pub(crate) use self::step::ALIGN;
use self::step::{Event, Legs, in_order, steps};
pub use self::step::{Leg, Message, Part, Payload, Step};
use crate::demand::Demand;
use crate::problem::{Problem, Reduction};
use crate::send_plan::{BroadcastTree, SendPlan};
use crate::sparsity::{Band, Sparsity};
use crate::tokens::{self, Tokens};

/// What one rank sends, receives and computes in both passes.
#[derive(Debug)]
pub(crate) struct Schedule {
    pub(crate) bands: Vec<Band>,
    /// Ranges of local keys, by index in the shard; one computation each.
    pub(crate) local_keys: Vec<Range<usize>>,
    pub(crate) sent_keys: Vec<SentKeys>,
    pub(crate) received_keys: Vec<ReceivedKeys>,
    pub(crate) sent_queries: Vec<SentQueries>,
    pub(crate) remote_queries: Vec<RemoteQueries>,
    pub(crate) forward: Vec<Step>,
    pub(crate) backward: Vec<Step>,
}

/// Local keys of a band that are sent to another rank.
#[derive(Debug)]
pub(crate) struct SentKeys {
    pub(crate) band: usize,
    pub(crate) tokens: Tokens,
}

/// Keys of another rank, of a band.
#[derive(Debug)]
pub(crate) struct ReceivedKeys {
    pub(crate) band: usize,
    pub(crate) positions: Positions,
    /// The local queries that attend to them, where not all do.
    pub(crate) queries: Option<Tokens>,
    /// Ranks that they are forwarded to.
    pub(crate) children: usize,
}

/// Local queries of a band that are sent to another rank's keys.
#[derive(Debug)]
pub(crate) struct SentQueries {
    pub(crate) band: usize,
    pub(crate) queries: Tokens,
}

/// Queries of another rank over local keys, of a band.
#[derive(Debug)]
pub(crate) struct RemoteQueries {
    pub(crate) band: usize,
    pub(crate) positions: Positions,
}

/// What a schedule is made from.
pub(crate) struct ScheduleInputs<'a> {
    pub(crate) rank: usize,
    pub(crate) bands: &'a [Band],
    /// This rank's demand for the keys of each rank and band.
    pub(crate) demands: &'a [Vec<Demand>],
    /// The part of each rank's send plan of each band that concerns this rank.
    pub(crate) received_plans: &'a [Vec<(Tokens, Vec<BroadcastTree>)>],
    /// How this rank's keys of each band reach the others.
    pub(crate) send_plans: &'a [SendPlan],
    /// Queries of each band and rank that are sent here.
    pub(crate) remote_queries: &'a [Vec<Tokens>],
}

/// Kinds of parts, in the order in which they follow each other in a message.
const KEYS: u8 = 0;
const QUERIES: u8 = 2;
const LENGTHS: u8 = 4;

impl Schedule {
    pub(crate) fn new(problem: &Problem, inputs: &ScheduleInputs<'_>) -> Self {
        let ScheduleInputs { rank, bands, demands, .. } = *inputs;
        let ranks = demands.len();
        let distance = |from: usize, to: usize| ((to + ranks - from) % ranks) as u32;
        let mut sent_keys = Vec::new();
        let mut received_keys = Vec::new();
        let mut sent_queries = Vec::new();
        let mut remote_queries = Vec::new();

        // Keys in bytes; queries in tokens × heads, since the passes send different data per query.
        let (mut keys, mut queries) = (Legs::default(), Legs::default());
        let held_here = problem.shards.rank(rank);
        for (band, heads) in bands.iter().enumerate() {
            let (send_plan, remote) = (&inputs.send_plans[band], &inputs.remote_queries[band]);
            let outbound = |tokens: &Tokens| problem.keys_len(heads, tokens.len());
            let returned = |tokens: &Tokens| tokens.len() * problem.key_gradient_bytes(heads);
            for peer in (0..ranks).filter(|&peer| peer != rank) {
                let demand = &demands[peer][band];
                let direct = &send_plan.direct[peer];
                let sent = by_step(problem.reduction, distance(rank, peer), held_here, direct);
                for (index, (out, tokens)) in sent.into_iter().enumerate() {
                    let order = (KEYS, rank, band, index as u32);
                    let payload = Payload::SentKeys(sent_keys.len());
                    let (to, from) =
                        ((out, true, outbound(&tokens)), (out + 2, false, returned(&tokens)));
                    sent_keys.push(SentKeys { band, tokens });
                    keys.add(peer, order, payload, to, from);
                }
                let held = problem.shards.rank(peer);
                let receive = |tokens: &Tokens, children| ReceivedKeys {
                    band,
                    positions: tokens::positions_of(held, tokens),
                    queries: demand.local_queries.clone(),
                    children,
                };
                let (direct, trees) = &inputs.received_plans[peer][band];
                let received = by_step(problem.reduction, distance(peer, rank), held, direct);
                for (index, (out, tokens)) in received.into_iter().enumerate() {
                    let order = (KEYS, peer, band, index as u32);
                    let payload = Payload::ReceivedKeys(received_keys.len());
                    received_keys.push(receive(&tokens, 0));
                    let (to, from) =
                        ((out, false, outbound(&tokens)), (out + 2, true, returned(&tokens)));
                    keys.add(peer, order, payload, to, from);
                }
                for tree in trees {
                    let node = tree.node(rank).expect("a tree that this rank is in");
                    let index = received_keys.len();
                    let children: Vec<_> = tree.children(node).collect();
                    received_keys.push(receive(&tree.tokens, children.len()));
                    let order = (KEYS, peer, band, 1 + tree.index);
                    let (outbound, returned) = (outbound(&tree.tokens), returned(&tree.tokens));
                    let parent = tree.ranks[(node - 1) / 2];
                    let to = (tree.broadcast_step(node), false, outbound);
                    let from = (tree.reduce_step(node), true, returned);
                    keys.add(parent, order, Payload::ReceivedKeys(index), to, from);
                    for (number, child) in children.into_iter().enumerate() {
                        let to = (tree.broadcast_step(child), true, outbound);
                        let from = (tree.reduce_step(child), false, returned);
                        let payload = Payload::ForwardedKeys(index, number);
                        keys.add(tree.ranks[child], order, payload, to, from);
                    }
                }
                let out = distance(rank, peer);
                let sent = &demand.remote_queries;
                if !sent.is_empty() {
                    let payload = Payload::SentQueries(sent_queries.len());
                    sent_queries.push(SentQueries { band, queries: sent.clone() });
                    let order = (QUERIES, peer, band, 0);
                    let count = sent.len() * heads.heads.len();
                    queries.add(peer, order, payload, (out, true, count), (out + 2, false, count));
                }
                let out = distance(peer, rank);
                if !remote[peer].is_empty() {
                    let payload = Payload::RemoteQueries(remote_queries.len());
                    let positions = tokens::positions_of(held, &remote[peer]);
                    remote_queries.push(RemoteQueries { band, positions });
                    let order = (QUERIES, rank, band, 0);
                    let count = remote[peer].len() * heads.heads.len();
                    queries.add(peer, order, payload, (out, false, count), (out + 2, true, count));
                }
            }
            // A tree starts with sends to its first two ranks.
            for tree in &send_plan.trees {
                for child in tree.children(0) {
                    let payload = Payload::SentKeys(sent_keys.len());
                    sent_keys.push(SentKeys { band, tokens: tree.tokens.clone() });
                    let order = (KEYS, rank, band, 1 + tree.index);
                    let to = (tree.broadcast_step(child), true, outbound(&tree.tokens));
                    let from = (tree.reduce_step(child), false, returned(&tree.tokens));
                    keys.add(tree.ranks[child], order, payload, to, from);
                }
            }
        }

        let sized = |events: &[Event], each: usize| {
            let size = move |event: &Event| {
                let part = Part { bytes: event.part.bytes * each, ..event.part };
                Event { part, ..*event }
            };
            events.iter().map(size).collect::<Vec<_>>()
        };
        if problem.wire.varies() {
            let length = |event: &Event| Event {
                label: event.label - 1,
                order: (LENGTHS, event.order.1, event.order.2, event.order.3),
                part: Part { leg: Leg::Length, bytes: size_of::<u64>(), ..event.part },
                ..*event
            };
            let lengths: Vec<_> = keys.outbound.iter().map(length).collect();
            keys.outbound.extend(lengths);
        }
        let mut forward = keys.outbound.clone();
        forward.extend(sized(&queries.outbound, problem.query_bytes()));
        forward.extend(sized(&queries.returned, problem.state_bytes()));
        let mut backward = [keys.outbound, keys.returned].concat();
        backward.extend(sized(&queries.outbound, problem.backward_query_bytes()));
        backward.extend(sized(&queries.returned, problem.query_gradient_bytes()));
        let (mut forward, mut backward) = (steps(forward), steps(backward));
        // Ranges of local keys with the steps after which they are computed, forward and backward.
        let parts: Vec<(u32, u32, Range<usize>)> = match (problem.reduction, &problem.sparsity) {
            // Most of the work is in segments within a shard, and ranks have their hops in different
            // steps: those that kept local keys for one of them would wait for each other.
            (Reduction::Overlapped, Sparsity::Dilated(_)) => vec![(0, 0, 0..held_here.len())],
            (Reduction::Overlapped, Sparsity::Patterns(_)) => {
                let parts = local::parts(held_here.len(), &local::uncovered(&backward));
                parts.into_iter().map(|(label, part)| (0, label, part)).collect()
            }
            (Reduction::Reproducible, _) => {
                let all = Positions::range(0, held_here.len());
                let all = all.expect("token indices fit");
                let parts = by_step(problem.reduction, 0, held_here, &all);
                let ranged = |(label, tokens): (u32, Tokens)| {
                    let first = tokens.get(0).map_or(0, |first| first as usize);
                    (label, label, first..first + tokens.len())
                };
                parts.into_iter().map(ranged).collect()
            }
        };
        let mut local_keys = Vec::with_capacity(parts.len());
        for (index, (in_forward, in_backward, part)) in parts.into_iter().enumerate() {
            for (steps, label) in [(&mut forward, in_forward), (&mut backward, in_backward)] {
                let part =
                    Part { payload: Payload::LocalKeys(index), leg: Leg::Outbound, bytes: 0 };
                steps.entry(label).or_default().work.push(part);
            }
            local_keys.push(part);
        }
        let (forward, backward) = (in_order(forward), in_order(backward));
        let mut schedule = Schedule {
            bands: bands.to_vec(),
            local_keys,
            sent_keys,
            received_keys,
            sent_queries,
            remote_queries,
            forward,
            backward,
        };
        if problem.reduction == Reduction::Reproducible {
            schedule.sort_work(held_here);
        }
        schedule
    }

    /// Bytes that the rank receives in a forward and in a backward pass.
    pub(crate) fn bytes_needed(&self) -> (u64, u64) {
        let bytes =
            |steps: &[Step]| steps.iter().flat_map(|step| &step.receives).map(Message::bytes).sum();
        (bytes(&self.forward), bytes(&self.backward))
    }

    /// Sorts the work of each step by its first key.
    fn sort_work(&mut self, held: &Positions) {
        let (local, received) = (&self.local_keys, &self.received_keys);
        let first = |part: &Part| match (part.payload, part.leg) {
            (Payload::LocalKeys(index), _) => held.get(local[index].start),
            (Payload::ReceivedKeys(index), Leg::Outbound) => received[index].positions.get(0),
            _ => None,
        };
        for step in self.forward.iter_mut().chain(&mut self.backward) {
            step.work.sort_by_key(first);
        }
    }
}

/// Tokens of the sequence per step of a reproducible reduction; a multiple of [`TILE`].
const TOKENS_PER_STEP: i64 = 1_024;

/// Keys per update of a state in a reproducible reduction: a block, so that the result does not depend
/// on which other rows attend to them.
pub(crate) const TILE: usize = 64;

/// Keys by the step in which they are sent: all in step `distance`, or by their place in the sequence.
fn by_step(
    reduction: Reduction,
    distance: u32,
    held: &Positions,
    tokens: &Tokens,
) -> Vec<(u32, Tokens)> {
    if tokens.is_empty() {
        return Vec::new();
    }
    if reduction == Reduction::Overlapped {
        return vec![(distance, tokens.clone())];
    }
    // Contiguous ranges of the sequence.
    let mut ranges: Vec<(u32, Progression)> = Vec::new();
    let mut last = i64::MIN;
    for index in tokens::indices(tokens) {
        let position = held.get(index).expect("a token of the shard");
        let label = (position / TOKENS_PER_STEP) as u32 + 1;
        match ranges.last_mut().filter(|(same, _)| *same == label && last + 1 == position) {
            Some((_, range)) => range.len += 1,
            None => ranges.push((label, Progression { start: index as i64, step: 1, len: 1 })),
        }
        last = position;
    }
    let tokens = |range| Positions::new([range]).expect("token indices fit");
    ranges.into_iter().map(|(label, range)| (label, tokens(range))).collect()
}
