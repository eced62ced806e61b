//! The softmax of a key tile, and sums in a third level.
//!
//! Keys are the rows of a matrix of scores, queries its columns: maxima and sums run down the
//! columns, one lane per query.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use crate::gemm::Rows;
use crate::simd::math::exp_difference;
use crate::simd::{LANES, Operation, Simd};

/// `folded ← folded · exp(folded_maxima − maxima) + sums`, or just `sums` the first time.
///
/// # Safety
///
/// `rows` rows of `LANES` elements must be readable and writable at `sums` and `folded`, and
/// `LANES` maxima at each list, none of them shared.
pub(super) struct Fold {
    pub(super) sums: Rows,
    pub(super) folded: Rows,
    pub(super) maxima: *const f32,
    pub(super) folded_maxima: *mut f32,
    pub(super) rows: usize,
    pub(super) first: bool,
}

impl Operation for Fold {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let zero = simd.splat(0.0);
        let nothing = simd.splat(f32::NEG_INFINITY);
        for lane in (0..LANES).step_by(S::WIDTH) {
            // SAFETY: vectors of lanes below `LANES` and rows below `rows` are what the type
            // demands.
            unsafe {
                let maxima = simd.load(self.maxima.add(lane));
                let before = simd.load(self.folded_maxima.add(lane));
                let safe = simd.select(simd.less(nothing, maxima), maxima, zero);
                let factor = exp_difference(simd, before, safe);
                simd.store(self.folded_maxima.add(lane), maxima);
                for row in 0..self.rows {
                    let (sums, folded) =
                        (self.sums.at(row, lane).first, self.folded.at(row, lane).first);
                    let sum = simd.load(sums);
                    let all =
                        if self.first { sum } else { simd.fma(simd.load(folded), factor, sum) };
                    simd.store(folded, all);
                    simd.store(sums, zero);
                }
            }
        }
    }
}

/// Scores become probabilities, relative to the new maximum of each lane.
///
/// # Safety
///
/// keys × lanes scores must be readable and writable, `lanes` a whole number of vectors. As many
/// maxima and totals must be readable and writable, factors writable, and a word of the mask per
/// key readable, where there is one, and keys × lanes factors, unless these are null. Nothing that is
/// written may be shared with anything else here.
pub(crate) struct Softmax {
    pub(crate) scores: Rows,
    pub(crate) keys: usize,
    /// A whole number of vectors.
    pub(crate) lanes: usize,
    pub(crate) scale: f32,
    /// A word per key, and the bit of the first lane.
    pub(crate) mask: Option<(*const u64, usize)>,
    /// What probabilities are multiplied by behind their sum; null where they aren't.
    pub(crate) factors_of_pairs: Rows,
    /// Whether probabilities have to be left where the scores were.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only matrix units ask"))]
    pub(crate) keep: bool,
    pub(crate) maxima: *mut f32,
    pub(crate) totals: *mut f32,
    pub(crate) factors: *mut f32,
}

impl Operation for Softmax {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let vectors = self.lanes / S::WIDTH;
        let mut vector = 0;
        // SAFETY: `columns` is given `N` vectors from one on that is at most `vectors - N`, the
        // condition of each arm, and the rest is as the type demands.
        unsafe {
            while vector + 4 <= vectors {
                self.columns::<S, 4>(simd, vector * S::WIDTH);
                vector += 4;
            }
            if vector + 2 <= vectors {
                self.columns::<S, 2>(simd, vector * S::WIDTH);
                vector += 2;
            }
            if vector < vectors {
                self.columns::<S, 1>(simd, vector * S::WIDTH);
            }
        }
    }
}

/// Keys that are taken together: their maxima and sums make a tree, which is faster than a chain
/// and rounds less.
const TOGETHER: usize = 4;

impl Softmax {
    /// `N` vectors of lanes from `lane` on.
    ///
    /// # Safety
    ///
    /// That of [`Softmax`]; the vectors must end within the lanes.
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize>(&self, simd: S, lane: usize) {
        // SAFETY: all functions have the same condition.
        unsafe {
            match (self.mask, self.factors_of_pairs.first.is_null()) {
                (None, true) => self.masked_columns::<S, N, false, false>(simd, lane),
                (Some(_), true) => self.masked_columns::<S, N, true, false>(simd, lane),
                (None, false) => self.masked_columns::<S, N, false, true>(simd, lane),
                (Some(_), false) => self.masked_columns::<S, N, true, true>(simd, lane),
            }
        }
    }

    /// # Safety
    ///
    /// That of [`columns`](Self::columns); `DROPS` only where factors aren't null.
    #[inline(always)]
    unsafe fn masked_columns<S: Simd, const N: usize, const MASKED: bool, const DROPS: bool>(
        &self,
        simd: S,
        lane: usize,
    ) {
        let zero = simd.splat(0.0);
        let nothing = simd.splat(f32::NEG_INFINITY);
        let whole = self.keys / TOGETHER * TOGETHER;
        // SAFETY: vectors end within the lanes, as `columns` demands, and keys are below `keys`:
        // `Softmax` demands scores and lists of so many.
        unsafe {
            let scores = self.scores.at(0, lane);
            let mut old = [zero; N];
            for n in 0..N {
                let at = lane + n * S::WIDTH;
                old[n] = simd.load(self.maxima.add(at));
            }

            let mut maxima = old;
            for key in (0..whole).step_by(TOGETHER) {
                for n in 0..N {
                    let at = lane + n * S::WIDTH;
                    let [a, b, c, d] = self.scores::<S, TOGETHER, MASKED>(simd, key, at);
                    let greatest = simd.max(simd.max(a, b), simd.max(c, d));
                    maxima[n] = simd.max(greatest, maxima[n]);
                }
            }
            for key in whole..self.keys {
                for n in 0..N {
                    let at = lane + n * S::WIDTH;
                    let [score] = self.scores::<S, 1, MASKED>(simd, key, at);
                    maxima[n] = simd.max(score, maxima[n]);
                }
            }
            // Where nothing has been seen yet the maximum is −∞, and exp(−∞ − −∞) would be NaN.
            let mut safe = maxima;
            for n in 0..N {
                let seen = simd.less(nothing, maxima[n]);
                safe[n] = simd.select(seen, maxima[n], zero);
            }

            let mut sums = [zero; N];
            for key in (0..whole).step_by(TOGETHER) {
                for n in 0..N {
                    let at = scores.at(key, n * S::WIDTH);
                    let factors = self.factors_of_pairs_at::<DROPS>(key, lane + n * S::WIDTH);
                    let [a, b, c, d] = weigh::<S, TOGETHER, DROPS>(simd, at, factors, safe[n]);
                    let sum = simd.add(simd.add(a, b), simd.add(c, d));
                    sums[n] = simd.add(sums[n], sum);
                }
            }
            for key in whole..self.keys {
                for n in 0..N {
                    let at = scores.at(key, n * S::WIDTH);
                    let factors = self.factors_of_pairs_at::<DROPS>(key, lane + n * S::WIDTH);
                    let [p] = weigh::<S, 1, DROPS>(simd, at, factors, safe[n]);
                    sums[n] = simd.add(sums[n], p);
                }
            }

            for n in 0..N {
                let at = lane + n * S::WIDTH;
                let factor = exp_difference(simd, old[n], safe[n]);
                let total = simd.fma(simd.load(self.totals.add(at)), factor, sums[n]);
                simd.store(self.maxima.add(at), maxima[n]);
                simd.store(self.totals.add(at), total);
                simd.store(self.factors.add(at), factor);
            }
        }
    }

    /// Factors from a key and a lane on, where there are some.
    ///
    /// # Safety
    ///
    /// That of [`Softmax`]; key and lane must be its, and `DROPS` only where factors aren't null.
    #[inline(always)]
    unsafe fn factors_of_pairs_at<const DROPS: bool>(&self, key: usize, lane: usize) -> Rows {
        // SAFETY: the element is one of those that `Softmax` demands.
        if DROPS { unsafe { self.factors_of_pairs.at(key, lane) } } else { self.factors_of_pairs }
    }

    /// Scores of `K` keys and one vector of lanes: scaled and masked.
    ///
    /// # Safety
    ///
    /// That of [`Softmax`]; the keys and the vector must end within its keys and lanes.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd, const K: usize, const MASKED: bool>(
        &self,
        simd: S,
        key: usize,
        lane: usize,
    ) -> [S::F; K] {
        let zero = simd.splat(0.0);
        let mut scores = [zero; K];
        // SAFETY: this function demands keys and lanes of the softmax, and `Softmax` its scores and
        // a word of the mask per key.
        unsafe {
            for k in 0..K {
                let key = key + k;
                let at = self.scores.at(key, lane).first;
                let mut score = simd.mul(simd.load(at), simd.splat(self.scale));
                if let Some((bits, bit)) = self.mask
                    && MASKED
                {
                    let mask = simd.mask(*bits.add(key) >> (bit + lane));
                    score = simd.select(mask, score, simd.splat(f32::NEG_INFINITY));
                }
                simd.store(at, score);
                scores[k] = score;
            }
        }
        scores
    }
}

/// Scores of `K` keys and one vector of lanes become probabilities relative to a maximum. Gives them
/// as they are, and writes them multiplied by the factors, where there are some.
///
/// # Safety
///
/// A vector of each of `K` rows must be readable and writable, and one of factors readable if
/// `DROPS`.
#[inline(always)]
unsafe fn weigh<S: Simd, const K: usize, const DROPS: bool>(
    simd: S,
    scores: Rows,
    factors: Rows,
    maxima: S::F,
) -> [S::F; K] {
    let mut weights = [maxima; K];
    for k in 0..K {
        // SAFETY: `k` is below `K`, and a vector of so many rows is demanded.
        unsafe {
            let at = scores.at(k, 0).first;
            weights[k] = exp_difference(simd, simd.load(at), maxima);
            let written = match DROPS {
                true => simd.mul(weights[k], simd.load(factors.at(k, 0).first)),
                false => weights[k],
            };
            simd.store(at, written);
        }
    }
    weights
}
