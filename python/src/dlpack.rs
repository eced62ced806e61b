//! DLPack: how tensors are handed from one library to another without a copy.
//!
//! A producer's `__dlpack__` returns a capsule that points to a managed tensor. Whoever takes the
//! tensor renames the capsule, and then calls the tensor's deleter exactly once; a capsule that
//! nobody took calls it itself. [`Managed`] is the one who took it, [`export`] the producer.
//!
//! Two structures are in use: the versioned one of DLPack 1, which has flags (read-only, copied),
//! and the older one without. We ask for the first and take either.
//!
//! The structures are those of `dlpack.h`, field by field.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

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

/// A tensor that was taken from its capsule; given back when it is dropped.
pub(crate) enum Managed {
    #[expect(private_interfaces, reason = "nobody outside looks inside")]
    Legacy(NonNull<Legacy>),
    #[expect(private_interfaces, reason = "as above")]
    Versioned(NonNull<Versioned>),
}

impl Managed {
    /// Takes the tensor of an object that has `__dlpack__`.
    pub(crate) fn take(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        check_device(name, object)?;
        let capsule = ask(object)?;
        let pointer = capsule.as_ptr();
        // SAFETY: a live object; whether it is a capsule of that name is what is asked.
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
        // SAFETY: a valid capsule of that name, as was just asked; the new name is static.
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
        Ok(tensor)
    }

    fn check_version(&self, name: &str) -> PyResult<()> {
        let Managed::Versioned(managed) = self else { return Ok(()) };
        // SAFETY: a tensor that is ours until it is dropped. The version comes first in all.
        let Version { major, minor } = unsafe { (*managed.as_ptr()).version };
        if major == MAJOR {
            return Ok(());
        }
        Err(PyBufferError::new_err(format!(
            "{name}: a tensor of DLPack {major}.{minor}, expected {MAJOR}.x as was asked for"
        )))
    }

    pub(crate) fn tensor(&self) -> &RawTensor {
        // SAFETY: a tensor that is ours until it is dropped.
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
            // SAFETY: as above.
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
    if [CPU, CUDA_HOST, ROCM_HOST].contains(&kind) {
        return Ok(());
    }
    Err(crate::errors::not_on_cpu(name, &device_name(kind, index)))
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

/// What a consumer is promised besides the elements.
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

/// A capsule for `tensor`. The owner is dropped once, by whoever takes it or by the capsule, on any
/// thread, with or without the interpreter.
pub(crate) fn export<'py, O: Send + 'static>(
    py: Python<'py>,
    tensor: Export<O>,
    form: Form,
) -> PyResult<Bound<'py, PyAny>> {
    let [_, b, c, d] = tensor.shape;
    let strides = [b * c * d, c * d, d, 1];
    let raw = RawTensor {
        data: tensor.data,
        device: Device { kind: CPU, index: 0 },
        axes: 4,
        dtype: tensor.dtype,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let (shape, _owner) = (tensor.shape, tensor.owner);
    let (pointer, name, destructor) = match form {
        Form::Legacy => {
            let managed =
                Legacy { tensor: raw, context: std::ptr::null_mut(), deleter: Some(free::<O>) };
            let exported = Box::into_raw(Box::new(Exported { managed, shape, strides, _owner }));
            // SAFETY: just made, and nobody else knows of it.
            let managed = unsafe {
                (*exported).managed.context = exported.cast();
                (*exported).managed.tensor.shape = (&raw mut (*exported).shape).cast();
                (*exported).managed.tensor.strides = (&raw mut (*exported).strides).cast();
                &raw mut (*exported).managed
            };
            (managed.cast::<c_void>(), LEGACY, drop_legacy as ffi::PyCapsule_Destructor)
        }
        Form::Versioned(flags) => {
            let managed = Versioned {
                version: Version { major: MAJOR, minor: 0 },
                context: std::ptr::null_mut(),
                deleter: Some(free_versioned::<O>),
                flags,
                tensor: raw,
            };
            let exported = Box::into_raw(Box::new(Exported { managed, shape, strides, _owner }));
            // SAFETY: as above.
            let managed = unsafe {
                (*exported).managed.context = exported.cast();
                (*exported).managed.tensor.shape = (&raw mut (*exported).shape).cast();
                (*exported).managed.tensor.strides = (&raw mut (*exported).strides).cast();
                &raw mut (*exported).managed
            };
            (managed.cast::<c_void>(), VERSIONED, drop_versioned as ffi::PyCapsule_Destructor)
        }
    };
    // SAFETY: the name is static, and the destructor fits the structure. Where it fails nobody has
    // the pointer, and it is freed as a consumer would.
    unsafe {
        let capsule = ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor));
        if capsule.is_null() {
            match form {
                Form::Legacy => free::<O>(pointer.cast()),
                Form::Versioned(_) => free_versioned::<O>(pointer.cast()),
            }
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// # Safety
///
/// `managed` was made by [`export`] with an owner of this type, and is freed once.
unsafe extern "C" fn free<O>(managed: *mut Legacy) {
    // SAFETY: the context is the box that `export` made.
    unsafe { drop(Box::from_raw((*managed).context.cast::<Exported<Legacy, O>>())) }
}

/// # Safety
///
/// As [`free`].
unsafe extern "C" fn free_versioned<O>(managed: *mut Versioned) {
    // SAFETY: as above.
    unsafe { drop(Box::from_raw((*managed).context.cast::<Exported<Versioned, O>>())) }
}

/// # Safety
///
/// Called by the interpreter, with a capsule of [`export`].
unsafe extern "C" fn drop_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule that still has its first name was taken by nobody.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, LEGACY.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, LEGACY.as_ptr());
            drop(Managed::Legacy(NonNull::new_unchecked(managed.cast())));
        }
    }
}

/// # Safety
///
/// As [`drop_legacy`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr());
            drop(Managed::Versioned(NonNull::new_unchecked(managed.cast())));
        }
    }
}
