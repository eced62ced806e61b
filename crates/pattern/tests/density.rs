//! Patterns scaled to a density, counted pair by pair.

use std::cell::Cell;
use std::ops::ControlFlow;

use longspan_pattern::{Error, Layout, Pattern, Shape, scale_to_density, scale_to_density_with};

/// A text with one `{}`, and the range of what stands there.
fn scaled(
    text: &str,
    range: (u64, u64),
    shape: &Shape,
    density: f64,
) -> Result<(u64, Pattern), Error> {
    let make = |n: u64| text.replace("{}", &n.to_string()).parse();
    scale_to_density(make, range.0..=range.1, shape, density)
}

/// The share of pairs that a pattern allows, asked one by one.
fn counted(pattern: &Pattern, queries: i64, keys: i64) -> f64 {
    let pairs =
        (0..queries).flat_map(|query| (0..keys).map(move |key| (query + keys - queries, key)));
    let active = pairs.filter(|&(query, key)| pattern.allows(query, key)).count();
    active as f64 / (queries * keys) as f64
}

/// Text, range, and a density that it can reach at both lengths.
const PATTERNS: [(&str, (u64, u64), f64); 9] = [
    ("window({}, {})", (0, 999), 0.3),
    ("causal & window({}, 0)", (0, 999), 0.1),
    ("causal & (sliding_window({}) | sinks(16))", (1, 1_000), 0.2),
    ("strided({})", (1, 1_000), 0.05),
    ("window(32, 32) | strided({})", (1, 1_000), 0.10),
    ("dilated({}, 4)", (4, 1_000), 0.04),
    ("hierarchical([(16, 1, 1), ({}, 4, 16)])", (1, 999), 0.15),
    ("random(16, {}, 128, 7)", (1, 128), 0.25),
    ("!causal | window({}, 0)", (0, 999), 0.7),
];

#[test]
fn targets_are_reached_within_two_percent() {
    for (queries, keys) in [(1_000, 1_000), (401, 803)] {
        for (text, range, density) in PATTERNS {
            let shape = Shape::new(queries as usize, keys as usize);
            let (parameter, pattern) = scaled(text, range, &shape, density).unwrap();
            assert_eq!(pattern, text.replace("{}", &parameter.to_string()).parse().unwrap());
            let found = counted(&pattern, queries, keys);
            assert!(
                (found - density).abs() <= 0.02 * density,
                "{pattern} of {queries} × {keys} has {found}, expected {density}"
            );
        }
    }
}

/// At lengths whose pairs can't be asked one by one, by the formula of the pattern's pairs.
#[test]
fn long_sequences() {
    let tokens = 1 << 20;
    let (left, _) =
        scaled("causal & window({}, 0)", (0, tokens - 1), &shape(tokens), 0.01).unwrap();
    let (n, w) = (tokens as f64, left as f64 + 1.0);
    let found = (w * (n - w) + w * (w + 1.0) / 2.0) / (n * n);
    assert!((found - 0.01).abs() < 0.5 / n, "{left}: {found}");
    assert_eq!(scaled("strided({})", (1, 100), &shape(tokens), 1.0 / 64.0).unwrap().0, 64);
}

/// Every other block of a row is a run of its own with a stride of two blocks, none with one of a
/// block: layouts on the way are larger than the one that is found.
#[test]
fn layouts_on_the_way_may_be_too_large() {
    let shape = shape(8_192).max_bytes(1 << 16);
    let between = Layout::compile(&Pattern::strided(128).unwrap(), &shape);
    assert!(matches!(between, Err(Error::TooLarge { .. })));
    assert_eq!(scaled("strided({})", (1, 8_192), &shape, 1.0 / 64.0).unwrap().0, 64);
}

/// Rows that are not compiled don't count.
#[test]
fn some_rows() {
    let shape = shape(1_024).rows(8..16);
    // The second half of the queries: each sees all keys of the window.
    assert_eq!(scaled("window({}, 0)", (0, 511), &shape, 0.25).unwrap().0, 255);
}

/// No other parameter is nearer.
#[test]
fn the_nearest_is_found() {
    let shape = shape(300);
    let target = 0.123;
    let distance = |n: u64| {
        let layout = Layout::compile(&Pattern::window(n, 0).unwrap(), &shape).unwrap();
        (layout.density().unwrap() - target).abs()
    };
    let best = (0..300).min_by(|&a, &b| distance(a).total_cmp(&distance(b))).unwrap();
    assert_eq!(scaled("window({}, 0)", (0, 299), &shape, target).unwrap().0, best);
}

#[test]
fn as_many_layouts_as_the_range_has_bits() {
    let made = Cell::new(0);
    let make = |n| {
        made.set(made.get() + 1);
        Pattern::window(n, 0)
    };
    scale_to_density(make, 0..=u64::MAX >> 3, &shape(1_000), 0.1).unwrap();
    assert!(made.get() <= 2 + 61, "{} layouts", made.get());
}

#[test]
fn what_cannot_be_reached_is_an_error() {
    for (text, range, density, message) in [
        // Only a half of all pairs and the diagonal.
        ("causal & window({}, 0)", (0, 999), 0.9, "the nearest is 0.5005 with parameter 999"),
        ("strided({})", (1, 1_000), 0.7, "the nearest is 0.5 with parameter 2"),
        ("causal | keys({}, 1000)", (1_000, 1_000), 0.4, "or ask for 0.5005"),
        ("window({}, 0)", (5, 4), 0.5, "the parameter is from 5 to 4"),
        ("window({}, 0)", (0, 9), 0.0, "0, expected above 0"),
        ("window({}, 0)", (0, 9), 1.5, "1.5, expected above 0 and at most 1"),
        ("window({}, 0)", (0, 9), f64::NAN, "NaN, expected"),
    ] {
        let error = scaled(text, range, &shape(1_000), density).unwrap_err().to_string();
        assert!(error.starts_with("density: ") && error.contains(message), "{error}");
    }
    // Errors of the pattern itself are passed on.
    let error = scaled("strided({})", (0, 9), &shape(1_000), 0.5).unwrap_err().to_string();
    assert!(error.contains("strided"), "{error}");
    // There are no pairs.
    assert!(scaled("full & window({}, 0)", (0, 9), &Shape::new(0, 0), 0.5).is_err());
}

#[test]
fn hooks_stop_it() {
    let stopped = scale_to_density_with(
        |n| Pattern::window(n, 0),
        0..=9,
        &shape(1_000),
        0.5,
        |_, _| ControlFlow::Break(()),
    );
    assert!(matches!(stopped, Err(Error::Stopped { .. })));
}

fn shape(tokens: u64) -> Shape {
    Shape::new(tokens as usize, tokens as usize)
}
