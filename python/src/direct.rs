//! Attention of torch tensors that nothing but a kernel would see, in one call.
//!
//! Decoding a token takes tens of microseconds: what Python would check and allocate takes as many again.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use longspan::{Dims, ElementType, Isa, Order};

use crate::call::Call;
use crate::dlpack;
use crate::options::Options;
use crate::pattern::Pattern;
use crate::tensor::Tensor;

/// What is asked of torch.
struct Torch {
    tensor: Py<PyType>,
    is_grad_enabled: Py<PyAny>,
    is_autocast_enabled: Py<PyAny>,
    /// How many modes see each call of an operator.
    dispatch_modes: Py<PyAny>,
    /// The transform of functions that is at work, or None.
    transform: Py<PyAny>,
    forward_ad: Py<PyModule>,
    threads: Py<PyAny>,
    precision: Py<PyAny>,
}

impl Torch {
    fn get(py: Python<'_>) -> PyResult<&'static Torch> {
        static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
        TORCH.get_or_try_init(py, || {
            let torch = py.import("torch")?;
            let internals = torch.getattr("_C")?;
            let function =
                |owner: &Bound<'_, PyAny>, name| Ok::<_, PyErr>(owner.getattr(name)?.unbind());
            Ok(Torch {
                tensor: torch.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
                is_grad_enabled: function(&torch, "is_grad_enabled")?,
                is_autocast_enabled: function(&torch, "is_autocast_enabled")?,
                dispatch_modes: function(&internals, "_len_torch_dispatch_stack")?,
                transform: function(&internals.getattr("_functorch")?, "peek_interpreter_stack")?,
                forward_ad: py.import("torch.autograd.forward_ad")?.unbind(),
                threads: function(&torch, "get_num_threads")?,
                precision: function(py.import("longspan.torch._run")?.as_any(), "precision")?,
            })
        })
    }

    /// Whether something besides the kernel has to see a call with these tensors: autograd, autocast, a
    /// mode, a transform.
    fn is_watched(&self, tensors: [&Bound<'_, PyAny>; 3]) -> PyResult<bool> {
        let py = tensors[0].py();
        let level = self.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?;
        if level.extract::<i64>()? >= 0
            || self.dispatch_modes.call0(py)?.extract::<usize>(py)? > 0
            || !self.transform.call0(py)?.is_none(py)
            || self.is_autocast_enabled.call1(py, (intern!(py, "cpu"),))?.is_truthy(py)?
        {
            return Ok(true);
        }
        let mut has_gradient = false;
        for tensor in tensors {
            has_gradient |= tensor.getattr(intern!(py, "requires_grad"))?.is_truthy()?;
            // A sign that torch keeps beside numbers.
            if tensor.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
                return Ok(true);
            }
        }
        Ok(has_gradient && self.is_grad_enabled.call0(py)?.is_truthy(py)?)
    }
}

/// The output of attention over a pattern, without options; None where something besides the kernel has
/// to see the call, or tensors aren't as most are.
#[pyfunction]
pub(crate) fn direct_forward<'py>(
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    pattern: &Bound<'py, Pattern>,
    enable_gqa: bool,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = q.py();
    let torch = Torch::get(py)?;
    let mut tensors = [const { None }; 3];
    for (read, (name, object)) in tensors.iter_mut().zip([("q", q), ("k", k), ("v", v)]) {
        if !object.get_type().is(torch.tensor.bind(py)) {
            return Ok(None);
        }
        // What can't be described, such as a tensor of another device, is refused where all checks are.
        let Ok(Some(raw)) = dlpack::borrow(object) else { return Ok(None) };
        if !raw.is_plain() {
            return Ok(None);
        }
        // SAFETY: the caller holds on to the tensors, as `Tensor::raw` demands.
        *read = Some(unsafe { Tensor::described(name, &raw) }?);
    }
    let [Some(q_tensor), Some(k_tensor), Some(v_tensor)] = tensors else { return Ok(None) };
    let element = q_tensor.element();
    let heads = |tensor: &Tensor| Ok::<_, PyErr>(tensor.dims(Order::Bhsd)?.heads);
    if k_tensor.element() != element
        || v_tensor.element() != element
        || (!enable_gqa && heads(&q_tensor)? != heads(&k_tensor)?)
        || torch.is_watched([q, k, v])?
    {
        return Ok(None);
    }
    let Dims { batch, tokens, heads, .. } = q_tensor.dims(Order::Bhsd)?;
    let dim = v_tensor.head_dim();
    let strides = (tokens * heads * dim, dim, heads * dim, 1);
    let empty = intern!(py, "new_empty_strided");
    let out = q.call_method1(empty, ((batch, heads, tokens, dim), strides))?;

    let threads = torch.threads.call0(py)?.extract(py)?;
    // Only a matrix unit has f32 products of less than f32.
    let precision = match element == ElementType::F32 && Isa::Amx.is_available() {
        true => Some(torch.precision.call0(py)?),
        false => None,
    };
    let precision = precision.as_ref().map(|name| name.extract::<&str>(py)).transpose()?;
    let options = Options::default().executed(Some(threads), precision)?;
    let call = Call::new([q_tensor, k_tensor, v_tensor], pattern, options)?;
    let mut lse = vec![0.0; batch * heads * tokens];
    // SAFETY: nothing else has the output, which lives until the end.
    let mut result = unsafe { Tensor::raw("out", &out) }?;
    call.forward(py, &mut result, &mut lse, None)?;
    Ok(Some(out))
}
