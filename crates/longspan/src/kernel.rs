//! One kernel per pass.
//!
//! In both passes the tokens of the outer loop lie side by side in vectors, [`LANES`] of them a
//! tile: queries in the forward pass, keys in the backward pass. They are transposed once, when
//! the tile begins; everything of the inner loop is read where the caller has it, with any
//! strides. Softmax then needs no sums across a vector in the forward pass, and masks cost a
//! select.
//!
//! What never happens: a number that no token stands for enters a sum. Lanes without a token hold
//! zeros, and their results are thrown away. A masked score becomes −∞ and its probability 0; but 0
//! · ∞ is NaN, so where a Partial block meets a number that isn't finite, products leave the zeros
//! out ([`finite`]).

pub(crate) mod adjust;
pub(crate) mod backward;
pub(crate) mod bias;
pub(crate) mod finite;
pub(crate) mod forward;
pub(crate) mod fused;
pub(crate) mod masses;
pub(crate) mod pack;
mod reference;
mod scratch;
pub(crate) mod summary;

pub(crate) use self::scratch::Scratch;

use crate::simd::LANES;

/// Lanes that vectors of `width` need for `tokens`.
pub(crate) fn padded(tokens: usize, width: usize) -> usize {
    debug_assert!(tokens <= LANES);
    tokens.next_multiple_of(width)
}
