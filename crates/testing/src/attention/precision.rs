//! What numbers are rounded to: by arithmetic on `f64`, so that nothing is shared with the
//! conversions that are tested against it.

use std::fmt::{Display, Formatter};

/// A binary floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 24 bits of precision.
    F32,
    /// 8 bits of precision, exponents as `f32`.
    Bf16,
    /// 11 bits of precision, numbers up to 65,504.
    F16,
}

impl Precision {
    /// All there are.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

    /// Those of 16 bits.
    pub const HALF: [Precision; 2] = [Precision::Bf16, Precision::F16];

    /// Bits of precision, and the exponents of the least and the greatest normal numbers.
    fn bits(self) -> (i32, i32, i32) {
        match self {
            Precision::F32 => (24, -126, 127),
            Precision::Bf16 => (8, -126, 127),
            Precision::F16 => (11, -14, 15),
        }
    }

    /// The nearest number of the format, ties to even; infinite where that is too large for it.
    pub fn round(self, x: f64) -> f32 {
        let (precision, least, greatest) = self.bits();
        if x == 0.0 || !x.is_finite() {
            return x as f32;
        }
        let exponent = ((x.to_bits() >> 52 & 0x7FF) as i32 - 1023).max(least);
        // Powers of two from their bits, and whole numbers by a sum: most of what the oracle computes
        // is rounded.
        let power = |exponent: i32| f64::from_bits(((exponent + 1023) as u64) << 52);
        if exponent > greatest {
            return f32::INFINITY.copysign(x as f32);
        }
        let ulp = power(exponent - precision + 1);
        // 1.5 · 2^52 ulps: sums from 2^52 to 2^53 of them are whole numbers of ulps.
        let shift = 6_755_399_441_055_744.0 * ulp;
        let rounded = (x + shift) - shift;
        if rounded.abs() >= power(greatest + 1) {
            return f32::INFINITY.copysign(x as f32);
        }
        rounded.copysign(x) as f32
    }

    /// The unit roundoff: half the distance from 1 to the next number.
    pub fn unit(self) -> f64 {
        0.5_f64.powi(self.bits().0)
    }

    /// The RMS of a number's relative error when it is rounded: `ulp/√12` of a number whose
    /// logarithm is anywhere in a binade, `√(3 / (8 ln 2)) · 2u/√12 = 0.425 u`.
    pub fn noise(self) -> f64 {
        (1.0 / (8.0 * std::f64::consts::LN_2)).sqrt() * self.unit()
    }
}

impl Display for Precision {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::F16 => "f16",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::normals;

    #[test]
    fn rounding_by_hand() {
        let bf16 = |x| Precision::Bf16.round(x);
        // 1 + 1/128 is the next to 1; halfway between them is 1, and between it and the next, that.
        assert_eq!((bf16(1.0 + 1.0 / 256.0), bf16(1.0 + 3.0 / 256.0)), (1.0, 1.015625));
        assert_eq!((bf16(1.00390626), bf16(-1e39)), (1.0078125, f32::NEG_INFINITY));
        assert_eq!((bf16(2.0_f64.powi(-134)), bf16(1e-40)), (0.0, 0.5_f32.powi(133)));
        let f16 = |x| Precision::F16.round(x);
        assert_eq!((f16(65_519.9), f16(65_520.0)), (65_504.0, f32::INFINITY));
        assert_eq!((f16(2.0_f64.powi(-25)), f16(1.5 * 2.0_f64.powi(-25))), (0.0, 0.5_f32.powi(24)));
        assert!(f16(f64::NAN).is_nan() && f16(-0.0).is_sign_negative());
    }

    #[test]
    fn rounding_to_f32_is_the_cast() {
        for x in normals(1, 1000) {
            let x = f64::from(x) * 1.000_000_1;
            for scale in [1.0, 1e-38, 1e-42, 3e38] {
                assert_eq!(
                    Precision::F32.round(x * scale).to_bits(),
                    ((x * scale) as f32).to_bits()
                );
            }
        }
    }

    #[test]
    fn noise_is_what_rounding_costs() {
        for precision in Precision::ALL {
            let relative = normals(2, 100_000).into_iter().map(|x| {
                let x = f64::from(x) * std::f64::consts::PI;
                (f64::from(precision.round(x)) / x - 1.0).powi(2)
            });
            let rms = (relative.sum::<f64>() / 1e5).sqrt();
            let ratio = rms / precision.noise();
            assert!((ratio - 1.0).abs() < 0.03, "{precision}: {ratio}");
        }
    }
}
