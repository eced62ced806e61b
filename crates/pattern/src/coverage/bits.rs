//! Mask bits: one word of at most 64 keys per query.

use super::PositionRange;
use super::node::{Node, Scratch};
use super::relation::block_start;
use crate::arith::{Congruence, bit_range};
use crate::meter::{CONGRUENCE, Meter};

/// Additional units per query whose residue takes a division.
const BITS: u64 = 4;

impl PositionRange {
    /// The bits of the keys at the positions `from..to`, `self` being the keys.
    #[inline]
    pub(super) fn bits(&self, from: i64, to: i64) -> u64 {
        bit_range(self.index_at_least(from), self.index_at_least(to))
    }

    /// The bits of all keys.
    fn all_bits(&self) -> u64 {
        bit_range(0, self.len)
    }

    /// The bits of the keys for which `holds`.
    pub(super) fn bits_where(&self, holds: impl Fn(i64) -> bool) -> u64 {
        (0..self.len).filter(|&i| holds(self.at(i))).fold(0, |bits, i| bits | 1 << i)
    }
}

impl Node {
    pub(super) fn fill(
        &mut self,
        queries: PositionRange,
        keys: PositionRange,
        meter: &mut Meter<'_>,
        out: &mut [u64],
    ) {
        match self {
            Node::Full => out.fill(keys.all_bits()),
            Node::Window { left, right } => {
                let mut query = queries.start;
                for word in out {
                    *word = keys.bits(query - *left, query + *right + 1);
                    query += queries.step;
                }
            }
            Node::KeyRange { low, high } => out.fill(keys.bits(*low, *high)),
            Node::QueryRange { low, high } => {
                let inside = queries.index_at_least(*low)..queries.index_at_least(*high);
                out.fill(0);
                if !inside.is_empty() {
                    out[inside.start as usize..inside.end as usize].fill(keys.all_bits());
                }
            }
            Node::Axis(axis) => {
                meter.spend(2 * BITS * out.len() as u64);
                axis.fill(queries, keys, out);
            }
            Node::Strided { stride } => {
                meter.spend(CONGRUENCE + BITS * out.len() as u64);
                strided(*stride, queries, keys, out);
            }
            Node::Comb { period, grain } => {
                meter.spend(8 * keys.len as u64);
                out.fill(keys.bits_where(|key| key.rem_euclid(*period) < *grain));
            }
            Node::Dilated { segment, rate, offset } => {
                meter.spend(CONGRUENCE + BITS * out.len() as u64);
                dilated(*segment, *rate, *offset, queries, keys, out);
            }
            Node::Documents { lengths, hint } => {
                out.fill(0);
                let mut from = queries.index_at_least(0);
                let end = queries.index_at_least(lengths.total());
                while from < end {
                    *hint = lengths.find(queries.at(from), *hint);
                    let to = queries.index_at_least(lengths.end(*hint));
                    let bits = keys.bits(lengths.start(*hint), lengths.end(*hint));
                    out[from as usize..to as usize].fill(bits);
                    from = to;
                }
            }
            Node::Packed(packed) => {
                out.fill(0);
                packed.sequences(queries, |packed, from, to, index| {
                    let bits = keys.bits(packed.keys.start(index), packed.keys.end(index));
                    if bits == 0 {
                        return;
                    }
                    let (query_origin, key_origin) = packed.origins(index);
                    let inner_queries = queries.part(from, to - from).moved(-query_origin);
                    let rows = &mut out[from as usize..to as usize];
                    packed.inner.fill(inner_queries, keys.moved(-key_origin), meter, rows);
                    rows.iter_mut().for_each(|word| *word &= bits);
                });
            }
            Node::Blocks { size, relation } => {
                out.fill(0);
                let mut from = queries.index_at_least(0);
                while from < queries.len {
                    let query_block = size.floor(queries.at(from));
                    let end = block_start(query_block + 1, *size);
                    let to = queries.index_at_least(end).max(from + 1);
                    let (low, high) = (size.floor(keys.start), size.floor(keys.last()));
                    let ranges = relation.row_of_several(query_block, meter);
                    let first = ranges.partition_point(|range| range.1 <= low);
                    let mut bits = 0;
                    for range in ranges[first..].iter().take_while(|range| range.0 <= high) {
                        bits |= keys.bits(block_start(range.0, *size), block_start(range.1, *size));
                    }
                    out[from as usize..to as usize].fill(bits);
                    from = to;
                }
            }
            Node::And(parts, Scratch { words, .. }) => {
                fill_with(parts, words, (queries, keys), meter, out, |word, part| word & part);
            }
            Node::Or(parts, Scratch { words, .. }) => {
                fill_with(parts, words, (queries, keys), meter, out, |word, part| word | part);
            }
            Node::Not(inner, _) => {
                inner.fill(queries, keys, meter, out);
                let all = keys.all_bits();
                out.iter_mut().for_each(|word| *word = !*word & all);
            }
        }
    }
}

fn fill_with(
    parts: &mut [Node],
    words: &mut Vec<u64>,
    (queries, keys): (PositionRange, PositionRange),
    meter: &mut Meter<'_>,
    out: &mut [u64],
    combine: impl Fn(u64, u64) -> u64,
) {
    let (first, rest) = parts.split_first_mut().expect("two or more parts");
    first.fill(queries, keys, meter, out);
    words.resize(out.len(), 0);
    for part in rest {
        part.fill(queries, keys, meter, words);
        for (word, part) in out.iter_mut().zip(&*words) {
            *word = combine(*word, *part);
        }
    }
}

/// Every `period`-th bit from the first solution on.
fn strided(stride: i64, queries: PositionRange, keys: PositionRange, out: &mut [u64]) {
    let congruence = Congruence::new(keys.step, stride);
    let every = every_bit(congruence.period);
    let all = keys.all_bits();
    let mut query = queries.start;
    for word in out {
        *word = match congruence.first(keys.start - query) {
            Some(first) if first < 64 => every << first & all,
            _ => 0,
        };
        query += queries.step;
    }
}

fn every_bit(period: i64) -> u64 {
    (0..64).step_by(period.min(64) as usize).fold(0, |bits, i| bits | 1 << i)
}

fn dilated(
    segment: i64,
    rate: i64,
    offset: i64,
    queries: PositionRange,
    keys: PositionRange,
    out: &mut [u64],
) {
    let congruence = Congruence::new(keys.step, rate);
    let every = every_bit(congruence.period);
    out.fill(0);
    let mut from = queries.index_at_least(0);
    while from < queries.len {
        let start = queries.at(from) - queries.at(from) % segment;
        let to = queries.index_at_least(start + segment).max(from + 1);
        let bits = match congruence.first(keys.start - start - offset) {
            Some(first) if first < 64 => every << first & keys.bits(start, start + segment),
            _ => 0,
        };
        for index in from..to {
            if (queries.at(index) - start) % rate == offset {
                out[index as usize] = bits;
            }
        }
        from = to;
    }
}
