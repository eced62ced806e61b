//! The arithmetic between the products where its results become bf16: as little work as that
//! allows.
//!
//! As in the [forward pass](crate::kernel::forward::softmax_bf16), the exponential is of base 2 and
//! rounds its argument. Results are written once, rounded and in the orders that a matrix unit
//! reads: pairs of queries for the sums over queries, rows for the sums over keys.

use std::f32::consts::LOG2_E;

use super::QUERIES;
use super::differentiate::Differentiate;
use crate::simd::math::exp2_coarse;
use crate::simd::{Operation, Simd, WIDEST};

/// Rows of a block on the left, and terms of any block.
const SIDE: usize = WIDEST;
const TERMS: usize = 2 * WIDEST;
const BLOCK: usize = SIDE * TERMS;

/// Scores become bf16 probabilities, and the gradient of probabilities that of the products.
///
/// # Safety
///
/// That of [`Differentiate`], for at most `QUERIES` queries. Blocks must be writable, without a
/// number that is read: at `right` those of queries, rounded up to 32, for each 16 lanes,
/// `right_along` blocks apart; at `left` those of lanes, rounded up to 32, for each 16 queries,
/// `left_along` blocks apart.
pub(crate) struct DsoftmaxBf16<'a> {
    pub(crate) work: &'a Differentiate<'a>,
    pub(crate) shared: &'a Shared,
    /// For each 16 keys, blocks of 32 queries: probabilities, gradients of products.
    pub(crate) right: [*mut u16; 2],
    /// Blocks of queries that 16 keys have.
    pub(crate) right_along: usize,
    /// For each 16 queries, blocks of 32 keys: gradients of products.
    pub(crate) left: *mut u16,
    /// Blocks of keys that 16 queries have.
    pub(crate) left_along: usize,
    /// Whether the matrices are written too.
    pub(crate) keep: bool,
}

/// What all keys of each query share.
pub(crate) struct Shared {
    /// `−lse · log2 e`.
    lse: [f32; QUERIES],
    /// `−delta · scale`.
    delta: [f32; QUERIES],
    /// Whether some lse is so large that the rounding of its multiple would be seen in
    /// probabilities.
    far: bool,
    /// [`Differentiate::score_scale`].
    score_scale: f32,
}

/// Whether the rounding of `lse · log2 e` would be seen in bf16 probabilities, or lse is no number.
#[inline(always)]
fn is_far(lse: f32) -> bool {
    lse.is_nan() || lse.abs() >= 1024.0
}

/// What the queries of a tile share.
///
/// # Safety
///
/// That of [`Differentiate`], for at most `QUERIES` queries.
pub(crate) unsafe fn shared(work: &Differentiate<'_>) -> Shared {
    let score_scale = work.score_scale();
    let mut shared = Shared { lse: [0.0; QUERIES], delta: [0.0; QUERIES], far: false, score_scale };
    // SAFETY: `Differentiate` demands a log-sum-exp, correction and delta per query.
    let [lse, correction, delta] = [work.lse, work.corrections, work.delta]
        .map(|first| unsafe { std::slice::from_raw_parts(first, work.queries) });
    for query in 0..work.queries {
        // A row that has seen nothing has no probabilities.
        let seen = lse[query] != f32::NEG_INFINITY;
        let lse = if seen { lse[query] } else { f32::INFINITY };
        shared.far |= seen && is_far(lse);
        // The correction is exp(−rest) of a small rest.
        let rest = 1.0 - correction[query];
        shared.lse[query] = -(lse * LOG2_E + rest * LOG2_E);
        shared.delta[query] = -(delta[query] * work.scale);
    }
    shared
}

impl Operation for DsoftmaxBf16<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        assert_eq!(S::WIDTH, WIDEST, "blocks are as wide as a vector");
        let odd = self.keep || self.shared.far;
        // SAFETY: `all` has the condition of the type, and is masked where there are bits.
        unsafe {
            match (odd, self.work.bits.is_null()) {
                _ if self.work.adjust.is_some() => match self.work.bits.is_null() {
                    true => self.all::<S, false, true, true>(simd),
                    false => self.all::<S, true, true, true>(simd),
                },
                (false, true) => self.all::<S, false, false, false>(simd),
                (false, false) => self.all::<S, true, false, false>(simd),
                (true, true) => self.all::<S, false, true, false>(simd),
                (true, false) => self.all::<S, true, true, false>(simd),
            }
        }
    }
}

impl DsoftmaxBf16<'_> {
    /// Two queries and two vectors of keys at a time. `ODD` where some row is far, or numbers are
    /// kept.
    ///
    /// # Safety
    ///
    /// That of [`DsoftmaxBf16`]; `MASKED` only where bits aren't null, and a vector must be
    /// `WIDEST`.
    #[inline(always)]
    unsafe fn all<S: Simd, const MASKED: bool, const ODD: bool, const ADDITIONS: bool>(
        &self,
        simd: S,
    ) {
        let (queries, lanes) = (self.work.queries, self.work.lanes);
        for lane in (0..lanes).step_by(TERMS) {
            for query in (0..queries.next_multiple_of(TERMS)).step_by(2) {
                let next = (query + 1, lane + WIDEST);
                // SAFETY: `some` has the condition of `all`, whatever the query and lane.
                let ([(p00, d00), (p01, d01)], [(p10, d10), (p11, d11)]) = unsafe {
                    (
                        [
                            self.some::<S, MASKED, ODD, ADDITIONS>(simd, query, lane),
                            self.some::<S, MASKED, ODD, ADDITIONS>(simd, query, next.1),
                        ],
                        [
                            self.some::<S, MASKED, ODD, ADDITIONS>(simd, next.0, lane),
                            self.some::<S, MASKED, ODD, ADDITIONS>(simd, next.0, next.1),
                        ],
                    )
                };
                let column = lane / SIDE;
                let right =
                    (column * self.right_along + query / TERMS) * BLOCK + query % TERMS / 2 * TERMS;
                let left =
                    (query / SIDE * self.left_along + lane / TERMS) * BLOCK + query % SIDE * TERMS;
                // SAFETY: `query` is below the queries rounded up to 32, `lane` below the lanes:
                // `right` is the pair of rows in their block, `left` those of the queries where
                // they are below what is rounded up to 16. `DsoftmaxBf16` demands all of them.
                unsafe {
                    simd.store_pairs_bf16(self.right[0].add(right), p00, p10);
                    simd.store_pairs_bf16(self.right[1].add(right), d00, d10);
                    if lane + WIDEST < lanes {
                        let right = right + self.right_along * BLOCK;
                        simd.store_pairs_bf16(self.right[0].add(right), p01, p11);
                        simd.store_pairs_bf16(self.right[1].add(right), d01, d11);
                    }
                    if query < queries.next_multiple_of(SIDE) {
                        simd.store_two_bf16(self.left.add(left), d00, d01);
                        simd.store_two_bf16(self.left.add(left + TERMS), d10, d11);
                    }
                }
            }
        }
    }

    /// 0 beyond the last query or lane.
    ///
    /// # Safety
    ///
    /// That of [`all`](Self::all).
    #[inline(always)]
    unsafe fn some<S: Simd, const MASKED: bool, const ODD: bool, const ADDITIONS: bool>(
        &self,
        simd: S,
        query: usize,
        lane: usize,
    ) -> (S::F, S::F) {
        if query < self.work.queries && lane < self.work.lanes {
            // SAFETY: `one` has the condition of `all`, for a query and lane that the condition
            // above puts in the matrices.
            unsafe { self.one::<S, MASKED, ODD, ADDITIONS>(simd, query, lane) }
        } else {
            (simd.splat(0.0), simd.splat(0.0))
        }
    }

    /// Probabilities and gradients of products of one query and one vector of keys.
    ///
    /// # Safety
    ///
    /// That of [`all`](Self::all); the query and the vector must end within the matrices.
    #[inline(always)]
    unsafe fn one<S: Simd, const MASKED: bool, const ODD: bool, const ADDITIONS: bool>(
        &self,
        simd: S,
        query: usize,
        lane: usize,
    ) -> (S::F, S::F) {
        let work = self.work;
        let zero = simd.splat(0.0);
        // SAFETY: query and vector are in the matrices, as this function demands, and so in all
        // lists of `Differentiate`.
        unsafe {
            let (scale, log2) = (simd.splat(work.scale), simd.splat(LOG2_E));
            let score = simd.load(work.scores.at(query, lane).first);
            let factor = simd.splat(self.shared.score_scale * LOG2_E);
            // No probability is above 1, though other roundings than those of the forward pass may
            // make it so.
            let lse = simd.splat(self.shared.lse[query]);
            let mut p = exp2_coarse(simd, simd.min(zero, simd.fma(score, factor, lse)));
            let lse = *work.lse.add(query);
            if ODD && lse != f32::NEG_INFINITY && is_far(lse) {
                let lse = simd.splat(lse);
                let score = simd.mul(score, simd.splat(self.shared.score_scale));
                let power = simd.mul(simd.sub(simd.min(lse, score), lse), log2);
                let correction = simd.splat(*work.corrections.add(query));
                p = simd.min(simd.splat(1.0), simd.mul(exp2_coarse(simd, power), correction));
            }
            let mut kept_gradient = simd.load(work.gradients.at(query, lane).first);
            let [kept, derivative] = match ADDITIONS {
                true => work.factors(simd, query, lane),
                false => [zero; 2],
            };
            if ADDITIONS {
                kept_gradient = simd.mul(kept_gradient, kept);
            }
            let gradient = simd.fma(kept_gradient, scale, simd.splat(self.shared.delta[query]));
            let mut d = simd.mul(p, gradient);
            if ADDITIONS {
                let delta = simd.splat(*work.delta.add(query));
                let mask = if MASKED { *work.bits.add(query) >> lane } else { u64::MAX };
                let of_score = simd.mul(p, simd.sub(kept_gradient, delta));
                work.keep(simd, (query, lane), simd.select(simd.mask(mask), of_score, zero));
                d = simd.mul(d, derivative);
                p = simd.mul(p, kept);
            }
            if MASKED {
                let mask = simd.mask(*work.bits.add(query) >> lane);
                p = simd.select(mask, p, zero);
                d = simd.select(mask, d, zero);
            }
            if ODD && self.keep {
                simd.store(work.scores.at(query, lane).first, p);
                simd.store(work.products.at(query, lane).first, d);
            }
            (p, d)
        }
    }
}
