//! Signatures: the values that the bits of a block depend on.
//!
//! Two blocks with equal signatures have equal masks. Each leaf appends the values that its bits
//! depend on, clamped to the block: a window appends how far its ends reach into the block, so the
//! diagonal of `causal` has one signature in every row, and so has the left edge of a window.
//! Leaves whose bits depend on more than a few values (an edge of a document) return `false`;
//! such masks are computed on demand.

use super::{Node, PositionRange};
use crate::meter::Meter;

impl Node {
    pub(super) fn signature(
        &mut self,
        queries: PositionRange,
        keys: PositionRange,
        meter: &mut Meter<'_>,
        out: &mut Vec<i64>,
    ) -> bool {
        let inside = |low: i64, high: i64, of: &PositionRange| {
            [of.index_at_least(low), of.index_at_least(high)]
        };
        match self {
            Node::Full => true,
            Node::Window { left, right } => {
                // `key − query` runs from `min` to `max` over the block, in steps of `unit`.
                let (min, max) = (keys.start - queries.last(), keys.last() - queries.start);
                let unit = if queries.step == keys.step { queries.step } else { 1 };
                let reach = max - min + 1;
                let cut = |by: i64| match by.max(-reach).min(0) {
                    by if unit == 1 => by,
                    by => by.div_euclid(unit),
                };
                out.extend([cut(*left + min), cut(*right - max)]);
                true
            }
            Node::KeyRange { low, high } => {
                out.extend(inside(*low, *high, &keys));
                true
            }
            Node::QueryRange { low, high } => {
                out.extend(inside(*low, *high, &queries));
                true
            }
            Node::Axis(axis) => {
                out.extend(axis.signature(queries, keys));
                true
            }
            Node::Strided { stride } => {
                out.push((queries.start - keys.start).rem_euclid(*stride));
                true
            }
            Node::Comb { period, .. } => {
                out.push(keys.start.rem_euclid(*period));
                true
            }
            Node::Dilated { segment, rate, offset } => {
                let query_segment = queries.start.div_euclid(*segment);
                let key_segment = keys.start.div_euclid(*segment);
                let one_each = queries.start >= 0
                    && keys.start >= 0
                    && queries.last() / *segment == query_segment
                    && keys.last() / *segment == key_segment;
                if !one_each {
                    return false;
                }
                if query_segment != key_segment {
                    out.push(-1);
                    return true;
                }
                let residue = |at: i64| (at - query_segment * *segment - *offset).rem_euclid(*rate);
                out.extend([residue(queries.start), residue(keys.start)]);
                true
            }
            Node::Documents { lengths, hint } => {
                if queries.start < 0 || queries.last() >= lengths.total() {
                    return false;
                }
                *hint = lengths.find(queries.start, *hint);
                out.extend(inside(lengths.start(*hint), lengths.end(*hint), &keys));
                queries.last() < lengths.end(*hint)
            }
            Node::Packed(packed) => {
                let tokens = queries.moved(packed.queries.total() - packed.keys.total());
                if tokens.start < 0 || tokens.last() >= packed.queries.total() {
                    return false;
                }
                packed.hint = packed.queries.find(tokens.start, packed.hint);
                let index = packed.hint;
                if tokens.last() >= packed.queries.end(index) {
                    return false;
                }
                let active = inside(packed.keys.start(index), packed.keys.end(index), &keys);
                out.extend(active);
                if active[0] == active[1] {
                    return true;
                }
                let (query_origin, key_origin) = packed.origins(index);
                let (queries, keys) = (queries.moved(-query_origin), keys.moved(-key_origin));
                packed.inner.signature(queries, keys, meter, out)
            }
            Node::Blocks { size, relation } => {
                let (query_block, key_block) = (size.floor(queries.start), size.floor(keys.start));
                let one_each = queries.start >= 0
                    && keys.start >= 0
                    && size.floor(queries.last()) == query_block
                    && size.floor(keys.last()) == key_block;
                if one_each {
                    let ranges = relation.row(query_block, meter);
                    let at = ranges.partition_point(|range| range.1 <= key_block);
                    out.push(ranges.get(at).is_some_and(|range| range.0 <= key_block).into());
                }
                one_each
            }
            Node::And(parts, _) | Node::Or(parts, _) => {
                parts.iter_mut().all(|part| part.signature(queries, keys, meter, out))
            }
            Node::Not(inner, _) => inner.signature(queries, keys, meter, out),
        }
    }
}
