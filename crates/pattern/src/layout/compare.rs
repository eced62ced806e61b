//! Comparison of layouts by their active pairs.
//!
//! A layout is exact: no stored block is empty and no Partial block is all ones. So equal layouts
//! have the same Full and the same Partial blocks, however their masks are stored, and layouts
//! that differ there compare without masks. Masks are hashed only if all blocks agree.

use std::hash::{Hash, Hasher};
use std::ops::ControlFlow;

use rustc_hash::FxHasher;

use super::{Layout, ON_DEMAND, Run};
use crate::error::Result;
use crate::meter::{Progress, ignore_progress};

/// Units per compared run.
const RUN: u64 = 4;

impl Layout {
    /// Whether both have the same active pairs: the same lengths, blocks, rows and masks. Comparing
    /// on-demand masks is subject to the work limit of [`hash`](Self::hash).
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
        self.same_pairs_with(other, ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn same_pairs_with(
        &self,
        other: &Layout,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<bool> {
        let blocks = self.block_digest(&mut progress)?;
        Ok(blocks == other.block_digest(&mut progress)? && self.same_masks(other, &mut progress)?)
    }

    /// A digest of the lengths and of the Full and Partial blocks.
    pub(crate) fn block_digest(&self, progress: &mut Progress<'_>) -> Result<u64> {
        let mut progress = |row, rows| progress(row, rows);
        let mut meter = self.meter(&mut progress);
        let mut hasher = FxHasher::default();
        let rows = self.rows();
        for number in [self.queries(), self.keys(), self.block().get()] {
            hasher.write_usize(number);
        }
        rows.hash(&mut hasher);
        for row in rows.clone() {
            meter.at_row((row - rows.start).into());
            let runs = self.row(row);
            meter.spend(RUN * (1 + runs.len() as u64));
            if meter.halted() {
                return Err(self.halted(&meter, "comparing"));
            }
            // Adjacent runs of one kind count as one, whatever their masks.
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

    /// Whether the masks agree, given equal block digests.
    pub(crate) fn same_masks(&self, other: &Layout, progress: &mut Progress<'_>) -> Result<bool> {
        let stored = |layout: &Layout| layout.content.runs.iter().all(|run| run.mask != ON_DEMAND);
        if self.content.runs == other.content.runs
            && self.content.table == other.content.table
            && stored(self)
        {
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
