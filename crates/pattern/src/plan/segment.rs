//! Answers: sorted stretches of keys, each with what a band of queries sees of it.
//!
//! A question is a *band* of queries (one progression, at most a block of them) × a progression
//! of keys. Its answer is a list of [`Segment`]s in ascending order over the keys' own numbers;
//! what lies between them is Empty. A segment is
//!
//! ```text
//! Full     every query of the band sees every key
//! Mixed    every single key is seen by one query of the band and not by another
//! Unknown  no promise
//! ```
//!
//! `Mixed` speaks of single keys, not of blocks, so it survives any cut: every block that touches
//! a Mixed segment is Partial, exactly, and nobody has to look at its positions. Conjunction and
//! disjunction of two Mixed are Unknown; only those are looked at.
//!
//! `period` promises more: within the segment, keys `period` apart are seen by the same queries.
//! So a segment of any length is known after looking at one period, which keeps `strided(3)` over
//! a million keys at the price of three blocks. Zero promises nothing.

use super::arith::gcd;

/// What a band sees of a stretch of keys. The order is that of certainty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Full,
    Mixed,
    Unknown,
}

/// A stretch of keys with one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) start: i64,
    pub(crate) end: i64,
    pub(crate) class: Class,
    pub(crate) period: u32,
}

/// Appends a segment, if there is anything in it, joining Full to Full.
#[inline]
pub(crate) fn push(out: &mut Vec<Segment>, segment: Segment) {
    if segment.start >= segment.end {
        return;
    }
    if let Some(last) = out.last_mut() {
        debug_assert!(last.end <= segment.start);
        if last.end == segment.start && last.class == Class::Full && segment.class == Class::Full {
            last.end = segment.end;
            return;
        }
    }
    out.push(segment);
}

/// Least common multiple of two periods; 0 (no promise) where it is too long to be of use.
#[inline]
fn common(a: u32, b: u32) -> u32 {
    if a == b || b == 1 {
        return a;
    }
    if a == 1 {
        return b;
    }
    if a == 0 || b == 0 {
        return 0;
    }
    let (a, b) = (i64::from(a), i64::from(b));
    u32::try_from(a / gcd(a, b) * b).unwrap_or(0)
}

/// Appends segments that already are in order among themselves.
#[inline]
fn push_all(out: &mut Vec<Segment>, mut segments: impl Iterator<Item = Segment>) {
    if let Some(first) = segments.next() {
        push(out, first);
        out.extend(segments);
    }
}

/// How many of the first segments end at `end` or before.
#[inline]
fn up_to(segments: &[Segment], end: i64) -> usize {
    segments.iter().take_while(|segment| segment.end <= end).count()
}

/// Walks two lists together: `only` answers for stretches that one of them has, `both` for those
/// that both have.
#[inline]
fn merge(
    mut a: &[Segment],
    mut b: &[Segment],
    out: &mut Vec<Segment>,
    only: impl Fn(Segment) -> Segment,
    both: impl Fn(&Segment, &Segment) -> (Class, u32),
) {
    // Where the heads of the lists begin; their first parts may have gone out.
    let (mut from_a, mut from_b) = (i64::MIN, i64::MIN);
    while let ([x, rest_a @ ..], [y, rest_b @ ..]) = (a, b) {
        let (start_a, start_b) = (x.start.max(from_a), y.start.max(from_b));
        if x.end <= start_b {
            push(out, only(Segment { start: start_a, ..*x }));
            let apart = up_to(rest_a, start_b);
            push_all(out, rest_a[..apart].iter().map(|x| only(*x)));
            a = &rest_a[apart..];
        } else if y.end <= start_a {
            push(out, only(Segment { start: start_b, ..*y }));
            let apart = up_to(rest_b, start_a);
            push_all(out, rest_b[..apart].iter().map(|y| only(*y)));
            b = &rest_b[apart..];
        } else {
            if start_a < start_b {
                push(out, only(Segment { start: start_a, end: start_b, ..*x }));
            } else if start_b < start_a {
                push(out, only(Segment { start: start_b, end: start_a, ..*y }));
            }
            let (start, end) = (start_a.max(start_b), x.end.min(y.end));
            let (class, period) = both(x, y);
            push(out, Segment { start, end, class, period });
            (from_a, from_b) = (end, end);
            if x.end == end {
                a = rest_a;
            }
            if y.end == end {
                b = rest_b;
            }
        }
    }
    for (left, from) in [(a, from_a), (b, from_b)] {
        if let [first, rest @ ..] = left {
            push(out, only(Segment { start: first.start.max(from), ..*first }));
            push_all(out, rest.iter().map(|segment| only(*segment)));
        }
    }
}

/// What both see.
pub(crate) fn and(mut a: &[Segment], mut b: &[Segment], out: &mut Vec<Segment>) {
    while let ([x, rest_a @ ..], [y, rest_b @ ..]) = (a, b) {
        let (start, end) = (x.start.max(y.start), x.end.min(y.end));
        if start < end {
            let (class, period) = match (x.class, y.class) {
                (Class::Full, class) => (class, y.period),
                (class, Class::Full) => (class, x.period),
                _ => (Class::Unknown, common(x.period, y.period)),
            };
            push(out, Segment { start, end, class, period });
        }
        if y.end <= x.end {
            b = rest_b;
            if x.class == Class::Full && x.start <= y.end {
                // What comes next starts inside `x`.
                let inside = up_to(b, x.end);
                push_all(out, b[..inside].iter().copied());
                b = &b[inside..];
            }
        }
        if x.end <= y.end {
            a = rest_a;
        }
    }
}

/// What either sees.
pub(crate) fn or(a: &[Segment], b: &[Segment], out: &mut Vec<Segment>) {
    merge(
        a,
        b,
        out,
        |only| only,
        |x, y| match (x.class, y.class) {
            (Class::Full, _) | (_, Class::Full) => (Class::Full, 1),
            _ => (Class::Unknown, common(x.period, y.period)),
        },
    );
}

/// What isn't seen, within `low..high`.
pub(crate) fn not(a: &[Segment], low: i64, high: i64, out: &mut Vec<Segment>) {
    let full = |start, end| Segment { start, end, class: Class::Full, period: 1 };
    let mut at = low;
    for segment in a {
        push(out, full(at, segment.start));
        if segment.class != Class::Full {
            push(out, *segment);
        }
        at = segment.end;
    }
    push(out, full(at, high));
}

/// The answer for two bands taken as one.
pub(crate) fn join(a: &[Segment], b: &[Segment], out: &mut Vec<Segment>) {
    let only = |only: Segment| Segment { class: beside_nothing(only.class), ..only };
    merge(a, b, out, only, |x, y| {
        let class = match (x.class, y.class) {
            (Class::Full, Class::Full) => Class::Full,
            (Class::Mixed, _) | (_, Class::Mixed) => Class::Mixed,
            _ => Class::Unknown,
        };
        (class, common(x.period, y.period))
    });
}

/// What becomes of a class when the band also holds queries that see none of it.
pub(crate) fn beside_nothing(class: Class) -> Class {
    match class {
        Class::Full | Class::Mixed => Class::Mixed,
        Class::Unknown => Class::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: i64 = 40;

    /// A list of segments with random gaps, lengths and classes.
    fn random(state: &mut u64) -> Vec<Segment> {
        let mut next = |limit: u64| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((*state >> 33) % limit) as i64
        };
        let mut list = Vec::new();
        let mut start = next(6);
        while start < KEYS {
            let end = (start + 1 + next(9)).min(KEYS);
            let class = [Class::Full, Class::Full, Class::Mixed, Class::Unknown][next(4) as usize];
            push(&mut list, Segment { start, end, class, period: 1 });
            start = end + next(5);
        }
        list
    }

    fn at(list: &[Segment], key: i64) -> Option<Class> {
        list.iter().find(|s| (s.start..s.end).contains(&key)).map(|s| s.class)
    }

    #[test]
    fn every_key_has_the_answer_that_its_parts_give() {
        let mut state = 1;
        for _ in 0..20_000 {
            let (a, b) = (random(&mut state), random(&mut state));
            let mut lists = [(); 4].map(|()| Vec::new());
            and(&a, &b, &mut lists[0]);
            or(&a, &b, &mut lists[1]);
            join(&a, &b, &mut lists[2]);
            not(&a, 0, KEYS, &mut lists[3]);
            for list in &lists {
                assert!(list.iter().all(|s| s.start < s.end), "{list:?}");
                assert!(list.windows(2).all(|pair| pair[0].end <= pair[1].start), "{list:?}");
            }
            for key in 0..KEYS {
                use Class::{Full, Mixed, Unknown};
                let (x, y) = (at(&a, key), at(&b, key));
                let anded = match (x, y) {
                    (None, _) | (_, None) => None,
                    (Some(Full), other) | (other, Some(Full)) => other,
                    _ => Some(Unknown),
                };
                let ored = match (x, y) {
                    (None, other) | (other, None) => other,
                    (Some(Full), _) | (_, Some(Full)) => Some(Full),
                    _ => Some(Unknown),
                };
                let joined = match (x, y) {
                    (None, None) => None,
                    (Some(Full), Some(Full)) => Some(Full),
                    (Some(Mixed), _) | (_, Some(Mixed)) => Some(Mixed),
                    (Some(Unknown), _) | (_, Some(Unknown)) => Some(Unknown),
                    _ => Some(Mixed),
                };
                let negated = match x {
                    None => Some(Full),
                    Some(Full) => None,
                    other => other,
                };
                let expected = [anded, ored, joined, negated];
                let got = [0, 1, 2, 3].map(|i| at(&lists[i], key));
                assert_eq!(got, expected, "key {key} of {a:?} and {b:?}");
            }
        }
    }
}
