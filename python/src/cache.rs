//! `longspan.KvCache`: keys and values of earlier tokens.

use longspan::{Dims, Inputs, KvCache as Engine, Order, OutputMut};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::Whole;
use crate::call::{compute, new_rows, new_tensor};
use crate::dilated::Dilated;
use crate::errors;
use crate::layout::Layout;
use crate::options::{Options, known};
use crate::tensor::{Tensor, with_element};

/// Keys and values of the tokens so far, and attention of the next ones over them.
///
/// A `step` appends keys and values and attends with the queries of the same tokens: one token per step
/// decodes, many are a chunk of a prompt. Any chunking has the result of one call over all tokens, where
/// the pattern is causal. There are no gradients.
///
/// `pattern` is a `Pattern`, its text, or a list of these, one per batch entry; `options` are those of
/// `attention` but `block`, `query_offset`, `key_offset` and `key_padding`. Sizes and the element type
/// are those of the first keys and values.
///
/// A pattern with a bounded reach, such as a window with sinks, bounds the cache: what no later query
/// can attend to is overwritten. It then has slots for the reach, for the largest step and for a quarter
/// of the reach besides (at least 64 tokens), over any number of steps. Without a bound it doubles when
/// it is full. All batch entries have the same number of slots; paged caches are out of scope.
///
/// >>> import longspan, numpy
/// >>> x = numpy.random.default_rng(0).standard_normal((1, 2, 300, 16), dtype="float32")
/// >>> cache = longspan.KvCache("causal & (window(64, 0) | sinks(4))")
/// >>> prompt = x[:, :, :200]
/// >>> cache.step(prompt, prompt, prompt).shape
/// (1, 2, 200, 16)
/// >>> for i in range(200, 300):
/// ...     token = x[:, :, i : i + 1]
/// ...     out = cache.step(token, token, token)
/// >>> whole = longspan.attention(x, x, x, "causal & (window(64, 0) | sinks(4))")
/// >>> numpy.allclose(out[:, :, 0], whole[:, :, -1], atol=1e-6)
/// True
#[pyclass(module = "longspan")]
pub(crate) struct KvCache {
    engine: Engine,
    order: Order,
}

impl KvCache {
    fn lens(&self) -> Vec<usize> {
        (0..self.engine.batch()).map(|entry| self.engine.len(entry)).collect()
    }
}

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(
        signature = (pattern, **options),
        text_signature = "(pattern, *, order='bhsd', scale=None, softcap=None, alibi_slopes=None, \
            bias_table=None, bias_right=None, sink_logits=None, dropout_p=None, dropout_seed=None, \
            threads=None, isa=None, precision=None)"
    )]
    fn new(pattern: &Bound<'_, PyAny>, options: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        if pattern.is_instance_of::<Layout>() || pattern.is_instance_of::<Dilated>() {
            return Err(errors::kind(format!(
                "pattern is a {}, expected a longspan.Pattern, its text, or a list of these: a cache \
                 grows, and compiles its own layouts",
                pattern.get_type().name()?
            )));
        }
        let options = Options::read("KvCache", options)?;
        let places = ["block", "query_offset", "key_offset", "key_padding"];
        if let Some(name) = options.first_set(&places) {
            return Err(errors::value(format!(
                "{name}: a cache has the positions of its tokens; leave it out"
            )));
        }
        let engine = Engine::new(known(pattern)?).options(options.calls()?);
        Ok(KvCache { engine, order: options.order() })
    }

    /// Appends keys and values, and attends with the queries of the same tokens.
    ///
    /// `lengths` has the number of tokens of each batch entry, where they differ: entry `b` has the first
    /// `lengths[b]`, and its other queries have output 0 and log-sum-exp -inf. `out` and `return_lse` are
    /// those of `attention`. After an error or Ctrl-C the cache is what it was before.
    #[pyo3(signature = (q, k, v, lengths=None, *, out=None, return_lse=false))]
    #[expect(clippy::too_many_arguments, reason = "they are named in Python")]
    fn step<'py>(
        &mut self,
        py: Python<'py>,
        q: &Bound<'py, PyAny>,
        k: &Bound<'py, PyAny>,
        v: &Bound<'py, PyAny>,
        lengths: Option<Vec<Whole>>,
        out: Option<&Bound<'py, PyAny>>,
        return_lse: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let order = self.order;
        let like = q;
        let (q, k, v) = (Tensor::import("q", q)?, Tensor::import("k", k)?, Tensor::import("v", v)?);
        k.same_element(&q)?;
        v.same_element(&q)?;
        let dims = Dims { dim: v.dims(order)?.dim, ..q.dims(order)? };
        let (result, mut tensor) = match out {
            Some(out) => (out.clone(), Tensor::import("out", out)?),
            None => new_tensor("out", q.element(), order, dims, like)?,
        };
        tensor.same_element(&q)?;
        let (lse, mut rows) = new_rows(py, "lse", dims)?;
        let lengths = sizes(lengths);
        with_element!(q.element(), E => {
            let inputs: Inputs<'_, E> = Inputs::new(q.view(order)?, k.view(order)?, v.view(order)?);
            let lse = rows.rows_mut(dims)?;
            let output = OutputMut { out: tensor.view_mut(order)?, lse, lse_lo: None };
            let engine = &mut self.engine;
            compute(py, |hook| engine.step_into(inputs, lengths.as_deref(), output, hook))?;
        });
        match return_lse {
            true => Ok((result, lse).into_pyobject(py)?.into_any()),
            false => Ok(result),
        }
    }

    /// Appends keys and values, of batch entry `b` the first `lengths[b]` tokens; no query attends yet.
    #[pyo3(signature = (k, v, lengths=None))]
    fn append(
        &mut self,
        py: Python<'_>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        lengths: Option<Vec<Whole>>,
    ) -> PyResult<()> {
        let order = self.order;
        let (k, v) = (Tensor::import("k", k)?, Tensor::import("v", v)?);
        v.same_element(&k)?;
        let lengths = sizes(lengths);
        with_element!(k.element(), E => {
            let (k, v) = (k.view::<E>(order)?, v.view::<E>(order)?);
            let engine = &mut self.engine;
            py.detach(|| match &lengths {
                Some(lengths) => engine.append_ragged(k, v, lengths),
                None => engine.append(k, v),
            })
            .map_err(errors::raise)
        })
    }

    /// Tokens of each batch entry so far.
    #[getter]
    fn lengths<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.lens().into_bound_py_any(py)
    }

    /// Tokens that each batch entry has room for.
    #[getter]
    fn slots(&self) -> usize {
        self.engine.slots()
    }

    /// Bytes of keys and values.
    #[getter]
    fn nbytes(&self) -> usize {
        self.engine.bytes()
    }

    /// Forgets the tokens of a batch entry, for another sequence in its place, or of all.
    #[pyo3(signature = (entry=None))]
    fn clear(&mut self, entry: Option<Whole>) -> PyResult<()> {
        let batch = self.engine.batch();
        let entries = match entry {
            None => 0..batch,
            Some(Whole(entry)) if (entry as usize) < batch => entry as usize..entry as usize + 1,
            Some(Whole(entry)) => {
                let message = format!("entry is {entry}, expected one below {batch}, the batch");
                return Err(errors::value(message));
            }
        };
        entries.for_each(|entry| self.engine.clear(entry));
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!(
            "<longspan.KvCache of {}, lengths {:?}, {} slots>",
            self.engine.patterns(),
            self.lens(),
            self.slots()
        )
    }
}

fn sizes(lengths: Option<Vec<Whole>>) -> Option<Vec<usize>> {
    lengths.map(|lengths| lengths.iter().map(|length| length.0 as usize).collect())
}
