//! What one process works out for every rank is what ranks then do.

use longspan_ring::{Fold, Local, Outline, Outlines, Problem, Shards, Stage};
use longspan_testing::{AttentionCase, Rule};

mod common;

use common::*;

fn received(stages: &[Stage]) -> u64 {
    stages.iter().map(Stage::received).sum()
}

fn sent(stages: &[Stage]) -> u64 {
    stages.iter().map(Stage::sent).sum()
}

fn compare(case: &AttentionCase, map: &str, shards: &Shards) {
    let results = around(case, &case.problem(), shards);
    compare_with(case, &problem(case, shards.clone()), map, &results);
}

fn compare_with(case: &AttentionCase, problem: &Problem, map: &str, results: &[Results]) {
    let shards = problem.shards();
    let mut outlines = Outlines::new(problem).unwrap();
    for (rank, result) in results.iter().enumerate() {
        let outline = outlines.rank(rank).unwrap();
        let at = format!("rank {rank} of {}, {map}: {case}", shards.ranks());
        let passes = [&outline.forward, &outline.backward];
        let [forward, backward] = passes.map(|stages| received(stages));
        assert_eq!((forward, backward), result.needed, "{at}");
        assert_eq!(forward + backward, result.tally.received, "{at}");
        assert_eq!(
            passes.map(|stages| sent(stages)).iter().sum::<u64>(),
            result.tally.sent,
            "{at}"
        );
        let messages =
            passes.iter().flat_map(|stages| stages.iter()).map(|stage| stage.receives.len());
        assert_eq!(messages.sum::<usize>() as u64, result.tally.messages, "{at}");
        for stages in passes {
            assert_eq!(
                stages.iter().map(|stage| stage.work.pairs).sum::<u128>(),
                result.pairs,
                "{at}"
            );
            assert!(stages.windows(2).all(|pair| pair[0].label < pair[1].label), "{at}");
        }
    }
}

#[test]
fn outlines_are_what_rings_do() {
    let causal = |inner: Vec<Rule>| Rule::And(vec![Rule::Causal, Rule::Or(inner)]);
    let rules = [
        ("causal", Rule::Causal),
        ("full", Rule::Full),
        ("sinks", causal(vec![Rule::Window { left: 70, right: 0 }, Rule::Sinks { n: 9 }])),
        (
            "global",
            Rule::Or(vec![Rule::Window { left: 40, right: 40 }, Rule::GlobalTokens { n: 5 }]),
        ),
        ("dilated", Rule::Dilated { segment: 256, rate: 4, offset: 1 }),
        ("documents", causal(vec![Rule::Documents(vec![700, 1, 499, 301])])),
    ];
    for (name, rule) in rules {
        let case = AttentionCase { heads_q: 4, ..AttentionCase::new(name, rule, 1_501) };
        for ranks in [2, 7] {
            for (map, shards) in maps(&case, ranks) {
                compare(&case, map, &shards);
            }
        }
    }
}

/// Shards long enough for whole progressions to be told at a glance.
#[test]
fn so_they_are_where_nothing_is_compiled() {
    let sinks = Rule::Or(vec![Rule::Window { left: 700, right: 0 }, Rule::Sinks { n: 9 }]);
    for (name, rule) in [("causal", Rule::Causal), ("sinks", Rule::And(vec![Rule::Causal, sinks]))]
    {
        let case = AttentionCase { dim_k: 8, dim_v: 8, ..AttentionCase::new(name, rule, 6_000) };
        for (map, shards) in maps(&case, 6) {
            compare(&case, map, &shards);
        }
    }
}

/// Whole tiles travel then, in the order in which they stand and never by a tree.
#[test]
fn and_where_the_order_is_that_of_the_sequence() {
    let sinks = Rule::Or(vec![Rule::Window { left: 200, right: 0 }, Rule::Sinks { n: 9 }]);
    let rule = Rule::And(vec![Rule::Causal, sinks]);
    let case = AttentionCase::new("reproducible", rule, 1_501);
    let numbers = case.problem();
    for shards in [Shards::contiguous(1_501, 6, 64), Shards::zigzag(1_501, 6, 64)] {
        let shards = shards.unwrap();
        let problem = problem(&case, shards.clone()).fold(Fold::Reproducible);
        let results: Vec<_> = std::thread::scope(|scope| {
            let ranks = Local::ranks(6).into_iter().enumerate().map(|(rank, transport)| {
                let share = Share::of(&numbers, &positions(&shards, rank));
                let problem = problem.clone();
                scope.spawn(move || both(transport, problem, &share).unwrap())
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        compare_with(&case, &problem, "reproducible", &results);
    }
}

/// Whatever travels, there is something to compute meanwhile: with keys that come, or with own ones
/// that were kept for it.
#[test]
fn no_hop_is_bare() {
    let window = Rule::And(vec![Rule::Causal, Rule::Window { left: 700, right: 0 }]);
    let zigzag = Shards::zigzag as fn(u64, usize, u64) -> longspan_ring::Result<Shards>;
    for (name, rule, shards) in [
        ("causal", Rule::Causal, zigzag),
        ("full", Rule::Full, zigzag),
        ("window", window, Shards::contiguous),
    ] {
        let case = AttentionCase::new(name, rule, 24_000);
        for ranks in 2..=5 {
            let problem = problem(&case, shards(24_000, ranks, 1).unwrap());
            let mut outlines = Outlines::new(&problem).unwrap();
            for rank in 0..ranks {
                let Outline { forward, backward, .. } = outlines.rank(rank).unwrap();
                let travels = |stage: &&Stage| stage.sent() + stage.received() > 0;
                for stage in forward.iter().chain(&backward).filter(travels) {
                    assert!(
                        stage.work.pairs > 0,
                        "{name}, rank {rank} of {ranks}: nothing to compute in step {}",
                        stage.label
                    );
                }
                // Where the first keys and the last gradients are as many bytes, so is what there is to do;
                // of causal they aren't.
                let hops: Vec<_> = backward.iter().filter(travels).collect();
                let pairs = |stage: &Stage| stage.work.pairs as f64;
                let share = pairs(hops[0]) / pairs(hops[hops.len() - 1]);
                assert!(
                    name == "causal" || (0.8..1.2).contains(&share),
                    "{name}, rank {rank} of {ranks}: {share}"
                );
            }
        }
    }
}
