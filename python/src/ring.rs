//! A ring of the ranks of a process group: what the package's own glue calls.
//!
//! Tensors are given as in `raw`. Everything here is called by all ranks in the same order, which
//! the glue makes sure of before (`longspan/torch/_ranks.py`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use longspan::{
    ElementType, GradientsMut, Heads, Inputs, Layout, LayoutSet, Order, OutputGradient, OutputMut,
    OutputRef, Padding, Pool, Positions, Shape, Threads,
};
use longspan_ring::{Buffer, Hop, Incoming, Options, Outgoing, Sparsity, Transport};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::additions::{Additions, bytes};
use crate::carrier::{Carrier, Raised};
use crate::errors;
use crate::ring_problem::{self, Asked, duration, known};
use crate::tensor::{Tensor, with_element};

const ORDER: Order = Order::Bhsd;

/// Attention around the ranks of a process group. For the package's own glue.
#[pyclass(frozen, module = "longspan._longspan")]
pub(crate) struct Ring {
    ring: Mutex<longspan_ring::Ring<Carrier>>,
    raised: Raised,
    element: ElementType,
}

#[pymethods]
impl Ring {
    /// All ranks agree, and each works out what it sends and receives. `sizes` are batch entries,
    /// heads of queries and of keys, head dims of keys and of values.
    #[new]
    #[pyo3(signature = (post, pattern, shards, tokens, sizes, dtype, scale, softcap, wire, threads, precision, timeout))]
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
        wire: &Bound<'_, PyAny>,
        threads: usize,
        precision: &str,
        timeout: f64,
    ) -> PyResult<Self> {
        let carrier = Carrier::new(post)?;
        let raised = carrier.raised();
        let asked = Asked { pattern, shards, tokens, sizes, dtype, scale, softcap };
        let (element, problem) = (asked.element()?, asked.problem(carrier.size())?);
        let problem = problem.wire(ring_problem::wire(wire)?);
        let threads = if threads == 0 { Threads::Auto } else { Threads::Count(threads) };
        let options = Options {
            timeout: duration(timeout)?,
            threads,
            precision: precision.parse().map_err(errors::raise)?,
            // One rank per process, which has a pool already.
            executor: Some(Arc::new(Pool::global())),
            ..Options::default()
        };
        let ring = py.detach(|| longspan_ring::Ring::new(carrier, problem, options));
        let ring = Mutex::new(ended(&raised, ring)?);
        Ok(Ring { ring, raised, element })
    }

    /// Writes `out`, `lse` and `lse_lo` of this rank's queries. Options are those of scores and
    /// probabilities.
    #[pyo3(signature = (q, k, v, out, lse, lse_lo, **options))]
    #[expect(clippy::too_many_arguments, reason = "only the glue calls it")]
    fn forward(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        lse: &Bound<'_, PyAny>,
        lse_lo: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let additions = Additions::read(options)?;
        let (q, k, v) = (raw("q", q)?, raw("k", k)?, raw("v", v)?);
        let mut out = raw("out", out)?;
        let (mut lse, mut rest) = (raw("lse", lse)?, raw("lse_lo", lse_lo)?);
        let rows = out.dims(ORDER)?;
        let (lse, rest) = (lse.rows_mut(rows)?, rest.rows_mut(rows)?);
        with_element!(self.element_of([&q, &k, &v, &out])?, E => {
            let (q, k, v) = (q.view::<E>(ORDER)?, k.view(ORDER)?, v.view(ORDER)?);
            let output = OutputMut { out: out.view_mut::<E>(ORDER)?, lse, lse_lo: Some(rest) };
            self.run(py, move |ring| {
                additions.set(ring)?;
                ring.forward_into(Inputs { q, k, v }, output)
            })
        })
    }

    /// Writes `dq`, `dk` and `dv` of this rank's tokens, and returns what this rank contributes to the
    /// gradients of sink logits, bias table and slopes, as `raw_backward` does. `dlse` may be None.
    #[pyo3(signature = (q, k, v, out, lse, lse_lo, dout, dlse, dq, dk, dv, wanted, **options))]
    #[expect(clippy::too_many_arguments, reason = "only the glue calls it")]
    fn backward(
        &self,
        py: Python<'_>,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        lse: &Bound<'_, PyAny>,
        lse_lo: &Bound<'_, PyAny>,
        dout: &Bound<'_, PyAny>,
        dlse: Option<&Bound<'_, PyAny>>,
        dq: &Bound<'_, PyAny>,
        dk: &Bound<'_, PyAny>,
        dv: &Bound<'_, PyAny>,
        wanted: [bool; 3],
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<[Option<Py<PyBytes>>; 3]> {
        let additions = Additions::read(options)?;
        let (q, k, v) = (raw("q", q)?, raw("k", k)?, raw("v", v)?);
        let (out, lse, rest) = (raw("out", out)?, raw("lse", lse)?, raw("lse_lo", lse_lo)?);
        let (dout, dlse) = (raw("dout", dout)?, dlse.map(|dlse| raw("dlse", dlse)).transpose()?);
        let (mut dq, mut dk, mut dv) = (raw("dq", dq)?, raw("dk", dk)?, raw("dv", dv)?);
        let rows = out.dims(ORDER)?;
        let (lse, lse_lo) = (lse.rows(rows)?, Some(rest.rows(rows)?));
        let dlse = dlse.as_ref().map(|dlse| dlse.rows(rows)).transpose()?;
        let all = [&q, &k, &v, &out, &dout, &dq, &dk, &dv];
        with_element!(self.element_of(all)?, E => {
            let inputs =
                Inputs { q: q.view::<E>(ORDER)?, k: k.view(ORDER)?, v: v.view(ORDER)? };
            let (out, dout) = (out.view(ORDER)?, dout.view(ORDER)?);
            let (saved, gradient) = (OutputRef { out, lse, lse_lo }, OutputGradient { dout, dlse });
            let (dq, dk, dv) = (dq.view_mut(ORDER)?, dk.view_mut(ORDER)?, dv.view_mut(ORDER)?);
            let mut lists = additions.gradients(wanted);
            let [sink_logits, bias_table, alibi_slopes] = &mut lists;
            let gradients = GradientsMut {
                dsink_logits: sink_logits.as_deref_mut(),
                dbias_table: bias_table.as_deref_mut(),
                dalibi_slopes: alibi_slopes.as_deref_mut(),
                ..GradientsMut::new(dq, dk, dv)
            };
            self.run(py, move |ring| {
                additions.set(ring)?;
                ring.backward_into(inputs, saved, gradient, gradients)
            })?;
            Ok(bytes(py, lists))
        })
    }

    /// Bytes that this rank has received and sent in passes, headers left out.
    fn traffic(&self) -> (u64, u64) {
        let tally = self.ring.lock().unwrap_or_else(PoisonError::into_inner).tally();
        (tally.received, tally.sent)
    }
}

impl Ring {
    /// Runs a pass without the interpreter's lock.
    fn run(
        &self,
        py: Python<'_>,
        pass: impl FnOnce(&mut longspan_ring::Ring<Carrier>) -> longspan_ring::Result<()> + Send,
    ) -> PyResult<()> {
        let passed = py.detach(|| {
            let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            pass(&mut ring)
        });
        ended(&self.raised, passed)
    }

    fn element_of<const N: usize>(&self, tensors: [&Tensor; N]) -> PyResult<ElementType> {
        for tensor in tensors {
            tensor.same_element(tensors[0])?;
        }
        match tensors[0].element() == self.element {
            true => Ok(self.element),
            false => Err(errors::kind(format!(
                "tensors of {}, expected {}, as the ring was made for",
                tensors[0].element(),
                self.element
            ))),
        }
    }
}

/// What ended a call: an exception of the caller's side, or the ring's own result.
pub(crate) fn ended<T>(raised: &Raised, result: longspan_ring::Result<T>) -> PyResult<T> {
    match raised.take() {
        Some(raised) => Err(raised),
        None => result.map_err(errors::raise_ring),
    }
}

fn raw(name: &'static str, tuple: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    // SAFETY: only the package's Python calls this module's functions; it reads these numbers off
    // tensors that it holds on to, and hands to nothing else, until the call returns.
    unsafe { Tensor::raw(name, tuple) }
}

/// Refuses a wire format that there isn't, before a rank waits for another. For the package's own
/// glue.
#[pyfunction]
pub(crate) fn ring_wire(wire: &Bound<'_, PyAny>) -> PyResult<()> {
    ring_problem::wire(wire).map(drop)
}

/// The positions that each rank holds, as progressions `(start, step, length)`; balanced ones are those
/// of a pattern. For the package's own glue.
#[pyfunction]
#[pyo3(signature = (shards, tokens, ranks, pattern=None))]
pub(crate) fn ring_shards(
    shards: &str,
    tokens: usize,
    ranks: usize,
    pattern: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<Vec<(i64, usize, usize)>>> {
    let sparsity = pattern.map(known).transpose()?;
    let shards = ring_problem::shards(shards, tokens, ranks, sparsity.as_ref())?;
    let held = (0..ranks).map(|rank| {
        let progressions = shards.rank(rank).progressions();
        progressions.map(|part| (part.start, part.step, part.len)).collect()
    });
    Ok(held.collect())
}

/// Refuses a pattern or branches that aren't for so many tokens and heads: on every rank alike,
/// before any of them waits for another. For the package's own glue.
#[pyfunction]
pub(crate) fn ring_check(
    pattern: &Bound<'_, PyAny>,
    tokens: usize,
    batch: usize,
    heads: usize,
) -> PyResult<()> {
    let no_queries = Shape::new(tokens, tokens).query_map(Positions::default());
    let pattern = match known(pattern)? {
        Sparsity::Patterns(pattern) => pattern,
        // Those of other heads differ by offsets alone, which are valid for every head.
        Sparsity::Dilated(dilated) => {
            let pattern =
                dilated.check_lengths(batch, tokens).and_then(|()| dilated.head_pattern(0));
            pattern.map_err(errors::raise)?.into()
        }
    };
    let compiled = match pattern {
        Heads::Same(pattern) => Layout::compile(&pattern, &no_queries).map(drop),
        by_head => {
            LayoutSet::compile(&by_head, heads, &no_queries, &Padding::None(1), None).map(drop)
        }
    };
    compiled.map_err(errors::raise_pattern)
}

/// The bytes of every rank, by rank; all have as many. Returns only once every rank has called it.
/// For the package's own glue.
#[pyfunction]
pub(crate) fn ring_gather<'py>(
    py: Python<'py>,
    post: &Bound<'py, PyAny>,
    mine: &[u8],
    timeout: f64,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let mut carrier = Carrier::new(post)?;
    let (raised, timeout) = (carrier.raised(), duration(timeout)?);
    let gathered = py.detach(|| gather(&mut carrier, mine, timeout));
    if let Some(raised) = raised.take() {
        return Err(raised);
    }
    match gathered {
        Ok(said) => Ok(said.iter().map(|bytes| PyBytes::new(py, bytes)).collect()),
        Err(failure) => Err(errors::RingError::new_err(format!(
            "{failure}; this was before the call, waiting for what each rank is about to compute"
        ))),
    }
}

/// Ranks that a rank talks to at once: more messages than a few dozen gain nothing.
const AT_ONCE: usize = 16;

/// Every rank sends to every other, so that all ranks know by number which one is missing.
fn gather(
    carrier: &mut Carrier,
    mine: &[u8],
    timeout: Duration,
) -> Result<Vec<Vec<u8>>, longspan_ring::Failure> {
    let (rank, size) = (carrier.rank(), carrier.size());
    let mut said = vec![mine.to_vec(); size];
    for first in (1..size).step_by(AT_ONCE) {
        let distances = first..size.min(first + AT_ONCE);
        let sends = distances
            .clone()
            .map(|distance| Outgoing { to: (rank + distance) % size, bytes: Buffer::from(mine) });
        let receives = distances.map(|distance| {
            let from = (rank + size - distance) % size;
            Incoming { from, bytes: Buffer::zeroed(mine.len()) }
        });
        let mut receives: Vec<_> = receives.collect();
        let sends = &mut sends.collect::<Vec<_>>()[..];
        carrier.hop(Hop { sends, receives: &mut receives, timeout }, &mut |_| ())?;
        for receive in receives {
            said[receive.from] = receive.bytes.to_vec();
        }
    }
    Ok(said)
}
