//! The forward pass: partial softmaxes over what has come, joined.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{Element, Hook, Inputs, Order, State, View};

use super::{Held, Pass, gather, numbers};
use crate::error::Result;
use crate::ring::Works;
use crate::schedule::{About, Part, Way};
use crate::tokens;

/// What one rank holds during the forward pass.
pub(crate) struct Forward<'a, E> {
    works: &'a Works,
    inputs: Inputs<'a, E>,
    /// Of this rank's queries.
    pub(crate) state: State,
    /// Keys and values of each arrival, and how often they are still needed.
    arrived: Vec<Option<(Held, usize)>>,
    /// Queries of each hosting.
    guests: Vec<Option<Held>>,
    /// States of each hosting, to be sent back.
    hosted: Vec<Option<State>>,
    /// States of each visit, come back.
    visited: Vec<Option<Held>>,
}

impl<'a, E: Element + Pod> Forward<'a, E> {
    pub(crate) fn new(works: &'a Works, inputs: Inputs<'a, E>) -> Result<Self> {
        let schedule = &works.schedule;
        let state = State::empty(works.problem.output_dims(inputs.q.dims().tokens))?;
        Ok(Forward {
            works,
            inputs,
            state,
            arrived: schedule.arrivals.iter().map(|_| None).collect(),
            guests: schedule.hostings.iter().map(|_| None).collect(),
            hosted: schedule.hostings.iter().map(|_| None).collect(),
            visited: schedule.visits.iter().map(|_| None).collect(),
        })
    }

    /// The arrival's bytes; gone after its last use.
    fn use_arrival(&mut self, arrival: usize) -> Held {
        let slot = &mut self.arrived[arrival];
        let (held, uses) = slot.as_mut().expect("an arrival is used after it has come");
        let held = held.clone();
        *uses -= 1;
        if *uses == 0 {
            *slot = None;
        }
        held
    }

    fn arrival(&mut self, arrival: usize, hook: Hook<'_>) -> Result<()> {
        let held = self.use_arrival(arrival);
        let problem = &self.works.problem;
        let plan = &self.works.schedule.arrivals[arrival];
        let attention = &self.works.arrivals[arrival];
        let (k, v) = keys_and_values(problem, plan.positions.len() as usize, held.bytes())?;
        let Some(stay) = &plan.stay else {
            let inputs = Inputs { k, v, ..self.inputs };
            return Ok(attention.extend(inputs, &mut self.state, hook)?);
        };
        let chosen: Vec<_> = tokens::numbers(stay).collect();
        let dims = problem.query_dims(chosen.len());
        let mut rows = vec![E::default(); dims.elements().unwrap_or(0)];
        gather(&self.inputs.q, &chosen, cast_slice_mut(&mut rows));
        let q = View::new(&rows, dims, Order::BatchHeadTokenDim)?;
        let mut state = State::empty(problem.output_dims(chosen.len()))?;
        attention.extend(Inputs { q, k, v }, &mut state, hook)?;
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
        let state =
            State::from_parts(dims, maxima.to_vec(), totals.to_vec(), sums.to_vec())?;
        Ok(self.state.merge_tokens(&chosen, &state)?)
    }
}

impl<E: Element + Pod> Pass for Forward<'_, E> {
    fn fill(&mut self, part: Part, into: &mut [u8]) {
        match (part.about, part.way) {
            (About::Departure(departure), Way::Out) => {
                let tokens = &self.works.schedule.departures[departure].tokens;
                send_keys(&self.inputs, &tokens::numbers(tokens).collect::<Vec<_>>(), into);
            }
            (About::Child(arrival, _), Way::Out) => {
                into.copy_from_slice(self.use_arrival(arrival).bytes());
            }
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
            About::Arrival(arrival) => {
                let uses = 1 + self.works.schedule.arrivals[arrival].children;
                self.arrived[arrival] = Some((held, uses));
            }
            About::Hosting(hosting) => self.guests[hosting] = Some(held),
            About::Visit(visit) => self.visited[visit] = Some(held),
            other => unreachable!("{other:?} doesn't come in a forward pass"),
        }
    }

    fn work(&mut self, on: Option<Part>, hook: Hook<'_>) -> Result<()> {
        match on.map(|part| part.about) {
            None => Ok(self.works.own.extend(self.inputs, &mut self.state, hook)?),
            Some(About::Arrival(arrival)) => self.arrival(arrival, hook),
            Some(About::Hosting(hosting)) => self.host(hosting, hook),
            Some(About::Visit(visit)) => self.welcome(visit),
            Some(other) => unreachable!("{other:?} doesn't come in a forward pass"),
        }
    }

    fn describe(&self, part: Part, rank: usize) -> String {
        super::describe(part, rank, "partial softmaxes")
    }
}

/// Keys and values of some tokens, as they travel.
pub(super) fn send_keys<E: Element + Pod>(inputs: &Inputs<'_, E>, tokens: &[usize], into: &mut [u8]) {
    let rest = gather(&inputs.k, tokens, into);
    gather(&inputs.v, tokens, rest);
}

/// The reverse: views of what has come.
pub(super) fn keys_and_values<'b, E: Element + Pod>(
    problem: &crate::problem::Problem,
    tokens: usize,
    bytes: &'b [u8],
) -> Result<(View<'b, E>, View<'b, E>)> {
    let (k_dims, v_dims) = (problem.key_dims(tokens), problem.value_dims(tokens));
    let (k, rest) = numbers(bytes, k_dims.elements().unwrap_or(0));
    let (v, _) = numbers(rest, v_dims.elements().unwrap_or(0));
    let order = Order::BatchHeadTokenDim;
    Ok((View::new(k, k_dims, order)?, View::new(v, v_dims, order)?))
}
