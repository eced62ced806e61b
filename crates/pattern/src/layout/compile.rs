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

use std::ops::ControlFlow;

use rustc_hash::FxHashMap;

use super::masks::{Interner, MaskTable};
use super::walk::{Seen, Stretch, Walker};
use super::{FULL, Layout, ON_DEMAND, Run};
use crate::error::{Error, Result};
use crate::pattern::Pattern;
use crate::plan::segment::Class;
use crate::shape::{Frame, Shape};

/// A stretch of at most this many blocks with different masks becomes a run for each, so that its
/// masks can be stored; a longer one stays one run.
const SHORT: u32 = 4;

/// Blocks of one period that are remembered while it repeats.
const MOST_KINDS: u32 = 1 << 16;

/// Signatures that are remembered; a pattern with more has masks that are hardly shared.
const MOST_SIGNATURES: usize = 4096;

/// Bytes that masks may take before it is known which are worth storing.
const CANDIDATE_BYTES: u64 = 2 << 20;

/// Masks that a small layout may store whatever its runs take: a window has two or three.
const FEW_MASKS: u64 = 6;

/// Rows between two calls of a progress hook.
const ROWS_A_STEP: u64 = 8192;

/// Rows that are moved at one go, so that progress is still told.
const ROWS_AT_ONCE: u32 = 1 << 20;

/// Rows that must repeat for the work of finding out to be saved.
const WORTH_MOVING: u32 = 3;

/// Rows to let pass, at most, when the last look found none that repeat.
const LONGEST_PAUSE: u32 = 8;

/// What became of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Empty,
    Stored(u32),
}

const ALL: Kind = Kind::Stored(FULL);
const LATER: Kind = Kind::Stored(ON_DEMAND);

pub(super) fn compile(
    pattern: &Pattern,
    shape: &Shape,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Layout> {
    let frame = shape.resolve()?;
    pattern.fits(frame.tokens_q, frame.query_offset, frame.key_end)?;
    let rows = frame.rows.len() as u64;
    let too_large = |row| Error::TooLarge { limit: frame.max_bytes, row, rows };
    if rows * 4 > frame.max_bytes {
        return Err(too_large(0));
    }
    let mut builder = Builder::new(pattern, &frame);
    let mut starts = Vec::with_capacity(rows as usize + 1);
    starts.push(0);
    let mut report = 0;
    let mut row = frame.rows.start;
    while row < frame.rows.end {
        let done = u64::from(row - frame.rows.start);
        if done >= report {
            if progress(done, rows).is_break() {
                return Err(Error::Stopped { row: done, rows });
            }
            report = done + ROWS_A_STEP;
        }
        builder.row(row).map_err(|TooLarge| too_large(done))?;
        starts.push(builder.runs.len() as u32);
        row += 1;
        row += builder.repeat(row, &mut starts).map_err(|TooLarge| too_large(done))?;
    }
    let questions = builder.walker.questions();
    let Builder { mut runs, candidates, uses, .. } = builder;
    let table = settle(&frame, &mut runs, &mut starts, candidates, &uses);
    runs.shrink_to_fit();
    Ok(Layout::new(frame, Some(pattern.clone()), starts, runs, table, questions))
}

/// The runs would outgrow their bound.
struct TooLarge;

struct Builder<'a> {
    frame: &'a Frame,
    walker: Walker<'a>,
    runs: Vec<Run>,
    most_runs: usize,
    /// First run of the row at hand, and of the one above it.
    row_start: usize,
    above: usize,
    stretches: Vec<Stretch>,
    /// Rows to let pass before looking again for rows that repeat.
    pause: u32,
    last_pause: u32,
    candidates: MaskTable,
    candidate_bytes: u64,
    /// Store masks that are used only once too: the caller gave a budget for them.
    store_all: bool,
    uses: Vec<u64>,
    interner: Interner,
    by_signature: FxHashMap<Box<[i64]>, Kind>,
    mask: Vec<u64>,
    kinds: Vec<Kind>,
}

impl<'a> Builder<'a> {
    fn new(pattern: &Pattern, frame: &'a Frame) -> Self {
        let words = frame.block.get() * frame.block.words();
        Builder {
            frame,
            walker: Walker::new(pattern, frame),
            runs: Vec::new(),
            most_runs: frame.most_runs(),
            row_start: 0,
            above: 0,
            stretches: Vec::new(),
            pause: 0,
            last_pause: 0,
            candidates: MaskTable::new(words),
            candidate_bytes: frame.mask_bytes.unwrap_or(CANDIDATE_BYTES),
            store_all: frame.mask_bytes.is_some(),
            uses: Vec::new(),
            interner: Interner::default(),
            by_signature: FxHashMap::default(),
            mask: vec![0; words],
            kinds: Vec::new(),
        }
    }

    fn row(&mut self, row: u32) -> Result<(), TooLarge> {
        self.above = self.row_start;
        self.row_start = self.runs.len();
        let mut stretches = std::mem::take(&mut self.stretches);
        self.walker.row(row, &mut stretches);
        if self.walker.overflow() {
            return Err(TooLarge);
        }
        for stretch in &stretches {
            let (start, end) = (stretch.start, stretch.end);
            match stretch.class {
                Class::Full => self.push(start, end, ALL)?,
                Class::Mixed if stretch.period == 1 => {
                    let kind = self.mixed(row, start);
                    self.push(start, end, kind)?;
                }
                Class::Mixed if end - start > SHORT => self.push(start, end, LATER)?,
                Class::Mixed => {
                    for column in start..end {
                        let kind = self.mixed(row, column);
                        self.push(column, column + 1, kind)?;
                    }
                }
                Class::Unknown => self.unknown(row, stretch)?,
            }
        }
        self.stretches = stretches;
        Ok(())
    }

    /// Writes the rows from `next` on that repeat the one before it, and tells how many they are.
    /// The first is asked about like any other row; how its runs lie to those above tells which of
    /// them move.
    fn repeat(&mut self, next: u32, starts: &mut Vec<u32>) -> Result<u32, TooLarge> {
        if self.pause > 0 {
            self.pause -= 1;
            return Ok(0);
        }
        let rows = match self.walker.steady(next - 1) {
            Some(rows) => rows.min(ROWS_AT_ONCE),
            None => {
                self.pause = u32::MAX;
                return Ok(0);
            }
        };
        if rows < WORTH_MOVING {
            self.last_pause = (2 * self.last_pause + 1).min(LONGEST_PAUSE);
            self.pause = self.last_pause;
            return Ok(0);
        }
        self.last_pause = 0;
        self.row(next)?;
        starts.push(self.runs.len() as u32);
        let Some(moves) = self.moves() else { return Ok(1) };
        let more = (rows - 1) as usize;
        self.runs.reserve(moves.len().saturating_mul(more).min(self.most_runs));
        starts.reserve(more);
        for _ in 1..rows {
            let from = self.row_start;
            self.row_start = self.runs.len();
            for (index, &(start, len)) in moves.iter().enumerate() {
                let Run { start: above, len: above_len, mask } = self.runs[from + index];
                let run = Run { start: above + start, len: above_len.wrapping_add(len), mask };
                if let Some(id) = run.stored() {
                    self.uses[id as usize] += u64::from(run.len);
                }
                self.runs.push(run);
            }
            if self.runs.len() > self.most_runs {
                return Err(TooLarge);
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

    fn unknown(&mut self, row: u32, stretch: &Stretch) -> Result<(), TooLarge> {
        let (start, end) = (stretch.start, stretch.end);
        let period = match stretch.period {
            0 => end - start,
            period => period.min(end - start),
        };
        if period == 1 {
            let kind = self.look(row, start);
            return self.push(start, end, kind);
        }
        if period == end - start || period > MOST_KINDS {
            for column in start..end {
                let kind = self.look(row, column);
                self.push(column, column + 1, kind)?;
            }
            return Ok(());
        }
        let mut kinds = std::mem::take(&mut self.kinds);
        kinds.clear();
        kinds.extend((start..start + period).map(|column| self.look(row, column)));
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

    /// The mask of a block that is known to be Partial.
    fn mixed(&mut self, row: u32, column: u32) -> Kind {
        self.recall(row, column).unwrap_or(LATER)
    }

    /// What there is in a block of which nothing is known.
    fn look(&mut self, row: u32, column: u32) -> Kind {
        self.recall(row, column).unwrap_or_else(|| match self.walker.classify(row, column) {
            Seen::Nothing => Kind::Empty,
            Seen::Everything => ALL,
            Seen::Some => LATER,
        })
    }

    /// The kind of a block by its signature; made once, then remembered. `None` where it has no
    /// signature or there is no more room.
    fn recall(&mut self, row: u32, column: u32) -> Option<Kind> {
        let room = (self.candidates.bytes() as u64) < self.candidate_bytes
            && (self.store_all || self.by_signature.len() < MOST_SIGNATURES);
        let Some(signature) = self.walker.signature(row, column) else {
            let make = room && self.store_all;
            return make.then(|| self.make(row, column));
        };
        if let Some(&kind) = self.by_signature.get(signature) {
            return Some(kind);
        }
        if !room {
            return None;
        }
        let signature = signature.into();
        let kind = self.make(row, column);
        self.by_signature.insert(signature, kind);
        Some(kind)
    }

    /// Makes the mask of a block and finds out what it is.
    fn make(&mut self, row: u32, column: u32) -> Kind {
        self.walker.mask(row, column, &mut self.mask);
        let tokens = |range: std::ops::Range<i64>| (range.end - range.start) as u64;
        let frame = self.frame;
        let pairs = tokens(frame.row_tokens(row)) * tokens(frame.column_tokens(column));
        match u64::from(super::masks::ones(&self.mask)) {
            0 => Kind::Empty,
            ones if ones == pairs => ALL,
            _ => Kind::Stored(self.interner.intern(&mut self.candidates, &self.mask)),
        }
    }

    fn push(&mut self, start: u32, end: u32, kind: Kind) -> Result<(), TooLarge> {
        let Kind::Stored(mask) = kind else { return Ok(()) };
        if mask < ON_DEMAND {
            let id = mask as usize;
            if self.uses.len() <= id {
                self.uses.resize(id + 1, 0);
            }
            self.uses[id] += u64::from(end - start);
        }
        push_run(&mut self.runs, self.row_start, Run { start, len: end - start, mask });
        if self.runs.len() > self.most_runs { Err(TooLarge) } else { Ok(()) }
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

/// Keeps the masks that are used most, within the budget, and rewrites the runs accordingly.
fn settle(
    frame: &Frame,
    runs: &mut Vec<Run>,
    starts: &mut [u32],
    candidates: MaskTable,
    uses: &[u64],
) -> MaskTable {
    let each = candidates.mask_bytes() as u64;
    let budget = frame.mask_bytes.unwrap_or_else(|| {
        let eighth = size_of_val(&runs[..]) as u64 / 8;
        eighth.max(FEW_MASKS * each).min(CANDIDATE_BYTES)
    });
    let room = (budget / each) as usize;
    let mut by_use: Vec<u32> = (0..candidates.len() as u32).collect();
    if by_use.len() <= room {
        let mut table = candidates;
        table.shrink();
        return table;
    }
    by_use.sort_by_key(|&id| std::cmp::Reverse(uses.get(id as usize).copied().unwrap_or(0)));
    by_use.truncate(room);
    by_use.sort_unstable();

    let mut table = MaskTable::new(frame.block.get() * frame.block.words());
    let mut renamed = vec![ON_DEMAND; candidates.len()];
    for id in by_use {
        renamed[id as usize] = table.push(candidates.get(id));
    }
    table.shrink();

    // Runs that lost their masks may touch: write the list anew over itself.
    let mut written = 0;
    let mut from = 0;
    for start in starts.iter_mut().skip(1) {
        let (row_start, to) = (written, *start as usize);
        for read in from..to {
            let mut run = runs[read];
            if run.mask < ON_DEMAND {
                run.mask = renamed[run.mask as usize];
            }
            let joins = written > row_start && {
                let last = &runs[written - 1];
                last.end() == run.start && last.mask == run.mask
            };
            if joins {
                runs[written - 1].len += run.len;
            } else {
                runs[written] = run;
                written += 1;
            }
        }
        from = to;
        *start = written as u32;
    }
    runs.truncate(written);
    table
}
