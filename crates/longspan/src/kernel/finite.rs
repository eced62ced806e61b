//! Numbers that aren't finite, where some queries don't see them.
//!
//! A masked probability is exactly 0, and a product with it adds exactly nothing, unless the other
//! factor is infinite or NaN. Where that happens the product is taken with a [cleaned](clean) copy,
//! and what was [left out](left_out) is added for those that see it. To all others it is as if the
//! number had been any other, to the bit.

use crate::dtype::{Element, load};
use crate::simd::{Operation, Simd};
use crate::tensor::Strided;

/// Whether every number of a matrix is finite.
///
/// # Safety
///
/// rows × columns elements must be readable.
pub(crate) struct AllFinite<E> {
    pub(crate) matrix: Strided<E>,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl<E: Element> Operation for AllFinite<E> {
    type Output = bool;

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) -> bool {
        let AllFinite { matrix, rows, columns } = self;
        // x · 0 is 0 for finite x, else NaN; and NaN stays in a sum.
        let mut sums = [simd.splat(0.0); 4];
        let zero = simd.splat(0.0);
        let mut sum = 0.0_f32;
        let whole = if matrix.column == 1 { columns / S::WIDTH * S::WIDTH } else { 0 };
        // SAFETY: rows and columns stay below those that the type demands, and vectors are only
        // loaded where elements lie side by side; `lanes` has `WIDEST` elements, and no vector is
        // wider.
        unsafe {
            for row in 0..rows {
                let row = matrix.at(row, 0);
                for column in (0..whole).step_by(S::WIDTH) {
                    let slot = column / S::WIDTH % 4;
                    let numbers = load(simd, row.at(0, column).first);
                    sums[slot] = simd.fma(numbers, zero, sums[slot]);
                }
                for column in whole..columns {
                    sum += (*row.at(0, column).first).to_f32() * 0.0;
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

/// Copies a matrix, row after row, with 0 in place of what isn't finite.
///
/// # Safety
///
/// rows × columns elements must be readable at `matrix` and writable at `copy`, none shared.
pub(crate) unsafe fn clean<E: Element>(
    matrix: Strided<E>,
    rows: usize,
    columns: usize,
    copy: *mut E,
) -> Strided<E> {
    for row in 0..rows {
        for column in 0..columns {
            // SAFETY: row and column are below those that this function demands of both.
            unsafe {
                let x = *matrix.at(row, column).first;
                let finite = x.to_f32().is_finite();
                *copy.add(row * columns + column) = if finite { x } else { E::default() };
            }
        }
    }
    Strided { first: copy, row: columns as isize, column: 1 }
}

/// Calls `add(row, column, number)` for everything that [`clean`] leaves out.
///
/// # Safety
///
/// rows × columns elements must be readable, also while `add` runs.
pub(crate) unsafe fn left_out<E: Element>(
    matrix: Strided<E>,
    rows: usize,
    columns: usize,
    mut add: impl FnMut(usize, usize, f32),
) {
    for row in 0..rows {
        for column in 0..columns {
            // SAFETY: row and column are below those that this function demands.
            let x = unsafe { *matrix.at(row, column).first }.to_f32();
            if !x.is_finite() {
                add(row, column, x);
            }
        }
    }
}
