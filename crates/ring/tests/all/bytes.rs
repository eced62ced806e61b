//! Only needed bytes are sent: compared with a count of all pairs.

use std::collections::BTreeSet;

use longspan::Pattern;
use longspan_ring::Shards;
use longspan_testing::{AttentionCase, Problem as Numbers, Rule};

use crate::common::*;

const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const DIM: usize = 8;
/// Bytes of a token's keys and values, and of their gradients.
const KEY: u64 = (KEY_HEADS * 2 * DIM * 4) as u64;
const QUERY: u64 = (HEADS * DIM * 4) as u64;
const STATE: u64 = (HEADS * (DIM + 2) * 4) as u64;

fn case(rule: Rule, tokens: u64) -> AttentionCase {
    let case = AttentionCase::new("bytes", rule, tokens);
    AttentionCase { heads_q: HEADS, heads_kv: KEY_HEADS, dim_k: DIM, dim_v: DIM, ..case }
}

fn run(case: &AttentionCase, shards: &Shards) -> Vec<Results> {
    let numbers: Numbers = case.unmasked();
    around(case, &numbers, shards)
}

/// Demand of a rank for an owner's keys: keys that are sent, and queries that are sent instead because
/// that takes at most a quarter of the bytes that it saves.
struct Needed {
    keys: u64,
    remote: u64,
}

/// The keys of every query, by position.
fn attended(pattern: &Pattern, tokens: usize) -> Vec<Vec<usize>> {
    let keys = |query: usize| {
        (0..tokens).filter(|&key| pattern.allows(query as i64, key as i64)).collect()
    };
    (0..tokens).map(keys).collect()
}

fn needed(attended: &[Vec<usize>], shards: &Shards, rank: usize, owner: usize) -> Needed {
    let mut held = vec![false; attended.len()];
    positions(shards, owner).into_iter().for_each(|key| held[key] = true);
    let seen_by = |query: &usize| -> BTreeSet<usize> {
        attended[*query].iter().copied().filter(|&key| held[key]).collect()
    };
    let seen: Vec<_> = positions(shards, rank).iter().map(seen_by).collect();
    let most = seen.iter().map(BTreeSet::len).max().unwrap_or(0);
    let union = |sets: Vec<&BTreeSet<usize>>| {
        sets.into_iter().flatten().collect::<BTreeSet<_>>().len() as u64
    };
    let (heavy, light): (Vec<_>, Vec<_>) =
        seen.iter().filter(|set| !set.is_empty()).partition(|set| 2 * set.len() >= most);
    let (remote, rest) = (heavy.len() as u64, union(light));
    let keys = union(seen.iter().collect());
    match remote > 0 && 4 * remote * (QUERY + STATE) <= (keys - rest) * KEY {
        true => Needed { keys: rest, remote },
        false => Needed { keys, remote: 0 },
    }
}

fn rules(tokens: u64) -> Vec<(&'static str, Rule)> {
    let window = Rule::And(vec![Rule::Causal, Rule::Window { left: 33, right: 0 }]);
    let sinks = Rule::Or(vec![Rule::Window { left: 33, right: 0 }, Rule::Sinks { n: 3 }]);
    vec![
        ("window", window),
        ("both sides", Rule::Window { left: 20, right: 11 }),
        ("dilated", Rule::Dilated { segment: 128, rate: 4, offset: 1 }),
        ("strided", Rule::And(vec![Rule::Causal, Rule::Strided { stride: 6 }])),
        ("documents", Rule::Documents(vec![100, 0, 37, 300, tokens - 437])),
        ("causal", Rule::Causal),
        ("sinks", Rule::And(vec![Rule::Causal, sinks])),
    ]
}

#[test]
fn received_bytes_are_those_needed() {
    let tokens = 1_003;
    for (name, rule) in rules(tokens) {
        let case = case(rule, tokens);
        let pattern: Pattern = case.pattern_text().parse().unwrap();
        let attended = attended(&pattern, tokens as usize);
        for ranks in [2, 5, 8] {
            for (map, shards) in maps(&case, ranks) {
                let results = run(&case, &shards);
                let (mut all_keys, mut all_remote, mut backward) = (0, 0, 0);
                for (rank, result) in results.iter().enumerate() {
                    let mut expected = 0;
                    for other in (0..ranks).filter(|&other| other != rank) {
                        let mine = needed(&attended, &shards, rank, other);
                        let theirs = needed(&attended, &shards, other, rank);
                        expected += mine.keys * KEY + mine.remote * STATE + theirs.remote * QUERY;
                        all_keys += mine.keys;
                        all_remote += mine.remote;
                    }
                    assert_eq!(result.needed.0, expected, "{name}, {map}, rank {rank} of {ranks}");
                    assert_eq!(result.tally.received, result.needed.0 + result.needed.1);
                    backward += result.needed.1;
                }
                // Gradients are returned once per transfer of keys. A remote query is sent with dout and
                // three f32 per row, and its gradient is returned.
                let query = 3 * QUERY + (HEADS * 3 * 4) as u64;
                let expected = all_keys * 2 * KEY + all_remote * query;
                assert_eq!(backward, expected, "{name}, {map}, {ranks} ranks");
            }
        }
    }
}

/// A few global queries are sent to the keys; their keys are broadcast by a tree.
#[test]
fn global_queries_are_sent_to_the_keys() {
    let (tokens, ranks, global, reach) = (8_000, 8, 5, 40);
    let window = Rule::Window { left: reach, right: reach };
    let case = case(Rule::Or(vec![window, Rule::GlobalTokens { n: global }]), tokens);
    let shards = Shards::contiguous(tokens as usize, ranks, 1).unwrap();
    let results = run(&case, &shards);
    for (rank, result) in results.iter().enumerate() {
        let expected = match rank {
            0 => reach * KEY + (ranks as u64 - 1) * global * STATE,
            7 => (reach + global) * KEY + global * QUERY,
            _ => (2 * reach + global) * KEY + global * QUERY,
        };
        assert_eq!(result.needed.0, expected, "rank {rank}");
    }
}

#[test]
fn no_rank_sends_much_more_than_the_mean() {
    let tokens = 4_000;
    let mut rules = rules(tokens);
    rules.push((
        "global",
        Rule::Or(vec![Rule::Window { left: 40, right: 40 }, Rule::GlobalTokens { n: 5 }]),
    ));
    for (name, rule) in rules.into_iter().filter(|(name, _)| *name != "documents") {
        let case = case(rule, tokens);
        let shards = Shards::contiguous(tokens as usize, 8, 1).unwrap();
        let sent: Vec<_> = run(&case, &shards).iter().map(|result| result.tally.sent).collect();
        let (most, all) = (*sent.iter().max().unwrap(), sent.iter().sum::<u64>());
        assert!(most * 8 <= 4 * all, "{name}: {sent:?}");
    }
}

/// A window that reaches one neighbor exchanges messages with it only.
#[test]
fn a_window_uses_one_neighbor() {
    for ranks in [2, 5, 9] {
        let case = case(Rule::And(vec![Rule::Causal, Rule::Window { left: 50, right: 0 }]), 1_000);
        let shards = Shards::contiguous(1_000, ranks, 1).unwrap();
        for (rank, result) in run(&case, &shards).iter().enumerate() {
            // Keys from the previous rank in both passes, gradients from the next.
            let expected = 2 * u64::from(rank > 0) + u64::from(rank + 1 < ranks);
            assert_eq!(result.tally.messages, expected, "rank {rank} of {ranks}");
        }
    }
}

/// Received keys in memory: those in use, and those in flight.
#[test]
fn at_most_two_hops_are_in_memory() {
    let case = case(Rule::Full, 2_000);
    let shards = Shards::contiguous(2_000, 8, 1).unwrap();
    for result in run(&case, &shards) {
        // Forward two shards of keys; backward also the returned gradients.
        assert!(result.tally.most_held <= 2 * 2 * 250 * KEY, "{}", result.tally.most_held);
    }
}
