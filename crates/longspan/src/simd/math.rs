//! The exponential and the hyperbolic tangent of vectors.
//!
//! `exp(x) = 2^n · exp(f)` with `n` the whole number next to `x / ln 2` and `|f| ≤ ln 2 / 2`.
//! Adding `1.5 · 2^23` rounds to a whole number and leaves it in the low bits, 127 more make it the
//! exponent of a power of two; `n · ln 2` is taken away in two parts so that `f` is exact to a
//! fraction of an ulp; a polynomial of degree six does the rest (coefficients of least relative
//! error, the first two 1), within 1 ulp where multiplication and addition are fused.
//!
//! `tanh(x)` is a polynomial where `|x| < 0.625`, and `(1 − e) / (1 + e)` with `e = exp(−2|x|)`
//! beyond, where the difference no longer cancels.

use super::Simd;

/// 1.5 · 2^23 + 127: adding it leaves a whole number in the low bits, as f32 writes an exponent.
pub(crate) const ROUND: f32 = 12_583_039.0;

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
    simd.zero_where(low, simd.scale(p, n, biased))
}

/// `2^(x + low)` for `x` up to 127 and a `low` that is nothing beside 1, within 1.6 · 2^-24 of itself; 0
/// where `x` is below −126; NaN for NaN.
///
/// Of several vectors at once, since each step waits for the one before, and coefficients would be
/// loaded again per vector where they don't fit into registers.
#[inline(always)]
pub(crate) fn exp2<S: Simd, const K: usize>(simd: S, x: [S::F; K], low: [S::F; K]) -> [S::F; K] {
    let mut f = x;
    for k in 0..K {
        f[k] = simd.add(simd.fraction(x[k]), low[k]);
    }
    exp2_from(simd, f, x)
}

/// `2^(whole(x) + f)` likewise, for an `f` like a [fraction](Simd::fraction).
#[inline(always)]
pub(crate) fn exp2_from<S: Simd, const K: usize>(simd: S, f: [S::F; K], x: [S::F; K]) -> [S::F; K] {
    // Coefficients of least relative error from −½ to ½ and from 0 to 1, the last one 1.
    let coefficients = match S::NEAREST {
        true => [
            1.535_336_2e-4,
            1.339_887_4e-3,
            9.618_437e-3,
            5.550_332_4e-2,
            2.402_264_8e-1,
            6.931_472e-1,
            1.0,
        ],
        false => [
            2.156_597_2e-4,
            1.248_229e-3,
            9.673_775e-3,
            5.548_618_4e-2,
            2.402_290_9e-1,
            6.931_470_6e-1,
            1.0,
        ],
    };
    let mut p = [simd.splat(coefficients[0]); K];
    for coefficient in &coefficients[1..] {
        for k in 0..K {
            p[k] = simd.fma(p[k], f[k], simd.splat(*coefficient));
        }
    }
    for k in 0..K {
        let tiny = simd.less(x[k], simd.splat(-126.0));
        p[k] = simd.zero_where(tiny, simd.scale_by_whole(p[k], x[k]));
    }
    p
}

/// `2^x` for `x` up to 127, within 1.5e-7 of itself: far below what rounding to bf16 costs, and
/// little for a log-sum-exp. 1 for 0; 0 or less than 2^-125 where `x` is below −126; NaN for NaN.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn exp2_coarse<S: Simd>(simd: S, x: S::F) -> S::F {
    if S::NEAREST {
        // No set with a matrix unit, and so with need of this, rounds like that.
        let [power] = exp2(simd, [x], [simd.splat(0.0)]);
        return power;
    }
    let f = simd.fraction(x);
    // Coefficients of least relative error from 0 to 1, the last one 1.
    let mut p = simd.splat(1.867_130_2e-3);
    p = simd.fma(p, f, simd.splat(9.017_03e-3));
    p = simd.fma(p, f, simd.splat(5.579_991_3e-2));
    p = simd.fma(p, f, simd.splat(2.401_644_4e-1));
    p = simd.fma(p, f, simd.splat(6.931_513e-1));
    p = simd.fma(p, f, simd.splat(1.0));
    simd.scale_by_whole(p, x)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::{Operation, WithSimd, dispatch};

    /// What a function of vectors gives for `x` and `y` in every lane.
    #[derive(Clone, Copy)]
    enum At {
        Difference(f32, f32),
        Tanh(f32),
        Exp2(f32, f32),
        #[cfg(target_arch = "x86_64")]
        Exp2Coarse(f32),
    }

    impl Operation for At {
        type Output = f32;

        #[inline(always)]
        unsafe fn eval<S: Simd>(self, simd: S) -> f32 {
            let value = match self {
                At::Difference(x, y) => exp_difference(simd, simd.splat(x), simd.splat(y)),
                At::Tanh(x) => tanh(simd, simd.splat(x)),
                At::Exp2(x, low) => {
                    let [power] = exp2(simd, [simd.splat(x)], [simd.splat(low)]);
                    power
                }
                #[cfg(target_arch = "x86_64")]
                At::Exp2Coarse(x) => exp2_coarse(simd, simd.splat(x)),
            };
            let mut lanes = [0.0; 16];
            // SAFETY: `lanes` has `WIDEST` elements, and no vector is wider.
            unsafe { simd.store(lanes.as_mut_ptr(), value) };
            lanes[0]
        }
    }

    impl WithSimd for At {
        type Output = f32;

        fn with<S: Simd>(self, simd: S) -> f32 {
            // SAFETY: `At` has no condition.
            unsafe { simd.call(self) }
        }
    }

    /// How far `got` is from `exact`, in units of the last place of `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let place = f64::from(exact as f32).abs().max(f64::from(f32::MIN_POSITIVE));
        let place = 2.0_f64.powi(place.log2().floor() as i32 - 23);
        (f64::from(got) - exact).abs() / place
    }

    /// Instruction sets, and whether they multiply and add in one rounding.
    fn isas() -> impl Iterator<Item = (Isa, bool)> {
        Isa::available().into_iter().map(|isa| (isa, isa != Isa::Portable))
    }

    #[test]
    fn exp_is_within_an_ulp() {
        for (isa, fused) in isas() {
            let mut worst = (0.0, 0.0);
            // Every 257th number from −87.3 to −2^-40, and their opposites up to 88.
            let range = (2.0_f32.powi(-40)).to_bits()..=(-EXP_LOWEST).to_bits();
            for bits in range.step_by(257) {
                for x in [-f32::from_bits(bits), f32::from_bits(bits)] {
                    if x > 88.0 {
                        continue;
                    }
                    let got = dispatch(isa, At::Difference(x, 0.0));
                    let error = ulps(got, f64::from(x).exp());
                    if error > worst.0 {
                        worst = (error, x);
                    }
                }
            }
            let most = if fused { 1.0 } else { 1.5 };
            assert!(worst.0 <= most, "{isa}: {} ulp at {}", worst.0, worst.1);
        }
    }

    #[test]
    fn exp2_is_what_it_says() {
        for (isa, fused) in isas() {
            let exp2 = |x, low| dispatch(isa, At::Exp2(x, low));
            let most = if fused { 1.6 } else { 4.0 } * 2.0_f64.powi(-24);
            for i in 0..400_000 {
                let (x, low) = (4.0 - i as f32 * 3.23e-4, ((i % 7) as f32 - 3.0) * 1e-7);
                let exact = (f64::from(x) + f64::from(low)).exp2();
                let error = (f64::from(exp2(x, low)) - exact).abs() / exact;
                assert!(error <= most, "{isa}: {error} at {x} + {low}");
            }
            assert_eq!(exp2(0.0, 0.0), 1.0, "{isa}");
            for x in [-126.5, -1e3, -1e30, f32::NEG_INFINITY] {
                assert_eq!(exp2(x, 1e-7).to_bits(), 0, "{isa}: {x}");
            }
            assert!(exp2(f32::NAN, 0.0).is_nan(), "{isa}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn coarse_exp2_is_what_it_says() {
        for (isa, fused) in isas() {
            let exp2 = |x| dispatch(isa, At::Exp2Coarse(x));
            let most = if fused { 1.5e-7 } else { 4e-7 };
            for i in 0..400_000 {
                let x = 4.0 - i as f32 * 3.23e-4;
                let exact = f64::from(x).exp2();
                let error = (f64::from(exp2(x)) - exact).abs() / exact;
                assert!(error <= most, "{isa}: {error} at {x}");
            }
            assert_eq!(exp2(0.0), 1.0, "{isa}");
            assert!((exp2(-1e-38) - 1.0).abs() <= 1.5e-7, "{isa}");
            for x in [-127.5, -1e3, -1e30, f32::NEG_INFINITY] {
                assert!((0.0..2.0_f32.powi(-125)).contains(&exp2(x)), "{isa}: {x}");
            }
            assert!(exp2(f32::NAN).is_nan(), "{isa}");
        }
    }

    #[test]
    fn exp_of_difference_doesnt_round_it() {
        for (isa, fused) in isas() {
            for i in 0..20_000 {
                let x = (i as f32 * 0.618).sin() * 3.0;
                let y = 4.0 + (i as f32 * 0.377).cos() * 5.0 + x.abs();
                let got = dispatch(isa, At::Difference(x, y));
                let exact = (f64::from(x) - f64::from(y)).exp();
                // Half an ulp of x, at most 2^-23, and what exp itself takes.
                let most = if fused { 3.0 } else { 4.0 };
                assert!(ulps(got, exact) <= most, "{isa}: {x} − {y}: {got} for {exact}");
            }
        }
    }

    #[test]
    fn exp_at_its_edges() {
        for (isa, _) in isas() {
            let exp = |x, y| dispatch(isa, At::Difference(x, y));
            assert_eq!(exp(0.0, 0.0), 1.0, "{isa}");
            assert_eq!(exp(1e30, 1e30), 1.0, "{isa}");
            for (x, y) in
                [(-88.0, 0.0), (-1e30, 0.0), (f32::NEG_INFINITY, 0.0), (0.0, f32::INFINITY)]
            {
                assert_eq!(exp(x, y).to_bits(), 0, "{isa}: {x} − {y}");
            }
            for (x, y) in [(f32::NAN, 0.0), (0.0, f32::NAN), (f32::INFINITY, f32::INFINITY)] {
                assert!(exp(x, y).is_nan(), "{isa}: {x} − {y}");
            }
        }
    }

    #[test]
    fn tanh_is_within_three_ulps() {
        for (isa, _) in isas() {
            for bits in (2.0_f32.powi(-30).to_bits()..=20.0_f32.to_bits()).step_by(997) {
                for x in [-f32::from_bits(bits), f32::from_bits(bits)] {
                    let got = dispatch(isa, At::Tanh(x));
                    assert!(ulps(got, f64::from(x).tanh()) <= 3.0, "{isa}: {x}: {got}");
                }
            }
            assert!(dispatch(isa, At::Tanh(f32::NAN)).is_nan(), "{isa}");
        }
    }
}
