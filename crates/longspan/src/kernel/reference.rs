//! What f32 weights are relative to, in base 2.
//!
//! ```text
//! e^(score · scale − natural) = 2^(score · (scale · log₂ e) + binary + low)
//! ```
//!
//! Scale, subtraction and change of base are one multiplication and addition, whose result is rounded
//! where it is small; what rounding takes from the factor and from `binary` is added to that. Both
//! passes weigh scores this way, so that probabilities have no error that the log-sum-exp hasn't.

use crate::simd::Simd;
use crate::simd::math::{exp2, exp2_from};

/// References up to which weights are computed so. Rounding one in the other base costs no more than a
/// score of this size is rounded anyway.
pub(super) const MOST_NEAR: f32 = 64.0;

/// The factor of scores in base 2, and what rounding takes from it.
#[inline(always)]
pub(super) fn binary_scale<S: Simd>(simd: S, scale: f32) -> [S::F; 2] {
    let exact = f64::from(scale) * std::f64::consts::LOG2_E;
    let high = exact as f32;
    [simd.splat(high), simd.splat((exact - f64::from(high)) as f32)]
}

/// A reference per lane: `e^−natural = 2^(binary + low)`.
#[derive(Clone, Copy)]
pub(super) struct Reference<F> {
    pub(super) natural: F,
    binary: F,
    /// What rounding took from `binary`: as much as the error of a weight.
    low: F,
}

impl<F: Copy> Reference<F> {
    #[inline(always)]
    pub(super) fn new<S: Simd<F = F>>(simd: S, natural: F) -> Self {
        const HIGH: f32 = -std::f32::consts::LOG2_E;
        const LOW: f32 = (-std::f64::consts::LOG2_E - HIGH as f64) as f32;
        let binary = simd.mul(natural, simd.splat(HIGH));
        let rounded = simd.fma(natural, simd.splat(HIGH), simd.sub(simd.splat(0.0), binary));
        Reference { natural, binary, low: simd.fma(natural, simd.splat(LOW), rounded) }
    }

    /// The weights of scores, given their [factor](binary_scale): off by a rounding of the exponent.
    #[inline(always)]
    pub(super) fn weights<S: Simd<F = F>, const K: usize>(
        self,
        simd: S,
        scores: [F; K],
        [high, low]: [F; 2],
    ) -> [F; K] {
        let powers = scores.map(|score| simd.fma(score, high, self.binary));
        let rests = scores.map(|score| simd.fma(score, low, self.low));
        exp2(simd, powers, rests)
    }

    /// The same without the rounding of the exponent, which would cost a probability of one in
    /// thousands eight ulps. A score that should be above the reference gives any weight of 1 or more.
    #[inline(always)]
    pub(super) fn exact_weights<S: Simd<F = F>, const K: usize>(
        self,
        simd: S,
        scores: [F; K],
        [high, low]: [F; 2],
    ) -> [F; K] {
        let (mut powers, mut fractions) = (scores, scores);
        for k in 0..K {
            let score = scores[k];
            powers[k] = simd.min(simd.splat(0.0), simd.fma(score, high, self.binary));
            let whole = simd.whole(powers[k]);
            // The difference is exact.
            let rest = simd.fma(score, high, simd.sub(self.binary, whole));
            fractions[k] = simd.add(rest, simd.fma(score, low, self.low));
        }
        exp2_from(simd, fractions, powers)
    }
}
