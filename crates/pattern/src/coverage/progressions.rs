//! Coverage of a progression of queries × a progression of keys, without compiling a layout.
//!
//! A ring of thousands of ranks has millions of pairs of ranks, most of them without a common
//! block. One coverage query over *all* queries of a progression decides most pairs:
//!
//! ```text
//! no interval                      Empty    exact
//! one Full interval, all keys      Full     exact
//! anything else                    Mixed    undecided: compile a layout
//! ```

use std::ops::Range;

use super::interval::{Interval, KeyCoverage};
use super::{KeyRange, LoweredPattern, PositionRange};
use crate::meter::Meter;
use crate::pattern::Pattern;
use crate::positions::{MAX_POSITION, Progression};
use crate::shape::BlockSize;

/// Intervals per query before the result is `Mixed`: more take longer than compiling does.
const MAX_INTERVALS: usize = 1 << 12;

/// Units of work per query before the result is `Mixed`: about a millisecond. Thousands of ranks
/// run many queries.
const MAX_WORK: u64 = 1 << 20;

/// The result of a coverage query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockCoverage {
    /// No query attends to any key.
    Empty,
    /// Neither Empty nor Full was established. Some pairs may be allowed and some masked.
    Mixed,
    /// Every query attends to every key.
    Full,
}

/// Answers coverage queries over a pattern.
///
/// ```
/// use longspan_pattern::{BlockCoverage, Pattern, PatternCoverage, Progression};
///
/// let mut coverage = PatternCoverage::new(&"causal & window(1000, 0)".parse::<Pattern>()?);
/// let tokens = |start| Progression { start, step: 1, len: 500 };
/// assert_eq!(coverage.block_coverage(tokens(2_000), tokens(0)), BlockCoverage::Empty);
/// assert_eq!(coverage.block_coverage(tokens(2_000), tokens(1_500)), BlockCoverage::Full);
/// assert_eq!(coverage.block_coverage(tokens(2_000), tokens(1_200)), BlockCoverage::Mixed);
/// assert_eq!(coverage.key_ranges(tokens(2_000), tokens(800)), [200..500]);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
pub struct PatternCoverage {
    lowered: LoweredPattern,
    coverage_queries: u64,
    found: Vec<Interval>,
}

impl PatternCoverage {
    /// Lowers a pattern. Lengths of documents and sequences are not checked against a number of
    /// tokens; [`Layout::compile`](crate::Layout::compile) does that.
    pub fn new(pattern: &Pattern) -> Self {
        let everywhere = -MAX_POSITION..MAX_POSITION + 1;
        let lowered = LoweredPattern::new(pattern, None, everywhere);
        PatternCoverage { lowered, coverage_queries: 0, found: Vec::new() }
    }

    /// Whether the queries attend to none or to all of the keys, where one query decides it.
    pub fn block_coverage(&mut self, queries: Progression, keys: Progression) -> BlockCoverage {
        match self.intervals(queries, keys) {
            Some([]) => BlockCoverage::Empty,
            Some(&[Interval { start: 0, end, coverage: KeyCoverage::Full, .. }])
                if end as usize == keys.len =>
            {
                BlockCoverage::Full
            }
            _ => BlockCoverage::Mixed,
        }
    }

    /// Ranges of key indices (of `keys`, from 0) outside which no query attends to any key,
    /// ascending and not adjacent. Keys inside may be masked for every query, too.
    pub fn key_ranges(&mut self, queries: Progression, keys: Progression) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        let Some(found) = self.intervals(queries, keys) else {
            ranges.push(0..keys.len);
            return ranges;
        };
        for interval in found {
            let (start, end) = (interval.start as usize, interval.end as usize);
            match ranges.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => ranges.push(start..end),
            }
        }
        ranges
    }

    /// The intervals of the keys; `None` where they exceed a limit, or where positions exceed
    /// those of any shape.
    fn intervals(&mut self, queries: Progression, keys: Progression) -> Option<&[Interval]> {
        self.found.clear();
        if queries.len == 0 || keys.len == 0 {
            return Some(&[]);
        }
        for progression in [&queries, &keys] {
            let far = |value: i128| value.unsigned_abs() > MAX_POSITION as u128;
            let (start, last) = (i128::from(progression.start), progression.last());
            if progression.step == 0 || far(start) || far(last) {
                return None;
            }
        }
        let step =
            |progression: &Progression| if progression.len == 1 { 1 } else { progression.step };
        let queries = PositionRange {
            start: queries.start,
            step: step(&queries) as i64,
            len: queries.len as i64,
        };
        let keys = KeyRange {
            start: keys.start,
            step: step(&keys) as i64,
            low: 0,
            high: keys.len as i64,
            block: BlockSize::default().get() as i64,
            max_intervals: MAX_INTERVALS,
        };
        let mut meter = Meter::limited(MAX_WORK);
        self.lowered.coverage(queries, keys, &mut meter, &mut self.found);
        self.coverage_queries += meter.coverage_queries;
        (!meter.overflow && !meter.halted()).then_some(&self.found[..])
    }
}

impl std::fmt::Debug for PatternCoverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PatternCoverage").field("coverage_queries", &self.coverage_queries).finish()
    }
}

#[cfg(test)]
mod tests {
    use longspan_testing::Random;

    use super::*;

    const PATTERNS: &[&str] = &[
        "full",
        "!full",
        "causal",
        "causal & (window(40, 0) | sinks(5))",
        "window(30, 30) | global_tokens(3)",
        "strided(7)",
        "strided(300)",
        "dilated(128, 4, 1)",
        "hierarchical([(20, 1, 1), (200, 4, 8)])",
        "documents([100, 0, 250, 3, 647])",
        "packed([400, 600], [400, 600], causal & window(50, 0))",
        "blocks_dilated(16, [1, 5])",
        "butterfly(32)",
        "random(16, 3, 63, 9)",
        "random(16, 40, 63, 9)",
        "causal & !window(100, 0)",
        "!(documents([500, 500]) | strided(3))",
    ];

    /// A progression inside 0..1000.
    fn progression(random: &mut Random) -> Progression {
        let mut next = |limit: usize| random.below(limit as u64) as usize;
        let step = [1, 1, 1, 2, 7, 64][next(6)];
        let start = next(1_000);
        let max_len = [4, 80, 1_000][next(3)];
        let len = next(max_len).min((1_000 - start).div_ceil(step));
        Progression { start: start as i64, step, len }
    }

    /// Every result is compared with every pair. All three results occur.
    #[test]
    fn results_hold_for_every_pair() {
        let mut random = Random::new(7);
        let mut results = [0; 3];
        for text in PATTERNS {
            let pattern: Pattern = text.parse().unwrap();
            let mut coverage = PatternCoverage::new(&pattern);
            let mut lowered = LoweredPattern::new(&pattern, None, -MAX_POSITION..MAX_POSITION);
            for _ in 0..60 {
                let (queries, keys) = (progression(&mut random), progression(&mut random));
                let at = |p: &Progression, i: usize| p.start + (i * p.step) as i64;
                let (mut active, mut masked) = (vec![false; keys.len], false);
                for (index, active) in (0..).zip(&mut active) {
                    for query in 0..queries.len {
                        let allowed = lowered.allows(at(&queries, query), at(&keys, index));
                        *active |= allowed;
                        masked |= !allowed;
                    }
                }
                let any = active.contains(&true);
                let result = coverage.block_coverage(queries, keys);
                results[result as usize] += 1;
                match result {
                    BlockCoverage::Empty => assert!(!any, "{text}: {queries:?} attend to {keys:?}"),
                    BlockCoverage::Full => assert!(!masked, "{text}: {queries:?}, {keys:?}"),
                    BlockCoverage::Mixed => {}
                }
                let ranges = coverage.key_ranges(queries, keys);
                assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
                for (index, _) in (0..).zip(&active).filter(|(_, active)| **active) {
                    let inside = ranges.iter().any(|range| range.contains(&index));
                    assert!(inside, "{text}: key {index} of {keys:?} for {queries:?}");
                }
            }
        }
        assert!(results.iter().all(|&count| count > 50), "{results:?}");
    }

    #[test]
    fn queries_beyond_limit_are_mixed() {
        let mut coverage = PatternCoverage::new(&Pattern::causal());
        let tokens = Progression { start: 0, step: 1, len: 10 };
        for far in [
            Progression { start: i64::MAX, step: 1, len: 2 },
            Progression { start: 0, step: 0, len: 2 },
            Progression { start: 5, step: usize::MAX, len: usize::MAX },
        ] {
            assert_eq!(coverage.block_coverage(far, tokens), BlockCoverage::Mixed);
            let all = 0..far.len;
            assert_eq!(coverage.key_ranges(tokens, far), [all]);
        }
        let mut coverage = PatternCoverage::new(&Pattern::strided(1_000).unwrap());
        let one = Progression { start: 0, step: 1, len: 1 };
        let many = Progression { start: 0, step: 1, len: 1 << 30 };
        assert_eq!(coverage.block_coverage(one, many), BlockCoverage::Mixed);
    }
}
