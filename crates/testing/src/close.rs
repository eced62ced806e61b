//! Elements that have to be near each other, one by one.
//!
//! A maximum of differences by `f64::max` drops NaN, and a comparison by `zip` drops what one of
//! two lists has beyond the other. Here a NaN is infinitely far from everything, itself included,
//! and lists have equal lengths.

use std::fmt::Display;

/// 0 for equal elements, infinities included; infinite where one of them is NaN.
pub(crate) fn difference(got: impl Into<f64>, expected: impl Into<f64>) -> f64 {
    let (got, expected) = (got.into(), expected.into());
    if got == expected {
        return 0.0;
    }
    let difference = (got - expected).abs();
    if difference.is_nan() { f64::INFINITY } else { difference }
}

/// The largest absolute difference of two elements at the same index: infinite where one of them
/// is NaN, where only one is infinite, and for lists of different lengths; 0 for empty lists.
///
/// ```
/// use longspan_testing::largest_difference;
///
/// assert_eq!(largest_difference(&[1.0, f32::NEG_INFINITY], &[1.5, f64::NEG_INFINITY]), 0.5);
/// assert_eq!(largest_difference(&[f32::NAN, 1.0], &[1.0, 1.0]), f64::INFINITY);
/// ```
pub fn largest_difference<A, B>(got: &[A], expected: &[B]) -> f64
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    match worst(got, expected) {
        _ if got.len() != expected.len() => f64::INFINITY,
        Some((_, difference)) => difference,
        None => 0.0,
    }
}

/// Panics unless every element is within `bound` of the one at the same index of `expected`, as
/// [`largest_difference`] measures it; the message has the worst index, both values and the bound.
///
/// ```
/// use longspan_testing::assert_close;
///
/// assert_close("lse", &[1.0_f32, f32::NEG_INFINITY], &[1.0, f64::NEG_INFINITY], 1e-6);
/// ```
#[track_caller]
pub fn assert_close<A, B>(what: impl Display, got: &[A], expected: &[B], bound: f64)
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    assert_eq!(got.len(), expected.len(), "{what}: lengths differ");
    assert!(bound.is_finite(), "{what}: a bound of {bound} holds for everything");
    let Some((index, difference)) = worst(got, expected) else { return };
    let (got, expected): (f64, f64) = (got[index].into(), expected[index].into());
    assert!(
        difference <= bound,
        "{what}: element {index} is {got:e}, expected {expected:e}: off by {difference:e}, at most \
         {bound:e}"
    );
}

/// Index and difference of the elements that are farthest apart, the first of them.
fn worst<A, B>(got: &[A], expected: &[B]) -> Option<(usize, f64)>
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    let differences = got.iter().zip(expected).map(|(&a, &b)| difference(a, b));
    // No difference is NaN, so every comparison has an answer.
    differences.enumerate().reduce(|worst, next| if next.1 > worst.1 { next } else { worst })
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    const NONE: f64 = f64::NAN;
    const INFINITE: f64 = f64::INFINITY;

    /// What `assert_close` says, if it panics.
    fn complaint(got: &[f64], expected: &[f64], bound: f64) -> Option<String> {
        let (got, expected) = (got.to_vec(), expected.to_vec());
        let caught = catch_unwind(|| assert_close("out", &got, &expected, bound)).err()?;
        Some(caught.downcast_ref::<String>().expect("a message").clone())
    }

    #[test]
    fn what_is_not_finite_is_far() {
        for (got, expected) in [
            ([1.0, NONE, 2.0], [1.0, 1.0, 2.0]),
            ([1.0, 1.0, 2.0], [NONE, 1.0, 2.0]),
            ([1.0, NONE, 2.0], [1.0, NONE, 2.0]),
            ([1.0, INFINITE, 2.0], [1.0, 1.0, 2.0]),
            ([1.0, 1.0, 2.0], [1.0, 1.0, -INFINITE]),
            ([1.0, INFINITE, 2.0], [1.0, -INFINITE, 2.0]),
        ] {
            assert_eq!(largest_difference(&got, &expected), INFINITE, "{got:?} {expected:?}");
            assert!(complaint(&got, &expected, f64::MAX).is_some(), "{got:?} {expected:?}");
        }
    }

    #[test]
    fn equal_infinities_are_equal() {
        let list = [1.0, INFINITE, -INFINITE];
        assert_eq!(largest_difference(&list, &list), 0.0);
        assert_eq!(complaint(&list, &list, 0.0), None);
    }

    #[test]
    fn the_worst_is_reported() {
        let (got, expected) = ([1.0, 2.0, 3.0, 4.0], [1.0, 2.5, 3.75, 4.25]);
        assert_eq!(largest_difference(&got, &expected), 0.75);
        assert_eq!(complaint(&got, &expected, 0.75), None);
        let message = complaint(&got, &expected, 0.5).expect("a panic");
        for part in ["out: element 2 is 3e0, expected 3.75e0", "7.5e-1, at most 5e-1"] {
            assert!(message.contains(part), "{message}");
        }
    }

    /// Neither what only one list has nor what any two lists would pass.
    #[test]
    fn nothing_is_left_out() {
        assert_eq!(largest_difference(&[1.0], &[1.0, 2.0]), INFINITE);
        assert!(complaint(&[1.0], &[1.0, 2.0], 1.0).is_some());
        assert_eq!(largest_difference::<f32, f64>(&[], &[]), 0.0);
        assert!(complaint(&[1.0], &[1.0], INFINITE).is_some());
        assert!(complaint(&[1.0], &[1.0], NONE).is_some());
    }
}
