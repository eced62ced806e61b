//! The softmax of a key tile where probabilities become bf16: as little work as that allows.
//!
//! A matrix unit takes 4 cycles for what a vector of scores takes part in at head dim 64, so the
//! softmax is what limits. Against [`Softmax`]:
//!
//! * scores that are neither changed nor masked are not written again;
//! * the exponential rounds its argument, is one of base 2, and has a term less;
//! * probabilities are written once, rounded and in the order that the matrix unit reads;
//! * sums stay relative to an earlier maximum as long as no score is above it by more than [`SLACK`], so
//!   that scores needn't all be there before the first one is used: see [`Flow`].

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use super::softmax::{NEAR, RAW, SCALED, Softmax};
use crate::simd::math::{exp_difference, exp2_coarse};
use crate::simd::{Operation, Simd, WIDEST};

/// Keys of a block of packed probabilities.
const BLOCK_KEYS: usize = 32;
/// Numbers of a block: pairs of keys × 16 lanes.
const BLOCK: usize = BLOCK_KEYS * WIDEST;

/// How far scores may be above what sums are relative to. Weights up to `exp(SLACK) = 256` are rounded as
/// those up to 1 are.
pub(crate) const SLACK: f32 = 8.0 * std::f32::consts::LN_2;

/// Finds what the sums of a key tile are relative to, and the factors of older sums.
///
/// # Safety
///
/// That of [`Softmax`].
pub(crate) struct Begin<'a> {
    pub(crate) softmax: &'a Softmax,
    /// How far above an earlier maximum a score must be to replace it.
    pub(crate) slack: f32,
}

/// Scores of blocks of keys become bf16 probabilities.
///
/// # Safety
///
/// That of [`Softmax`], which [`Begin`] must have been through; and the blocks of its keys × lanes
/// must be writable at `packed`, without a number that is read.
pub(crate) struct Weigh<'a> {
    pub(crate) softmax: &'a Softmax,
    /// For each 16 lanes, blocks of 32 keys: pairs of keys side by side.
    pub(crate) packed: *mut u16,
}

/// A block of keys of a key tile whose scores are weighed as they come: unmasked, neither changed nor
/// dropped, and relative to maxima that [near](Softmax::near) holds for.
///
/// # Safety
///
/// That of [`Weigh`] for the block's keys, but that their scores are the first ones. As many totals and
/// greatest scores as there are lanes must be readable and writable.
pub(crate) struct Flow<'a> {
    pub(crate) softmax: &'a Softmax,
    pub(crate) packed: *mut u16,
    /// The block.
    pub(crate) block: usize,
    /// Sums of weights, in the order of [`Weigh`], and the greatest scores, without their scale.
    pub(crate) totals: *mut f32,
    pub(crate) greatest: *mut f32,
}

impl Operation for Begin<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let masked = self.softmax.mask.is_some();
        // SAFETY: `lanes` is a whole number of vectors, so that each of these ends within them.
        unsafe {
            for lane in (0..self.softmax.lanes).step_by(S::WIDTH) {
                match (masked, self.softmax.is_raw()) {
                    (false, true) => self.lanes::<S, false, true>(simd, lane),
                    (false, false) => self.lanes::<S, false, false>(simd, lane),
                    (true, _) => self.lanes::<S, true, false>(simd, lane),
                }
            }
        }
    }
}

impl Operation for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        assert_eq!(S::WIDTH, WIDEST, "blocks are as wide as a vector");
        // SAFETY: `lanes` is a whole number of vectors, so that each of these ends within them, and
        // there is a maximum per lane.
        unsafe {
            for lane in (0..self.softmax.lanes).step_by(S::WIDTH) {
                let maxima = self.softmax.maxima.add(lane);
                match (self.softmax.mask.is_some(), self.softmax.is_raw()) {
                    _ if !self.softmax.factors_of_pairs.first.is_null() => {
                        match self.softmax.is_raw() {
                            true => self.lanes::<S, false, { RAW }, true>(simd, lane),
                            false => self.lanes::<S, true, { SCALED }, true>(simd, lane),
                        }
                    }
                    (false, true)
                        if Softmax::near(
                            std::slice::from_raw_parts(maxima, S::WIDTH),
                            MOST_NEAR,
                        ) =>
                    {
                        self.lanes::<S, false, { NEAR }, false>(simd, lane)
                    }
                    (false, true) => self.lanes::<S, false, { RAW }, false>(simd, lane),
                    (false, false) => self.lanes::<S, false, { SCALED }, false>(simd, lane),
                    (true, _) => self.lanes::<S, true, { SCALED }, false>(simd, lane),
                }
            }
        }
    }
}

/// Maxima up to which scores are weighed in one step.
const MOST_NEAR: f32 = 1024.0;

/// Keys that are taken together, so that they don't wait for each other.
const TOGETHER: usize = 4;

impl Begin<'_> {
    /// One vector of lanes.
    ///
    /// # Safety
    ///
    /// That of [`Begin`]; the vector must end within the lanes.
    #[inline(always)]
    unsafe fn lanes<S: Simd, const MASKED: bool, const RAW: bool>(&self, simd: S, lane: usize) {
        let softmax = self.softmax;
        let (zero, nothing) = (simd.splat(0.0), simd.splat(f32::NEG_INFINITY));
        let whole = softmax.keys / TOGETHER * TOGETHER;
        // SAFETY: keys are below `keys`, and the vector ends within the lanes, as this function
        // demands: `Softmax` demands scores and lists of so many.
        unsafe {
            let mut greatest = [nothing; TOGETHER];
            for key in (0..whole).step_by(TOGETHER) {
                let scores = self.scores::<S, TOGETHER, MASKED, RAW>(simd, key, lane);
                for k in 0..TOGETHER {
                    greatest[k] = simd.max(scores[k], greatest[k]);
                }
            }
            for key in whole..softmax.keys {
                let [score] = self.scores::<S, 1, MASKED, RAW>(simd, key, lane);
                greatest[0] = simd.max(score, greatest[0]);
            }
            let [a, b, c, d] = greatest;
            let greatest = simd.max(simd.max(a, b), simd.max(c, d));
            let new = if RAW { simd.mul(greatest, simd.splat(softmax.scale)) } else { greatest };

            let old = simd.load(softmax.maxima.add(lane));
            let above = simd.less(simd.add(old, simd.splat(self.slack)), new);
            let maxima = simd.select(above, new, old);
            // Where nothing has been seen yet the maximum is −∞, and −∞ − −∞ would be NaN.
            let safe = simd.select(simd.less(nothing, maxima), maxima, zero);
            let factor = exp_difference(simd, old, safe);
            simd.store(softmax.maxima.add(lane), maxima);
            simd.store(softmax.factors.add(lane), factor);
            let totals = softmax.totals.add(lane);
            simd.store(totals, simd.mul(simd.load(totals), factor));
        }
    }

    /// Scores of `K` keys and one vector of lanes: as they are, or changed, masked and written.
    ///
    /// # Safety
    ///
    /// That of [`Begin`]; the keys and the vector must end within its keys and lanes.
    #[inline(always)]
    unsafe fn scores<S: Simd, const K: usize, const MASKED: bool, const RAW: bool>(
        &self,
        simd: S,
        key: usize,
        lane: usize,
    ) -> [S::F; K] {
        let softmax = self.softmax;
        // SAFETY: this function demands keys and lanes of the softmax, and `Softmax` its scores.
        unsafe { softmax.scores::<S, K, MASKED, RAW>(simd, key, lane) }
    }
}

impl Operation for Flow<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        assert_eq!(S::WIDTH, WIDEST, "blocks are as wide as a vector");
        let Flow { softmax, packed, block, .. } = self;
        let keys = (softmax.keys - block * BLOCK_KEYS).min(BLOCK_KEYS);
        let along = softmax.keys.div_ceil(BLOCK_KEYS);
        let log2 = std::f32::consts::LOG2_E;
        let scale = simd.splat(softmax.scale * log2);
        // SAFETY: the type demands lists of all lanes, a whole number of vectors, scores of all keys of the
        // block, and its rows of pairs at `packed`.
        unsafe {
            for lane in (0..softmax.lanes).step_by(S::WIDTH) {
                let to = packed.add((lane / S::WIDTH * along + block) * BLOCK);
                let reference = simd.load(softmax.maxima.add(lane));
                let reference = simd.mul(reference, simd.splat(-log2));
                let mut total = simd.load(self.totals.add(lane));
                let mut greatest = [simd.load(self.greatest.add(lane)); TOGETHER];
                for quad in 0..BLOCK_KEYS / TOGETHER {
                    let mut weights = [simd.splat(0.0); TOGETHER];
                    for k in 0..TOGETHER {
                        let key = TOGETHER * quad + k;
                        if key < keys {
                            let score = simd.load(softmax.scores.at(key, lane).first);
                            greatest[k] = simd.max(score, greatest[k]);
                            weights[k] = exp2_coarse(simd, simd.fma(score, scale, reference));
                        }
                    }
                    let [a, b, c, d] = weights;
                    total = simd.add(total, simd.add(simd.add(a, b), simd.add(c, d)));
                    simd.store_pairs_bf16(to.add(2 * quad * BLOCK_KEYS), a, b);
                    simd.store_pairs_bf16(to.add((2 * quad + 1) * BLOCK_KEYS), c, d);
                }
                let [a, b, c, d] = greatest;
                simd.store(self.totals.add(lane), total);
                simd.store(self.greatest.add(lane), simd.max(simd.max(a, b), simd.max(c, d)));
            }
        }
    }
}

impl Softmax {
    /// Whether the scores of a key tile may be weighed as they come, once all lanes have a maximum.
    pub(crate) fn flows(&self) -> bool {
        self.is_raw() && self.factors_of_pairs.first.is_null()
    }

    /// Whether all lanes have a maximum, and one that is [near](Softmax::near).
    ///
    /// # Safety
    ///
    /// That of [`Softmax`].
    pub(crate) unsafe fn is_near(&self) -> bool {
        // SAFETY: there is a maximum per lane.
        let maxima = unsafe { std::slice::from_raw_parts(self.maxima, self.lanes) };
        maxima.iter().all(|maximum| maximum.abs() < MOST_NEAR)
    }

    /// Whether no score, of which the greatest are given, is too far above its lane's maximum.
    ///
    /// # Safety
    ///
    /// That of [`Softmax`].
    pub(crate) unsafe fn fits(&self, greatest: &[f32]) -> bool {
        // SAFETY: there is a maximum per lane.
        let maxima = unsafe { std::slice::from_raw_parts(self.maxima, self.lanes) };
        let mut each = greatest.iter().zip(maxima);
        each.all(|(greatest, maximum)| greatest * self.scale <= maximum + SLACK)
    }
}

impl Weigh<'_> {
    /// One vector of lanes.
    ///
    /// # Safety
    ///
    /// That of [`Weigh`]; the vector must end within the lanes.
    #[inline(always)]
    unsafe fn lanes<S: Simd, const MASKED: bool, const SCORE: u8, const DROPS: bool>(
        &self,
        simd: S,
        lane: usize,
    ) {
        let softmax = self.softmax;
        let chunks = softmax.keys.div_ceil(BLOCK_KEYS);
        let blocks = self.packed.wrapping_add(lane / S::WIDTH * chunks * BLOCK);
        // SAFETY: keys are below `keys`, and the vector ends within the lanes, as this function
        // demands: `Softmax` demands scores and lists of so many. A vector has `chunks` blocks of
        // `BLOCK` elements, of which each quad of keys writes two rows; `Weigh` demands them.
        unsafe {
            let maxima = simd.load(softmax.maxima.add(lane));
            let seen = simd.less(simd.splat(f32::NEG_INFINITY), maxima);
            let reference = simd.select(seen, maxima, simd.splat(0.0));
            let totals = softmax.totals.add(lane);
            let mut total = simd.load(totals);
            for chunk in 0..chunks {
                let first = chunk * BLOCK_KEYS;
                let keys = (softmax.keys - first).min(BLOCK_KEYS);
                for quad in 0..BLOCK_KEYS / TOGETHER {
                    let mut weights = [simd.splat(0.0); TOGETHER];
                    let keys = keys.saturating_sub(TOGETHER * quad).min(TOGETHER);
                    let key = first + TOGETHER * quad;
                    if keys == TOGETHER {
                        for k in 0..TOGETHER {
                            weights[k] =
                                self.weigh::<S, MASKED, SCORE>(simd, key + k, lane, reference);
                        }
                    } else {
                        for k in 0..keys {
                            weights[k] =
                                self.weigh::<S, MASKED, SCORE>(simd, key + k, lane, reference);
                        }
                    }
                    let [a, b, c, d] = weights;
                    total = simd.add(total, simd.add(simd.add(a, b), simd.add(c, d)));
                    let [a, b, c, d] = match DROPS {
                        true => self.drop(simd, weights, key, keys, lane),
                        false => weights,
                    };
                    let pairs = blocks.add(chunk * BLOCK + 2 * quad * BLOCK_KEYS);
                    simd.store_pairs_bf16(pairs, a, b);
                    simd.store_pairs_bf16(pairs.add(BLOCK_KEYS), c, d);
                }
            }
            simd.store(totals, total);
        }
    }

    /// Probabilities of `keys` keys from `key` on as dropout leaves them, written where the softmax
    /// has to keep them.
    ///
    /// # Safety
    ///
    /// That of [`Weigh`]; the keys and the vector must end within its keys and lanes, and factors
    /// not be null.
    #[inline(always)]
    unsafe fn drop<S: Simd>(
        &self,
        simd: S,
        mut weights: [S::F; TOGETHER],
        key: usize,
        keys: usize,
        lane: usize,
    ) -> [S::F; TOGETHER] {
        for k in 0..keys {
            // SAFETY: keys and lanes are those of the softmax, as this function demands.
            unsafe {
                let factors = self.softmax.factors_of_pairs.at(key + k, lane).first;
                weights[k] = simd.mul(weights[k], simd.load(factors));
                if self.softmax.keep {
                    simd.store(self.softmax.scores.at(key + k, lane).first, weights[k]);
                }
            }
        }
        weights
    }

    /// `(score · scale − reference) · log2 e`, rounded as one.
    #[inline(always)]
    fn close<S: Simd>(&self, simd: S, score: S::F, reference: S::F) -> S::F {
        let log2 = std::f32::consts::LOG2_E;
        let reference = simd.mul(reference, simd.splat(-log2));
        simd.fma(score, simd.splat(self.softmax.scale * log2), reference)
    }

    /// The probabilities of one key and one vector of lanes.
    ///
    /// # Safety
    ///
    /// That of [`Weigh`]; the key and the vector must end within its keys and lanes.
    #[inline(always)]
    unsafe fn weigh<S: Simd, const MASKED: bool, const SCORE: u8>(
        &self,
        simd: S,
        key: usize,
        lane: usize,
        reference: S::F,
    ) -> S::F {
        let log2 = simd.splat(std::f32::consts::LOG2_E);
        let scale = self.softmax.scale;
        // SAFETY: this function demands a key and lanes of the softmax, and `Softmax` its scores
        // and a word of the mask per key.
        unsafe {
            let at = self.softmax.scores.at(key, lane).first;
            let score = simd.load(at);
            let difference = match SCORE {
                NEAR => self.close(simd, score, reference),
                RAW => {
                    let exact =
                        simd.mul(simd.sub(simd.mul(score, simd.splat(scale)), reference), log2);
                    // Lanes that are near don't notice their neighbours.
                    let near = simd.less(simd.abs(reference), simd.splat(MOST_NEAR));
                    simd.select(near, self.close(simd, score, reference), exact)
                }
                _ => simd.mul(simd.sub(score, reference), log2),
            };
            let mut weight = exp2_coarse(simd, difference);
            if let Some((bits, bit)) = self.softmax.mask
                && MASKED
            {
                let mask = simd.mask(*bits.add(key) >> (bit + lane));
                weight = simd.select(mask, weight, simd.splat(0.0));
                if self.softmax.keep {
                    simd.store(at, weight);
                }
            }
            weight
        }
    }
}
