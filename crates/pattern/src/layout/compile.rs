//! Rows of runs from a pattern.
//!
//! ```text
//! for each row of query blocks
//!     for each stretch of blocks that the walker finds
//!         Full     one run
//!         Mixed    one run; its mask by signature, or on demand
//!         Unknown  look at one period of it, then as above
//!     while the walker knows that rows repeat
//!         the runs of the row above, moved
//! keep the masks that are used most, within the budget; the rest are made on demand
//! ```

use super::diagonal::COSTLY;
use super::pool::{ALL, Kind, LATER, Pool};
use super::walk::{Stretch, Walker};
use super::{Layout, Run};
use crate::error::{Error, Result};
use crate::meter::{Meter, Progress};
use crate::pattern::Pattern;
use crate::plan::segment::Class;
use crate::shape::{Frame, Shape};

/// A stretch of at most this many blocks with different masks becomes a run for each, so that its
/// masks can be stored; a longer one stays one run.
const SHORT: u32 = 4;

/// Blocks of one period that are remembered while it repeats.
const MOST_KINDS: u32 = 1 << 16;

/// Units of a row, and of a run of it, whose memory is touched for the first time.
const ROW: u64 = 16;
const RUN: u64 = 8;

/// Rows that are moved at one go, so that progress is still told.
const ROWS_AT_ONCE: u32 = 1 << 20;

/// Rows that room is made for beyond those that are moved, so that the list needn't grow for the
/// few rows at the end.
const ROWS_TO_SPARE: usize = 64;

/// Rows that must repeat for the work of finding out to be saved.
const WORTH_MOVING: u32 = 3;

/// Rows to let pass, at most, when the last look found none that repeat: more where a look goes
/// through many progressions of keys.
fn longest_pause(frame: &Frame) -> u32 {
    (frame.keys.pieces().len() / 8).clamp(2, 8) as u32
}

pub(super) fn compile(
    pattern: &Pattern,
    shape: &Shape,
    progress: &mut Progress<'_>,
) -> Result<Layout> {
    pattern.check()?;
    let frame = shape.resolve()?;
    pattern.fits(frame.tokens_q, frame.query_offset, frame.key_end)?;
    let rows = frame.rows.len() as u64;
    let too_large = |row| Error::TooLarge { limit: frame.max_bytes, row, rows };
    if rows * 4 > frame.max_bytes {
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
    let table = pool.settle(&mut runs, &mut starts, &mut meter);
    if meter.halted() {
        return Err(meter.error("compiling", |row| costliest(pattern, &frame, row)));
    }
    let questions = meter.questions;
    let work = meter.spent();
    runs.shrink_to_fit();
    Ok(Layout::new(frame, Some(pattern.clone()), starts, runs, table, (questions, work)))
}

/// Units that a sub-expression may take while it is found out how much one row of it costs.
const PROBE: u64 = 1 << 19;

/// Sub-expressions of one expression that are tried, at most.
const MOST_PROBES: usize = 16;

/// Characters of a sub-expression that an error shows.
const MOST_TEXT: usize = 80;

/// The sub-expression that makes one row of blocks cost most: from the whole pattern on, a part
/// that alone costs at least half of what it stands in.
pub(super) fn costliest(pattern: &Pattern, frame: &Frame, row: u64) -> String {
    let last = frame.rows.end.saturating_sub(1).max(frame.rows.start);
    let row = (u64::from(frame.rows.start) + row).min(last.into()) as u32;
    let cost = |pattern: &Pattern| {
        let mut builder = Builder::new(pattern, frame, Meter::limited(PROBE));
        let _ = builder.row(row);
        builder.meter.spent()
    };
    let (mut found, mut whole) = (pattern, cost(pattern));
    for _ in 0..MOST_PROBES {
        let parts = found.parts().iter().take(MOST_PROBES);
        let Some((part, most)) = parts.map(|part| (part, cost(part))).max_by_key(|(_, cost)| *cost)
        else {
            break;
        };
        if most < whole / 2 {
            break;
        }
        (found, whole) = (part, most);
    }
    shortened(&found.to_string())
}

/// At most so many characters of a text, its middle left out.
fn shortened(text: &str) -> String {
    let count = text.chars().count();
    if count <= MOST_TEXT {
        return text.to_owned();
    }
    let half = MOST_TEXT / 2;
    let (head, tail) = (text.chars().take(half), text.chars().skip(count - half + 1));
    head.chain(['…']).chain(tail).collect()
}

/// Why rows aren't compiled to the end.
#[derive(Debug, Clone, Copy)]
pub(super) enum Refused {
    /// The runs would outgrow their bound.
    TooLarge,
    /// The meter has halted.
    Halted,
}

pub(super) struct Builder<'a, 'm> {
    pub(super) meter: Meter<'m>,
    pub(super) walker: Walker<'a>,
    pub(super) pool: Pool<'a>,
    pub(super) runs: Vec<Run>,
    pub(super) most_runs: usize,
    /// Units of work after which diagonals are looked at instead.
    costly: u64,
    /// First run of the row at hand, and of the one above it.
    row_start: usize,
    above: usize,
    stretches: Vec<Stretch>,
    /// Rows to let pass before looking again for rows that repeat.
    pause: u32,
    last_pause: u32,
    longest_pause: u32,
    kinds: Vec<Kind>,
}

impl<'a, 'm> Builder<'a, 'm> {
    fn new(pattern: &Pattern, frame: &'a Frame, meter: Meter<'m>) -> Self {
        Builder {
            meter,
            walker: Walker::new(pattern, frame),
            pool: Pool::new(frame),
            runs: Vec::new(),
            most_runs: frame.most_runs(),
            costly: COSTLY,
            row_start: 0,
            above: 0,
            stretches: Vec::new(),
            pause: 0,
            last_pause: 0,
            longest_pause: longest_pause(frame),
            kinds: Vec::new(),
        }
    }

    /// Compiles every row; a failure comes with the number of rows that are done.
    fn all_rows(&mut self, starts: &mut Vec<u32>) -> Result<(), (Refused, u64)> {
        let rows = self.pool.frame().rows.clone();
        let mut row = rows.start;
        while row < rows.end {
            let done = u64::from(row - rows.start);
            self.row(row).map_err(|refused| (refused, done))?;
            starts.push(self.runs.len() as u32);
            row += 1;
            row += self.repeat(row, starts).map_err(|refused| (refused, done))?;
            if self.meter.spent() > self.costly && self.walker.by_difference() {
                self.costly = u64::MAX;
                row += self.along_diagonals(row, starts).map_err(|refused| (refused, done))?;
            }
        }
        Ok(())
    }

    fn row(&mut self, row: u32) -> Result<(), Refused> {
        self.begin_row(row);
        let mut stretches = std::mem::take(&mut self.stretches);
        self.walker.row(row, &mut self.meter, &mut stretches);
        self.check()?;
        for stretch in &stretches {
            let (start, end) = (stretch.start, stretch.end);
            match stretch.class {
                Class::Full => self.push(start, end, ALL)?,
                Class::Mixed if stretch.period == 1 => {
                    let kind = self.pool.mixed(&mut self.walker, row, start, &mut self.meter);
                    self.push(start, end, kind)?;
                }
                Class::Mixed if end - start > SHORT => self.push(start, end, LATER)?,
                Class::Mixed => {
                    for column in start..end {
                        let kind = self.pool.mixed(&mut self.walker, row, column, &mut self.meter);
                        self.push(column, column + 1, kind)?;
                    }
                }
                Class::Unknown => self.unknown(row, stretch)?,
            }
        }
        self.stretches = stretches;
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

    /// Writes the rows from `next` on that repeat the one before it, and tells how many they are.
    /// The first is asked about like any other row; how its runs lie to those above tells which of
    /// them move.
    fn repeat(&mut self, next: u32, starts: &mut Vec<u32>) -> Result<u32, Refused> {
        if self.pause > 0 {
            self.pause -= 1;
            return Ok(0);
        }
        let rows = match self.walker.steady(next - 1, &mut self.meter) {
            Some(rows) => rows.min(ROWS_AT_ONCE),
            None => {
                self.pause = u32::MAX;
                return Ok(0);
            }
        };
        if rows < WORTH_MOVING {
            self.last_pause = (2 * self.last_pause + 1).min(self.longest_pause);
            self.pause = self.last_pause;
            return Ok(0);
        }
        self.last_pause = 0;
        self.row(next)?;
        starts.push(self.runs.len() as u32);
        let Some(moves) = self.moves() else { return Ok(1) };
        let more = (rows - 1) as usize;
        self.runs.reserve(moves.len().saturating_mul(more + ROWS_TO_SPARE).min(self.most_runs));
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
            if self.runs.len() > self.most_runs {
                return Err(Refused::TooLarge);
            }
            starts.push(self.runs.len() as u32);
        }
        Ok(rows)
    }

    /// By how much each run of the last row starts later and is longer than the one above it;
    /// `None` if the two rows aren't alike after all, which is when room for masks ran out between
    /// them.
    fn moves(&self) -> Option<Vec<(u32, u32)>> {
        let (above, here) = self.runs[self.above..].split_at(self.row_start - self.above);
        let alike = above.len() == here.len();
        let moves = above.iter().zip(here).map(|(above, here)| {
            let start = here.start.wrapping_sub(above.start);
            let end = here.end().wrapping_sub(above.end());
            // A run may grow or move, or lose its first block as it stands at its end.
            let steady = start <= 1 && end <= 1 && above.mask == here.mask;
            steady.then_some((start, end.wrapping_sub(start)))
        });
        if alike { moves.collect() } else { None }
    }

    fn unknown(&mut self, row: u32, stretch: &Stretch) -> Result<(), Refused> {
        let (start, end) = (stretch.start, stretch.end);
        let period = match stretch.period {
            0 => end - start,
            period => period.min(end - start),
        };
        if period == 1 {
            let kind = self.pool.look(&mut self.walker, row, start, &mut self.meter);
            return self.push(start, end, kind);
        }
        if period == end - start || period > MOST_KINDS {
            for column in start..end {
                let kind = self.pool.look(&mut self.walker, row, column, &mut self.meter);
                self.push(column, column + 1, kind)?;
            }
            return Ok(());
        }
        let mut kinds = std::mem::take(&mut self.kinds);
        kinds.clear();
        for column in start..start + period {
            kinds.push(self.pool.look(&mut self.walker, row, column, &mut self.meter));
            self.check()?;
        }
        let result = if end - start > SHORT
            && !kinds.iter().any(|kind| matches!(*kind, Kind::Empty | ALL))
        {
            self.push(start, end, LATER)
        } else {
            (start..end)
                .zip(kinds.iter().cycle())
                .try_for_each(|(column, kind)| self.push(column, column + 1, *kind))
        };
        self.kinds = kinds;
        result
    }

    pub(super) fn push(&mut self, start: u32, end: u32, kind: Kind) -> Result<(), Refused> {
        let Kind::Active(mask) = kind else { return self.check() };
        let run = Run { start, len: end - start, mask };
        self.meter.spend(RUN);
        self.pool.count_use(&run);
        push_run(&mut self.runs, self.row_start, run);
        if self.runs.len() > self.most_runs { Err(Refused::TooLarge) } else { self.check() }
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
