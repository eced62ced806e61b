//! Attention as its definition states it: the truth that kernels are compared with.
//!
//! For query `i`, the set `A(i)` of keys it may see and a score transform `t`:
//!
//! ```text
//! z_ij  = scale · Σ_d q_id k_jd          s_ij = t(z_ij)               r_ij: 1, or dropout's factor
//! P_ij  = exp(s_ij − lse_i)              lse_i = ln (Σ_{j ∈ A(i)} exp(s_ij) + exp(sink))
//! out_i = Σ_j r_ij P_ij v_j              A(i) empty: out_i = 0, lse_i = sink
//!
//! dP_ij = r_ij dout_i · v_j              dS_ij = P_ij (dP_ij − dout_i · out_i + dlse_i)
//! dZ_ij = t'(z_ij) dS_ij                 dq_i = scale Σ_j dZ_ij k_j
//! dk_j  = scale Σ_i dZ_ij q_i            dv_j = Σ_i r_ij P_ij dout_i
//! dsink = Σ_i exp(sink − lse_i) (dlse_i − dout_i · out_i)
//! ```
//!
//! where the sums over `i` go over all query heads that share a key head, and that of `dsink` over
//! all rows of its query head. `sink` is the sink logit of the row's head, −∞ without one. [`truth`] computes that
//! in `f64`, and [`naive`] in `f32`, in the order in which it is written and with every score held
//! in memory: what somebody would write first, and what no kernel may be worse than.
//!
//! A [`Problem`] holds the numbers, dense and in the order `[batch][head][token][dim]`; where they
//! lie in the caller's memory is the caller's affair. Long problems are checked by [`Sample`]: only
//! some rows and columns, each of them in full.
//!
//! ```
//! use longspan_testing::{Measure, Sample, attention_cases, naive, truth};
//!
//! let case = attention_cases().into_iter().find(|case| case.name == "causal").unwrap();
//! let problem = case.problem();
//! let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
//! // The naive result itself is no worse than the naive result.
//! for measure in Measure::all(&problem, &truth, &naive, &naive, Sample::ALL) {
//!     assert!(measure.error <= measure.naive);
//! }
//! ```

mod case;
mod evaluate;
mod measure;
mod normal;
mod precision;
mod random;
mod score;
mod seen;
mod table;
#[cfg(test)]
mod tests;

use crate::splitmix::splitmix64;

pub use case::{AttentionCase, Axes};
pub use evaluate::{Answer, Noise, Sample, Values, naive, truth};
pub use measure::Measure;
pub use normal::normals;
pub use precision::Precision;
pub use seen::Seen;
pub use table::attention_cases;

/// What is done to scores before the softmax, in this order, and to probabilities behind it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Transform {
    /// `cap · tanh(z / cap)`.
    pub softcap: Option<f32>,
    /// `z − slope · |query position − key position|`, one slope per query head; empty without.
    pub slopes: Vec<f32>,
    /// `z + table[head, query position − key position]`.
    pub table: Option<Table>,
    /// Probability and seed.
    pub dropout: Option<(f64, u64)>,
}

/// Biases of distances from `−right` to `left`, to which others are clamped: a row per query head.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// `left + right + 1` per head.
    pub values: Vec<f32>,
    /// The largest distance to a key before the query.
    pub left: usize,
    /// The largest distance to a key behind it.
    pub right: usize,
}

impl Table {
    /// Unit-normal values.
    pub fn normal(heads: usize, left: usize, right: usize, seed: u64) -> Table {
        Table { values: normals(seed ^ 0x7AB1E, heads * (left + right + 1)), left, right }
    }
}

impl Transform {
    /// Whether scores depend on distances.
    pub fn has_distances(&self) -> bool {
        !self.slopes.is_empty() || self.table.is_some()
    }

    /// A softcap alone.
    pub fn softcap(cap: f32) -> Transform {
        Transform { softcap: Some(cap), ..Transform::default() }
    }

    /// ALiBi alone.
    pub fn alibi(slopes: Vec<f32>) -> Transform {
        Transform { slopes, ..Transform::default() }
    }

    /// What the probability of a pair is multiplied by: `1 / (1 − p)`, or 0 where it is dropped.
    pub fn kept(&self, entry: usize, heads: usize, head: usize, query: i64, key: i64) -> f64 {
        let Some((p, seed)) = self.dropout else { return 1.0 };
        let w = splitmix64(splitmix64(seed ^ (entry * heads + head) as u64) ^ query as u64);
        let (a, c) = (w as u32, (w >> 32) as u32);
        let mut x = key as u32 ^ a;
        x = (x ^ (x >> 16)).wrapping_mul(0x7feb352d);
        x = (x ^ (x >> 15)).wrapping_add(c);
        x = x.wrapping_mul(0x846ca68b);
        let r = x ^ (x >> 16);
        if f64::from(r) >= (p * 4_294_967_296.0).floor() { 1.0 / (1.0 - p) } else { 0.0 }
    }
}

/// Sizes of all axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Sequences.
    pub batch: usize,
    /// Queries of each.
    pub tokens_q: usize,
    /// Keys of each.
    pub tokens_k: usize,
    /// Query heads, a multiple of the key heads.
    pub heads_q: usize,
    /// Heads of keys and values.
    pub heads_kv: usize,
    /// Numbers of a query and of a key.
    pub dim_k: usize,
    /// Numbers of a value.
    pub dim_v: usize,
}

impl Sizes {
    /// The key head that a query head reads.
    pub fn key_head(&self, head: usize) -> usize {
        head / (self.heads_q / self.heads_kv)
    }

    /// Elements of the queries.
    pub fn q(&self) -> usize {
        self.rows() * self.dim_k
    }

    /// Elements of the keys.
    pub fn k(&self) -> usize {
        self.batch * self.heads_kv * self.tokens_k * self.dim_k
    }

    /// Elements of the values.
    pub fn v(&self) -> usize {
        self.batch * self.heads_kv * self.tokens_k * self.dim_v
    }

    /// Elements of the output.
    pub fn out(&self) -> usize {
        self.rows() * self.dim_v
    }

    /// Softmax rows, and elements of the log-sum-exp.
    pub fn rows(&self) -> usize {
        self.batch * self.heads_q * self.tokens_q
    }
}

/// Everything that decides a result. Tensors are `[batch][head][token][dim]`, without gaps.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Sizes of all axes.
    pub sizes: Sizes,
    /// What scores are multiplied by.
    pub scale: f64,
    /// What is done to them then.
    pub transform: Transform,
    /// A logit per query head that joins the denominator of its rows.
    pub sink_logits: Option<Vec<f32>>,
    /// Which queries attend to which keys.
    pub seen: Seen,
    /// Global position of every query.
    pub query_positions: Vec<i64>,
    /// Global position of every key.
    pub key_positions: Vec<i64>,
    /// Positions of queries and keys that biases have distances of: for each head, or alike for all;
    /// empty where they are the global ones.
    pub score_positions: Vec<[Vec<i64>; 2]>,
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
    /// Gradient that arrives at the output.
    pub dout: Vec<f32>,
    /// Gradient that arrives at the log-sum-exp, `[batch][head][token]`.
    pub dlse: Option<Vec<f32>>,
    /// Whether numbers are unit-normal and scores no larger than `1/√dim` makes them: what errors
    /// have an absolute bound for.
    pub unit_scale: bool,
    /// What tensors hold, results too: what errors are compared with. Log-sum-exps are `f32`.
    pub precision: Precision,
}

impl Problem {
    /// A problem of unit-normal numbers with the default scale, everything seen, positions counted
    /// from zero with the queries last.
    pub fn normal(sizes: Sizes, seed: u64) -> Problem {
        let numbers = |tensor: u64, len| normals(seed.wrapping_mul(8).wrapping_add(tensor), len);
        let (tokens_q, tokens_k) = (sizes.tokens_q as i64, sizes.tokens_k as i64);
        Problem {
            sizes,
            scale: 1.0 / (sizes.dim_k as f64).sqrt(),
            transform: Transform::default(),
            sink_logits: None,
            seen: Seen::everything(sizes.tokens_k),
            query_positions: (tokens_k - tokens_q..tokens_k).collect(),
            key_positions: (0..tokens_k).collect(),
            score_positions: vec![],
            q: numbers(0, sizes.q()),
            k: numbers(1, sizes.k()),
            v: numbers(2, sizes.v()),
            dout: numbers(3, sizes.out()),
            dlse: None,
            unit_scale: true,
            precision: Precision::F32,
        }
    }

    /// The same problem of tensors that hold such numbers: each rounded to the nearest, so that the
    /// truth is that of the very numbers a kernel reads.
    pub fn rounded(mut self, precision: Precision) -> Problem {
        let Problem { q, k, v, dout, .. } = &mut self;
        for x in [q, k, v, dout].into_iter().flatten() {
            *x = precision.round(f64::from(*x));
        }
        self.precision = precision;
        self
    }
}
