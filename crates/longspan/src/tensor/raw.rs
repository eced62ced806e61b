//! Tensors and matrices as kernels address them: pointers and strides without a lifetime.

use super::{View, ViewMut};
use crate::dims::Strides;

/// A tensor as kernels address it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Raw<E = f32> {
    pub(crate) first: *mut E,
    pub(crate) strides: Strides,
}

// SAFETY: a `Raw` is an address. Whatever reads or writes there is an `unsafe` block of its own,
// which has to prove that the element may be read or written by its thread.
unsafe impl<E: Send> Send for Raw<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Raw<E> {}

impl<E: Copy> Raw<E> {
    pub(crate) fn read(view: &View<'_, E>) -> Self {
        Raw { first: view.as_ptr().cast_mut(), strides: view.strides() }
    }

    pub(crate) fn write(view: &mut ViewMut<'_, E>) -> Self {
        Raw { first: view.as_mut_ptr(), strides: view.strides() }
    }

    /// Tokens × dims of one head, from a token on.
    ///
    /// # Safety
    ///
    /// `first` and the strides must be those of a tensor that is still borrowed, with these
    /// indices.
    #[inline(always)]
    pub(crate) unsafe fn head(self, entry: usize, head: usize, token: usize) -> Strided<E> {
        let Strides { batch, tokens, heads, dim } = self.strides;
        let offset = entry as isize * batch + head as isize * heads + token as isize * tokens;
        // SAFETY: an element that is in the tensor is in its allocation.
        let first = unsafe { self.first.offset(offset) };
        Strided { first, row: tokens, column: dim }
    }
}

/// Bytes of a page, and of addresses that map to different sets of a first-level cache.
const PAGE: usize = 4096;

/// A matrix with any strides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<E = f32> {
    /// The number at row 0, column 0.
    pub(crate) first: *const E,
    /// From one row to the next.
    pub(crate) row: isize,
    /// From one column to the next.
    pub(crate) column: isize,
}

impl<E: Copy> Strided<E> {
    /// The part of it that starts at a row and a column.
    ///
    /// # Safety
    ///
    /// The number at that row and column must be in the allocation that the matrix lies in, or be
    /// the one right behind it.
    #[inline(always)]
    pub(crate) unsafe fn at(self, row: usize, column: usize) -> Self {
        let offset = row as isize * self.row + column as isize * self.column;
        // SAFETY: the offset stays in the allocation, as this function demands.
        Strided { first: unsafe { self.first.offset(offset) }, ..self }
    }

    /// Whether each row or column lies on a page of its own, and many of them in the same few sets of the
    /// first-level cache: a copy, read many times, pays.
    #[inline(always)]
    pub(crate) fn is_far_apart(self) -> bool {
        let step = self.row.unsigned_abs().max(self.column.unsigned_abs());
        step * size_of::<E>() >= PAGE
    }

    /// Rows and columns exchanged.
    #[inline(always)]
    pub(crate) fn transposed(self) -> Self {
        Strided { first: self.first, row: self.column, column: self.row }
    }
}
