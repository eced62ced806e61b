//! Keys and values on their way: both passes send and receive them alike.

use bytemuck::Pod;
use longspan::{Element, Inputs, Order, View};

use super::{Held, gather, numbers};
use crate::error::Result;
use crate::problem::Problem;
use crate::ring::Works;
use crate::schedule::{About, Part, Way};
use crate::tokens;
use crate::wire::Wire;

/// Keys and values that leave and arrive during a pass.
pub(super) struct Keys<'a, E> {
    works: &'a Works,
    k: View<'a, E>,
    v: View<'a, E>,
    /// Of each departure, from its notice to its leaving.
    encoded: Vec<Option<Vec<u8>>>,
    /// How long each arrival is, where that varies.
    noticed: Vec<usize>,
    /// Each arrival, and how often it is still needed.
    arrived: Vec<Option<(Held, usize)>>,
}

impl<'a, E: Element + Pod> Keys<'a, E> {
    pub(super) fn new(works: &'a Works, inputs: &Inputs<'a, E>) -> Self {
        let schedule = &works.schedule;
        Keys {
            works,
            k: inputs.k,
            v: inputs.v,
            encoded: schedule.departures.iter().map(|_| None).collect(),
            noticed: vec![0; schedule.arrivals.len()],
            arrived: schedule.arrivals.iter().map(|_| None).collect(),
        }
    }

    /// Bytes of a part about keys.
    pub(super) fn size(&self, part: Part) -> usize {
        if part.way != Way::Out || !self.works.problem.wire.varies() {
            return part.bytes;
        }
        match part.about {
            About::Departure(departure) => {
                self.encoded[departure].as_ref().map_or(part.bytes, Vec::len)
            }
            About::Arrival(arrival) | About::Child(arrival, _) => self.noticed[arrival],
            _ => part.bytes,
        }
    }

    /// Writes keys that leave, or how many bytes they will be.
    pub(super) fn fill(&mut self, part: Part, into: &mut [u8]) {
        match (part.about, part.way) {
            (About::Departure(departure), Way::Notice) => {
                let bytes = self.encode(departure);
                into.copy_from_slice(&(bytes.len() as u64).to_le_bytes());
                self.encoded[departure] = Some(bytes);
            }
            (About::Child(arrival, _), Way::Notice) => {
                into.copy_from_slice(&(self.noticed[arrival] as u64).to_le_bytes());
            }
            (About::Departure(departure), Way::Out) => match self.works.problem.wire {
                Wire::Exact => {
                    let tokens = self.leaving(departure);
                    let rest = gather(&self.k, &tokens, into);
                    gather(&self.v, &tokens, rest);
                }
                _ => {
                    let bytes = self.encoded[departure].take();
                    into.copy_from_slice(&bytes.unwrap_or_else(|| self.encode(departure)));
                }
            },
            (About::Child(arrival, _), Way::Out) => {
                into.copy_from_slice(self.take(arrival).bytes());
            }
            other => unreachable!("{other:?} aren't keys that leave"),
        }
    }

    /// Keeps keys that have come, or how many bytes they will be.
    pub(super) fn keep(&mut self, part: Part, held: Held) {
        let About::Arrival(arrival) = part.about else {
            unreachable!("{part:?} aren't keys that come");
        };
        match part.way {
            Way::Notice => {
                let len = held.bytes().try_into().map(u64::from_le_bytes).expect("8 bytes");
                // An owner never has more to say than this.
                self.noticed[arrival] = (len as usize).min(self.most(arrival));
            }
            _ => {
                let uses = 1 + self.works.schedule.arrivals[arrival].children;
                self.arrived[arrival] = Some((held, uses));
            }
        }
    }

    /// An arrival to work on.
    pub(super) fn arrival(&mut self, arrival: usize) -> Result<Rows<E>> {
        let held = self.take(arrival);
        let problem = &self.works.problem;
        let tokens = self.works.schedule.arrivals[arrival].positions.len() as usize;
        if problem.wire == Wire::Exact {
            return Ok(Rows::Held(held, tokens));
        }
        let (k, v) = (problem.key_extent(tokens), problem.value_extent(tokens));
        let broken = crate::error::Error::Lists;
        let (k, rest) = problem.wire.decode(held.bytes(), k).ok_or(broken.clone())?;
        let (v, _) = problem.wire.decode(rest, v).ok_or(broken)?;
        Ok(Rows::Decoded(k, v, tokens))
    }

    fn most(&self, arrival: usize) -> usize {
        let tokens = self.works.schedule.arrivals[arrival].positions.len();
        self.works.problem.keys_len(tokens as usize)
    }

    fn leaving(&self, departure: usize) -> Vec<usize> {
        tokens::numbers(&self.works.schedule.departures[departure].tokens).collect()
    }

    fn encode(&self, departure: usize) -> Vec<u8> {
        let (problem, tokens) = (&self.works.problem, self.leaving(departure));
        let mut bytes = Vec::new();
        for (view, extent) in [
            (&self.k, problem.key_extent(tokens.len())),
            (&self.v, problem.value_extent(tokens.len())),
        ] {
            let mut rows = vec![E::default(); extent.numbers()];
            gather(view, &tokens, bytemuck::cast_slice_mut(&mut rows));
            problem.wire.encode(&rows, extent, &mut bytes);
        }
        bytes
    }

    /// An arrival's bytes; gone after their last use.
    fn take(&mut self, arrival: usize) -> Held {
        let slot = &mut self.arrived[arrival];
        let (held, uses) = slot.as_mut().expect("an arrival is used after it has come");
        let held = held.clone();
        *uses -= 1;
        if *uses == 0 {
            *slot = None;
        }
        held
    }
}

/// Keys and values of so many tokens that have come.
pub(super) enum Rows<E> {
    Held(Held, usize),
    Decoded(Vec<E>, Vec<E>, usize),
}

impl<E: Element + Pod> Rows<E> {
    pub(super) fn views(&self, problem: &Problem) -> Result<(View<'_, E>, View<'_, E>)> {
        let (Rows::Held(_, tokens) | Rows::Decoded(_, _, tokens)) = *self;
        let (k_dims, v_dims) = (problem.key_dims(tokens), problem.value_dims(tokens));
        let (k, v) = match self {
            Rows::Held(held, _) => {
                let (k, rest) = numbers(held.bytes(), problem.key_extent(tokens).numbers());
                (k, numbers(rest, problem.value_extent(tokens).numbers()).0)
            }
            Rows::Decoded(k, v, _) => (&k[..], &v[..]),
        };
        let order = Order::BatchHeadTokenDim;
        Ok((View::new(k, k_dims, order)?, View::new(v, v_dims, order)?))
    }
}
