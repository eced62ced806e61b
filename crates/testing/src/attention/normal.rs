//! Unit-normal numbers that depend on a seed alone.
//!
//! Box and Muller's transform of two uniform numbers, in `f64` and then rounded, so that the last
//! bit of a platform's `ln` or `cos` shows once in 2²⁹ numbers and never matters to a test.

use crate::splitmix::element;

/// `len` numbers of mean 0 and variance 1, the same for the same seed.
pub fn normals(seed: u64, len: usize) -> Vec<f32> {
    let uniform = |t| (element(seed, t) >> 11) as f64 / (1_u64 << 53) as f64;
    let mut numbers = Vec::with_capacity(len + 1);
    for pair in 0..len.div_ceil(2) as u64 {
        let radius = (-2.0 * (1.0 - uniform(2 * pair)).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * uniform(2 * pair + 1)).sin_cos();
        numbers.extend([(radius * cos) as f32, (radius * sin) as f32]);
    }
    numbers.truncate(len);
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_variance_and_tails_are_those_of_normal() {
        let numbers = normals(7, 100_001);
        assert_eq!(numbers.len(), 100_001);
        let count = numbers.len() as f64;
        let moment = |n| numbers.iter().map(|&x| f64::from(x).powi(n)).sum::<f64>() / count;
        // Standard deviations of these estimates: 0.003, 0.0045, 0.03.
        assert!(moment(1).abs() < 0.015 && (moment(2) - 1.0).abs() < 0.02);
        assert!((moment(4) - 3.0).abs() < 0.15);
        assert!(numbers.iter().all(|x| x.abs() < 7.0));
    }

    #[test]
    fn a_seed_is_stream() {
        assert_eq!(normals(3, 9), normals(3, 10)[..9]);
        assert_ne!(normals(3, 9), normals(4, 9));
    }
}
