//! The exponential and the hyperbolic tangent of vectors.
//!
//! `exp(x) = 2^n · exp(f)` with `n` the whole number next to `x / ln 2` and `|f| ≤ ln 2 / 2`.
//! Adding `1.5 · 2^23` rounds to a whole number and leaves it in the low bits; `n · ln 2` is taken
//! away in two parts so that `f` is exact to a fraction of an ulp; a polynomial of degree six does
//! the rest (coefficients of least relative error, the first two 1), within 1 ulp where
//! multiplication and addition are fused.
//!
//! `tanh(x)` is a polynomial where `|x| < 0.625`, and `(1 − e) / (1 + e)` with `e = exp(−2|x|)`
//! beyond, where the difference no longer cancels.

use super::Simd;

/// Below it `exp` is less than the smallest normal number, and 0 here.
pub(crate) const EXP_LOWEST: f32 = -87.336_54;

/// `e^x` for `x` up to 88, within 1 ulp; 0 below [`EXP_LOWEST`]; NaN for NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::F) -> S::F {
    exp_difference(simd, x, simd.splat(0.0))
}

/// `e^(x − y)` likewise, without the rounding of the difference: that would cost half an ulp *of
/// the difference*, which for a softmax over thousands of keys is eight of the result's.
///
/// `x − y − n·ln 2` is taken as `x − (y + n·ln 2)`, and the sum in parentheses is about as large as
/// `x`.
#[inline(always)]
pub(crate) fn exp_difference<S: Simd>(simd: S, x: S::F, y: S::F) -> S::F {
    // ln 2 with its last bits zero, so that n times it is exact, and what is missing.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 1.5 · 2^23: adding it leaves a whole number in the low bits.
    const ROUND: f32 = 12_582_912.0;

    let difference = simd.sub(x, y);
    let round = simd.splat(ROUND);
    let biased = simd.fma(difference, simd.splat(std::f32::consts::LOG2_E), round);
    let n = simd.sub(biased, round);
    let f = simd.sub(x, simd.fma(n, simd.splat(LN2_HIGH), y));
    let f = simd.fnma(n, simd.splat(LN2_LOW), f);

    let mut p = simd.splat(1.381_453_9e-3);
    p = simd.fma(p, f, simd.splat(8.368_745e-3));
    p = simd.fma(p, f, simd.splat(4.166_839e-2));
    p = simd.fma(p, f, simd.splat(1.666_652_1e-1));
    p = simd.fma(p, f, simd.splat(4.999_999_4e-1));
    p = simd.fma(p, f, simd.splat(1.0));
    p = simd.fma(p, f, simd.splat(1.0));

    let low = simd.less(difference, simd.splat(EXP_LOWEST));
    simd.select(low, simd.splat(0.0), simd.scale(p, n, biased))
}

/// `tanh x`, within a few ulps; NaN for NaN.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(simd: S, x: S::F) -> S::F {
    let size = simd.abs(x);
    let square = simd.mul(x, x);
    let mut p = simd.splat(-5.704_988_7e-3);
    p = simd.fma(p, square, simd.splat(2.063_909e-2));
    p = simd.fma(p, square, simd.splat(-5.373_971_6e-2));
    p = simd.fma(p, square, simd.splat(1.333_144_2e-1));
    p = simd.fma(p, square, simd.splat(-3.333_328e-1));
    let near = simd.fma(simd.mul(p, square), x, x);

    let one = simd.splat(1.0);
    let e = exp(simd, simd.mul(simd.splat(-2.0), size));
    let far = simd.div(simd.sub(one, e), simd.add(one, e));
    let negative = simd.less(x, simd.splat(0.0));
    let far = simd.select(negative, simd.sub(simd.splat(0.0), far), far);
    simd.select(simd.less(size, simd.splat(0.625)), near, far)
}
