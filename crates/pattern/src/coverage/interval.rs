//! Sorted lists of key intervals: the results of coverage queries.
//!
//! A coverage query has a range of queries (one progression, at most a block of them) and a
//! progression of keys. Its result is a list of [`Interval`]s in ascending order of key index;
//! keys between them are Empty. An interval is
//!
//! ```text
//! Full     every query attends to every key
//! Partial  every single key is active for one query and masked for another
//! Unknown  not decided
//! ```
//!
//! `Partial` holds for each key, not per block, so it survives any cut: every block that overlaps
//! a Partial interval is Partial, exactly, and its bits need not be evaluated. The conjunction and
//! the disjunction of two Partial intervals are Unknown; only the blocks of those are evaluated.
//!
//! With `period > 0`, keys `period` apart within the interval are active for the same queries. One
//! period decides the whole interval, so `strided(3)` over a million keys costs three blocks.

use crate::arith::gcd;

/// Coverage of each key of an interval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyCoverage {
    Full,
    Partial,
    Unknown,
}

/// A range of key indices with one coverage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interval {
    pub(crate) start: i64,
    pub(crate) end: i64,
    pub(crate) coverage: KeyCoverage,
    pub(crate) period: u32,
}

/// Appends an interval unless it is empty; adjacent Full intervals are joined.
#[inline]
pub(crate) fn push(out: &mut Vec<Interval>, interval: Interval) {
    if interval.start >= interval.end {
        return;
    }
    if let Some(last) = out.last_mut() {
        debug_assert!(last.end <= interval.start);
        if last.end == interval.start
            && last.coverage == KeyCoverage::Full
            && interval.coverage == KeyCoverage::Full
        {
            last.end = interval.end;
            return;
        }
    }
    out.push(interval);
}

/// Least common multiple of two periods; 0 (no period) where it overflows.
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

/// Appends intervals that are sorted among themselves.
#[inline]
fn push_all(out: &mut Vec<Interval>, mut intervals: impl Iterator<Item = Interval>) {
    if let Some(first) = intervals.next() {
        push(out, first);
        out.extend(intervals);
    }
}

/// Number of leading intervals that end at `end` or before.
#[inline]
fn up_to(intervals: &[Interval], end: i64) -> usize {
    intervals.iter().take_while(|interval| interval.end <= end).count()
}

/// Merges two lists: `only` maps parts covered by one of them, `both` those covered by both.
#[inline]
fn merge(
    mut a: &[Interval],
    mut b: &[Interval],
    out: &mut Vec<Interval>,
    only: impl Fn(Interval) -> Interval,
    both: impl Fn(&Interval, &Interval) -> (KeyCoverage, u32),
) {
    // Starts of the unmerged parts of the first intervals.
    let (mut from_a, mut from_b) = (i64::MIN, i64::MIN);
    while let ([x, rest_a @ ..], [y, rest_b @ ..]) = (a, b) {
        let (start_a, start_b) = (x.start.max(from_a), y.start.max(from_b));
        if x.end <= start_b {
            push(out, only(Interval { start: start_a, ..*x }));
            let apart = up_to(rest_a, start_b);
            push_all(out, rest_a[..apart].iter().map(|x| only(*x)));
            a = &rest_a[apart..];
        } else if y.end <= start_a {
            push(out, only(Interval { start: start_b, ..*y }));
            let apart = up_to(rest_b, start_a);
            push_all(out, rest_b[..apart].iter().map(|y| only(*y)));
            b = &rest_b[apart..];
        } else {
            if start_a < start_b {
                push(out, only(Interval { start: start_a, end: start_b, ..*x }));
            } else if start_b < start_a {
                push(out, only(Interval { start: start_b, end: start_a, ..*y }));
            }
            let (start, end) = (start_a.max(start_b), x.end.min(y.end));
            let (coverage, period) = both(x, y);
            push(out, Interval { start, end, coverage, period });
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
            push(out, only(Interval { start: first.start.max(from), ..*first }));
            push_all(out, rest.iter().map(|interval| only(*interval)));
        }
    }
}

/// Intersection.
pub(crate) fn and(mut a: &[Interval], mut b: &[Interval], out: &mut Vec<Interval>) {
    while let ([x, rest_a @ ..], [y, rest_b @ ..]) = (a, b) {
        let (start, end) = (x.start.max(y.start), x.end.min(y.end));
        if start < end {
            let (coverage, period) = match (x.coverage, y.coverage) {
                (KeyCoverage::Full, coverage) => (coverage, y.period),
                (coverage, KeyCoverage::Full) => (coverage, x.period),
                _ => (KeyCoverage::Unknown, common(x.period, y.period)),
            };
            push(out, Interval { start, end, coverage, period });
        }
        if y.end <= x.end {
            b = rest_b;
            if x.coverage == KeyCoverage::Full && x.start <= y.end {
                // The following intervals start inside `x`.
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

/// Union.
pub(crate) fn or(a: &[Interval], b: &[Interval], out: &mut Vec<Interval>) {
    merge(
        a,
        b,
        out,
        |only| only,
        |x, y| match (x.coverage, y.coverage) {
            (KeyCoverage::Full, _) | (_, KeyCoverage::Full) => (KeyCoverage::Full, 1),
            _ => (KeyCoverage::Unknown, common(x.period, y.period)),
        },
    );
}

/// Complement within `low..high`.
pub(crate) fn not(a: &[Interval], low: i64, high: i64, out: &mut Vec<Interval>) {
    let full = |start, end| Interval { start, end, coverage: KeyCoverage::Full, period: 1 };
    let mut at = low;
    for interval in a {
        push(out, full(at, interval.start));
        if interval.coverage != KeyCoverage::Full {
            push(out, *interval);
        }
        at = interval.end;
    }
    push(out, full(at, high));
}

/// Coverage of the keys by two ranges of queries taken together.
pub(crate) fn join(a: &[Interval], b: &[Interval], out: &mut Vec<Interval>) {
    let only = |only: Interval| Interval { coverage: with_masked_queries(only.coverage), ..only };
    merge(a, b, out, only, |x, y| {
        let coverage = match (x.coverage, y.coverage) {
            (KeyCoverage::Full, KeyCoverage::Full) => KeyCoverage::Full,
            (KeyCoverage::Partial, _) | (_, KeyCoverage::Partial) => KeyCoverage::Partial,
            _ => KeyCoverage::Unknown,
        };
        (coverage, common(x.period, y.period))
    });
}

/// The coverage when further queries attend to none of the keys.
pub(crate) fn with_masked_queries(coverage: KeyCoverage) -> KeyCoverage {
    match coverage {
        KeyCoverage::Full | KeyCoverage::Partial => KeyCoverage::Partial,
        KeyCoverage::Unknown => KeyCoverage::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use longspan_testing::Random;

    use super::*;

    const KEYS: i64 = 40;

    /// A list of intervals with random gaps, lengths and coverage.
    fn intervals(random: &mut Random) -> Vec<Interval> {
        let mut next = |limit: u64| random.below(limit) as i64;
        let mut list = Vec::new();
        let mut start = next(6);
        while start < KEYS {
            let end = (start + 1 + next(9)).min(KEYS);
            let coverage =
                [KeyCoverage::Full, KeyCoverage::Full, KeyCoverage::Partial, KeyCoverage::Unknown]
                    [next(4) as usize];
            push(&mut list, Interval { start, end, coverage, period: 1 });
            start = end + next(5);
        }
        list
    }

    fn at(list: &[Interval], key: i64) -> Option<KeyCoverage> {
        list.iter().find(|s| (s.start..s.end).contains(&key)).map(|s| s.coverage)
    }

    #[test]
    fn operators_hold_for_every_key() {
        let mut random = Random::new(1);
        for _ in 0..20_000 {
            let (a, b) = (intervals(&mut random), intervals(&mut random));
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
                use KeyCoverage::{Full, Partial, Unknown};
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
                    (Some(Partial), _) | (_, Some(Partial)) => Some(Partial),
                    (Some(Unknown), _) | (_, Some(Unknown)) => Some(Unknown),
                    _ => Some(Partial),
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
