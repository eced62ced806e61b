//! Cost of compiling a layout: time and bytes per run from 64 k to 16 M tokens, and large single
//! cases. One core, block 64, best of several.
//!
//! `cargo bench -p longspan-pattern --bench layout` prints both tables; a name as argument selects
//! rows. Nothing is asserted: `tests/growth.rs` guards growth by counting coverage queries.

use std::hint::black_box;
use std::io::{Result, Write};
use std::time::{Duration, Instant};

use longspan_pattern::{Layout, Level, Pattern, Positions, Progression, Shape};

/// The reference pattern.
const SECOND: &str = "causal & (window(1024, 0) | sinks(64))";

const SIZES: [usize; 5] = [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24];

fn main() -> Result<()> {
    let filters: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let picked = |name: &str| {
        filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str()))
    };
    let mut out = std::io::stdout().lock();

    writeln!(
        out,
        "{:<44}{:>6}{:>12}{:>10}{:>9}{:>9}",
        "", "tokens", "runs", "ms", "ns/run", "B/run"
    )?;
    for (name, make) in growing() {
        if !picked(name) {
            continue;
        }
        let (mut fastest, mut slowest) = (f64::MAX, 0f64);
        let (mut least, mut most) = (f64::MAX, 0f64);
        for tokens in SIZES {
            let (pattern, shape) = make(tokens);
            let (time, layout) = best(&pattern, &shape);
            let runs = layout.run_count() as f64;
            let (ns, bytes) = (time.as_secs_f64() * 1e9 / runs, layout.bytes() as f64 / runs);
            (fastest, slowest) = (fastest.min(ns), slowest.max(ns));
            (least, most) = (least.min(bytes), most.max(bytes));
            let ms = time.as_secs_f64() * 1e3;
            let size = if tokens >= 1 << 20 {
                format!("{}M", tokens >> 20)
            } else {
                format!("{}k", tokens >> 10)
            };
            writeln!(out, "{name:<44}{size:>6}{runs:>12}{ms:>10.2}{ns:>9.1}{bytes:>9.2}")?;
        }
        writeln!(
            out,
            "{:<44}{:>6}{:>12}{:>10}{:>8.2}×{:>8.2}×",
            "",
            "",
            "",
            "spread",
            slowest / fastest,
            most / least
        )?;
    }

    writeln!(out, "\n{:<60}{:>12}{:>10}{:>10}{:>10}", "", "runs", "ms", "MiB", "goal")?;
    for (name, goal, pattern, shape) in single() {
        if !picked(name) {
            continue;
        }
        let (time, layout) = best(&pattern, &shape);
        let (ms, mib) = (time.as_secs_f64() * 1e3, layout.bytes() as f64 / f64::from(1 << 20));
        writeln!(out, "{name:<60}{:>12}{ms:>10.2}{mib:>10.2}{goal:>10}", layout.run_count())?;
    }
    Ok(())
}

/// The best of at least seven compilations and half a second, within four seconds.
fn best(pattern: &Pattern, shape: &Shape) -> (Duration, Layout) {
    let begin = Instant::now();
    let mut best = Duration::MAX;
    for iteration in 1.. {
        let start = Instant::now();
        let layout = black_box(Layout::compile(black_box(pattern), shape).expect("legal"));
        best = best.min(start.elapsed());
        let enough = iteration >= 7 && begin.elapsed() > Duration::from_millis(500);
        if enough || begin.elapsed() > Duration::from_secs(4) {
            return (best, layout);
        }
    }
    unreachable!("time passes")
}

type Make = Box<dyn Fn(usize) -> (Pattern, Shape)>;

fn growing() -> Vec<(&'static str, Make)> {
    let plain = |text: &str| -> Make {
        let pattern: Pattern = text.parse().expect("legal");
        Box::new(move |tokens| (pattern.clone(), Shape::new(tokens, tokens)))
    };
    vec![
        ("causal", plain("causal")),
        (SECOND, plain(SECOND)),
        (
            "packed documents, 16 to 8,192 tokens",
            Box::new(|tokens| {
                let lengths = lengths(tokens, 16, 8192);
                let pattern = Pattern::packed(lengths.clone(), lengths, Pattern::causal());
                (pattern.expect("legal"), Shape::new(tokens, tokens))
            }),
        ),
        (
            "causal & documents, 16 to 8,192 tokens",
            Box::new(|tokens| {
                let documents = Pattern::documents(lengths(tokens, 16, 8192)).expect("legal");
                (Pattern::causal() & documents, Shape::new(tokens, tokens))
            }),
        ),
        (
            "hierarchical, three levels",
            Box::new(|tokens| {
                let levels = [(256, 1, 1), (4096, 8, 64), (32_768, 64, 64)];
                let levels = levels.map(|(window, stride, grain)| Level { window, stride, grain });
                (Pattern::hierarchical(levels).expect("legal"), Shape::new(tokens, tokens))
            }),
        ),
        (
            "random, 3 blocks per row",
            Box::new(|tokens| {
                let pattern = Pattern::random(64, 3, tokens as u64 / 64, 7).expect("legal");
                (pattern, Shape::new(tokens, tokens))
            }),
        ),
        (
            "second pattern, striped by 8",
            Box::new(|tokens| {
                let stripes = (0..8).map(|start| Progression { start, step: 8, len: tokens / 8 });
                let map = Positions::new(stripes).expect("legal");
                let shape = Shape::new(tokens, tokens).query_map(map.clone()).key_map(map);
                (SECOND.parse().expect("legal"), shape)
            }),
        ),
    ]
}

fn single() -> Vec<(&'static str, &'static str, Pattern, Shape)> {
    let pattern = |text: &str| -> Pattern { text.parse().expect("legal") };
    let whole = |tokens| Shape::new(tokens, tokens);
    let giga = 1usize << 30;
    let per_rank = giga / 1024;
    let rank = |rank: usize| {
        let own = Positions::range((rank * per_rank) as i64, per_rank).expect("legal");
        Shape::new(giga, giga).query_map(own)
    };
    let documents = |tokens: usize, count: usize| {
        let base = (tokens / count) as u64;
        let lengths: Vec<u64> = lengths(tokens, base / 2, base * 3 / 2);
        Pattern::packed(lengths.clone(), lengths, Pattern::causal()).expect("legal")
    };
    let mega = documents(64 << 20, 1 << 20);
    let stripes = Positions::new([Progression { start: 1, step: 1024, len: per_rank }]);
    let striped = Shape::new(giga, giga).query_map(stripes.expect("legal"));
    vec![
        ("1 M tokens, second pattern", "< 10", pattern(SECOND), whole(1 << 20)),
        ("16 M tokens, causal", "< 50", pattern("causal"), whole(1 << 24)),
        ("1 G tokens, last of 1,024 ranks, causal", "< 1000", pattern("causal"), rank(1023)),
        ("1 G tokens, last of 1,024 ranks, second", "< 1000", pattern(SECOND), rank(1023)),
        ("1 G tokens, striped rank, causal", "< 1000", pattern("causal"), striped.clone()),
        ("64 M tokens, about 1 M documents", "< 5000", mega, whole(64 << 20)),
        ("1 M tokens, strided(3): one run per row", "", pattern("strided(3)"), whole(1 << 20)),
        ("1 query of 1 M tokens, second pattern", "", pattern(SECOND), Shape::new(1, 1 << 20)),
    ]
}

/// Deterministic lengths between `low` and `high` that add up to `tokens`.
fn lengths(tokens: usize, low: u64, high: u64) -> Vec<u64> {
    let (mut left, mut state, mut lengths) = (tokens as u64, 1u64, Vec::new());
    while left > 0 {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let length = (low + (state >> 33) % (high - low + 1)).min(left);
        lengths.push(length);
        left -= length;
    }
    lengths
}
