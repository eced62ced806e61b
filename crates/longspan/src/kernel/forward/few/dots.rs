//! Scores of very few queries, keys as they lie.
//!
//! ```text
//! for each vector of keys, each query:
//!     sums[key] ← Σ over vectors of dims: q · k        a vector a key
//!     turn the square of sums, and add its rows        a lane a key
//! ```
//!
//! One square is turned for each query, in place of one for each vector of dims.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use crate::element::{Element, load};
use crate::simd::{LANES, Operation, Simd, WIDEST};
use crate::tile::{Rows, Strided};

/// The products of `rows` queries with `tokens` keys, in whole vectors of keys.
pub(super) struct Dots<E> {
    pub(super) keys: Strided<E>,
    pub(super) tokens: usize,
    pub(super) dims: usize,
    /// Queries in whole vectors, with 0 behind them.
    pub(super) queries: Rows,
    pub(super) rows: usize,
    pub(super) scores: Rows,
}

impl<E: Element> Dots<E> {
    /// Whether turning sums takes at most half of what turning keys would.
    pub(super) fn pay<S: Simd>(rows: usize, dims: usize) -> bool {
        2 * rows <= dims.div_ceil(S::WIDTH)
    }

    /// Numbers of a key from `dim` on, with 0 behind them.
    #[inline(always)]
    unsafe fn vector<S: Simd>(&self, simd: S, key: Strided<E>, dim: usize) -> S::F {
        // SAFETY: whoever makes the operation vouches for the keys.
        unsafe {
            if key.column == 1 && dim + S::WIDTH <= self.dims {
                return load(simd, key.first.add(dim));
            }
            let mut numbers = [0.0; WIDEST];
            for lane in 0..S::WIDTH.min(self.dims - dim) {
                numbers[lane] = (*key.at(0, dim + lane).first).to_f32();
            }
            simd.load(numbers.as_ptr())
        }
    }
}

impl<E: Element> Operation for Dots<E> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        let mut sums_of_keys = [0.0_f32; WIDEST * WIDEST];
        let mut turned = [0.0_f32; WIDEST * WIDEST];
        let width = S::WIDTH as isize;
        // SAFETY: whoever makes the operation vouches for the matrices, and squares hold any vector.
        unsafe {
            for first in (0..self.tokens).step_by(S::WIDTH) {
                for query in 0..self.rows {
                    let mut sums = [simd.splat(0.0); WIDEST];
                    for dim in (0..self.dims).step_by(S::WIDTH) {
                        let q = simd.load(self.queries.at(query, dim).first);
                        for t in 0..S::WIDTH {
                            // Behind the last key, it again.
                            let key = self.keys.at((first + t).min(self.tokens - 1), 0);
                            let k = self.vector(simd, key, dim);
                            sums[t] = simd.fma(k, q, sums[t]);
                        }
                    }
                    for t in 0..S::WIDTH {
                        simd.store(sums_of_keys.as_mut_ptr().add(t * S::WIDTH), sums[t]);
                    }
                    simd.transpose(sums_of_keys.as_ptr(), width, turned.as_mut_ptr(), width);
                    for t in 0..S::WIDTH {
                        sums[t] = simd.load(turned.as_ptr().add(t * S::WIDTH));
                    }
                    let mut half = S::WIDTH / 2;
                    while half > 0 {
                        for t in 0..half {
                            sums[t] = simd.add(sums[t], sums[t + half]);
                        }
                        half /= 2;
                    }
                    simd.store(self.scores.at(query, first).first, sums[0]);
                }
                for t in 0..S::WIDTH {
                    let soon = (LANES + first + t) as isize * self.keys.row;
                    simd.prefetch(self.keys.first.wrapping_offset(soon).cast());
                }
            }
        }
    }
}
