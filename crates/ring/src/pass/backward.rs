//! The backward pass: every rank accumulates the gradients of its queries, keys and values.

use std::ops::Range;

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{
    Dims, Element, GradientsMut, Hook, Inputs, Order, RowStatistics, Strides, View, ViewMut,
};

use super::gradients::{BiasSums, GradientSums};
use super::keys::Keys;
use super::rows::{Chosen, elements, gather, of_band};
use super::{Pass, ReceivedPart};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::layouts::{CompiledSchedule, KeyChunk};
use crate::problem::Problem;
use crate::schedule::{Leg, Part, Payload};
use crate::tokens;

/// State of the backward pass on one rank.
pub(crate) struct Backward<'a, E> {
    compiled: &'a CompiledSchedule,
    inputs: Inputs<'a, E>,
    dout: View<'a, E>,
    rows: RowStatistics<'a>,
    sums: GradientSums<'a>,
    keys: Keys<'a, E>,
    /// Gradients of received keys, including those of tree children.
    gradients: Vec<Vec<f32>>,
    /// Received remote queries, and their gradients.
    remote: Vec<Option<ReceivedPart>>,
    results: Vec<Option<Vec<f32>>>,
    /// Returned gradients, until they are added.
    returned: Vec<(Part, ReceivedPart)>,
}

const ORDER: Order = Order::Bhsd;

impl<'a, E: Element + Pod> Backward<'a, E> {
    pub(crate) fn new(
        compiled: &'a CompiledSchedule,
        inputs: Inputs<'a, E>,
        dout: View<'a, E>,
        rows: RowStatistics<'a>,
        sums: GradientSums<'a>,
    ) -> Self {
        let schedule = &compiled.schedule;
        Backward {
            compiled,
            inputs,
            dout,
            rows,
            sums,
            keys: Keys::new(compiled, &inputs),
            gradients: schedule.received_keys.iter().map(|_| Vec::new()).collect(),
            remote: schedule.remote_queries.iter().map(|_| None).collect(),
            results: schedule.remote_queries.iter().map(|_| None).collect(),
            returned: Vec::new(),
        }
    }

    fn tokens(&self) -> usize {
        self.inputs.q.dims().tokens
    }

    fn local_keys(&mut self, index: usize, mut hook: Hook<'_>) -> Result<()> {
        let Inputs { q, k, v } = self.inputs;
        let GradientSums { dq, dk, dv, biases } = &mut self.sums;
        let first = self.compiled.schedule.local_keys[index].start;
        for chunk in &self.compiled.computations.local_keys[index] {
            let keys = || first + chunk.keys.start..first + chunk.keys.end;
            let inputs = Inputs { q, k: k.tokens(keys()), v: v.tokens(keys()) };
            let into = GradientsMut::new(
                ViewMut::new(dq, q.dims(), ORDER)?,
                tokens_of(dk, k.dims(), keys())?,
                tokens_of(dv, v.dims(), keys())?,
            );
            let into = biases.with(into);
            chunk.components.accumulate(inputs, self.dout, self.rows, into, hook.reborrow())?;
        }
        Ok(())
    }

    fn received_keys(&mut self, index: usize, hook: Hook<'_>) -> Result<()> {
        let here = self.keys.received(index)?;
        let compiled = self.compiled;
        let problem = &compiled.problem;
        let plan = &compiled.schedule.received_keys[index];
        let (k, v) = here.views(problem, &compiled.schedule.bands[plan.band])?;
        let mut gradients = std::mem::take(&mut self.gradients[index]);
        let keys = k.dims().elements().unwrap_or(0);
        // Gradients of tree children arrive, and are added, later.
        gradients.resize(keys + v.dims().elements().unwrap_or(0), 0.0);
        let (dk, dv) = gradients.split_at_mut(keys);
        let chunks = &compiled.computations.received_keys[index];
        let GradientSums { dq: own, biases, .. } = &mut self.sums;
        let Some(queries) = &plan.queries else {
            let some = Queries { q: self.inputs.q, dout: self.dout, rows: self.rows };
            accumulate(chunks, (k, v), some, (own, dk, dv), biases, hook)?;
            self.gradients[index] = gradients;
            return Ok(());
        };
        let tokens: Vec<_> = tokens::indices(queries).collect();
        let heads: Vec<_> = (0..problem.heads).collect();
        let chosen = Chosen { of: (problem.heads, self.tokens()), heads: &heads, tokens: &tokens };
        let row_bytes = problem.backward_query_bytes();
        let mut bytes = Buffer::zeroed(tokens.len() * heads.len() * row_bytes);
        self.write_queries(&chosen, &mut bytes);
        let some = QueryRows::<E>::read(problem, heads.len(), tokens.len(), &bytes);
        let some = some.queries(problem, tokens.len())?;
        let mut dq = vec![0.0; some.q.dims().elements().unwrap_or(0)];
        accumulate(chunks, (k, v), some, (&mut dq, dk, dv), &mut self.sums.biases, hook)?;
        chosen.scatter(self.sums.dq, problem.dim, &dq);
        self.gradients[index] = gradients;
        Ok(())
    }

    fn remote_queries(&mut self, index: usize, hook: Hook<'_>) -> Result<()> {
        let received = self.remote[index].take().expect("remote queries received");
        let problem = &self.compiled.problem;
        let remote = &self.compiled.schedule.remote_queries[index];
        let count = remote.positions.len();
        let tokens: Vec<_> = (0..count).collect();
        let chosen = of_band(self.compiled, remote.band, count, &tokens);
        let some = QueryRows::<E>::read(problem, chosen.heads.len(), count, received.bytes());
        // Heads of other bands are computed with nothing.
        let lists = some.lists.map(|list| chosen.spread(problem.batch, 1, 0.0, list));
        let [q, dout] = [(some.q, problem.dim), (some.dout, problem.value_dim)]
            .map(|(rows, dim)| chosen.spread(problem.batch, dim, E::default(), rows));
        let lists = [&lists[0][..], &lists[1], &lists[2]];
        let some = QueryRows { lists, q: &q, dout: &dout }.queries(problem, count)?;
        let mut dq = vec![0.0; some.q.dims().elements().unwrap_or(0)];
        let Inputs { k, v, .. } = self.inputs;
        let GradientSums { dk, dv, biases, .. } = &mut self.sums;
        let into = biases.with(GradientsMut::new(
            ViewMut::new(&mut dq, some.q.dims(), ORDER)?,
            ViewMut::new(dk, k.dims(), ORDER)?,
            ViewMut::new(dv, v.dims(), ORDER)?,
        ));
        let components = &self.compiled.computations.remote_queries[index];
        components.accumulate(Inputs { q: some.q, k, v }, some.dout, some.rows, into, hook)?;
        let mut own = vec![0.0; problem.batch * chosen.heads.len() * count * problem.dim];
        chosen.gather_sums(&dq, problem.dim, &mut own);
        self.results[index] = Some(own);
        Ok(())
    }

    /// Writes queries and the inputs of their gradients.
    fn write_queries(&self, chosen: &Chosen<'_>, into: &mut [u8]) {
        let rest = chosen.gather(self.rows.lse, into);
        let rest = match self.rows.lse_lo {
            Some(list) => chosen.gather(list, rest),
            None => {
                let rows = self.compiled.problem.batch * chosen.heads.len() * chosen.tokens.len();
                let (none, rest) = rest.split_at_mut(rows * size_of::<f32>());
                none.fill(0);
                rest
            }
        };
        let rest = chosen.gather(self.rows.delta, rest);
        let rest = gather(&self.inputs.q, chosen.heads, chosen.tokens, rest);
        gather(&self.dout, chosen.heads, chosen.tokens, rest);
    }

    /// Adds returned gradients.
    fn add(&mut self, part: Part, received: &ReceivedPart) {
        let from: &[f32] = cast_slice(received.bytes());
        let (problem, schedule, all) =
            (&self.compiled.problem, &self.compiled.schedule, self.tokens());
        match part.payload {
            Payload::SentKeys(index) => {
                let sent = &schedule.sent_keys[index];
                let tokens: Vec<_> = tokens::indices(&sent.tokens).collect();
                let heads = &schedule.bands[sent.band].key_heads[..];
                let chosen = Chosen { of: (problem.key_heads, all), heads, tokens: &tokens };
                let keys = problem.batch * heads.len() * tokens.len() * problem.dim;
                chosen.scatter(self.sums.dk, problem.dim, &from[..keys]);
                chosen.scatter(self.sums.dv, problem.value_dim, &from[keys..]);
            }
            Payload::ForwardedKeys(index, _) => {
                let into = &mut self.gradients[index];
                into.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
            Payload::SentQueries(index) => {
                let sent = &schedule.sent_queries[index];
                let tokens: Vec<_> = tokens::indices(&sent.queries).collect();
                let chosen = of_band(self.compiled, sent.band, all, &tokens);
                chosen.scatter(self.sums.dq, problem.dim, from);
            }
            other => unreachable!("{other:?} is not returned"),
        }
    }
}

/// Accumulates the gradients of keys and of some queries, chunk by chunk.
fn accumulate<E: Element>(
    chunks: &[KeyChunk],
    (k, v): (View<'_, E>, View<'_, E>),
    some: Queries<'_, E>,
    (dq, dk, dv): (&mut [f32], &mut [f32], &mut [f32]),
    biases: &mut BiasSums<'_>,
    mut hook: Hook<'_>,
) -> Result<()> {
    for KeyChunk { components, keys } in chunks {
        let keys = || keys.clone();
        let inputs = Inputs { q: some.q, k: k.tokens(keys()), v: v.tokens(keys()) };
        let into = GradientsMut::new(
            ViewMut::new(dq, some.q.dims(), ORDER)?,
            tokens_of(dk, k.dims(), keys())?,
            tokens_of(dv, v.dims(), keys())?,
        );
        components.accumulate(inputs, some.dout, some.rows, biases.with(into), hook.reborrow())?;
    }
    Ok(())
}

/// A mutable view of some tokens of `[batch, head, token, dim]`.
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

/// Queries, and the inputs of their gradients.
struct Queries<'b, E> {
    q: View<'b, E>,
    dout: View<'b, E>,
    rows: RowStatistics<'b>,
}

/// The same as they lie in a message: `lse`, its low part and `delta`, then `q` and `dout`.
struct QueryRows<'b, E> {
    lists: [&'b [f32]; 3],
    q: &'b [E],
    dout: &'b [E],
}

impl<'b, E: Element + Pod> QueryRows<'b, E> {
    /// Of `heads` heads and `count` tokens.
    fn read(problem: &Problem, heads: usize, count: usize, bytes: &'b [u8]) -> Self {
        let rows = problem.batch * heads * count;
        let (lse, rest) = elements(bytes, rows);
        let (lse_lo, rest) = elements(rest, rows);
        let (delta, rest) = elements(rest, rows);
        let (q, rest) = elements(rest, rows * problem.dim);
        let (dout, _) = elements(rest, rows * problem.value_dim);
        QueryRows { lists: [lse, lse_lo, delta], q, dout }
    }

    fn queries(&self, problem: &Problem, count: usize) -> Result<Queries<'b, E>> {
        let [lse, lse_lo, delta] = self.lists;
        Ok(Queries {
            q: View::new(self.q, problem.query_dims(count), ORDER)?,
            dout: View::new(self.dout, problem.output_dims(count), ORDER)?,
            rows: RowStatistics { lse, lse_lo: Some(lse_lo), delta },
        })
    }
}

impl<E: Element + Pod> Pass for Backward<'_, E> {
    fn size(&self, part: Part) -> usize {
        self.keys.size(part)
    }

    fn fill(&mut self, part: Part, into: &mut [u8]) {
        match (part.payload, part.leg) {
            (Payload::SentKeys(_) | Payload::ForwardedKeys(..), _) => self.keys.fill(part, into),
            (Payload::ReceivedKeys(index), Leg::Return) => {
                let gradients = std::mem::take(&mut self.gradients[index]);
                cast_slice_mut(into).copy_from_slice(&gradients);
            }
            (Payload::SentQueries(index), Leg::Outbound) => {
                let sent = &self.compiled.schedule.sent_queries[index];
                let tokens: Vec<_> = tokens::indices(&sent.queries).collect();
                self.write_queries(
                    &of_band(self.compiled, sent.band, self.tokens(), &tokens),
                    into,
                );
            }
            (Payload::RemoteQueries(index), Leg::Return) => {
                let dq = self.results[index].take().expect("computed in the hop before");
                cast_slice_mut(into).copy_from_slice(&dq);
            }
            other => unreachable!("{other:?} is not sent in a backward pass"),
        }
    }

    fn keep(&mut self, part: Part, received: ReceivedPart) {
        match (part.payload, part.leg) {
            (Payload::ReceivedKeys(_), Leg::Length | Leg::Outbound) => {
                self.keys.keep(part, received)
            }
            (Payload::RemoteQueries(index), Leg::Outbound) => self.remote[index] = Some(received),
            (_, Leg::Return) => self.returned.push((part, received)),
            other => unreachable!("{other:?} is not received in a backward pass"),
        }
    }

    fn work(&mut self, on: Part, hook: Hook<'_>) -> Result<()> {
        match (on.payload, on.leg) {
            (Payload::LocalKeys(index), _) => self.local_keys(index, hook),
            (Payload::ReceivedKeys(index), Leg::Outbound) => self.received_keys(index, hook),
            (Payload::RemoteQueries(index), Leg::Outbound) => self.remote_queries(index, hook),
            _ => {
                let (part, received) = self.returned.remove(0);
                self.add(part, &received);
                Ok(())
            }
        }
    }

    fn describe(&self, part: Part, rank: usize) -> String {
        super::describe(part, rank, "gradients of queries")
    }
}
