//! The forward pass: partial softmaxes over local and received keys, merged.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{Element, Hook, Inputs, Order, State, View};

use super::keys::Keys;
use super::rows::{elements, gather, of_band};
use super::{Pass, ReceivedPart};
use crate::error::Result;
use crate::layouts::{CompiledSchedule, KeyChunk};
use crate::schedule::{Leg, Part, Payload};
use crate::tokens;

/// State of the forward pass on one rank.
pub(crate) struct Forward<'a, E> {
    compiled: &'a CompiledSchedule,
    inputs: Inputs<'a, E>,
    /// Softmax state of local queries.
    pub(crate) state: State,
    keys: Keys<'a, E>,
    /// Received remote queries.
    remote: Vec<Option<ReceivedPart>>,
    /// Their softmax states, to be returned.
    results: Vec<Option<State>>,
    /// Returned states of sent queries.
    returned: Vec<Option<ReceivedPart>>,
}

impl<'a, E: Element + Pod> Forward<'a, E> {
    /// Reuses the memory of a previous state, if there is one.
    pub(crate) fn new(
        compiled: &'a CompiledSchedule,
        inputs: Inputs<'a, E>,
        previous: Option<State>,
        hook: Hook<'_>,
    ) -> Result<Self> {
        let schedule = &compiled.schedule;
        let dims = compiled.problem.output_dims(inputs.q.dims().tokens);
        let state = match previous {
            Some(mut previous) if previous.dims() == dims => {
                compiled.kernels.clear_state(&mut previous, hook)?;
                previous
            }
            _ => State::empty(dims)?,
        };
        Ok(Forward {
            compiled,
            inputs,
            state,
            keys: Keys::new(compiled, &inputs),
            remote: schedule.remote_queries.iter().map(|_| None).collect(),
            results: schedule.remote_queries.iter().map(|_| None).collect(),
            returned: schedule.sent_queries.iter().map(|_| None).collect(),
        })
    }

    fn attend_received_keys(&mut self, index: usize, hook: Hook<'_>) -> Result<()> {
        let rows = self.keys.received(index)?;
        let problem = &self.compiled.problem;
        let plan = &self.compiled.schedule.received_keys[index];
        let chunks = &self.compiled.computations.received_keys[index];
        let (k, v) = rows.views(problem, &self.compiled.schedule.bands[plan.band])?;
        let Some(queries) = &plan.queries else {
            return extend(chunks, Inputs { k, v, ..self.inputs }, &mut self.state, hook);
        };
        let chosen: Vec<_> = tokens::indices(queries).collect();
        let dims = problem.query_dims(chosen.len());
        let mut rows = vec![E::default(); dims.elements().unwrap_or(0)];
        let heads: Vec<_> = (0..problem.heads).collect();
        gather(&self.inputs.q, &heads, &chosen, cast_slice_mut(&mut rows));
        let q = View::new(&rows, dims, Order::Bhsd)?;
        let mut state = State::empty(problem.output_dims(chosen.len()))?;
        extend(chunks, Inputs { q, k, v }, &mut state, hook)?;
        Ok(self.state.merge_tokens(&chosen, &state)?)
    }

    fn attend_remote_queries(&mut self, index: usize, hook: Hook<'_>) -> Result<()> {
        let received = self.remote[index].take().expect("remote queries received");
        let problem = &self.compiled.problem;
        let remote = &self.compiled.schedule.remote_queries[index];
        let (count, dims) = (remote.positions.len(), problem.query_dims(remote.positions.len()));
        let tokens: Vec<_> = (0..count).collect();
        let chosen = of_band(self.compiled, remote.band, count, &tokens);
        let q = chosen.spread(dims.batch, dims.dim, E::default(), cast_slice(received.bytes()));
        let q = View::new(&q, dims, Order::Bhsd)?;
        let mut state = State::empty(problem.output_dims(count))?;
        self.compiled.computations.remote_queries[index].extend(
            Inputs { q, ..self.inputs },
            &mut state,
            hook,
        )?;
        self.results[index] = Some(state);
        Ok(())
    }

    fn merge_returned_state(&mut self, index: usize) -> Result<()> {
        let received = self.returned[index].take().expect("states have been returned");
        let sent = &self.compiled.schedule.sent_queries[index];
        let tokens: Vec<_> = tokens::indices(&sent.queries).collect();
        let dims = self.compiled.problem.output_dims(tokens.len());
        let all: Vec<_> = (0..tokens.len()).collect();
        let chosen = of_band(self.compiled, sent.band, tokens.len(), &all);
        let rows = dims.batch * chosen.heads.len() * dims.tokens;
        let (maxima, rest) = elements::<f32>(received.bytes(), rows);
        let (totals, rest) = elements::<f32>(rest, rows);
        // Rows of other bands have seen nothing.
        let state = State::from_parts(
            dims,
            chosen.spread(dims.batch, 1, f32::NEG_INFINITY, maxima),
            chosen.spread(dims.batch, 1, 0.0, totals),
            chosen.spread(dims.batch, dims.dim, 0.0, cast_slice(rest)),
        )?;
        Ok(self.state.merge_tokens(&tokens, &state)?)
    }
}

impl<E: Element + Pod> Pass for Forward<'_, E> {
    fn size(&self, part: Part) -> usize {
        self.keys.size(part)
    }

    fn fill(&mut self, part: Part, into: &mut [u8]) {
        match (part.payload, part.leg) {
            (Payload::SentKeys(_) | Payload::ForwardedKeys(..), _) => self.keys.fill(part, into),
            (Payload::SentQueries(index), Leg::Outbound) => {
                let sent = &self.compiled.schedule.sent_queries[index];
                let heads = &self.compiled.schedule.bands[sent.band].heads;
                let tokens: Vec<_> = tokens::indices(&sent.queries).collect();
                gather(&self.inputs.q, heads, &tokens, into);
            }
            (Payload::RemoteQueries(index), Leg::Return) => {
                let state = self.results[index].take().expect("computed in the hop before");
                let band = self.compiled.schedule.remote_queries[index].band;
                let tokens: Vec<_> = (0..state.dims().tokens).collect();
                let chosen = of_band(self.compiled, band, tokens.len(), &tokens);
                let rest = chosen.gather(state.maxima(), into);
                let rest = chosen.gather(state.totals(), rest);
                chosen.gather_sums(state.sums(), state.dims().dim, cast_slice_mut(rest));
            }
            other => unreachable!("{other:?} is not sent in a forward pass"),
        }
    }

    fn keep(&mut self, part: Part, received: ReceivedPart) {
        match part.payload {
            Payload::ReceivedKeys(_) => self.keys.keep(part, received),
            Payload::RemoteQueries(index) => self.remote[index] = Some(received),
            Payload::SentQueries(index) => self.returned[index] = Some(received),
            other => unreachable!("{other:?} is not received in a forward pass"),
        }
    }

    fn work(&mut self, on: Part, hook: Hook<'_>) -> Result<()> {
        match on.payload {
            Payload::LocalKeys(index) => {
                let keys = self.compiled.schedule.local_keys[index].clone();
                let Inputs { q, k, v } = self.inputs;
                let inputs = Inputs { q, k: k.tokens(keys.clone()), v: v.tokens(keys) };
                extend(&self.compiled.computations.local_keys[index], inputs, &mut self.state, hook)
            }
            Payload::ReceivedKeys(index) => self.attend_received_keys(index, hook),
            Payload::RemoteQueries(index) => self.attend_remote_queries(index, hook),
            Payload::SentQueries(index) => self.merge_returned_state(index),
            other => unreachable!("{other:?} is not received in a forward pass"),
        }
    }

    fn describe(&self, part: Part, rank: usize) -> String {
        super::describe(part, rank, "partial softmaxes")
    }
}

/// Updates a state with keys, chunk by chunk.
fn extend<E: Element>(
    chunks: &[KeyChunk],
    inputs: Inputs<'_, E>,
    state: &mut State,
    mut hook: Hook<'_>,
) -> Result<()> {
    for chunk in chunks {
        let keys = || chunk.keys.clone();
        let inputs = Inputs { k: inputs.k.tokens(keys()), v: inputs.v.tokens(keys()), ..inputs };
        chunk.components.extend(inputs, state, hook.reborrow())?;
    }
    Ok(())
}
