//! Checked messages over a transport, and the collectives that are built from them. Setup and passes
//! communicate through it only.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Duration;

use crate::attribution::Attribution;
use crate::error::{Error, Result};
use crate::message::{self, Abort, Envelope, HEADER};
use crate::phase::Phase;
use crate::transport::{Failure, Hop, Incoming, Meanwhile, Outgoing, Poll, Transport};

/// How long an aborting rank broadcasts its abort and listens to those of other ranks.
const ABORT_TIMEOUT: Duration = Duration::from_millis(500);

/// The messages of one phase, over a transport.
pub(crate) struct Communicator<'t> {
    transport: &'t mut dyn Transport,
    phase: Phase,
    call: u32,
    timeout: Duration,
    /// The abort that ended a hop, if one did.
    received_abort: Option<Abort>,
}

impl<'t> Communicator<'t> {
    pub(crate) fn new(
        transport: &'t mut dyn Transport,
        phase: Phase,
        call: u32,
        timeout: Duration,
    ) -> Self {
        Communicator { transport, phase, call, timeout, received_abort: None }
    }

    pub(crate) fn rank(&self) -> usize {
        self.transport.rank()
    }

    pub(crate) fn size(&self) -> usize {
        self.transport.size()
    }

    fn envelope(&self, step: u32, from: usize, to: usize) -> Envelope {
        Envelope { phase: self.phase, call: self.call, step, from, to }
    }

    /// A hop of messages from [`message::blank`] with their contents in place; `awaited` describes the
    /// message of a rank for errors. Received messages are intact and the expected ones.
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
            message::seal(&mut send.bytes, self.envelope(step, rank, send.to));
        }
        let hop = Hop { sends, receives, timeout: self.timeout };
        if let Err(failure) = self.transport.hop(hop, meanwhile) {
            if let Failure::Length { beginning, .. } = &failure
                && let Some(abort) = message::decode_abort(beginning)
            {
                self.received_abort = Some(abort);
                return Err(abort.into());
            }
            let awaited = match &failure {
                Failure::Timeout { from, .. } if from.is_empty() => "sends to complete".to_owned(),
                _ => match failure.rank().filter(|rank| receives.iter().any(|r| r.from == *rank)) {
                    Some(rank) => awaited(rank),
                    None => receives.first().map_or("nothing".to_owned(), |r| awaited(r.from)),
                },
            };
            let (failure, phase, suspect) = (Box::new(failure), self.phase.name(), None);
            return Err(Error::Failed { failure, phase, step, awaited, suspect });
        }
        for receive in receives {
            let envelope = self.envelope(step, receive.from, rank);
            self.received_abort = message::decode_abort(&receive.bytes);
            message::open(&receive.bytes, envelope, &awaited(receive.from))?;
        }
        Ok(())
    }

    /// Computes without transfers. The transport is polled all the same: it may stop the computation.
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
            // A computation stopped by a failed hop is not the cause.
            (Err(error), Some(Err(worked))) if !worked.is_stopped() => {
                drop(error);
                Err(worked)
            }
            (Err(error), _) => Err(error),
            (Ok(()), worked) => worked.expect("a hop computes once"),
        }
    }

    /// Allgather of the same number of bytes per rank; returns them by rank. Takes log₂ steps from
    /// `step` on, and returns only after every rank has called it.
    pub(crate) fn allgather(&mut self, step: u32, mine: &[u8], what: &str) -> Result<Vec<Vec<u8>>> {
        let (rank, size) = (self.rank(), self.size());
        // Of ranks `rank`, `rank + 1`, … in this order.
        let mut gathered = mine.to_vec();
        for round in rounds(size) {
            let many = (size - round.distance).min(round.distance) * mine.len();
            let mut bytes = message::blank(many);
            bytes[HEADER..].copy_from_slice(&gathered[..many]);
            let sends = &mut [Outgoing { to: (rank + size - round.distance) % size, bytes }];
            let from = (rank + round.distance) % size;
            let receives = &mut [Incoming { from, bytes: message::blank(many) }];
            let awaited = |rank| format!("{what} of rank {rank} and its successors");
            self.hop(step + round.index, sends, receives, &awaited, &mut |_| ())?;
            gathered.extend_from_slice(&receives[0].bytes[HEADER..]);
        }
        let of = |other: usize| (other + size - rank) % size * mine.len();
        Ok((0..size).map(|other| gathered[of(other)..][..mine.len()].to_vec()).collect())
    }

    /// All-to-all of byte strings of any length: sends `to_each[rank]` to each rank, and returns what
    /// each rank sent to this one.
    pub(crate) fn all_to_all(
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

    /// Sends an abort to all ranks in place of any message that they await from this one, `receivers`
    /// of its remaining messages first; then collects the aborts of other ranks. Returns the error
    /// with the suspect that they lead to.
    pub(crate) fn abort(
        &mut self,
        error: Error,
        step: u32,
        receivers: impl IntoIterator<Item = usize>,
    ) -> Error {
        let (rank, size) = (self.rank(), self.size());
        let mut attribution = Attribution::new(&error, self.received_abort, rank, size);
        let (suspect, cause) = attribution.own_report();
        let abort = Abort { by: rank, suspect, cause, phase: self.phase, step };
        let encoded = message::encode_abort(self.call, abort);
        let mut sent = BTreeSet::from([rank]);
        for to in receivers.into_iter().chain(0..size).filter(|&to| sent.insert(to)) {
            // One hop per rank: a send to a rank that is gone fails its hop. These sends complete
            // during the broadcast below, or never.
            let sends = &mut [Outgoing { to, bytes: encoded.clone() }];
            let hop = Hop { sends, receives: &mut [], timeout: Duration::ZERO };
            let _ = self.transport.hop(hop, &mut |_| ());
        }
        let listener = &mut |by: usize, bytes: &[u8]| {
            if let Some(abort) = message::decode_abort(bytes).filter(|abort| abort.by == by) {
                attribution.add_report(abort);
            }
            if attribution.is_settled() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        if size > 1 {
            self.transport.broadcast_abort(&encoded, listener, ABORT_TIMEOUT);
        }
        attribution.apply(error)
    }
}

struct Round {
    index: u32,
    distance: usize,
}

fn rounds(size: usize) -> impl Iterator<Item = Round> {
    (0..usize::BITS)
        .map(|index| Round { index, distance: 1 << index })
        .take_while(move |round| round.distance < size)
}
