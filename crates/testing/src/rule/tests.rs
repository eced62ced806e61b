//! Every primitive against numbers worked out by hand from its definition.

use std::ops::Range;

use super::*;

/// The keys among `keys` that a query sees.
fn seen(rule: &Rule, query: i64, keys: Range<i64>) -> Vec<i64> {
    keys.filter(|&key| rule.allows(query, key)).collect()
}

const NONE: [i64; 0] = [];

#[test]
fn full_and_causal() {
    assert_eq!(seen(&Rule::Full, -2, -3..2), [-3, -2, -1, 0, 1]);
    assert_eq!(seen(&Rule::Causal, 1, -2..5), [-2, -1, 0, 1]);
    assert_eq!(seen(&Rule::Causal, -1, -2..5), [-2, -1]);
}

#[test]
fn window_includes_both_ends() {
    let window = Rule::Window { left: 2, right: 1 };
    assert_eq!(seen(&window, 5, 0..10), [3, 4, 5, 6]);
    assert_eq!(seen(&window, -1, -9..9), [-3, -2, -1, 0]);
    assert_eq!(seen(&Rule::Window { left: 0, right: 0 }, 5, 0..10), [5]);
    let widest = Rule::Window { left: u64::MAX, right: u64::MAX };
    assert!(widest.allows(i64::MIN, i64::MAX) && widest.allows(i64::MAX, i64::MIN));
}

#[test]
fn sliding_window_counts_the_query_itself() {
    assert_eq!(seen(&Rule::SlidingWindow { width: 3 }, 5, 0..10), [3, 4, 5]);
    assert_eq!(seen(&Rule::SlidingWindow { width: 1 }, -4, -9..9), [-4]);
    assert_eq!(seen(&Rule::SlidingWindow { width: 0 }, 5, 0..10), NONE);
}

#[test]
fn sinks_and_global_tokens_start_at_zero() {
    assert_eq!(seen(&Rule::Sinks { n: 2 }, 7, -3..9), [0, 1]);
    assert_eq!(seen(&Rule::Sinks { n: 2 }, -7, -3..9), [0, 1]);
    assert_eq!(seen(&Rule::Sinks { n: 0 }, 0, -3..9), NONE);
    let global = Rule::GlobalTokens { n: 2 };
    assert_eq!(seen(&global, 1, -2..4), [-2, -1, 0, 1, 2, 3]);
    assert_eq!(seen(&global, 2, -2..4), [0, 1]);
    assert_eq!(seen(&global, -1, -2..4), [0, 1]);
}

#[test]
fn places_are_half_open() {
    assert_eq!(seen(&Rule::Keys { from: 2, to: 4 }, -7, -3..9), [2, 3]);
    assert_eq!(seen(&Rule::Queries { from: 2, to: 4 }, 3, 0..3), [0, 1, 2]);
    assert_eq!(seen(&Rule::Queries { from: 2, to: 4 }, 4, 0..3), NONE);
}

#[test]
fn neighborhoods_end_at_the_borders() {
    let grid = Rule::Neighborhood { sizes: vec![2, 3], radii: vec![0, 1] };
    assert_eq!(seen(&grid, 2, -3..9), [1, 2]);
    assert_eq!(seen(&grid, 4, -3..9), [3, 4, 5]);
    assert_eq!(seen(&grid, 6, -3..9), NONE);
    assert_eq!(seen(&grid, -1, -3..9), NONE);
    let cube = Rule::Neighborhood { sizes: vec![2, 2, 2], radii: vec![1, 0, 1] };
    assert_eq!(seen(&cube, 3, 0..9), [2, 3, 6, 7]);
}

#[test]
fn dilated_counts_from_the_start_of_its_segment() {
    let dilated = Rule::Dilated { segment: 5, rate: 2, offset: 1 };
    assert_eq!(seen(&dilated, 1, -9..20), [1, 3]);
    assert_eq!(seen(&dilated, 6, -9..20), [6, 8]);
    assert_eq!(seen(&dilated, 7, -9..20), NONE);
    assert_eq!(seen(&dilated, -1, -9..20), NONE);
    assert_eq!(seen(&Rule::Dilated { segment: 3, rate: 1, offset: 0 }, 4, -9..20), [3, 4, 5]);
    assert_eq!(seen(&Rule::Dilated { segment: 2, rate: 4, offset: 3 }, 3, -9..20), NONE);
}

#[test]
fn strided_floors() {
    let strided = Rule::Strided { stride: 3 };
    assert_eq!(seen(&strided, 4, -6..9), [-5, -2, 1, 4, 7]);
    assert_eq!(seen(&strided, -1, -6..9), [-4, -1, 2, 5, 8]);
}

#[test]
fn hierarchical_floors_its_grains() {
    let coarse = Rule::Hierarchical(vec![Level { window: 6, stride: 2, grain: 3 }]);
    // Grains -2, 0 and 2 are seen: keys -6..-3, 0..3 and 6..9.
    assert_eq!(seen(&coarse, 1, -20..20), [-5, -4, 0, 1, 2, 6, 7]);
    assert_eq!(seen(&coarse, -6, -20..20), [-12, -11, -10, -6, -5, -4, 0]);
    let fine = Level { window: 1, stride: 1, grain: 1 };
    let far = Level { window: 8, stride: 4, grain: 1 };
    assert_eq!(seen(&Rule::Hierarchical(vec![fine, far]), 9, 0..20), [4, 8, 9, 10, 12, 16]);
}

#[test]
fn documents_may_be_empty() {
    let documents = Rule::Documents(vec![2, 0, 3]);
    assert_eq!(seen(&documents, 0, -3..9), [0, 1]);
    assert_eq!(seen(&documents, 2, -3..9), [2, 3, 4]);
    assert_eq!(seen(&documents, -1, -3..9), NONE);
    assert_eq!(seen(&documents, 5, -3..9), NONE);
    assert_eq!(seen(&Rule::Documents(vec![]), 0, -3..9), NONE);
}

#[test]
fn packed_aligns_every_sequence_at_its_end() {
    // Sequences of 3 queries on 5 keys, and of 4 on 2: seven of each, so positions are numbers.
    let packed =
        |inner| Rule::Packed { queries: vec![3, 4], keys: vec![5, 2], inner: Box::new(inner) };
    let causal = packed(Rule::Causal);
    assert_eq!(seen(&causal, 0, -3..12), [0, 1, 2]);
    assert_eq!(seen(&causal, 2, -3..12), [0, 1, 2, 3, 4]);
    // The second sequence's queries stand at -2, -1, 0, 1 within it.
    assert_eq!(seen(&causal, 4, -3..12), NONE);
    assert_eq!(seen(&causal, 5, -3..12), [5]);
    assert_eq!(seen(&causal, 6, -3..12), [5, 6]);
    assert_eq!(seen(&causal, 7, -3..12), NONE);
    assert_eq!(seen(&causal, -1, -3..12), NONE);
    assert_eq!(seen(&packed(Rule::Sinks { n: 1 }), 4, -3..12), [5]);
    let outside = packed(Rule::Not(Box::new(Rule::Full)));
    assert_eq!(seen(&outside, 0, -3..12), NONE);
}

#[test]
fn packed_queries_are_the_last_positions() {
    // Two queries on six keys: the queries stand at 4 and 5.
    let packed = Rule::Packed {
        queries: vec![1, 0, 1],
        keys: vec![2, 1, 3],
        inner: Box::new(Rule::Window { left: 1, right: 0 }),
    };
    assert_eq!(seen(&packed, 3, 0..6), NONE);
    assert_eq!(seen(&packed, 4, 0..6), [0, 1]);
    assert_eq!(seen(&packed, 5, 0..6), [4, 5]);
}

#[test]
fn packed_nests() {
    // Four queries on six keys, twice; in each, 1 query on 2 keys and 3 on 4.
    let inner =
        Rule::Packed { queries: vec![1, 3], keys: vec![2, 4], inner: Box::new(Rule::Causal) };
    let packed = Rule::Packed { queries: vec![4, 4], keys: vec![6, 6], inner: Box::new(inner) };
    assert_eq!(seen(&packed, 4, 0..12), [0, 1]);
    assert_eq!(seen(&packed, 5, 0..12), [2, 3]);
    assert_eq!(seen(&packed, 8, 0..12), [6, 7]);
    assert_eq!(seen(&packed, 11, 0..12), [8, 9, 10, 11]);
    let documents = Rule::Packed {
        queries: vec![4, 4],
        keys: vec![6, 6],
        inner: Box::new(Rule::Documents(vec![3, 3])),
    };
    assert_eq!(seen(&documents, 4, 0..12), [0, 1, 2]);
    assert_eq!(seen(&documents, 11, 0..12), [9, 10, 11]);
}

#[test]
fn blocks_dilated_sees_itself_and_both_sides() {
    let dilated = Rule::BlocksDilated { block: 2, rates: vec![1, 3] };
    assert_eq!(seen(&dilated, 8, -9..16), [2, 3, 6, 7, 8, 9, 10, 11, 14, 15]);
    assert_eq!(seen(&dilated, 0, -9..16), [0, 1, 2, 3, 6, 7]);
    assert_eq!(seen(&dilated, -1, -9..16), NONE);
    assert_eq!(seen(&Rule::BlocksDilated { block: 2, rates: vec![] }, 5, -9..16), [4, 5]);
}

#[test]
fn butterfly_flips_one_bit() {
    let butterfly = Rule::Butterfly { block: 1 };
    assert_eq!(seen(&butterfly, 5, -9..16), [1, 4, 5, 7, 13]);
    assert_eq!(seen(&butterfly, 0, -9..17), [0, 1, 2, 4, 8, 16]);
    assert_eq!(seen(&butterfly, -1, -9..16), NONE);
    assert_eq!(seen(&Rule::Butterfly { block: 3 }, 4, 0..12), [0, 1, 2, 3, 4, 5, 9, 10, 11]);
}

#[test]
fn random_skips_what_it_has_drawn() {
    // Candidates of seed 7: row 0 draws 1, 7, 7, 2, …; row 3 draws 3, 5, 5, 2, ….
    let random = Rule::Random { block: 1, per_row: 3, blocks: 10, seed: 7 };
    assert_eq!(seen(&random, 0, -9..20), [1, 2, 7]);
    assert_eq!(seen(&random, 3, -9..20), [2, 3, 5]);
    assert_eq!(seen(&random, -1, -9..20), NONE);
    let random = Rule::Random { block: 2, per_row: 1, blocks: 10, seed: 7 };
    assert_eq!(seen(&random, 7, -9..20), [6, 7]);
    let nothing = Rule::Random { block: 2, per_row: 0, blocks: 10, seed: 7 };
    assert_eq!(seen(&nothing, 7, -9..20), NONE);
}

#[test]
fn random_over_half_draws_what_is_left_out() {
    // Candidates of seed 7 out of five: row 0 draws 1, 2, …; row 1 draws 1, 3, ….
    let random = Rule::Random { block: 1, per_row: 3, blocks: 5, seed: 7 };
    assert_eq!(seen(&random, 0, -9..20), [0, 3, 4]);
    assert_eq!(seen(&random, 1, -9..20), [0, 2, 4]);
    let under_half = Rule::Random { block: 1, per_row: 2, blocks: 5, seed: 7 };
    assert_eq!(seen(&under_half, 1, -9..20), [1, 3]);
    let all = Rule::Random { block: 1, per_row: u64::MAX, blocks: 5, seed: 7 };
    assert_eq!(seen(&all, 1, -9..20), [0, 1, 2, 3, 4]);
}

#[test]
fn random_at_exactly_half_draws_what_is_seen() {
    // Candidates of seed 7 out of four, row 0: 1, 1, 3, ….
    let random = Rule::Random { block: 1, per_row: 2, blocks: 4, seed: 7 };
    assert_eq!(seen(&random, 0, -9..20), [1, 3]);
}

#[test]
fn explicit_blocks_end_with_their_rows() {
    let blocks = Rule::Blocks { block: 2, rows: vec![vec![0], vec![], vec![1, 3]] };
    assert_eq!(seen(&blocks, 1, -9..16), [0, 1]);
    assert_eq!(seen(&blocks, 2, -9..16), NONE);
    assert_eq!(seen(&blocks, 5, -9..16), [2, 3, 6, 7]);
    assert_eq!(seen(&blocks, 6, -9..16), NONE);
    assert_eq!(seen(&blocks, -1, -9..16), NONE);
}

#[test]
fn operators() {
    let near = Rule::And(vec![Rule::Causal, Rule::Window { left: 1, right: 1 }]);
    assert_eq!(seen(&near, 3, 0..9), [2, 3]);
    assert_eq!(seen(&Rule::Or(vec![near.clone(), Rule::Sinks { n: 1 }]), 3, 0..9), [0, 2, 3]);
    assert_eq!(seen(&Rule::Not(Box::new(near)), 3, -2..6), [-2, -1, 0, 1, 4, 5]);
    assert!(Rule::And(vec![]).allows(0, 0) && !Rule::Or(vec![]).allows(0, 0));
    let outside = Rule::Not(Box::new(Rule::Documents(vec![3])));
    assert_eq!(seen(&outside, 0, -2..5), [-2, -1, 3, 4]);
}

#[test]
fn text_of_every_primitive() {
    let level = |window, stride, grain| Level { window, stride, grain };
    let inner = Rule::And(vec![Rule::Causal, Rule::Window { left: 2, right: 0 }]);
    let queries = vec![3, 4];
    let cases = [
        (Rule::Full, "full"),
        (Rule::Causal, "causal"),
        (Rule::Window { left: 256, right: 0 }, "window(256, 0)"),
        (Rule::SlidingWindow { width: 8 }, "sliding_window(8)"),
        (Rule::Sinks { n: 4 }, "sinks(4)"),
        (Rule::GlobalTokens { n: 4 }, "global_tokens(4)"),
        (Rule::Dilated { segment: 2048, rate: 4, offset: 1 }, "dilated(2048, 4, 1)"),
        (Rule::Strided { stride: 4 }, "strided(4)"),
        (
            Rule::Hierarchical(vec![level(64, 1, 1), level(512, 4, 16)]),
            "hierarchical([(64, 1, 1), (512, 4, 16)])",
        ),
        (Rule::Documents(vec![10, 0, 5]), "documents([10, 0, 5])"),
        (
            Rule::Packed { queries, keys: vec![5, 6], inner: Box::new(inner) },
            "packed([3, 4], [5, 6], causal & window(2, 0))",
        ),
        (Rule::BlocksDilated { block: 16, rates: vec![1, 4] }, "blocks_dilated(16, [1, 4])"),
        (Rule::Butterfly { block: 16 }, "butterfly(16)"),
        (Rule::Random { block: 16, per_row: 3, blocks: 40, seed: 7 }, "random(16, 3, 40, 7)"),
        (
            Rule::Blocks { block: 16, rows: vec![vec![0], vec![], vec![0, 1]] },
            "blocks(16, [[0], [], [0, 1]])",
        ),
    ];
    for (rule, text) in cases {
        assert_eq!(rule.to_string(), text);
    }
}

#[test]
fn text_of_operators() {
    let (full, causal) = (Rule::Full, Rule::Causal);
    let and = Rule::And(vec![full.clone(), causal.clone()]);
    let or = Rule::Or(vec![full, causal.clone()]);
    assert_eq!(and.to_string(), "full & causal");
    assert_eq!(Rule::Or(vec![and, causal.clone()]).to_string(), "(full & causal) | causal");
    assert_eq!(Rule::Not(Box::new(or.clone())).to_string(), "!(full | causal)");
    assert_eq!(Rule::Not(Box::new(Rule::Not(Box::new(causal)))).to_string(), "!!causal");
    assert_eq!(Rule::And(vec![or]).to_string(), "full | causal");
}
