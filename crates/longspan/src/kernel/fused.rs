//! The steps between products that depend on the micro-kernel: softmax and its gradient.
//!
//! A micro-kernel for f32 leaves scores and probabilities in f32. One for bf16 packs probabilities
//! while they are in registers, so its softmax epilogue is another: see [`amx`]. One for f32 numbers in
//! bf16 parts packs them from the matrix of f32.

#[cfg(target_arch = "x86_64")]
mod amx;
mod fma;
#[cfg(target_arch = "x86_64")]
mod split;

use super::adjust::Adjust;
use super::backward::differentiate::Differentiate;
use super::forward::softmax::Softmax;
use crate::gemm::{MicroKernel, Prefetch, Rows};

/// A micro-kernel with the steps of attention between its products.
///
/// # Safety
///
/// [`differentiate`](Self::differentiate) writes no more than
/// [`packed_rhs_len`](MicroKernel::packed_rhs_len) elements of each buffer on the right and
/// [`packed_lhs_len`](MicroKernel::packed_lhs_len) of the one on the left. Kernels lay out their
/// scratch by these sizes.
pub(crate) unsafe trait FusedKernel: MicroKernel {
    /// The most lanes of a key tile, and the most of its keys × lanes: whole vectors, up to
    /// [`LANES`](crate::simd::LANES).
    const MOST_LANES: usize;
    const MOST_SCORES: usize;

    /// Keys of a key panel: their five matrices have to stay in the second-level cache. Queries are
    /// packed anew for each.
    const KEY_PANEL: usize;

    /// Tiles of queries whose sums over queries are one product.
    const GROUP: usize;

    /// Whether sums over keys are worth a third level: not where their terms are bf16.
    const FOLDS: bool;

    /// Scores, softmax and sums of values, for one key tile after the other.
    ///
    /// # Safety
    ///
    /// That of [`multiply`](MicroKernel::multiply) for both products of each key tile, keys × lanes
    /// and value dims × lanes; that of its [`Adjust`] and [`Softmax`]; and `packed_rhs_len(keys, lanes)` elements
    /// of its room must be its own. Key tiles are asked for one after the other: what one of them
    /// writes, the next may read.
    unsafe fn attend<'a>(self, tiles: impl Iterator<Item = KeyTile<'a, Self>>);

    /// The arithmetic between the products of the backward pass. Probabilities and gradients of
    /// products become packed as operands on the right, which
    /// [`packed_rhs`](MicroKernel::packed_rhs) gives; the latter as one on the left too.
    ///
    /// # Safety
    ///
    /// That of [`Differentiate`]; and the rooms must be this thread's own, `packed_rhs_len` of the
    /// group's queries × [`LANES`](crate::simd::LANES) and `packed_lhs_len` of the group's queries
    /// × the key panel's keys large, with the tile inside.
    unsafe fn differentiate(self, work: Differentiate<'_>, rooms: PackBuffers);

    /// The gradients of products of all tiles of a key panel of `k` keys, as an operand on the
    /// left.
    ///
    /// # Safety
    ///
    /// [`differentiate`](Self::differentiate) must have been given this room for the tiles that are
    /// used, and nothing have written it or `products` since.
    unsafe fn differentiated(products: Rows, k: usize, workspace: *mut f32) -> Self::Lhs;
}

/// Where a tile of [`Differentiate`] goes besides its own matrices.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only matrix units ask"))]
pub(crate) struct PackBuffers {
    /// Room for the probabilities and for the gradients of products on the right, of all queries of
    /// a group.
    pub(crate) right: [*mut f32; 2],
    /// Room for the gradients of products on the left, of all queries of the group and all keys of
    /// the key panel.
    pub(crate) left: *mut f32,
    /// The tile's first query in the group and its first key in the key panel, and how many these
    /// have.
    pub(crate) queries: (usize, usize),
    pub(crate) keys: (usize, usize),
    /// Whether the matrices are read afterwards.
    pub(crate) keep: bool,
}

/// Some keys for some lanes of a tile: `A ← a·A + Vᵗ · softmax(K · Qᵗ)`.
pub(crate) struct KeyTile<'a, X: FusedKernel> {
    /// K and Qᵗ.
    pub(crate) keys: X::Lhs,
    pub(crate) queries: X::Rhs,
    /// Terms of a score.
    pub(crate) dim: usize,
    /// What additions do to the scores.
    pub(crate) adjust: Option<Adjust<'a>>,
    /// What is done to the scores then, and where they are.
    pub(crate) softmax: Softmax,
    /// Vᵗ, and its rows.
    pub(crate) values: X::Lhs,
    pub(crate) value_dim: usize,
    /// A.
    pub(crate) sums: Rows,
    /// Room for the probabilities, packed.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only matrix units ask"))]
    pub(crate) workspace: *mut f32,
    /// What is read soon: while scores are made, and while values are summed.
    pub(crate) ahead: [Prefetch; 2],
}
