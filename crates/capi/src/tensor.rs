//! Tensors: {pointer, dtype, shape, strides in elements}.

use std::ffi::c_void;

use longspan::{Dims, Element, Strides, View, ViewMut};

use crate::status::{Failure, Result, Status, invalid};

/// 32-bit floating point.
pub const LONGSPAN_F32: i32 = 0;
/// bfloat16.
pub const LONGSPAN_BF16: i32 = 1;
/// IEEE half precision.
pub const LONGSPAN_F16: i32 = 2;

/// A tensor with the axes (batch, head, token, dim), in any order in memory: that is what strides say.
/// Nothing is copied.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    /// The element at index 0 of every axis.
    pub data: *mut c_void,
    /// Elements per axis: batch, head, token, dim.
    pub shape: [i64; 4],
    /// Elements from one index of an axis to the next; may be 0 or negative for tensors that are read.
    pub strides: [i64; 4],
    /// `LONGSPAN_F32`, `LONGSPAN_BF16` or `LONGSPAN_F16`.
    pub dtype: i32,
}

/// A tensor whose elements lie side by side in the order (batch, head, token, dim).
#[unsafe(no_mangle)]
pub extern "C" fn longspan_tensor_bhsd(
    data: *mut c_void,
    dtype: i32,
    batch: i64,
    heads: i64,
    tokens: i64,
    dim: i64,
) -> Tensor {
    let head = tokens.wrapping_mul(dim);
    let strides = [heads.wrapping_mul(head), head, dim, 1];
    Tensor { data, shape: [batch, heads, tokens, dim], strides, dtype }
}

/// A tensor whose elements lie side by side in the order (batch, token, head, dim); its axes are those of
/// every tensor, (batch, head, token, dim).
#[unsafe(no_mangle)]
pub extern "C" fn longspan_tensor_bshd(
    data: *mut c_void,
    dtype: i32,
    batch: i64,
    tokens: i64,
    heads: i64,
    dim: i64,
) -> Tensor {
    let token = heads.wrapping_mul(dim);
    let strides = [tokens.wrapping_mul(token), dim, token, 1];
    Tensor { data, shape: [batch, heads, tokens, dim], strides, dtype }
}

/// Runs `$body` with `$E` standing for the element type of a dtype that `Tensors` has checked.
macro_rules! with_element {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::LONGSPAN_BF16 => {
                type $E = half::bf16;
                $body
            }
            $crate::LONGSPAN_F16 => {
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

/// A tensor of a call, by its name.
#[derive(Clone, Copy)]
pub(crate) struct Named {
    name: &'static str,
    tensor: Tensor,
    pub(crate) dims: Dims,
    strides: Strides,
}

impl Named {
    /// A tensor that a call has to have.
    ///
    /// # Safety
    ///
    /// The pointer is null, or a tensor may be read there.
    pub(crate) unsafe fn read(name: &'static str, pointer: *const Tensor) -> Result<Self> {
        if pointer.is_null() || !pointer.is_aligned() {
            return Err(invalid(format!("{name} is a null pointer, expected a longspan_tensor")));
        }
        // SAFETY: this function demands it.
        Named::new(name, unsafe { *pointer })
    }

    pub(crate) fn new(name: &'static str, tensor: Tensor) -> Result<Self> {
        if !(LONGSPAN_F32..=LONGSPAN_F16).contains(&tensor.dtype) {
            return Err(Failure::new(
                Status::InvalidArgument,
                format!(
                    "{name}.dtype is {}, expected LONGSPAN_F32 (0), LONGSPAN_BF16 (1) or LONGSPAN_F16 (2)",
                    tensor.dtype
                ),
            ));
        }
        let size = |axis: usize| {
            usize::try_from(tensor.shape[axis]).map_err(|_| {
                invalid(format!(
                    "{name}.shape[{axis}] is {}, expected 0 or more",
                    tensor.shape[axis]
                ))
            })
        };
        let (batch, heads, tokens, dim) = (size(0)?, size(1)?, size(2)?, size(3)?);
        let dims = Dims { batch, tokens, heads, dim };
        let [batch, heads, tokens, dim] = tensor.strides.map(|stride| stride as isize);
        let strides = Strides { batch, tokens, heads, dim };
        Ok(Named { name, tensor, dims, strides })
    }

    pub(crate) fn dtype(&self) -> i32 {
        self.tensor.dtype
    }

    /// Refuses another dtype than that of `first`.
    pub(crate) fn same_dtype(&self, first: &Named) -> Result<()> {
        if self.dtype() == first.dtype() {
            return Ok(());
        }
        Err(invalid(format!(
            "{}.dtype is {}, expected {}, as {}: convert one of them",
            self.name,
            self.dtype(),
            first.dtype(),
            first.name
        )))
    }

    /// To read.
    ///
    /// # Safety
    ///
    /// The elements of the tensor may be read, as `E`, and are not written to for `'a`.
    pub(crate) unsafe fn view<'a, E: Element>(&self) -> Result<View<'a, E>> {
        let first = self.first::<E>()?.cast_const();
        // SAFETY: as this function demands; without elements the address has no meaning.
        unsafe { View::from_raw(first, self.dims, self.strides) }.map_err(|error| self.named(error))
    }

    /// To write.
    ///
    /// # Safety
    ///
    /// The elements of the tensor may be written, as `E`, and nothing else reads or writes them for `'a`
    /// but through tensors of the same call, whose overlap is an error of that call.
    pub(crate) unsafe fn view_mut<'a, E: Element>(&self) -> Result<ViewMut<'a, E>> {
        let first = self.first()?;
        // SAFETY: as this function demands; without elements the address has no meaning.
        unsafe { ViewMut::from_raw(first, self.dims, self.strides) }
            .map_err(|error| self.named(error))
    }

    /// The first element; anything where there is none.
    fn first<E>(&self) -> Result<*mut E> {
        match (self.dims.elements(), self.tensor.data.is_null()) {
            (Some(0), _) => Ok(std::ptr::dangling_mut()),
            (_, false) => Ok(self.tensor.data.cast()),
            (_, true) => {
                let (name, dims) = (self.name, self.dims);
                Err(invalid(format!("{name}.data is null, expected a tensor of {dims:?}")))
            }
        }
    }

    fn named(&self, error: longspan::Error) -> Failure {
        invalid(format!("{}: {error}", self.name))
    }
}

/// One f32 per row of an output, or none.
///
/// # Safety
///
/// The pointer is null, or so many elements may be read there for `'a`, and are not written to.
pub(crate) unsafe fn rows<'a>(
    name: &str,
    pointer: *const f32,
    dims: Dims,
) -> Result<Option<&'a [f32]>> {
    let Some(len) = row_count(name, pointer, dims)? else { return Ok(None) };
    // SAFETY: `row_count` has found the pointer aligned and not null, or no elements.
    Ok(Some(if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(pointer, len) } }))
}

/// The same, to write.
///
/// # Safety
///
/// As of [`rows`], and nothing else reads or writes the elements.
pub(crate) unsafe fn rows_mut<'a>(
    name: &str,
    pointer: *mut f32,
    dims: Dims,
) -> Result<Option<&'a mut [f32]>> {
    let Some(len) = row_count(name, pointer, dims)? else { return Ok(None) };
    Ok(Some(match len {
        0 => &mut [],
        // SAFETY: as in `rows`.
        _ => unsafe { std::slice::from_raw_parts_mut(pointer, len) },
    }))
}

/// The rows of the caller, or of `own` where it has none.
pub(crate) fn or_own<'a>(
    rows: Option<&'a mut [f32]>,
    own: &'a mut Vec<f32>,
    dims: Dims,
) -> Result<&'a mut [f32]> {
    if let Some(rows) = rows {
        return Ok(rows);
    }
    let len = Dims { dim: 1, ..dims }.elements().ok_or(longspan::Error::Overflow { dims })?;
    let failed = |_| longspan::Error::OutOfMemory { bytes: len.saturating_mul(4) };
    own.try_reserve_exact(len).map_err(failed)?;
    own.resize(len, 0.0);
    Ok(own)
}

fn row_count(name: &str, pointer: *const f32, dims: Dims) -> Result<Option<usize>> {
    if pointer.is_null() {
        return Ok(None);
    }
    if !pointer.is_aligned() {
        return Err(invalid(format!("{name} is at {pointer:p}, expected a multiple of 4")));
    }
    let rows = Dims { dim: 1, ..dims };
    match rows.elements() {
        Some(len) if len <= isize::MAX as usize / 4 => Ok(Some(len)),
        _ => Err(Failure::new(
            Status::TooLarge,
            format!("{name}: the rows of {dims:?} can't be counted"),
        )),
    }
}

/// A list of so many elements.
///
/// # Safety
///
/// The pointer is null, or so many elements may be read there for `'a`.
pub(crate) unsafe fn list<'a, T>(
    name: &str,
    pointer: *const T,
    len: usize,
) -> Result<Option<&'a [T]>> {
    if pointer.is_null() {
        if len > 0 {
            return Err(invalid(format!(
                "{name} is null with {len} elements, expected a pointer to them"
            )));
        }
        return Ok(None);
    }
    if !pointer.is_aligned() || len > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(invalid(format!(
            "{name} is at {pointer:p} with {len} elements, expected an aligned list"
        )));
    }
    // SAFETY: as this function demands; aligned and not null.
    Ok(Some(unsafe { std::slice::from_raw_parts(pointer, len) }))
}
