//! Scratch of the decode kernel.

use super::{Forward, MAX_KV_TILE, MAX_LANES};
use crate::exec::Arena;
use crate::gemm::Rows;
use crate::kernel::adjust::{KEY_TERMS, QUERY_TERMS};
use crate::kernel::fused::FusedKernel;
use crate::simd::{LANES, Simd};

/// Scratch of a thread, carved for the decode kernel.
#[derive(Clone, Copy)]
pub(super) struct Workspace {
    /// Q, the queries of one head after those of another.
    pub(super) queries: Rows,
    /// A.
    pub(super) sums: Rows,
    /// S, then P.
    pub(super) scores: Rows,
    /// Kᵗ of 64 keys.
    pub(super) transposed: Rows,
    /// V of a key tile, where it can't be used as it lies.
    pub(super) values: Rows,
    /// What additions need of queries and of keys, and factors of dropout.
    pub(super) query_terms: Rows,
    pub(super) key_terms: Rows,
    pub(super) factors: Rows,
}

impl<X: FusedKernel> Forward<'_, X> {
    pub(super) fn value_row(&self) -> usize {
        self.value_dim.next_multiple_of(X::Simd::WIDTH)
    }

    /// Pairs of vectors, as [`Weigh`](super::dots::Weigh) adds to them.
    pub(super) fn sum_row(&self) -> usize {
        self.value_dim.next_multiple_of(2 * X::Simd::WIDTH)
    }

    pub(super) fn query_row(&self) -> usize {
        self.dim.next_multiple_of(2 * X::Simd::WIDTH)
    }

    fn decode_lengths(&self) -> [usize; 8] {
        let (dim, value_row) = (self.dim, self.value_row());
        let adjusted = |len| if self.additions.is_some() { len } else { 0 };
        [
            MAX_LANES * self.query_row(),
            MAX_LANES * self.sum_row(),
            MAX_LANES * MAX_KV_TILE,
            dim * LANES,
            MAX_KV_TILE * value_row,
            adjusted(QUERY_TERMS * MAX_LANES),
            adjusted(KEY_TERMS * MAX_KV_TILE),
            adjusted(MAX_LANES * MAX_KV_TILE),
        ]
    }

    /// Elements of scratch that the decode kernel needs.
    pub(in super::super) fn decode_workspace_len(&self) -> usize {
        self.decode_lengths().iter().map(|len| len.next_multiple_of(LANES)).sum()
    }

    pub(super) fn carve_decode(&self, arena: &mut Arena) -> Workspace {
        let mut next = arena.reserve(self.decode_workspace_len());
        let [queries, sums, scores, transposed, values, query_terms, key_terms, factors] =
            self.decode_lengths().map(|len| {
                let part = next;
                // SAFETY: `decode_workspace_len` is the sum of these lengths, so that each part
                // ends in it.
                next = unsafe { next.add(len.next_multiple_of(LANES)) };
                part
            });
        Workspace {
            queries: Rows { first: queries, row: self.query_row() },
            sums: Rows { first: sums, row: self.sum_row() },
            scores: Rows { first: scores, row: MAX_KV_TILE },
            transposed: Rows { first: transposed, row: LANES },
            values: Rows { first: values, row: self.value_row() },
            query_terms: Rows { first: query_terms, row: MAX_LANES },
            key_terms: Rows { first: key_terms, row: MAX_KV_TILE },
            factors: Rows { first: factors, row: MAX_KV_TILE },
        }
    }
}
