//! A rank to which something happens.

use std::time::Duration;

use longspan_ring::{Failure, Hear, Hop, Meanwhile, Outgoing, Transport};

/// A transport to which something happens at one of the hops in which it sends. What sends nothing
/// can't send it wrongly.
pub(crate) struct Unlucky<T, S> {
    transport: T,
    strike: S,
    /// Until then; None if it has happened, or won't.
    hops_left: Option<usize>,
    /// Hops in which it has sent something.
    pub(crate) hops: usize,
    last: Vec<Outgoing>,
}

impl<T: Transport, S: FnMut(&mut [Outgoing], &[Outgoing])> Unlucky<T, S> {
    /// `strike` is given what is about to leave, and what left in the hop before.
    pub(crate) fn new(transport: T, at: Option<usize>, strike: S) -> Self {
        Unlucky { transport, strike, hops_left: at, hops: 0, last: Vec::new() }
    }
}

impl<T: Transport, S: FnMut(&mut [Outgoing], &[Outgoing])> Transport for Unlucky<T, S> {
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
                    (self.strike)(hop.sends, &self.last);
                }
                Some(left) => self.hops_left = Some(left - 1),
                None => {}
            }
            self.last = hop.sends.to_vec();
        }
        self.transport.hop(hop, meanwhile)
    }

    fn farewell(&mut self, told: &[u8], hear: &mut Hear<'_>, patience: Duration) {
        self.transport.farewell(told, hear, patience);
    }
}

/// Turns a bit of each.
pub(crate) fn flip(sends: &mut [Outgoing], bit: usize) {
    for send in sends {
        // Behind the header's checksum nothing is read up to its end.
        let bits = 8 * (send.bytes.len() - 16);
        let bit = bit % bits;
        let bit = if bit < 8 * 48 { bit } else { bit + 8 * 16 };
        send.bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

/// Makes each a byte longer.
pub(crate) fn grow(sends: &mut [Outgoing]) {
    for send in sends {
        send.bytes.resize(send.bytes.len() + 1);
    }
}

/// Puts what left before in the place of each, or nothing but zeros.
pub(crate) fn repeat(sends: &mut [Outgoing], last: &[Outgoing]) {
    for send in sends {
        match last.iter().find(|last| last.to == send.to) {
            Some(last) => send.bytes = last.bytes.clone(),
            None => send.bytes.fill(0),
        }
    }
}
