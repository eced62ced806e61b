//! Which masks a layout stores.
//!
//! During compilation every mask that has a signature is a candidate: it is computed once and its
//! uses are counted. At the end the most used masks are stored, within the budget; the others are
//! dropped and computed on demand.

use rustc_hash::FxHashMap;

use super::evaluate::{BlockClass, Evaluator};
use super::masks::{Interner, MaskTable, ones};
use super::{FULL, ON_DEMAND, Run};
use crate::meter::Meter;
use crate::shape::Frame;

/// Maximum number of cached signatures; a pattern with more hardly shares masks.
const MAX_SIGNATURES: usize = 4096;

/// Memory limit of the candidates.
const CANDIDATE_BYTES: u64 = 2 << 20;

/// Masks that a small layout may store regardless of its runs: a window has two or three.
const FEW_MASKS: u64 = 6;

/// Units per signature lookup.
const RECALL: u64 = 32;

/// Kind of a compiled block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockKind {
    Empty,
    /// The `mask` of its run.
    Active(u32),
}

/// A Full block.
pub(super) const FULL_BLOCK: BlockKind = BlockKind::Active(FULL);

/// A Partial block whose mask is computed on demand.
pub(super) const ON_DEMAND_BLOCK: BlockKind = BlockKind::Active(ON_DEMAND);

pub(super) struct Pool<'a> {
    frame: &'a Frame,
    candidates: MaskTable,
    candidate_bytes: u64,
    /// Masks without a signature are candidates, too: the shape has a mask budget.
    store_all: bool,
    /// Blocks per candidate.
    uses: Vec<u64>,
    interner: Interner,
    by_signature: FxHashMap<Box<[i64]>, BlockKind>,
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

    /// The kind of a block known to be Partial.
    pub(super) fn partial(
        &mut self,
        evaluator: &mut Evaluator<'_>,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> BlockKind {
        self.recall(evaluator, row, column, meter).unwrap_or(ON_DEMAND_BLOCK)
    }

    /// The kind of an Unknown block.
    pub(super) fn classify(
        &mut self,
        evaluator: &mut Evaluator<'_>,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> BlockKind {
        self.recall(evaluator, row, column, meter).unwrap_or_else(|| {
            match evaluator.classify(row, column, meter) {
                BlockClass::Empty => BlockKind::Empty,
                BlockClass::Full => FULL_BLOCK,
                BlockClass::Partial => ON_DEMAND_BLOCK,
            }
        })
    }

    /// The kind of a block by its signature, cached. `None` if it has no signature or the pool is
    /// full.
    fn recall(
        &mut self,
        evaluator: &mut Evaluator<'_>,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> Option<BlockKind> {
        let room = (self.candidates.bytes() as u64) < self.candidate_bytes
            && (self.store_all || self.by_signature.len() < MAX_SIGNATURES);
        meter.spend(RECALL);
        let Some(signature) = evaluator.signature(row, column, meter) else {
            let make = room && self.store_all;
            return make.then(|| self.make(evaluator, row, column, meter));
        };
        if let Some(&kind) = self.by_signature.get(signature) {
            return Some(kind);
        }
        if !room {
            return None;
        }
        let signature = signature.into();
        let kind = self.make(evaluator, row, column, meter);
        self.by_signature.insert(signature, kind);
        Some(kind)
    }

    /// Computes the mask of a block and its kind.
    fn make(
        &mut self,
        evaluator: &mut Evaluator<'_>,
        row: u32,
        column: u32,
        meter: &mut Meter<'_>,
    ) -> BlockKind {
        evaluator.mask(row, column, meter, &mut self.mask);
        let tokens = |range: std::ops::Range<i64>| (range.end - range.start) as u64;
        let frame = self.frame;
        let pairs = tokens(frame.row_tokens(row)) * tokens(frame.column_tokens(column));
        match u64::from(ones(&self.mask)) {
            0 => BlockKind::Empty,
            ones if ones == pairs => FULL_BLOCK,
            _ => {
                let id = self.interner.intern(&mut self.candidates, &self.mask);
                self.uses.resize(self.candidates.len(), 0);
                BlockKind::Active(id)
            }
        }
    }

    /// Adds the blocks of a run to the uses of its mask.
    #[inline]
    pub(super) fn count_use(&mut self, run: &Run) {
        if let Some(id) = run.stored() {
            self.uses[id as usize] += u64::from(run.len);
        }
    }

    /// Keeps the most used masks within the budget and renumbers the runs.
    pub(super) fn select(
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
        let mut renumbered = vec![ON_DEMAND; candidates.len()];
        for id in by_use {
            renumbered[id as usize] = table.push(candidates.get(id));
        }
        table.shrink();

        renumber_masks(runs, starts, &renumbered, meter);
        table
    }
}

/// Units per renumbered run.
const RENUMBERED: u64 = 2;

/// Renumbers the masks of the runs in place. Adjacent runs whose masks were dropped are joined.
fn renumber_masks(
    runs: &mut Vec<Run>,
    starts: &mut [u32],
    renumbered: &[u32],
    meter: &mut Meter<'_>,
) {
    let mut written = 0;
    let mut from = 0;
    for start in starts.iter_mut().skip(1) {
        let (row_start, to) = (written, *start as usize);
        meter.spend(RENUMBERED * (1 + to - from) as u64);
        if meter.halted() {
            return;
        }
        for read in from..to {
            let mut run = runs[read];
            if run.mask < ON_DEMAND {
                run.mask = renumbered[run.mask as usize];
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
