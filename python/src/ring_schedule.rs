//! The schedule of one rank of a process group, for engines whose tensors are on a device: what the
//! package's own glue executes (`longspan/torch/_ring_device.py`).
//!
//! The same schedule as that of `Ring`, whose hops move bytes of the host. Here messages are tensors
//! that Python allocates and sends, and computations are calls of an engine.

use longspan::{BlockSize, Components, Positions};
use longspan_ring::{
    KeyChunk, Leg, Message, Part, Payload, RankSchedule, SentRows, Step, Transport,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::carrier::Carrier;
use crate::device_calls::DeviceCall;
use crate::errors;
use crate::ring::ended;
use crate::ring_problem::{Asked, duration};

/// What one rank sends, receives and computes in both passes of attention around a process group. For
/// the package's own glue.
#[pyclass(frozen, module = "longspan._longspan")]
pub(crate) struct RingSchedule {
    schedule: RankSchedule,
}

/// `(payload, index, child or None, leg, bytes)`.
type PartTuple = (&'static str, usize, Option<usize>, &'static str, usize);
/// `(peer, parts)`.
type MessageTuple = (usize, Vec<PartTuple>);
/// `(label, sends, receives, work)`.
type StepTuple = (u32, Vec<MessageTuple>, Vec<MessageTuple>, Vec<PartTuple>);
/// `(start, step, length)` each.
type Progressions = Vec<(i64, usize, usize)>;
type Calls = Vec<DeviceCall>;

#[pymethods]
impl RingSchedule {
    /// All ranks agree, and each works out what it sends and receives. The arguments are those of `Ring`
    /// without those of kernels; layouts have blocks of `block` tokens.
    #[new]
    #[pyo3(signature = (post, pattern, shards, tokens, sizes, dtype, scale, softcap, timeout, block))]
    #[expect(clippy::too_many_arguments, reason = "only the glue calls it")]
    fn new(
        py: Python<'_>,
        post: &Bound<'_, PyAny>,
        pattern: &Bound<'_, PyAny>,
        shards: &str,
        tokens: usize,
        sizes: (usize, usize, usize, usize, usize),
        dtype: &str,
        scale: Option<f32>,
        softcap: Option<f32>,
        timeout: f64,
        block: u64,
    ) -> PyResult<Self> {
        let mut carrier = Carrier::new(post)?;
        let raised = carrier.raised();
        let asked = Asked { pattern, shards, tokens, sizes, dtype, scale, softcap };
        let problem = asked.problem(carrier.size())?;
        let block = BlockSize::new(block).map_err(errors::raise_pattern)?;
        let timeout = duration(timeout)?;
        let made = py.detach(|| RankSchedule::new(&mut carrier, problem, block, timeout));
        Ok(RingSchedule { schedule: ended(&raised, made)? })
    }

    /// Steps of the forward pass: `(label, sends, receives, work)`. Messages are `(peer, parts)`, and parts
    /// `(payload, index, child, leg, bytes)`: the payload is the name of the property that has the index,
    /// or `"forwarded_keys"`, received keys for a child in a broadcast tree; the leg is `"outbound"` or
    /// `"return"`. Work is done while the messages of the next step are in flight.
    #[getter]
    fn forward(&self) -> Vec<StepTuple> {
        self.schedule.forward().iter().map(step).collect()
    }

    /// Those of the backward pass.
    #[getter]
    fn backward(&self) -> Vec<StepTuple> {
        self.schedule.backward().iter().map(step).collect()
    }

    /// Ranges of local keys: `(first, count, calls)`, calls of all local queries.
    #[getter]
    fn local_keys(&self, py: Python<'_>) -> PyResult<Vec<(usize, usize, Calls)>> {
        let ranges = self.schedule.local_keys();
        ranges.map(|(range, chunks)| Ok((range.start, range.len(), chunked(py, chunks)?))).collect()
    }

    /// Keys and values that are sent: `(key heads, local tokens)`.
    #[getter]
    fn sent_keys(&self) -> Vec<(Vec<usize>, Progressions)> {
        self.schedule.sent_keys().map(rows).collect()
    }

    /// Keys and values that are received: `(key heads, tokens, local queries, calls, children)`. Calls are
    /// over tensors of these key heads and tokens, and over all local queries, or over a tensor of those
    /// that are given.
    #[getter]
    #[expect(clippy::type_complexity, reason = "a tuple of Python's")]
    fn received_keys(
        &self,
        py: Python<'_>,
    ) -> PyResult<Vec<(Vec<usize>, usize, Option<Progressions>, Calls, usize)>> {
        let received = self.schedule.received_keys().map(|keys| {
            let calls = chunked(py, keys.chunks)?;
            let queries = keys.queries.map(progressions);
            Ok((keys.key_heads.to_vec(), keys.tokens, queries, calls, keys.children))
        });
        received.collect()
    }

    /// Queries that are sent to another rank's keys: `(heads, local tokens)`.
    #[getter]
    fn sent_queries(&self) -> Vec<(Vec<usize>, Progressions)> {
        self.schedule.sent_queries().map(rows).collect()
    }

    /// Queries of another rank over all local keys: `(heads, tokens, calls)`. Calls are over a tensor of
    /// all query heads.
    #[getter]
    fn remote_queries(&self, py: Python<'_>) -> PyResult<Vec<(Vec<usize>, usize, Calls)>> {
        let remote = self.schedule.remote_queries();
        remote
            .map(|queries| {
                let calls = calls(py, queries.components)?;
                Ok((queries.heads.to_vec(), queries.tokens, calls))
            })
            .collect()
    }

    /// Bytes that this rank receives in a forward and in a backward pass.
    #[getter]
    fn bytes_needed(&self) -> (u64, u64) {
        self.schedule.bytes_needed()
    }

    /// A byte per batch entry and local token, 1 where it is padding, whose log-sum-exp is −∞ whatever its
    /// sinks; None without padding.
    #[getter]
    fn excluded_rows<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let excluded = self.schedule.excluded_rows().map_err(errors::raise_ring)?;
        let bytes = |rows: Vec<bool>| rows.into_iter().map(u8::from).collect::<Vec<_>>();
        Ok(excluded.map(|rows| PyBytes::new(py, &bytes(rows))))
    }
}

fn step(step: &Step) -> StepTuple {
    let messages = |messages: &[Message]| {
        let parts = |message: &Message| message.parts.iter().map(part).collect();
        messages.iter().map(|message| (message.peer, parts(message))).collect()
    };
    let work = step.work.iter().map(part).collect();
    (step.label, messages(&step.sends), messages(&step.receives), work)
}

fn part(part: &Part) -> PartTuple {
    let (payload, index, child) = match part.payload {
        Payload::LocalKeys(index) => ("local_keys", index, None),
        Payload::SentKeys(index) => ("sent_keys", index, None),
        Payload::ReceivedKeys(index) => ("received_keys", index, None),
        Payload::ForwardedKeys(index, child) => ("forwarded_keys", index, Some(child)),
        Payload::SentQueries(index) => ("sent_queries", index, None),
        Payload::RemoteQueries(index) => ("remote_queries", index, None),
    };
    let leg = match part.leg {
        Leg::Outbound => "outbound",
        Leg::Return => "return",
        // Of formats whose lengths vary, which device messages don't have.
        Leg::Length => "length",
    };
    (payload, index, child, leg, part.bytes)
}

fn rows(sent: SentRows<'_>) -> (Vec<usize>, Progressions) {
    (sent.heads.to_vec(), progressions(sent.tokens))
}

fn progressions(tokens: &Positions) -> Progressions {
    tokens.progressions().map(|part| (part.start, part.step, part.len)).collect()
}

/// The calls of a computation, whose keys are one chunk: reductions are overlapped.
fn chunked(py: Python<'_>, chunks: &[KeyChunk]) -> PyResult<Calls> {
    chunks.first().map_or(Ok(Vec::new()), |chunk| calls(py, &chunk.components))
}

fn calls(py: Python<'_>, components: &Components) -> PyResult<Calls> {
    DeviceCall::of_components(py, components)
}
