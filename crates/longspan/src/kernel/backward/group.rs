//! Queries of a panel that are processed together.

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

/// Neighbouring queries of a group.
#[derive(Clone, Copy, Default)]
pub(super) struct Run {
    pub(super) first: usize,
    pub(super) queries: usize,
}

impl Run {
    /// Goes on with a tile that follows.
    pub(super) fn add(&mut self, tile: Run) {
        let first = if self.queries == 0 { tile.first } else { self.first };
        *self = Run { first, queries: self.queries + tile.queries };
    }

    pub(super) fn take(&mut self) -> Run {
        std::mem::take(self)
    }
}

/// Key tiles that wait for their product.
#[derive(Clone, Copy)]
pub(super) struct Pending {
    /// The first key, counted from the key panel's.
    pub(super) first: usize,
    pub(super) keys: usize,
}
