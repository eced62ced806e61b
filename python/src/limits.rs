//! What the machine can do, measured: `longspan.limits`.

use std::num::NonZeroUsize;

use longspan::{Dims, Isa, limits};
use pyo3::prelude::*;

use crate::errors;
use crate::tensor::Tensor;

/// The name of the fastest instruction set of this CPU.
#[pyfunction]
pub(crate) fn best_isa() -> String {
    Isa::best().to_string()
}

/// Billions of f32 operations per second that multiply-add instructions on registers alone reach on
/// `threads` threads together: the ceiling of f32 attention. Takes about two milliseconds; take the
/// best of several.
///
/// >>> from longspan import limits
/// >>> limits.fma_peak() > 0
/// True
#[pyfunction]
#[pyo3(signature = (threads=NonZeroUsize::MIN, isa=None), text_signature = "(threads=1, isa=None)")]
pub(crate) fn fma_peak(py: Python<'_>, threads: NonZeroUsize, isa: Option<&str>) -> PyResult<f64> {
    let isa = match isa {
        Some(isa) => isa.parse().map_err(errors::raise)?,
        None => Isa::best(),
    };
    py.detach(|| limits::fma_peak(isa, threads)).map_err(errors::raise)
}

/// Billions of operations per second of the matrix unit for bf16, on tile registers alone; None
/// where this CPU has none.
#[pyfunction]
#[pyo3(signature = (threads=NonZeroUsize::MIN), text_signature = "(threads=1)")]
pub(crate) fn amx_peak(py: Python<'_>, threads: NonZeroUsize) -> Option<f64> {
    py.detach(|| limits::amx_peak(threads))
}

/// Billions of bytes per second at which `threads` threads together read f32 `(1, 1, n)`.
#[pyfunction]
pub(crate) fn read_bandwidth(
    py: Python<'_>,
    data: &Bound<'_, PyAny>,
    threads: NonZeroUsize,
) -> PyResult<f64> {
    let data = Tensor::import("data", data)?;
    let dims = Dims { batch: 1, heads: 1, tokens: data.head_dim(), dim: 1 };
    let elements = data.rows(dims)?;
    Ok(py.detach(|| limits::read_bandwidth(elements, threads)))
}
