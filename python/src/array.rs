//! Numbers that NumPy has no type for.
//!
//! Results of bf16 tensors that aren't NumPy's come back as an [`Array`], which owns its memory and
//! hands it out by DLPack: `torch.from_dlpack(array)` copies nothing.

use std::sync::Arc;

use longspan::ElementType;
use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::prelude::*;

use crate::dlpack::{self, DataType, Export, Form};
use crate::tensor::Tensor;

/// A cache line of elements.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read and written through pointers")] [u16; 32]);

/// The memory of an array, and of all that were made from it.
struct Memory {
    lines: *mut Line,
    count: usize,
}

// SAFETY: an address of plain numbers, freed once, by `drop`. Reads and writes go through `Tensor`
// and capsules of DLPack, whose conditions hold for them.
unsafe impl Send for Memory {}
// SAFETY: as above; the pointer itself doesn't change.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeros, if there is room for them.
    fn new(count: usize) -> PyResult<Self> {
        let mut lines = Vec::new();
        lines.try_reserve_exact(count).map_err(|_| {
            PyMemoryError::new_err(format!("no room for {} bytes", count as u128 * 64))
        })?;
        lines.resize(count, Line([0; 32]));
        Ok(Memory { lines: Box::into_raw(lines.into_boxed_slice()).cast(), count })
    }

    fn copy(&self) -> PyResult<Self> {
        let new = Memory::new(self.count)?;
        // SAFETY: both have so many lines, and the new one, made just now, is no part of the other.
        unsafe { std::ptr::copy_nonoverlapping(self.lines, new.lines, self.count) };
        Ok(new)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let lines = std::ptr::slice_from_raw_parts_mut(self.lines, self.count);
        // SAFETY: `new` made this box of `count` lines, and nothing else gives it back.
        drop(unsafe { Box::from_raw(lines) });
    }
}

/// A contiguous array of bf16 numbers, as results have where tensors of bf16 aren't NumPy's.
///
/// Hand it to a library that knows bf16; nothing is copied:
///
///     out = torch.from_dlpack(longspan.attention(q, k, v, "causal"))
#[pyclass(frozen, module = "longspan")]
pub(crate) struct Array {
    memory: Arc<Memory>,
    shape: [usize; 4],
}

impl Array {
    /// An array of zeros, and it as a tensor to write.
    pub(crate) fn zeros(
        py: Python<'_>,
        name: &'static str,
        shape: [usize; 4],
    ) -> PyResult<(Py<PyAny>, Tensor)> {
        let elements = shape.iter().fold(1_usize, |product, &len| product.saturating_mul(len));
        let memory = Arc::new(Memory::new(elements.div_ceil(32))?);
        let data = memory.lines.cast();
        let array = Py::new(py, Array { memory, shape })?.into_any();
        // SAFETY: `Memory::new` made room for the elements, the array owns it, and the tensor holds
        // the array.
        let tensor =
            unsafe { Tensor::owned(name, data, shape, ElementType::Bf16, array.clone_ref(py)) };
        Ok((array, tensor))
    }
}

#[pymethods]
impl Array {
    /// How many elements each axis has.
    #[getter]
    fn shape(&self) -> (usize, usize, usize, usize) {
        self.shape.into()
    }

    /// `"bfloat16"`.
    #[getter]
    fn dtype(&self) -> &'static str {
        "bfloat16"
    }

    /// How many objects and capsules hold the memory.
    #[getter]
    fn _owners(&self) -> usize {
        Arc::strong_count(&self.memory)
    }

    fn __repr__(&self) -> String {
        format!("<longspan.Array of bfloat16, shape {:?}>", self.shape())
    }

    /// Where the elements lie: the CPU.
    fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CPU, 0)
    }

    /// A capsule for another library.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("stream: expected None, as on every CPU"));
        }
        if let Some(device) = dl_device.filter(|device| *device != (dlpack::CPU, 0)) {
            return Err(PyBufferError::new_err(format!(
                "dl_device is {device:?}, expected (1, 0), the CPU: copy it there afterwards"
            )));
        }
        let (memory, flags) = match copy {
            Some(true) => (Arc::new(self.memory.copy()?), dlpack::IS_COPIED),
            _ => (self.memory.clone(), 0),
        };
        let form = match max_version {
            Some((1.., _)) => Form::Versioned(flags),
            _ => Form::Legacy,
        };
        let dtype = DataType { code: dlpack::BFLOAT, bits: 16, lanes: 1 };
        let shape = self.shape.map(|len| len as i64);
        let data = memory.lines.cast();
        dlpack::export(py, Export { data, dtype, shape, owner: memory }, form)
    }
}
