//! NumPy's arrays as tensors.
//!
//! They say themselves where they lie (`__array_interface__`): by DLPack they can't hand over bf16,
//! and before 2.1 nothing that is read-only, as a broadcast array is.

use longspan::ElementType;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use super::{Access, Keeper, Tensor, by_dtype, check_axes};
use crate::errors;

impl Tensor {
    /// The tensor of an array.
    pub(super) fn numpy(name: &'static str, array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = array.py();
        if !array.is_exact_instance(ndarray(py)?) && array.is_instance(masked(py)?)? {
            return Err(errors::kind(format!(
                "{name} is a masked array, and its mask would be ignored: give a plain one, and \
                 say in the pattern what is seen"
            )));
        }
        let dtype = array.getattr(intern!(py, "dtype"))?;
        let is_native: bool = dtype.getattr(intern!(py, "isnative"))?.extract()?;
        let element = match by_letter(&dtype)? {
            Some(element) if is_native => element,
            _ => {
                let order = if is_native { "" } else { " in foreign byte order" };
                return Err(errors::kind(format!(
                    "{name} holds {dtype}{order}, expected f32, bf16 or f16: convert it first"
                )));
            }
        };
        let interface = array.getattr(intern!(py, "__array_interface__"))?;
        let (address, read_only): (usize, bool) = interface.get_item("data")?.extract()?;
        let (mut shape, mut strides) = ([1; 4], [0; 4]);
        let lens: Vec<usize> = interface.get_item("shape")?.extract()?;
        check_axes(name, lens.len())?;
        shape[..lens.len()].copy_from_slice(&lens);
        let steps: Vec<isize> = array.getattr(intern!(py, "strides"))?.extract()?;
        let size = element.size() as isize;
        for (stride, step) in strides.iter_mut().zip(steps) {
            if step % size != 0 {
                return Err(errors::value(format!(
                    "{name} has a stride of {step} bytes, expected a multiple of {size}, the size \
                     of its elements: give a copy"
                )));
            }
            *stride = step / size;
        }
        let access = if read_only { Access::ReadOnly } else { Access::Write };
        let data = std::ptr::with_exposed_provenance_mut(address);
        let _keeper = Keeper::Object(array.clone().unbind());
        Ok(Tensor { name, data, axes: lens.len(), shape, strides, element, access, _keeper })
    }
}

/// The elements of a NumPy type: by its letter, since a name is built on every access.
fn by_letter(dtype: &Bound<'_, PyAny>) -> PyResult<Option<ElementType>> {
    let py = dtype.py();
    match dtype.getattr(intern!(py, "char"))?.extract()? {
        'f' => Ok(Some(ElementType::F32)),
        'e' => Ok(Some(ElementType::F16)),
        _ => Ok(by_dtype(&dtype.getattr(intern!(py, "name"))?.extract::<String>()?)),
    }
}

/// NumPy's class of arrays.
pub(crate) fn ndarray(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static NDARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    NDARRAY.import(py, "numpy", "ndarray")
}

/// NumPy's class of arrays with a mask.
fn masked(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static MASKED: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    MASKED.import(py, "numpy.ma", "MaskedArray")
}

/// The items of an array, to read.
///
/// # Safety
///
/// It must be contiguous and hold `len` valid items of the type; for `'a` it must live, and nothing may
/// write to it.
pub(crate) unsafe fn items<'a, T>(array: &Bound<'_, PyAny>, len: usize) -> PyResult<&'a [T]> {
    // SAFETY: as this function demands; the exclusive borrow ends here.
    unsafe { items_mut(array, len) }.map(|items| &*items)
}

/// The items of an array, to write.
///
/// # Safety
///
/// As of [`items`], and for `'a` nothing else may read it.
pub(crate) unsafe fn items_mut<'a, T>(
    array: &Bound<'_, PyAny>,
    len: usize,
) -> PyResult<&'a mut [T]> {
    let interface = array.getattr(intern!(array.py(), "__array_interface__"))?;
    let (address, _): (usize, bool) = interface.get_item("data")?.extract()?;
    let data: *mut T = std::ptr::with_exposed_provenance_mut(address);
    if len == 0 || !data.is_aligned() {
        return if len == 0 { Ok(&mut []) } else { Err(errors::value("an array isn't aligned")) };
    }
    // SAFETY: this function demands `len` items there for `'a`; the address is aligned.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
}
