//! Which keys the rows of a unit see: together, and each besides.

use longspan_pattern::{Layout, Run, RunKind};

use super::LONGEST;
use crate::plan::Unit;
use crate::simd::LANES;

/// The next stretch of `left` keys: all that are left, cut evenly into stretches of at most `most`.
pub(super) fn even(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most))
}

/// Keys that a row sees, all in full, or those of one Partial block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) from: u64,
    pub(super) to: u64,
    /// The column, and the run that it is in.
    pub(super) partial: Option<(u32, Run)>,
}

impl Piece {
    /// Whether it is worth a stretch of its own.
    pub(super) fn is_long(&self) -> bool {
        self.partial.is_none() && self.to - self.from >= 2 * LANES as u64
    }
}

/// Lists of a thread, kept from unit to unit.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    /// Keys that all rows of a unit see in full.
    pub(super) shared: Vec<(u64, u64)>,
    narrower: Vec<(u64, u64)>,
    /// What one row sees besides.
    pub(super) pieces: Vec<Piece>,
    /// For each tile of a row, a word a key.
    pub(super) bits: Vec<[u64; LONGEST]>,
}

impl Lists {
    /// Room for rows of so many tiles and pieces.
    pub(crate) fn grow(&mut self, tiles: usize, pieces: usize) {
        self.bits.resize(self.bits.len().max(tiles), [0; LONGEST]);
        self.shared.clear();
        self.shared.reserve(pieces);
        self.narrower.clear();
        self.narrower.reserve(pieces);
        self.pieces.clear();
        self.pieces.reserve(pieces);
    }

    /// Finds what all rows of a unit see in full.
    pub(super) fn share(&mut self, layout: &Layout, unit: &Unit) {
        self.shared.clear();
        if unit.rows.1 - unit.rows.0 < 2 {
            return;
        }
        for row in unit.rows.0..unit.rows.1 {
            self.narrower.clear();
            let mut at = 0;
            for run in layout.row(row).iter().filter(|run| run.kind() == RunKind::Full) {
                let from = layout.column_tokens(run.start).start;
                let to = layout.column_tokens(run.end() - 1).end;
                if row == unit.rows.0 {
                    self.narrower.push((from, to));
                    continue;
                }
                while at < self.shared.len() && self.shared[at].1 <= from {
                    at += 1;
                }
                let mut next = at;
                while next < self.shared.len() && self.shared[next].0 < to {
                    let both = (self.shared[next].0.max(from), self.shared[next].1.min(to));
                    self.narrower.push(both);
                    next += 1;
                }
            }
            std::mem::swap(&mut self.shared, &mut self.narrower);
        }
    }

    /// Lists what a row sees in some columns and isn't shared.
    pub(super) fn rest(&mut self, layout: &Layout, row: u32, columns: (u32, u32)) {
        self.pieces.clear();
        let mut at = 0;
        for run in layout.row(row) {
            let columns = run.start.max(columns.0)..run.end().min(columns.1);
            if columns.is_empty() {
                continue;
            }
            if run.kind() == RunKind::Partial {
                self.pieces.extend(columns.map(|column| {
                    let keys = layout.column_tokens(column);
                    Piece { from: keys.start, to: keys.end, partial: Some((column, *run)) }
                }));
                continue;
            }
            let mut from = layout.column_tokens(columns.start).start;
            let end = layout.column_tokens(columns.end - 1).end;
            while at < self.shared.len() && self.shared[at].0 < end {
                let shared = self.shared[at];
                if from < shared.0 {
                    self.pieces.push(Piece { from, to: shared.0, partial: None });
                }
                from = shared.1;
                at += 1;
            }
            if from < end {
                self.pieces.push(Piece { from, to: end, partial: None });
            }
        }
    }
}
