//! Nesting has the same limit for text and operators; a chain is one level.

use std::hash::{DefaultHasher, Hash};
use std::time::Instant;

use longspan_pattern::{Error, Heads, Layout, Pattern, PatternCoverage, Shape};

/// A small thread stack.
const STACK: usize = 128 << 10;

/// The nesting limit.
const LEVELS: usize = 64;

/// `causal | full & (causal | full & (…))`: a disjunction and a conjunction per level.
fn alternating(levels: usize) -> Pattern {
    let mut pattern = Pattern::causal() | Pattern::window(5, 5).unwrap();
    for _ in 0..levels {
        pattern = (pattern & Pattern::strided(3).unwrap()) | Pattern::sinks(7).unwrap();
    }
    pattern
}

fn negated(levels: usize) -> Pattern {
    (0..levels / 2).fold(Pattern::causal(), |pattern, _| !(pattern & Pattern::full()))
}

fn packed(levels: usize) -> Pattern {
    let pack = |pattern, _| Pattern::packed([640], [640], pattern).unwrap();
    (0..levels).fold(Pattern::causal(), pack)
}

fn exercise(pattern: &Pattern) {
    let text = pattern.to_string();
    assert_eq!(text.parse().as_ref(), Ok(pattern));
    let heads = Heads::each([pattern.clone(), pattern.clone()]).unwrap();
    assert_eq!(heads.to_string().parse(), Ok(heads));
    let json = serde_json::to_string(pattern).unwrap();
    assert_eq!(&serde_json::from_str::<Pattern>(&json).unwrap(), pattern);
    pattern.hash(&mut DefaultHasher::new());
    assert!(pattern.allows(3, 3));
    let layout = Layout::compile(pattern, &Shape::new(640, 640)).unwrap();
    let (counts, _) = (layout.counts().unwrap(), layout.hash().unwrap());
    assert!(counts.active_pairs > 0);
    layout.transpose().unwrap();
    PatternCoverage::new(pattern);
    // The error contains a sub-expression, which also traverses the pattern.
    let refused = Layout::compile(pattern, &Shape::new(640, 640).max_work(1));
    assert!(matches!(refused, Err(Error::TooMuchWork { .. })));
}

#[test]
fn the_deepest_patterns_fit_into_small_stack() {
    let work = || {
        for pattern in [alternating(LEVELS), negated(LEVELS), packed(LEVELS)] {
            exercise(&pattern);
        }
    };
    std::thread::Builder::new().stack_size(STACK).spawn(work).unwrap().join().unwrap();
}

#[test]
fn deeper_patterns_are_errors() {
    let too_deep = Error::TooDeep { limit: LEVELS as u8 };
    assert_eq!(alternating(LEVELS).check(), Ok(()));
    assert_eq!(negated(LEVELS).check(), Ok(()));
    let work = move || {
        for pattern in [alternating(LEVELS + 1), alternating(500), negated(500), negated(100_000)] {
            assert_eq!(pattern.check(), Err(too_deep.clone()));
            let refused = Layout::compile(&pattern, &Shape::new(64, 64));
            assert_eq!(refused.unwrap_err(), too_deep);
            assert_eq!(Heads::each([pattern.clone()]), Err(too_deep.clone()));
            assert_eq!(Pattern::packed([1], [1], pattern.clone()), Err(too_deep.clone()));
            assert!(pattern.to_string().parse::<Pattern>().is_err());
            assert!(!pattern.allows(0, 0) && !(!pattern).allows(0, 0));
        }
        let deepest = packed(LEVELS);
        assert_eq!(Pattern::packed([640], [640], deepest), Err(too_deep));
    };
    std::thread::Builder::new().stack_size(STACK).spawn(work).unwrap().join().unwrap();
}

/// Time per term does not depend on the length of a chain; with quadratic time, 64 times the terms
/// would take 64 times as long per term. Both measurements parse the same number of terms, so that
/// other processes slow them down alike; the minimum of a few counts and a factor of 16 is allowed.
#[test]
fn chains_take_linear_time() {
    const TERMS: usize = 128_000;
    let chains_of = |terms: usize, operator: &str| {
        let text = vec!["sinks(1)"; terms].join(operator);
        let start = Instant::now();
        for _ in 0..TERMS / terms {
            let pattern: Pattern = text.parse().unwrap();
            assert_eq!(pattern.to_string().len(), text.len());
        }
        start.elapsed().as_secs_f64()
    };
    for operator in [" | ", " & "] {
        let (mut short, mut long) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..5 {
            short = short.min(chains_of(2_000, operator));
            long = long.min(chains_of(TERMS, operator));
        }
        assert!(long <= 16.0 * short, "{long} s in one chain, {short} s in 64 short ones");
    }
}
