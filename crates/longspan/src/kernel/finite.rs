//! Whether a matrix has a number that isn't finite.

use crate::simd::{Operation, Simd};
use crate::tile::Strided;

/// Whether every number of a matrix is finite.
pub(crate) struct AllFinite {
    pub(crate) matrix: Strided,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Operation for AllFinite {
    type Output = bool;

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) -> bool {
        let AllFinite { matrix, rows, columns } = self;
        // x · 0 is 0 for finite x, else NaN; and NaN stays in a sum.
        let mut sums = [simd.splat(0.0); 4];
        let zero = simd.splat(0.0);
        let mut sum = 0.0_f32;
        let whole = if matrix.column == 1 { columns / S::WIDTH * S::WIDTH } else { 0 };
        // SAFETY: whoever makes the operation vouches for the matrix.
        unsafe {
            for row in 0..rows {
                let row = matrix.at(row, 0);
                for column in (0..whole).step_by(S::WIDTH) {
                    let slot = column / S::WIDTH % 4;
                    sums[slot] = simd.fma(simd.load(row.at(0, column).first), zero, sums[slot]);
                }
                for column in whole..columns {
                    sum += *row.at(0, column).first * 0.0;
                }
            }
            let mut lanes = [0.0_f32; 16];
            for part in sums {
                simd.store(lanes.as_mut_ptr(), part);
                sum += lanes[..S::WIDTH].iter().sum::<f32>();
            }
        }
        sum == 0.0
    }
}
