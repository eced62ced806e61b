//! Which masks a layout stores.
//!
//! While rows are compiled every mask that has a signature is a candidate: it is made once and
//! counted each time it is used. When all rows are there, those that are used most are stored,
//! within the budget, and the rest are forgotten: their runs are made on demand.

use rustc_hash::FxHashMap;

use super::masks::{Interner, MaskTable, ones};
use super::walk::{Seen, Walker};
use super::{FULL, ON_DEMAND, Run};
use crate::meter::Meter;
use crate::shape::Frame;

/// Signatures that are remembered; a pattern with more has masks that are hardly shared.
const MOST_SIGNATURES: usize = 4096;

/// Bytes that candidates may take.
const CANDIDATE_BYTES: u64 = 2 << 20;

/// Masks that a small layout may store whatever its runs take: a window has two or three.
const FEW_MASKS: u64 = 6;

/// Units of looking a signature up.
const RECALL: u64 = 32;

/// What became of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Empty,
    /// The `mask` of its run.
    Active(u32),
}

/// Every pair is seen.
pub(super) const ALL: Kind = Kind::Active(FULL);

/// The mask is made when it is read.
pub(super) const LATER: Kind = Kind::Active(ON_DEMAND);

pub(super) struct Pool<'a> {
    frame: &'a Frame,
    candidates: MaskTable,
    candidate_bytes: u64,
    /// Masks without a signature are candidates too: the caller gave a budget for them.
    store_all: bool,
    /// Blocks that have each candidate.
    uses: Vec<u64>,
    interner: Interner,
    by_signature: FxHashMap<Box<[i64]>, Kind>,
    mask: Vec<u64>,
}

impl<'a> Pool<'a> {
    pub(super) fn new(frame: &'a Frame) -> Self {
        let words = frame.block.get() * frame.block.words();
        Pool {
            frame,
            candidates: MaskTable::new(words),
            candidate_bytes: frame.mask_bytes.unwrap_or(CANDIDATE_BYTES),
            store_all: frame.mask_bytes.is_some(),
            uses: Vec::new(),
            interner: Interner::default(),
            by_signature: FxHashMap::default(),
            mask: vec![0; words],
        }
    }

    pub(super) fn frame(&self) -> &'a Frame {
        self.frame
    }

    /// The mask of a block that is known to be Partial.
    pub(super) fn mixed(
        &mut self,
        walker: &mut Walker<'_>,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> Kind {
        self.recall(walker, row, column, meter).unwrap_or(LATER)
    }

    /// What there is in a block of which nothing is known.
    pub(super) fn look(
        &mut self,
        walker: &mut Walker<'_>,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> Kind {
        self.recall(walker, row, column, meter).unwrap_or_else(|| {
            match walker.classify(row, column, meter) {
                Seen::Nothing => Kind::Empty,
                Seen::Everything => ALL,
                Seen::Some => LATER,
            }
        })
    }

    /// The kind of a block by its signature; made once, then remembered. `None` where it has no
    /// signature or there is no more room.
    fn recall(
        &mut self,
        walker: &mut Walker<'_>,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> Option<Kind> {
        let room = (self.candidates.bytes() as u64) < self.candidate_bytes
            && (self.store_all || self.by_signature.len() < MOST_SIGNATURES);
        meter.spend(RECALL);
        let Some(signature) = walker.signature(row, column, meter) else {
            let make = room && self.store_all;
            return make.then(|| self.make(walker, row, column, meter));
        };
        if let Some(&kind) = self.by_signature.get(signature) {
            return Some(kind);
        }
        if !room {
            return None;
        }
        let signature = signature.into();
        let kind = self.make(walker, row, column, meter);
        self.by_signature.insert(signature, kind);
        Some(kind)
    }

    /// Makes the mask of a block and finds out what it is.
    fn make(
        &mut self,
        walker: &mut Walker<'_>,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> Kind {
        walker.mask(row, column, meter, &mut self.mask);
        let tokens = |range: std::ops::Range<i64>| (range.end - range.start) as u64;
        let frame = self.frame;
        let pairs = tokens(frame.row_tokens(row)) * tokens(frame.column_tokens(column));
        match u64::from(ones(&self.mask)) {
            0 => Kind::Empty,
            ones if ones == pairs => ALL,
            _ => {
                let id = self.interner.intern(&mut self.candidates, &self.mask);
                self.uses.resize(self.candidates.len(), 0);
                Kind::Active(id)
            }
        }
    }

    /// Counts the blocks of a run for its mask.
    #[inline]
    pub(super) fn count_use(&mut self, run: &Run) {
        if let Some(id) = run.stored() {
            self.uses[id as usize] += u64::from(run.len);
        }
    }

    /// Keeps the masks that are used most, within the budget, and rewrites the runs accordingly.
    pub(super) fn settle(
        self,
        runs: &mut Vec<Run>,
        starts: &mut [u32],
        meter: &mut Meter<'_>,
    ) -> MaskTable {
        let Pool { frame, candidates, uses, .. } = self;
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
        by_use.sort_by_key(|&id| std::cmp::Reverse(uses[id as usize]));
        by_use.truncate(room);
        by_use.sort_unstable();

        let mut table = MaskTable::new(frame.block.get() * frame.block.words());
        let mut renamed = vec![ON_DEMAND; candidates.len()];
        for id in by_use {
            renamed[id as usize] = table.push(candidates.get(id));
        }
        table.shrink();

        rename_masks(runs, starts, &renamed, meter);
        table
    }
}

/// Units of a run that is written again.
const RENAMED: u64 = 2;

/// Gives each run the new number of its mask. Runs that lost theirs may touch, so the list is
/// written anew over itself.
fn rename_masks(runs: &mut Vec<Run>, starts: &mut [u32], renamed: &[u32], meter: &mut Meter<'_>) {
    let mut written = 0;
    let mut from = 0;
    for start in starts.iter_mut().skip(1) {
        let (row_start, to) = (written, *start as usize);
        meter.spend(RENAMED * (1 + to - from) as u64);
        if meter.halted() {
            return;
        }
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
}
