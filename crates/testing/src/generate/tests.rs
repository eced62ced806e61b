//! Every generated case keeps the rules that a layout is compiled under.

use std::ops::Range;

use super::*;
use crate::rule::Rule;
use crate::seeded_bytes;

#[test]
fn every_case_is_legal() {
    for seed in 0..5_000 {
        let case = Case::from_seed(seed);
        let keys_end = (case.key_origin() + case.tokens_k as i64).max(0) as u64;
        let packed = case.query_offset.is_none() && case.key_offset.is_none();
        let scope = (Some(keys_end), packed.then_some((case.tokens_q, case.tokens_k)));
        assert!(legal(&case.rule, scope.0, scope.1), "seed {seed}: {case}");

        let whole = |origin: i64, tokens: u64| origin..origin + tokens as i64;
        let (queries, keys) = (case.query_positions(), case.key_positions());
        assert!(within(&queries, whole(case.query_origin(), case.tokens_q)), "seed {seed}: {case}");
        assert!(within(&keys, whole(case.key_origin(), case.tokens_k)), "seed {seed}: {case}");
        assert!(case.query_map.iter().chain(&case.key_map).flatten().all(|steps| steps.step >= 1));

        let rows = (queries.len() as u64).div_ceil(u64::from(case.block));
        assert!(case.rows.is_none_or(|range| range.start <= range.end && range.end <= rows));
        let tokens_k = case.tokens_k;
        assert!(case.key_padding.is_none_or(|r| r.start <= r.end && r.end <= tokens_k));
        assert!((16..=256).contains(&case.block));
        assert!(case.tokens_q <= 700 && case.tokens_k <= 700);
    }
}

fn within(positions: &[i64], whole: Range<i64>) -> bool {
    positions.iter().all(|position| whole.contains(position))
}

/// `documents` and `packed` are what lengths must add up to; `None` where there may be none.
fn legal(rule: &Rule, documents: Option<u64>, packed: Option<(u64, u64)>) -> bool {
    match rule {
        Rule::Dilated { segment, rate, offset } => *segment >= 1 && offset < rate,
        Rule::SlidingWindow { width: positive }
        | Rule::Strided { stride: positive }
        | Rule::Butterfly { block: positive } => *positive >= 1,
        Rule::Hierarchical(levels) => {
            !levels.is_empty() && levels.iter().all(|level| level.stride >= 1 && level.grain >= 1)
        }
        Rule::Documents(lengths) => documents == Some(lengths.iter().sum()),
        Rule::Packed { queries, keys, inner } => {
            let adds_up = packed == Some((queries.iter().sum(), keys.iter().sum()));
            let mut inhabited = queries.iter().zip(keys).filter(|(q, k)| **q > 0 && **k > 0);
            adds_up
                && queries.len() == keys.len()
                && match inhabited.next() {
                    Some((&q, &k)) if inhabited.all(|other| other == (&q, &k)) => {
                        legal(inner, Some(k), Some((q, k)))
                    }
                    Some(_) => legal(inner, None, None),
                    None => true,
                }
        }
        Rule::BlocksDilated { block, rates } => *block >= 1 && rates.iter().all(|rate| *rate >= 1),
        Rule::Random { block, blocks, .. } => *block >= 1 && *blocks >= 1,
        Rule::Blocks { block, rows } => *block >= 1 && rows.iter().all(|row| row.is_sorted()),
        Rule::And(rules) | Rule::Or(rules) => {
            !rules.is_empty() && rules.iter().all(|rule| legal(rule, documents, packed))
        }
        Rule::Not(rule) => legal(rule, documents, packed),
        Rule::Full | Rule::Causal => true,
        Rule::Keys { from, to } | Rule::Queries { from, to } => from <= to,
        Rule::Neighborhood { sizes, radii } => {
            sizes.len() == radii.len() && sizes.iter().all(|size| *size >= 1)
        }
        Rule::Window { .. } | Rule::Sinks { .. } | Rule::GlobalTokens { .. } => true,
    }
}

#[test]
fn a_seed_makes_one_case() {
    assert_eq!(Case::from_seed(5), Case::from_seed(5));
    assert_ne!(Case::from_seed(5), Case::from_seed(6));
}

#[test]
fn bytes_may_run_out_anywhere() {
    let bytes = seeded_bytes(11, 400);
    for len in 0..bytes.len() {
        assert!(Case::arbitrary(&mut Unstructured::new(&bytes[..len])).is_ok(), "{len} bytes");
    }
}
