//! DLPack: how tensors are handed from one library to another without a copy.
//!
//! A producer's `__dlpack__` returns a capsule that points to a managed tensor. A
//! consumer renames the capsule, and then calls the tensor's deleter exactly once; a capsule that
//! was not consumed calls it itself. [`Managed`] is the consumer, [`export`] the producer.
//!
//! Two structures are in use: the versioned one of DLPack 1, which has flags (read-only, copied),
//! and the older one without. We ask for the first and take either.
//!
//! The structures are those of `dlpack.h`, field by field.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

use crate::errors;

pub(crate) const CPU: i32 = 1;
/// Memory of the host that a GPU can reach: ordinary memory to us.
const CUDA_HOST: i32 = 3;
const ROCM_HOST: i32 = 11;

pub(crate) const FLOAT: u8 = 2;
pub(crate) const BFLOAT: u8 = 4;

pub(crate) const READ_ONLY: u64 = 1;
pub(crate) const IS_COPIED: u64 = 2;

/// The major version whose structures these are; another may have any others.
const MAJOR: u32 = 1;

const LEGACY: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Device {
    kind: i32,
    index: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct RawTensor {
    pub(crate) data: *mut c_void,
    device: Device,
    pub(crate) axes: i32,
    pub(crate) dtype: DataType,
    pub(crate) shape: *mut i64,
    /// Null where elements lie side by side, the last axis innermost.
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Legacy {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: RawTensor,
}

/// `DLPackExchangeAPI`: functions that a type of tensors has as `__dlpack_c_exchange_api__`.
#[repr(C)]
struct Exchange {
    version: Version,
    previous: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    import: *const c_void,
    borrow: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut RawTensor) -> c_int>,
    stream: *const c_void,
}

/// Describes a tensor that its caller holds on to, without a capsule; `None` for objects whose type has no
/// function for that.
pub(crate) fn borrow(object: &Bound<'_, PyAny>) -> PyResult<Option<RawTensor>> {
    let Some(exchange) = exchange(object)? else { return Ok(None) };
    let Some(function) = exchange.borrow else { return Ok(None) };
    let mut tensor = MaybeUninit::<RawTensor>::uninit();
    // SAFETY: the function is that of the object's type, and the interpreter is attached. It writes the
    // whole structure where it returns 0.
    let tensor = unsafe {
        if function(object.as_ptr(), tensor.as_mut_ptr()) != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        tensor.assume_init()
    };
    Ok(Some(tensor))
}

impl RawTensor {
    /// Refuses what isn't in the CPU's memory.
    pub(crate) fn on_cpu(&self, name: &str) -> PyResult<()> {
        on_cpu(name, self.device.kind, self.device.index)
    }

    /// Whether it has four axes of f32, bf16 or f16 in the CPU's memory.
    pub(crate) fn is_plain(&self) -> bool {
        let DataType { code, bits, lanes } = self.dtype;
        let known = matches!((code, bits, lanes), (FLOAT, 16 | 32, 1) | (BFLOAT, 16, 1));
        known && self.axes == 4 && self.device.kind == CPU
    }
}

/// The functions of an object's type, looked up once for the first type: torch's tensors.
fn exchange(object: &Bound<'_, PyAny>) -> PyResult<Option<&'static Exchange>> {
    static FIRST: PyOnceLock<(Py<PyType>, Option<&'static Exchange>)> = PyOnceLock::new();
    let py = object.py();
    let of_type = || -> PyResult<Option<&'static Exchange>> {
        let Ok(capsule) = object.get_type().getattr("__dlpack_c_exchange_api__") else {
            return Ok(None);
        };
        let name = c"dlpack_exchange_api".as_ptr();
        // SAFETY: `capsule` keeps the object alive, and the interpreter is attached; a null pointer is
        // an exception that was set. DLPack demands that the structure lives as long as the process.
        let exchange = unsafe {
            let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name);
            pointer.cast::<Exchange>().as_ref().ok_or_else(|| PyErr::fetch(py))?
        };
        Ok((exchange.version.major == MAJOR).then_some(exchange))
    };
    let (first, found) =
        FIRST.get_or_try_init(py, || PyResult::Ok((object.get_type().unbind(), of_type()?)))?;
    if object.get_type().is(first.bind(py)) { Ok(*found) } else { of_type() }
}

// SAFETY: a table of functions, which nothing writes.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

/// A tensor that was taken from its capsule; given back when it is dropped.
pub(crate) enum Managed {
    #[expect(private_interfaces, reason = "not looked into outside this module")]
    Legacy(NonNull<Legacy>),
    #[expect(private_interfaces, reason = "as above")]
    Versioned(NonNull<Versioned>),
}

impl Managed {
    /// Takes the tensor of an object that has `__dlpack__`.
    pub(crate) fn take(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        check_device(name, object)?;
        check_bits(name, object)?;
        let capsule = ask(object).map_err(|error| errors::noted(object.py(), error, name))?;
        let pointer = capsule.as_ptr();
        // SAFETY: `capsule` keeps the object alive, and the interpreter is attached (`Bound`);
        // whether it is a capsule of that name is what is asked.
        let is = |kind: &CStr| unsafe { ffi::PyCapsule_IsValid(pointer, kind.as_ptr()) } == 1;
        let (kind, used) = match () {
            () if is(VERSIONED) => (VERSIONED, c"used_dltensor_versioned"),
            () if is(LEGACY) => (LEGACY, c"used_dltensor"),
            () => {
                return Err(PyBufferError::new_err(format!(
                    "{name}: __dlpack__ returned no DLPack capsule, or one that was used before; \
                     expected a new one each time"
                )));
            }
        };
        // SAFETY: `PyCapsule_IsValid` has just said so of this name; the new name is static.
        let tensor = unsafe {
            let tensor = ffi::PyCapsule_GetPointer(pointer, kind.as_ptr());
            if tensor.is_null() || ffi::PyCapsule_SetName(pointer, used.as_ptr()) != 0 {
                return Err(PyErr::fetch(object.py()));
            }
            tensor
        };
        let tensor = match kind == VERSIONED {
            true => NonNull::new(tensor.cast()).map(Managed::Versioned),
            false => NonNull::new(tensor.cast()).map(Managed::Legacy),
        };
        let tensor = tensor.expect("a capsule's pointer isn't null");
        tensor.check_version(name)?;
        // What is in the capsule counts, whatever `__dlpack_device__` said.
        let Device { kind, index } = tensor.tensor().device;
        on_cpu(name, kind, index)?;
        Ok(tensor)
    }

    fn check_version(&self, name: &str) -> PyResult<()> {
        let Managed::Versioned(managed) = self else { return Ok(()) };
        // SAFETY: `take` has taken the tensor from its capsule, so that it lives until `drop` gives
        // it back. The version comes first in all.
        let Version { major, minor } = unsafe { (*managed.as_ptr()).version };
        if major == MAJOR {
            return Ok(());
        }
        Err(PyBufferError::new_err(format!(
            "{name}: a tensor of DLPack {major}.{minor}, expected {MAJOR}.x as was asked for"
        )))
    }

    pub(crate) fn tensor(&self) -> &RawTensor {
        // SAFETY: `take` has taken the tensor from its capsule, so that it lives until `drop` gives
        // it back.
        unsafe {
            match self {
                Managed::Legacy(managed) => &(*managed.as_ptr()).tensor,
                Managed::Versioned(managed) => &(*managed.as_ptr()).tensor,
            }
        }
    }

    /// [`READ_ONLY`], [`IS_COPIED`].
    pub(crate) fn flags(&self) -> u64 {
        match self {
            Managed::Legacy(_) => 0,
            // SAFETY: as in `tensor`.
            Managed::Versioned(managed) => unsafe { (*managed.as_ptr()).flags },
        }
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: it was taken from its capsule once, and this is the only place that gives it
        // back. A producer that has nothing to free has no deleter.
        unsafe {
            match self {
                Managed::Legacy(managed) => {
                    if let Some(deleter) = (*managed.as_ptr()).deleter {
                        deleter(managed.as_ptr());
                    }
                }
                Managed::Versioned(managed) => {
                    if let Some(deleter) = (*managed.as_ptr()).deleter {
                        deleter(managed.as_ptr());
                    }
                }
            }
        }
    }
}

/// Asks for a capsule, the versioned one where the producer knows it.
fn ask<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let options = PyDict::new(object.py());
    options.set_item("max_version", (MAJOR, 0))?;
    match object.call_method("__dlpack__", (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
            object.call_method0("__dlpack__")
        }
        capsule => capsule,
    }
}

/// Refuses what isn't a tensor, and one that isn't in the CPU's memory, before anything else is
/// asked of it.
fn check_device(name: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    let Ok(device) = object.getattr("__dlpack_device__") else {
        return Err(PyTypeError::new_err(format!(
            "{name} is a {}, expected a NumPy array or another tensor that has __dlpack__",
            object.get_type().name()?
        )));
    };
    let (kind, index): (i32, i32) = device.call0()?.extract()?;
    on_cpu(name, kind, index)
}

/// Refuses tensors of torch whose numbers are the negatives or conjugates of those in memory: DLPack
/// hands over the memory alone.
fn check_bits(name: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    for (bit, remedy) in [("is_neg", "resolve_neg"), ("is_conj", "resolve_conj")] {
        let Some(method) = object.getattr_opt(bit)? else { continue };
        if method.call0()?.is_truthy()? {
            return Err(errors::value(format!(
                "{name}.{bit}() is true, so its numbers aren't those in its memory: expected \
                 {name}.{remedy}()"
            )));
        }
    }
    Ok(())
}

fn on_cpu(name: &str, kind: i32, index: i32) -> PyResult<()> {
    if [CPU, CUDA_HOST, ROCM_HOST].contains(&kind) {
        return Ok(());
    }
    Err(errors::not_on_cpu(name, &device_name(kind, index)))
}

fn device_name(kind: i32, index: i32) -> String {
    let kind = match kind {
        2 => "CUDA",
        4 => "OpenCL",
        7 => "Vulkan",
        8 => "Metal",
        10 => "ROCm",
        13 => "CUDA managed memory",
        14 => "oneAPI",
        15 => "WebGPU",
        other => return format!("DLPack device ({other}, {index})"),
    };
    format!("{kind} {index}")
}

/// One of the two structures, as far as making one goes.
trait Structure: Sized {
    const NAME: &'static CStr;

    fn new(tensor: RawTensor, flags: u64, deleter: unsafe extern "C" fn(*mut Self)) -> Self;

    fn parts(&mut self) -> (&mut RawTensor, &mut *mut c_void);

    /// The one in a capsule that wasn't taken.
    fn taken(managed: NonNull<Self>) -> Managed;
}

impl Structure for Legacy {
    const NAME: &'static CStr = LEGACY;

    fn new(tensor: RawTensor, _: u64, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Legacy { tensor, context: std::ptr::null_mut(), deleter: Some(deleter) }
    }

    fn parts(&mut self) -> (&mut RawTensor, &mut *mut c_void) {
        (&mut self.tensor, &mut self.context)
    }

    fn taken(managed: NonNull<Self>) -> Managed {
        Managed::Legacy(managed)
    }
}

impl Structure for Versioned {
    const NAME: &'static CStr = VERSIONED;

    fn new(tensor: RawTensor, flags: u64, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        let version = Version { major: MAJOR, minor: 0 };
        let context = std::ptr::null_mut();
        Versioned { version, context, deleter: Some(deleter), flags, tensor }
    }

    fn parts(&mut self) -> (&mut RawTensor, &mut *mut c_void) {
        (&mut self.tensor, &mut self.context)
    }

    fn taken(managed: NonNull<Self>) -> Managed {
        Managed::Versioned(managed)
    }
}

/// Which structure a consumer asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Legacy,
    /// With these flags.
    Versioned(u64),
}

/// A contiguous tensor of four axes in the CPU's memory, to be handed out.
pub(crate) struct Export<O> {
    pub(crate) data: *mut c_void,
    pub(crate) dtype: DataType,
    pub(crate) shape: [i64; 4],
    /// Keeps the elements alive.
    pub(crate) owner: O,
}

/// What a managed tensor's context points to.
struct Exported<M, O> {
    managed: M,
    shape: [i64; 4],
    strides: [i64; 4],
    _owner: O,
}

/// A capsule for `tensor`. The owner is dropped once, by the consumer that takes it or by the
/// capsule, on any thread, with or without the interpreter.
pub(crate) fn export<'py, O: Send + 'static>(
    py: Python<'py>,
    tensor: Export<O>,
    form: Form,
) -> PyResult<Bound<'py, PyAny>> {
    match form {
        Form::Legacy => capsule::<Legacy, O>(py, tensor, 0),
        Form::Versioned(flags) => capsule::<Versioned, O>(py, tensor, flags),
    }
}

fn capsule<'py, M: Structure, O>(
    py: Python<'py>,
    Export { data, dtype, shape, owner }: Export<O>,
    flags: u64,
) -> PyResult<Bound<'py, PyAny>> {
    let [_, b, c, d] = shape;
    let tensor = RawTensor {
        data,
        device: Device { kind: CPU, index: 0 },
        axes: 4,
        dtype,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = M::new(tensor, flags, free::<M, O>);
    let strides = [b * c * d, c * d, d, 1];
    let exported = Box::into_raw(Box::new(Exported { managed, shape, strides, _owner: owner }));
    // SAFETY: the box was just made, and this is its only pointer. The capsule's name is static,
    // and its destructor fits the structure. Where there is no capsule, the pointer is still the
    // only one, and `free` is given what was made here.
    unsafe {
        let managed = &raw mut (*exported).managed;
        let (tensor, context) = (*managed).parts();
        tensor.shape = (&raw mut (*exported).shape).cast();
        tensor.strides = (&raw mut (*exported).strides).cast();
        *context = exported.cast();
        let capsule = ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(drop_untaken::<M>));
        if capsule.is_null() {
            free::<M, O>(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// # Safety
///
/// `managed` was made by [`capsule`] with an owner of this type, and is freed once.
unsafe extern "C" fn free<M: Structure, O>(managed: *mut M) {
    // SAFETY: `capsule` has set the context to the box that it made for this structure and owner.
    unsafe { drop(Box::from_raw((*managed).parts().1.cast::<Exported<M, O>>())) }
}

/// # Safety
///
/// `capsule` must be a capsule that [`capsule`] made, and be about to end.
unsafe extern "C" fn drop_untaken<M: Structure>(capsule: *mut ffi::PyObject) {
    // SAFETY: a consumer renames a capsule when it takes the tensor. With its first name it holds
    // the one that `capsule` put in, which isn't null, and nothing else will free it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr());
            drop(M::taken(NonNull::new_unchecked(managed.cast())));
        }
    }
}
