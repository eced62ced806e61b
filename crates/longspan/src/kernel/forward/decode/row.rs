//! The softmax of one query over a key tile, which lie side by side.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use super::WORDS;
use crate::simd::math::exp_difference;
use crate::simd::{Operation, Simd, WIDEST};

/// Scores of one query become probabilities, relative to its new maximum. Gives that and their sum.
///
/// # Safety
///
/// Scores of `keys`, rounded up to whole vectors, must be readable and writable.
pub(super) struct RowSoftmax<'a> {
    pub(super) scores: *mut f32,
    pub(super) keys: usize,
    pub(super) scale: f32,
    pub(super) bits: Option<&'a [u64; WORDS]>,
    pub(super) maximum: f32,
}

/// Vectors that are taken together: their maxima and sums don't wait for each other.
const TOGETHER: usize = 4;

impl Operation for RowSoftmax<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) -> (f32, f32) {
        // SAFETY: both functions have the condition of the type.
        unsafe {
            match self.bits {
                None => self.masked_row::<S, false>(simd),
                Some(_) => self.masked_row::<S, true>(simd),
            }
        }
    }
}

impl RowSoftmax<'_> {
    /// # Safety
    ///
    /// That of [`RowSoftmax`].
    #[inline(always)]
    unsafe fn masked_row<S: Simd, const MASKED: bool>(&self, simd: S) -> (f32, f32) {
        let whole = self.keys / (TOGETHER * S::WIDTH) * (TOGETHER * S::WIDTH);
        let word = |lane: usize| self.bits.map_or(u64::MAX, |bits| bits[lane / 64] >> (lane % 64));
        // SAFETY: vectors begin below `keys`, as `vector` and `weigh` demand; `lanes` has `WIDEST`
        // elements, and no vector is wider.
        unsafe {
            let mut maxima = [simd.splat(f32::NEG_INFINITY); TOGETHER];
            for lane in (0..whole).step_by(TOGETHER * S::WIDTH) {
                for n in 0..TOGETHER {
                    let lane = lane + n * S::WIDTH;
                    let scores = self.vector::<S, MASKED>(simd, lane, word(lane));
                    maxima[n] = simd.max(scores, maxima[n]);
                }
            }
            for lane in (whole..self.keys).step_by(S::WIDTH) {
                // The last vector may hold what isn't a key.
                let keys = u64::MAX >> (64 - (self.keys - lane).min(S::WIDTH));
                let scores = self.vector::<S, true>(simd, lane, word(lane) & keys);
                maxima[0] = simd.max(scores, maxima[0]);
            }
            let greatest = simd.max(simd.max(maxima[0], maxima[1]), simd.max(maxima[2], maxima[3]));
            let mut lanes = [f32::NEG_INFINITY; WIDEST];
            simd.store(lanes.as_mut_ptr(), greatest);
            let maximum = lanes.into_iter().fold(self.maximum, f32::max);
            // Where nothing has been seen yet the maximum is −∞, and exp(−∞ − −∞) would be NaN.
            let safe = simd.splat(if maximum == f32::NEG_INFINITY { 0.0 } else { maximum });

            let mut sums = [simd.splat(0.0); TOGETHER];
            for lane in (0..whole).step_by(TOGETHER * S::WIDTH) {
                for n in 0..TOGETHER {
                    sums[n] = simd.add(sums[n], self.weigh(simd, lane + n * S::WIDTH, safe));
                }
            }
            for lane in (whole..self.keys).step_by(S::WIDTH) {
                sums[0] = simd.add(sums[0], self.weigh(simd, lane, safe));
            }
            let sum = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
            let mut lanes = [0.0; WIDEST];
            simd.store(lanes.as_mut_ptr(), sum);
            let mut half = S::WIDTH / 2;
            while half > 0 {
                for lane in 0..half {
                    lanes[lane] += lanes[lane + half];
                }
                half /= 2;
            }
            (maximum, lanes[0])
        }
    }

    /// A vector of scores becomes probabilities relative to a maximum.
    ///
    /// # Safety
    ///
    /// That of [`RowSoftmax`]; `lane` must be a whole number of vectors below `keys`.
    #[inline(always)]
    unsafe fn weigh<S: Simd>(&self, simd: S, lane: usize, maximum: S::F) -> S::F {
        // SAFETY: the vector begins below `keys`, so that `RowSoftmax` demands it.
        unsafe {
            let at = self.scores.add(lane);
            let weights = exp_difference(simd, simd.load(at), maximum);
            simd.store(at, weights);
            weights
        }
    }

    /// A vector of scores: scaled and masked.
    ///
    /// # Safety
    ///
    /// That of [`weigh`](Self::weigh).
    #[inline(always)]
    unsafe fn vector<S: Simd, const MASKED: bool>(&self, simd: S, lane: usize, word: u64) -> S::F {
        // SAFETY: the vector begins below `keys`, so that `RowSoftmax` demands it.
        unsafe {
            let at = self.scores.add(lane);
            let mut score = simd.mul(simd.load(at), simd.splat(self.scale));
            if MASKED {
                score = simd.select(simd.mask(word), score, simd.splat(f32::NEG_INFINITY));
            }
            simd.store(at, score);
            score
        }
    }
}
