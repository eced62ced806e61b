//! Counted work: what a call on patterns and layouts costs, whatever the machine.
//!
//! Compiling, counting, hashing, drawing, transposing and reading masks all charge one [`Meter`].
//! A unit is about a nanosecond of one core in a release build; what an operation is charged was
//! measured once and is a constant beside the operation. Every few million units the meter calls
//! the progress hook of the call, and past the budget it halts:
//!
//! ```text
//! spend(units):  spent += units;  if spent ≥ next_poll { poll }
//! poll:          spent > limit → halted (TooMuchWork)
//!                hook breaks   → halted (Stopped)
//! ```
//!
//! A halted meter stays halted. Loops leave early when they see that, and what they have made so
//! far is thrown away by the call that owns the meter.

use std::ops::ControlFlow;

use crate::error::Error;
use crate::plan::Keys;

/// What calls are given to report to: rows done and rows in all.
pub(crate) type Progress<'a> = dyn FnMut(u64, u64) -> ControlFlow<()> + 'a;

/// A hook that lets the work go on.
pub(crate) fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Units between two calls of the hook, about four milliseconds.
const POLL: u64 = 1 << 22;

/// Units of a coverage query that one node answers.
const QUESTION: u64 = 16;

/// Units of a segment that is appended or merged.
pub(crate) const SEGMENT: u64 = 8;

/// Units of solving a congruence, which takes an inverse.
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
    /// Rows done, and rows in all.
    row: u64,
    rows: u64,
    /// Coverage queries that nodes have answered.
    pub(crate) questions: u64,
    /// An answer had too many segments and was cut short.
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
            questions: 0,
            overflow: false,
        }
    }

    /// For single blocks and positions, whose work is bounded by the pattern.
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

    /// A coverage query that one node answers.
    #[inline]
    pub(crate) fn question(&mut self) {
        self.questions += 1;
        self.spend(QUESTION);
    }

    /// Charges a segment, and tells whether an answer of so many may still grow.
    #[inline]
    pub(crate) fn has_room(&mut self, segments: usize, keys: &Keys) -> bool {
        self.spend(SEGMENT);
        self.overflow |= segments >= keys.most;
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

    /// Notes how many rows are done.
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

    /// The error of a halted meter: `work` is what took so long, `costliest` names the
    /// sub-expression by the row at hand.
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
