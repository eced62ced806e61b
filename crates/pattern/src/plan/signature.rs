//! What the bits of a block depend on.
//!
//! Two blocks with equal signatures have equal masks. Each leaf writes down just what its bits
//! depend on, cut off where more makes no difference: a window writes how far its ends reach into
//! the block, so the diagonal of `causal` has one signature in every row, and so has the left
//! edge of a window. Leaves whose bits depend on more than a few numbers (an edge of a document)
//! say so with `false`; such masks are made when they are read.

use super::{Band, Node};
use crate::meter::Meter;

impl Node {
    pub(super) fn signature(
        &mut self,
        band: Band,
        keys: Band,
        meter: &mut Meter<'_>,
        out: &mut Vec<i64>,
    ) -> bool {
        let inside =
            |low: i64, high: i64, of: &Band| [of.number_at_least(low), of.number_at_least(high)];
        match self {
            Node::Full => true,
            Node::Window { left, right } => {
                // `key − query` runs from `least` to `most` over the block, in steps of `unit`.
                let (least, most) = (keys.start - band.last(), keys.last() - band.start);
                let unit = if band.step == keys.step { band.step } else { 1 };
                let reach = most - least + 1;
                let cut = |by: i64| match by.max(-reach).min(0) {
                    by if unit == 1 => by,
                    by => by.div_euclid(unit),
                };
                out.extend([cut(*left + least), cut(*right - most)]);
                true
            }
            Node::KeyRange { low, high } => {
                out.extend(inside(*low, *high, &keys));
                true
            }
            Node::QueryRange { low, high } => {
                out.extend(inside(*low, *high, &band));
                true
            }
            Node::Strided { stride } => {
                out.push((band.start - keys.start).rem_euclid(*stride));
                true
            }
            Node::Comb { period, .. } => {
                out.push(keys.start.rem_euclid(*period));
                true
            }
            Node::Dilated { segment, rate, offset } => {
                let query_segment = band.start.div_euclid(*segment);
                let key_segment = keys.start.div_euclid(*segment);
                let one_each = band.start >= 0
                    && keys.start >= 0
                    && band.last() / *segment == query_segment
                    && keys.last() / *segment == key_segment;
                if !one_each {
                    return false;
                }
                if query_segment != key_segment {
                    out.push(-1);
                    return true;
                }
                let residue = |at: i64| (at - query_segment * *segment - *offset).rem_euclid(*rate);
                out.extend([residue(band.start), residue(keys.start)]);
                true
            }
            Node::Documents { lengths, hint } => {
                if band.start < 0 || band.last() >= lengths.total() {
                    return false;
                }
                *hint = lengths.find(band.start, *hint);
                out.extend(inside(lengths.start(*hint), lengths.end(*hint), &keys));
                band.last() < lengths.end(*hint)
            }
            Node::Packed(packed) => {
                let numbers = band.moved(packed.queries.total() - packed.keys.total());
                if numbers.start < 0 || numbers.last() >= packed.queries.total() {
                    return false;
                }
                packed.hint = packed.queries.find(numbers.start, packed.hint);
                let index = packed.hint;
                if numbers.last() >= packed.queries.end(index) {
                    return false;
                }
                let seen = inside(packed.keys.start(index), packed.keys.end(index), &keys);
                out.extend(seen);
                if seen[0] == seen[1] {
                    return true;
                }
                let (query_origin, key_origin) = packed.origins(index);
                let (band, keys) = (band.moved(-query_origin), keys.moved(-key_origin));
                packed.inner.signature(band, keys, meter, out)
            }
            Node::Blocks { size, relation } => {
                let (query_block, key_block) = (size.floor(band.start), size.floor(keys.start));
                let one_each = band.start >= 0
                    && keys.start >= 0
                    && size.floor(band.last()) == query_block
                    && size.floor(keys.last()) == key_block;
                if one_each {
                    let ranges = relation.row(query_block, meter);
                    let at = ranges.partition_point(|range| range.1 <= key_block);
                    out.push(ranges.get(at).is_some_and(|range| range.0 <= key_block).into());
                }
                one_each
            }
            Node::And(parts, _) | Node::Or(parts, _) => {
                parts.iter_mut().all(|part| part.signature(band, keys, meter, out))
            }
            Node::Not(inner, _) => inner.signature(band, keys, meter, out),
        }
    }
}
