//! For how many rows the answer repeats, moved.
//!
//! An answer changes along the keys at *edges*. From one row of blocks to the next an edge either
//! stays where it is (the end of a document, of the sinks) or moves along by one block (the ends
//! of a window). As long as moving edges stay a block away from standing ones, each row is the
//! row above with some of its runs moved by a block; nobody has to be asked. So a leaf lists its
//! edges and says for how many rows that list holds.

use super::arith::div_ceil;
use super::relation::edge;
use super::{Band, Keys, Node};
use crate::meter::Meter;

/// Where an answer changes, by key number.
#[derive(Debug, Default)]
pub(crate) struct Edges {
    /// Move by one block from row to row.
    pub(crate) moving: Vec<i64>,
    pub(crate) standing: Vec<i64>,
}

impl Edges {
    pub(crate) fn clear(&mut self) {
        self.moving.clear();
        self.standing.clear();
    }

    /// Rows for which a whole block lies between every moving edge and every standing one, so that
    /// no run between them vanishes or appears. An edge between two blocks counts for both.
    pub(crate) fn rows_apart(&self, block: i64) -> i64 {
        let mut rows = i64::MAX;
        for &moving in &self.moving {
            for &standing in &self.standing {
                let gap = (standing - 1).div_euclid(block) - moving.div_euclid(block);
                if gap > 1 {
                    rows = rows.min(gap - 2);
                } else if (moving - 1).div_euclid(block) <= standing.div_euclid(block) + 1 {
                    return 0;
                }
            }
        }
        rows
    }
}

/// More edges than this aren't worth comparing.
const MOST_EDGES: usize = 32;

impl Node {
    /// Adds the edges of the answer for `band` and tells for how many rows they hold; `None` where
    /// they never do. Rows are `keys.block` queries apart.
    pub(super) fn edges(
        &mut self,
        band: Band,
        keys: Keys,
        meter: &mut Meter<'_>,
        out: &mut Edges,
    ) -> Option<i64> {
        let move_by = keys.block * band.step;
        // Rows until the band, now inside, would reach the position `end`.
        let rows_below = |end: i64| (end - 1 - band.last()).div_euclid(move_by);
        let number = |position: i64| div_ceil(position - keys.start, keys.step);
        // Whether something with this period looks the same to every row and in every block.
        let repeats = |period: i64| {
            let key_move = i128::from(keys.block) * i128::from(keys.step);
            move_by % period == 0 && key_move % i128::from(period) == 0
        };
        match self {
            Node::Full => Some(i64::MAX),
            Node::Window { left, right } => {
                if band.step != keys.step {
                    return None;
                }
                for query in [band.start, band.last()] {
                    out.moving.extend([number(query - *left), number(query + *right + 1)]);
                }
                Some(i64::MAX)
            }
            Node::KeyRange { low, high } => {
                out.standing.extend([number(*low), number(*high)]);
                Some(i64::MAX)
            }
            Node::QueryRange { low, high } => Some(if band.last() < *low {
                rows_below(*low)
            } else if band.start >= *high {
                i64::MAX
            } else if band.start >= *low && band.last() < *high {
                rows_below(*high)
            } else {
                0
            }),
            Node::Strided { stride } => repeats(*stride).then_some(i64::MAX),
            Node::Comb { period, .. } => repeats(*period).then_some(i64::MAX),
            Node::Dilated { segment, rate, .. } => {
                if !repeats(*rate) {
                    return None;
                }
                let start = band.start - band.start.rem_euclid(*segment);
                if start < 0 || band.last() >= start + *segment {
                    return Some(0);
                }
                out.standing.extend([number(start), number(start + *segment)]);
                Some(rows_below(start + *segment))
            }
            Node::Documents { lengths, hint } => {
                if band.start < 0 || band.last() >= lengths.total() {
                    return Some(0);
                }
                *hint = lengths.find(band.start, *hint);
                let end = lengths.end(*hint);
                if band.last() >= end {
                    return Some(0);
                }
                out.standing.extend([number(lengths.start(*hint)), number(end)]);
                Some(rows_below(end))
            }
            Node::Packed(packed) => {
                let shift = packed.keys.total() - packed.queries.total();
                if band.start < shift || band.last() >= shift + packed.queries.total() {
                    return Some(0);
                }
                packed.hint = packed.queries.find(band.start - shift, packed.hint);
                let index = packed.hint;
                let end = shift + packed.queries.end(index);
                if band.last() >= end {
                    return Some(0);
                }
                let bounds = [packed.keys.start(index), packed.keys.end(index)];
                out.standing.extend(bounds.map(number));
                let (query_origin, key_origin) = packed.origins(index);
                let (band, keys) = (band.moved(-query_origin), keys.moved(-key_origin));
                Some(packed.inner.edges(band, keys, meter, out)?.min(rows_below(end)))
            }
            Node::Blocks { size, relation } => {
                if size.by < 2 * move_by {
                    return None;
                }
                let query_block = size.floor(band.start);
                if band.start < 0 || size.floor(band.last()) != query_block {
                    return Some(0);
                }
                let ranges = relation.row(query_block, meter);
                if ranges.len() > MOST_EDGES / 2 {
                    return None;
                }
                for range in ranges {
                    out.standing.extend([range.0, range.1].map(|block| number(edge(block, *size))));
                }
                Some(rows_below(edge(query_block + 1, *size)))
            }
            Node::And(parts, _) | Node::Or(parts, _) => {
                let mut rows = i64::MAX;
                for part in parts {
                    rows = rows.min(part.edges(band, keys, meter, out)?);
                    if rows == 0 || out.moving.len() + out.standing.len() > MOST_EDGES {
                        return Some(0);
                    }
                }
                Some(rows)
            }
            Node::Not(inner, _) => inner.edges(band, keys, meter, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_edges_stop_before_the_block_of_a_standing_one() {
        let rows = |moving: i64, standing: i64| {
            Edges { moving: vec![moving], standing: vec![standing] }.rows_apart(16)
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
