//! Elements that NumPy has no type for.
//!
//! Results of bf16 tensors that aren't NumPy's come back as an [`Array`], which owns its memory and
//! hands it out by DLPack: `torch.from_dlpack(array)` copies nothing.

use std::sync::Arc;

use longspan::ElementType;
use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyTuple};

use crate::dlpack::{self, DataType, Export, Form};
use crate::errors;
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

// SAFETY: an address of plain elements, freed once, by `drop`. Reads and writes go through `Tensor`
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

/// A contiguous array of bf16 elements, as results have where tensors of bf16 aren't NumPy's.
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
    fn bytes(&self) -> &[u8] {
        // SAFETY: `Memory::new` made room for the elements, which are bytes as any others.
        unsafe { std::slice::from_raw_parts(self.memory.lines.cast(), 2 * elements(self.shape)) }
    }

    /// An array of zeros, and it as a tensor to write.
    pub(crate) fn zeros(
        py: Python<'_>,
        name: &'static str,
        shape: [usize; 4],
    ) -> PyResult<(Py<PyAny>, Tensor)> {
        let memory = Arc::new(Memory::new(elements(shape).div_ceil(32))?);
        let data = memory.lines.cast();
        let array = Py::new(py, Array { memory, shape })?.into_any();
        // SAFETY: `Memory::new` made room for the elements, the array owns it, and the tensor holds
        // the array.
        let tensor =
            unsafe { Tensor::owned(name, data, shape, ElementType::Bf16, array.clone_ref(py)) };
        Ok((array, tensor))
    }
}

fn elements(shape: [usize; 4]) -> usize {
    shape.iter().fold(1_usize, |product, &len| product.saturating_mul(len))
}

#[pymethods]
impl Array {
    /// An array of the bytes of its elements. For the package's own Python part.
    #[staticmethod]
    fn _from_bytes(shape: [usize; 4], bytes: &[u8]) -> PyResult<Self> {
        let expected = elements(shape).saturating_mul(2);
        if bytes.len() != expected {
            return Err(errors::value(format!(
                "there are {} bytes, expected {expected} for shape {shape:?}",
                bytes.len()
            )));
        }
        let memory = Memory::new(elements(shape).div_ceil(32))?;
        // SAFETY: the memory, made just now, has room for so many bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.lines.cast(), bytes.len()) };
        Ok(Array { memory: Arc::new(memory), shape })
    }

    /// The bytes of its elements. For the package's own Python part.
    fn _to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.bytes())
    }

    /// A NumPy array with the same elements, which is a copy. `dtype` is any floating-point type;
    /// f32 holds every bf16 element exactly. For bf16 itself it is `ml_dtypes.bfloat16`.
    #[pyo3(signature = (dtype=None), text_signature = "($self, dtype='float32')")]
    fn to_numpy<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let dtype = dtype.unwrap_or_else(|| intern!(py, "float32").clone().into_any());
        py.import("longspan._restore")?.call_method1("to_numpy", (slf, dtype))
    }

    /// `numpy.asarray(array, dtype)`; without a dtype a `TypeError`, as NumPy has no bf16.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if dtype.is_none() {
            return Err(errors::kind(
                "a longspan.Array holds bf16, which NumPy has no type for: use array.to_numpy() for \
                 f32, numpy.asarray(array, dtype) for another type (ml_dtypes.bfloat16 too), or \
                 torch.from_dlpack(array)",
            ));
        }
        if copy == Some(false) {
            return Err(errors::value(
                "copy is False, and a longspan.Array can't share its memory with NumPy: leave copy out",
            ));
        }
        Array::to_numpy(slf, dtype)
    }

    /// Whether another array has the same shape and the same bits.
    fn __eq__(&self, other: &Bound<'_, PyAny>) -> Py<PyAny> {
        let py = other.py();
        let Ok(other) = other.cast::<Array>() else { return py.NotImplemented() };
        let equal = self.shape == other.get().shape && self.bytes() == other.get().bytes();
        PyBool::new(py, equal).to_owned().into_any().unbind()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let restore = slf.py().import("longspan._restore")?.getattr("array")?;
        let array = slf.get();
        (restore, (array.shape(), array._to_bytes(slf.py()))).into_pyobject(slf.py())
    }

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
