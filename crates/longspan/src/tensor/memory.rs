//! Which memory a tensor is, so that calls can refuse to write what they read.

use super::extent::Extent;
use super::{View, ViewMut};
use crate::dims::{Dims, Strides};

/// Where a tensor lies, or a list that belongs to one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    /// The address of the first element, and the size of one.
    first: isize,
    size: isize,
    extent: Extent,
}

impl Memory {
    /// That of a list.
    pub(crate) fn of<T>(list: &[T]) -> Self {
        let dims = Dims { batch: 1, tokens: list.len(), heads: 1, dim: 1 };
        let strides = Strides { batch: 0, tokens: 1, heads: 0, dim: 0 };
        Memory::new(list.as_ptr(), Extent { dims, strides })
    }

    fn new<T>(first: *const T, extent: Extent) -> Self {
        Memory { first: first as isize, size: size_of::<T>() as isize, extent }
    }

    /// Whether they share a byte, as exactly as [`Extent::meets`] knows; for elements of different
    /// sizes, whether the ranges of memory that they span touch.
    pub(crate) fn meets(&self, other: &Memory) -> bool {
        if self.size == other.size {
            // Elements lie on multiples of their size, or the views couldn't be made.
            let bytes = other.first.wrapping_sub(self.first);
            return self.extent.meets(&other.extent, bytes.div_euclid(self.size));
        }
        let span = |memory: &Memory| {
            let (low, high) = memory.extent.reach().ok()??;
            Some((memory.first + low * memory.size, memory.first + (high + 1) * memory.size))
        };
        match (span(self), span(other)) {
            (Some(a), Some(b)) => a.0 < b.1 && b.0 < a.1,
            _ => false,
        }
    }
}

impl<T> View<'_, T> {
    pub(crate) fn memory(&self) -> Memory {
        Memory::new(self.first, self.extent)
    }
}

impl<T> ViewMut<'_, T> {
    pub(crate) fn memory(&self) -> Memory {
        Memory::new(self.first, self.extent)
    }
}
