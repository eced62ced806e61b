//! Which keys the rows of a unit see: together, and each besides.

use std::ops::Range;

use longspan_pattern::{BlockSize, Layout, Run, RunKind};

use super::MAX_KV_TILE;
use crate::simd::LANES;
use crate::tasks::{MOST_ROWS, Unit, pieces_of};
use crate::tensor::size_of_list;

/// The next key tile of `left` keys: all that are left, cut evenly into key tiles of at most
/// `most`.
pub(super) fn even(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most))
}

/// Keys that a row sees, all in full, or those of one Partial block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) from: usize,
    pub(super) to: usize,
    /// The column, and the run that it is in.
    pub(super) partial: Option<(u32, Run)>,
}

impl Piece {
    /// Whether it is worth a key tile of its own.
    pub(super) fn is_long(&self) -> bool {
        self.partial.is_none() && self.to - self.from >= 2 * LANES
    }
}

/// Keys of a piece that are in a key tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) from: usize,
    pub(super) to: usize,
    /// The first of them among the keys of the key tile.
    pub(super) at: usize,
    /// As in [`Piece`].
    pub(super) partial: Option<(u32, Run)>,
}

/// Pieces of a row that can be looked through for every key tile.
const FEW_PIECES: usize = 32;

/// How many of the first pieces go together: those that touch, long Full ones by themselves, so
/// that they are not cut into groups of vectors.
pub(super) fn touching(pieces: &[Piece]) -> usize {
    let goes_on =
        |pair: &&[Piece]| pair[0].to == pair[1].from && pair[0].is_long() == pair[1].is_long();
    pieces.len().min(1) + pieces.windows(2).take_while(goes_on).count()
}

/// Lists of a thread, kept from unit to unit.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    /// Keys that all rows of a unit see in full.
    pub(super) shared: Vec<(usize, usize)>,
    narrower: Vec<(usize, usize)>,
    /// What one row sees besides.
    pub(super) pieces: Vec<Piece>,
    /// What some rows of a unit see besides.
    pub(super) united: Vec<(usize, usize)>,
    /// What a key tile of one row consists of.
    pub(super) spans: Vec<Span>,
    /// For each tile of a row, one word per key.
    pub(super) bits: Vec<[u64; MAX_KV_TILE]>,
}

impl Lists {
    pub(crate) fn bytes(&self) -> usize {
        let Lists { shared, narrower, pieces, united, spans, bits } = self;
        size_of_list(shared)
            + size_of_list(narrower)
            + size_of_list(pieces)
            + size_of_list(united)
            + size_of_list(spans)
            + size_of_list(bits)
    }

    /// Room for rows of so many tiles and pieces.
    pub(crate) fn grow(&mut self, tiles: usize, pieces: usize) {
        self.bits.resize(self.bits.len().max(tiles), [0; MAX_KV_TILE]);
        self.shared.clear();
        self.shared.reserve(pieces);
        self.narrower.clear();
        self.narrower.reserve(pieces);
        self.pieces.clear();
        self.pieces.reserve(pieces);
        self.spans.clear();
        self.spans.reserve(MAX_KV_TILE / BlockSize::MIN.get() + 2);
        self.united.clear();
        // A Full run may be cut by everything that is shared.
        self.united.reserve(MOST_ROWS * 2 * FEW_PIECES);
    }

    /// Finds what all rows of a unit see in full; nothing where rows must not depend on others.
    pub(super) fn share(&mut self, layout: &Layout, unit: &Unit, uniform: bool) {
        self.shared.clear();
        if unit.rows.1 - unit.rows.0 < 2 || uniform {
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

    /// Finds what some rows of a unit see and isn't shared: disjoint, in order. Gives up where
    /// there is one row, or one has too many pieces to look through for each of these.
    pub(super) fn unite(&mut self, layout: &Layout, unit: &Unit) -> bool {
        self.united.clear();
        let rows = unit.rows.0..unit.rows.1;
        let mut counts =
            rows.clone().map(|row| layout.row(row).iter().map(pieces_of).sum::<usize>());
        if rows.len() < 2 || counts.any(|count| count > FEW_PIECES) {
            return false;
        }
        for row in rows {
            self.rest(layout, row, unit.columns);
            let pieces = self.pieces.iter().map(|piece| (piece.from, piece.to));
            self.united.extend(pieces);
        }
        self.united.sort_unstable();
        self.united.dedup_by(|next, last| {
            let joins = next.0 <= last.1;
            if joins {
                last.1 = last.1.max(next.1);
            }
            joins
        });
        true
    }

    /// Puts Full pieces first. Returns how many they are, and how many keys they have.
    pub(super) fn full_first(&mut self) -> (usize, usize) {
        self.pieces.sort_unstable_by_key(|piece| (piece.partial.is_some(), piece.from));
        let full = self.pieces.partition_point(|piece| piece.partial.is_none());
        (full, self.pieces[..full].iter().map(|piece| piece.to - piece.from).sum())
    }

    /// Spans of the next `keys` keys of pieces from `piece` on, from key `from` on; moves both on.
    pub(super) fn gather(&mut self, piece: &mut usize, from: &mut usize, keys: usize) {
        self.spans.clear();
        let mut at = 0;
        while at < keys {
            let Piece { from: start, to: end, partial } = self.pieces[*piece];
            *from = start.max(*from);
            let to = end.min(*from + keys - at);
            self.spans.push(Span { from: *from, to, at, partial });
            at += to - *from;
            *from = to;
            *piece += usize::from(to == end);
        }
    }

    /// Spans of keys `key..end` of pieces that touch.
    pub(super) fn cut(&mut self, pieces: Range<usize>, (key, end): (usize, usize)) {
        self.spans.clear();
        for piece in &self.pieces[pieces] {
            let (from, to) = (piece.from.max(key), piece.to.min(end));
            if from < to {
                let (at, partial) = (from - key, piece.partial);
                self.spans.push(Span { from, to, at, partial });
            }
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
