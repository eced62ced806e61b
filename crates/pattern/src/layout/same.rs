//! Whether two layouts let the same pairs through.
//!
//! A layout is exact: no stored block is empty and no Partial one is all-true. So which blocks are
//! Full and which are Partial is the same for equal layouts, however their masks are stored, and
//! layouts that differ there are told apart without looking at masks. Only where all blocks agree
//! are the masks hashed.

use std::hash::Hasher;
use std::ops::ControlFlow;

use rustc_hash::FxHasher;

use super::{Layout, ON_DEMAND, Run};
use crate::error::Result;
use crate::meter::{Progress, go_on};

/// Units of a run that is compared.
const RUN: u64 = 4;

impl Layout {
    /// Whether both let the same pairs through: the same lengths, blocks, rows and masks. Where
    /// masks have to be compared that are made on demand, their work is bounded as that of
    /// [`hash`](Self::hash) is.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let shape = Shape::new(8_192, 8_192);
    /// let causal = Layout::compile(&Pattern::causal(), &shape)?;
    /// assert!(causal.same_pairs(&Layout::compile(&Pattern::window(8_191, 0)?, &shape)?)?);
    /// assert!(!causal.same_pairs(&Layout::compile(&Pattern::window(8_190, 0)?, &shape)?)?);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn same_pairs(&self, other: &Layout) -> Result<bool> {
        self.same_pairs_with(other, go_on)
    }

    /// The same, with a hook that may end the work: see [`compile_with`](Self::compile_with).
    pub fn same_pairs_with(
        &self,
        other: &Layout,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<bool> {
        let blocks = self.block_digest(&mut progress)?;
        Ok(blocks == other.block_digest(&mut progress)? && self.same_masks(other, &mut progress)?)
    }

    /// A digest of lengths and of which blocks are Full and Partial.
    pub(crate) fn block_digest(&self, progress: &mut Progress<'_>) -> Result<u64> {
        let mut progress = |row, rows| progress(row, rows);
        let mut meter = self.meter(&mut progress);
        let mut hasher = FxHasher::default();
        let rows = self.rows();
        for number in [self.queries(), self.keys(), rows.start.into(), rows.end.into()] {
            hasher.write_u64(number);
        }
        hasher.write_usize(self.block().get());
        for row in rows.clone() {
            meter.at_row((row - rows.start).into());
            let runs = self.row(row);
            meter.spend(RUN * (1 + runs.len() as u64));
            if meter.halted() {
                return Err(self.halted(&meter, "comparing"));
            }
            // Neighbors of one kind count as one, whatever their masks.
            let mut open: Option<Run> = None;
            for run in runs {
                match &mut open {
                    Some(last) if last.end() == run.start && last.kind() == run.kind() => {
                        last.len += run.len;
                    }
                    _ => {
                        write_run(&mut hasher, open);
                        open = Some(*run);
                    }
                }
            }
            write_run(&mut hasher, open);
            hasher.write_u32(u32::MAX);
        }
        Ok(hasher.finish())
    }

    /// Whether the masks agree, for layouts whose blocks do.
    pub(crate) fn same_masks(&self, other: &Layout, progress: &mut Progress<'_>) -> Result<bool> {
        let stored = |layout: &Layout| layout.runs.iter().all(|run| run.mask != ON_DEMAND);
        if self.runs == other.runs && self.table == other.table && stored(self) {
            return Ok(true);
        }
        let mut progress = |row, rows| progress(row, rows);
        Ok(self.hash_with(&mut progress)? == other.hash_with(&mut progress)?)
    }
}

fn write_run(hasher: &mut FxHasher, run: Option<Run>) {
    if let Some(run) = run {
        hasher.write_u64(u64::from(run.start) << 32 | u64::from(run.len));
        hasher.write_u8(run.kind() as u8);
    }
}
