//! Steps, their messages, and the parts that messages consist of.

use std::collections::BTreeMap;

/// What a part of a message belongs to, by index in the [`RankSchedule`](crate::RankSchedule).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Payload {
    /// Local keys; never sent.
    LocalKeys(usize),
    /// Local keys and values that are sent to another rank.
    SentKeys(usize),
    /// Keys and values of another rank.
    ReceivedKeys(usize),
    /// Received keys that are forwarded to a child in a broadcast tree, and the child's index.
    ForwardedKeys(usize, usize),
    /// Local queries that are sent to another rank's keys.
    SentQueries(usize),
    /// Queries of another rank.
    RemoteQueries(usize),
}

/// The direction of a part: outbound data, or the result that is returned for it. Where the length of
/// the data depends on its values, it is sent ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leg {
    /// Data to compute on.
    Outbound,
    /// Results: gradients of keys and values; partial softmaxes or gradients of queries.
    Return,
    /// The length of outbound data, as a `u64`.
    Length,
}

/// A part of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// What it belongs to.
    pub payload: Payload,
    /// Whether it is data or a result.
    pub leg: Leg,
    /// Its bytes; an upper bound where the length is sent ahead.
    pub bytes: usize,
}

/// All parts between two ranks in one step, in one direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The other rank.
    pub peer: usize,
    /// Its parts, in the order that both ranks know.
    pub parts: Vec<Part>,
}

/// A hop, and the computations that its messages enable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// Equal on both ranks of a message; ranks execute their steps in ascending order.
    pub label: u32,
    /// Messages to other ranks, at most one per rank, by rank.
    pub sends: Vec<Message>,
    /// Messages from other ranks, likewise.
    pub receives: Vec<Message>,
    /// What is computed on these messages while those of the next step are in flight, in order of
    /// execution.
    pub work: Vec<Part>,
}

/// Alignment of parts in a message, for every dtype.
pub(crate) const ALIGN: usize = 8;

impl Message {
    /// Bytes of data and results.
    pub fn bytes(&self) -> u64 {
        let parts = self.parts.iter().filter(|part| part.leg != Leg::Length);
        parts.map(|part| part.bytes as u64).sum()
    }
}

/// A part with its step and peer, before parts are grouped into messages.
#[derive(Clone, Copy)]
pub(super) struct Event {
    pub(super) sent: bool,
    pub(super) label: u32,
    pub(super) peer: usize,
    /// Equal on both ranks: kind, owner, band, tree.
    pub(super) order: (u8, usize, usize, u32),
    pub(super) part: Part,
}

/// Both legs of all parts of one kind.
#[derive(Default)]
pub(super) struct Legs {
    pub(super) outbound: Vec<Event>,
    pub(super) returned: Vec<Event>,
}

impl Legs {
    /// Adds both legs of a part: its step, whether this rank sends it, its bytes.
    pub(super) fn add(
        &mut self,
        peer: usize,
        order: (u8, usize, usize, u32),
        payload: Payload,
        outbound: (u32, bool, usize),
        returned: (u32, bool, usize),
    ) {
        let event = |(label, sent, bytes): (u32, bool, usize), leg| {
            let order = (order.0 + leg as u8, order.1, order.2, order.3);
            Event { sent, label, peer, order, part: Part { payload, leg, bytes } }
        };
        self.outbound.push(event(outbound, Leg::Outbound));
        self.returned.push(event(returned, Leg::Return));
    }
}

/// Groups events by step and peer, in an order that is equal on both ranks.
pub(super) fn steps(mut events: Vec<Event>) -> BTreeMap<u32, Step> {
    let mut steps: BTreeMap<u32, Step> = BTreeMap::new();
    events.sort_by_key(|event| (event.label, event.peer, event.order));
    for event in events {
        let (label, sent) = (event.label, event.sent);
        // Results are computed in the hop before they are sent.
        if sent && event.part.leg == Leg::Return {
            steps.entry(label - 1).or_default();
        }
        let step = steps.entry(label).or_default();
        if !sent && event.part.leg != Leg::Length {
            step.work.push(event.part);
        }
        let messages = if sent { &mut step.sends } else { &mut step.receives };
        match messages.last_mut().filter(|message| message.peer == event.peer) {
            Some(message) => message.parts.push(event.part),
            None => messages.push(Message { peer: event.peer, parts: vec![event.part] }),
        }
    }
    steps
}

pub(super) fn in_order(steps: BTreeMap<u32, Step>) -> Vec<Step> {
    steps.into_iter().map(|(label, step)| Step { label, ..step }).collect()
}
