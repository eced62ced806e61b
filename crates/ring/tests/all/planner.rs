//! Communication plans equal what rings do.

use longspan_ring::{
    CommunicationPlan, CommunicationPlanner, Local, PlannedHop, Problem, Reduction, Shards,
};
use longspan_testing::{AttentionCase, Rule};

use crate::common::*;

fn received(hops: &[PlannedHop]) -> u64 {
    hops.iter().map(PlannedHop::received).sum()
}

fn sent(hops: &[PlannedHop]) -> u64 {
    hops.iter().map(PlannedHop::sent).sum()
}

fn compare(case: &AttentionCase, map: &str, shards: &Shards) {
    let results = around(case, &case.problem(), shards);
    compare_with(case, &problem(case, shards.clone()), map, &results);
}

fn compare_with(case: &AttentionCase, problem: &Problem, map: &str, results: &[Results]) {
    let shards = problem.shards();
    let mut planner = CommunicationPlanner::new(problem).unwrap();
    for (rank, result) in results.iter().enumerate() {
        let plan = planner.rank(rank).unwrap();
        let at = format!("rank {rank} of {}, {map}: {case}", shards.ranks());
        let passes = [&plan.forward, &plan.backward];
        let [forward, backward] = passes.map(|hops| received(hops));
        assert_eq!((forward, backward), result.needed, "{at}");
        assert_eq!(forward + backward, result.tally.received, "{at}");
        assert_eq!(passes.map(|hops| sent(hops)).iter().sum::<u64>(), result.tally.sent, "{at}");
        let messages = passes.iter().flat_map(|hops| hops.iter()).map(|hop| hop.receives.len());
        assert_eq!(messages.sum::<usize>() as u64, result.tally.messages, "{at}");
        for hops in passes {
            assert_eq!(hops.iter().map(|hop| hop.work.pairs).sum::<u128>(), result.pairs, "{at}");
            assert!(hops.windows(2).all(|pair| pair[0].label < pair[1].label), "{at}");
        }
    }
}

#[test]
fn plans_equal_rings() {
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

/// Shards long enough for coverage queries of whole progressions to decide.
#[test]
fn plans_equal_rings_where_coverage_decides() {
    let sinks = Rule::Or(vec![Rule::Window { left: 700, right: 0 }, Rule::Sinks { n: 9 }]);
    for (name, rule) in [("causal", Rule::Causal), ("sinks", Rule::And(vec![Rule::Causal, sinks]))]
    {
        let case = AttentionCase { dim_k: 8, dim_v: 8, ..AttentionCase::new(name, rule, 6_000) };
        for (map, shards) in maps(&case, 6) {
            compare(&case, map, &shards);
        }
    }
}

/// Whole tiles are sent, in the order of the sequence and never by a tree.
#[test]
fn plans_equal_rings_where_reproducible() {
    let sinks = Rule::Or(vec![Rule::Window { left: 200, right: 0 }, Rule::Sinks { n: 9 }]);
    let rule = Rule::And(vec![Rule::Causal, sinks]);
    let case = AttentionCase::new("reproducible", rule, 1_501);
    let numbers = case.problem();
    for shards in [Shards::contiguous(1_501, 6, 64), Shards::zigzag(1_501, 6, 64)] {
        let shards = shards.unwrap();
        let problem = problem(&case, shards.clone()).reduction(Reduction::Reproducible);
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

/// Every hop with messages overlaps a computation over received or local keys.
#[test]
fn no_hop_is_uncovered() {
    let window = Rule::And(vec![Rule::Causal, Rule::Window { left: 700, right: 0 }]);
    let zigzag = Shards::zigzag as fn(usize, usize, usize) -> longspan_ring::Result<Shards>;
    for (name, rule, shards) in [
        ("causal", Rule::Causal, zigzag),
        ("full", Rule::Full, zigzag),
        ("window", window, Shards::contiguous),
    ] {
        let case = AttentionCase::new(name, rule, 24_000);
        for ranks in 2..=5 {
            let problem = problem(&case, shards(24_000, ranks, 1).unwrap());
            let mut planner = CommunicationPlanner::new(&problem).unwrap();
            for rank in 0..ranks {
                let CommunicationPlan { forward, backward, .. } = planner.rank(rank).unwrap();
                let has_messages = |hop: &&PlannedHop| hop.sent() + hop.received() > 0;
                for hop in forward.iter().chain(&backward).filter(has_messages) {
                    assert!(
                        hop.work.pairs > 0,
                        "{name}, rank {rank} of {ranks}: nothing to compute in step {}",
                        hop.label
                    );
                }
                // Where the first keys and the last gradients have as many bytes, they overlap as much
                // work; in causal patterns they have not.
                let hops: Vec<_> = backward.iter().filter(has_messages).collect();
                let pairs = |hop: &PlannedHop| hop.work.pairs as f64;
                let share = pairs(hops[0]) / pairs(hops[hops.len() - 1]);
                assert!(
                    name == "causal" || (0.8..1.2).contains(&share),
                    "{name}, rank {rank} of {ranks}: {share}"
                );
            }
        }
    }
}
