//! The work budget of a call, independent of the machine, and its progress hook. Charged by
//! `coverage` and `layout`.
//!
//! Compiling, counting, hashing, drawing, transposing and reading masks all charge one [`Meter`].
//! A unit is about a nanosecond of one core in a release build; the measured cost of an operation
//! is a constant beside it. Every few million units the meter calls the progress hook, and beyond
//! the budget it halts:
//!
//! ```text
//! spend(units):  spent += units;  if spent ≥ next_poll { poll }
//! poll:          spent > limit → halted (TooMuchWork)
//!                hook breaks   → halted (Stopped)
//! ```
//!
//! A halted meter stays halted. Loops exit early, and the call that owns the meter discards the
//! partial result.

use std::ops::ControlFlow;

use crate::error::Error;

/// A progress hook: called with completed rows and total rows.
pub(crate) type Progress<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// A hook that always continues.
pub(crate) fn ignore_progress(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Units between two calls of the hook, about four milliseconds.
const POLL: u64 = 1 << 22;

/// Units per coverage query of one node.
const COVERAGE_QUERY: u64 = 16;

/// Units per interval appended or merged.
pub(crate) const INTERVAL: u64 = 8;

/// Units per congruence, which takes a modular inverse.
pub(crate) const CONGRUENCE: u64 = 96;

/// Why a meter has halted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Halt {
    TooMuchWork,
    Stopped,
}

/// The work of one call.
pub(crate) struct Meter<'a> {
    spent: u64,
    next_poll: u64,
    limit: u64,
    halt: Option<Halt>,
    progress: Option<&'a mut Progress<'a>>,
    /// Completed rows.
    row: u64,
    /// Total rows.
    rows: u64,
    /// Coverage queries of nodes.
    pub(crate) coverage_queries: u64,
    /// A result had too many intervals and was truncated.
    pub(crate) overflow: bool,
}

impl<'a> Meter<'a> {
    /// A budget of `limit` units for work on `rows` rows.
    pub(crate) fn new(limit: u64, rows: u64, progress: &'a mut Progress<'a>) -> Self {
        Meter { limit, rows, progress: Some(progress), ..Meter::limited(limit) }
    }

    /// A budget without a hook.
    pub(crate) fn limited(limit: u64) -> Self {
        Meter {
            spent: 0,
            next_poll: 0,
            limit,
            halt: None,
            progress: None,
            row: 0,
            rows: 0,
            coverage_queries: 0,
            overflow: false,
        }
    }

    /// For single blocks and pairs, whose work is bounded by the pattern.
    pub(crate) fn unlimited() -> Self {
        Meter { next_poll: u64::MAX, ..Meter::limited(u64::MAX) }
    }

    #[inline]
    pub(crate) fn spend(&mut self, units: u64) {
        self.spent = self.spent.saturating_add(units);
        if self.spent >= self.next_poll {
            self.poll();
        }
    }

    /// Charges a coverage query of one node.
    #[inline]
    pub(crate) fn coverage_query(&mut self) {
        self.coverage_queries += 1;
        self.spend(COVERAGE_QUERY);
    }

    /// Charges an interval; returns whether a result of `intervals` may grow.
    #[inline]
    pub(crate) fn has_room(&mut self, intervals: usize, max_intervals: usize) -> bool {
        self.spend(INTERVAL);
        self.overflow |= intervals >= max_intervals;
        !self.overflow && self.halt.is_none()
    }

    #[cold]
    fn poll(&mut self) {
        if self.halt.is_some() {
            return;
        }
        if self.spent > self.limit {
            self.halt = Some(Halt::TooMuchWork);
        } else if let Some(progress) = &mut self.progress
            && progress(self.row, self.rows).is_break()
        {
            self.halt = Some(Halt::Stopped);
        }
        self.next_poll = self.spent.saturating_add(POLL).min(self.limit.saturating_add(1));
    }

    /// Sets the number of completed rows.
    #[inline]
    pub(crate) fn at_row(&mut self, row: u64) {
        self.row = row;
    }

    /// Units spent so far.
    pub(crate) fn spent(&self) -> u64 {
        self.spent
    }

    #[inline]
    pub(crate) fn halted(&self) -> bool {
        self.halt.is_some()
    }

    /// The error of a halted meter: `work` is the operation, `costliest` returns the most expensive
    /// sub-expression of a row.
    pub(crate) fn error(&self, work: &'static str, costliest: impl FnOnce(u64) -> String) -> Error {
        let (row, rows) = (self.row, self.rows);
        match self.halt {
            Some(Halt::TooMuchWork) => Error::TooMuchWork {
                work,
                expression: costliest(row),
                limit: self.limit,
                row,
                rows,
            },
            _ => Error::Stopped { row, rows },
        }
    }
}
