//! Ranges of positions: the operands of a coverage query.

use crate::arith::div_ceil;

/// The positions `start, start + step, …`, `len` of them; never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PositionRange {
    pub(crate) start: i64,
    pub(crate) step: i64,
    pub(crate) len: i64,
}

impl PositionRange {
    pub(super) fn one(position: i64) -> Self {
        PositionRange { start: position, step: 1, len: 1 }
    }

    pub(super) fn at(&self, index: i64) -> i64 {
        self.start + self.step * index
    }

    pub(super) fn last(&self) -> i64 {
        self.at(self.len - 1)
    }

    /// `len` positions from index `start` on.
    pub(crate) fn part(&self, start: i64, len: i64) -> Self {
        PositionRange { start: self.at(start), step: self.step, len }
    }

    pub(super) fn moved(&self, by: i64) -> Self {
        PositionRange { start: self.start + by, ..*self }
    }

    /// The first index (at most `len`) whose position is at least `position`.
    #[inline]
    pub(super) fn index_at_least(&self, position: i64) -> i64 {
        div_ceil(position - self.start, self.step).max(0).min(self.len)
    }
}

/// The keys `low..high` of a progression.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyRange {
    /// Position of key 0.
    pub(crate) start: i64,
    pub(crate) step: i64,
    pub(crate) low: i64,
    pub(crate) high: i64,
    /// Keys per block: gaps and periods below it are not resolved.
    pub(crate) block: i64,
    /// Maximum number of intervals in the result.
    pub(crate) max_intervals: usize,
}

impl KeyRange {
    /// The first index in `low..=high` whose position is at least `position`.
    #[inline]
    pub(super) fn index_at_least(&self, position: i64) -> i64 {
        let index = div_ceil(position - self.start, self.step);
        index.max(self.low).min(self.high)
    }

    pub(super) fn position(&self, index: i64) -> i64 {
        self.start + self.step * index
    }

    pub(super) fn within(&self, low: i64, high: i64) -> Self {
        KeyRange { low, high, ..*self }
    }

    pub(super) fn moved(&self, by: i64) -> Self {
        KeyRange { start: self.start + by, ..*self }
    }
}

/// Which of `keys` do `queries` attend to?
#[derive(Debug, Clone, Copy)]
pub(super) struct CoverageQuery {
    pub(super) queries: PositionRange,
    pub(super) keys: KeyRange,
}

impl CoverageQuery {
    pub(super) fn within(&self, low: i64, high: i64) -> Self {
        CoverageQuery { keys: self.keys.within(low, high), ..*self }
    }
}
