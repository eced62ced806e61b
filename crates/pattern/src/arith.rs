//! Integer arithmetic on progressions, and one generator. Imports nothing.

/// SplitMix64 of Steele, Lea and Flood: the first word of the stream of seed `x`.
pub fn splitmix64(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Greatest common divisor.
pub(crate) fn gcd(mut a: i64, mut b: i64) -> i64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The ceiling of `a / b`, for positive `b`.
#[inline]
pub(crate) fn div_ceil(a: i64, b: i64) -> i64 {
    if b == 1 { a } else { -(-a).div_euclid(b) }
}

/// Floor division by a fixed divisor; a shift where it is a power of two, as block sizes mostly
/// are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Divisor {
    pub(crate) by: i64,
    shift: Option<u32>,
}

impl Divisor {
    pub(crate) fn new(by: i64) -> Self {
        debug_assert!(by > 0);
        Divisor { by, shift: (by & (by - 1) == 0).then(|| by.trailing_zeros()) }
    }

    #[inline]
    pub(crate) fn floor(self, a: i64) -> i64 {
        match self.shift {
            Some(shift) => a >> shift,
            None => a.div_euclid(self.by),
        }
    }
}

/// The bits from bit `from` on, below bit `to`; both in `0..=64`.
#[inline]
pub(crate) fn bit_range(from: i64, to: i64) -> u64 {
    let below = |n: i64| if n == 0 { 0 } else { u64::MAX >> (64 - n) };
    below(to) & !below(from)
}

/// All solutions `i` of `a + step · i ≡ 0 (mod modulus)`: `first + period · n`.
///
/// With `g = gcd(step, modulus)` there are none unless `g` divides `a`; else the period is
/// `modulus / g` and the first is `−a/g` times the inverse of `step/g`. The inverse doesn't depend
/// on `a`, so one `Congruence` serves every row of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Congruence {
    modulus: i64,
    divisor: i64,
    inverse: i64,
    pub(crate) period: i64,
}

impl Congruence {
    pub(crate) fn new(step: i64, modulus: i64) -> Self {
        debug_assert!(modulus > 0 && step > 0);
        let divisor = gcd(step, modulus);
        let period = modulus / divisor;
        let inverse = if period == 1 { 0 } else { inverse((step / divisor) % period, period) };
        Congruence { modulus, divisor, inverse, period }
    }

    /// The smallest solution, in `0..period`.
    #[inline]
    pub(crate) fn first(&self, a: i64) -> Option<i64> {
        let target = (-a).rem_euclid(self.modulus);
        if self.divisor == 1 && self.inverse == 1 {
            return Some(target);
        }
        if target % self.divisor != 0 {
            return None;
        }
        let (target, inverse) = (target / self.divisor, self.inverse);
        Some((i128::from(target) * i128::from(inverse) % i128::from(self.period)) as i64)
    }

    /// How many solutions lie in `0..len`.
    pub(crate) fn count(&self, a: i64, len: i64) -> i64 {
        self.first(a).map_or(0, |first| div_ceil((len - first).max(0), self.period))
    }
}

/// The inverse of `a` modulo `m`, for coprime `a` and `m` (extended Euclid).
fn inverse(a: i64, m: i64) -> i64 {
    let (mut old, mut new) = ((a, 1i64), (m, 0i64));
    while new.0 != 0 {
        let q = old.0 / new.0;
        (old, new) = (new, (old.0 - q * new.0, old.1 - q * new.1));
    }
    old.1.rem_euclid(m)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn solutions_are_complete_and_exact() {
        for step in 1..14 {
            for modulus in 1..14 {
                let congruence = Congruence::new(step, modulus);
                for a in -20..20 {
                    let holds = |i: &i64| (a + step * i).rem_euclid(modulus) == 0;
                    assert_eq!(congruence.first(a), (0..modulus).find(holds));
                    for len in 0..30 {
                        assert_eq!(congruence.count(a, len), (0..len).filter(holds).count() as i64);
                    }
                }
            }
        }
    }

    #[test]
    fn divisors_floor() {
        for by in [1, 2, 3, 16, 48, 64] {
            for a in -200..200 {
                let expected = (a as f64 / by as f64).floor() as i64;
                assert_eq!(Divisor::new(by).floor(a), expected);
            }
        }
    }

    #[test]
    fn bit_ranges() {
        assert_eq!(bit_range(0, 64), u64::MAX);
        assert_eq!(bit_range(0, 3), 0b111);
        assert_eq!(bit_range(2, 4), 0b1100);
        assert_eq!(bit_range(5, 5), 0);
        assert_eq!(bit_range(7, 3), 0);
        assert_eq!(bit_range(63, 64), 1 << 63);
    }
}
