//! One kernel a pass.
//!
//! In both passes the tokens of the outer loop lie side by side in vectors, [`LANES`] of them a
//! tile: queries in the forward pass, keys in the backward pass. They are transposed once, when
//! the tile begins; everything of the inner loop is read where the caller has it, with any
//! strides. Softmax then needs no sums across a vector in the forward pass, and masks cost a
//! select.
//!
//! What never happens: a number that no token stands for enters a sum. Lanes without a token hold
//! zeros, and their results are thrown away. A masked score becomes −∞ and its probability 0; but
//! 0 · ∞ is NaN, so where a Partial block meets a number that isn't finite, products leave the zeros
//! out ([`finite`]).

pub(crate) mod backward;
pub(crate) mod finite;
pub(crate) mod forward;
pub(crate) mod pack;

use longspan_pattern::{Layout, Positions};

use crate::simd::LANES;
use crate::tile::Strided;
use crate::view::{Strides, View, ViewMut};

/// A tensor as kernels see it.
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

/// Tokens of one side by their positions, counted from a base in f32: exact within 2^24 of it.
pub(crate) fn positions(of: &Positions, first: usize, base: i64, into: &mut [f32]) {
    for (index, into) in into.iter_mut().enumerate() {
        let position = of.get((first + index) as u64).unwrap_or(base);
        *into = position.wrapping_sub(base) as f32;
    }
}

/// The position that tile positions are counted from: that of the row's first query.
pub(crate) fn base(layout: &Layout, query: usize) -> i64 {
    layout.query_positions().get(query as u64).unwrap_or(0)
}

/// Lanes that vectors of `width` need for `tokens`.
pub(crate) fn padded(tokens: usize, width: usize) -> usize {
    debug_assert!(tokens <= LANES);
    tokens.next_multiple_of(width)
}
