//! The backward pass: every rank adds up the gradients that its queries and its keys cause.

use std::ops::Range;

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{
    Dims, Element, GradientsMut, Hook, Inputs, Order, RowStatistics, Strides, View, ViewMut,
};

use super::keys::Keys;
use super::{Held, Pass, gather, gather_rows, numbers, scatter};
use crate::error::Result;
use crate::ring::{Piece, Works};
use crate::schedule::{About, Part, Way};
use crate::tokens;

/// What one rank holds during the backward pass.
pub(crate) struct Backward<'a, E> {
    works: &'a Works,
    inputs: Inputs<'a, E>,
    dout: View<'a, E>,
    rows: RowStatistics<'a>,
    /// Of this rank's own tokens, `[batch, head, token, dim]`.
    sums: Sums<'a>,
    keys: Keys<'a, E>,
    /// Gradients of each arrival, its children's included.
    gradients: Vec<Vec<f32>>,
    /// Queries of each hosting; then their gradients.
    guests: Vec<Option<Held>>,
    hosted: Vec<Option<Vec<f32>>>,
    /// What comes back, until it is added.
    back: Vec<(Part, Held)>,
}

/// Sums of gradients; zero at first.
pub(crate) struct Sums<'a> {
    pub(crate) dq: &'a mut [f32],
    pub(crate) dk: &'a mut [f32],
    pub(crate) dv: &'a mut [f32],
}

const ORDER: Order = Order::BatchHeadTokenDim;

impl<'a, E: Element + Pod> Backward<'a, E> {
    pub(crate) fn new(
        works: &'a Works,
        inputs: Inputs<'a, E>,
        dout: View<'a, E>,
        rows: RowStatistics<'a>,
        sums: Sums<'a>,
    ) -> Self {
        let schedule = &works.schedule;
        Backward {
            works,
            inputs,
            dout,
            rows,
            sums,
            keys: Keys::new(works, &inputs),
            gradients: schedule.arrivals.iter().map(|_| Vec::new()).collect(),
            guests: schedule.hostings.iter().map(|_| None).collect(),
            hosted: schedule.hostings.iter().map(|_| None).collect(),
            back: Vec::new(),
        }
    }

    fn tokens(&self) -> usize {
        self.inputs.q.dims().tokens
    }

    fn own(&mut self, own: usize, mut hook: Hook<'_>) -> Result<()> {
        let Inputs { q, k, v } = self.inputs;
        let Sums { dq, dk, dv } = &mut self.sums;
        let first = self.works.schedule.own[own].start;
        for piece in &self.works.own[own] {
            let keys = || first + piece.keys.start..first + piece.keys.end;
            let inputs = Inputs { q, k: k.tokens(keys()), v: v.tokens(keys()) };
            let into = GradientsMut {
                dq: ViewMut::new(dq, q.dims(), ORDER)?,
                dk: tokens_of(dk, k.dims(), keys())?,
                dv: tokens_of(dv, v.dims(), keys())?,
            };
            piece.attention.accumulate(inputs, self.dout, self.rows, into, hook.reborrow())?;
        }
        Ok(())
    }

    fn arrival(&mut self, arrival: usize, hook: Hook<'_>) -> Result<()> {
        let here = self.keys.arrival(arrival)?;
        let (works, all) = (self.works, self.tokens());
        let problem = &works.problem;
        let plan = &works.schedule.arrivals[arrival];
        let (k, v) = here.views(problem)?;
        let mut gradients = std::mem::take(&mut self.gradients[arrival]);
        let keys = k.dims().elements().unwrap_or(0);
        // Children's gradients are added later: they have come later.
        gradients.resize(keys + v.dims().elements().unwrap_or(0), 0.0);
        let (dk, dv) = gradients.split_at_mut(keys);
        let pieces = &works.arrivals[arrival];
        let Some(stay) = &plan.stay else {
            let some = Queries { q: self.inputs.q, dout: self.dout, rows: self.rows };
            accumulate(pieces, (k, v), some, (self.sums.dq, dk, dv), hook)?;
            self.gradients[arrival] = gradients;
            return Ok(());
        };
        let chosen: Vec<_> = tokens::numbers(stay).collect();
        let mut bytes = crate::buffer::Buffer::zeroed(chosen.len() * problem.arrived_bytes());
        self.send_queries(&chosen, &mut bytes);
        let some = Queries::<E>::read(problem, chosen.len(), &bytes)?;
        let mut dq = vec![0.0; some.q.dims().elements().unwrap_or(0)];
        accumulate(pieces, (k, v), some, (&mut dq, dk, dv), hook)?;
        scatter(self.sums.dq, all, problem.dim, &chosen, &dq);
        self.gradients[arrival] = gradients;
        Ok(())
    }

    fn host(&mut self, hosting: usize, hook: Hook<'_>) -> Result<()> {
        let held = self.guests[hosting].take().expect("guests have come");
        let problem = &self.works.problem;
        let count = self.works.schedule.hostings[hosting].positions.len() as usize;
        let some = Queries::<E>::read(problem, count, held.bytes())?;
        let mut dq = vec![0.0; some.q.dims().elements().unwrap_or(0)];
        let Inputs { k, v, .. } = self.inputs;
        let into = GradientsMut {
            dq: ViewMut::new(&mut dq, some.q.dims(), ORDER)?,
            dk: ViewMut::new(self.sums.dk, k.dims(), ORDER)?,
            dv: ViewMut::new(self.sums.dv, v.dims(), ORDER)?,
        };
        let attention = &self.works.hostings[hosting];
        attention.accumulate(Inputs { q: some.q, k, v }, some.dout, some.rows, into, hook)?;
        self.hosted[hosting] = Some(dq);
        Ok(())
    }

    /// Queries and what their gradients are made of, as they travel.
    fn send_queries(&self, tokens: &[usize], into: &mut [u8]) {
        let all = self.tokens();
        let rest = gather_rows(self.rows.lse, all, tokens, into);
        let rest = match self.rows.lse_rest {
            Some(list) => gather_rows(list, all, tokens, rest),
            None => {
                let heads = self.works.problem.batch * self.works.problem.heads;
                let (none, rest) = rest.split_at_mut(heads * tokens.len() * size_of::<f32>());
                none.fill(0);
                rest
            }
        };
        let rest = gather_rows(self.rows.delta, all, tokens, rest);
        let rest = gather(&self.inputs.q, tokens, rest);
        gather(&self.dout, tokens, rest);
    }

    /// Adds what has come back.
    fn add(&mut self, part: Part, held: &Held) {
        let from: &[f32] = cast_slice(held.bytes());
        let (problem, schedule, all) = (&self.works.problem, &self.works.schedule, self.tokens());
        match part.about {
            About::Departure(departure) => {
                let tokens: Vec<_> =
                    tokens::numbers(&schedule.departures[departure].tokens).collect();
                let keys = problem.key_dims(tokens.len()).elements().unwrap_or(0);
                scatter(self.sums.dk, all, problem.dim, &tokens, &from[..keys]);
                scatter(self.sums.dv, all, problem.value_dim, &tokens, &from[keys..]);
            }
            About::Child(arrival, _) => {
                let into = &mut self.gradients[arrival];
                into.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
            About::Visit(visit) => {
                let tokens: Vec<_> = tokens::numbers(&schedule.visits[visit].queries).collect();
                scatter(self.sums.dq, all, problem.dim, &tokens, from);
            }
            other => unreachable!("{other:?} doesn't come back"),
        }
    }
}

/// Adds the gradients of keys and of some queries, piece by piece.
fn accumulate<E: Element>(
    pieces: &[Piece],
    (k, v): (View<'_, E>, View<'_, E>),
    some: Queries<'_, E>,
    (dq, dk, dv): (&mut [f32], &mut [f32], &mut [f32]),
    mut hook: Hook<'_>,
) -> Result<()> {
    for Piece { attention, keys } in pieces {
        let keys = || keys.clone();
        let inputs = Inputs { q: some.q, k: k.tokens(keys()), v: v.tokens(keys()) };
        let into = GradientsMut {
            dq: ViewMut::new(dq, some.q.dims(), ORDER)?,
            dk: tokens_of(dk, k.dims(), keys())?,
            dv: tokens_of(dv, v.dims(), keys())?,
        };
        attention.accumulate(inputs, some.dout, some.rows, into, hook.reborrow())?;
    }
    Ok(())
}

/// Some tokens of `[batch, head, token, dim]`, to write.
fn tokens_of(data: &mut [f32], dims: Dims, tokens: Range<usize>) -> Result<ViewMut<'_, f32>> {
    let (token, head) = (dims.dim, dims.tokens * dims.dim);
    let strides = Strides {
        batch: (head * dims.heads) as isize,
        tokens: token as isize,
        heads: head as isize,
        dim: 1,
    };
    let first = tokens.start * dims.dim;
    Ok(ViewMut::strided(data, first, Dims { tokens: tokens.len(), ..dims }, strides)?)
}

/// Queries, and what their gradients are made of.
struct Queries<'b, E> {
    q: View<'b, E>,
    dout: View<'b, E>,
    rows: RowStatistics<'b>,
}

impl<'b, E: Element + Pod> Queries<'b, E> {
    fn read(problem: &crate::problem::Problem, count: usize, bytes: &'b [u8]) -> Result<Self> {
        let (q_dims, out_dims) = (problem.query_dims(count), problem.output_dims(count));
        let rows = q_dims.batch * q_dims.heads * count;
        let (lse, rest) = numbers(bytes, rows);
        let (lse_rest, rest) = numbers(rest, rows);
        let (delta, rest) = numbers(rest, rows);
        let (q, rest) = numbers(rest, q_dims.elements().unwrap_or(0));
        let (dout, _) = numbers(rest, out_dims.elements().unwrap_or(0));
        Ok(Queries {
            q: View::new(q, q_dims, ORDER)?,
            dout: View::new(dout, out_dims, ORDER)?,
            rows: RowStatistics { lse, lse_rest: Some(lse_rest), delta },
        })
    }
}

impl<E: Element + Pod> Pass for Backward<'_, E> {
    fn size(&self, part: Part) -> usize {
        self.keys.size(part)
    }

    fn fill(&mut self, part: Part, into: &mut [u8]) {
        match (part.about, part.way) {
            (About::Departure(_) | About::Child(..), _) => self.keys.fill(part, into),
            (About::Arrival(arrival), Way::Back) => {
                let gradients = std::mem::take(&mut self.gradients[arrival]);
                cast_slice_mut(into).copy_from_slice(&gradients);
            }
            (About::Visit(visit), Way::Out) => {
                let queries = &self.works.schedule.visits[visit].queries;
                self.send_queries(&tokens::numbers(queries).collect::<Vec<_>>(), into);
            }
            (About::Hosting(hosting), Way::Back) => {
                let dq = self.hosted[hosting].take().expect("made in the hop before");
                cast_slice_mut(into).copy_from_slice(&dq);
            }
            other => unreachable!("{other:?} isn't sent in a backward pass"),
        }
    }

    fn keep(&mut self, part: Part, held: Held) {
        match (part.about, part.way) {
            (About::Arrival(_), Way::Notice | Way::Out) => self.keys.keep(part, held),
            (About::Hosting(hosting), Way::Out) => self.guests[hosting] = Some(held),
            (_, Way::Back) => self.back.push((part, held)),
            other => unreachable!("{other:?} doesn't come in a backward pass"),
        }
    }

    fn work(&mut self, on: Part, hook: Hook<'_>) -> Result<()> {
        match (on.about, on.way) {
            (About::Own(own), _) => self.own(own, hook),
            (About::Arrival(arrival), Way::Out) => self.arrival(arrival, hook),
            (About::Hosting(hosting), Way::Out) => self.host(hosting, hook),
            _ => {
                let (part, held) = self.back.remove(0);
                self.add(part, &held);
                Ok(())
            }
        }
    }

    fn describe(&self, part: Part, rank: usize) -> String {
        super::describe(part, rank, "gradients of queries")
    }
}
