//! Who sends what to whom, in which step: one rank's part of it.
//!
//! A step is a label that both ends of a message know. In a hop a rank sends and receives all that
//! has the next label, and works on what arrived before:
//!
//! ```text
//! hop of step 1   | hop of step 2          | hop of step 3
//! own keys        | what came in step 1    | what came in step 2
//! ```
//!
//! Own keys are also worked on where nothing else is left to be: see [`own`].
//!
//! Keys that rank `s` sends to rank `r` itself travel in step `(r − s) mod ranks`, so that in a
//! step no rank sends to two. What is made of a message that came in step `t` is ready for step
//! `t + 2`. Labels grow along every chain of messages, and a rank waits for its labels in order:
//! whatever a rank waits for depends on smaller labels alone, so no two can wait for each other.
//!
//! Where results have to be the same for every number of ranks, the label of keys is their place in
//! the sequence, own ones included: every rank folds them in ascending order, tile by tile.

mod own;

use std::collections::BTreeMap;
use std::ops::Range;

use longspan::{Positions, Progression};

use crate::deal::{Deal, Tree};
use crate::problem::{Fold, Problem};
use crate::tokens::{self, Tokens};
use crate::want::Want;

/// What one rank does in both passes.
#[derive(Debug)]
pub(crate) struct Schedule {
    /// Own keys that are worked on together, by number.
    pub(crate) own: Vec<Range<usize>>,
    pub(crate) departures: Vec<Departure>,
    pub(crate) arrivals: Vec<Arrival>,
    pub(crate) visits: Vec<Visit>,
    pub(crate) hostings: Vec<Hosting>,
    pub(crate) forward: Vec<Step>,
    pub(crate) backward: Vec<Step>,
}

/// Own keys that go to another rank.
#[derive(Debug)]
pub(crate) struct Departure {
    pub(crate) tokens: Tokens,
}

/// Keys of another rank.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// Where they stand.
    pub(crate) positions: Positions,
    /// The queries that see them here, where that isn't all.
    pub(crate) stay: Option<Tokens>,
    /// Ranks that have them from this one.
    pub(crate) children: usize,
}

/// Own queries that go to another rank's keys.
#[derive(Debug)]
pub(crate) struct Visit {
    pub(crate) queries: Tokens,
}

/// Queries of another rank that come to own keys.
#[derive(Debug)]
pub(crate) struct Hosting {
    /// Where they stand.
    pub(crate) positions: Positions,
}

/// What a part of a message is about, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum About {
    /// Own keys, which don't travel.
    Own(usize),
    Departure(usize),
    Arrival(usize),
    /// An arrival that goes on to another rank, and which one of those.
    Child(usize, usize),
    Visit(usize),
    Hosting(usize),
}

/// Whether a part goes out, or what was made of it comes back; before it goes out a notice says
/// how long it will be, where that depends on the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    Out,
    Back,
    Notice,
}

/// A part of a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) about: About,
    pub(crate) way: Way,
    /// At most, where there is a notice.
    pub(crate) bytes: usize,
}

/// All that one rank tells another in a step.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) peer: usize,
    pub(crate) parts: Vec<Part>,
}

/// A hop, and what to work on once it is done.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) label: u32,
    pub(crate) sends: Vec<Message>,
    pub(crate) receives: Vec<Message>,
    /// In this order.
    pub(crate) work: Vec<Part>,
}

/// Parts begin at multiples of this, so that numbers in them are aligned.
pub(crate) const ALIGN: usize = 8;

impl Message {
    /// Bytes of what it is about.
    pub(crate) fn bytes(&self) -> u64 {
        let parts = self.parts.iter().filter(|part| part.way != Way::Notice);
        parts.map(|part| part.bytes as u64).sum()
    }
}

/// A part, before it is known what else travels with it.
#[derive(Clone, Copy)]
struct Event {
    sent: bool,
    label: u32,
    peer: usize,
    /// The same at both ends: kind, owner, tree.
    order: (u8, usize, u32),
    part: Part,
}

/// What a rank knows before it makes its schedule.
pub(crate) struct Known<'a> {
    pub(crate) rank: usize,
    /// What it wants of each rank.
    pub(crate) wants: &'a [Want],
    /// How it gets that from each rank.
    pub(crate) dealt: &'a [(Tokens, Vec<Tree>)],
    /// How its own keys get to others.
    pub(crate) deal: &'a Deal,
    /// Numbers of each rank's queries that come here.
    pub(crate) guests: &'a [Tokens],
}

/// Ways of one kind of part, out and back.
#[derive(Default)]
struct Ways {
    out: Vec<Event>,
    back: Vec<Event>,
}

impl Ways {
    /// Adds both ways of a part: its step, whether this rank sends it, how large it is.
    fn add(
        &mut self,
        peer: usize,
        order: (u8, usize, u32),
        about: About,
        out: (u32, bool, usize),
        back: (u32, bool, usize),
    ) {
        let event = |(label, sent, bytes): (u32, bool, usize), way| {
            let order = (order.0 + way as u8, order.1, order.2);
            Event { sent, label, peer, order, part: Part { about, way, bytes } }
        };
        self.out.push(event(out, Way::Out));
        self.back.push(event(back, Way::Back));
    }
}

/// Kinds of parts, in the order in which they follow each other in a message.
const KEYS: u8 = 0;
const QUERIES: u8 = 2;
const NOTICES: u8 = 4;

impl Schedule {
    pub(crate) fn new(problem: &Problem, known: &Known<'_>) -> Self {
        let Known { rank, wants, dealt, deal, guests } = *known;
        let ranks = wants.len();
        let distance = |from: usize, to: usize| ((to + ranks - from) % ranks) as u32;
        let mut departures = Vec::new();
        let mut arrivals = Vec::new();
        let mut visits = Vec::new();
        let mut hostings = Vec::new();

        // Keys in bytes; queries counted, since both passes send other things of them.
        let (mut keys, mut queries) = (Ways::default(), Ways::default());
        let there = |tokens: &Tokens| problem.keys_len(tokens.len() as usize);
        let back = |tokens: &Tokens| tokens.len() as usize * problem.key_gradient_bytes();

        let own_held = problem.shards.rank(rank);
        for peer in (0..ranks).filter(|&peer| peer != rank) {
            let direct = &deal.direct[peer];
            let leaving = stretches(problem.fold, distance(rank, peer), own_held, direct);
            for (number, (out, tokens)) in leaving.into_iter().enumerate() {
                let order = (KEYS, rank, number as u32);
                let about = About::Departure(departures.len());
                let (to, from) = ((out, true, there(&tokens)), (out + 2, false, back(&tokens)));
                departures.push(Departure { tokens });
                keys.add(peer, order, about, to, from);
            }
            let held = problem.shards.rank(peer);
            let stay = &wants[peer].stay;
            let arrive = |tokens: &Tokens, children| Arrival {
                positions: tokens::stand(held, tokens),
                stay: stay.clone(),
                children,
            };
            let (direct, trees) = &dealt[peer];
            let coming = stretches(problem.fold, distance(peer, rank), held, direct);
            for (number, (out, tokens)) in coming.into_iter().enumerate() {
                let order = (KEYS, peer, number as u32);
                let about = About::Arrival(arrivals.len());
                arrivals.push(arrive(&tokens, 0));
                let (to, from) = ((out, false, there(&tokens)), (out + 2, true, back(&tokens)));
                keys.add(peer, order, about, to, from);
            }
            for tree in trees {
                let place = tree.place(rank).expect("a tree that this rank is in");
                let number = arrivals.len();
                let children: Vec<_> = tree.children(place).collect();
                arrivals.push(arrive(&tree.tokens, children.len()));
                let order = (KEYS, peer, 1 + tree.number);
                let (there, back) = (there(&tree.tokens), back(&tree.tokens));
                let parent = tree.ranks[(place - 1) / 2];
                let (to, from) = ((tree.step(place), false, there), (tree.back(place), true, back));
                keys.add(parent, order, About::Arrival(number), to, from);
                for (index, child) in children.into_iter().enumerate() {
                    let to = (tree.step(child), true, there);
                    let from = (tree.back(child), false, back);
                    keys.add(tree.ranks[child], order, About::Child(number, index), to, from);
                }
            }
            let out = distance(rank, peer);
            let visiting = &wants[peer].guests;
            if !visiting.is_empty() {
                let about = About::Visit(visits.len());
                visits.push(Visit { queries: visiting.clone() });
                let order = (QUERIES, peer, 0);
                let count = visiting.len() as usize;
                queries.add(peer, order, about, (out, true, count), (out + 2, false, count));
            }
            let out = distance(peer, rank);
            if !guests[peer].is_empty() {
                let about = About::Hosting(hostings.len());
                hostings.push(Hosting { positions: tokens::stand(held, &guests[peer]) });
                let order = (QUERIES, rank, 0);
                let count = guests[peer].len() as usize;
                queries.add(peer, order, about, (out, false, count), (out + 2, true, count));
            }
        }
        // Own tokens that go by a tree leave as departures to its first two ranks.
        for tree in &deal.trees {
            for child in tree.children(0) {
                let about = About::Departure(departures.len());
                departures.push(Departure { tokens: tree.tokens.clone() });
                let order = (KEYS, rank, 1 + tree.number);
                let to = (tree.step(child), true, there(&tree.tokens));
                let from = (tree.back(child), false, back(&tree.tokens));
                keys.add(tree.ranks[child], order, about, to, from);
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
            let notice = |event: &Event| Event {
                label: event.label - 1,
                order: (NOTICES, event.order.1, event.order.2),
                part: Part { way: Way::Notice, bytes: size_of::<u64>(), ..event.part },
                ..*event
            };
            let notices: Vec<_> = keys.out.iter().map(notice).collect();
            keys.out.extend(notices);
        }
        let mut forward = keys.out.clone();
        forward.extend(sized(&queries.out, problem.query_bytes()));
        forward.extend(sized(&queries.back, problem.state_bytes()));
        let mut backward = [keys.out, keys.back].concat();
        backward.extend(sized(&queries.out, problem.arrived_bytes()));
        backward.extend(sized(&queries.back, problem.query_gradient_bytes()));
        let (mut forward, mut backward) = (steps(forward), steps(backward));
        // Each part with the steps after which it is worked on, forward and backward.
        let parts: Vec<(u32, u32, Range<usize>)> = match problem.fold {
            Fold::Overlapped => {
                let parts = own::parts(own_held.len() as usize, &own::bare(&backward));
                parts.into_iter().map(|(label, part)| (0, label, part)).collect()
            }
            Fold::Reproducible => {
                let all = Positions::range(0, own_held.len());
                let all = all.expect("numbers of tokens at hand are small");
                let parts = stretches(problem.fold, 0, own_held, &all);
                let ranged = |(label, tokens): (u32, Tokens)| {
                    let first = tokens.get(0).map_or(0, |first| first as usize);
                    (label, label, first..first + tokens.len() as usize)
                };
                parts.into_iter().map(ranged).collect()
            }
        };
        let mut own = Vec::with_capacity(parts.len());
        for (number, (in_forward, in_backward, part)) in parts.into_iter().enumerate() {
            for (steps, label) in [(&mut forward, in_forward), (&mut backward, in_backward)] {
                let part = Part { about: About::Own(number), way: Way::Out, bytes: 0 };
                steps.entry(label).or_default().work.push(part);
            }
            own.push(part);
        }
        let (forward, backward) = (in_order(forward), in_order(backward));
        let mut schedule =
            Schedule { own, departures, arrivals, visits, hostings, forward, backward };
        if problem.fold == Fold::Reproducible {
            schedule.sort_work(own_held);
        }
        schedule
    }

    /// Work of a step in the order of its keys.
    fn sort_work(&mut self, held: &Positions) {
        let (own, arrivals) = (&self.own, &self.arrivals);
        let first = |part: &Part| match (part.about, part.way) {
            (About::Own(own_part), _) => held.get(own[own_part].start as u64),
            (About::Arrival(arrival), Way::Out) => arrivals[arrival].positions.get(0),
            _ => None,
        };
        for step in self.forward.iter_mut().chain(&mut self.backward) {
            step.work.sort_by_key(first);
        }
    }
}

/// Tokens of one stretch of the sequence are worked on in one step, where results are to be the same
/// for every number of ranks; a multiple of [`TILE`].
const STRETCH: i64 = 1_024;

/// Keys that are folded into a state at once then: a block, so that it makes no difference which
/// other rows see them.
pub(crate) const TILE: usize = 64;

/// In which steps keys travel: all in step `distance`, or by their place in the sequence.
fn stretches(fold: Fold, distance: u32, held: &Positions, tokens: &Tokens) -> Vec<(u32, Tokens)> {
    if tokens.is_empty() {
        return Vec::new();
    }
    if fold == Fold::Overlapped {
        return vec![(distance, tokens.clone())];
    }
    // Tokens that follow each other in the sequence.
    let mut found: Vec<(u32, Progression)> = Vec::new();
    let mut last = i64::MIN;
    for number in tokens::numbers(tokens) {
        let position = held.get(number as u64).expect("a token that is held");
        let label = (position / STRETCH) as u32 + 1;
        match found.last_mut().filter(|(same, _)| *same == label && last + 1 == position) {
            Some((_, stretch)) => stretch.len += 1,
            None => found.push((label, Progression { start: number as i64, step: 1, len: 1 })),
        }
        last = position;
    }
    let tokens = |stretch| Positions::new([stretch]).expect("numbers of tokens at hand are small");
    found.into_iter().map(|(label, stretch)| (label, tokens(stretch))).collect()
}

/// Events by step and peer, in an order that both ends know.
fn steps(mut events: Vec<Event>) -> BTreeMap<u32, Step> {
    let mut steps: BTreeMap<u32, Step> = BTreeMap::new();
    events.sort_by_key(|event| (event.label, event.peer, event.order));
    for event in events {
        let (label, sent) = (event.label, event.sent);
        // What goes back is made in the hop before.
        if sent && event.part.way == Way::Back {
            steps.entry(label - 1).or_default();
        }
        let step = steps.entry(label).or_default();
        if !sent && event.part.way != Way::Notice {
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

fn in_order(steps: BTreeMap<u32, Step>) -> Vec<Step> {
    steps.into_iter().map(|(label, step)| Step { label, ..step }).collect()
}
