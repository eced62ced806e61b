//! Runs with the masks they really have.
//!
//! A run on demand doesn't say which of its blocks have the same mask. The walker knows: blocks a
//! period apart have. [`Parts`] goes through a row in *combs* of blocks with one content, so that
//! counting and hashing cost as much as the runs, not as much as the blocks.

use super::walk::{Stretch, Walker};
use super::{FULL, Layout, ON_DEMAND};

/// The blocks `start, start + step, …`, `count` of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Comb {
    pub(super) start: u32,
    pub(super) step: u32,
    pub(super) count: u32,
}

/// What is in each block of a comb.
pub(super) enum Content<'a> {
    Full,
    Stored(u32),
    Made(&'a [u64]),
}

pub(super) struct Parts<'a> {
    layout: &'a Layout,
    walker: Option<Walker<'a>>,
    stretches: Vec<Stretch>,
    mask: Vec<u64>,
}

impl<'a> Parts<'a> {
    pub(super) fn new(layout: &'a Layout) -> Self {
        let walker = layout.pattern.as_ref().map(|pattern| Walker::new(pattern, &layout.frame));
        let words = layout.block().get() * layout.block().words();
        Parts { layout, walker, stretches: Vec::new(), mask: vec![0; words] }
    }

    /// Calls `visit` for each comb of a row.
    pub(super) fn row(&mut self, row: u32, mut visit: impl FnMut(Comb, Content<'_>)) {
        let runs = self.layout.row(row);
        if runs.iter().any(|run| run.mask == ON_DEMAND) {
            let walker = self.walker.as_mut().expect("masks on demand have a pattern");
            walker.row(row, &mut self.stretches);
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
                stored => visit(whole, Content::Stored(stored)),
            }
        }
    }

    fn made(
        &mut self,
        row: u32,
        start: u32,
        end: u32,
        period: u32,
        visit: &mut impl FnMut(Comb, Content<'_>),
    ) {
        let len = end - start;
        let step = if period == 0 { len } else { period.min(len) };
        let walker = self.walker.as_mut().expect("masks on demand have a pattern");
        for first in 0..step {
            let comb = Comb { start: start + first, step, count: (len - first).div_ceil(step) };
            walker.mask(row, comb.start, &mut self.mask);
            visit(comb, Content::Made(&self.mask));
        }
    }
}
