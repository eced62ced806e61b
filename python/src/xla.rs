//! XLA's foreign function interface, as far as handlers on the CPU need it.
//!
//! XLA calls a handler with one struct, the call frame: buffers that it reads and writes, and attributes by
//! name. The structs are those of `xla/ffi/api/c_api.h`, whose minor versions up to [`MINOR`] have them alike:
//! fields are added at their ends. When a handler is registered it is asked for the version that it was
//! written for.

use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use longspan::{Dims, Element, ElementType, Order, Strides, View, ViewMut};

/// The newest minor version whose structs were compared with these.
const MINOR: c_int = 3;

/// Codes of errors, as `absl::StatusCode` has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Internal = 13,
}

/// What goes wrong in a handler.
#[derive(Debug)]
pub(crate) struct Failure {
    code: Code,
    message: String,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// An argument that breaks a rule.
pub(crate) fn invalid(message: impl Into<String>) -> Failure {
    Failure { code: Code::InvalidArgument, message: message.into() }
}

impl From<longspan::Error> for Failure {
    fn from(error: longspan::Error) -> Self {
        let code = match error {
            longspan::Error::OutOfMemory { .. } => Code::ResourceExhausted,
            _ => Code::InvalidArgument,
        };
        Failure { code, message: error.to_string() }
    }
}

impl From<longspan_pattern::Error> for Failure {
    fn from(error: longspan_pattern::Error) -> Self {
        longspan::Error::from(error).into()
    }
}

#[repr(C)]
struct Extension {
    size: usize,
    kind: c_int,
    next: *mut Extension,
}

/// The kind of the extension that asks for metadata.
const METADATA: c_int = 1;

#[repr(C)]
struct Version {
    size: usize,
    extension: *mut Extension,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct Metadata {
    size: usize,
    version: Version,
    traits: u32,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct ErrorArguments {
    size: usize,
    extension: *mut Extension,
    message: *const c_char,
    code: c_int,
}

/// An error that XLA owns.
#[repr(C)]
pub(crate) struct Error {
    _private: [u8; 0],
}

#[repr(C)]
struct Api {
    size: usize,
    extension: *mut Extension,
    version: Version,
    internal: *const c_void,
    create_error: unsafe extern "C" fn(*mut ErrorArguments) -> *mut Error,
}

#[repr(C)]
struct List {
    size: usize,
    extension: *mut Extension,
    count: i64,
    kinds: *mut c_int,
    items: *mut *mut c_void,
}

/// The kind of a buffer among arguments and results.
const BUFFER: c_int = 1;

#[repr(C)]
struct Attributes {
    size: usize,
    extension: *mut Extension,
    count: i64,
    kinds: *mut c_int,
    names: *mut *mut Span,
    items: *mut *mut c_void,
}

const ARRAY: c_int = 1;
const SCALAR: c_int = 3;
const STRING: c_int = 4;

#[repr(C)]
struct Span {
    first: *const u8,
    len: usize,
}

#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const c_void,
}

#[repr(C)]
struct Array {
    dtype: c_int,
    len: usize,
    data: *const c_void,
}

#[repr(C)]
struct RawBuffer {
    size: usize,
    extension: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    axes: i64,
    dims: *const i64,
}

const PRED: c_int = 1;
const S32: c_int = 4;
const S64: c_int = 5;
const U32: c_int = 8;
const F16: c_int = 10;
const F32: c_int = 11;
const F64: c_int = 12;
const BF16: c_int = 16;

/// A call of a handler.
#[repr(C)]
pub(crate) struct CallFrame {
    size: usize,
    extension: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: List,
    results: List,
    attributes: Attributes,
}

/// A function that XLA calls.
pub(crate) type Handler = unsafe extern "C" fn(*mut CallFrame) -> *mut Error;

/// Runs a handler's work; what goes wrong is an error of XLA's, a panic too.
///
/// # Safety
///
/// `frame` is what XLA calls a handler with, for the time of the call.
pub(crate) unsafe fn handle(
    frame: *mut CallFrame,
    work: impl FnOnce(&Call<'_>) -> Result<()>,
) -> *mut Error {
    // SAFETY: as this function demands.
    let frame = unsafe { &*frame };
    // SAFETY: extensions are null, or lie there for the time of the call.
    if let Some(extension) = unsafe { frame.extension.as_ref() }
        && extension.kind == METADATA
    {
        // SAFETY: an extension of this kind has a place for metadata behind it.
        unsafe { describe(frame) };
        return std::ptr::null_mut();
    }
    let failure = match catch_unwind(AssertUnwindSafe(|| work(&Call { frame }))) {
        Ok(Ok(())) => return std::ptr::null_mut(),
        Ok(Err(failure)) => failure,
        Err(_) => Failure { code: Code::Internal, message: "longspan panicked".into() },
    };
    let message = CString::new(failure.message.replace('\0', " ")).unwrap_or_default();
    let mut arguments = ErrorArguments {
        size: size_of::<ErrorArguments>(),
        extension: std::ptr::null_mut(),
        message: message.as_ptr(),
        code: failure.code as c_int,
    };
    // SAFETY: the interface of the frame, and arguments that live until it returns.
    unsafe { ((*frame.api).create_error)(&raw mut arguments) }
}

/// Writes the version of the interface: that of the caller where its structs are known.
///
/// # Safety
///
/// The frame's extension must ask for metadata.
unsafe fn describe(frame: &CallFrame) {
    // SAFETY: as this function demands; the interface is that of the frame.
    unsafe {
        let metadata = &mut *(*frame.extension.cast::<MetadataExtension>()).metadata;
        let minor = frame.api.as_ref().map_or(MINOR, |api| api.version.minor.min(MINOR));
        (metadata.version.major, metadata.version.minor, metadata.traits) = (0, minor, 0);
    }
}

/// Buffers and attributes of a call.
pub(crate) struct Call<'a> {
    frame: &'a CallFrame,
}

impl<'a> Call<'a> {
    /// An argument by its place.
    pub(crate) fn argument(&self, index: usize) -> Result<Buffer<'a>> {
        // SAFETY: lists of a frame are those of XLA, which live for the time of the call.
        unsafe { buffer(&self.frame.arguments, "argument", index) }
    }

    /// A result by its place.
    pub(crate) fn result(&self, index: usize) -> Result<Buffer<'a>> {
        // SAFETY: as in `argument`.
        unsafe { buffer(&self.frame.results, "result", index) }
    }

    fn attribute(&self, name: &str, kind: c_int) -> Result<Option<*mut c_void>> {
        let Attributes { count, kinds, names, items, .. } = self.frame.attributes;
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: lists of a frame have `count` entries, which live for the time of the call.
            let (own, own_kind, item) = unsafe {
                let Span { first, len } = **names.add(index);
                (std::slice::from_raw_parts(first, len), *kinds.add(index), *items.add(index))
            };
            if own == name.as_bytes() {
                return match own_kind == kind {
                    true => Ok(Some(item)),
                    false => Err(invalid(format!(
                        "attribute {name} is of kind {own_kind}, expected {kind}"
                    ))),
                };
            }
        }
        Ok(None)
    }

    /// A text.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        let Some(item) = self.attribute(name, STRING)? else { return Ok(None) };
        // SAFETY: an attribute of this kind is a span, whose bytes live for the time of the call.
        let bytes = unsafe {
            let Span { first, len } = *item.cast::<Span>();
            std::slice::from_raw_parts(first, len)
        };
        std::str::from_utf8(bytes).map(Some).map_err(|_| invalid(format!("{name} is not UTF-8")))
    }

    fn scalar(&self, name: &str, dtype: c_int) -> Result<Option<*const c_void>> {
        let Some(item) = self.attribute(name, SCALAR)? else { return Ok(None) };
        // SAFETY: an attribute of this kind is a scalar.
        let scalar = unsafe { &*item.cast::<Scalar>() };
        match scalar.dtype == dtype {
            true => Ok(Some(scalar.value)),
            false => Err(invalid(format!("{name} is of type {}, expected {dtype}", scalar.dtype))),
        }
    }

    /// A number of 32 bits.
    pub(crate) fn f32(&self, name: &str) -> Result<Option<f32>> {
        let value = self.scalar(name, F32)?;
        // SAFETY: `scalar` has found a value of this type.
        Ok(value.map(|value| unsafe { value.cast::<f32>().read_unaligned() }))
    }

    /// A number of 64 bits.
    pub(crate) fn f64(&self, name: &str) -> Result<Option<f64>> {
        let value = self.scalar(name, F64)?;
        // SAFETY: `scalar` has found a value of this type.
        Ok(value.map(|value| unsafe { value.cast::<f64>().read_unaligned() }))
    }

    /// An integer.
    pub(crate) fn i64(&self, name: &str) -> Result<Option<i64>> {
        let value = self.scalar(name, S64)?;
        // SAFETY: `scalar` has found a value of this type.
        Ok(value.map(|value| unsafe { value.cast::<i64>().read_unaligned() }))
    }

    /// A list of integers.
    pub(crate) fn integers(&self, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(item) = self.attribute(name, ARRAY)? else { return Ok(None) };
        // SAFETY: an attribute of this kind is an array.
        let array = unsafe { &*item.cast::<Array>() };
        if array.dtype != S64 {
            return Err(invalid(format!("{name} is of type {}, expected {S64}", array.dtype)));
        }
        let data = array.data.cast::<i64>();
        // SAFETY: an array has `len` elements of its type.
        Ok(Some((0..array.len).map(|n| unsafe { data.add(n).read_unaligned() }).collect()))
    }
}

/// # Safety
///
/// The list is one of a frame, for the time of its call.
unsafe fn buffer<'a>(list: &List, what: &str, index: usize) -> Result<Buffer<'a>> {
    // SAFETY: lists have `count` entries.
    if index as i64 >= list.count || unsafe { *list.kinds.add(index) } != BUFFER {
        return Err(invalid(format!("{what} {index} of {} is no buffer", list.count)));
    }
    // SAFETY: an entry of this kind is a buffer, with as many dims as it has axes.
    unsafe {
        let raw = &*(*list.items.add(index)).cast::<RawBuffer>();
        let dims = match raw.axes {
            0 => &[][..],
            axes => std::slice::from_raw_parts(raw.dims, axes as usize),
        };
        Ok(Buffer { raw, dims })
    }
}

/// A buffer, contiguous, its last axis fastest.
#[derive(Clone, Copy)]
pub(crate) struct Buffer<'a> {
    raw: &'a RawBuffer,
    pub(crate) dims: &'a [i64],
}

impl<'a> Buffer<'a> {
    /// The element type of queries, keys and values.
    pub(crate) fn element(&self) -> Result<ElementType> {
        match self.raw.dtype {
            F32 => Ok(ElementType::F32),
            F16 => Ok(ElementType::F16),
            BF16 => Ok(ElementType::Bf16),
            other => {
                Err(invalid(format!("a tensor of XLA's type {other}, expected f32, bf16 or f16")))
            }
        }
    }

    /// The axes of a tensor `(batch, token, head, dim)`.
    pub(crate) fn tensor_dims(&self) -> Result<Dims> {
        let &[batch, tokens, heads, dim] = self.dims else {
            return Err(invalid(format!("a tensor of dims {:?}, expected four", self.dims)));
        };
        let [batch, tokens, heads, dim] = [batch, tokens, heads, dim].map(|size| size as usize);
        Ok(Dims { batch, tokens, heads, dim })
    }

    fn layout(&self) -> Result<(Dims, Strides)> {
        let dims = self.tensor_dims()?;
        Ok((dims, Order::Bshd.strides(dims)))
    }

    fn checked<E: Element>(&self) -> Result<*mut E> {
        if self.element()? != E::TYPE {
            return Err(invalid(format!("a tensor of {}, expected {}", self.element()?, E::TYPE)));
        }
        // XLA has null for buffers without elements.
        let empty = self.dims.contains(&0);
        Ok(if empty { std::ptr::dangling_mut() } else { self.raw.data.cast() })
    }

    /// A tensor to read.
    pub(crate) fn view<E: Element>(&self) -> Result<View<'a, E>> {
        let (dims, strides) = self.layout()?;
        // SAFETY: XLA's buffers have the elements of their dims, for the time of the call, and arguments are
        // not written to meanwhile.
        Ok(unsafe { View::from_raw(self.checked::<E>()?, dims, strides) }?)
    }

    /// A tensor to write.
    pub(crate) fn view_mut<E: Element>(&self) -> Result<ViewMut<'a, E>> {
        let (dims, strides) = self.layout()?;
        // SAFETY: as in `view`; results are given to nothing else, and calls refuse what overlaps.
        Ok(unsafe { ViewMut::from_raw(self.checked::<E>()?, dims, strides) }?)
    }

    fn len(&self) -> usize {
        self.dims.iter().map(|&size| size as usize).product()
    }

    fn elements<T>(&self, what: &str, dtype: c_int) -> Result<*mut T> {
        if self.raw.dtype != dtype {
            return Err(invalid(format!(
                "{what} of XLA's type {}, expected {dtype}",
                self.raw.dtype
            )));
        }
        Ok(if self.len() == 0 { std::ptr::dangling_mut() } else { self.raw.data.cast() })
    }

    /// f32 elements to read.
    pub(crate) fn floats(&self) -> Result<&'a [f32]> {
        // SAFETY: as in `view`.
        Ok(unsafe { std::slice::from_raw_parts(self.elements("a list", F32)?, self.len()) })
    }

    /// f32 elements to write.
    pub(crate) fn floats_mut(&self) -> Result<&'a mut [f32]> {
        // SAFETY: as in `view_mut`.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.elements("a list", F32)?, self.len()) })
    }

    /// Bytes that are 0 or 1.
    pub(crate) fn flags(&self) -> Result<&'a [u8]> {
        // SAFETY: as in `view`; XLA has a byte per element.
        Ok(unsafe { std::slice::from_raw_parts(self.elements("a mask", PRED)?, self.len()) })
    }

    /// Integers, at least 0.
    pub(crate) fn lengths(&self, name: &str) -> Result<Vec<u64>> {
        let list: Vec<i64> = match self.raw.dtype {
            S64 => {
                // SAFETY: as in `view`.
                unsafe { std::slice::from_raw_parts(self.elements(name, S64)?, self.len()) }
                    .to_vec()
            }
            _ => {
                // SAFETY: as in `view`.
                let list: &[i32] =
                    unsafe { std::slice::from_raw_parts(self.elements(name, S32)?, self.len()) };
                list.iter().map(|&x| x.into()).collect()
            }
        };
        match list.iter().find(|&&x| x < 0) {
            Some(x) => Err(invalid(format!("{name} has {x}, expected 0 or more"))),
            None => Ok(list.into_iter().map(|x| x as u64).collect()),
        }
    }

    /// Words of 32 bits.
    pub(crate) fn words(&self) -> Result<&'a [u32]> {
        // SAFETY: as in `view`.
        Ok(unsafe { std::slice::from_raw_parts(self.elements("words", U32)?, self.len()) })
    }
}
