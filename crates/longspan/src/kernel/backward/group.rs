//! Queries of a panel that are processed together.

use std::ops::Range;

use super::{MOST_GROUP, QUERIES};
use crate::kernel::fused::FusedKernel;
use crate::tensor::Strided;

/// Up to [`QUERIES`] queries of one row of blocks.
#[derive(Clone, Copy)]
pub(super) struct QueryTile {
    pub(super) row: u32,
    pub(super) query: usize,
    pub(super) queries: usize,
    /// The first one's place in its block.
    pub(super) within: usize,
    pub(super) dq: Strided,
}

/// Neighbouring tiles of queries, all but the last one of [`QUERIES`].
pub(super) struct Group {
    pub(super) tiles: [QueryTile; MOST_GROUP],
    pub(super) len: usize,
}

impl Group {
    pub(super) const EMPTY: Group = {
        let dq = Strided { first: std::ptr::null(), row: 0, column: 0 };
        let unused = QueryTile { row: 0, query: 0, queries: 0, within: 0, dq };
        Group { tiles: [unused; MOST_GROUP], len: 0 }
    };

    pub(super) fn tiles(&self) -> &[QueryTile] {
        &self.tiles[..self.len]
    }

    pub(super) fn push(&mut self, tile: QueryTile) {
        self.tiles[self.len] = tile;
        self.len += 1;
    }

    /// The query that the next tile must start with, if there are tiles: none does after a short
    /// one.
    pub(super) fn end(&self) -> Option<usize> {
        let last = self.tiles().last()?;
        Some(if last.queries == QUERIES { last.query + QUERIES } else { usize::MAX })
    }
}

/// The queries of a group, and what is made of them once for all keys of a key panel.
pub(super) struct Queries<'a, X: FusedKernel> {
    pub(super) all: usize,
    /// The first one's place among all rows.
    pub(super) row: usize,
    pub(super) q: Strided<X::Element>,
    pub(super) dout: Strided<X::Element>,
    pub(super) q_packed: X::Lhs,
    pub(super) dout_packed: X::Lhs,
    pub(super) q_transposed: X::Lhs,
    pub(super) dout_transposed: X::Lhs,
    pub(super) corrections: &'a [f32],
}

/// Neighbouring queries of a group, and neighbouring keys of a tile.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Patch {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Patch {
    /// Goes on with the queries of a tile that follows, and the same keys.
    pub(super) fn add(&mut self, tile: Patch) {
        let start = if self.queries.is_empty() { tile.queries.start } else { self.queries.start };
        *self = Patch { queries: start..tile.queries.end, keys: tile.keys };
    }

    /// Its queries, counted from their tile's first.
    pub(super) fn within(&self) -> Range<usize> {
        let start = self.queries.start % QUERIES;
        start..start + self.queries.len()
    }

    pub(super) fn take(&mut self) -> Patch {
        std::mem::take(self)
    }
}

/// Queries that have pending keys in common.
const STEP: usize = 16;

/// Key tiles that wait for their product with K.
#[derive(Clone, Default)]
pub(super) struct Pending {
    /// For each [`STEP`] queries of a tile, the keys from the first to the last one that any of them
    /// sees, counted from the key panel's first.
    keys: [Range<usize>; QUERIES / STEP],
}

impl Pending {
    pub(super) fn add(&mut self, queries: Range<usize>, keys: Range<usize>) {
        for own in &mut self.keys[queries.start / STEP..queries.end.div_ceil(STEP)] {
            let start = if own.start == own.end { keys.start } else { own.start };
            *own = start..keys.end;
        }
    }

    /// Neighbouring queries, of a tile of `queries`, that have the same keys pending, and these.
    pub(super) fn runs(
        &self,
        queries: usize,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let steps = self.keys[..queries.div_ceil(STEP)].chunk_by(PartialEq::eq);
        let mut next = 0;
        let runs = steps.map(move |steps| {
            let first = next;
            next = (first + steps.len() * STEP).min(queries);
            (first..next, steps[0].clone())
        });
        runs.filter(|(_, keys)| !keys.is_empty())
    }
}
