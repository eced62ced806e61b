//! Which pairs dropout keeps around a ring, pair by pair. Results against the oracle are in
//! `equal.rs`, whose table has dropout.

use longspan_ring::Shards;
use longspan_testing::{AttentionCase, Rule, Transform};

use crate::common::*;

const TOKENS: usize = 211;
const HEADS: usize = 3;
const BATCH: usize = 2;
const DROPOUT: (f64, u64) = (0.3, 11);

fn case(rule: Rule) -> AttentionCase {
    AttentionCase {
        batch: BATCH,
        heads_q: HEADS,
        heads_kv: HEADS,
        dim_k: 4,
        dim_v: TOKENS,
        transform: Transform { dropout: Some(DROPOUT), ..Transform::default() },
        ..AttentionCase::new("dropout", rule, TOKENS as u64)
    }
}

/// Which pairs are kept, `[batch][head][query][key]`, as outputs and as gradients of values tell: all
/// scores are equal, values and gradients of the output are unit vectors.
fn masks(case: &AttentionCase, shards: &Shards) -> [Vec<bool>; 2] {
    let mut numbers = case.unmasked();
    let units = |n: usize| f32::from(n % TOKENS == n / TOKENS % TOKENS);
    numbers.q.fill(0.0);
    for list in [&mut numbers.v, &mut numbers.dout] {
        *list = (0..list.len()).map(units).collect();
    }
    let values = joined(&numbers, shards, &around(case, &numbers, shards));
    let kept = |x: &f32| {
        assert!(x.is_finite());
        *x > 0.0
    };
    // dV is `[key][query]`.
    let turned = |n: usize| {
        let (head, query, key) = (n / TOKENS / TOKENS, n / TOKENS % TOKENS, n % TOKENS);
        kept(&values.dv[(head * TOKENS + key) * TOKENS + query])
    };
    [values.out.iter().map(kept).collect(), (0..values.dv.len()).map(turned).collect()]
}

/// The definition, pair by pair.
fn defined(case: &AttentionCase) -> Vec<bool> {
    let pair = |n: usize| {
        let (row, key) = (n / TOKENS, (n % TOKENS) as i64);
        let (head, query) = (row / TOKENS, (row % TOKENS) as i64);
        case.layout.rule.allows(query, key)
            && case.transform.kept(head / HEADS, HEADS, head % HEADS, query, key) > 0.0
    };
    (0..BATCH * HEADS * TOKENS * TOKENS).map(pair).collect()
}

/// In both passes, over all keys, and with global tokens, whose queries travel between contiguous,
/// zigzag and balanced shards.
#[test]
fn any_number_of_ranks_drops_the_same_pairs() {
    let global = Rule::Or(vec![Rule::SlidingWindow { width: 21 }, Rule::GlobalTokens { n: 3 }]);
    for rule in [Rule::Full, global] {
        let case = case(rule);
        let expected = defined(&case);
        for ranks in [1, 3] {
            for (sharding, shards) in maps(&case, ranks) {
                for (pass, mask) in ["forward", "backward"].iter().zip(masks(&case, &shards)) {
                    let differing = mask.iter().zip(&expected).filter(|(a, b)| a != b).count();
                    assert_eq!(
                        (mask.len(), differing),
                        (expected.len(), 0),
                        "{}, {ranks} ranks, {sharding}, {pass}",
                        case.layout.rule
                    );
                }
            }
        }
    }
}
