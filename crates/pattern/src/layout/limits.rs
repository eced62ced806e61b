//! How `Shape::max_bytes` is divided among the lists of a layout.

use super::Run;
use crate::shape::Frame;

impl Frame {
    /// Maximum number of runs. A growing list holds its old and its new memory at once, so its
    /// share is a quarter.
    pub(super) fn max_runs(&self) -> usize {
        (self.max_bytes / 4 / size_of::<Run>() as u64).min(u32::MAX.into()) as usize
    }

    /// Maximum number of intervals per coverage query; up to a dozen lists exist at once.
    pub(super) fn max_intervals(&self) -> usize {
        (self.max_bytes / 1024) as usize
    }

    /// Maximum number of rows or columns, at four bytes each for the index of the first run.
    pub(super) fn max_starts(&self) -> u64 {
        self.max_bytes / 8 / 4
    }
}
