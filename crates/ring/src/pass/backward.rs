//! The backward pass: every rank accumulates the gradients of its queries, keys and values.

use std::ops::Range;

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{
    Dims, Element, GradientsMut, Hook, Inputs, Order, RowStatistics, Strides, View, ViewMut,
};

use super::gradients::{BiasSums, GradientSums};
use super::keys::Keys;
use super::rows::{elements, gather, gather_rows, scatter};
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
        for chunk in &self.compiled.local_keys[index] {
            let keys = || first + chunk.keys.start..first + chunk.keys.end;
            let inputs = Inputs { q, k: k.tokens(keys()), v: v.tokens(keys()) };
            let into = GradientsMut::new(
                ViewMut::new(dq, q.dims(), ORDER)?,
                tokens_of(dk, k.dims(), keys())?,
                tokens_of(dv, v.dims(), keys())?,
            );
            let into = biases.with(into);
            chunk.attention.accumulate(inputs, self.dout, self.rows, into, hook.reborrow())?;
        }
        Ok(())
    }

    fn received_keys(&mut self, index: usize, hook: Hook<'_>) -> Result<()> {
        let here = self.keys.received(index)?;
        let (compiled, all) = (self.compiled, self.tokens());
        let problem = &compiled.problem;
        let plan = &compiled.schedule.received_keys[index];
        let (k, v) = here.views(problem)?;
        let mut gradients = std::mem::take(&mut self.gradients[index]);
        let keys = k.dims().elements().unwrap_or(0);
        // Gradients of tree children arrive, and are added, later.
        gradients.resize(keys + v.dims().elements().unwrap_or(0), 0.0);
        let (dk, dv) = gradients.split_at_mut(keys);
        let chunks = &compiled.received_keys[index];
        let GradientSums { dq: own, biases, .. } = &mut self.sums;
        let Some(queries) = &plan.queries else {
            let some = Queries { q: self.inputs.q, dout: self.dout, rows: self.rows };
            accumulate(chunks, (k, v), some, (own, dk, dv), biases, hook)?;
            self.gradients[index] = gradients;
            return Ok(());
        };
        let chosen: Vec<_> = tokens::indices(queries).collect();
        let mut bytes = Buffer::zeroed(chosen.len() * problem.backward_query_bytes());
        self.write_queries(&chosen, &mut bytes);
        let some = Queries::<E>::read(problem, chosen.len(), &bytes)?;
        let mut dq = vec![0.0; some.q.dims().elements().unwrap_or(0)];
        accumulate(chunks, (k, v), some, (&mut dq, dk, dv), &mut self.sums.biases, hook)?;
        scatter(self.sums.dq, all, problem.dim, &chosen, &dq);
        self.gradients[index] = gradients;
        Ok(())
    }

    fn remote_queries(&mut self, index: usize, hook: Hook<'_>) -> Result<()> {
        let received = self.remote[index].take().expect("remote queries received");
        let problem = &self.compiled.problem;
        let count = self.compiled.schedule.remote_queries[index].positions.len();
        let some = Queries::<E>::read(problem, count, received.bytes())?;
        let mut dq = vec![0.0; some.q.dims().elements().unwrap_or(0)];
        let Inputs { k, v, .. } = self.inputs;
        let GradientSums { dk, dv, biases, .. } = &mut self.sums;
        let into = biases.with(GradientsMut::new(
            ViewMut::new(&mut dq, some.q.dims(), ORDER)?,
            ViewMut::new(dk, k.dims(), ORDER)?,
            ViewMut::new(dv, v.dims(), ORDER)?,
        ));
        let attention = &self.compiled.remote_queries[index];
        attention.accumulate(Inputs { q: some.q, k, v }, some.dout, some.rows, into, hook)?;
        self.results[index] = Some(dq);
        Ok(())
    }

    /// Writes queries and the inputs of their gradients.
    fn write_queries(&self, tokens: &[usize], into: &mut [u8]) {
        let all = self.tokens();
        let rest = gather_rows(self.rows.lse, all, tokens, into);
        let rest = match self.rows.lse_lo {
            Some(list) => gather_rows(list, all, tokens, rest),
            None => {
                let heads = self.compiled.problem.batch * self.compiled.problem.heads;
                let (none, rest) = rest.split_at_mut(heads * tokens.len() * size_of::<f32>());
                none.fill(0);
                rest
            }
        };
        let rest = gather_rows(self.rows.delta, all, tokens, rest);
        let rest = gather(&self.inputs.q, tokens, rest);
        gather(&self.dout, tokens, rest);
    }

    /// Adds returned gradients.
    fn add(&mut self, part: Part, received: &ReceivedPart) {
        let from: &[f32] = cast_slice(received.bytes());
        let (problem, schedule, all) =
            (&self.compiled.problem, &self.compiled.schedule, self.tokens());
        match part.payload {
            Payload::SentKeys(index) => {
                let tokens: Vec<_> = tokens::indices(&schedule.sent_keys[index].tokens).collect();
                let keys = problem.key_dims(tokens.len()).elements().unwrap_or(0);
                scatter(self.sums.dk, all, problem.dim, &tokens, &from[..keys]);
                scatter(self.sums.dv, all, problem.value_dim, &tokens, &from[keys..]);
            }
            Payload::ForwardedKeys(index, _) => {
                let into = &mut self.gradients[index];
                into.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
            Payload::SentQueries(index) => {
                let tokens: Vec<_> =
                    tokens::indices(&schedule.sent_queries[index].queries).collect();
                scatter(self.sums.dq, all, problem.dim, &tokens, from);
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
    for KeyChunk { attention, keys } in chunks {
        let keys = || keys.clone();
        let inputs = Inputs { q: some.q, k: k.tokens(keys()), v: v.tokens(keys()) };
        let into = GradientsMut::new(
            ViewMut::new(dq, some.q.dims(), ORDER)?,
            tokens_of(dk, k.dims(), keys())?,
            tokens_of(dv, v.dims(), keys())?,
        );
        attention.accumulate(inputs, some.dout, some.rows, biases.with(into), hook.reborrow())?;
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

impl<'b, E: Element + Pod> Queries<'b, E> {
    fn read(problem: &Problem, count: usize, bytes: &'b [u8]) -> Result<Self> {
        let (q_dims, out_dims) = (problem.query_dims(count), problem.output_dims(count));
        let rows = q_dims.batch * q_dims.heads * count;
        let (lse, rest) = elements(bytes, rows);
        let (lse_lo, rest) = elements(rest, rows);
        let (delta, rest) = elements(rest, rows);
        let (q, rest) = elements(rest, q_dims.elements().unwrap_or(0));
        let (dout, _) = elements(rest, out_dims.elements().unwrap_or(0));
        Ok(Queries {
            q: View::new(q, q_dims, ORDER)?,
            dout: View::new(dout, out_dims, ORDER)?,
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
                let queries = &self.compiled.schedule.sent_queries[index].queries;
                self.write_queries(&tokens::indices(queries).collect::<Vec<_>>(), into);
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
