//! Comparison of the ranks' results with one process (`--check`).
//!
//! Every element is compared with one process. Errors against the f64 oracle have the limits of
//! `longspan verify`; the oracle computes as many heads as its budget allows.

use anyhow::Result;
use bytemuck::Pod;
use longspan::{
    Attention, Element, ElementType, Gradients, Isa, Layout, LayoutSet, Layouts, Output, Padding,
    Pattern, Positions, Shape,
};
use longspan_ring::{Reduction, Sparsity};
use longspan_testing::{
    Measure, Precision, Problem, Sample, Seen, Sizes, Transform, Values, largest_difference, naive,
    truth,
};

use super::job::{Job, Tensors, alone, flat, lens};
use crate::{choice, random};

/// Multiplications of scores that the oracle may do: tens of seconds.
const BUDGET: u128 = 1 << 31;

pub(super) struct Checked {
    /// The largest difference from one process.
    pub(super) max_error: f64,
    /// Whether output and log-sum-exp are equal to the bit, and whether gradients are.
    pub(super) bits_equal: bool,
    pub(super) gradient_bits_equal: bool,
    /// The largest error against the oracle, as a share of its limit.
    pub(super) of_limit: f64,
    /// Query heads that the oracle computed.
    pub(super) heads: usize,
    /// Violations.
    pub(super) wrong: Vec<String>,
}

/// `results` are those of every rank, concatenated by [`flat`].
pub(super) fn check<E: Element + Pod>(job: &Job, results: &[Vec<f32>]) -> Result<Checked> {
    let tokens = job.tokens;
    let got = joined(job, results);
    let shape = Shape::new(job.tokens, job.tokens);
    let layouts = (0..job.heads).map(|head| {
        let compile = |pattern| Ok(Layout::compile(&pattern, &shape)?);
        patterns(job, head)?.into_iter().map(compile).collect::<Result<Vec<_>>>()
    });
    let layouts: Vec<Vec<Layout>> = layouts.collect::<Result<_>>()?;

    let numbers = Tensors::<E>::of(job, &Positions::range(0, job.tokens)?)?;
    let (output, gradients) = match job.fold {
        Reduction::Overlapped => one_process(job, &numbers, &shape)?,
        Reduction::Reproducible => alone(job, &numbers)?,
    };
    let one = flat(&output, &gradients);

    let max_error = largest_difference(&got, &one);
    let [out, lse, ..] = lens(job, tokens);
    let same = |part: std::ops::Range<usize>| {
        got[part.clone()].iter().zip(&one[part]).all(|(a, b)| a.to_bits() == b.to_bits())
    };

    let mut pairs = 0;
    for layout in layouts.iter().flatten() {
        pairs += layout.counts()?.active_pairs;
    }
    let work = (pairs * job.dim as u128).max(1);
    let affordable = (BUDGET * job.kv_heads as u128 / work).min(job.kv_heads as u128) as usize;
    let kv_heads = affordable.max(1);
    let oracle = oracle(job, &layouts, kv_heads);
    let heads = oracle.sizes.heads_q;
    let (truth, naive) = std::thread::scope(|scope| {
        let naive = scope.spawn(|| naive(&oracle, Sample::ALL));
        (truth(&oracle, Sample::ALL), naive.join().expect("the oracle doesn't panic"))
    });
    let values = first_heads(job, &got, heads, kv_heads);
    let on_matrix_unit = choice::kernel_isa(job.isa, job.element) == Isa::Amx;
    let measures = Measure::all(&oracle, &truth, &naive, &values, Sample::ALL);
    let measures = measures.into_iter().map(|measure| match on_matrix_unit {
        true => measure.on_matrix_unit(),
        false => measure,
    });
    let measures: Vec<Measure> = measures.collect();
    let bits_equal = same(0..out + lse);
    let mut wrong: Vec<_> =
        measures.iter().filter(|m| !m.holds()).map(Measure::to_string).collect();
    if job.fold == Reduction::Reproducible && !bits_equal {
        wrong.push("out and lse have other bits than those of one rank".to_owned());
    }
    Ok(Checked {
        max_error,
        bits_equal,
        gradient_bits_equal: same(out + lse..got.len()),
        of_limit: measures.iter().map(Measure::of_limit).fold(0.0, f64::max),
        heads,
        wrong,
    })
}

/// Attention without a ring.
fn one_process<E: Element>(
    job: &Job,
    numbers: &Tensors<E>,
    shape: &Shape,
) -> longspan::Result<(Output<E>, Gradients<E>)> {
    let inputs = numbers.inputs();
    let patterns = match &job.sparsity {
        Sparsity::Patterns(patterns) => patterns,
        Sparsity::Dilated(dilated) => {
            let dilated = (**dilated).clone().isa(job.isa).threads(job.threads.get());
            let output = dilated.forward(inputs)?;
            let gradients = dilated.backward(inputs, &output, numbers.dout.view())?;
            return Ok((output, gradients));
        }
    };
    let padding = Padding::None(1);
    let set = LayoutSet::compile(patterns, job.heads, shape, &padding, None)?;
    let attention = Attention::new(Layouts::from(set)).isa(job.isa);
    let attention = attention.threads(job.threads.get());
    let output = attention.forward(inputs)?;
    let gradients = attention.backward(inputs, &output, numbers.dout.view())?;
    Ok((output, gradients))
}

/// The results of all ranks in the order of one process.
fn joined(job: &Job, results: &[Vec<f32>]) -> Vec<f32> {
    let tokens = job.tokens;
    let mut all = vec![f32::NAN; lens(job, tokens).into_iter().sum()];
    let shapes = [
        (job.heads, job.dim),
        (job.heads, 1),
        (job.heads, job.dim),
        (job.kv_heads, job.dim),
        (job.kv_heads, job.dim),
    ];
    for (rank, results) in results.iter().enumerate() {
        let held = job.shards.rank(rank);
        let positions: Vec<_> = (0..held.len()).filter_map(|token| held.get(token)).collect();
        let (mut from, mut into) = (&results[..], &mut all[..]);
        for (heads, dim) in shapes {
            let (mine, rest) = from.split_at(heads * positions.len() * dim);
            from = rest;
            let (here, rest) = into.split_at_mut(heads * tokens * dim);
            into = rest;
            for (row, numbers) in mine.chunks_exact(dim).enumerate() {
                let (head, token) = (row / positions.len(), row % positions.len());
                let place = (head * tokens + positions[token] as usize) * dim;
                here[place..place + dim].copy_from_slice(numbers);
            }
        }
    }
    all
}

/// The results of the first heads.
fn first_heads(job: &Job, all: &[f32], heads: usize, kv_heads: usize) -> Values<f32> {
    let tokens = job.tokens;
    let mut rest = all;
    let mut next = |len: usize, keep: usize| {
        let (these, others) = rest.split_at(len);
        rest = others;
        these[..keep].to_vec()
    };
    let [out, lse, dq, dk, dv] = lens(job, tokens);
    let (queries, keys) = (tokens * heads, tokens * kv_heads * job.dim);
    Values {
        out: next(out, queries * job.dim),
        lse: next(lse, queries),
        dq: next(dq, queries * job.dim),
        dk: next(dk, keys),
        dv: next(dv, keys),
        ..Values::default()
    }
}

/// The oracle's problem for the first KV heads.
fn oracle(job: &Job, layouts: &[Vec<Layout>], kv_heads: usize) -> Problem {
    let tokens = job.tokens;
    let heads = kv_heads * (job.heads / job.kv_heads);
    let sizes = Sizes {
        batch: 1,
        tokens_q: tokens,
        tokens_k: tokens,
        heads_q: heads,
        heads_kv: kv_heads,
        dim_k: job.dim,
        dim_v: job.dim,
    };
    let numbers =
        |seed, heads| random::rows::<f32>(seed, (heads, job.tokens, job.dim), 0..job.tokens);
    let positions: Vec<i64> = (0..job.tokens as i64).collect();
    let problem = Problem {
        sizes,
        scale: 1.0 / (job.dim as f64).sqrt(),
        transform: Transform::default(),
        score_positions: vec![],
        sink_logits: None,
        seen: seen(job, &layouts[..heads]),
        query_positions: positions.clone(),
        key_positions: positions,
        q: numbers(0, heads),
        k: numbers(1, kv_heads),
        v: numbers(2, kv_heads),
        dout: numbers(3, heads),
        dlse: None,
        unit_scale: true,
        precision: Precision::F32,
    };
    match job.element {
        ElementType::Bf16 => problem.rounded(Precision::Bf16),
        ElementType::F16 => problem.rounded(Precision::F16),
        _ => problem,
    }
}

/// Patterns of a head whose keys count once each: several of dilated attention.
fn patterns(job: &Job, head: usize) -> Result<Vec<Pattern>> {
    Ok(match &job.sparsity {
        Sparsity::Patterns(patterns) => vec![patterns.get(head, job.heads)?.clone()],
        Sparsity::Dilated(dilated) => dilated.branch_patterns(head)?,
    })
}

/// The oracle's mask, read from the layouts.
fn seen(job: &Job, layouts: &[Vec<Layout>]) -> Seen {
    let tokens = job.tokens;
    let words = tokens.div_ceil(64);
    let allows = |mask: &[u64], query: usize, key: usize| {
        mask[query * words + key / 64] >> (key % 64) & 1 == 1
    };
    let patterns = match &job.sparsity {
        Sparsity::Patterns(patterns) => patterns,
        Sparsity::Dilated(_) => {
            let rows = layouts.iter().map(|layouts| {
                let masks: Vec<_> = layouts.iter().map(mask).collect();
                let keys = |query| {
                    let of_mask = |mask| {
                        (0..tokens as u32).filter(move |key| allows(mask, query, *key as usize))
                    };
                    masks.iter().flat_map(|mask| of_mask(mask)).collect()
                };
                (0..tokens).map(keys).collect()
            });
            return Seen::listed(1, rows.collect());
        }
    };
    let pattern = |head: usize| patterns.get(head, job.heads).ok();
    // A head has the mask of the first one with its pattern.
    let first = |head: usize| (0..head).find(|&other| pattern(other) == pattern(head));
    let chosen: Vec<usize> = (0..layouts.len()).filter(|&head| first(head).is_none()).collect();
    let which = |head: usize| {
        let mask = first(head).unwrap_or(head);
        chosen.iter().position(|&head| head == mask).unwrap_or(0)
    };
    let masks: Vec<Vec<u64>> = chosen.iter().map(|&head| mask(&layouts[head][0])).collect();
    let allows = |number: usize, query: usize, key: usize| allows(&masks[number], query, key);
    Seen::each((1, layouts.len()), (tokens, tokens), |_, head| which(head), allows)
}

/// One bit per pair.
fn mask(layout: &Layout) -> Vec<u64> {
    let words = layout.keys().div_ceil(64);
    let mut bits = vec![0_u64; layout.queries() * words];
    let per_row = layout.block().words();
    let mut masks = layout.masks();
    for row in layout.rows() {
        for run in layout.row(row) {
            for column in run.start..run.end() {
                let keys = layout.column_tokens(column);
                let (first, keys) = (keys.start, keys.len());
                let block = masks.get(row, column, run);
                for (query, block) in layout.row_tokens(row).zip(block.chunks_exact(per_row)) {
                    for key in (0..keys).filter(|key| block[key / 64] >> (key % 64) & 1 == 1) {
                        let key = first + key;
                        bits[query * words + key / 64] |= 1 << (key % 64);
                    }
                }
            }
        }
    }
    bits
}
