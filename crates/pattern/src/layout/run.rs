//! Runs of adjacent blocks.

/// Mask number of a Full run.
pub(super) const FULL: u32 = u32::MAX;
/// Mask number of a run whose masks are computed on demand.
pub(super) const ON_DEMAND: u32 = u32::MAX - 1;

/// A run of adjacent blocks of one kind: key blocks in a row, query blocks in a column
/// ([`Transpose`](super::Transpose)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Run {
    /// The first block.
    pub start: u32,
    /// Number of blocks; never 0.
    pub len: u32,
    pub(super) mask: u32,
}

/// Whether the blocks of a run need a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunKind {
    /// Every pair of every block is active.
    Full,
    /// Every block has active and masked pairs: read its mask.
    Partial,
}

impl Run {
    /// Blocks of which every pair is active.
    ///
    /// ```
    /// use longspan_pattern::{Run, RunKind};
    ///
    /// let run = Run::full(3, 2);
    /// assert_eq!((run.end(), run.kind()), (5, RunKind::Full));
    /// ```
    pub fn full(start: u32, len: u32) -> Self {
        Run { start, len, mask: FULL }
    }

    /// One past the last block.
    pub fn end(&self) -> u32 {
        self.start + self.len
    }

    /// Full or Partial.
    pub fn kind(&self) -> RunKind {
        if self.mask == FULL { RunKind::Full } else { RunKind::Partial }
    }

    /// The number of the one stored mask that all blocks of the run share
    /// ([`Layout::stored_mask`](super::Layout::stored_mask)), if there is one.
    pub fn stored(&self) -> Option<u32> {
        (self.mask < ON_DEMAND).then_some(self.mask)
    }
}
