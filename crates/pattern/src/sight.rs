//! What queries can see of keys, told without compiling anything.
//!
//! A ring of thousands of ranks has millions of pairs of ranks, and most have nothing to say to
//! each other. A [`Sight`] asks the plan once about *all* queries of a progression as one band:
//!
//! ```text
//! no segment                  nobody sees any of the keys      exact
//! one Full over all keys      everybody sees all of them       exact
//! anything else               compile, and look
//! ```

use std::ops::Range;

use crate::meter::Meter;
use crate::pattern::Pattern;
use crate::plan::segment::{Class, Segment};
use crate::plan::{Band, Keys, Plan};
use crate::positions::{FARTHEST, Progression};
use crate::shape::BlockSize;

/// Segments that an answer may have before nothing is promised: asking for more takes longer than
/// compiling does.
const MOST: usize = 1 << 12;

/// Units of work that an answer may take before nothing is promised: about a millisecond, of which
/// thousands of ranks take many.
const MOST_WORK: u64 = 1 << 20;

/// What can be said of some queries and some keys at a glance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Glance {
    /// No query sees any key.
    Nothing,
    /// No promise.
    Perhaps,
    /// Every query sees every key.
    Everything,
}

/// A pattern, ready to be asked what queries can see of keys.
///
/// ```
/// use longspan_pattern::{Glance, Pattern, Progression, Sight};
///
/// let mut sight = Sight::new(&"causal & window(1000, 0)".parse::<Pattern>()?);
/// let tokens = |start| Progression { start, step: 1, len: 500 };
/// assert_eq!(sight.glance(tokens(2_000), tokens(0)), Glance::Nothing);
/// assert_eq!(sight.glance(tokens(2_000), tokens(1_500)), Glance::Everything);
/// assert_eq!(sight.glance(tokens(2_000), tokens(1_200)), Glance::Perhaps);
/// assert_eq!(sight.reach(tokens(2_000), tokens(800)), [200..500]);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
pub struct Sight {
    plan: Plan,
    questions: u64,
    found: Vec<Segment>,
}

impl Sight {
    /// Makes a pattern ready. That it fits a number of tokens is for
    /// [`Layout::compile`](crate::Layout::compile) to judge.
    pub fn new(pattern: &Pattern) -> Self {
        let everywhere = -FARTHEST..FARTHEST + 1;
        Sight { plan: Plan::new(pattern, None, everywhere), questions: 0, found: Vec::new() }
    }

    /// What the queries see of the keys, where that can be told at once.
    pub fn glance(&mut self, queries: Progression, keys: Progression) -> Glance {
        match self.ask(queries, keys) {
            Some([]) => Glance::Nothing,
            Some(&[Segment { start: 0, end, class: Class::Full, .. }])
                if end as u64 == keys.len =>
            {
                Glance::Everything
            }
            _ => Glance::Perhaps,
        }
    }

    /// Numbers of keys (the first is 0) outside which no query sees any, ascending and apart from
    /// each other. Inside, some may not be seen either.
    pub fn reach(&mut self, queries: Progression, keys: Progression) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let Some(found) = self.ask(queries, keys) else {
            ranges.push(0..keys.len);
            return ranges;
        };
        for segment in found {
            let (start, end) = (segment.start as u64, segment.end as u64);
            match ranges.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => ranges.push(start..end),
            }
        }
        ranges
    }

    /// The plan's answer; nothing where it is too long, or where positions are farther than any
    /// shape allows.
    fn ask(&mut self, queries: Progression, keys: Progression) -> Option<&[Segment]> {
        self.found.clear();
        if queries.len == 0 || keys.len == 0 {
            return Some(&[]);
        }
        for progression in [&queries, &keys] {
            let far = |value: i128| value.unsigned_abs() > FARTHEST as u128;
            let (start, last) = (i128::from(progression.start), progression.last());
            if progression.step == 0 || far(start) || far(last) {
                return None;
            }
        }
        let step =
            |progression: &Progression| if progression.len == 1 { 1 } else { progression.step };
        let band =
            Band { start: queries.start, step: step(&queries) as i64, len: queries.len as i64 };
        let keys = Keys {
            start: keys.start,
            step: step(&keys) as i64,
            low: 0,
            high: keys.len as i64,
            block: BlockSize::default().get() as i64,
            most: MOST,
        };
        let mut meter = Meter::limited(MOST_WORK);
        self.plan.ask(band, keys, &mut meter, &mut self.found);
        self.questions += meter.questions;
        (!meter.overflow && !meter.halted()).then_some(&self.found[..])
    }
}

impl std::fmt::Debug for Sight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sight").field("questions", &self.questions).finish()
    }
}

#[cfg(test)]
mod tests {
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
    fn progression(state: &mut u64) -> Progression {
        let mut next = |limit: u64| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (*state >> 33) % limit
        };
        let step = [1, 1, 1, 2, 7, 64][next(6) as usize];
        let start = next(1_000);
        let most = [4, 80, 1_000][next(3) as usize];
        let len = next(most).min((1_000 - start).div_ceil(step));
        Progression { start: start as i64, step, len }
    }

    /// Every promise is compared with every pair. Answers of all three kinds turn up.
    #[test]
    fn promises_hold_for_every_pair() {
        let mut state = 7;
        let mut kinds = [0; 3];
        for text in PATTERNS {
            let pattern: Pattern = text.parse().unwrap();
            let mut sight = Sight::new(&pattern);
            let mut plan = Plan::new(&pattern, None, -FARTHEST..FARTHEST);
            for _ in 0..60 {
                let (queries, keys) = (progression(&mut state), progression(&mut state));
                let at = |p: &Progression, i: u64| p.start + (i * p.step) as i64;
                let (mut seen, mut unseen) = (vec![false; keys.len as usize], false);
                for (number, seen) in (0..).zip(&mut seen) {
                    for query in 0..queries.len {
                        let allowed = plan.allows(at(&queries, query), at(&keys, number));
                        *seen |= allowed;
                        unseen |= !allowed;
                    }
                }
                let any = seen.contains(&true);
                let glance = sight.glance(queries, keys);
                kinds[glance as usize] += 1;
                match glance {
                    Glance::Nothing => assert!(!any, "{text}: {queries:?} see {keys:?}"),
                    Glance::Everything => assert!(!unseen, "{text}: {queries:?}, {keys:?}"),
                    Glance::Perhaps => {}
                }
                let reach = sight.reach(queries, keys);
                assert!(reach.windows(2).all(|pair| pair[0].end < pair[1].start), "{reach:?}");
                for (number, _) in (0..).zip(&seen).filter(|(_, seen)| **seen) {
                    let inside = reach.iter().any(|range| range.contains(&number));
                    assert!(inside, "{text}: key {number} of {keys:?} for {queries:?}");
                }
            }
        }
        assert!(kinds.iter().all(|&count| count > 50), "{kinds:?}");
    }

    #[test]
    fn what_is_too_long_or_too_far_promises_nothing() {
        let mut sight = Sight::new(&Pattern::causal());
        let tokens = Progression { start: 0, step: 1, len: 10 };
        for far in [
            Progression { start: i64::MAX, step: 1, len: 2 },
            Progression { start: 0, step: 0, len: 2 },
            Progression { start: 5, step: u64::MAX, len: u64::MAX },
        ] {
            assert_eq!(sight.glance(far, tokens), Glance::Perhaps);
            let all = 0..far.len;
            assert_eq!(sight.reach(tokens, far), [all]);
        }
        let mut sight = Sight::new(&Pattern::strided(1_000).unwrap());
        let one = Progression { start: 0, step: 1, len: 1 };
        let many = Progression { start: 0, step: 1, len: 1 << 30 };
        assert_eq!(sight.glance(one, many), Glance::Perhaps);
    }
}
