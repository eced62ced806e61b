//! Messages with headers over a transport, and what ranks do all together.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Duration;

use crate::blame::Hearing;
use crate::error::{Error, Result};
use crate::message::{self, Doing, GiveUp, HEADER, Place};
use crate::transport::{Failure, Hop, Incoming, Meanwhile, Outgoing, Poll, Transport};

/// How long a rank that gives up tells others and listens to them.
const FAREWELL: Duration = Duration::from_millis(500);

/// One thing that ranks do together, over a transport.
pub(crate) struct Link<'t> {
    transport: &'t mut dyn Transport,
    doing: Doing,
    call: u32,
    patience: Duration,
    /// Who has given up, if that is what a hop ended with.
    heard: Option<GiveUp>,
}

impl<'t> Link<'t> {
    pub(crate) fn new(
        transport: &'t mut dyn Transport,
        doing: Doing,
        call: u32,
        patience: Duration,
    ) -> Self {
        Link { transport, doing, call, patience, heard: None }
    }

    pub(crate) fn rank(&self) -> usize {
        self.transport.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.transport.size()
    }

    fn place(&self, step: u32, from: usize, to: usize) -> Place {
        Place { doing: self.doing, call: self.call, step, from, to }
    }

    /// A hop of messages from [`message::blank`], contents in place; `awaited` says in words what
    /// should come from a rank. Received ones are whole and the right ones.
    pub(crate) fn hop(
        &mut self,
        step: u32,
        sends: &mut [Outgoing],
        receives: &mut [Incoming],
        awaited: &dyn Fn(usize) -> String,
        meanwhile: &mut Meanwhile<'_>,
    ) -> Result<()> {
        let rank = self.rank();
        for send in &mut *sends {
            message::seal(&mut send.bytes, self.place(step, rank, send.to));
        }
        let hop = Hop { sends, receives, patience: self.patience };
        if let Err(failure) = self.transport.hop(hop, meanwhile) {
            if let Failure::Length { beginning, .. } = &failure
                && let Some(why) = message::given_up(beginning)
            {
                self.heard = Some(why);
                return Err(why.into());
            }
            let awaited = match &failure {
                Failure::Late { from, .. } if from.is_empty() => "messages to be taken".to_owned(),
                _ => match failure.rank().filter(|rank| receives.iter().any(|r| r.from == *rank)) {
                    Some(rank) => awaited(rank),
                    None => receives.first().map_or("nothing".to_owned(), |r| awaited(r.from)),
                },
            };
            let (failure, doing, blamed) = (Box::new(failure), self.doing.name(), None);
            return Err(Error::Failed { failure, doing, step, awaited, blamed });
        }
        for receive in receives {
            let place = self.place(step, receive.from, rank);
            self.heard = message::given_up(&receive.bytes);
            message::open(&receive.bytes, place, &awaited(receive.from))?;
        }
        Ok(())
    }

    /// Computes while nothing travels. The engine is polled all the same: it knows whether to go on.
    pub(crate) fn compute<T>(
        &mut self,
        step: u32,
        work: impl FnOnce(&mut Poll<'_>) -> Result<T>,
    ) -> Result<T> {
        let (mut work, mut worked) = (Some(work), None);
        let nothing = |_| "nothing".to_owned();
        let hopped = self.hop(step, &mut [], &mut [], &nothing, &mut |poll| {
            worked = work.take().map(|work| work(poll));
        });
        match (hopped, worked) {
            // Work that was stopped because the hop had failed isn't what went wrong.
            (Err(error), Some(Err(worked))) if !worked.is_stopped() => {
                drop(error);
                Err(worked)
            }
            (Err(error), _) => Err(error),
            (Ok(()), worked) => worked.expect("a hop computes once"),
        }
    }

    /// What every rank says, by rank; all say the same number of bytes. Takes log₂ steps from
    /// `step` on, and returns only once every rank has called it.
    pub(crate) fn gather(&mut self, step: u32, mine: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        let (rank, size) = (self.rank(), self.size());
        // Of ranks `rank`, `rank + 1`, … in turn.
        let mut known = mine.to_vec();
        for round in rounds(size) {
            let many = (size - round.distance).min(round.distance) * mine.len();
            let mut bytes = message::blank(many);
            bytes[HEADER..].copy_from_slice(&known[..many]);
            let sends = &mut [Outgoing { to: (rank + size - round.distance) % size, bytes }];
            let from = (rank + round.distance) % size;
            let receives = &mut [Incoming { from, bytes: message::blank(many) }];
            let awaited = |rank| format!("{what} of rank {rank} and those behind it");
            self.hop(step + round.number, sends, receives, &awaited, &mut |_| ())?;
            known.extend_from_slice(&receives[0].bytes[HEADER..]);
        }
        let of = |other: usize| (other + size - rank) % size * mine.len();
        Ok((0..size).map(|other| known[of(other)..][..mine.len()].to_vec()).collect())
    }

    /// Gives every rank what is for it, and returns what every rank had for this one.
    pub(crate) fn exchange(
        &mut self,
        step: u32,
        to_each: &[Vec<u8>],
        what: &str,
    ) -> Result<Vec<Vec<u8>>> {
        let (rank, size) = (self.rank(), self.size());
        let mut from_each = vec![Vec::new(); size];
        let awaited = |rank: usize| format!("{what} of rank {rank}");
        for distance in 1..size {
            let (to, from) = ((rank + distance) % size, (rank + size - distance) % size);
            let step = step + 2 * distance as u32;
            let mut bytes = message::blank(8);
            bytes[HEADER..].copy_from_slice(&(to_each[to].len() as u64).to_le_bytes());
            let sends = &mut [Outgoing { to, bytes }];
            let receives = &mut [Incoming { from, bytes: message::blank(8) }];
            self.hop(step, sends, receives, &awaited, &mut |_| ())?;
            let len = receives[0].bytes[HEADER..].try_into().expect("8 bytes");
            let len = u64::from_le_bytes(len) as usize;

            let mut sends = Vec::new();
            if !to_each[to].is_empty() {
                let mut bytes = message::blank(to_each[to].len());
                bytes[HEADER..].copy_from_slice(&to_each[to]);
                sends.push(Outgoing { to, bytes });
            }
            let mut receives = Vec::new();
            if len > 0 {
                receives.push(Incoming { from, bytes: message::blank(len) });
            }
            self.hop(step + 1, &mut sends, &mut receives, &awaited, &mut |_| ())?;
            if let Some(receive) = receives.first() {
                from_each[from] = receive.bytes[HEADER..].to_vec();
            }
        }
        Ok(from_each)
    }

    /// Tells all ranks that this one has given up, in place of what they wait for from it now or
    /// will, those that are `owed` something first; then hears whom others blame. Returns the error
    /// with that.
    pub(crate) fn give_up(
        &mut self,
        error: Error,
        step: u32,
        owed: impl IntoIterator<Item = usize>,
    ) -> Error {
        let (rank, size) = (self.rank(), self.size());
        let mut hearing = Hearing::about(&error, self.heard, rank, size);
        let (blamed, ground) = hearing.first_guess();
        let why = GiveUp { by: rank, blamed, ground, doing: self.doing, step };
        let told = message::give_up(self.call, why);
        let mut known = BTreeSet::from([rank]);
        for to in owed.into_iter().chain(0..size).filter(|&to| known.insert(to)) {
            // A hop each, because some of them may be gone, and one that can't leave ends its hop.
            // They leave while others are listened to, or never.
            let sends = &mut [Outgoing { to, bytes: told.clone() }];
            let hop = Hop { sends, receives: &mut [], patience: Duration::ZERO };
            let _ = self.transport.hop(hop, &mut |_| ());
        }
        let hear = &mut |by: usize, told: &[u8]| {
            if let Some(why) = message::given_up(told).filter(|why| why.by == by) {
                hearing.hear(why);
            }
            if hearing.is_over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        if size > 1 {
            self.transport.farewell(&told, hear, FAREWELL);
        }
        hearing.conclude(error)
    }
}

struct Round {
    number: u32,
    distance: usize,
}

fn rounds(size: usize) -> impl Iterator<Item = Round> {
    (0..usize::BITS)
        .map(|number| Round { number, distance: 1 << number })
        .take_while(move |round| round.distance < size)
}
