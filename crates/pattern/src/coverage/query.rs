//! Intervals of keys that a range of queries attends to, per leaf and per operator.

use super::interval::{self, Interval, KeyCoverage, push};
use super::node::{Node, Packed, Scratch};
use super::ranges::{CoverageQuery, KeyRange, PositionRange};
use super::relation::{Relation, block_start};
use crate::arith::{Congruence, Divisor, div_ceil, gcd};
use crate::meter::{CONGRUENCE, INTERVAL, Meter};
use crate::pattern::Lengths;

impl KeyRange {
    /// Appends the keys at the positions `from..to`.
    #[inline]
    pub(super) fn emit(
        &self,
        from: i64,
        to: i64,
        coverage: KeyCoverage,
        period: u32,
        out: &mut Vec<Interval>,
    ) {
        let (start, end) = (self.index_at_least(from), self.index_at_least(to));
        push(out, Interval { start, end, coverage, period });
    }

    /// Appends all keys.
    pub(super) fn emit_all(&self, coverage: KeyCoverage, period: i64, out: &mut Vec<Interval>) {
        let period = u32::try_from(period).unwrap_or(0);
        push(out, Interval { start: self.low, end: self.high, coverage, period });
    }

    /// Appends the keys that solve a congruence, `a` being its constant at key 0: one by one
    /// where they are more than a block apart, else as one Unknown interval.
    fn emit_solutions(
        &self,
        congruence: &Congruence,
        a: i64,
        coverage: KeyCoverage,
        meter: &mut Meter<'_>,
        out: &mut Vec<Interval>,
    ) {
        let period = congruence.period;
        let Some(first) = congruence.first(a) else { return };
        if period == 1 {
            self.emit_all(coverage, 1, out);
        } else if period <= self.block {
            self.emit_all(KeyCoverage::Unknown, period, out);
        } else {
            let mut index = first + period * div_ceil(self.low - first, period);
            while index < self.high && meter.has_room(out.len(), self.max_intervals) {
                push(out, Interval { start: index, end: index + 1, coverage, period: 1 });
                index += period;
            }
        }
    }
}

impl Node {
    pub(super) fn coverage(
        &mut self,
        query: CoverageQuery,
        meter: &mut Meter<'_>,
        out: &mut Vec<Interval>,
    ) {
        let CoverageQuery { queries, keys } = query;
        if keys.low >= keys.high {
            return;
        }
        meter.coverage_query();
        match self {
            Node::Full => keys.emit_all(KeyCoverage::Full, 1, out),
            Node::Window { left, right } => window(*left, *right, queries, keys, out),
            Node::KeyRange { low, high } => keys.emit(*low, *high, KeyCoverage::Full, 1, out),
            Node::QueryRange { low, high } => {
                let inside = queries.index_at_least(*high) - queries.index_at_least(*low);
                if inside > 0 {
                    keys.emit_all(full_or_partial(inside, queries), 1, out);
                }
            }
            Node::Axis(axis) => axis.coverage(query, meter, out),
            Node::Strided { stride } => strided(*stride, queries, keys, meter, out),
            Node::Comb { period, grain } => comb(*period, *grain, keys, meter, out),
            Node::Dilated { segment, rate, offset } => {
                dilated([*segment, *rate, *offset], queries, keys, meter, out);
            }
            Node::Documents { lengths, hint } => {
                documents(lengths, hint, queries, keys, meter, out)
            }
            Node::Packed(packed) => packed.coverage(query, meter, out),
            Node::Blocks { size, relation } => blocks(*size, relation, query, meter, out),
            Node::And(parts, scratch) => combine(Operator::And, parts, scratch, query, meter, out),
            Node::Or(parts, scratch) => combine(Operator::Or, parts, scratch, query, meter, out),
            Node::Not(inner, Scratch { left, .. }) => {
                left.clear();
                inner.coverage(query, meter, left);
                meter.spend(INTERVAL * left.len() as u64);
                interval::not(left, keys.low, keys.high, out);
            }
        }
    }
}

/// Full if all queries attend to a key, Partial if `active` of them do.
fn full_or_partial(active: i64, queries: PositionRange) -> KeyCoverage {
    if active == queries.len { KeyCoverage::Full } else { KeyCoverage::Partial }
}

#[derive(Clone, Copy)]
enum Operator {
    And,
    Or,
}

/// Combines the operands from left to right. Those of a conjunction after the first are queried only
/// within the intervals of those before them.
fn combine(
    operator: Operator,
    parts: &mut [Node],
    Scratch { left, right, both, .. }: &mut Scratch,
    query: CoverageQuery,
    meter: &mut Meter<'_>,
    out: &mut Vec<Interval>,
) {
    let [first, middle @ .., last] = parts else {
        return parts.iter_mut().for_each(|part| part.coverage(query, meter, out));
    };
    left.clear();
    first.coverage(query, meter, left);
    let mut combine_next =
        |left: &[Interval], part: &mut Node, meter: &mut Meter<'_>, out: &mut Vec<Interval>| {
            right.clear();
            match operator {
                Operator::And => coverage_within(part, left, query, meter, right),
                Operator::Or => part.coverage(query, meter, right),
            }
            meter.spend(INTERVAL * (left.len() + right.len()) as u64);
            match operator {
                Operator::And => interval::and(left, right, out),
                Operator::Or => interval::or(left, right, out),
            }
        };
    for part in middle {
        if meter.halted() {
            return;
        }
        both.clear();
        combine_next(left, part, meter, both);
        std::mem::swap(left, both);
    }
    combine_next(left, last, meter, out);
}

/// Queries the ranges of keys that `within` covers.
fn coverage_within(
    part: &mut Node,
    within: &[Interval],
    query: CoverageQuery,
    meter: &mut Meter<'_>,
    out: &mut Vec<Interval>,
) {
    let mut rest = within.iter();
    let Some(first) = rest.next() else { return };
    let (mut low, mut high) = (first.start, first.end);
    for next in rest {
        // A gap smaller than a block saves no block.
        if next.start - high >= query.keys.block {
            if meter.halted() {
                return;
            }
            part.coverage(query.within(low, high), meter, out);
            low = next.start;
        }
        high = next.end;
    }
    part.coverage(query.within(low, high), meter, out);
}

/// Keys active for all queries lie between the last query's left end and the first query's right
/// end; keys active for any query, between the first's left end and the last's right end. The
/// difference is Partial, unless the step between queries leaves keys between two windows.
#[inline]
fn window(left: i64, right: i64, queries: PositionRange, keys: KeyRange, out: &mut Vec<Interval>) {
    let (first, last) = (queries.start, queries.last());
    let by_any = (first - left, last + right + 1);
    let by_all = (last - left, first + right + 1);
    if by_all.0 < by_all.1 {
        keys.emit(by_any.0, by_all.0, KeyCoverage::Partial, 0, out);
        keys.emit(by_all.0, by_all.1, KeyCoverage::Full, 1, out);
        keys.emit(by_all.1, by_any.1, KeyCoverage::Partial, 0, out);
    } else {
        let coverage = if queries.step <= left + right + 1 {
            KeyCoverage::Partial
        } else {
            KeyCoverage::Unknown
        };
        keys.emit(by_any.0, by_any.1, coverage, 0, out);
    }
}

fn strided(
    stride: i64,
    queries: PositionRange,
    keys: KeyRange,
    meter: &mut Meter<'_>,
    out: &mut Vec<Interval>,
) {
    meter.spend(CONGRUENCE);
    let by_key = || Congruence::new(keys.step, stride);
    if queries.len == 1 || queries.step % stride == 0 {
        // One residue: a key is active for all queries or for none.
        return keys.emit_solutions(
            &by_key(),
            keys.start - queries.start,
            KeyCoverage::Full,
            meter,
            out,
        );
    }
    let span = queries.last() - queries.start;
    if stride - span > keys.block.saturating_mul(keys.step) {
        // The residues of the queries leave gaps of at least a block.
        let coverage = if queries.step == 1 { KeyCoverage::Partial } else { KeyCoverage::Unknown };
        let from = keys.position(keys.low) - span - queries.start;
        let mut start = queries.start + stride * div_ceil(from, stride);
        while start <= keys.position(keys.high - 1) && meter.has_room(out.len(), keys.max_intervals)
        {
            keys.emit(start, start + span + 1, coverage, 0, out);
            start += stride;
        }
        return;
    }
    let every_residue = queries.len >= stride && gcd(queries.step, stride) == 1;
    let coverage = if every_residue { KeyCoverage::Partial } else { KeyCoverage::Unknown };
    keys.emit_all(coverage, by_key().period, out);
}

fn comb(period: i64, grain: i64, keys: KeyRange, meter: &mut Meter<'_>, out: &mut Vec<Interval>) {
    if period == grain {
        keys.emit_all(KeyCoverage::Full, 1, out);
    } else if period - grain >= keys.block.saturating_mul(keys.step) {
        let mut tooth = keys.position(keys.low).div_euclid(period) * period;
        let end = keys.position(keys.high - 1);
        while tooth <= end && meter.has_room(out.len(), keys.max_intervals) {
            keys.emit(tooth, tooth + grain, KeyCoverage::Full, 1, out);
            tooth += period;
        }
    } else if keys.step % period == 0 {
        if keys.start.rem_euclid(period) < grain {
            keys.emit_all(KeyCoverage::Full, 1, out);
        }
    } else {
        keys.emit_all(KeyCoverage::Unknown, period / gcd(period, keys.step), out);
    }
}

fn dilated(
    [segment, rate, offset]: [i64; 3],
    queries: PositionRange,
    keys: KeyRange,
    meter: &mut Meter<'_>,
    out: &mut Vec<Interval>,
) {
    meter.spend(2 * CONGRUENCE);
    let by_query = Congruence::new(queries.step, rate);
    let by_key = Congruence::new(keys.step, rate);
    let mut from = queries.index_at_least(0);
    while from < queries.len && !meter.halted() {
        meter.spend(INTERVAL);
        let query = queries.at(from);
        let start = query - query % segment;
        let to = queries.index_at_least(start + segment).max(from + 1);
        let active = by_query.count(query - start - offset, to - from);
        if active > 0 {
            let low = keys.index_at_least(start);
            let high = keys.index_at_least(start + segment);
            if low < high {
                let coverage = full_or_partial(active, queries);
                let within = keys.within(low, high);
                within.emit_solutions(&by_key, keys.start - start - offset, coverage, meter, out);
            }
        }
        from = to;
    }
}

fn documents(
    lengths: &Lengths,
    hint: &mut usize,
    queries: PositionRange,
    keys: KeyRange,
    meter: &mut Meter<'_>,
    out: &mut Vec<Interval>,
) {
    let mut from = queries.index_at_least(0);
    let end = queries.index_at_least(lengths.total());
    while from < end && !meter.halted() {
        meter.spend(INTERVAL);
        *hint = lengths.find(queries.at(from), *hint);
        let to = queries.index_at_least(lengths.end(*hint));
        let coverage = full_or_partial(to - from, queries);
        keys.emit(lengths.start(*hint), lengths.end(*hint), coverage, 1, out);
        from = to;
    }
}

impl Packed {
    /// Calls `visit` with the query indices and the number of each sequence that `queries` overlap.
    pub(super) fn sequences(
        &mut self,
        queries: PositionRange,
        mut visit: impl FnMut(&mut Self, i64, i64, usize),
    ) {
        let tokens = queries.moved(self.queries.total() - self.keys.total());
        let mut from = tokens.index_at_least(0);
        let end = tokens.index_at_least(self.queries.total());
        while from < end {
            self.hint = self.queries.find(tokens.at(from), self.hint);
            let to = tokens.index_at_least(self.queries.end(self.hint));
            visit(self, from, to, self.hint);
            from = to;
        }
    }

    /// The origins of query and key positions within sequence `index`.
    pub(super) fn origins(&self, index: usize) -> (i64, i64) {
        let aligned = self.keys.length(index) - self.queries.length(index);
        let first_query = self.keys.total() - self.queries.total() + self.queries.start(index);
        (first_query - aligned, self.keys.start(index))
    }

    fn coverage(&mut self, query: CoverageQuery, meter: &mut Meter<'_>, out: &mut Vec<Interval>) {
        let CoverageQuery { queries, keys } = query;
        self.sequences(queries, |packed, from, to, index| {
            let low = keys.index_at_least(packed.keys.start(index));
            let high = keys.index_at_least(packed.keys.end(index));
            if low >= high {
                return;
            }
            let (query_origin, key_origin) = packed.origins(index);
            let inner_queries = queries.part(from, to - from).moved(-query_origin);
            let inner_keys = keys.moved(-key_origin).within(low, high);
            let found = &mut packed.scratch.left;
            found.clear();
            packed.inner.coverage(
                CoverageQuery { queries: inner_queries, keys: inner_keys },
                meter,
                found,
            );
            meter.spend(INTERVAL * (1 + found.len() as u64));
            for segment in found.iter() {
                let coverage = match segment.coverage {
                    coverage if to - from == queries.len => coverage,
                    coverage => interval::with_masked_queries(coverage),
                };
                push(out, Interval { coverage, ..*segment });
            }
        });
    }
}

/// A range of queries may overlap several query blocks. A key block active for all of them is
/// Full, for some of them Partial: count the ranges that begin and end at each edge.
fn blocks(
    size: Divisor,
    relation: &mut Relation,
    query: CoverageQuery,
    meter: &mut Meter<'_>,
    out: &mut Vec<Interval>,
) {
    let CoverageQuery { queries, keys } = query;
    let first_key_block = size.floor(keys.position(keys.low));
    let last_key_block = size.floor(keys.position(keys.high - 1));
    let inside = |ranges: &[(i64, i64)]| match ranges {
        // Common case: the query spans all keys.
        [first, .., last] if first.1 > first_key_block && last.0 <= last_key_block => {
            0..ranges.len()
        }
        _ => {
            let from = ranges.partition_point(|range| range.1 <= first_key_block);
            let to = ranges.partition_point(|range| range.0 <= last_key_block);
            from..to.max(from)
        }
    };
    let position = |block: i64| block_start(block, size);

    let from = queries.index_at_least(0);
    if from == queries.len {
        return;
    }
    let query_block = size.floor(queries.at(from));
    if from == 0 && size.floor(queries.last()) == query_block {
        let ranges = relation.row(query_block, meter);
        let ranges = &ranges[inside(ranges)];
        meter.spend(INTERVAL * ranges.len() as u64);
        if meter.has_room(ranges.len(), keys.max_intervals) {
            for range in ranges {
                keys.emit(position(range.0), position(range.1), KeyCoverage::Full, 1, out);
            }
        }
        return;
    }
    let mut edges = std::mem::take(&mut relation.edges);
    edges.clear();
    let mut at = from;
    while at < queries.len && meter.has_room(edges.len() / 2, keys.max_intervals) {
        let query_block = size.floor(queries.at(at));
        let to = queries.index_at_least(position(query_block + 1)).max(at + 1);
        let ranges = relation.row_of_several(query_block, meter);
        let ranges = &ranges[inside(ranges)];
        // Includes sorting the edges.
        meter.spend(32 * INTERVAL * ranges.len() as u64);
        for range in ranges {
            edges.extend([(range.0, to - at), (range.1, at - to)]);
        }
        at = to;
    }
    if !meter.has_room(edges.len() / 2, keys.max_intervals) {
        edges.clear();
    }
    edges.sort_unstable();
    let mut active = 0;
    for pair in edges.windows(2) {
        active += pair[0].1;
        if active > 0 {
            let coverage = full_or_partial(active, queries);
            keys.emit(position(pair[0].0), position(pair[1].0), coverage, 1, out);
        }
    }
    relation.edges = edges;
}
