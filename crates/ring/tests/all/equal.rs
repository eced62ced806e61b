//! A ring computes what one process computes: forward and every gradient against the `f64` oracle, for
//! every sharding and many numbers of ranks, with the tolerances of one process.

use longspan_testing::{AttentionCase, Measure, Rule, attention_cases, naive, truth};

use crate::common::*;

const RANKS: [usize; 6] = [1, 2, 3, 4, 7, 8];

fn check(case: &AttentionCase, ranks: &[usize]) -> Vec<String> {
    let numbers = case.problem();
    let (truth, naive) = (truth(&numbers, case.sample), naive(&numbers, case.sample));
    let mut wrong = Vec::new();
    for &ranks in ranks {
        for (map, shards) in maps(case, ranks) {
            let results = around(case, &numbers, &shards);
            let got = joined(&numbers, &shards, &results);
            for measure in Measure::all(&numbers, &truth, &naive, &got, case.sample) {
                if !measure.holds() {
                    wrong.push(format!("{ranks} ranks, {map}: {measure}\n    {case}"));
                }
            }
            for (rank, result) in results.iter().enumerate() {
                let needed = result.needed.0 + result.needed.1;
                if result.tally.received != needed {
                    wrong.push(format!(
                        "{ranks} ranks, {map}: rank {rank} got {} of {needed}",
                        result.tally.received
                    ));
                }
            }
        }
    }
    wrong
}

fn check_all(cases: impl IntoIterator<Item = AttentionCase>, ranks: &[usize]) {
    let mut count = 0;
    let mut wrong = Vec::new();
    for case in cases {
        count += 1;
        wrong.extend(check(&case, ranks));
    }
    assert!(count > 0, "no case was checked");
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Cases of the table with self-attention over one whole sequence.
fn table(part: usize) -> impl Iterator<Item = AttentionCase> {
    let fits = |case: &AttentionCase| {
        let layout = &case.layout;
        layout.tokens_q == layout.tokens_k
            && layout.tokens_k <= 1_100
            && layout.query_offset.is_none()
            && layout.key_offset.is_none()
            && layout.query_map.is_none()
            && layout.key_map.is_none()
            && layout.rows.is_none()
            && layout.key_padding.is_none()
            && case.padding.is_empty()
    };
    attention_cases().into_iter().filter(fits).skip(part).step_by(2)
}

#[test]
fn table_first_half() {
    check_all(table(0), &RANKS);
}

#[test]
fn table_second_half() {
    check_all(table(1), &RANKS);
}

/// Few queries that attend to all keys are sent to them, and sinks are broadcast by a tree.
#[test]
fn global_tokens_and_sinks() {
    let window = Rule::Window { left: 40, right: 40 };
    let global = Rule::Or(vec![window.clone(), Rule::GlobalTokens { n: 5 }]);
    let sinks = Rule::And(vec![
        Rule::Causal,
        Rule::Or(vec![Rule::Window { left: 70, right: 0 }, Rule::Sinks { n: 9 }]),
    ]);
    let case = |name, rule| AttentionCase { heads_q: 4, ..AttentionCase::new(name, rule, 1_501) };
    check_all([case("global", global), case("sinks", sinks)], &[2, 5, 8, 13]);
}
