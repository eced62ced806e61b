//! The softmax of a key tile, and sums in a third level.
//!
//! Keys are the rows of a matrix of scores, queries its columns: maxima and sums run down the
//! columns, one lane per query.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use crate::gemm::Rows;
use crate::kernel::reference::{MOST_NEAR, Reference, binary_scale};
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

/// What a score is when it is weighed: scaled; as the product left it, or −∞ where it is masked; or so
/// and [near](Softmax::near), where scale, subtraction of the maximum and change of base are one
/// step.
pub(super) const SCALED: u8 = 0;
pub(super) const RAW: u8 = 1;
pub(super) const NEAR: u8 = 2;

impl Softmax {
    /// `N` vectors of lanes from `lane` on.
    ///
    /// # Safety
    ///
    /// That of [`Softmax`]; the vectors must end within the lanes.
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize>(&self, simd: S, lane: usize) {
        // Masked scores are −∞ before they are scaled, which 0 would make NaN.
        let raw = S::FUSED && (self.is_raw() || self.scale > 0.0);
        // SAFETY: all functions have the same condition.
        unsafe {
            let maxima = match (self.mask, raw) {
                (None, true) => return self.raw_columns::<S, N, false>(simd, lane),
                (Some(_), true) => return self.raw_columns::<S, N, true>(simd, lane),
                (None, false) => self.maxima::<S, N, false, false>(simd, lane),
                (Some(_), false) => self.maxima::<S, N, true, false>(simd, lane),
            };
            self.weights::<S, N, SCALED>(simd, lane, maxima);
        }
    }

    /// The same of scores that aren't scaled before they are weighed.
    ///
    /// # Safety
    ///
    /// That of [`columns`](Self::columns).
    #[inline(always)]
    unsafe fn raw_columns<S: Simd, const N: usize, const MASKED: bool>(
        &self,
        simd: S,
        lane: usize,
    ) {
        // SAFETY: all functions have the same condition; `N` vectors end within the lanes.
        unsafe {
            let maxima = self.maxima::<S, N, MASKED, true>(simd, lane);
            for n in 0..N {
                simd.store(self.factors.add(lane + n * S::WIDTH), maxima[n]);
            }
            let lanes = std::slice::from_raw_parts(self.factors.add(lane), N * S::WIDTH);
            match Self::near(lanes, MOST_NEAR) {
                true => self.weights::<S, N, NEAR>(simd, lane, maxima),
                false => self.weights::<S, N, RAW>(simd, lane, maxima),
            }
        }
    }

    /// Whether scores are used as the product left them, but for the scale: nothing is masked. A
    /// negative scale would make the greatest product the least score.
    #[inline(always)]
    pub(super) fn is_raw(&self) -> bool {
        self.scale >= 0.0 && self.mask.is_none()
    }

    /// Whether multiplying by the scale, subtracting the maximum and changing the base can be rounded
    /// as one: the greatest score is then off by 2^-23 of itself, which mustn't be seen in its weight
    /// of 1.
    #[inline(always)]
    pub(super) fn near(maxima: &[f32], most: f32) -> bool {
        maxima.iter().all(|&max| max.abs() < most || max == f32::NEG_INFINITY)
    }

    /// The new maxima of some lanes. Scores that aren't raw are scaled; those that are scaled or masked are
    /// written.
    ///
    /// # Safety
    ///
    /// That of [`columns`](Self::columns).
    #[inline(always)]
    unsafe fn maxima<S: Simd, const N: usize, const MASKED: bool, const RAW: bool>(
        &self,
        simd: S,
        lane: usize,
    ) -> [S::F; N] {
        let whole = self.keys / TOGETHER * TOGETHER;
        let mut maxima = [simd.splat(f32::NEG_INFINITY); N];
        // SAFETY: vectors end within the lanes, as `columns` demands, and keys are below `keys`:
        // `Softmax` demands scores and lists of so many.
        unsafe {
            for key in (0..whole).step_by(TOGETHER) {
                for n in 0..N {
                    let at = lane + n * S::WIDTH;
                    let [a, b, c, d] = self.scores::<S, TOGETHER, MASKED, RAW>(simd, key, at);
                    let greatest = simd.max(simd.max(a, b), simd.max(c, d));
                    maxima[n] = simd.max(greatest, maxima[n]);
                }
            }
            for key in whole..self.keys {
                for n in 0..N {
                    let at = lane + n * S::WIDTH;
                    let [score] = self.scores::<S, 1, MASKED, RAW>(simd, key, at);
                    maxima[n] = simd.max(score, maxima[n]);
                }
            }
            for n in 0..N {
                let old = simd.load(self.maxima.add(lane + n * S::WIDTH));
                let scale = simd.splat(self.scale);
                let scaled = if RAW { simd.mul(maxima[n], scale) } else { maxima[n] };
                maxima[n] = simd.max(scaled, old);
            }
        }
        maxima
    }

    /// Scores become probabilities relative to the new maxima; lists are written.
    ///
    /// # Safety
    ///
    /// That of [`columns`](Self::columns); scores must be what `SCORE` says.
    #[inline(always)]
    unsafe fn weights<S: Simd, const N: usize, const SCORE: u8>(
        &self,
        simd: S,
        lane: usize,
        maxima: [S::F; N],
    ) {
        // SAFETY: both have the condition of this function.
        unsafe {
            match self.factors_of_pairs.first.is_null() {
                true => self.weights_dropped::<S, N, SCORE, false>(simd, lane, maxima),
                false => self.weights_dropped::<S, N, SCORE, true>(simd, lane, maxima),
            }
        }
    }

    /// # Safety
    ///
    /// That of [`weights`](Self::weights); `DROPS` only where factors aren't null.
    #[inline(always)]
    unsafe fn weights_dropped<S: Simd, const N: usize, const SCORE: u8, const DROPS: bool>(
        &self,
        simd: S,
        lane: usize,
        maxima: [S::F; N],
    ) {
        let zero = simd.splat(0.0);
        let nothing = simd.splat(f32::NEG_INFINITY);
        let whole = self.keys / TOGETHER * TOGETHER;
        // Where nothing has been seen yet the maximum is −∞, and exp(−∞ − −∞) would be NaN.
        let mut references = [Reference::new(simd, zero); N];
        for n in 0..N {
            let seen = simd.less(nothing, maxima[n]);
            references[n] = Reference::new(simd, simd.select(seen, maxima[n], zero));
        }
        // SAFETY: vectors end within the lanes, as `columns` demands, and keys are below `keys`:
        // `Softmax` demands scores and lists of so many.
        unsafe {
            let mut sums = [zero; N];
            for key in (0..whole).step_by(TOGETHER) {
                for n in 0..N {
                    let at = lane + n * S::WIDTH;
                    let [a, b, c, d] =
                        self.weigh::<S, TOGETHER, SCORE, DROPS>(simd, (key, at), &references[n]);
                    let sum = simd.add(simd.add(a, b), simd.add(c, d));
                    sums[n] = simd.add(sums[n], sum);
                }
            }
            for key in whole..self.keys {
                for n in 0..N {
                    let at = lane + n * S::WIDTH;
                    let [p] = self.weigh::<S, 1, SCORE, DROPS>(simd, (key, at), &references[n]);
                    sums[n] = simd.add(sums[n], p);
                }
            }
            for n in 0..N {
                let at = lane + n * S::WIDTH;
                let old = simd.load(self.maxima.add(at));
                let factor = exp_difference(simd, old, references[n].natural);
                let total = simd.fma(simd.load(self.totals.add(at)), factor, sums[n]);
                simd.store(self.maxima.add(at), maxima[n]);
                simd.store(self.totals.add(at), total);
                simd.store(self.factors.add(at), factor);
            }
        }
    }

    /// Scores of `K` keys and one vector of lanes, scaled unless `RAW`, masked if `MASKED`, and written if
    /// either changed them.
    ///
    /// # Safety
    ///
    /// That of [`Softmax`]; the keys and the vector must end within its keys and lanes.
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd, const K: usize, const MASKED: bool, const RAW: bool>(
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
                let mut score = simd.load(at);
                if !RAW {
                    score = simd.mul(score, simd.splat(self.scale));
                }
                if let Some((bits, bit)) = self.mask
                    && MASKED
                {
                    let mask = simd.mask(*bits.add(key) >> (bit + lane));
                    score = simd.select(mask, score, simd.splat(f32::NEG_INFINITY));
                }
                if MASKED || !RAW {
                    simd.store(at, score);
                }
                scores[k] = score;
            }
        }
        scores
    }

    /// Scores of `K` keys and one vector of lanes become probabilities relative to a reference. Gives
    /// them as they are, and writes them multiplied by the factors, where there are some.
    ///
    /// # Safety
    ///
    /// That of [`weights`](Self::weights); keys and the vector must end within its keys and lanes, and
    /// there be factors if `DROPS`.
    #[inline(always)]
    unsafe fn weigh<S: Simd, const K: usize, const SCORE: u8, const DROPS: bool>(
        &self,
        simd: S,
        (key, lane): (usize, usize),
        reference: &Reference<S::F>,
    ) -> [S::F; K] {
        let binary = binary_scale(simd, self.scale);
        let mut weights = [reference.natural; K];
        // SAFETY: this function demands keys and lanes of the softmax, and `Softmax` a score and a factor
        // of each.
        unsafe {
            for k in 0..K {
                weights[k] = simd.load(self.scores.at(key + k, lane).first);
            }
            weights = match SCORE {
                NEAR => reference.weights(simd, weights, binary),
                // Lanes that are near don't notice their neighbors.
                RAW => {
                    let near = simd.less(simd.abs(reference.natural), simd.splat(MOST_NEAR));
                    let mut all = reference.weights(simd, weights, binary);
                    for k in 0..K {
                        let scaled = simd.mul(weights[k], simd.splat(self.scale));
                        let far = exp_difference(simd, scaled, reference.natural);
                        all[k] = simd.select(near, all[k], far);
                    }
                    all
                }
                _ => weights.map(|score| exp_difference(simd, score, reference.natural)),
            };
            for k in 0..K {
                let written = match DROPS {
                    true => {
                        let factors = self.factors_of_pairs.at(key + k, lane).first;
                        simd.mul(weights[k], simd.load(factors))
                    }
                    false => weights[k],
                };
                simd.store(self.scores.at(key + k, lane).first, written);
            }
        }
        weights
    }
}
