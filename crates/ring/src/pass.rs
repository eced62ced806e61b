//! The hop loop: messages are in flight while the kernel computes on those of the hop before. `ring`
//! runs passes through it.

mod backward;
mod forward;
mod gradients;
mod keys;
mod rows;
mod runner;

use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use longspan::Hook;

pub(crate) use self::backward::Backward;
pub(crate) use self::forward::Forward;
pub(crate) use self::gradients::{BiasSums, GradientSums, f32_sums};
pub(crate) use self::runner::{DONE, Runner};

use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::message::{self, HEADER};
use crate::schedule::{ALIGN, Leg, Message, Part, Payload, Step};
use crate::transport::{Incoming, Outgoing};

/// How a pass handles the parts of messages.
pub(crate) trait Pass {
    /// Bytes of a part; an upper bound until its length is known.
    fn size(&self, part: Part) -> usize;

    /// Writes a part to send.
    fn fill(&mut self, part: Part, into: &mut [u8]);

    /// Stores a received part.
    fn keep(&mut self, part: Part, received: ReceivedPart);

    /// Computes on a part that was received, or on local keys.
    fn work(&mut self, on: Part, hook: Hook<'_>) -> Result<()>;

    /// Description for errors.
    fn describe(&self, part: Part, rank: usize) -> String;
}

/// The bytes of a received part; parts of a message share its buffer.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedPart {
    message: Rc<Buffer>,
    range: Range<usize>,
}

impl ReceivedPart {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.message[self.range.clone()]
    }
}

/// Counters of all passes of a ring on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Tally {
    /// Messages received.
    pub messages: u64,
    /// Bytes received: keys, values, queries, states and gradients.
    pub received: u64,
    /// Bytes sent, likewise.
    pub sent: u64,
    /// Largest sum of received bytes that were in flight or in use at once.
    pub most_held: u64,
    /// Time in kernels.
    pub computing: Duration,
    /// Time spent waiting for messages.
    pub waiting: Duration,
}

/// An error that ended a pass.
pub(crate) struct PassFailure {
    pub(crate) error: Box<Error>,
    /// The step of the error.
    pub(crate) step: u32,
    /// Ranks that await further messages of this one.
    pub(crate) receivers: Vec<usize>,
}

/// Executes the steps of a pass.
pub(crate) fn run(
    comm: &mut Communicator<'_>,
    steps: &[Step],
    pass: &mut dyn Pass,
    tally: &mut Tally,
) -> Result<(), PassFailure> {
    let mut due: &[Part] = &[];
    let mut held = 0;
    for (index, step) in steps.iter().enumerate() {
        let mut sends: Vec<_> = step.sends.iter().map(|message| pack(message, pass)).collect();
        let lengths: Vec<_> = step.receives.iter().map(|message| length(message, pass)).collect();
        let receive = |(message, len): (&Message, &usize)| Incoming {
            from: message.peer,
            bytes: message::blank(*len),
        };
        let mut receives: Vec<_> = step.receives.iter().zip(&lengths).map(receive).collect();
        let incoming = step.receives.iter().map(|message| contents(message, pass)).sum::<u64>();
        tally.most_held = tally.most_held.max(held + incoming);
        let names: Vec<_> = step.receives.iter().map(|message| name(message, pass)).collect();
        let awaited = |rank| {
            let name = names.iter().find(|(peer, _)| *peer == rank);
            name.map_or_else(|| format!("rank {rank}"), |(_, name)| name.clone())
        };
        let mut worked = Ok(());
        let start = Instant::now();
        let mut computed = Duration::ZERO;
        let hopped = comm.hop(step.label, &mut sends, &mut receives, &awaited, &mut |poll| {
            let start = Instant::now();
            worked = due.iter().try_for_each(|on| pass.work(*on, Hook::new(&mut |_| poll())));
            computed = start.elapsed();
        });
        tally.computing += computed;
        tally.waiting += start.elapsed().saturating_sub(computed);
        let error = match (hopped, worked) {
            (Ok(()), Ok(())) => None,
            // A computation stopped by a failed hop is not the cause.
            (_, Err(error)) if !error.is_stopped() => Some(error),
            (Err(error), _) | (Ok(()), Err(error)) => Some(error),
        };
        if let Some(error) = error {
            let receivers = receivers(&steps[index + 1..]);
            return Err(PassFailure { error: error.into(), step: step.label, receivers });
        }
        tally.sent += step.sends.iter().map(|message| contents(message, pass)).sum::<u64>();
        tally.received += incoming;
        tally.messages += step.receives.len() as u64;
        held = incoming;
        for (message, receive) in step.receives.iter().zip(receives) {
            let buffer = Rc::new(receive.bytes);
            let mut from = HEADER;
            for &part in &message.parts {
                let range = from..from + pass.size(part);
                from += (range.end - range.start).next_multiple_of(ALIGN);
                pass.keep(part, ReceivedPart { message: buffer.clone(), range });
            }
        }
        due = &step.work;
    }
    let start = Instant::now();
    let step = steps.last().map_or(0, |step| step.label);
    let ended = comm.compute(step, |poll| {
        due.iter().try_for_each(|on| pass.work(*on, Hook::new(&mut |_| poll())))
    });
    tally.computing += start.elapsed();
    ended.map_err(|error| PassFailure { error: error.into(), step, receivers: Vec::new() })
}

/// Bytes of a message without its header.
fn length(message: &Message, pass: &dyn Pass) -> usize {
    message.parts.iter().map(|part| pass.size(*part).next_multiple_of(ALIGN)).sum()
}

/// Bytes of data and results in a message.
fn contents(message: &Message, pass: &dyn Pass) -> u64 {
    let parts = message.parts.iter().filter(|part| part.leg != Leg::Length);
    parts.map(|part| pass.size(*part) as u64).sum()
}

fn name(message: &Message, pass: &dyn Pass) -> (usize, String) {
    let parts = message.parts.iter().map(|part| pass.describe(*part, message.peer));
    (message.peer, parts.collect::<Vec<_>>().join(" and "))
}

/// Ranks that receive messages in some steps.
fn receivers(steps: &[Step]) -> Vec<usize> {
    steps.iter().flat_map(|step| &step.sends).map(|message| message.peer).collect()
}

fn pack(message: &Message, pass: &mut dyn Pass) -> Outgoing {
    let mut bytes = message::blank(length(message, pass));
    let mut from = HEADER;
    for &part in &message.parts {
        let size = pass.size(part);
        pass.fill(part, &mut bytes[from..from + size]);
        from += size.next_multiple_of(ALIGN);
    }
    Outgoing { to: message.peer, bytes }
}

/// Description of a part; `returned` is what the pass returns for queries.
fn describe(part: Part, rank: usize, returned: &str) -> String {
    let what = match (part.payload, part.leg) {
        (_, Leg::Length) => "the length of keys and values",
        (Payload::SentQueries(_) | Payload::RemoteQueries(_), Leg::Outbound) => "queries",
        (Payload::SentQueries(_) | Payload::RemoteQueries(_), Leg::Return) => returned,
        (_, Leg::Outbound) => "keys and values",
        (_, Leg::Return) => "gradients of keys and values",
    };
    format!("{what} from rank {rank}")
}
