//! An attention case on rings of threads.

#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod branches;
pub(crate) mod faulty;

use std::time::Duration;

use longspan::{
    BiasTable, Dilated, Dims, Dropout, Heads, Inputs, Order, OutputGradient, Pattern, Score,
    Tensor, Threads,
};
use longspan_ring::{Error, Local, Options, Problem, Ring, Shards, Tally, Transport};
use longspan_testing::{AttentionCase, Problem as Numbers, Sizes, Table, Values};

pub(crate) const ORDER: Order = Order::Bhsd;

pub(crate) fn options() -> Options {
    let threads = Threads::Count(1);
    Options { timeout: Duration::from_secs(20), threads, ..Options::default() }
}

/// Shardings of every kind.
pub(crate) fn maps(case: &AttentionCase, ranks: usize) -> Vec<(&'static str, Shards)> {
    let tokens = case.layout.tokens_k as usize;
    let heads: Heads = case.pattern_text().parse().unwrap();
    vec![
        ("contiguous", Shards::contiguous(tokens, ranks, 1).unwrap()),
        ("zigzag", Shards::zigzag(tokens, ranks, 1).unwrap()),
        ("striped", Shards::striped(tokens, ranks, 1).unwrap()),
        ("striped by 13", Shards::striped(tokens, ranks, 13).unwrap()),
        ("balanced", Shards::balanced(heads, tokens, ranks, 1).unwrap()),
    ]
}

/// The ring problem of a case.
pub(crate) fn problem(case: &AttentionCase, shards: Shards) -> Problem {
    let heads: Heads = case.pattern_text().parse().unwrap();
    let mut score = Score::default();
    if let Some(cap) = case.transform.softcap {
        score = score.softcap(cap);
    }
    if !case.transform.slopes.is_empty() {
        score = score.alibi_slopes(&case.transform.slopes[..]);
    }
    if let Some(Table { values, left, right }) = &case.transform.table {
        score = score.bias_table(BiasTable::new(values, *left, *right).unwrap());
    }
    let mut problem = Problem::new(heads, shards)
        .batch(case.batch)
        .heads(case.heads_q, case.heads_kv)
        .dims(case.dim_k, case.dim_v)
        .score(score);
    if let Some((p, seed)) = case.transform.dropout {
        problem = problem.dropout(Dropout::new(p, seed).unwrap());
    }
    if let Some(logits) = &case.sink_logits {
        problem = problem.sink_logits(logits.as_slice());
    }
    match case.scale {
        Some(scale) => problem.scale(scale),
        None => problem,
    }
}

/// The same sizes with dilated attention: a segment inside of shards, and one that spans them.
pub(crate) fn dilated_problem(case: &AttentionCase, shards: Shards, segment: u64) -> Problem {
    let dilated = Dilated::new([(100, 1), (segment, 2)]).unwrap().within(Pattern::causal());
    Problem::new(dilated, shards)
        .batch(case.batch)
        .heads(case.heads_q, case.heads_kv)
        .dims(case.dim_k, case.dim_v)
}

/// Positions of a rank's tokens.
pub(crate) fn positions(shards: &Shards, rank: usize) -> Vec<usize> {
    let held = shards.rank(rank);
    (0..held.len()).map(|token| held.get(token).unwrap() as usize).collect()
}

/// Rows of some tokens of `[head, token, dim]`.
pub(crate) fn pick(all: &[f32], tokens: usize, dim: usize, chosen: &[usize]) -> Vec<f32> {
    let heads = all.len() / (tokens * dim).max(1);
    let row = |head: usize, token: usize| &all[(head * tokens + token) * dim..][..dim];
    (0..heads)
        .flat_map(|head| chosen.iter().flat_map(move |&token| row(head, token)))
        .copied()
        .collect()
}

/// The inverse of [`pick`].
pub(crate) fn put(all: &mut [f32], tokens: usize, dim: usize, chosen: &[usize], rows: &[f32]) {
    let heads = all.len() / (tokens * dim).max(1);
    for head in 0..heads {
        for (index, &token) in chosen.iter().enumerate() {
            let from = &rows[(head * chosen.len() + index) * dim..][..dim];
            all[(head * tokens + token) * dim..][..dim].copy_from_slice(from);
        }
    }
}

/// One rank's tensors.
pub(crate) struct Share {
    pub(crate) q: Tensor<f32>,
    pub(crate) k: Tensor<f32>,
    pub(crate) v: Tensor<f32>,
    pub(crate) dout: Tensor<f32>,
    pub(crate) dlse: Option<Vec<f32>>,
}

impl Share {
    pub(crate) fn of(numbers: &Numbers, chosen: &[usize]) -> Self {
        let Sizes { batch, tokens_k: all, heads_q, heads_kv, dim_k, dim_v, .. } = numbers.sizes;
        let tensor = |list: &[f32], heads, dim| {
            let dims = Dims { batch, tokens: chosen.len(), heads, dim };
            Tensor::new(pick(list, all, dim, chosen), dims, ORDER).unwrap()
        };
        Share {
            q: tensor(&numbers.q, heads_q, dim_k),
            k: tensor(&numbers.k, heads_kv, dim_k),
            v: tensor(&numbers.v, heads_kv, dim_v),
            dout: tensor(&numbers.dout, heads_q, dim_v),
            dlse: numbers.dlse.as_ref().map(|list| pick(list, all, 1, chosen)),
        }
    }

    pub(crate) fn inputs(&self) -> Inputs<'_> {
        Inputs { q: self.q.view(), k: self.k.view(), v: self.v.view() }
    }
}

/// One rank's results.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Results {
    pub(crate) out: Vec<f32>,
    pub(crate) lse: Vec<f32>,
    pub(crate) dq: Vec<f32>,
    pub(crate) dk: Vec<f32>,
    pub(crate) dv: Vec<f32>,
    pub(crate) dsink_logits: Vec<f32>,
    pub(crate) dbias_table: Vec<f32>,
    pub(crate) dalibi_slopes: Vec<f32>,
    pub(crate) tally: Tally,
    pub(crate) needed: (u64, u64),
    pub(crate) pairs: u128,
}

/// Both passes of one rank.
pub(crate) fn both<T: Transport>(
    transport: T,
    problem: Problem,
    share: &Share,
) -> Result<Results, Error> {
    both_with(transport, problem, share, options())
}

/// The same, with options.
pub(crate) fn both_with<T: Transport>(
    transport: T,
    problem: Problem,
    share: &Share,
    options: Options,
) -> Result<Results, Error> {
    let mut ring = Ring::new(transport, problem, options)?;
    let inputs = share.inputs();
    let output = ring.forward(inputs)?;
    let gradient = OutputGradient { dout: share.dout.view(), dlse: share.dlse.as_deref() };
    let gradients = ring.backward(inputs, &output, gradient)?;
    Ok(Results {
        out: output.out.as_slice().to_vec(),
        lse: output.lse.clone(),
        dq: gradients.dq.as_slice().to_vec(),
        dk: gradients.dk.as_slice().to_vec(),
        dv: gradients.dv.as_slice().to_vec(),
        dsink_logits: gradients.dsink_logits.unwrap_or_default(),
        dbias_table: gradients.dbias_table.unwrap_or_default(),
        dalibi_slopes: gradients.dalibi_slopes.unwrap_or_default(),
        tally: ring.tally(),
        needed: ring.bytes_needed(),
        pairs: ring.active_pairs().unwrap(),
    })
}

/// Both passes of all ranks, as threads.
pub(crate) fn around(case: &AttentionCase, numbers: &Numbers, shards: &Shards) -> Vec<Results> {
    std::thread::scope(|scope| {
        let ranks =
            Local::ranks(shards.ranks()).into_iter().enumerate().map(|(rank, transport)| {
                let share = Share::of(numbers, &positions(shards, rank));
                let problem = problem(case, shards.clone());
                scope.spawn(move || both(transport, problem, &share).unwrap())
            });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Results of all ranks, in the order of the sequence.
pub(crate) fn joined(numbers: &Numbers, shards: &Shards, ranks: &[Results]) -> Values<f32> {
    let sizes = numbers.sizes;
    let all = sizes.tokens_k;
    let mut values = Values {
        out: vec![f32::NAN; sizes.out()],
        lse: vec![f32::NAN; sizes.rows()],
        dq: vec![f32::NAN; sizes.q()],
        dk: vec![f32::NAN; sizes.k()],
        dv: vec![f32::NAN; sizes.v()],
        // Each rank has what its own queries contribute.
        dsink_logits: vec![0.0; numbers.sink_logits.as_ref().map_or(0, Vec::len)],
        dbias_table: vec![0.0; numbers.transform.table.as_ref().map_or(0, |t| t.values.len())],
        dalibi_slopes: vec![0.0; numbers.transform.slopes.len()],
    };
    for (rank, results) in ranks.iter().enumerate() {
        let chosen = positions(shards, rank);
        put(&mut values.out, all, sizes.dim_v, &chosen, &results.out);
        put(&mut values.lse, all, 1, &chosen, &results.lse);
        put(&mut values.dq, all, sizes.dim_k, &chosen, &results.dq);
        put(&mut values.dk, all, sizes.dim_k, &chosen, &results.dk);
        put(&mut values.dv, all, sizes.dim_v, &chosen, &results.dv);
        for (sums, parts) in [
            (&mut values.dsink_logits, &results.dsink_logits),
            (&mut values.dbias_table, &results.dbias_table),
            (&mut values.dalibi_slopes, &results.dalibi_slopes),
        ] {
            assert_eq!(sums.len(), parts.len());
            sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
        }
    }
    values
}
