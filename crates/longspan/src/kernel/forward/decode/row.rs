//! The softmax of one query over a key tile, which lie side by side.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use super::WORDS;
use crate::kernel::reference::{MOST_NEAR, Reference, binary_scale};
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

/// What scores are when they are weighed.
#[derive(Clone, Copy)]
enum Score {
    Scaled,
    /// As the product left them, or −∞; and the maximum is [near](MOST_NEAR).
    Near,
    Far,
}

/// Vectors that are taken together: their maxima and sums don't wait for each other.
const TOGETHER: usize = 4;

impl Operation for RowSoftmax<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) -> (f32, f32) {
        // The greatest product is the greatest score, and −∞ stays what it is.
        let raw = S::FUSED && self.scale > 0.0;
        // SAFETY: all functions have the condition of the type.
        unsafe {
            match (self.bits, raw) {
                (None, false) => self.masked_row::<S, false, false>(simd),
                (None, true) => self.masked_row::<S, false, true>(simd),
                (Some(_), false) => self.masked_row::<S, true, false>(simd),
                (Some(_), true) => self.masked_row::<S, true, true>(simd),
            }
        }
    }
}

impl RowSoftmax<'_> {
    /// `RAW`: scores are scaled as they are weighed.
    ///
    /// # Safety
    ///
    /// That of [`RowSoftmax`].
    #[inline(always)]
    unsafe fn masked_row<S: Simd, const MASKED: bool, const RAW: bool>(
        &self,
        simd: S,
    ) -> (f32, f32) {
        let whole = self.keys / (TOGETHER * S::WIDTH) * (TOGETHER * S::WIDTH);
        let word = |lane: usize| self.bits.map_or(u64::MAX, |bits| bits[lane / 64] >> (lane % 64));
        // SAFETY: vectors begin below `keys`, as `vector` and `weigh` demand; `lanes` has `WIDEST`
        // elements, and no vector is wider.
        unsafe {
            let mut maxima = [simd.splat(f32::NEG_INFINITY); TOGETHER];
            for lane in (0..whole).step_by(TOGETHER * S::WIDTH) {
                for n in 0..TOGETHER {
                    let lane = lane + n * S::WIDTH;
                    let scores = self.vector::<S, MASKED, RAW>(simd, lane, word(lane));
                    maxima[n] = simd.max(scores, maxima[n]);
                }
            }
            for lane in (whole..self.keys).step_by(S::WIDTH) {
                // The last vector may hold what isn't a key.
                let keys = u64::MAX >> (64 - (self.keys - lane).min(S::WIDTH));
                let scores = self.vector::<S, true, RAW>(simd, lane, word(lane) & keys);
                maxima[0] = simd.max(scores, maxima[0]);
            }
            let greatest = simd.max(simd.max(maxima[0], maxima[1]), simd.max(maxima[2], maxima[3]));
            let mut lanes = [f32::NEG_INFINITY; WIDEST];
            simd.store(lanes.as_mut_ptr(), greatest);
            let factor = if RAW { self.scale } else { 1.0 };
            let maximum = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max) * factor;
            let maximum = maximum.max(self.maximum);
            // Where nothing has been seen yet the maximum is −∞, and exp(−∞ − −∞) would be NaN.
            let safe = if maximum == f32::NEG_INFINITY { 0.0 } else { maximum };
            let reference = Reference::new(simd, simd.splat(safe));
            let score = match (RAW, safe.abs() < MOST_NEAR) {
                (false, _) => Score::Scaled,
                (true, false) => Score::Far,
                (true, true) => Score::Near,
            };

            let mut sums = [simd.splat(0.0); TOGETHER];
            for lane in (0..whole).step_by(TOGETHER * S::WIDTH) {
                for n in 0..TOGETHER {
                    sums[n] =
                        simd.add(sums[n], self.weigh(simd, lane + n * S::WIDTH, score, &reference));
                }
            }
            for lane in (whole..self.keys).step_by(S::WIDTH) {
                sums[0] = simd.add(sums[0], self.weigh(simd, lane, score, &reference));
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
    unsafe fn weigh<S: Simd>(
        &self,
        simd: S,
        lane: usize,
        score: Score,
        maximum: &Reference<S::F>,
    ) -> S::F {
        // SAFETY: the vector begins below `keys`, so that `RowSoftmax` demands it.
        unsafe {
            let at = self.scores.add(lane);
            let x = simd.load(at);
            let weights = match score {
                Score::Scaled => exp_difference(simd, x, maximum.natural),
                Score::Far => {
                    exp_difference(simd, simd.mul(x, simd.splat(self.scale)), maximum.natural)
                }
                Score::Near => maximum.weights(simd, [x], binary_scale(simd, self.scale))[0],
            };
            simd.store(at, weights);
            weights
        }
    }

    /// A vector of scores, scaled unless `RAW`, and masked.
    ///
    /// # Safety
    ///
    /// That of [`weigh`](Self::weigh).
    #[inline(always)]
    unsafe fn vector<S: Simd, const MASKED: bool, const RAW: bool>(
        &self,
        simd: S,
        lane: usize,
        word: u64,
    ) -> S::F {
        // SAFETY: the vector begins below `keys`, so that `RowSoftmax` demands it.
        unsafe {
            let at = self.scores.add(lane);
            let mut score = simd.load(at);
            if !RAW {
                score = simd.mul(score, simd.splat(self.scale));
            }
            if MASKED {
                score = simd.select(simd.mask(word), score, simd.splat(f32::NEG_INFINITY));
            }
            if MASKED || !RAW {
                simd.store(at, score);
            }
            score
        }
    }
}
