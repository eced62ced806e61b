//! A call: tensors that came in, checked against each other, and both passes over them.
//!
//! ```text
//! objects ──import──▶ Tensor ──view──▶ longspan::View ──▶ kernels, without the interpreter's lock
//! ```
//!
//! Results are new NumPy arrays, or an [`Array`] for elements that NumPy has no type for.

use longspan::{
    Dims, ElementType, GradientsMut, Hook, Inputs, Order, OutputGradient, OutputMut, OutputRef,
    Pass, Progress, WeightRows,
};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::array::Array;
use crate::engine::Engine;
use crate::errors;
use crate::options::Options;
use crate::signals;
use crate::tensor::{Tensor, ndarray, with_element};

/// The tensors that every call reads, and how to compute with them.
pub(crate) struct Call {
    q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) order: Order,
    /// The axes of queries and of values.
    pub(crate) queries: Dims,
    pub(crate) output: Dims,
    engine: Engine,
    /// Elements of the gradients of options.
    lens: [Option<usize>; 3],
}

impl Call {
    pub(crate) fn new(
        [q, k, v]: [Tensor; 3],
        pattern: &Bound<'_, PyAny>,
        options: Options,
    ) -> PyResult<Self> {
        k.same_element(&q)?;
        v.same_element(&q)?;
        let order = options.order();
        let (queries, keys, values) = (q.dims(order)?, k.dims(order)?, v.dims(order)?);
        let lens = options.gradient_lens();
        let engine = options.engine(pattern, queries, keys)?;
        let output = Dims { dim: values.dim, ..queries };
        Ok(Call { q, k, v, order, queries, output, engine, lens })
    }

    pub(crate) fn import(
        [q, k, v]: [&Bound<'_, PyAny>; 3],
        pattern: &Bound<'_, PyAny>,
        options: Options,
    ) -> PyResult<Self> {
        let tensors = [Tensor::import("q", q)?, Tensor::import("k", k)?, Tensor::import("v", v)?];
        Call::new(tensors, pattern, options)
    }

    /// Bytes that a pass allocates.
    pub(crate) fn bytes_needed(&self, pass: Pass) -> PyResult<usize> {
        let dims = [self.queries, self.k.dims(self.order)?, self.v.dims(self.order)?];
        with_element!(self.q.element(), E => {
            self.engine.bytes_needed::<E>(dims, pass).map_err(errors::raise)
        })
    }

    /// Writes output and log-sum-exp.
    pub(crate) fn forward(
        &self,
        py: Python<'_>,
        out: &mut Tensor,
        lse: &mut [f32],
        lse_lo: Option<&mut [f32]>,
    ) -> PyResult<()> {
        out.same_element(&self.q)?;
        with_element!(self.q.element(), E => {
            let inputs = self.inputs::<E>()?;
            let output = OutputMut { out: out.view_mut(self.order)?, lse, lse_lo };
            compute(py, |hook| self.engine.forward(inputs, output, hook))
        })
    }

    /// Writes gradients; returns those of sink logits, of the bias table and of slopes, where there are
    /// any and they are wanted.
    pub(crate) fn backward(
        &self,
        py: Python<'_>,
        saved: &Saved<'_>,
        [dq, dk, dv]: [&mut Tensor; 3],
        wanted: [bool; 3],
    ) -> PyResult<OptionGradients> {
        for tensor in [saved.out, saved.dout, &*dq, &*dk, &*dv] {
            tensor.same_element(&self.q)?;
        }
        with_element!(self.q.element(), E => {
            let inputs = self.inputs::<E>()?;
            let output = OutputRef {
                out: saved.out.view(self.order)?,
                lse: saved.lse.rows(self.output)?,
                lse_lo: saved.lse_lo.map(|lo| lo.rows(self.output)).transpose()?,
            };
            let gradient = OutputGradient {
                dout: saved.dout.view(self.order)?,
                dlse: saved.dlse.map(|dlse| dlse.rows(self.output)).transpose()?,
            };
            let mut lists: OptionGradients = std::array::from_fn(|n| {
                self.lens[n].filter(|_| wanted[n]).map(|len| vec![0.0; len])
            });
            let [sink_logits, bias_table, alibi_slopes] = &mut lists;
            let gradients = GradientsMut {
                dsink_logits: sink_logits.as_deref_mut(),
                dbias_table: bias_table.as_deref_mut(),
                dalibi_slopes: alibi_slopes.as_deref_mut(),
                ..GradientsMut::new(
                    dq.view_mut(self.order)?,
                    dk.view_mut(self.order)?,
                    dv.view_mut(self.order)?,
                )
            };
            compute(py, |hook| self.engine.backward(inputs, output, gradient, gradients, hook))?;
            Ok(lists)
        })
    }

    /// Weights of some rows over all keys: a new NumPy array `(batch, heads, rows, keys)`.
    pub(crate) fn weights<'py>(
        &self,
        py: Python<'py>,
        rows: &WeightRows,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Engine::Attention(attention) = &self.engine else {
            return Err(errors::value(
                "pattern is a longspan.Dilated, whose branches have a softmax each: attention_weights \
                 takes a pattern, as in \"dilated(2048, 4) | window(64, 64)\", or a layout",
            ));
        };
        let keys = self.k.dims(self.order)?.tokens;
        let dims = rows.dims(self.queries, keys).map_err(errors::raise)?;
        let flat = Dims { tokens: dims.tokens * keys, dim: 1, ..dims };
        let (list, mut tensor) = new_rows(py, "weights", flat)?;
        let into = tensor.rows_mut(flat)?;
        with_element!(self.q.element(), E => {
            let (q, k) = (self.q.view::<E>(self.order)?, self.k.view::<E>(self.order)?);
            compute(py, |hook| attention.attention_weights_into(q, k, rows, into, hook))?;
        });
        list.call_method1("reshape", (dims.batch, dims.heads, dims.tokens, keys))
    }

    fn inputs<E: longspan::Element>(&self) -> PyResult<Inputs<'_, E>> {
        Ok(Inputs {
            q: self.q.view(self.order)?,
            k: self.k.view(self.order)?,
            v: self.v.view(self.order)?,
        })
    }

    /// A new tensor of the kind that `like` is, with elements as the queries.
    pub(crate) fn new_tensor<'py>(
        &self,
        name: &'static str,
        dims: Dims,
        like: &Bound<'py, PyAny>,
    ) -> PyResult<(Bound<'py, PyAny>, Tensor)> {
        new_tensor(name, self.q.element(), self.order, dims, like)
    }

    /// A new NumPy array with one f32 per row.
    pub(crate) fn new_rows<'py>(
        &self,
        py: Python<'py>,
        name: &'static str,
    ) -> PyResult<(Bound<'py, PyAny>, Tensor)> {
        new_rows(py, name, self.output)
    }
}

/// A new tensor of the kind that `like` is.
pub(crate) fn new_tensor<'py>(
    name: &'static str,
    element: ElementType,
    order: Order,
    dims: Dims,
    like: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, Tensor)> {
    let py = like.py();
    let Dims { batch, tokens, heads, dim } = dims;
    let shape = match order {
        Order::Bhsd => [batch, heads, tokens, dim],
        Order::Bshd => [batch, tokens, heads, dim],
    };
    let of_numpy = like.is_instance(ndarray(py)?)?;
    let array = match element {
        _ if of_numpy => empty(py, shape, like.getattr("dtype")?)?,
        ElementType::F32 => empty(py, shape, "float32")?,
        ElementType::F16 => empty(py, shape, "float16")?,
        _ => {
            let (array, tensor) = Array::zeros(py, name, shape)?;
            return Ok((array.into_bound(py), tensor));
        }
    };
    let tensor = Tensor::import(name, &array)?;
    Ok((array, tensor))
}

/// A new NumPy array with one f32 per row of an output.
pub(crate) fn new_rows<'py>(
    py: Python<'py>,
    name: &'static str,
    dims: Dims,
) -> PyResult<(Bound<'py, PyAny>, Tensor)> {
    let Dims { batch, heads, tokens, .. } = dims;
    let array = empty(py, [batch, heads, tokens], "float32")?;
    let tensor = Tensor::import(name, &array)?;
    Ok((array, tensor))
}

/// A new NumPy array of f32 with one axis.
pub(crate) fn new_list<'py>(py: Python<'py>, list: &[f32]) -> PyResult<Bound<'py, PyAny>> {
    py.import("numpy")?.call_method1("array", (list.to_vec(), "float32"))
}

/// Gradients of sink logits, of the bias table and of slopes.
pub(crate) type OptionGradients = [Option<Vec<f32>>; 3];

/// What the forward pass found, and the gradients that arrive at it.
pub(crate) struct Saved<'a> {
    pub(crate) out: &'a Tensor,
    pub(crate) lse: &'a Tensor,
    pub(crate) lse_lo: Option<&'a Tensor>,
    pub(crate) dout: &'a Tensor,
    pub(crate) dlse: Option<&'a Tensor>,
}

/// Runs a pass without the interpreter's lock, checking for signals between tiles.
pub(crate) fn compute(
    py: Python<'_>,
    pass: impl FnOnce(Hook<'_>) -> longspan::Result<()> + Send,
) -> PyResult<()> {
    let work = |watch: &mut signals::Watch| {
        let mut between = |_: Progress| watch.look();
        pass(Hook::new(&mut between))
    };
    signals::released(py, work, errors::raise)
}

/// `numpy.empty(shape, dtype)`.
fn empty<'py, const N: usize>(
    py: Python<'py>,
    shape: [usize; N],
    dtype: impl IntoPyObject<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let empty = EMPTY
        .get_or_try_init(py, || PyResult::Ok(py.import("numpy")?.getattr("empty")?.unbind()))?;
    let dtype = dtype.into_bound_py_any(py)?;
    empty.bind(py).call1((PyTuple::new(py, shape)?, dtype))
}
