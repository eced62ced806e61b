//! A tensor that came in.
//!
//! Whatever it was, it is a pointer, axes, the type of its elements, whether it may be written, and
//! what keeps it alive. There are two ways to make one: [`Tensor::import`] takes a NumPy array or
//! anything with `__dlpack__`, and [`Tensor::raw`] the numbers that the package's own Python code
//! has read off a tensor which it holds on to.

mod numpy;

use longspan::{Dims, Element, ElementType, Order, Strides, View, ViewMut};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::dlpack::{self, DataType, Managed, RawTensor};
use crate::errors;

pub(crate) use self::numpy::{items, items_mut, ndarray};

/// Runs `$body` with `$E` standing for the element type that a value names.
macro_rules! with_element {
    ($element:expr, $E:ident => $body:expr) => {
        match $element {
            longspan::ElementType::Bf16 => {
                type $E = half::bf16;
                $body
            }
            longspan::ElementType::F16 => {
                type $E = half::f16;
                $body
            }
            _ => {
                type $E = f32;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// Whether a tensor may be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Write,
    /// Its producer says so.
    ReadOnly,
    /// The producer exported a copy: writes to it would be lost.
    Copied,
}

/// What keeps the elements alive.
#[expect(dead_code, reason = "held, not looked at")]
enum Keeper {
    Capsule(Managed),
    Object(Py<PyAny>),
    /// The caller does, for the time of the call.
    Caller,
}

/// A tensor of up to four axes in the CPU's memory.
pub(crate) struct Tensor {
    name: &'static str,
    data: *mut u8,
    axes: usize,
    shape: [usize; 4],
    strides: [isize; 4],
    element: ElementType,
    access: Access,
    _keeper: Keeper,
}

// SAFETY: an address and what keeps it alive: a capsule of DLPack, whose deleter may be called on
// any thread, or a `Py`, which is `Send`. Elements are f32, bf16 or f16. That no other thread
// writes them in the meantime is asked of Python code as for any array whose function releases the
// interpreter.
unsafe impl Send for Tensor {}
// SAFETY: as above; nothing is written through a shared reference to it.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// The tensor of a NumPy array, or of any object with `__dlpack__`.
    pub(crate) fn import(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if object.is_instance(ndarray(object.py())?)? {
            return Tensor::numpy(name, object);
        }
        Tensor::taken(name, Managed::take(name, object)?)
    }

    fn taken(name: &'static str, managed: Managed) -> PyResult<Self> {
        let access = match managed.flags() {
            flags if flags & dlpack::READ_ONLY != 0 => Access::ReadOnly,
            flags if flags & dlpack::IS_COPIED != 0 => Access::Copied,
            _ => Access::Write,
        };
        // SAFETY: the tensor keeps the capsule, whose tensor this is.
        let tensor = unsafe { Tensor::described(name, managed.tensor()) }?;
        Ok(Tensor { access, _keeper: Keeper::Capsule(managed), ..tensor })
    }

    /// A tensor that DLPack describes.
    ///
    /// # Safety
    ///
    /// What is described has to live until the tensor is dropped, and nothing else may write to it.
    pub(crate) unsafe fn described(name: &'static str, raw: &RawTensor) -> PyResult<Self> {
        let Some(element) = element_of(raw.dtype) else {
            return Err(unsupported(name, &describe(raw.dtype)));
        };
        let axes = usize::try_from(raw.axes).unwrap_or(usize::MAX);
        check_axes(name, axes)?;
        let (mut shape, mut strides) = ([1; 4], [0; 4]);
        let mut within = 1_i64;
        for axis in (0..axes).rev() {
            // SAFETY: DLPack demands an entry per axis of both lists, which live as long as the
            // tensor.
            let len = unsafe { *raw.shape.add(axis) };
            let stride = match raw.strides.is_null() {
                true => within,
                // SAFETY: as above, and the list isn't null.
                false => unsafe { *raw.strides.add(axis) },
            };
            shape[axis] = length(name, len)?;
            strides[axis] = stride as isize;
            within = within.saturating_mul(len);
        }
        let data = raw.data.cast::<u8>().wrapping_add(raw.byte_offset as usize);
        let (access, _keeper) = (Access::Write, Keeper::Caller);
        Ok(Tensor { name, data, axes, shape, strides, element, access, _keeper })
    }

    /// A tensor that the caller holds on to: itself, where its type has DLPack's functions, or
    /// `(address, shape, strides, name of the type)`.
    ///
    /// # Safety
    ///
    /// The tensor, or the memory that the tuple describes, has to live until this one is dropped, and
    /// nothing else may write to it.
    pub(crate) unsafe fn raw(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Some(tensor) = dlpack::borrow(object)? {
            tensor.on_cpu(name)?;
            if element_of(tensor.dtype).is_none() {
                let dtype = object.getattr("dtype")?.str()?.to_string();
                return Err(unsupported(name, dtype.trim_start_matches("torch.")));
            }
            // SAFETY: this function demands both.
            return unsafe { Tensor::described(name, &tensor) };
        }
        let tuple = object.cast::<PyTuple>()?;
        let (address, lens, steps, dtype): (usize, Vec<i64>, Vec<i64>, String) = tuple.extract()?;
        let element = by_dtype(&dtype).ok_or_else(|| unsupported(name, &dtype))?;
        check_axes(name, lens.len())?;
        if steps.len() != lens.len() {
            return Err(errors::value(format!(
                "{name} has {} axes and {} strides, expected as many of one as of the other",
                lens.len(),
                steps.len()
            )));
        }
        let (mut shape, mut strides) = ([1; 4], [0; 4]);
        for (axis, (&len, &step)) in lens.iter().zip(&steps).enumerate() {
            shape[axis] = length(name, len)?;
            strides[axis] = step as isize;
        }
        let data = std::ptr::with_exposed_provenance_mut(address);
        let (access, _keeper) = (Access::Write, Keeper::Caller);
        Ok(Tensor { name, data, axes: lens.len(), shape, strides, element, access, _keeper })
    }

    /// A contiguous tensor of four axes that `owner` holds.
    ///
    /// # Safety
    ///
    /// The elements have to lie at `data` for as long as `owner` lives.
    pub(crate) unsafe fn owned(
        name: &'static str,
        data: *mut u8,
        shape: [usize; 4],
        element: ElementType,
        owner: Py<PyAny>,
    ) -> Self {
        let [_, b, c, d] = shape.map(|len| len as isize);
        let strides = [b * c * d, c * d, d, 1];
        let (access, _keeper) = (Access::Write, Keeper::Object(owner));
        Tensor { name, data, axes: 4, shape, strides, element, access, _keeper }
    }

    pub(crate) fn element(&self) -> ElementType {
        self.element
    }

    /// The length of the last axis.
    pub(crate) fn head_dim(&self) -> usize {
        self.shape[self.axes.max(1) - 1]
    }

    /// Refuses other elements than `first` has.
    pub(crate) fn same_element(&self, first: &Tensor) -> PyResult<()> {
        if self.element == first.element {
            return Ok(());
        }
        Err(errors::kind(format!(
            "{} holds {}, expected {} as {}: convert one of them",
            self.name, self.element, first.element, first.name
        )))
    }

    /// The four axes of a tensor in the given order.
    pub(crate) fn dims(&self, order: Order) -> PyResult<Dims> {
        if self.axes != 4 {
            let expected = match order {
                Order::Bhsd => "(batch, heads, tokens, dim)",
                Order::Bshd => "(batch, tokens, heads, dim)",
            };
            return Err(errors::value(format!(
                "{} has {} axes, expected 4: {expected}; x[None] adds one of length 1",
                self.name, self.axes
            )));
        }
        let [batch, second, third, dim] = self.shape;
        let (tokens, heads) = by_name(order, second, third);
        Ok(Dims { batch, tokens, heads, dim })
    }

    fn strides(&self, order: Order) -> Strides {
        let [batch, second, third, dim] = self.strides;
        let (tokens, heads) = by_name(order, second, third);
        Strides { batch, tokens, heads, dim }
    }

    /// To read.
    pub(crate) fn view<E: Element>(&self, order: Order) -> PyResult<View<'_, E>> {
        assert_eq!(self.element, E::TYPE, "asked for by its own type");
        let (dims, strides) = (self.dims(order)?, self.strides(order));
        // SAFETY: DLPack, NumPy, or the conditions of `raw` and `owned` say that the elements of
        // these dims and strides lie there, as long as the keeper lives, which `self` holds on to.
        unsafe { View::from_raw(self.data.cast_const().cast::<E>(), dims, strides) }
            .map_err(errors::raise)
    }

    /// To write.
    pub(crate) fn view_mut<E: Element>(&mut self, order: Order) -> PyResult<ViewMut<'_, E>> {
        assert_eq!(self.element, E::TYPE, "asked for by its own type");
        self.check_writable()?;
        let (dims, strides) = (self.dims(order)?, self.strides(order));
        // SAFETY: as in `view`, and the producer lets them be written. `self` is borrowed for as
        // long as the view lives, so that there is no other view of this tensor; calls of Longspan
        // refuse one that overlaps another tensor.
        unsafe { ViewMut::from_raw(self.data.cast::<E>(), dims, strides) }.map_err(errors::raise)
    }

    /// One f32 per row, `(batch, heads, tokens)`, to read.
    pub(crate) fn rows(&self, dims: Dims) -> PyResult<&[f32]> {
        let len = self.check_rows(dims)?;
        match len {
            0 => Ok(&[]),
            // SAFETY: as in `view`: `check_rows` has found so many f32 side by side, and aligned.
            _ => Ok(unsafe { std::slice::from_raw_parts(self.data.cast(), len) }),
        }
    }

    /// The same, to write.
    pub(crate) fn rows_mut(&mut self, dims: Dims) -> PyResult<&mut [f32]> {
        self.check_writable()?;
        let len = self.check_rows(dims)?;
        match len {
            0 => Ok(&mut []),
            // SAFETY: as in `view_mut` and `rows`.
            _ => Ok(unsafe { std::slice::from_raw_parts_mut(self.data.cast(), len) }),
        }
    }

    fn check_writable(&self) -> PyResult<()> {
        let name = self.name;
        match self.access {
            Access::Write => Ok(()),
            Access::ReadOnly => Err(errors::value(format!(
                "{name} is read-only, expected a tensor to write to: give a copy of it"
            ))),
            Access::Copied => Err(errors::value(format!(
                "{name}: __dlpack__ made a copy, and what is written there would be lost; give a \
                 tensor that shares its memory"
            ))),
        }
    }

    /// How many elements there are, if they are a contiguous `(batch, heads, tokens)` of f32.
    fn check_rows(&self, dims: Dims) -> PyResult<usize> {
        let Tensor { name, axes, shape, element, .. } = self;
        if *element != ElementType::F32 {
            return Err(errors::kind(format!("{name} holds {element}, expected f32")));
        }
        let expected = [dims.batch, dims.heads, dims.tokens];
        if shape[..*axes] != expected {
            return Err(errors::value(format!(
                "{name} has shape {:?}, expected {expected:?}: batch, heads, tokens",
                &shape[..*axes]
            )));
        }
        let mut within = 1;
        for axis in (0..3).rev() {
            if shape[axis] > 1 && self.strides[axis] != within && !expected.contains(&0) {
                return Err(errors::value(format!(
                    "{name} isn't contiguous, expected contiguous elements: \
                     numpy.ascontiguousarray makes it so"
                )));
            }
            within *= shape[axis] as isize;
        }
        if !self.data.cast::<f32>().is_aligned() {
            return Err(errors::value(format!("{name} isn't aligned to 4 bytes: give a copy")));
        }
        Ok(expected.iter().product())
    }
}

fn by_name<T>(order: Order, second: T, third: T) -> (T, T) {
    match order {
        Order::Bshd => (second, third),
        Order::Bhsd => (third, second),
    }
}

fn check_axes(name: &str, axes: usize) -> PyResult<()> {
    if axes <= 4 {
        return Ok(());
    }
    Err(errors::value(format!("{name} has {axes} axes, expected 4: batch, heads, tokens, dim")))
}

fn length(name: &str, len: i64) -> PyResult<usize> {
    usize::try_from(len).map_err(|_| {
        errors::value(format!("{name} has an axis of length {len}, expected 0 or more"))
    })
}

/// The elements of a type, as NumPy and torch call it.
pub(crate) fn by_dtype(name: &str) -> Option<ElementType> {
    match name {
        "float32" => Some(ElementType::F32),
        "bfloat16" => Some(ElementType::Bf16),
        "float16" => Some(ElementType::F16),
        _ => None,
    }
}

fn element_of(dtype: DataType) -> Option<ElementType> {
    match (dtype.code, dtype.bits, dtype.lanes) {
        (dlpack::FLOAT, 32, 1) => Some(ElementType::F32),
        (dlpack::FLOAT, 16, 1) => Some(ElementType::F16),
        (dlpack::BFLOAT, 16, 1) => Some(ElementType::Bf16),
        _ => None,
    }
}

fn unsupported(name: &str, dtype: &str) -> PyErr {
    errors::kind(format!("{name} holds {dtype}, expected f32, bf16 or f16: convert it first"))
}

fn describe(dtype: DataType) -> String {
    let DataType { code, bits, lanes } = dtype;
    let kind = match code {
        0 => "i",
        1 => "u",
        dlpack::FLOAT => "f",
        dlpack::BFLOAT => "bf",
        5 => "complex",
        6 => return "bool".into(),
        other => return format!("DLPack type {other} of {bits} bits"),
    };
    match lanes {
        1 => format!("{kind}{bits}"),
        lanes => format!("{kind}{bits} × {lanes}"),
    }
}
