//! Sums of a tile, added to those of all others.

use crate::gemm::Rows;
use crate::simd::{Operation, Simd};
use crate::tensor::Strided;

/// `to[rows × columns] ← to + from`.
///
/// # Safety
///
/// rows × columns elements must be readable at `from` and readable and writable at `to`, none of
/// them shared.
pub(super) struct AddRows {
    pub(super) from: Rows,
    pub(super) to: Strided,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Operation for AddRows {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let AddRows { from, to, rows, columns } = self;
        let vectors = if to.column == 1 { columns / S::WIDTH * S::WIDTH } else { 0 };
        // SAFETY: rows and columns stay below those that the type demands of both, and vectors are
        // only loaded and stored where elements lie side by side.
        unsafe {
            for row in 0..rows {
                let (from, target) = (from.at(row, 0).first, to.at(row, 0).first.cast_mut());
                for column in (0..vectors).step_by(S::WIDTH) {
                    let at = target.add(column);
                    simd.store(at, simd.add(simd.load(at), simd.load(from.add(column))));
                }
                for column in vectors..columns {
                    *to.at(row, column).first.cast_mut() += *from.add(column);
                }
            }
        }
    }
}
