//! What one process works out for every rank is what ranks then do.

use longspan_ring::{Outlines, Shards, Stage};
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
    let problem = problem(case, shards.clone());
    let mut outlines = Outlines::new(&problem).unwrap();
    for (rank, result) in around(case, &case.problem(), shards).iter().enumerate() {
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
