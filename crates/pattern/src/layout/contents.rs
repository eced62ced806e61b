//! Groups of blocks with equal masks, for counting and hashing.
//!
//! The masks of an on-demand run repeat with the period of its block range. [`Contents`] visits a
//! row in groups of blocks with one content and caches contents by signature, so that counting and
//! hashing cost as much as the runs, not as much as the blocks.

use rustc_hash::FxHashMap;

use super::block_ranges::BlockRange;
use super::diagonal::DIAGONAL_WORK;
use super::digest::hash_mask;
use super::evaluate::Evaluator;
use super::masks::ones;
use super::{FULL, Layout, ON_DEMAND};
use crate::error::Result;
use crate::meter::Meter;

/// Maximum number of cached signatures.
const MAX_SIGNATURES: usize = 1 << 14;

/// Units per run or group.
const RUN: u64 = 24;

/// The blocks `start, start + step, …`, `count` of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockGroup {
    pub(super) start: u32,
    pub(super) step: u32,
    pub(super) count: u32,
}

/// The content of each block of a group.
#[derive(Debug, Clone, Copy)]
pub(super) enum BlockContent {
    Full,
    /// Active pairs of the mask, and its hash.
    Mask(u32, u128),
}

impl BlockContent {
    fn of(mask: &[u64]) -> Self {
        BlockContent::Mask(ones(mask), hash_mask(mask))
    }
}

/// A reduction over the blocks of rows.
pub(super) trait Accumulator {
    /// Adds blocks to the current row.
    fn add(&mut self, row: u32, group: BlockGroup, content: BlockContent);

    fn end_row(&mut self);

    /// Slides the window of `columns` whole columns by one: a block enters on the left and one
    /// leaves on the right. The window starts empty.
    fn slide(&mut self, columns: u32, enters: Option<BlockContent>, leaves: Option<BlockContent>);

    /// Adds the blocks of the window to the current row.
    fn add_window(&mut self);
}

pub(super) struct Contents<'a, 'm> {
    pub(super) layout: &'a Layout,
    pub(super) meter: Meter<'m>,
    evaluator: Option<Evaluator<'a>>,
    ranges: Vec<BlockRange>,
    stored: Vec<BlockContent>,
    by_signature: FxHashMap<Box<[i64]>, BlockContent>,
    mask: Vec<u64>,
}

impl<'a, 'm> Contents<'a, 'm> {
    pub(super) fn new(layout: &'a Layout, meter: Meter<'m>) -> Self {
        let evaluator =
            layout.pattern.as_ref().map(|pattern| Evaluator::new(pattern, &layout.frame));
        let words = layout.block().get() * layout.block().words();
        let stored = 0..layout.content.table.len() as u32;
        Contents {
            layout,
            meter,
            evaluator,
            ranges: Vec::new(),
            stored: stored.map(|id| BlockContent::of(layout.content.table.get(id))).collect(),
            by_signature: FxHashMap::default(),
            mask: vec![0; words],
        }
    }

    /// Reduces all rows; `work` names the operation in errors.
    pub(super) fn add_rows(
        mut self,
        work: &'static str,
        accumulator: &mut impl Accumulator,
    ) -> Result<()> {
        let rows = self.layout.rows();
        let mut row = rows.start;
        let mut diagonal_work = DIAGONAL_WORK;
        while row < rows.end {
            self.meter.at_row((row - rows.start).into());
            self.row(row, |group, content| accumulator.add(row, group, content));
            accumulator.end_row();
            row += 1;
            let toeplitz = |evaluator: &Evaluator<'_>| evaluator.is_toeplitz();
            if self.meter.spent() > diagonal_work && self.evaluator.as_ref().is_some_and(toeplitz) {
                diagonal_work = u64::MAX;
                row += self.along_diagonals(row, accumulator);
            }
            if self.meter.halted() {
                return Err(self.layout.halted(&self.meter, work));
            }
        }
        Ok(())
    }

    /// Calls `visit` for each group of a row.
    fn row(&mut self, row: u32, mut visit: impl FnMut(BlockGroup, BlockContent)) {
        let runs = self.layout.row(row);
        self.meter.spend(RUN * (1 + runs.len() as u64));
        if runs.iter().any(|run| run.mask == ON_DEMAND) {
            let evaluator = self.evaluator.as_mut().expect("masks on demand have a pattern");
            evaluator.row(row, &mut self.meter, &mut self.ranges);
            if self.meter.halted() {
                return;
            }
        }
        let mut at = 0;
        for run in runs {
            let whole = BlockGroup { start: run.start, step: 1, count: run.len };
            match run.mask {
                FULL => visit(whole, BlockContent::Full),
                ON_DEMAND => {
                    while self.ranges[at].end <= run.start {
                        at += 1;
                    }
                    while at < self.ranges.len() && self.ranges[at].start < run.end() {
                        let BlockRange { start, end, period, .. } = self.ranges[at];
                        self.add_on_demand(
                            row,
                            start.max(run.start),
                            end.min(run.end()),
                            period,
                            &mut visit,
                        );
                        if end > run.end() {
                            break;
                        }
                        at += 1;
                    }
                }
                stored => visit(whole, self.stored[stored as usize]),
            }
        }
    }

    fn add_on_demand(
        &mut self,
        row: u32,
        start: u32,
        end: u32,
        period: u32,
        visit: &mut impl FnMut(BlockGroup, BlockContent),
    ) {
        let len = end - start;
        let step = if period == 0 { len } else { period.min(len) };
        for first in 0..step {
            if self.meter.halted() {
                return;
            }
            let group =
                BlockGroup { start: start + first, step, count: (len - first).div_ceil(step) };
            self.meter.spend(RUN);
            visit(group, self.content_of(row, group.start));
        }
    }

    pub(super) fn content_of(&mut self, row: u32, column: u32) -> BlockContent {
        let evaluator = self.evaluator.as_mut().expect("masks on demand have a pattern");
        let key: Option<Box<[i64]>> = match evaluator.signature(row, column, &mut self.meter) {
            None => None,
            Some(signature) => match self.by_signature.get(signature) {
                Some(content) => return *content,
                None => (self.by_signature.len() < MAX_SIGNATURES).then(|| signature.into()),
            },
        };
        evaluator.mask(row, column, &mut self.meter, &mut self.mask);
        self.meter.spend(self.mask.len() as u64);
        let content = BlockContent::of(&self.mask);
        if let Some(key) = key {
            self.by_signature.insert(key, content);
        }
        content
    }
}
