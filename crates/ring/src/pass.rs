//! The one loop: messages travel while the kernel works on what came before.

mod backward;
mod forward;
mod keys;

use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{Element, Hook, View};

pub(crate) use self::backward::{Backward, Sums};
pub(crate) use self::forward::Forward;

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::link::Link;
use crate::message::{self, HEADER};
use crate::schedule::{ALIGN, About, Message, Part, Step, Way};
use crate::transport::{Incoming, Outgoing};

/// What a pass does with the parts of messages.
pub(crate) trait Pass {
    /// Bytes of a part, as far as that is known by now.
    fn size(&self, part: Part) -> usize;

    /// Writes a part that leaves.
    fn fill(&mut self, part: Part, into: &mut [u8]);

    /// Keeps a part that has come.
    fn keep(&mut self, part: Part, held: Held);

    /// Works on a part that has come, or on this rank's own keys.
    fn work(&mut self, on: Part, hook: Hook<'_>) -> Result<()>;

    /// In words, for errors.
    fn describe(&self, part: Part, rank: usize) -> String;
}

/// A part of a message that has come.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    message: Rc<Buffer>,
    range: Range<usize>,
}

impl Held {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.message[self.range.clone()]
    }
}

/// What passes have come to.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Tally {
    /// Messages that this rank has received.
    pub messages: u64,
    /// Bytes of keys, values, queries, states and gradients that it has received.
    pub received: u64,
    /// The same, sent.
    pub sent: u64,
    /// The largest sum of bytes that were on their way or worked on at once, received ones only.
    pub most_held: u64,
    /// Time in kernels.
    pub computing: Duration,
    /// Time in which nothing was computed because a message was awaited.
    pub waiting: Duration,
}

/// Where a pass came to an end before its time.
pub(crate) struct Stopped {
    pub(crate) error: Box<Error>,
    /// At which step.
    pub(crate) step: u32,
    /// Ranks that still wait for messages.
    pub(crate) owed: Vec<usize>,
}

/// Goes through the steps of a pass.
pub(crate) fn run(
    link: &mut Link<'_>,
    steps: &[Step],
    pass: &mut dyn Pass,
    tally: &mut Tally,
) -> Result<(), Stopped> {
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
        let coming = step.receives.iter().map(|message| contents(message, pass)).sum::<u64>();
        tally.most_held = tally.most_held.max(held + coming);
        let names: Vec<_> = step.receives.iter().map(|message| name(message, pass)).collect();
        let awaited = |rank| {
            let name = names.iter().find(|(peer, _)| *peer == rank);
            name.map_or_else(|| format!("rank {rank}"), |(_, name)| name.clone())
        };
        let mut worked = Ok(());
        let start = Instant::now();
        let mut computed = Duration::ZERO;
        let hopped = link.hop(step.label, &mut sends, &mut receives, &awaited, &mut |poll| {
            let start = Instant::now();
            worked = due.iter().try_for_each(|on| pass.work(*on, Hook::new(&mut |_| poll())));
            computed = start.elapsed();
        });
        tally.computing += computed;
        tally.waiting += start.elapsed().saturating_sub(computed);
        let error = match (hopped, worked) {
            (Ok(()), Ok(())) => None,
            // Work that was stopped because the hop had failed isn't what went wrong.
            (_, Err(error)) if !error.is_stopped() => Some(error),
            (Err(error), _) | (Ok(()), Err(error)) => Some(error),
        };
        if let Some(error) = error {
            let owed = owed(&steps[index + 1..]);
            return Err(Stopped { error: error.into(), step: step.label, owed });
        }
        tally.sent += step.sends.iter().map(|message| contents(message, pass)).sum::<u64>();
        tally.received += coming;
        tally.messages += step.receives.len() as u64;
        held = coming;
        for (message, receive) in step.receives.iter().zip(receives) {
            let buffer = Rc::new(receive.bytes);
            let mut from = HEADER;
            for &part in &message.parts {
                let range = from..from + pass.size(part);
                from += (range.end - range.start).next_multiple_of(ALIGN);
                pass.keep(part, Held { message: buffer.clone(), range });
            }
        }
        due = &step.work;
    }
    let start = Instant::now();
    let step = steps.last().map_or(0, |step| step.label);
    let ended = link.compute(step, |poll| {
        due.iter().try_for_each(|on| pass.work(*on, Hook::new(&mut |_| poll())))
    });
    tally.computing += start.elapsed();
    ended.map_err(|error| Stopped { error: error.into(), step, owed: Vec::new() })
}

/// Bytes of a message behind its header.
fn length(message: &Message, pass: &dyn Pass) -> usize {
    message.parts.iter().map(|part| pass.size(*part).next_multiple_of(ALIGN)).sum()
}

/// Bytes of what it is about.
fn contents(message: &Message, pass: &dyn Pass) -> u64 {
    let parts = message.parts.iter().filter(|part| part.way != Way::Notice);
    parts.map(|part| pass.size(*part) as u64).sum()
}

fn name(message: &Message, pass: &dyn Pass) -> (usize, String) {
    let parts = message.parts.iter().map(|part| pass.describe(*part, message.peer));
    (message.peer, parts.collect::<Vec<_>>().join(" and "))
}

/// Who waits for messages in such steps.
pub(crate) fn owed(steps: &[Step]) -> Vec<usize> {
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

/// In words, whatever the pass.
pub(crate) fn describe(part: Part, rank: usize, back: &str) -> String {
    let what = match (part.about, part.way) {
        (_, Way::Notice) => "the length of keys and values",
        (About::Visit(_) | About::Hosting(_), Way::Out) => "queries",
        (About::Visit(_) | About::Hosting(_), Way::Back) => back,
        (_, Way::Out) => "keys and values",
        (_, Way::Back) => "gradients of keys and values",
    };
    format!("{what} from rank {rank}")
}

/// Copies rows of some tokens, `[batch, head, token, dim]`, to the front of `into`. Returns the rest.
pub(crate) fn gather<'b, E: Element + Pod>(
    view: &View<'_, E>,
    tokens: &[usize],
    into: &'b mut [u8],
) -> &'b mut [u8] {
    let dims = view.dims();
    let numbers = dims.batch * dims.heads * tokens.len() * dims.dim;
    let (mine, rest) = into.split_at_mut(numbers * size_of::<E>());
    let rows: &mut [E] = cast_slice_mut(mine);
    let mut rows = rows.chunks_exact_mut(dims.dim);
    for entry in 0..dims.batch {
        for head in 0..dims.heads {
            for &token in tokens {
                view.copy_row(entry, token, head, rows.next().expect("a row a token"));
            }
        }
    }
    rest
}

/// Copies a number a row of some tokens, likewise.
pub(crate) fn gather_rows<'b>(
    list: &[f32],
    of: usize,
    tokens: &[usize],
    into: &'b mut [u8],
) -> &'b mut [u8] {
    let heads = list.len().checked_div(of).unwrap_or(0);
    let (mine, rest) = into.split_at_mut(heads * tokens.len() * size_of::<f32>());
    let rows: &mut [f32] = cast_slice_mut(mine);
    for head in 0..heads {
        for (index, &token) in tokens.iter().enumerate() {
            rows[head * tokens.len() + index] = list[head * of + token];
        }
    }
    rest
}

/// Adds rows of some tokens, `[head, token, dim]`, to those of all `of` tokens.
pub(crate) fn scatter(into: &mut [f32], of: usize, dim: usize, tokens: &[usize], from: &[f32]) {
    let rows = into.len() / dim.max(1);
    let heads = rows.checked_div(of).unwrap_or(0);
    for head in 0..heads {
        for (index, &token) in tokens.iter().enumerate() {
            let to = &mut into[(head * of + token) * dim..][..dim];
            let from = &from[(head * tokens.len() + index) * dim..][..dim];
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }
}

/// The first `count` numbers, and the bytes behind them.
pub(crate) fn numbers<E: Pod>(bytes: &[u8], count: usize) -> (&[E], &[u8]) {
    let (mine, rest) = bytes.split_at(count * size_of::<E>());
    (cast_slice(mine), rest)
}
