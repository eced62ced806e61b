//! The lanes of a band that a chunk is computed for.

use std::ops::Range;

use crate::simd::{LANES, WIDEST};

/// Lanes that are computed, in whole vectors of any width.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ActiveLanes([bool; LANES / WIDEST]);

impl ActiveLanes {
    pub(super) fn add(&mut self, lanes: Range<usize>) {
        self.0[lanes.start / WIDEST..lanes.end.div_ceil(WIDEST)].fill(true);
    }

    pub(super) fn contains(&self, lane: usize) -> bool {
        self.0[lane / WIDEST]
    }

    /// Those side by side.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        let mut vectors = self.0.iter().enumerate().peekable();
        std::iter::from_fn(move || {
            let (first, _) = vectors.find(|(_, active)| **active)?;
            let mut end = first + 1;
            while vectors.next_if(|(_, active)| **active).is_some() {
                end += 1;
            }
            Some(first * WIDEST..end * WIDEST)
        })
    }
}
