//! Fault injection.

use std::time::Duration;

use longspan_ring::{AbortListener, Failure, Hop, Meanwhile, Outgoing, Transport};

/// A transport with a fault at one of the hops in which it sends.
pub(crate) struct Faulty<T, S> {
    transport: T,
    inject: S,
    /// Hops until the fault; none after it, or without one.
    hops_left: Option<usize>,
    /// Hops with sends so far.
    pub(crate) hops: usize,
    last: Vec<Outgoing>,
}

impl<T: Transport, S: FnMut(&mut [Outgoing], &[Outgoing])> Faulty<T, S> {
    /// `inject` gets the messages of the hop, and those of the hop before.
    pub(crate) fn new(transport: T, at: Option<usize>, inject: S) -> Self {
        Faulty { transport, inject, hops_left: at, hops: 0, last: Vec::new() }
    }
}

impl<T: Transport, S: FnMut(&mut [Outgoing], &[Outgoing])> Transport for Faulty<T, S> {
    fn rank(&self) -> usize {
        self.transport.rank()
    }

    fn size(&self) -> usize {
        self.transport.size()
    }

    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure> {
        if !hop.sends.is_empty() {
            self.hops += 1;
            match self.hops_left {
                Some(0) => {
                    self.hops_left = None;
                    (self.inject)(hop.sends, &self.last);
                }
                Some(left) => self.hops_left = Some(left - 1),
                None => {}
            }
            self.last = hop.sends.to_vec();
        }
        self.transport.hop(hop, meanwhile)
    }

    fn broadcast_abort(
        &mut self,
        message: &[u8],
        listener: &mut AbortListener<'_>,
        timeout: Duration,
    ) {
        self.transport.broadcast_abort(message, listener, timeout);
    }
}

/// Flips a bit of each message.
pub(crate) fn flip(sends: &mut [Outgoing], bit: usize) {
    for send in sends {
        // The padding between checksum and contents is not read.
        let bits = 8 * (send.bytes.len() - 16);
        let bit = bit % bits;
        let bit = if bit < 8 * 48 { bit } else { bit + 8 * 16 };
        send.bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Makes each message a byte longer.
pub(crate) fn grow(sends: &mut [Outgoing]) {
    for send in sends {
        send.bytes.resize(send.bytes.len() + 1);
    }
}

/// Replaces each message by the last one to the same rank, or by zeros.
pub(crate) fn repeat(sends: &mut [Outgoing], last: &[Outgoing]) {
    for send in sends {
        match last.iter().find(|last| last.to == send.to) {
            Some(last) => send.bytes = last.bytes.clone(),
            None => send.bytes.fill(0),
        }
    }
}
