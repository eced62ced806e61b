//! The cost of a layout is proportional to its runs, measured in coverage queries and bytes: time
//! is too noisy.

use longspan_pattern::{Layout, Pattern, Positions, Progression, Shape};
use longspan_testing::Random;

const SECOND: &str = "causal & (window(1024, 0) | sinks(64))";

fn lengths(tokens: usize) -> Vec<u64> {
    let (mut left, mut random, mut lengths) = (tokens as u64, Random::new(1), Vec::new());
    while left > 0 {
        let length = (16 + random.below(8177)).min(left);
        lengths.push(length);
        left -= length;
    }
    lengths
}

fn compile(name: &str, tokens: usize) -> Layout {
    let shape = Shape::new(tokens, tokens);
    let (pattern, shape) = match name {
        "packed" => {
            let lengths = lengths(tokens);
            (Pattern::packed(lengths.clone(), lengths, Pattern::causal()), shape)
        }
        "documents" => (
            Pattern::documents(lengths(tokens)).map(|documents| documents & Pattern::causal()),
            shape,
        ),
        "random" => (Pattern::random(64, 3, tokens as u64 / 64, 7), shape),
        "striped" => {
            let stripes = (0..8).map(|start| Progression { start, step: 8, len: tokens / 8 });
            let map = Positions::new(stripes).unwrap();
            (SECOND.parse(), shape.query_map(map.clone()).key_map(map))
        }
        "zigzag of 64 chunks" => {
            // Chunks from both ends in turn, as in a zigzag ring.
            let chunk = tokens / 64;
            let order = (0..32).flat_map(|i| [i, 63 - i]);
            let chunks =
                order.map(|i| Progression { start: (i * chunk) as i64, step: 1, len: chunk });
            let map = Positions::new(chunks).unwrap();
            (SECOND.parse(), shape.query_map(map.clone()).key_map(map))
        }
        text => (text.parse(), shape),
    };
    Layout::compile(&pattern.unwrap(), &shape).unwrap()
}

#[test]
fn coverage_queries_and_bytes_are_proportional_to_runs() {
    let hierarchical = "hierarchical([(256, 1, 1), (4096, 8, 64), (32768, 64, 64)])";
    // Maximum number of coverage queries per run. A hierarchy is six nodes that share thirty runs
    // per row; a document has few rows and an edge in each of its first.
    let table = [
        ("causal", 0.1),
        ("full", 0.1),
        (SECOND, 0.1),
        ("packed", 1.0),
        ("documents", 1.5),
        (hierarchical, 1.0),
        ("random", 1.0),
        ("striped", 0.3),
        ("zigzag of 64 chunks", 4.0),
        ("causal & strided(32)", 0.1),
        ("causal & (window(512, 0) | dilated(8192, 4))", 1.0),
    ];
    for (name, max) in table {
        let mut first: Option<(f64, f64)> = None;
        for tokens in [1 << 16, 1 << 18, 1 << 20, 1 << 22] {
            let layout = compile(name, tokens);
            let runs = layout.run_count() as f64;
            let (coverage_queries, bytes) =
                (layout.coverage_queries() as f64 / runs, layout.bytes() as f64 / runs);
            assert!(
                coverage_queries <= max,
                "{name}, {tokens} tokens: {coverage_queries} coverage queries per run"
            );
            // The row index has one more entry than there are rows.
            assert!(bytes <= 16.0 + 4.0 / runs, "{name}, {tokens} tokens: {bytes} bytes per run");
            let (few, least) = *first.get_or_insert((coverage_queries, bytes));
            assert!(
                coverage_queries <= 1.05 * few,
                "{name}, {tokens} tokens: {coverage_queries} after {few}"
            );
            assert!(bytes <= 1.5 * least && least <= 1.5 * bytes, "{name}: {bytes} after {least}");
        }
    }
}

#[test]
fn the_cost_of_full_run_is_that_of_one_block() {
    let cost = |tokens| compile("full", tokens).coverage_queries();
    assert_eq!(cost(1 << 14), cost(1 << 24));
}

#[test]
fn masked_regions_cost_nothing() {
    // The far level has a group every 128 tokens over all keys; the window overlaps eight.
    let narrow = "window(512, 0) & hierarchical([(1000000000, 2, 64)])";
    let few = compile(narrow, 1 << 16);
    let many = compile(narrow, 1 << 20);
    let per_row = |layout: &Layout| layout.coverage_queries() as f64 / layout.rows().len() as f64;
    assert!(per_row(&many) <= 1.05 * per_row(&few));
    assert!(many.run_count() <= 20 * (1 << 14));

    // A row that attends to one of a thousand shards queries few of them.
    let own = Positions::range(1 << 20, 1 << 10).unwrap();
    let chunks = (0..1024).rev().map(|i| Progression { start: i << 12, step: 1, len: 1 << 12 });
    let shape =
        Shape::new(1 << 22, 1 << 22).query_map(own).key_map(Positions::new(chunks).unwrap());
    let layout = Layout::compile(&SECOND.parse().unwrap(), &shape).unwrap();
    assert!(layout.coverage_queries() <= 40 * 16, "{} coverage queries", layout.coverage_queries());
}

#[test]
fn the_cost_of_decode_step_is_one_row() {
    let lengths: Vec<u64> = vec![64; 1 << 14];
    let patterns = [SECOND.parse().unwrap(), Pattern::documents(lengths).unwrap()];
    for pattern in patterns {
        let layout = Layout::compile(&pattern, &Shape::new(1, 1 << 20)).unwrap();
        assert_eq!(layout.rows(), 0..1);
        assert!(
            layout.coverage_queries() < 20,
            "{pattern:.20}: {} coverage queries",
            layout.coverage_queries()
        );
        assert!(layout.bytes() < 8 << 10, "{} bytes", layout.bytes());
    }
}

#[test]
fn ordering_by_residue_makes_strides_full() {
    let tokens = 3 * 6400;
    let residues = (0..3).map(|start| Progression { start, step: 3, len: tokens / 3 });
    let map = Positions::new(residues).unwrap();
    let shape = Shape::new(tokens, tokens);
    let ordered = shape.clone().query_map(map.clone()).key_map(map);
    let strided = Pattern::strided(3).unwrap();
    let plain = Layout::compile(&strided, &shape).unwrap();
    let ordered = Layout::compile(&strided, &ordered).unwrap();
    assert_eq!(ordered.counts().unwrap().active_pairs, plain.counts().unwrap().active_pairs);
    assert_eq!(
        (plain.counts().unwrap().full_blocks, plain.counts().unwrap().partial_blocks),
        (0, 300 * 300)
    );
    assert_eq!(
        (ordered.counts().unwrap().full_blocks, ordered.counts().unwrap().partial_blocks),
        (3 * 100 * 100, 0)
    );
    assert_eq!(ordered.run_count(), 300);
}
