//! Lengths of consecutive documents or sequences, with lookup by position.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use twox_hash::XxHash3_128;

use crate::error::{Error, Result};
use crate::pattern::MAX_ARGUMENT;

/// A list of lengths. Clones share memory. The digest is computed once, so that a cache lookup does
/// not read a million lengths.
#[derive(Clone)]
pub(crate) struct Lengths(Arc<Inner>);

/// Steps from the hint before a binary search.
const NEAR: usize = 4;

struct Inner {
    /// Inclusive prefix sums of the lengths.
    ends: Vec<i64>,
    digest: u128,
}

impl Lengths {
    pub(crate) fn new(
        primitive: &'static str,
        argument: &'static str,
        lengths: impl IntoIterator<Item = u64>,
    ) -> Result<Self> {
        let mut ends = Vec::new();
        let mut end = 0i64;
        for length in lengths {
            let sum = u128::from(length) + end as u128;
            if sum > (MAX_ARGUMENT / 2).into() {
                let rule = "lengths that add up to at most 2^60";
                return Err(Error::Argument { primitive, argument, value: sum, rule });
            }
            end = sum as i64;
            ends.push(end);
        }
        ends.shrink_to_fit();
        let mut hasher = XxHash3_128::new();
        ends.iter().for_each(|end| hasher.write(&end.to_le_bytes()));
        let digest = hasher.finish_128();
        Ok(Lengths(Arc::new(Inner { ends, digest })))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.ends.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&self.0.ends[..])
    }

    pub(crate) fn total(&self) -> i64 {
        self.0.ends.last().copied().unwrap_or(0)
    }

    pub(crate) fn longest(&self) -> i64 {
        self.iter().max().unwrap_or(0)
    }

    pub(crate) fn start(&self, index: usize) -> i64 {
        if index == 0 { 0 } else { self.0.ends[index - 1] }
    }

    pub(crate) fn end(&self, index: usize) -> i64 {
        self.0.ends[index]
    }

    pub(crate) fn length(&self, index: usize) -> i64 {
        self.end(index) - self.start(index)
    }

    /// The index of the nonempty range that contains `position`, which must be in `0..total`.
    /// Searches around `hint` first: consecutive lookups have nearby results.
    #[inline]
    pub(crate) fn find(&self, position: i64, hint: usize) -> usize {
        debug_assert!((0..self.total()).contains(&position));
        let ends = &self.0.ends[..];
        let mut at = hint.min(ends.len() - 1);
        // The first range whose end lies beyond the position.
        for _ in 0..NEAR {
            if ends[at] <= position {
                at += 1;
            } else if at > 0 && ends[at - 1] > position {
                at -= 1;
            } else {
                return at;
            }
        }
        ends.partition_point(|&end| end <= position)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = i64> + '_ {
        (0..self.count()).map(|i| self.length(i))
    }
}

impl PartialEq for Lengths {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
            || (self.0.digest == other.0.digest && self.0.ends == other.0.ends)
    }
}

impl Eq for Lengths {}

impl Hash for Lengths {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.digest.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_from_every_hint() {
        let lengths = Lengths::new("documents", "lengths", [0, 3, 0, 0, 1, 7, 2, 0]).unwrap();
        let expected = [1, 1, 1, 4, 5, 5, 5, 5, 5, 5, 5, 6, 6];
        for hint in 0..10 {
            for (position, &index) in expected.iter().enumerate() {
                assert_eq!(lengths.find(position as i64, hint), index, "{position} from {hint}");
            }
        }
    }

    #[test]
    fn sums_are_bounded() {
        assert!(Lengths::new("documents", "lengths", [1 << 60]).is_ok());
        assert!(Lengths::new("documents", "lengths", [1 << 60, 1]).is_err());
        assert!(Lengths::new("documents", "lengths", [u64::MAX, u64::MAX]).is_err());
    }
}
