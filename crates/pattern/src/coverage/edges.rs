//! For how many rows the intervals only shift.
//!
//! Coverage changes along the keys at *edges*. From one row of blocks to the next an edge either
//! is fixed (the end of a document, of the sinks) or moves by one block (the ends of a window). As
//! long as moving edges stay a block away from fixed ones, each row is the row above with some of
//! its runs moved by a block, and no coverage query is needed. Each leaf lists its edges and
//! returns for how many rows the list holds.

use super::relation::block_start;
use super::{KeyRange, Node, PositionRange};
use crate::arith::div_ceil;
use crate::meter::Meter;

/// Where coverage changes, by key index.
#[derive(Debug, Default)]
pub(crate) struct Edges {
    /// Move by one block per row.
    pub(crate) moving: Vec<i64>,
    pub(crate) fixed: Vec<i64>,
}

impl Edges {
    pub(crate) fn clear(&mut self) {
        self.moving.clear();
        self.fixed.clear();
    }

    /// Rows for which a whole block lies between every moving edge and every fixed one, so that
    /// no run between them vanishes or appears. An edge between two blocks belongs to both.
    pub(crate) fn rows_apart(&self, block: i64) -> i64 {
        let mut rows = i64::MAX;
        for &moving in &self.moving {
            for &fixed in &self.fixed {
                let gap = (fixed - 1).div_euclid(block) - moving.div_euclid(block);
                if gap > 1 {
                    rows = rows.min(gap - 2);
                } else if (moving - 1).div_euclid(block) <= fixed.div_euclid(block) + 1 {
                    return 0;
                }
            }
        }
        rows
    }
}

/// Beyond this number the comparison costs more than it saves.
const MAX_EDGES: usize = 32;

impl Node {
    /// Appends the edges for `queries` and returns for how many rows they hold; `None` if never.
    /// Rows are `keys.block` queries apart.
    pub(super) fn edges(
        &mut self,
        queries: PositionRange,
        keys: KeyRange,
        meter: &mut Meter<'_>,
        out: &mut Edges,
    ) -> Option<i64> {
        let move_by = keys.block * queries.step;
        // Rows until the queries, now below `end`, would reach it.
        let rows_below = |end: i64| (end - 1 - queries.last()).div_euclid(move_by);
        let key_at = |position: i64| div_ceil(position - keys.start, keys.step);
        // Whether a period divides the distance of two rows and of two blocks.
        let repeats = |period: i64| {
            let key_move = i128::from(keys.block) * i128::from(keys.step);
            move_by % period == 0 && key_move % i128::from(period) == 0
        };
        match self {
            Node::Full => Some(i64::MAX),
            Node::Window { left, right } => {
                if queries.step != keys.step {
                    return None;
                }
                for query in [queries.start, queries.last()] {
                    out.moving.extend([key_at(query - *left), key_at(query + *right + 1)]);
                }
                Some(i64::MAX)
            }
            Node::KeyRange { low, high } => {
                out.fixed.extend([key_at(*low), key_at(*high)]);
                Some(i64::MAX)
            }
            Node::QueryRange { low, high } => Some(if queries.last() < *low {
                rows_below(*low)
            } else if queries.start >= *high {
                i64::MAX
            } else if queries.start >= *low && queries.last() < *high {
                rows_below(*high)
            } else {
                0
            }),
            Node::Axis(_) => None,
            Node::Strided { stride } => repeats(*stride).then_some(i64::MAX),
            Node::Comb { period, .. } => repeats(*period).then_some(i64::MAX),
            Node::Dilated { segment, rate, .. } => {
                if !repeats(*rate) {
                    return None;
                }
                let start = queries.start - queries.start.rem_euclid(*segment);
                if start < 0 || queries.last() >= start + *segment {
                    return Some(0);
                }
                out.fixed.extend([key_at(start), key_at(start + *segment)]);
                Some(rows_below(start + *segment))
            }
            Node::Documents { lengths, hint } => {
                if queries.start < 0 || queries.last() >= lengths.total() {
                    return Some(0);
                }
                *hint = lengths.find(queries.start, *hint);
                let end = lengths.end(*hint);
                if queries.last() >= end {
                    return Some(0);
                }
                out.fixed.extend([key_at(lengths.start(*hint)), key_at(end)]);
                Some(rows_below(end))
            }
            Node::Packed(packed) => {
                let shift = packed.keys.total() - packed.queries.total();
                if queries.start < shift || queries.last() >= shift + packed.queries.total() {
                    return Some(0);
                }
                packed.hint = packed.queries.find(queries.start - shift, packed.hint);
                let index = packed.hint;
                let end = shift + packed.queries.end(index);
                if queries.last() >= end {
                    return Some(0);
                }
                let bounds = [packed.keys.start(index), packed.keys.end(index)];
                out.fixed.extend(bounds.map(key_at));
                let (query_origin, key_origin) = packed.origins(index);
                let (queries, keys) = (queries.moved(-query_origin), keys.moved(-key_origin));
                Some(packed.inner.edges(queries, keys, meter, out)?.min(rows_below(end)))
            }
            Node::Blocks { size, relation } => {
                if size.by < 2 * move_by {
                    return None;
                }
                let query_block = size.floor(queries.start);
                if queries.start < 0 || size.floor(queries.last()) != query_block {
                    return Some(0);
                }
                let ranges = relation.row(query_block, meter);
                if ranges.len() > MAX_EDGES / 2 {
                    return None;
                }
                for range in ranges {
                    out.fixed
                        .extend([range.0, range.1].map(|block| key_at(block_start(block, *size))));
                }
                Some(rows_below(block_start(query_block + 1, *size)))
            }
            Node::And(parts, _) | Node::Or(parts, _) => {
                let mut rows = i64::MAX;
                for part in parts {
                    rows = rows.min(part.edges(queries, keys, meter, out)?);
                    if rows == 0 || out.moving.len() + out.fixed.len() > MAX_EDGES {
                        return Some(0);
                    }
                }
                Some(rows)
            }
            Node::Not(inner, _) => inner.edges(queries, keys, meter, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_edges_stop_before_the_block_of_fixed_one() {
        let rows = |moving: i64, fixed: i64| {
            Edges { moving: vec![moving], fixed: vec![fixed] }.rows_apart(16)
        };
        assert_eq!(rows(5, 60), 1);
        assert_eq!(rows(5, 49), 1);
        assert_eq!(rows(5, 48), 0);
        assert_eq!(rows(16, 64), 0);
        assert_eq!(rows(33, 3), i64::MAX);
        assert_eq!(rows(32, 3), 0);
        assert_eq!(rows(20, 20), 0);
        assert_eq!(rows(-100, 0), 4);
    }
}
