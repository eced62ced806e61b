//! Dilated attention on rings of threads: branches, sizes and what is one sequence.

use std::ops::Range;

use longspan::{BiasTable, Branch, Dilated, Dropout, Overlap, Pattern, Score};
use longspan_ring::{Problem, Shards};
use longspan_testing::{
    LongNet, Problem as Numbers, Rule, Seen, Sizes, Span, Table, Transform, normals,
};

/// Branches over so many tokens and heads.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) net: LongNet,
    pub(crate) sizes: Sizes,
    pub(crate) transform: Transform,
    pub(crate) sinks: bool,
    pub(crate) lengths: Lengths,
}

/// What is one sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Lengths {
    Whole,
    Padded(Vec<Range<usize>>),
    Packed(Vec<u64>),
}

pub(crate) fn case(
    branches: &[(i64, i64)],
    within: Rule,
    tokens: usize,
    heads: (usize, usize),
) -> Case {
    let sizes = Sizes {
        batch: 1,
        tokens_q: tokens,
        tokens_k: tokens,
        heads_q: heads.0,
        heads_kv: heads.1,
        dim_k: 16,
        dim_v: 24,
    };
    let net = LongNet { branches: branches.to_vec(), within, also: None, once: false };
    Case { net, sizes, transform: Transform::default(), sinks: false, lengths: Lengths::Whole }
}

impl Case {
    pub(crate) fn once(mut self) -> Self {
        self.net.once = true;
        self
    }

    pub(crate) fn also(mut self, rule: Rule) -> Self {
        self.net.also = Some(rule);
        self
    }

    /// Of the valid keys of each batch entry.
    pub(crate) fn padded(mut self, valid: &[Range<usize>]) -> Self {
        self.sizes.batch = valid.len();
        self.lengths = Lengths::Padded(valid.to_vec());
        self
    }

    pub(crate) fn packed(mut self, bounds: &[u64]) -> Self {
        self.lengths = Lengths::Packed(bounds.to_vec());
        self
    }

    pub(crate) fn seen(&self, numbers: &Numbers) -> Seen {
        let tokens = self.sizes.tokens_q;
        let spans = match &self.lengths {
            Lengths::Whole => return self.net.seen(numbers),
            Lengths::Padded(valid) => {
                valid.iter().map(|valid| vec![Span::padded(valid.clone(), tokens, 0)]).collect()
            }
            Lengths::Packed(bounds) => vec![Span::packed(bounds, bounds)],
        };
        self.net.seen_in(numbers, &spans)
    }

    pub(crate) fn numbers(&self) -> Numbers {
        let mut numbers = Numbers::normal(self.sizes, 3);
        numbers.dlse = Some(normals(5, self.sizes.rows()));
        numbers.seen = self.seen(&numbers);
        numbers.transform = self.transform.clone();
        numbers.sink_logits = self.sinks.then(|| normals(9, self.sizes.heads_q));
        numbers
    }

    pub(crate) fn dilated(&self) -> Dilated {
        let branches = self.net.branches.iter().map(|&(w, r)| Branch::new(w as u64, r as u64));
        let overlap = if self.net.once { Overlap::Union } else { Overlap::Weighted };
        let within: Pattern = self.net.within.to_string().parse().unwrap();
        let branches = branches.map(Result::unwrap);
        let mut dilated = Dilated::new(branches).unwrap().within(within).overlap(overlap);
        if let Some(also) = &self.net.also {
            dilated = dilated.also(also.to_string().parse().unwrap());
        }
        match &self.lengths {
            Lengths::Whole => dilated,
            Lengths::Padded(valid) => dilated.padded(valid.iter().cloned()),
            Lengths::Packed(bounds) => dilated.packed_cu_seqlens(bounds, bounds).unwrap(),
        }
    }

    pub(crate) fn shards(&self, ranks: usize, grain: usize) -> Vec<(&'static str, Shards)> {
        let tokens = self.sizes.tokens_k;
        vec![
            ("contiguous", Shards::contiguous(tokens, ranks, grain).unwrap()),
            ("zigzag", Shards::zigzag(tokens, ranks, grain).unwrap()),
            ("striped", Shards::striped(tokens, ranks, grain).unwrap()),
            ("striped by 13 grains", Shards::striped(tokens, ranks, 13 * grain).unwrap()),
            ("balanced", Shards::balanced(self.dilated(), tokens, ranks, grain).unwrap()),
        ]
    }

    pub(crate) fn ring(&self, shards: &Shards, numbers: &Numbers) -> Problem {
        let Sizes { batch, heads_q, heads_kv, dim_k, dim_v, .. } = self.sizes;
        let mut score = Score::default();
        if !self.transform.slopes.is_empty() {
            score = score.alibi_slopes(&self.transform.slopes[..]);
        }
        if let Some(Table { values, left, right }) = &self.transform.table {
            score = score.bias_table(BiasTable::new(values, *left, *right).unwrap());
        }
        let mut problem = Problem::new(self.dilated(), shards.clone())
            .batch(batch)
            .heads(heads_q, heads_kv)
            .dims(dim_k, dim_v)
            .score(score);
        if let Some((p, seed)) = self.transform.dropout {
            problem = problem.dropout(Dropout::new(p, seed).unwrap());
        }
        match &numbers.sink_logits {
            Some(logits) => problem.sink_logits(logits.as_slice()),
            None => problem,
        }
    }
}

/// The paper's branches, rates that divide nothing, segments shorter and longer than a shard, lengths
/// that divide by nothing, GQA, documents, windows, both overlap rules, additions.
pub(crate) fn cases() -> Vec<Case> {
    let paper = [(64, 1), (128, 2), (256, 4)];
    let documents = || Rule::Documents(vec![100, 0, 57, 3, 140]);
    let window = || Rule::Window { left: 30, right: 0 };
    let additions = Transform {
        slopes: vec![0.5, 0.1, 0.02, 0.3],
        table: Some(Table::normal(4, 20, 5, 11)),
        dropout: Some((0.3, 7)),
        ..Transform::default()
    };
    let mut cases = vec![
        case(&paper, Rule::Full, 512, (4, 4)),
        case(&paper, Rule::Causal, 487, (4, 4)),
        case(&paper, Rule::Causal, 487, (4, 4)).once(),
        case(&[(600, 1)], Rule::Causal, 577, (2, 2)),
        case(&[(50, 3), (70, 4), (31, 1)], Rule::Causal, 331, (5, 5)),
        case(&[(50, 3), (70, 4), (31, 1)], Rule::Full, 331, (5, 1)).once(),
        case(&[(7, 7), (5, 9)], Rule::Full, 61, (4, 2)),
        case(&[(64, 1), (4, 1_000_000)], Rule::Full, 90, (3, 3)),
        case(&paper, Rule::And(vec![Rule::Causal, documents()]), 300, (4, 2)),
        case(&[(90, 4), (200, 6)], documents(), 300, (12, 4)),
        case(&[(128, 4), (512, 16)], Rule::Causal, 401, (8, 2)).also(window()),
        case(&[(128, 4), (512, 16)], Rule::Causal, 401, (8, 8)).also(window()).once(),
        case(&paper, Rule::Causal, 3, (4, 4)),
        case(&[(1_000, 8)], Rule::Full, 300, (8, 2)),
        case(&paper, Rule::Causal, 331, (4, 2)).padded(&[0..331, 37..331, 0..200, 60..60]),
        case(&[(50, 3), (70, 4)], Rule::Full, 331, (4, 4))
            .also(window())
            .padded(&[20..300, 9..331]),
        case(&[(64, 1), (256, 4)], Rule::Causal, 331, (4, 2)).packed(&[0, 64, 64, 65, 200, 331]),
        case(&paper, Rule::Causal, 300, (4, 2)).also(window()).once().packed(&[0, 101, 300]),
        case(&paper, Rule::Causal, 300, (4, 2)),
    ];
    let last = cases.last_mut().unwrap();
    (last.transform, last.sinks, last.sizes.batch) = (additions, true, 2);
    cases
}
