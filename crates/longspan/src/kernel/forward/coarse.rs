//! The softmax of a stretch of keys where probabilities become bf16: as little work as that allows.
//!
//! A matrix unit takes 4 cycles for what a vector of scores takes part in at head dim 64, so the
//! softmax is what limits. Against [`Softmax`]:
//!
//! * scores that are neither changed nor masked are not written again;
//! * the exponential is right to 3e-6, a 700th of what rounding to bf16 costs;
//! * sums stay relative to an older maximum until a score is [`LEEWAY`] above it, so they are hardly
//!   ever rescaled; a probability is then up to e^LEEWAY, with the same relative error;
//! * probabilities are written once, rounded and in the order that the matrix unit reads.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use super::softmax::Softmax;
use crate::score::{Place, Transform};
use crate::simd::math::{exp_difference, exp_difference_coarse};
use crate::simd::{Operation, Simd, WIDEST};

/// How far a score may be above what sums are relative to.
const LEEWAY: f32 = 8.0;

/// Keys of a block of packed probabilities.
const BLOCK_KEYS: usize = 32;
/// Numbers of a block: pairs of keys × 16 lanes.
const BLOCK: usize = BLOCK_KEYS * WIDEST;

/// Scores become bf16 probabilities.
pub(crate) struct Coarse<T> {
    pub(crate) softmax: Softmax<T>,
    /// For each 16 lanes, blocks of 32 keys: pairs of keys side by side.
    pub(crate) packed: *mut u16,
}

impl<T: Transform> Operation for Coarse<T> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        assert_eq!(S::WIDTH, WIDEST, "blocks are as wide as a vector");
        let vectors = self.softmax.lanes / S::WIDTH;
        let mut vector = 0;
        // SAFETY: whoever makes the operation vouches for keys × lanes scores and their blocks.
        unsafe {
            while vector + 2 <= vectors {
                self.columns::<S, 2>(simd, vector);
                vector += 2;
            }
            if vector < vectors {
                self.columns::<S, 1>(simd, vector);
            }
        }
    }
}

/// Keys that are taken together, so that they don't wait for each other.
const TOGETHER: usize = 4;

impl<T: Transform> Coarse<T> {
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize>(&self, simd: S, vector: usize) {
        // A negative scale makes the greatest product the least score.
        let as_they_are = T::NOTHING && self.softmax.scale >= 0.0;
        // SAFETY: the caller's.
        unsafe {
            match (self.softmax.mask.is_some(), as_they_are) {
                (false, true) => self.some::<S, N, false, true>(simd, vector),
                (false, false) => self.some::<S, N, false, false>(simd, vector),
                (true, _) => self.some::<S, N, true, false>(simd, vector),
            }
        }
    }

    #[inline(always)]
    unsafe fn some<S: Simd, const N: usize, const MASKED: bool, const RAW: bool>(
        &self,
        simd: S,
        vector: usize,
    ) {
        let softmax = &self.softmax;
        let (keys, lane) = (softmax.keys, vector * S::WIDTH);
        let (zero, nothing) = (simd.splat(0.0), simd.splat(f32::NEG_INFINITY));
        let scale = simd.splat(softmax.scale);
        let whole = keys / TOGETHER * TOGETHER;
        // SAFETY: lanes and keys stay within the scores, the lists and blocks that belong to them.
        unsafe {
            let mut greatest = [nothing; N];
            for key in (0..whole).step_by(TOGETHER) {
                for n in 0..N {
                    let [a, b, c, d] =
                        self.scores::<S, TOGETHER, MASKED, RAW>(simd, key, lane + n * S::WIDTH);
                    let four = simd.max(simd.max(a, b), simd.max(c, d));
                    greatest[n] = simd.max(four, greatest[n]);
                }
            }
            for key in whole..keys {
                for n in 0..N {
                    let [a] = self.scores::<S, 1, MASKED, RAW>(simd, key, lane + n * S::WIDTH);
                    greatest[n] = simd.max(a, greatest[n]);
                }
            }
            let mut references = [zero; N];
            for n in 0..N {
                let at = lane + n * S::WIDTH;
                let old = simd.load(softmax.maxima.add(at));
                let new = if RAW { simd.mul(greatest[n], scale) } else { greatest[n] };
                let grown = simd.less(simd.add(old, simd.splat(LEEWAY)), new);
                let maxima = simd.select(grown, new, old);
                // Where nothing has been seen yet the maximum is −∞, and −∞ − −∞ would be NaN.
                references[n] = simd.select(simd.less(nothing, maxima), maxima, zero);
                let factor = exp_difference(simd, old, references[n]);
                simd.store(softmax.maxima.add(at), maxima);
                simd.store(softmax.factors.add(at), factor);
            }

            let along = keys.div_ceil(BLOCK_KEYS);
            let mut sums = [[zero; 2]; N];
            for pair in 0..keys.div_ceil(2) {
                for n in 0..N {
                    let weigh =
                        Weigh { scale, reference: references[n], lane: lane + n * S::WIDTH };
                    let low = self.weigh::<S, MASKED, RAW>(simd, 2 * pair, weigh);
                    let high = match 2 * pair + 1 < keys {
                        true => self.weigh::<S, MASKED, RAW>(simd, 2 * pair + 1, weigh),
                        false => zero,
                    };
                    sums[n] = [simd.add(sums[n][0], low), simd.add(sums[n][1], high)];
                    simd.store_pairs_bf16(self.pair(vector + n, along, pair), low, high);
                }
            }
            for pair in keys.div_ceil(2)..along * BLOCK_KEYS / 2 {
                for n in 0..N {
                    simd.store_pairs_bf16(self.pair(vector + n, along, pair), zero, zero);
                }
            }
            for n in 0..N {
                let at = softmax.totals.add(lane + n * S::WIDTH);
                let factor = simd.load(softmax.factors.add(lane + n * S::WIDTH));
                let sum = simd.add(sums[n][0], sums[n][1]);
                simd.store(at, simd.fma(simd.load(at), factor, sum));
            }
        }
    }

    /// Where a pair of keys of 16 lanes is written.
    #[inline(always)]
    fn pair(&self, vector: usize, along: usize, pair: usize) -> *mut u16 {
        let block = vector * along + pair / WIDEST;
        self.packed.wrapping_add(block * BLOCK + pair % WIDEST * BLOCK_KEYS)
    }

    /// Scores of `K` keys and one vector of lanes: as they are, or changed, masked and written.
    #[inline(always)]
    unsafe fn scores<S: Simd, const K: usize, const MASKED: bool, const RAW: bool>(
        &self,
        simd: S,
        key: usize,
        lane: usize,
    ) -> [S::F; K] {
        let softmax = &self.softmax;
        let zero = simd.splat(0.0);
        // SAFETY: as `some`.
        unsafe {
            if !RAW {
                let mut place = Place { lanes: zero, other: zero, slopes: zero };
                if T::PLACED {
                    place.lanes = simd.load(softmax.positions.add(lane));
                    place.slopes = simd.load(softmax.slopes.add(lane));
                }
                return softmax.transform::<S, K, MASKED>(simd, key, lane, place);
            }
            let mut scores = [zero; K];
            for k in 0..K {
                scores[k] = simd.load(softmax.scores.at(key + k, lane).first);
            }
            scores
        }
    }

    #[inline(always)]
    unsafe fn weigh<S: Simd, const MASKED: bool, const RAW: bool>(
        &self,
        simd: S,
        key: usize,
        weigh: Weigh<S::F>,
    ) -> S::F {
        let Weigh { scale, reference, lane } = weigh;
        // SAFETY: as `some`.
        unsafe {
            let at = self.softmax.scores.at(key, lane).first;
            let mut score = simd.load(at);
            if RAW {
                score = simd.mul(score, scale);
            }
            let mut weight = exp_difference_coarse(simd, score, reference);
            if let Some((bits, bit)) = self.softmax.mask
                && MASKED
            {
                let mask = simd.mask(*bits.add(key) >> (bit + lane));
                weight = simd.select(mask, weight, simd.splat(0.0));
            }
            if self.softmax.keep {
                simd.store(at, weight);
            }
            weight
        }
    }
}

/// What all probabilities of a vector of lanes have in common.
#[derive(Clone, Copy)]
struct Weigh<F> {
    scale: F,
    reference: F,
    lane: usize,
}
