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

/// Walks two lists together and calls `visit` for each stretch where at least one has a segment.
#[inline]
fn together(
    a: &[Segment],
    b: &[Segment],
    mut visit: impl FnMut(i64, i64, Option<&Segment>, Option<&Segment>),
) {
    let (mut i, mut j) = (0, 0);
    let mut at = i64::MIN;
    while i < a.len() || j < b.len() {
        let (next_a, next_b) = (a.get(i), b.get(j));
        let here_a = next_a.filter(|s| s.start <= at);
        let here_b = next_b.filter(|s| s.start <= at);
        let mut end = i64::MAX;
        for (next, here) in [(next_a, here_a), (next_b, here_b)] {
            if let Some(next) = next {
                end = end.min(if here.is_some() { next.end } else { next.start });
            }
        }
        if here_a.is_some() || here_b.is_some() {
            visit(at, end, here_a, here_b);
        }
        at = end;
        i += usize::from(next_a.is_some_and(|s| s.end <= at));
        j += usize::from(next_b.is_some_and(|s| s.end <= at));
    }
}

/// What both see.
pub(crate) fn and(a: &[Segment], b: &[Segment], out: &mut Vec<Segment>) {
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() {
        let (x, y) = (&a[i], &b[j]);
        let (start, end) = (x.start.max(y.start), x.end.min(y.end));
        if start < end {
            let (class, period) = match (x.class, y.class) {
                (Class::Full, class) => (class, y.period),
                (class, Class::Full) => (class, x.period),
                _ => (Class::Unknown, common(x.period, y.period)),
            };
            push(out, Segment { start, end, class, period });
        }
        i += usize::from(x.end <= y.end);
        j += usize::from(y.end <= x.end);
    }
}

/// What either sees.
pub(crate) fn or(a: &[Segment], b: &[Segment], out: &mut Vec<Segment>) {
    together(a, b, |start, end, x, y| {
        let (class, period) = match (x, y) {
            (Some(x), Some(y)) => match (x.class, y.class) {
                (Class::Full, _) | (_, Class::Full) => (Class::Full, 1),
                _ => (Class::Unknown, common(x.period, y.period)),
            },
            (Some(only), None) | (None, Some(only)) => (only.class, only.period),
            (None, None) => return,
        };
        push(out, Segment { start, end, class, period });
    });
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
    together(a, b, |start, end, x, y| {
        let (class, period) = match (x, y) {
            (Some(x), Some(y)) => {
                let class = match (x.class, y.class) {
                    (Class::Full, Class::Full) => Class::Full,
                    (Class::Mixed, _) | (_, Class::Mixed) => Class::Mixed,
                    _ => Class::Unknown,
                };
                (class, common(x.period, y.period))
            }
            (Some(only), None) | (None, Some(only)) => (beside_nothing(only.class), only.period),
            (None, None) => return,
        };
        push(out, Segment { start, end, class, period });
    });
}

/// What becomes of a class when the band also holds queries that see none of it.
pub(crate) fn beside_nothing(class: Class) -> Class {
    match class {
        Class::Full | Class::Mixed => Class::Mixed,
        Class::Unknown => Class::Unknown,
    }
}
