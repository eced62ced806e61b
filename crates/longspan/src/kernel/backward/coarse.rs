//! The arithmetic between the products where its results become bf16: as little work as that allows.
//!
//! As in the [forward pass](crate::kernel::forward::coarse), the exponential is of base 2 and rounds
//! its argument. Results are written once, rounded and in the orders that a matrix unit reads: pairs
//! of queries for the sums over queries, rows for the sums over keys.

use super::QUERIES;
use super::differentiate::Differentiate;
use crate::score::{Place, Transform};
use crate::simd::math::exp2_coarse;
use crate::simd::{Operation, Simd, WIDEST};

/// Rows of a block on the left, and terms of any block.
const SIDE: usize = WIDEST;
const TERMS: usize = 2 * WIDEST;
const BLOCK: usize = SIDE * TERMS;

/// Scores become bf16 probabilities, and the gradient of probabilities that of the products.
pub(crate) struct Coarse<'a, T> {
    pub(crate) work: &'a Differentiate<T>,
    pub(crate) rows: &'a [Row; QUERIES],
    /// For each 16 keys, blocks of 32 queries: probabilities, gradients of products.
    pub(crate) right: [*mut u16; 2],
    /// For each 16 queries, blocks of 32 keys: gradients of products.
    pub(crate) left: *mut u16,
    /// Blocks of keys that 16 queries have.
    pub(crate) along: usize,
    /// Whether the matrices are written too.
    pub(crate) keep: bool,
}

/// What all keys of a query share.
#[derive(Clone, Copy, Default)]
pub(crate) struct Row {
    /// `lse · log2 e`.
    lse: f32,
    /// `delta · scale`.
    delta: f32,
    /// Whether lse is so large that the rounding of its multiple would be seen in probabilities.
    far: bool,
}

/// The rows of a tile.
pub(crate) fn rows<T>(work: &Differentiate<T>) -> [Row; QUERIES] {
    std::array::from_fn(|query| {
        if query >= work.queries {
            return Row::default();
        }
        // SAFETY: whoever makes the operation vouches for its rows.
        let (lse, correction, delta) =
            unsafe { (*work.lse.add(query), *work.corrections.add(query), *work.delta.add(query)) };
        let empty = lse == f32::NEG_INFINITY;
        // The correction is exp(−rest) of a small rest.
        let exact = f64::from(lse) + (1.0 - f64::from(correction));
        let whole = if empty { f64::INFINITY } else { exact };
        Row {
            lse: (whole * std::f64::consts::LOG2_E) as f32,
            delta: delta * work.scale,
            far: !(lse.abs() < 1024.0 || empty),
        }
    })
}

impl<T: Transform> Operation for Coarse<'_, T> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        assert_eq!(S::WIDTH, WIDEST, "blocks are as wide as a vector");
        // SAFETY: whoever makes the operation vouches for queries × lanes numbers and their blocks.
        unsafe {
            if self.work.bits.is_null() {
                self.all::<S, false>(simd)
            } else {
                self.all::<S, true>(simd)
            }
        }
    }
}

impl<T: Transform> Coarse<'_, T> {
    #[inline(always)]
    unsafe fn all<S: Simd, const MASKED: bool>(&self, simd: S) {
        let (queries, lanes) = (self.work.queries, self.work.lanes);
        let queries_along = queries.div_ceil(TERMS);
        for lane in (0..lanes).step_by(TERMS) {
            for query in (0..queries_along * TERMS).step_by(2) {
                let mut p = [[simd.splat(0.0); 2]; 2];
                let mut d = p;
                for (q, (p, d)) in p.iter_mut().zip(&mut d).enumerate() {
                    for v in 0..2 {
                        let lane = lane + v * WIDEST;
                        if query + q < queries && lane < lanes {
                            // SAFETY: they are in the matrices.
                            (p[v], d[v]) = unsafe { self.one::<S, MASKED>(simd, query + q, lane) };
                        }
                    }
                }
                // SAFETY: these are the blocks of the queries and lanes.
                unsafe {
                    for v in 0..2 {
                        let column = lane / SIDE + v;
                        if column * SIDE < lanes {
                            let at = (column * queries_along + query / TERMS) * BLOCK
                                + query % TERMS / 2 * TERMS;
                            simd.store_pairs_bf16(self.right[0].add(at), p[0][v], p[1][v]);
                            simd.store_pairs_bf16(self.right[1].add(at), d[0][v], d[1][v]);
                        }
                    }
                    for (q, [low, high]) in d.into_iter().enumerate() {
                        let query = query + q;
                        if query / SIDE < queries.div_ceil(SIDE) {
                            let at = (query / SIDE * self.along + lane / TERMS) * BLOCK
                                + query % SIDE * TERMS;
                            simd.store_two_bf16(self.left.add(at), low, high);
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn one<S: Simd, const MASKED: bool>(
        &self,
        simd: S,
        query: usize,
        lane: usize,
    ) -> (S::F, S::F) {
        let work = self.work;
        let zero = simd.splat(0.0);
        // SAFETY: queries and lanes stay within the matrices.
        unsafe {
            let row = self.rows[query];
            let (scale, log2) = (simd.splat(work.scale), simd.splat(std::f32::consts::LOG2_E));
            let delta = simd.splat(row.delta);
            let mut score = simd.load(work.scores.at(query, lane).first);
            let mut factor = simd.splat(work.scale * std::f32::consts::LOG2_E);
            if !T::NOTHING {
                let mut place = Place { lanes: zero, other: zero, slopes: zero };
                if T::PLACED {
                    place.lanes = simd.load(work.positions.add(lane));
                    place.other = simd.splat(*work.query_positions.add(query));
                    place.slopes = simd.splat(work.slope);
                }
                score = work.transform.apply(simd, simd.mul(score, scale), place);
                factor = log2;
            }
            // No probability is above 1, though other roundings than those of the forward pass may
            // make it so.
            let mut p = if row.far {
                let lse = simd.splat(*work.lse.add(query));
                let score = if T::NOTHING { simd.mul(score, scale) } else { score };
                let power = simd.mul(simd.sub(simd.min(lse, score), lse), log2);
                let correction = simd.splat(*work.corrections.add(query));
                simd.min(simd.splat(1.0), simd.mul(exp2_coarse(simd, power), correction))
            } else {
                let lse = simd.sub(zero, simd.splat(row.lse));
                exp2_coarse(simd, simd.min(zero, simd.fma(score, factor, lse)))
            };
            let gradient = simd.load(work.gradients.at(query, lane).first);
            let gradient = simd.fma(gradient, scale, simd.sub(zero, delta));
            let mut d = work.transform.pull(simd, score, simd.mul(p, gradient));
            if MASKED {
                let mask = simd.mask(*work.bits.add(query) >> lane);
                p = simd.select(mask, p, zero);
                d = simd.select(mask, d, zero);
            }
            if self.keep {
                simd.store(work.scores.at(query, lane).first, p);
                simd.store(work.products.at(query, lane).first, d);
            }
            (p, d)
        }
    }
}
