//! Very few queries: keys and values as they lie, and no operand made ready.
//!
//! ```text
//! scores    for each vector of keys, each query:
//!               sums[key] ← Σ over vectors of dims: q · k        a vector a key
//!               turn the square of sums, and add its rows        a lane a key
//! values    for each query, a few vectors of dims:
//!               A ← A + Σ over keys: p · v
//! ```
//!
//! One square is turned for each query, in place of one for each vector of dims; what is narrower
//! than f32 is widened on its way to the multiplication.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use crate::element::{Element, load};
use crate::simd::{LANES, Operation, Simd, WIDEST};
use crate::tile::{Rows, Strided};

/// Whether turning sums takes at most half of what turning keys would.
pub(super) fn dots_pay<S: Simd>(rows: usize, dims: usize) -> bool {
    2 * rows <= dims.div_ceil(S::WIDTH)
}

/// Whether every vector of numbers lies in one piece.
fn is_plain<S: Simd, E>(tokens: Strided<E>, dims: usize) -> bool {
    tokens.column == 1 && dims.is_multiple_of(S::WIDTH)
}

/// Numbers of a token from `dim` on, of `dims`, with 0 behind them.
#[inline(always)]
unsafe fn vector<S: Simd, E: Element, const PLAIN: bool>(
    simd: S,
    token: Strided<E>,
    dim: usize,
    dims: usize,
) -> S::F {
    // SAFETY: the caller has the token.
    unsafe {
        if PLAIN {
            return load(simd, token.first.add(dim));
        }
        let mut numbers = [0.0; WIDEST];
        for lane in 0..S::WIDTH.min(dims.saturating_sub(dim)) {
            numbers[lane] = (*token.at(0, dim + lane).first).to_f32();
        }
        simd.load(numbers.as_ptr())
    }
}

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

impl<E: Element> Operation for Dots<E> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        // SAFETY: whoever makes the operation vouches for the matrices.
        unsafe {
            match is_plain::<S, E>(self.keys, self.dims) {
                true => self.scores::<S, true>(simd),
                false => self.scores::<S, false>(simd),
            }
        }
    }
}

impl<E: Element> Dots<E> {
    #[inline(always)]
    unsafe fn scores<S: Simd, const PLAIN: bool>(&self, simd: S) {
        let mut square = [0.0_f32; WIDEST * WIDEST];
        let mut turned = [0.0_f32; WIDEST * WIDEST];
        let width = S::WIDTH as isize;
        // SAFETY: the caller's; squares hold any vector.
        unsafe {
            for first in (0..self.tokens).step_by(S::WIDTH) {
                for query in 0..self.rows {
                    let q = self.queries.at(query, 0).first;
                    for t in 0..S::WIDTH {
                        // Behind the last key, it again.
                        let key = self.keys.at((first + t).min(self.tokens - 1), 0);
                        let mut sum = simd.splat(0.0);
                        for dim in (0..self.dims).step_by(S::WIDTH) {
                            let k = vector::<S, E, PLAIN>(simd, key, dim, self.dims);
                            sum = simd.fma(k, simd.load(q.add(dim)), sum);
                        }
                        simd.store(square.as_mut_ptr().add(t * S::WIDTH), sum);
                    }
                    simd.transpose(square.as_ptr(), width, turned.as_mut_ptr(), width);
                    let mut sums = [simd.splat(0.0); WIDEST];
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

/// Adds the values of `tokens` keys, each times its probability, to the sums of `rows` queries.
pub(super) struct Weigh<E> {
    pub(super) values: Strided<E>,
    pub(super) tokens: usize,
    pub(super) dims: usize,
    pub(super) weights: Rows,
    pub(super) rows: usize,
    /// In whole vectors.
    pub(super) sums: Rows,
}

/// Vectors of sums that are in registers together, for even and for odd keys.
const TOGETHER: usize = 4;

/// Keys whose values are summed up before they are added to others, half of them each in even and odd
/// sums: as accurate as [`OVER_TOKENS`](crate::tile::OVER_TOKENS).
const PIECE: usize = 128;

impl<E: Element> Operation for Weigh<E> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        let plain = is_plain::<S, E>(self.values, self.dims);
        // SAFETY: whoever makes the operation vouches for the matrices.
        unsafe {
            for query in 0..self.rows {
                let weights = self.weights.at(query, 0).first.cast_const();
                for first in (0..self.dims).step_by(TOGETHER * S::WIDTH) {
                    let vectors = (self.dims - first).div_ceil(S::WIDTH).min(TOGETHER);
                    match (vectors, plain) {
                        (4, true) => self.columns::<S, 4, true>(simd, query, weights, first),
                        (4, _) => self.columns::<S, 4, false>(simd, query, weights, first),
                        (3, _) => self.columns::<S, 3, false>(simd, query, weights, first),
                        (2, true) => self.columns::<S, 2, true>(simd, query, weights, first),
                        (2, _) => self.columns::<S, 2, false>(simd, query, weights, first),
                        _ => self.columns::<S, 1, false>(simd, query, weights, first),
                    }
                }
            }
        }
    }
}

impl<E: Element> Weigh<E> {
    /// `N` vectors of the sums of a query, from dim `first` on.
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize, const PLAIN: bool>(
        &self,
        simd: S,
        query: usize,
        weights: *const f32,
        first: usize,
    ) {
        // SAFETY: as `eval`.
        unsafe {
            let mut total = [simd.splat(0.0); N];
            for start in (0..self.tokens).step_by(PIECE) {
                let end = self.tokens.min(start + PIECE);
                let mut even = [simd.splat(0.0); N];
                let mut odd = [simd.splat(0.0); N];
                let pairs = start + (end - start) / 2 * 2;
                for key in (start..pairs).step_by(2) {
                    let (a, b) = (simd.splat(*weights.add(key)), simd.splat(*weights.add(key + 1)));
                    let (row, next) = (self.values.at(key, 0), self.values.at(key + 1, 0));
                    for n in 0..N {
                        let dim = first + n * S::WIDTH;
                        even[n] =
                            simd.fma(vector::<S, E, PLAIN>(simd, row, dim, self.dims), a, even[n]);
                        odd[n] =
                            simd.fma(vector::<S, E, PLAIN>(simd, next, dim, self.dims), b, odd[n]);
                    }
                }
                if pairs < end {
                    let (row, a) = (self.values.at(pairs, 0), simd.splat(*weights.add(pairs)));
                    for n in 0..N {
                        let dim = first + n * S::WIDTH;
                        even[n] =
                            simd.fma(vector::<S, E, PLAIN>(simd, row, dim, self.dims), a, even[n]);
                    }
                }
                for n in 0..N {
                    total[n] = simd.add(total[n], simd.add(even[n], odd[n]));
                }
            }
            for n in 0..N {
                let to = self.sums.at(query, first + n * S::WIDTH).first;
                simd.store(to, simd.add(simd.load(to), total[n]));
            }
        }
    }
}
