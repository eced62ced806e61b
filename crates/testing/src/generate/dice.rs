//! The few ways in which numbers are drawn from a fuzzer's bytes.
//!
//! When the bytes run out every draw gives its least value, so the least value is always the plain
//! choice: `false`, no operator, the shortest list. That lets a fuzzer shrink a case, and ends
//! every recursion.

use arbitrary::{Result, Unstructured};

/// As large as an argument gets when it is meant to be out of proportion.
const HUGE: u64 = 1 << 40;

/// `true` for about `percent` in a hundred.
pub(super) fn chance(u: &mut Unstructured<'_>, percent: u32) -> Result<bool> {
    Ok(u32::from(u.arbitrary::<u8>()?) * 100 >= (100 - percent) * 256)
}

/// An argument for a pattern over `span` tokens: mostly less than that, often very small, now and
/// then out of all proportion.
pub(super) fn argument(u: &mut Unstructured<'_>, span: u64) -> Result<u64> {
    let most = match u.int_in_range(0..=24)? {
        0..=9 => 8,
        10..=17 => span / 4,
        18..=22 => span,
        23 => 2 * span,
        _ => HUGE,
    };
    u.int_in_range(0..=most)
}

/// An offset: mostly within the tokens, now and then far on either side of them.
pub(super) fn offset(u: &mut Unstructured<'_>, tokens: u64) -> Result<i64> {
    let most = match u.int_in_range(0..=9)? {
        0..=3 => 20,
        4..=8 => tokens as i64,
        _ => HUGE as i64,
    };
    u.int_in_range(-most..=most)
}

/// `parts` lengths that add up to `total`, the cuts among the last `recent`; zeros are usual.
pub(super) fn lengths(
    u: &mut Unstructured<'_>,
    parts: u64,
    total: u64,
    recent: u64,
) -> Result<Vec<u64>> {
    let earliest = total.saturating_sub(recent);
    let mut cuts = vec![0, total];
    for _ in 1..parts {
        cuts.push(u.int_in_range(earliest..=total)?);
    }
    cuts.sort_unstable();
    Ok(cuts.windows(2).map(|cut| cut[1] - cut[0]).collect())
}

/// A sub-range of `0..end`, perhaps empty.
pub(super) fn range(u: &mut Unstructured<'_>, end: u64) -> Result<std::ops::Range<u64>> {
    let (a, b) = (u.int_in_range(0..=end)?, u.int_in_range(0..=end)?);
    Ok(a.min(b)..a.max(b))
}

/// Fisher and Yates' shuffle.
pub(super) fn shuffle<T>(u: &mut Unstructured<'_>, items: &mut [T]) -> Result<()> {
    for last in (1..items.len()).rev() {
        items.swap(last, u.int_in_range(0..=last)?);
    }
    Ok(())
}
