//! Compilation of a pattern to rows of runs.
//!
//! ```text
//! for each row of query blocks
//!     for each range of blocks (`Evaluator::row`)
//!         Full     one run
//!         Partial  one run; its mask by signature, or on demand
//!         Unknown  classify the blocks of one period, then as above
//!     while rows repeat (`Evaluator::repeating_rows`)
//!         copy the runs of the row above, moved
//! store the most used masks within the budget; the others are computed on demand
//! ```

use std::sync::Arc;

use super::block_ranges::BlockRange;
use super::diagonal::DIAGONAL_WORK;
use super::evaluate::Evaluator;
use super::pool::{BlockKind, FULL_BLOCK, ON_DEMAND_BLOCK, Pool};
use super::{Layout, Run};
use crate::coverage::interval::KeyCoverage;
use crate::error::{Error, Result};
use crate::meter::{Meter, Progress};
use crate::pattern::Pattern;
use crate::shape::Frame;

/// A range of at most this many blocks with different masks is split into one run per block, so
/// that its masks can be stored; a longer one stays one run.
const SHORT: u32 = 4;

/// Maximum number of blocks per period whose kinds are buffered.
const MAX_KINDS: u32 = 1 << 16;

/// Units per row.
const ROW: u64 = 16;
/// Units per run, first touch of its memory included.
const RUN: u64 = 8;

/// Maximum number of rows copied between two searches, so that progress is reported.
const ROWS_AT_ONCE: u32 = 1 << 20;

/// Additional rows to reserve memory for, so that the last few rows do not reallocate the list.
const ROWS_TO_SPARE: usize = 64;

/// Minimum number of repeating rows that pays for the search.
const WORTH_MOVING: u32 = 3;

/// Maximum number of rows between two searches for repeating rows after one that failed; more
/// where a search covers many progressions of keys.
fn max_pause(frame: &Frame) -> u32 {
    (frame.keys.token_ranges().len() / 8).clamp(2, 8) as u32
}

/// Compiles a valid pattern.
pub(super) fn compile(
    pattern: &Arc<Pattern>,
    frame: Frame,
    progress: &mut Progress<'_>,
) -> Result<Layout> {
    let rows = frame.rows.len() as u64;
    let too_large = |row| Error::TooLarge { limit: frame.max_bytes, row, rows };
    if rows > frame.max_starts() {
        return Err(too_large(0));
    }
    let mut progress = |row, rows| progress(row, rows);
    let meter = Meter::new(frame.max_work, rows, &mut progress);
    let mut builder = Builder::new(pattern, &frame, meter);
    let mut starts = Vec::with_capacity(rows as usize + 1);
    starts.push(0);
    if let Err((refused, row)) = builder.all_rows(&mut starts) {
        return Err(match refused {
            Refused::TooLarge => too_large(row),
            Refused::Halted => {
                builder.meter.error("compiling", |row| costliest(pattern, &frame, row))
            }
        });
    }
    let Builder { mut runs, pool, mut meter, .. } = builder;
    let table = pool.select(&mut runs, &mut starts, &mut meter);
    if meter.halted() {
        return Err(meter.error("compiling", |row| costliest(pattern, &frame, row)));
    }
    let coverage_queries = meter.coverage_queries;
    let work = meter.spent();
    runs.shrink_to_fit();
    Ok(Layout::new(frame, Some(pattern.clone()), starts, runs, table, (coverage_queries, work)))
}

/// Work limit for measuring one row of a sub-expression.
const PROBE: u64 = 1 << 19;

/// Maximum number of operands measured per expression.
const MAX_PROBES: usize = 16;

/// Maximum number of characters of a sub-expression in an error.
const MAX_TEXT: usize = 80;

/// The sub-expression with the highest cost in one row of blocks: descends from the whole pattern
/// as long as one operand alone costs at least half of its parent.
pub(super) fn costliest(pattern: &Pattern, frame: &Frame, row: u64) -> String {
    let last = frame.rows.end.saturating_sub(1).max(frame.rows.start);
    let row = (u64::from(frame.rows.start) + row).min(last.into()) as u32;
    let cost = |pattern: &Pattern| {
        let mut builder = Builder::new(pattern, frame, Meter::limited(PROBE));
        let _ = builder.row(row);
        builder.meter.spent()
    };
    let (mut found, mut whole) = (pattern, cost(pattern));
    for _ in 0..MAX_PROBES {
        let parts = found.parts().iter().take(MAX_PROBES);
        let Some((part, max)) = parts.map(|part| (part, cost(part))).max_by_key(|(_, cost)| *cost)
        else {
            break;
        };
        if max < whole / 2 {
            break;
        }
        (found, whole) = (part, max);
    }
    shortened(&found.to_string())
}

/// The text, its middle elided beyond `MAX_TEXT` characters.
fn shortened(text: &str) -> String {
    let count = text.chars().count();
    if count <= MAX_TEXT {
        return text.to_owned();
    }
    let half = MAX_TEXT / 2;
    let (head, tail) = (text.chars().take(half), text.chars().skip(count - half + 1));
    head.chain(['…']).chain(tail).collect()
}

/// Why compilation ended early.
#[derive(Debug, Clone, Copy)]
pub(super) enum Refused {
    /// The runs exceed their limit.
    TooLarge,
    /// The meter has halted.
    Halted,
}

pub(super) struct Builder<'a, 'm> {
    pub(super) meter: Meter<'m>,
    pub(super) evaluator: Evaluator<'a>,
    pub(super) pool: Pool<'a>,
    pub(super) runs: Vec<Run>,
    pub(super) max_runs: usize,
    /// Units of work after which rows are compiled along diagonals.
    diagonal_work: u64,
    /// First run of the current row.
    row_start: usize,
    /// First run of the row above.
    above: usize,
    ranges: Vec<BlockRange>,
    /// Rows until the next search for repeating rows.
    pause: u32,
    last_pause: u32,
    max_pause: u32,
    kinds: Vec<BlockKind>,
}

impl<'a, 'm> Builder<'a, 'm> {
    fn new(pattern: &Pattern, frame: &'a Frame, meter: Meter<'m>) -> Self {
        Builder {
            meter,
            evaluator: Evaluator::new(pattern, frame),
            pool: Pool::new(frame),
            runs: Vec::new(),
            max_runs: frame.max_runs(),
            diagonal_work: DIAGONAL_WORK,
            row_start: 0,
            above: 0,
            ranges: Vec::new(),
            pause: 0,
            last_pause: 0,
            max_pause: max_pause(frame),
            kinds: Vec::new(),
        }
    }

    /// Compiles every row; an error carries the number of completed rows.
    fn all_rows(&mut self, starts: &mut Vec<u32>) -> Result<(), (Refused, u64)> {
        let rows = self.pool.frame().rows.clone();
        let mut row = rows.start;
        while row < rows.end {
            let done = u64::from(row - rows.start);
            self.row(row).map_err(|refused| (refused, done))?;
            starts.push(self.runs.len() as u32);
            row += 1;
            row += self.repeat(row, starts).map_err(|refused| (refused, done))?;
            if self.meter.spent() > self.diagonal_work && self.evaluator.is_toeplitz() {
                self.diagonal_work = u64::MAX;
                row += self.along_diagonals(row, starts).map_err(|refused| (refused, done))?;
            }
        }
        Ok(())
    }

    fn row(&mut self, row: u32) -> Result<(), Refused> {
        self.begin_row(row);
        let mut ranges = std::mem::take(&mut self.ranges);
        self.evaluator.row(row, &mut self.meter, &mut ranges);
        self.check()?;
        for range in &ranges {
            let (start, end) = (range.start, range.end);
            match range.coverage {
                KeyCoverage::Full => self.push(start, end, FULL_BLOCK)?,
                KeyCoverage::Partial if range.period == 1 => {
                    let kind = self.pool.partial(&mut self.evaluator, row, start, &mut self.meter);
                    self.push(start, end, kind)?;
                }
                KeyCoverage::Partial if end - start > SHORT => {
                    self.push(start, end, ON_DEMAND_BLOCK)?
                }
                KeyCoverage::Partial => {
                    for column in start..end {
                        let kind =
                            self.pool.partial(&mut self.evaluator, row, column, &mut self.meter);
                        self.push(column, column + 1, kind)?;
                    }
                }
                KeyCoverage::Unknown => self.unknown(row, range)?,
            }
        }
        self.ranges = ranges;
        Ok(())
    }

    pub(super) fn begin_row(&mut self, row: u32) {
        self.meter.at_row((row - self.pool.frame().rows.start).into());
        self.meter.spend(ROW);
        self.above = self.row_start;
        self.row_start = self.runs.len();
    }

    pub(super) fn check(&self) -> Result<(), Refused> {
        if self.meter.halted() {
            Err(Refused::Halted)
        } else if self.meter.overflow {
            Err(Refused::TooLarge)
        } else {
            Ok(())
        }
    }

    /// Writes the rows from `next` on that repeat the one before it; returns their number. The first
    /// is compiled like any other row and compared with the row above to find the moving runs.
    fn repeat(&mut self, next: u32, starts: &mut Vec<u32>) -> Result<u32, Refused> {
        if self.pause > 0 {
            self.pause -= 1;
            return Ok(0);
        }
        let rows = match self.evaluator.repeating_rows(next - 1, &mut self.meter) {
            Some(rows) => rows.min(ROWS_AT_ONCE),
            None => {
                self.pause = u32::MAX;
                return Ok(0);
            }
        };
        if rows < WORTH_MOVING {
            self.last_pause = (2 * self.last_pause + 1).min(self.max_pause);
            self.pause = self.last_pause;
            return Ok(0);
        }
        self.last_pause = 0;
        self.row(next)?;
        starts.push(self.runs.len() as u32);
        let Some(moves) = self.moves() else { return Ok(1) };
        let more = (rows - 1) as usize;
        let room = self.max_runs.saturating_sub(self.runs.len());
        let copies = moves.len().saturating_mul(more + ROWS_TO_SPARE).min(room);
        if self.runs.capacity() - self.runs.len() < copies {
            // At least twice as long as before, so that many families of rows do not copy the list
            // each; never beyond the bound.
            self.runs.reserve_exact(copies.max(self.runs.len()).min(room));
        }
        for copied in 1..rows {
            self.meter.at_row(u64::from(next + copied - self.pool.frame().rows.start));
            self.meter.spend(ROW + RUN * moves.len() as u64);
            self.check()?;
            let from = self.row_start;
            self.row_start = self.runs.len();
            for (index, &(start, len)) in moves.iter().enumerate() {
                let Run { start: above, len: above_len, mask } = self.runs[from + index];
                let run = Run { start: above + start, len: above_len.wrapping_add(len), mask };
                self.pool.count_use(&run);
                self.runs.push(run);
            }
            if self.runs.len() > self.max_runs {
                return Err(Refused::TooLarge);
            }
            starts.push(self.runs.len() as u32);
        }
        Ok(rows)
    }

    /// The differences of start and length between each run of the last row and the one above;
    /// `None` if the rows differ otherwise, as when the mask pool filled up between them.
    fn moves(&self) -> Option<Vec<(u32, u32)>> {
        let (above, here) = self.runs[self.above..].split_at(self.row_start - self.above);
        let alike = above.len() == here.len();
        let moves = above.iter().zip(here).map(|(above, here)| {
            let start = here.start.wrapping_sub(above.start);
            let end = here.end().wrapping_sub(above.end());
            // A run may move, grow, or lose its first block.
            let shifted = start <= 1 && end <= 1 && above.mask == here.mask;
            shifted.then_some((start, end.wrapping_sub(start)))
        });
        if alike { moves.collect() } else { None }
    }

    fn unknown(&mut self, row: u32, range: &BlockRange) -> Result<(), Refused> {
        let (start, end) = (range.start, range.end);
        let period = match range.period {
            0 => end - start,
            period => period.min(end - start),
        };
        if period == 1 {
            let kind = self.pool.classify(&mut self.evaluator, row, start, &mut self.meter);
            return self.push(start, end, kind);
        }
        if period == end - start || period > MAX_KINDS {
            for column in start..end {
                let kind = self.pool.classify(&mut self.evaluator, row, column, &mut self.meter);
                self.push(column, column + 1, kind)?;
            }
            return Ok(());
        }
        let mut kinds = std::mem::take(&mut self.kinds);
        kinds.clear();
        for column in start..start + period {
            kinds.push(self.pool.classify(&mut self.evaluator, row, column, &mut self.meter));
            self.check()?;
        }
        let result = if end - start > SHORT
            && !kinds.iter().any(|kind| matches!(*kind, BlockKind::Empty | FULL_BLOCK))
        {
            self.push(start, end, ON_DEMAND_BLOCK)
        } else {
            (start..end)
                .zip(kinds.iter().cycle())
                .try_for_each(|(column, kind)| self.push(column, column + 1, *kind))
        };
        self.kinds = kinds;
        result
    }

    pub(super) fn push(&mut self, start: u32, end: u32, kind: BlockKind) -> Result<(), Refused> {
        let BlockKind::Active(mask) = kind else { return self.check() };
        let run = Run { start, len: end - start, mask };
        self.meter.spend(RUN);
        self.pool.count_use(&run);
        push_run(&mut self.runs, self.row_start, run);
        if self.runs.len() > self.max_runs { Err(Refused::TooLarge) } else { self.check() }
    }
}

/// Appends a run to the row that starts at `row_start`, or lengthens its last one.
pub(super) fn push_run(runs: &mut Vec<Run>, row_start: usize, run: Run) {
    if runs.len() > row_start {
        let last = runs.len() - 1;
        let last = &mut runs[last];
        if last.end() == run.start && last.mask == run.mask {
            last.len += run.len;
            return;
        }
    }
    runs.push(run);
}
