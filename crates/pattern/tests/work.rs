//! Work is bounded: for every expression, a call ends within its budget or returns an error.
//!
//! `LONGSPAN_CASES` is the number of random expressions (2,000 by default), `LONGSPAN_SEED` the
//! first seed.

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::fmt::Write;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use longspan_pattern::{BlockSize, Error, Layout, Pattern, Shape};
use longspan_testing::Random;

/// The system allocator, recording current and peak memory.
struct Recording;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Recording {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        let held = HELD.fetch_add(memory.size(), Ordering::Relaxed) + memory.size();
        PEAK.fetch_max(held, Ordering::Relaxed);
        // SAFETY: `System` has the requirements of `GlobalAlloc`.
        unsafe { System.alloc(memory) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, memory: Memory) {
        HELD.fetch_sub(memory.size(), Ordering::Relaxed);
        // SAFETY: the pointer came from `alloc` above, hence from the system allocator.
        unsafe { System.dealloc(pointer, memory) }
    }
}

#[global_allocator]
static RECORDING: Recording = Recording;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

/// A generator of random expressions.
struct Expressions(Random);

impl Expressions {
    fn next(&mut self, limit: u64) -> u64 {
        self.0.below(limit)
    }

    /// At least 1, log-uniform up to about `2^bits`.
    fn size(&mut self, bits: u64) -> u64 {
        let bit = self.next(bits + 1);
        (1 << bit) + self.next(1 << bit)
    }

    /// A few lengths that add up to `tokens`.
    fn lengths(&mut self, tokens: u64) -> Vec<u64> {
        let mut lengths = Vec::new();
        let mut left = tokens;
        for _ in 0..self.next(5) {
            let length = self.next(left + 1);
            lengths.push(length);
            left -= length;
        }
        lengths.push(left);
        lengths
    }

    fn primitive(&mut self, tokens: u64, text: &mut String) {
        let n = |random: &mut Self| random.size(24);
        let written = match self.next(16) {
            0 => write!(text, "causal"),
            1 => write!(text, "full"),
            2 => write!(text, "window({}, {})", n(self), n(self)),
            3 => write!(text, "sinks({})", n(self)),
            4 => write!(text, "global_tokens({})", n(self)),
            5 => {
                let rate = self.size(12);
                write!(text, "dilated({}, {rate}, {})", n(self), self.next(rate))
            }
            6 => write!(text, "strided({})", n(self)),
            7 => {
                let level = |random: &mut Self| (n(random), random.size(10), random.size(12));
                let (a, b, c) = (level(self), level(self), level(self));
                write!(text, "hierarchical([{a:?}, {b:?}, {c:?}])")
            }
            8 => write!(text, "documents({:?})", self.lengths(tokens)),
            9 => {
                let lengths = self.lengths(tokens);
                write!(text, "packed({lengths:?}, {lengths:?}, ")
                    .map(|()| self.expression(0, tokens, text))
                    .and_then(|()| write!(text, ")"))
            }
            10 => write!(text, "blocks_dilated({}, [{}, {}])", self.size(12), n(self), n(self)),
            11 => write!(text, "butterfly({})", self.size(12)),
            12 => {
                let (per_row, blocks) = (self.size(15), self.size(24));
                write!(text, "random({}, {per_row}, {blocks}, {})", self.size(12), self.next(100))
            }
            13 => {
                let (from, len) = (n(self), n(self));
                write!(text, "keys({from}, {0}) | queries({from}, {0})", from + len)
            }
            14 => {
                let sizes = [self.size(10), self.size(10), self.size(10)];
                let radii = [self.size(6), self.size(12), self.size(6)];
                write!(text, "neighborhood({sizes:?}, {radii:?})")
            }
            _ => {
                let (first, len) = (self.next(1000), n(self));
                write!(text, "blocks({}, [[{first}..{}], [0, 2]])", self.size(14), first + len)
            }
        };
        written.unwrap();
    }

    fn expression(&mut self, depth: u64, tokens: u64, text: &mut String) {
        if depth == 0 || self.next(4) == 0 {
            if self.next(4) == 0 {
                text.push('!');
            }
            return self.primitive(tokens, text);
        }
        let operator = [" & ", " | "][self.next(2) as usize];
        text.push_str(["(", "!("][self.next(2) as usize]);
        self.expression(depth - 1, tokens, text);
        for _ in 0..=self.next(2) {
            text.push_str(operator);
            self.expression(depth - 1, tokens, text);
        }
        text.push(')');
    }
}

/// CPU time of this thread, which other processes do not lengthen; wall time where it is not
/// available.
fn thread_time() -> Duration {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    let nanoseconds = std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split(' ').next()?.parse().ok());
    nanoseconds.map_or_else(|| START.elapsed(), Duration::from_nanos)
}

/// About a millisecond.
const BUDGET: u64 = 1 << 20;

/// Maximum time per call: a unit is a nanosecond or two, also on a core with shared caches. Work
/// that is not charged takes seconds at these sizes.
const MAX_TIME: Duration = Duration::from_secs(1);

const MAX_BYTES: u64 = 16 << 20;

#[test]
fn random_expressions_end_within_their_budget() {
    let (first, cases) = (number("LONGSPAN_SEED", 0), number("LONGSPAN_CASES", 2_000));
    let (mut done, mut refused) = (0, 0);
    let mut largest = (0.0, String::new());
    let mut slowest = (Duration::ZERO, String::new());
    let mut peak_case = (0, String::new());
    for seed in first..first + cases {
        let mut random = Expressions(Random::new(seed));
        let tokens = random.size(24).min(1 << 24);
        let text = loop {
            let mut text = String::new();
            let depth = random.next(3);
            random.expression(depth, tokens, &mut text);
            if text.len() <= 200 && text.parse::<Pattern>().is_ok() {
                break text;
            }
        };
        let block = BlockSize::new([16, 64, 64, 128, 256][random.next(5) as usize]).unwrap();
        let shape = Shape::new(tokens as usize, tokens as usize)
            .block(block)
            .max_work(BUDGET)
            .max_bytes(MAX_BYTES);
        let held = HELD.load(Ordering::Relaxed);
        PEAK.store(held, Ordering::Relaxed);
        let mut timed = |what: &str, start: Duration| {
            let time = thread_time() - start;
            if time > slowest.0 {
                slowest = (time, format!("{what} {text} for {tokens}"));
            }
        };
        let start = thread_time();
        let compiled = Layout::compile(&text.parse().unwrap(), &shape);
        timed("compiling", start);
        let within = |error: Error| match error {
            Error::TooMuchWork { limit: BUDGET, .. } | Error::TooLarge { limit: MAX_BYTES, .. } => {
            }
            other => panic!("{text} for {tokens}: {other}"),
        };
        match compiled {
            Err(error) => {
                within(error);
                refused += 1;
            }
            Ok(layout) => {
                done += 1;
                assert!(layout.work() <= BUDGET, "{text} for {tokens}: {}", layout.work());
                let result = layout.run_count() + layout.rows().len() + 1;
                let ratio = layout.work() as f64 / result as f64;
                if ratio > largest.0 {
                    largest = (ratio, format!("{text} for {tokens}"));
                }
                let start = thread_time();
                layout.counts().map_or_else(within, drop);
                timed("counting", start);
                let start = thread_time();
                layout.hash().map_or_else(within, drop);
                timed("hashing", start);
                let start = thread_time();
                layout.transpose().map_or_else(within, drop);
                timed("transposing", start);
                let start = thread_time();
                layout.picture(64, 64).map_or_else(within, drop);
                timed("drawing", start);
            }
        }
        let peak = PEAK.load(Ordering::Relaxed) - held;
        if peak > peak_case.0 {
            peak_case = (peak, format!("{text} for {tokens}"));
        }
    }
    // Shown with `--success-output` or `--nocapture`.
    eprintln!("{done} compiled, {refused} refused");
    eprintln!("largest work per run and row: {:.0} units, {}", largest.0, largest.1);
    eprintln!("longest call: {:?}, {}", slowest.0, slowest.1);
    eprintln!("most memory: {} bytes, {}", peak_case.0, peak_case.1);
    assert!(done > cases / 4, "{done} of {cases} compiled");
    assert!(refused > 0 || cases < 100, "no case exceeded its budget");
    assert!(slowest.0 < MAX_TIME, "{:?}: {}", slowest.0, slowest.1);
    assert!(peak_case.0 < MAX_BYTES as usize, "{} bytes: {}", peak_case.0, peak_case.1);
}

/// Every phase calls its hook often enough for any pattern, and stopped work restarts in the next
/// call.
#[test]
fn every_phase_can_be_stopped() {
    let pattern: Pattern =
        "window(100, 100) & strided(7) | random(64, 8, 16384, 7)".parse().unwrap();
    let shape = Shape::new(1 << 20, 1 << 20);
    let stop = |_: u64, _: u64| ControlFlow::Break(());
    let stopped = Error::Stopped { row: 0, rows: 1 << 14 };
    assert_eq!(Layout::compile_with(&pattern, &shape, stop).unwrap_err(), stopped);
    let layout = Layout::compile(&pattern, &shape).unwrap();
    assert_eq!(layout.counts_with(stop).unwrap_err(), stopped);
    assert_eq!(layout.hash_with(stop).unwrap_err(), stopped);
    assert_eq!(layout.transpose_with(stop).unwrap_err(), stopped);
    assert_eq!(layout.picture_with(9, 9, stop).unwrap_err(), stopped);
    assert_eq!(layout.keys_seen_with(None, stop).unwrap_err(), stopped);
    assert_eq!(layout.keys_by_query_with(stop).unwrap_err(), stopped);
    assert_eq!(layout.same_pairs_with(&layout, stop).unwrap_err(), stopped);
    assert!(layout.counts().is_ok() && layout.hash().is_ok() && layout.transpose().is_ok());

    // The longest time between two calls of the hook.
    let slow: Pattern = "strided(65) | strided(67) | dilated(9999, 71)".parse().unwrap();
    let mut last = thread_time();
    let mut longest = Duration::ZERO;
    let mut calls = 0;
    let _ = Layout::compile_with(&slow, &shape.clone().max_work(1 << 28), |_, _| {
        let now = thread_time();
        longest = longest.max(now - last);
        last = now;
        calls += 1;
        ControlFlow::Continue(())
    });
    assert!(calls > 20, "{calls} calls");
    assert!(longest < Duration::from_millis(200), "{longest:?} between two calls");
}

#[test]
fn errors_contain_the_costliest_sub_expression() {
    let refused = |text: &str, tokens: usize| {
        let shape = Shape::new(tokens, tokens).max_work(1 << 24);
        match Layout::compile(&text.parse().unwrap(), &shape) {
            Err(Error::TooMuchWork { expression, work: "compiling", limit, .. }) => {
                assert_eq!(limit, 1 << 24);
                expression
            }
            other => panic!("{text}: {other:?}"),
        }
    };
    let random = "random(1, 65536, 1048576, 7)";
    assert_eq!(refused(&format!("causal & !{random}"), 1 << 20), random);
    let long = format!("{random} & ({})", vec!["sinks(1)"; 100].join(" | "));
    assert_eq!(refused(&format!("!({long})"), 1 << 20), random);
}

/// Expressions that once took minutes end, or exceed their budget, within two seconds of one core
/// for compiling and again for counting and hashing together; half as much again with shared
/// caches.
#[test]
fn patterns_that_took_minutes_end() {
    let million = 1 << 20;
    let table = [
        ("random(1, 65536, 131072, 7)", 128),
        ("strided(65) | strided(67) | strided(71)", million),
        ("strided(97) & !strided(101) & !strided(103)", million),
        ("dilated(1048576, 65, 0) & dilated(1048575, 67, 0)", million),
        ("!random(1, 65536, 1048576, 7)", million),
        ("hierarchical([(256, 1, 1), (4096, 8, 64), (1048576, 64, 64)])", million),
        ("hierarchical([(1048576, 3, 5), (1048576, 7, 11), (1048576, 9, 17)])", million),
    ];
    for (text, tokens) in table {
        let start = thread_time();
        if let Ok(layout) = Layout::compile(&text.parse().unwrap(), &Shape::new(tokens, tokens)) {
            let _ = (layout.counts(), layout.hash());
        }
        let time = thread_time() - start;
        assert!(time < Duration::from_secs(6), "{text}: {time:?}");
    }
}
