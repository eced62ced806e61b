//! Which stretches of keys a band of queries sees, for every leaf and for the algebra.

use super::arith::{Congruence, Divisor, gcd};
use super::relation::edge;
use super::segment::{self, Class, Segment, push};
use super::{Band, Keys, Node, Packed, Question, Relation, Scratch};
use crate::meter::{CONGRUENCE, Meter, SEGMENT};
use crate::pattern::Lengths;

impl Keys {
    /// Appends the keys at the positions `from..to`.
    #[inline]
    fn emit(&self, from: i64, to: i64, class: Class, period: u32, out: &mut Vec<Segment>) {
        let (start, end) = (self.number_at_least(from), self.number_at_least(to));
        push(out, Segment { start, end, class, period });
    }

    /// Appends all keys.
    fn emit_all(&self, class: Class, period: i64, out: &mut Vec<Segment>) {
        let period = u32::try_from(period).unwrap_or(0);
        push(out, Segment { start: self.low, end: self.high, class, period });
    }

    /// Appends the keys that solve a congruence, `a` being its constant at key number 0: one by
    /// one where they are more than a block apart, else as one stretch to look at.
    fn emit_solutions(
        &self,
        congruence: &Congruence,
        a: i64,
        class: Class,
        meter: &mut Meter<'_>,
        out: &mut Vec<Segment>,
    ) {
        let period = congruence.period;
        let Some(first) = congruence.first(a) else { return };
        if period == 1 {
            self.emit_all(class, 1, out);
        } else if period <= self.block {
            self.emit_all(Class::Unknown, period, out);
        } else {
            let mut number = first + period * super::div_ceil(self.low - first, period);
            while number < self.high && meter.has_room(out.len(), self) {
                push(out, Segment { start: number, end: number + 1, class, period: 1 });
                number += period;
            }
        }
    }
}

impl Node {
    pub(super) fn ask(&mut self, asked: Question, meter: &mut Meter<'_>, out: &mut Vec<Segment>) {
        let Question { band, keys } = asked;
        if keys.low >= keys.high {
            return;
        }
        meter.question();
        match self {
            Node::Full => keys.emit_all(Class::Full, 1, out),
            Node::Window { left, right } => window(*left, *right, band, keys, out),
            Node::KeyRange { low, high } => keys.emit(*low, *high, Class::Full, 1, out),
            Node::QueryRange { low, high } => {
                let inside = band.number_at_least(*high) - band.number_at_least(*low);
                if inside > 0 {
                    keys.emit_all(whole_or_part(inside, band), 1, out);
                }
            }
            Node::Strided { stride } => strided(*stride, band, keys, meter, out),
            Node::Comb { period, grain } => comb(*period, *grain, keys, meter, out),
            Node::Dilated { segment, rate, offset } => {
                dilated([*segment, *rate, *offset], band, keys, meter, out);
            }
            Node::Documents { lengths, hint } => documents(lengths, hint, band, keys, meter, out),
            Node::Packed(packed) => packed.ask(asked, meter, out),
            Node::Blocks { size, relation } => blocks(*size, relation, asked, meter, out),
            Node::And(parts, scratch) => ask_all(parts, scratch, asked, meter, out),
            Node::Or(parts, scratch) => ask_any(parts, scratch, asked, meter, out),
            Node::Not(inner, Scratch { left, .. }) => {
                left.clear();
                inner.ask(asked, meter, left);
                meter.spend(SEGMENT * left.len() as u64);
                segment::not(left, keys.low, keys.high, out);
            }
        }
    }
}

/// Full where the whole band sees it, Mixed where `seen` of its queries do.
fn whole_or_part(seen: i64, band: Band) -> Class {
    if seen == band.len { Class::Full } else { Class::Mixed }
}

/// Each part after the first is asked only about what the parts before it see.
fn ask_all(
    parts: &mut [Node],
    Scratch { left, right, both, .. }: &mut Scratch,
    asked: Question,
    meter: &mut Meter<'_>,
    out: &mut Vec<Segment>,
) {
    let [first, middle @ .., last] = parts else {
        return parts.iter_mut().for_each(|part| part.ask(asked, meter, out));
    };
    left.clear();
    first.ask(asked, meter, left);
    for part in middle {
        if meter.halted() {
            return;
        }
        right.clear();
        ask_within(part, left, asked, meter, right);
        both.clear();
        meter.spend(SEGMENT * (left.len() + right.len()) as u64);
        segment::and(left, right, both);
        std::mem::swap(left, both);
    }
    right.clear();
    ask_within(last, left, asked, meter, right);
    meter.spend(SEGMENT * (left.len() + right.len()) as u64);
    segment::and(left, right, out);
}

/// Asks about the stretches of keys that `seen` covers.
fn ask_within(
    part: &mut Node,
    seen: &[Segment],
    asked: Question,
    meter: &mut Meter<'_>,
    out: &mut Vec<Segment>,
) {
    let mut rest = seen.iter();
    let Some(first) = rest.next() else { return };
    let (mut low, mut high) = (first.start, first.end);
    for next in rest {
        // A gap below a block is asked across: it can't save a block.
        if next.start - high >= asked.keys.block {
            if meter.halted() {
                return;
            }
            part.ask(asked.within(low, high), meter, out);
            low = next.start;
        }
        high = next.end;
    }
    part.ask(asked.within(low, high), meter, out);
}

fn ask_any(
    parts: &mut [Node],
    Scratch { left, right, both, .. }: &mut Scratch,
    asked: Question,
    meter: &mut Meter<'_>,
    out: &mut Vec<Segment>,
) {
    let [first, middle @ .., last] = parts else {
        return parts.iter_mut().for_each(|part| part.ask(asked, meter, out));
    };
    left.clear();
    first.ask(asked, meter, left);
    for part in middle {
        if meter.halted() {
            return;
        }
        right.clear();
        part.ask(asked, meter, right);
        both.clear();
        meter.spend(SEGMENT * (left.len() + right.len()) as u64);
        segment::or(left, right, both);
        std::mem::swap(left, both);
    }
    right.clear();
    last.ask(asked, meter, right);
    meter.spend(SEGMENT * (left.len() + right.len()) as u64);
    segment::or(left, right, out);
}

/// The keys that all queries see lie between the last query's left end and the first query's
/// right end; those that any query sees reach from the first's left end to the last's right end.
/// In between every key is Mixed, unless the queries stand so far apart that a key falls between
/// two windows.
#[inline]
fn window(left: i64, right: i64, band: Band, keys: Keys, out: &mut Vec<Segment>) {
    let (first, last) = (band.start, band.last());
    let seen = (first - left, last + right + 1);
    let by_all = (last - left, first + right + 1);
    if by_all.0 < by_all.1 {
        keys.emit(seen.0, by_all.0, Class::Mixed, 0, out);
        keys.emit(by_all.0, by_all.1, Class::Full, 1, out);
        keys.emit(by_all.1, seen.1, Class::Mixed, 0, out);
    } else {
        let class = if band.step <= left + right + 1 { Class::Mixed } else { Class::Unknown };
        keys.emit(seen.0, seen.1, class, 0, out);
    }
}

fn strided(stride: i64, band: Band, keys: Keys, meter: &mut Meter<'_>, out: &mut Vec<Segment>) {
    meter.spend(CONGRUENCE);
    let by_key = || Congruence::new(keys.step, stride);
    if band.len == 1 || band.step % stride == 0 {
        // One residue: a key is seen by the whole band or by nobody.
        return keys.emit_solutions(&by_key(), keys.start - band.start, Class::Full, meter, out);
    }
    let span = band.last() - band.start;
    if stride - span > keys.block.saturating_mul(keys.step) {
        // The residues of the band leave gaps that are worth skipping.
        let class = if band.step == 1 { Class::Mixed } else { Class::Unknown };
        let from = keys.position(keys.low) - span - band.start;
        let mut turn = band.start + stride * super::div_ceil(from, stride);
        while turn <= keys.position(keys.high - 1) && meter.has_room(out.len(), &keys) {
            keys.emit(turn, turn + span + 1, class, 0, out);
            turn += stride;
        }
        return;
    }
    let every_residue = band.len >= stride && gcd(band.step, stride) == 1;
    let class = if every_residue { Class::Mixed } else { Class::Unknown };
    keys.emit_all(class, by_key().period, out);
}

fn comb(period: i64, grain: i64, keys: Keys, meter: &mut Meter<'_>, out: &mut Vec<Segment>) {
    if period == grain {
        keys.emit_all(Class::Full, 1, out);
    } else if period - grain >= keys.block.saturating_mul(keys.step) {
        let mut tooth = keys.position(keys.low).div_euclid(period) * period;
        let end = keys.position(keys.high - 1);
        while tooth <= end && meter.has_room(out.len(), &keys) {
            keys.emit(tooth, tooth + grain, Class::Full, 1, out);
            tooth += period;
        }
    } else if keys.step % period == 0 {
        if keys.start.rem_euclid(period) < grain {
            keys.emit_all(Class::Full, 1, out);
        }
    } else {
        keys.emit_all(Class::Unknown, period / gcd(period, keys.step), out);
    }
}

fn dilated(
    [segment, rate, offset]: [i64; 3],
    band: Band,
    keys: Keys,
    meter: &mut Meter<'_>,
    out: &mut Vec<Segment>,
) {
    meter.spend(2 * CONGRUENCE);
    let by_query = Congruence::new(band.step, rate);
    let by_key = Congruence::new(keys.step, rate);
    let mut from = band.number_at_least(0);
    while from < band.len && !meter.halted() {
        meter.spend(SEGMENT);
        let query = band.at(from);
        let start = query - query % segment;
        let to = band.number_at_least(start + segment).max(from + 1);
        let seeing = by_query.count(query - start - offset, to - from);
        if seeing > 0 {
            let low = keys.number_at_least(start);
            let high = keys.number_at_least(start + segment);
            if low < high {
                let class = whole_or_part(seeing, band);
                let within = keys.within(low, high);
                within.emit_solutions(&by_key, keys.start - start - offset, class, meter, out);
            }
        }
        from = to;
    }
}

fn documents(
    lengths: &Lengths,
    hint: &mut usize,
    band: Band,
    keys: Keys,
    meter: &mut Meter<'_>,
    out: &mut Vec<Segment>,
) {
    let mut from = band.number_at_least(0);
    let end = band.number_at_least(lengths.total());
    while from < end && !meter.halted() {
        meter.spend(SEGMENT);
        *hint = lengths.find(band.at(from), *hint);
        let to = band.number_at_least(lengths.end(*hint));
        let class = whole_or_part(to - from, band);
        keys.emit(lengths.start(*hint), lengths.end(*hint), class, 1, out);
        from = to;
    }
}

impl Packed {
    /// Calls `visit` for each sequence that the band touches: the numbers of its queries, and the
    /// sequence.
    pub(super) fn sequences(
        &mut self,
        band: Band,
        mut visit: impl FnMut(&mut Self, i64, i64, usize),
    ) {
        let numbers = band.moved(self.queries.total() - self.keys.total());
        let mut from = numbers.number_at_least(0);
        let end = numbers.number_at_least(self.queries.total());
        while from < end {
            self.hint = self.queries.find(numbers.at(from), self.hint);
            let to = numbers.number_at_least(self.queries.end(self.hint));
            visit(self, from, to, self.hint);
            from = to;
        }
    }

    /// Positions within sequence `index` are a query's minus the first of these, a key's minus
    /// the second.
    pub(super) fn origins(&self, index: usize) -> (i64, i64) {
        let aligned = self.keys.length(index) - self.queries.length(index);
        let first_query = self.keys.total() - self.queries.total() + self.queries.start(index);
        (first_query - aligned, self.keys.start(index))
    }

    fn ask(&mut self, asked: Question, meter: &mut Meter<'_>, out: &mut Vec<Segment>) {
        let Question { band, keys } = asked;
        self.sequences(band, |packed, from, to, index| {
            let low = keys.number_at_least(packed.keys.start(index));
            let high = keys.number_at_least(packed.keys.end(index));
            if low >= high {
                return;
            }
            let (query_origin, key_origin) = packed.origins(index);
            let inner_band = band.part(from, to - from).moved(-query_origin);
            let inner_keys = keys.moved(-key_origin).within(low, high);
            let found = &mut packed.scratch.left;
            found.clear();
            packed.inner.ask(Question { band: inner_band, keys: inner_keys }, meter, found);
            meter.spend(SEGMENT * (1 + found.len() as u64));
            for segment in found.iter() {
                let class = match segment.class {
                    class if to - from == band.len => class,
                    class => segment::beside_nothing(class),
                };
                push(out, Segment { class, ..*segment });
            }
        });
    }
}

/// A band may touch several query blocks. A key block that all of them see is Full, one that some
/// see is Mixed: count the views that begin and end at each edge.
fn blocks(
    size: Divisor,
    relation: &mut Relation,
    asked: Question,
    meter: &mut Meter<'_>,
    out: &mut Vec<Segment>,
) {
    let Question { band, keys } = asked;
    let first_key_block = size.floor(keys.position(keys.low));
    let last_key_block = size.floor(keys.position(keys.high - 1));
    let inside = |ranges: &[(i64, i64)]| match ranges {
        // Mostly the keys asked about are all there are.
        [first, .., last] if first.1 > first_key_block && last.0 <= last_key_block => {
            0..ranges.len()
        }
        _ => {
            let from = ranges.partition_point(|range| range.1 <= first_key_block);
            let to = ranges.partition_point(|range| range.0 <= last_key_block);
            from..to.max(from)
        }
    };
    let position = |block: i64| edge(block, size);

    let from = band.number_at_least(0);
    if from == band.len {
        return;
    }
    let query_block = size.floor(band.at(from));
    if from == 0 && size.floor(band.last()) == query_block {
        let ranges = relation.row(query_block, meter);
        let ranges = &ranges[inside(ranges)];
        meter.spend(SEGMENT * ranges.len() as u64);
        for range in ranges {
            keys.emit(position(range.0), position(range.1), Class::Full, 1, out);
        }
        return;
    }
    let mut edges = std::mem::take(&mut relation.edges);
    edges.clear();
    let mut at = from;
    while at < band.len && meter.has_room(edges.len() / 2, &keys) {
        let query_block = size.floor(band.at(at));
        let to = band.number_at_least(position(query_block + 1)).max(at + 1);
        let ranges = relation.row_of_several(query_block, meter);
        let ranges = &ranges[inside(ranges)];
        // Each edge is sorted, too.
        meter.spend(32 * SEGMENT * ranges.len() as u64);
        for range in ranges {
            edges.extend([(range.0, to - at), (range.1, at - to)]);
        }
        at = to;
    }
    edges.sort_unstable();
    let mut seeing = 0;
    for pair in edges.windows(2) {
        seeing += pair[0].1;
        if seeing > 0 {
            let class = whole_or_part(seeing, band);
            keys.emit(position(pair[0].0), position(pair[1].0), class, 1, out);
        }
    }
    relation.edges = edges;
}
