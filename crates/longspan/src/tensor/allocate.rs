//! Memory for elements, or an error where there is none.

use std::alloc::{Layout, alloc_zeroed};

use crate::dims::Dims;
use crate::dtype::Element;
use crate::error::{Error, Result};

/// So many equal elements.
pub(crate) fn filled<T: Copy>(value: T, elements: usize) -> Result<Vec<T>> {
    let mut data = Vec::new();
    let failed = |_| Error::OutOfMemory { bytes: elements.saturating_mul(size_of::<T>()) };
    data.try_reserve_exact(elements).map_err(failed)?;
    data.resize(elements, value);
    Ok(data)
}

/// So many zeros. Fresh pages of the system are zeros already, so nothing is written here.
pub(crate) fn zeros<E: Element>(elements: usize) -> Result<Vec<E>> {
    let failed = || Error::OutOfMemory { bytes: elements.saturating_mul(size_of::<E>()) };
    let layout = Layout::array::<E>(elements).map_err(|_| failed())?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout isn't empty.
    let first = unsafe { alloc_zeroed(layout) }.cast::<E>();
    if first.is_null() {
        return Err(failed());
    }
    // SAFETY: `first` comes from the global allocator with the layout of an array of `elements`,
    // which is the layout of a vector of that capacity. All its bytes are 0, and f32, bf16 and f16,
    // of which a sealed trait lets `E` be one, read those as 0.
    Ok(unsafe { Vec::from_raw_parts(first, elements, elements) })
}

/// Bytes that a list holds, used or not.
pub(crate) fn size_of_list<T>(list: &Vec<T>) -> usize {
    list.capacity() * size_of::<T>()
}

/// How many elements there are, if memory could hold them.
pub(crate) fn allocatable<T>(dims: Dims) -> Result<usize> {
    let elements = dims.elements();
    let bytes = elements.and_then(|elements| elements.checked_mul(size_of::<T>()));
    match (elements, bytes) {
        (Some(elements), Some(bytes)) if isize::try_from(bytes).is_ok() => Ok(elements),
        _ => Err(Error::Overflow { dims }),
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn elements_are_what_was_asked_for() {
        assert_eq!(filled(7.0_f32, 3), Ok(vec![7.0; 3]));
        assert_eq!(filled(7.0_f32, 0), Ok(Vec::new()));
        assert_eq!(zeros::<f32>(1_000), Ok(vec![0.0; 1_000]));
        assert_eq!(zeros::<bf16>(3), Ok(vec![bf16::ZERO; 3]));
        assert_eq!(zeros::<f32>(0), Ok(Vec::new()));
        // They are vectors as others are: they grow and are freed.
        let mut more = zeros::<f32>(5).unwrap();
        more.resize(50_000, 1.0);
        assert_eq!(more[4..6], [0.0, 1.0]);
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let elements = 1 << 58;
        let expected = Error::OutOfMemory { bytes: 1 << 60 };
        assert_eq!(filled(1.0_f32, elements), Err(expected.clone()));
        assert_eq!(zeros::<f32>(elements), Err(expected.clone()));
        assert!(expected.to_string().contains("1152921504606846976 bytes"), "{expected}");
        // What can't even be counted, too.
        let uncounted = Error::OutOfMemory { bytes: usize::MAX };
        assert_eq!(filled(1.0_f32, usize::MAX), Err(uncounted.clone()));
        assert_eq!(zeros::<f32>(usize::MAX), Err(uncounted));
    }
}
