//! Keys and values in flight: both passes send and receive them alike.

use bytemuck::Pod;
use longspan::{Dims, Element, Inputs, Order, View};

use super::ReceivedPart;
use super::rows::{elements, gather};
use crate::error::{Error, Result};
use crate::layouts::CompiledSchedule;
use crate::problem::Problem;
use crate::schedule::{Leg, Part, Payload};
use crate::sparsity::Band;
use crate::tokens;
use crate::wire::Wire;

/// Keys and values that are sent and received during a pass.
pub(super) struct Keys<'a, E> {
    compiled: &'a CompiledSchedule,
    k: View<'a, E>,
    v: View<'a, E>,
    /// Encoded keys to send, between their length and themselves.
    encoded: Vec<Option<Vec<u8>>>,
    /// Lengths of received keys, where they vary.
    lengths: Vec<usize>,
    /// Received keys, and their remaining uses.
    received: Vec<Option<(ReceivedPart, usize)>>,
}

impl<'a, E: Element + Pod> Keys<'a, E> {
    pub(super) fn new(compiled: &'a CompiledSchedule, inputs: &Inputs<'a, E>) -> Self {
        let schedule = &compiled.schedule;
        Keys {
            compiled,
            k: inputs.k,
            v: inputs.v,
            encoded: schedule.sent_keys.iter().map(|_| None).collect(),
            lengths: vec![0; schedule.received_keys.len()],
            received: schedule.received_keys.iter().map(|_| None).collect(),
        }
    }

    /// Bytes of a part of keys.
    pub(super) fn size(&self, part: Part) -> usize {
        if part.leg != Leg::Outbound || !self.compiled.problem.wire.varies() {
            return part.bytes;
        }
        match part.payload {
            Payload::SentKeys(index) => self.encoded[index].as_ref().map_or(part.bytes, Vec::len),
            Payload::ReceivedKeys(index) | Payload::ForwardedKeys(index, _) => self.lengths[index],
            _ => part.bytes,
        }
    }

    /// Writes keys to send, or their length.
    pub(super) fn fill(&mut self, part: Part, into: &mut [u8]) {
        match (part.payload, part.leg) {
            (Payload::SentKeys(index), Leg::Length) => {
                let bytes = self.encode(index);
                into.copy_from_slice(&(bytes.len() as u64).to_le_bytes());
                self.encoded[index] = Some(bytes);
            }
            (Payload::ForwardedKeys(index, _), Leg::Length) => {
                into.copy_from_slice(&(self.lengths[index] as u64).to_le_bytes());
            }
            (Payload::SentKeys(index), Leg::Outbound) => match self.compiled.problem.wire {
                Wire::Exact => {
                    let (band, tokens) = self.sent(index);
                    let rest = gather(&self.k, &band.key_heads, &tokens, into);
                    gather(&self.v, &band.key_heads, &tokens, rest);
                }
                _ => {
                    let bytes = self.encoded[index].take();
                    into.copy_from_slice(&bytes.unwrap_or_else(|| self.encode(index)));
                }
            },
            (Payload::ForwardedKeys(index, _), Leg::Outbound) => {
                into.copy_from_slice(self.take(index).bytes());
            }
            other => unreachable!("{other:?} are not keys to send"),
        }
    }

    /// Stores received keys, or their length.
    pub(super) fn keep(&mut self, part: Part, received: ReceivedPart) {
        let Payload::ReceivedKeys(index) = part.payload else {
            unreachable!("{part:?} are not received keys");
        };
        match part.leg {
            Leg::Length => {
                let len = received.bytes().try_into().map(u64::from_le_bytes).expect("8 bytes");
                // The length of a valid message never exceeds this.
                self.lengths[index] = (len as usize).min(self.max_len(index));
            }
            _ => {
                let uses = 1 + self.compiled.schedule.received_keys[index].children;
                self.received[index] = Some((received, uses));
            }
        }
    }

    /// Received keys to compute on.
    pub(super) fn received(&mut self, index: usize) -> Result<Rows<E>> {
        let received = self.take(index);
        let problem = &self.compiled.problem;
        let (band, tokens) = self.of_received(index);
        if problem.wire == Wire::Exact {
            return Ok(Rows::Received(received, tokens));
        }
        let (k, v) = (problem.key_extent(band, tokens), problem.value_extent(band, tokens));
        let broken = Error::Malformed;
        let (k, rest) = problem.wire.decode(received.bytes(), k).ok_or(broken.clone())?;
        let (v, _) = problem.wire.decode(rest, v).ok_or(broken)?;
        Ok(Rows::Decoded(k, v, tokens))
    }

    fn max_len(&self, index: usize) -> usize {
        let (band, tokens) = self.of_received(index);
        self.compiled.problem.keys_len(band, tokens)
    }

    /// The band of received keys, and how many tokens they are of.
    fn of_received(&self, index: usize) -> (&'a Band, usize) {
        let schedule = &self.compiled.schedule;
        let received = &schedule.received_keys[index];
        (&schedule.bands[received.band], received.positions.len())
    }

    /// The band and the tokens of keys to send.
    fn sent(&self, index: usize) -> (&'a Band, Vec<usize>) {
        let schedule = &self.compiled.schedule;
        let sent = &schedule.sent_keys[index];
        (&schedule.bands[sent.band], tokens::indices(&sent.tokens).collect())
    }

    fn encode(&self, index: usize) -> Vec<u8> {
        let (problem, (band, tokens)) = (&self.compiled.problem, self.sent(index));
        let mut bytes = Vec::new();
        for (view, extent) in [
            (&self.k, problem.key_extent(band, tokens.len())),
            (&self.v, problem.value_extent(band, tokens.len())),
        ] {
            let mut rows = vec![E::default(); extent.elements()];
            gather(view, &band.key_heads, &tokens, bytemuck::cast_slice_mut(&mut rows));
            problem.wire.encode(&rows, extent, &mut bytes);
        }
        bytes
    }

    /// The bytes of received keys; released after their last use.
    fn take(&mut self, index: usize) -> ReceivedPart {
        let slot = &mut self.received[index];
        let (received, uses) = slot.as_mut().expect("keys are used after they are received");
        let received = received.clone();
        *uses -= 1;
        if *uses == 0 {
            *slot = None;
        }
        received
    }
}

/// Received keys and values, and their number of tokens.
pub(super) enum Rows<E> {
    Received(ReceivedPart, usize),
    Decoded(Vec<E>, Vec<E>, usize),
}

impl<E: Element + Pod> Rows<E> {
    pub(super) fn views(
        &self,
        problem: &Problem,
        band: &Band,
    ) -> Result<(View<'_, E>, View<'_, E>)> {
        let (Rows::Received(_, tokens) | Rows::Decoded(_, _, tokens)) = *self;
        let k_dims = Dims { heads: band.key_heads.len(), ..problem.key_dims(tokens) };
        let v_dims = Dims { dim: problem.value_dim, ..k_dims };
        let (k, v) = match self {
            Rows::Received(received, _) => {
                let (k, rest) =
                    elements(received.bytes(), problem.key_extent(band, tokens).elements());
                (k, elements(rest, problem.value_extent(band, tokens).elements()).0)
            }
            Rows::Decoded(k, v, _) => (&k[..], &v[..]),
        };
        let order = Order::Bhsd;
        Ok((View::new(k, k_dims, order)?, View::new(v, v_dims, order)?))
    }
}
