//! Runs with the masks they really have.
//!
//! A run on demand doesn't say which of its blocks have the same mask. The walker knows: blocks a
//! period apart have. [`Parts`] goes through a row in *combs* of blocks with one content, and
//! remembers by signature what it has made, so that counting and hashing cost as much as the runs,
//! not as much as the blocks.

use rustc_hash::FxHashMap;

use super::diagonal::COSTLY;
use super::digest::hash_mask;
use super::masks::ones;
use super::walk::{Stretch, Walker};
use super::{FULL, Layout, ON_DEMAND};
use crate::error::Result;
use crate::meter::Meter;

/// Signatures that are remembered.
const MOST_SIGNATURES: usize = 1 << 14;

/// Units of a run or comb that is counted or hashed.
const RUN: u64 = 24;

/// The blocks `start, start + step, …`, `count` of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Comb {
    pub(super) start: u32,
    pub(super) step: u32,
    pub(super) count: u32,
}

/// What is in each block of a comb.
#[derive(Debug, Clone, Copy)]
pub(super) enum Content {
    Full,
    /// Pairs that the mask lets through, and a hash of it.
    Mask(u32, u128),
}

impl Content {
    fn of(mask: &[u64]) -> Self {
        Content::Mask(ones(mask), hash_mask(mask))
    }
}

/// What is added up over the blocks of rows.
pub(super) trait Fold {
    /// Blocks of the row at hand.
    fn add(&mut self, row: u32, comb: Comb, content: Content);

    fn end_row(&mut self);

    /// Moves the window, which has so many whole columns, along by one: a block enters it on the
    /// left and one leaves it on the right; it starts empty.
    fn slide(&mut self, columns: u32, enters: Option<Content>, leaves: Option<Content>);

    /// Adds the blocks of the window to the row at hand.
    fn add_window(&mut self);
}

pub(super) struct Parts<'a, 'm> {
    pub(super) layout: &'a Layout,
    pub(super) meter: Meter<'m>,
    walker: Option<Walker<'a>>,
    stretches: Vec<Stretch>,
    stored: Vec<Content>,
    by_signature: FxHashMap<Box<[i64]>, Content>,
    mask: Vec<u64>,
}

impl<'a, 'm> Parts<'a, 'm> {
    pub(super) fn new(layout: &'a Layout, meter: Meter<'m>) -> Self {
        let walker = layout.pattern.as_ref().map(|pattern| Walker::new(pattern, &layout.frame));
        let words = layout.block().get() * layout.block().words();
        let stored = 0..layout.table.len() as u32;
        Parts {
            layout,
            meter,
            walker,
            stretches: Vec::new(),
            stored: stored.map(|id| Content::of(layout.table.get(id))).collect(),
            by_signature: FxHashMap::default(),
            mask: vec![0; words],
        }
    }

    /// Adds up all rows; `work` says what for.
    pub(super) fn add_rows(mut self, work: &'static str, fold: &mut impl Fold) -> Result<()> {
        let rows = self.layout.rows();
        let mut row = rows.start;
        let mut costly = COSTLY;
        while row < rows.end {
            self.meter.at_row((row - rows.start).into());
            self.row(row, |comb, content| fold.add(row, comb, content));
            fold.end_row();
            row += 1;
            let by_difference = |walker: &Walker<'_>| walker.by_difference();
            if self.meter.spent() > costly && self.walker.as_ref().is_some_and(by_difference) {
                costly = u64::MAX;
                row += self.along_diagonals(row, fold);
            }
            if self.meter.halted() {
                return Err(self.layout.halted(&self.meter, work));
            }
        }
        Ok(())
    }

    /// Calls `visit` for each comb of a row.
    fn row(&mut self, row: u32, mut visit: impl FnMut(Comb, Content)) {
        let runs = self.layout.row(row);
        self.meter.spend(RUN * (1 + runs.len() as u64));
        if runs.iter().any(|run| run.mask == ON_DEMAND) {
            let walker = self.walker.as_mut().expect("masks on demand have a pattern");
            walker.row(row, &mut self.meter, &mut self.stretches);
            if self.meter.halted() {
                return;
            }
        }
        let mut at = 0;
        for run in runs {
            let whole = Comb { start: run.start, step: 1, count: run.len };
            match run.mask {
                FULL => visit(whole, Content::Full),
                ON_DEMAND => {
                    while self.stretches[at].end <= run.start {
                        at += 1;
                    }
                    while at < self.stretches.len() && self.stretches[at].start < run.end() {
                        let Stretch { start, end, period, .. } = self.stretches[at];
                        self.made(
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

    fn made(
        &mut self,
        row: u32,
        start: u32,
        end: u32,
        period: u32,
        visit: &mut impl FnMut(Comb, Content),
    ) {
        let len = end - start;
        let step = if period == 0 { len } else { period.min(len) };
        for first in 0..step {
            if self.meter.halted() {
                return;
            }
            let comb = Comb { start: start + first, step, count: (len - first).div_ceil(step) };
            self.meter.spend(RUN);
            visit(comb, self.make(row, comb.start));
        }
    }

    pub(super) fn make(&mut self, row: u32, column: u32) -> Content {
        let walker = self.walker.as_mut().expect("masks on demand have a pattern");
        let key: Option<Box<[i64]>> = match walker.signature(row, column, &mut self.meter) {
            None => None,
            Some(signature) => match self.by_signature.get(signature) {
                Some(content) => return *content,
                None => (self.by_signature.len() < MOST_SIGNATURES).then(|| signature.into()),
            },
        };
        walker.mask(row, column, &mut self.meter, &mut self.mask);
        self.meter.spend(self.mask.len() as u64);
        let content = Content::of(&self.mask);
        if let Some(key) = key {
            self.by_signature.insert(key, content);
        }
        content
    }
}
