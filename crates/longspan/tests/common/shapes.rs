//! Sizes that divide no tile, and few queries.

use longspan_testing::{AttentionCase, Rule};

/// Every number of dims up to 40 beside every number of tokens behind whole blocks: rows, vectors and
/// terms that register tiles leave over.
pub(crate) fn odd_sizes() -> impl Iterator<Item = AttentionCase> {
    (1..=40).map(|dim| {
        let rule = Rule::Window { left: 40, right: dim as u64 };
        let name = format!("odd sizes, {dim}");
        let mut case = AttentionCase {
            heads_q: 1,
            heads_kv: 1,
            dim_k: dim,
            dim_v: 41 - dim,
            ..AttentionCase::new(name, rule, 64 + dim as u64)
        };
        case.layout.tokens_q = 105 - dim as u64;
        case
    })
}

/// As many query heads per key head as decoding takes, over dims that are whole vectors or not.
pub(crate) fn few_queries() -> impl Iterator<Item = AttentionCase> {
    let dims = [(64, 64), (32, 96), (128, 64), (80, 48), (20, 33)];
    let queries = [1, 2, 3, 4, 5, 7, 8, 11, 12, 16];
    dims.into_iter().flat_map(move |(dim_k, dim_v)| {
        queries.into_iter().map(move |heads_q| {
            let name = format!("{heads_q} queries, dims {dim_k} and {dim_v}");
            let rule = Rule::Window { left: 600, right: 0 };
            let mut case = AttentionCase {
                heads_q,
                heads_kv: 1,
                dim_k,
                dim_v,
                ..AttentionCase::new(name, rule, 701)
            };
            case.layout.tokens_q = 1;
            case
        })
    })
}
