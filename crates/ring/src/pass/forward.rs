//! The forward pass: partial softmaxes over what has come, joined.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{Element, Hook, Inputs, Order, State, View};

use super::keys::Keys;
use super::{Held, Pass, gather, numbers};
use crate::error::Result;
use crate::ring::{Piece, Works};
use crate::schedule::{About, Part, Way};
use crate::tokens;

/// What one rank holds during the forward pass.
pub(crate) struct Forward<'a, E> {
    works: &'a Works,
    inputs: Inputs<'a, E>,
    /// Of this rank's queries.
    pub(crate) state: State,
    keys: Keys<'a, E>,
    /// Queries of each hosting.
    guests: Vec<Option<Held>>,
    /// States of each hosting, to be sent back.
    hosted: Vec<Option<State>>,
    /// States of each visit, come back.
    visited: Vec<Option<Held>>,
}

impl<'a, E: Element + Pod> Forward<'a, E> {
    /// In the memory of a state from before, if there is one.
    pub(crate) fn new(
        works: &'a Works,
        inputs: Inputs<'a, E>,
        before: Option<State>,
        hook: Hook<'_>,
    ) -> Result<Self> {
        let schedule = &works.schedule;
        let dims = works.problem.output_dims(inputs.q.dims().tokens);
        let state = match before {
            Some(mut before) if before.dims() == dims => {
                works.kernels.clear_state(&mut before, hook)?;
                before
            }
            _ => State::empty(dims)?,
        };
        Ok(Forward {
            works,
            inputs,
            state,
            keys: Keys::new(works, &inputs),
            guests: schedule.hostings.iter().map(|_| None).collect(),
            hosted: schedule.hostings.iter().map(|_| None).collect(),
            visited: schedule.visits.iter().map(|_| None).collect(),
        })
    }

    fn arrival(&mut self, arrival: usize, hook: Hook<'_>) -> Result<()> {
        let rows = self.keys.arrival(arrival)?;
        let problem = &self.works.problem;
        let plan = &self.works.schedule.arrivals[arrival];
        let pieces = &self.works.arrivals[arrival];
        let (k, v) = rows.views(problem)?;
        let Some(stay) = &plan.stay else {
            return extend(pieces, Inputs { k, v, ..self.inputs }, &mut self.state, hook);
        };
        let chosen: Vec<_> = tokens::numbers(stay).collect();
        let dims = problem.query_dims(chosen.len());
        let mut rows = vec![E::default(); dims.elements().unwrap_or(0)];
        gather(&self.inputs.q, &chosen, cast_slice_mut(&mut rows));
        let q = View::new(&rows, dims, Order::BatchHeadTokenDim)?;
        let mut state = State::empty(problem.output_dims(chosen.len()))?;
        extend(pieces, Inputs { q, k, v }, &mut state, hook)?;
        Ok(self.state.merge_tokens(&chosen, &state)?)
    }

    fn host(&mut self, hosting: usize, hook: Hook<'_>) -> Result<()> {
        let held = self.guests[hosting].take().expect("guests have come");
        let problem = &self.works.problem;
        let count = self.works.schedule.hostings[hosting].positions.len() as usize;
        let dims = problem.query_dims(count);
        let q = View::new(cast_slice(held.bytes()), dims, Order::BatchHeadTokenDim)?;
        let mut state = State::empty(problem.output_dims(count))?;
        self.works.hostings[hosting].extend(Inputs { q, ..self.inputs }, &mut state, hook)?;
        self.hosted[hosting] = Some(state);
        Ok(())
    }

    fn welcome(&mut self, visit: usize) -> Result<()> {
        let held = self.visited[visit].take().expect("states have come back");
        let chosen: Vec<_> = tokens::numbers(&self.works.schedule.visits[visit].queries).collect();
        let dims = self.works.problem.output_dims(chosen.len());
        let rows = dims.batch * dims.heads * dims.tokens;
        let (maxima, rest) = numbers::<f32>(held.bytes(), rows);
        let (totals, rest) = numbers::<f32>(rest, rows);
        let sums: &[f32] = cast_slice(rest);
        let state = State::from_parts(dims, maxima.to_vec(), totals.to_vec(), sums.to_vec())?;
        Ok(self.state.merge_tokens(&chosen, &state)?)
    }
}

impl<E: Element + Pod> Pass for Forward<'_, E> {
    fn size(&self, part: Part) -> usize {
        self.keys.size(part)
    }

    fn fill(&mut self, part: Part, into: &mut [u8]) {
        match (part.about, part.way) {
            (About::Departure(_) | About::Child(..), _) => self.keys.fill(part, into),
            (About::Visit(visit), Way::Out) => {
                let queries = &self.works.schedule.visits[visit].queries;
                gather(&self.inputs.q, &tokens::numbers(queries).collect::<Vec<_>>(), into);
            }
            (About::Hosting(hosting), Way::Back) => {
                let state = self.hosted[hosting].take().expect("made in the hop before");
                let lists = [state.maxima(), state.totals(), state.sums()];
                let bytes = lists.iter().flat_map(|list| cast_slice::<f32, u8>(list));
                into.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            }
            other => unreachable!("{other:?} isn't sent in a forward pass"),
        }
    }

    fn keep(&mut self, part: Part, held: Held) {
        match part.about {
            About::Arrival(_) => self.keys.keep(part, held),
            About::Hosting(hosting) => self.guests[hosting] = Some(held),
            About::Visit(visit) => self.visited[visit] = Some(held),
            other => unreachable!("{other:?} doesn't come in a forward pass"),
        }
    }

    fn work(&mut self, on: Part, hook: Hook<'_>) -> Result<()> {
        match on.about {
            About::Own(own) => {
                let keys = self.works.schedule.own[own].clone();
                let Inputs { q, k, v } = self.inputs;
                let inputs = Inputs { q, k: k.tokens(keys.clone()), v: v.tokens(keys) };
                extend(&self.works.own[own], inputs, &mut self.state, hook)
            }
            About::Arrival(arrival) => self.arrival(arrival, hook),
            About::Hosting(hosting) => self.host(hosting, hook),
            About::Visit(visit) => self.welcome(visit),
            other => unreachable!("{other:?} doesn't come in a forward pass"),
        }
    }

    fn describe(&self, part: Part, rank: usize) -> String {
        super::describe(part, rank, "partial softmaxes")
    }
}

/// Adds keys to a state, piece by piece.
fn extend<E: Element>(
    pieces: &[Piece],
    inputs: Inputs<'_, E>,
    state: &mut State,
    mut hook: Hook<'_>,
) -> Result<()> {
    for piece in pieces {
        let keys = || piece.keys.clone();
        let inputs = Inputs { k: inputs.k.tokens(keys()), v: inputs.v.tokens(keys()), ..inputs };
        piece.attention.extend(inputs, state, hook.reborrow())?;
    }
    Ok(())
}
