//! Structs that carry their size, so that they can grow.

use std::mem::MaybeUninit;

use crate::status::{Result, invalid};

/// A struct whose first field is its size in bytes, as the caller has it.
///
/// # Safety
///
/// It is `repr(C)`, its first field is a `usize`, and zeros are valid for all of its fields.
pub(crate) unsafe trait Sized: Copy {
    /// As C knows it.
    const NAME: &'static str;
    /// Its size in the first version of the library.
    const FIRST: usize;
}

/// The fields that the caller has; 0 for those that it doesn't know. Fields that this library doesn't
/// know have to be 0.
///
/// # Safety
///
/// The pointer is null, or so many bytes as its first field says may be read there.
pub(crate) unsafe fn read<T: Sized>(pointer: *const T) -> Result<Option<T>> {
    const { assert!(T::FIRST <= size_of::<T>(), "fields are never removed") };
    if pointer.is_null() {
        return Ok(None);
    }
    if !pointer.is_aligned() {
        return Err(invalid(format!("{} is not aligned", T::NAME)));
    }
    let (name, own) = (T::NAME, size_of::<T>());
    // SAFETY: the first field, which this function demands.
    let size = unsafe { pointer.cast::<usize>().read() };
    if size < T::FIRST || size > 1 << 16 {
        return Err(invalid(format!(
            "{name}.size is {size}, expected sizeof({name}), {own} in this version: set it with \
             {}_INIT",
            name.to_uppercase()
        )));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the caller's struct has `size` bytes, ours `own`; they are different memory.
    unsafe {
        let from = pointer.cast::<u8>();
        std::ptr::copy_nonoverlapping(from, value.as_mut_ptr().cast(), size.min(own));
        if (own..size).any(|byte| from.add(byte).read() != 0) {
            return Err(invalid(format!(
                "{name} has fields that this version of the library does not know, and they are set: \
                 {size} bytes, expected {own}; leave them 0, or use a newer library"
            )));
        }
    }
    // SAFETY: zeros are valid for all fields, and so is what the caller wrote.
    Ok(Some(unsafe { value.assume_init() }))
}

/// The same of an argument that has to be there.
///
/// # Safety
///
/// As of [`read`].
pub(crate) unsafe fn required<T: Sized>(pointer: *const T) -> Result<T> {
    // SAFETY: as this function demands.
    match unsafe { read(pointer) }? {
        Some(value) => Ok(value),
        None => Err(invalid(format!("a {} is null, expected one", T::NAME))),
    }
}
