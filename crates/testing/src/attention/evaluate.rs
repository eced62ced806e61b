//! The definition, computed row by row; see [the module](super) for the formulas.
//!
//! One function for `f64` and `f32`. The only thing that differs is [`Real::dot`], which adds up
//! in order for `f32` (that is what naive means) and in four chains for `f64`, where the order
//! can't matter and the time does.
//!
//! Probabilities are `exp(s_ij − m_i)` over their sum, `m_i` being the greatest score: taken from
//! the log-sum-exp they would be off by its rounding, which for scores of 1e30 is all of them even
//! in `f64`. The backward part takes `Σ_j P_ij dP_ij` from the output, as the header says.
//!
//! Beside each true number stands its *gross* one: the root of the sum of the squares of the terms
//! that it is the sum of, before any of them cancel. It tells a result that is small because its
//! terms are small from one that is small because large terms cancel; see
//! [`Measure`](super::Measure) for what that is good for.
//!
//! ```text
//! score   g_ij² = (scale · |q_i| |k_j|)² / dim + bias²     (a dot product of terms alike in size)
//! lse     √(lse² + Σ_j (P_ij g_ij)²)
//! out     √ Σ_j P_ij² v_j² (1 + g_ij²)
//! dP      f_ij² = dP_ij² + (|dout_i| |v_j|)² / dim
//! dZ      h_ij = P_ij (f_ij + |dout_i · out_i| + |dlse_i|) · (1, or 1 + tanh² for 1 − tanh²)
//! dq      scale · √ Σ_j h_ij² k_j² (1 + g_ij²),    dk, dv likewise over i
//! dsink   √ Σ_i P_i² (dlse_i² + (dout_i · out_i)² + Σ_d dout_id² out_id² (1 + Σ_j P_ij² g_ij²)),
//!         P_i = exp(sink − lse_i)
//! ```
//!
//! Where tensors hold [less](super::Precision) than `f32`, two more numbers stand there: what
//! comes in by roundings on the way, as the root of the expected square ([`Noise`]). One is that of
//! the output. It is rounded when it is written, to `r_i`, and the backward pass takes
//! `Σ_j P_ij dP_ij` from it:
//!
//! ```text
//! c_ij = scale · t'(z_ij) P_ij           a_i² = Σ_d dout_id² (r_id − out_id)²
//! dq      a_i |Σ_j c_ij k_j|             dk   √ Σ_i a_i² c_ij² q_i²
//! dsink   √ Σ_i P_i² a_i²             dtable  √ Σ_i a_i² (Σ_j P_ij)², j of one distance
//! ```
//!
//! The other is that of operands: probabilities and `dS` that are multiplied as such numbers, each
//! with a relative error of its own that has the root mean square 1 (times
//! [what it really is](super::Precision::noise)):
//!
//! ```text
//! out     √ Σ_j P_ij² v_j²               b_i² = Σ_d dout_id² Σ_j P_ij² v_jd²
//! dq      √ (b_i² (Σ_j c_ij k_j)² + Σ_j (scale · dZ_ij)² k_j²)
//! dk      √ Σ_i (b_i² c_ij² + (scale · dZ_ij)²) q_i²
//! dv      √ Σ_i P_ij² dout_i²            dsink   √ Σ_i P_i² b_i²
//! dtable  √ Σ_i (b_i² (Σ_j P_ij)² + Σ_j dS_ij²), j of one distance; dslope likewise, times distances
//! ```

use std::collections::BTreeMap;
use std::ops::{Add, Div, Mul, Sub};

use super::score::transform;
use super::{Precision, Problem, Sizes, Transform};
use crate::splitmix::splitmix64;

/// One number for each element of the results, `[batch][head][token][dim]` each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Values<T> {
    /// Outputs.
    pub out: Vec<T>,
    /// Log-sum-exp, `[batch][head][token]`.
    pub lse: Vec<T>,
    /// Gradient of the queries.
    pub dq: Vec<T>,
    /// Gradient of the keys.
    pub dk: Vec<T>,
    /// Gradient of the values.
    pub dv: Vec<T>,
    /// Gradient of the sink logits, one per query head; empty without sinks.
    pub dsink_logits: Vec<T>,
    /// Gradient of the table, one row per query head; empty without one.
    pub dbias_table: Vec<T>,
    /// Gradient of the slopes; empty without them.
    pub dalibi_slopes: Vec<T>,
}

/// The true numbers, and what they are sensitive to.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer<T> {
    /// The results.
    pub values: Values<T>,
    /// The root of the sum of the squares of each result's terms.
    pub gross: Values<T>,
    /// What roundings on the way add, where tensors hold less than `f32`.
    pub noise: Option<Noise<T>>,
}

/// Roots of the expected squares of errors that come in on the way to each result.
#[derive(Clone, Debug, PartialEq)]
pub struct Noise<T> {
    /// By an output that reaches the backward pass rounded.
    pub output: Values<T>,
    /// By operands whose relative error is 1.
    pub operands: Values<T>,
}

/// Which queries and keys are evaluated; the rest of the results stays 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    every: u64,
}

impl Sample {
    /// All of them.
    pub const ALL: Sample = Sample { every: 1 };

    /// About one in `every` tokens at random, and the first and the last.
    pub fn one_in(every: u64) -> Sample {
        Sample { every: every.max(1) }
    }

    /// Whether a token of so many is one of them.
    pub fn has(self, token: usize, tokens: usize) -> bool {
        token == 0
            || token + 1 == tokens
            || splitmix64(token as u64 ^ 0x5A3).is_multiple_of(self.every)
    }
}

/// The results in `f64`.
pub fn truth(problem: &Problem, sample: Sample) -> Answer<f64> {
    evaluate(problem, &Numbers::of(problem), sample)
}

/// The results in `f32`, added up in the order of the formulas.
pub fn naive(problem: &Problem, sample: Sample) -> Values<f32> {
    evaluate(problem, &Numbers::of(problem), sample).values
}

/// What the formulas are computed in.
pub(super) trait Real:
    Copy
    + From<f32>
    + Into<f64>
    + PartialOrd
    + Default
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    fn round(x: f64) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
    fn sqrt(self) -> Self;
    fn abs(self) -> Self;
    fn dot(a: &[Self], b: &[Self]) -> Self;
}

macro_rules! real {
    ($type:ident, $dot:expr) => {
        impl Real for $type {
            fn round(x: f64) -> Self {
                x as $type
            }
            fn exp(self) -> Self {
                $type::exp(self)
            }
            fn ln(self) -> Self {
                $type::ln(self)
            }
            fn tanh(self) -> Self {
                $type::tanh(self)
            }
            fn sqrt(self) -> Self {
                $type::sqrt(self)
            }
            fn abs(self) -> Self {
                $type::abs(self)
            }
            fn dot(a: &[Self], b: &[Self]) -> Self {
                $dot(a, b)
            }
        }
    };
}

real!(f32, |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0, |sum, (x, y)| sum + x * y));
real!(f64, |a: &[f64], b: &[f64]| {
    let mut sums = [0.0; 4];
    let (a, b) = (a.chunks_exact(4), b.chunks_exact(4));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    for (a, b) in a.zip(b) {
        for n in 0..4 {
            sums[n] += a[n] * b[n];
        }
    }
    sums.iter().sum::<f64>() + rest
});

/// The tensors of a problem in the type that the formulas are computed in.
pub(super) struct Numbers<R> {
    pub(super) q: Vec<R>,
    pub(super) k: Vec<R>,
    pub(super) v: Vec<R>,
    pub(super) dout: Vec<R>,
    pub(super) dlse: Vec<R>,
    /// Empty without sinks.
    pub(super) sink_logits: Vec<R>,
    /// Empty without a table.
    pub(super) table: Vec<R>,
    /// Empty without ALiBi.
    pub(super) slopes: Vec<R>,
}

impl<R: Real> Numbers<R> {
    pub(super) fn of(problem: &Problem) -> Self {
        let wide = |numbers: &[f32]| numbers.iter().map(|&x| R::from(x)).collect::<Vec<R>>();
        let Problem { q, k, v, dout, .. } = problem;
        let none = || vec![0.0; problem.sizes.rows()];
        let dlse = wide(&problem.dlse.clone().unwrap_or_else(none));
        let sink_logits = wide(problem.sink_logits.as_deref().unwrap_or_default());
        let (q, k, v, dout) = (wide(q), wide(k), wide(v), wide(dout));
        let Transform { slopes, table, .. } = &problem.transform;
        let table = wide(table.as_ref().map_or(&[], |table| &table.values));
        Numbers { q, k, v, dout, dlse, sink_logits, table, slopes: wide(slopes) }
    }
}

impl<R: Copy + Default> Values<R> {
    fn zero(problem: &Problem) -> Self {
        let sizes = &problem.sizes;
        let zeros = |len| vec![R::default(); len];
        Values {
            out: zeros(sizes.out()),
            lse: zeros(sizes.rows()),
            dq: zeros(sizes.q()),
            dk: zeros(sizes.k()),
            dv: zeros(sizes.v()),
            dsink_logits: zeros(problem.sink_logits.as_ref().map_or(0, Vec::len)),
            dbias_table: zeros(problem.transform.table.as_ref().map_or(0, |t| t.values.len())),
            dalibi_slopes: zeros(problem.transform.slopes.len()),
        }
    }
}

fn take_roots<R: Real>(squares: &mut Values<R>) {
    let Values { out, lse, dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes } = squares;
    for square in
        [out, lse, dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes].into_iter().flatten()
    {
        *square = square.sqrt();
    }
}

/// Token `n` of all tokens of a tensor.
fn token<R>(tensor: &[R], n: usize, dim: usize) -> &[R] {
    &tensor[n * dim..][..dim]
}

/// The length of each token's vector, over `√√dim`: the product of two is that of a score's terms.
fn norms<R: Real>(tensor: &[R], dim: usize) -> Vec<R> {
    let root = R::round((dim as f64).sqrt());
    tensor.chunks(dim).map(|token| (R::dot(token, token) / root).sqrt()).collect()
}

/// Adds `factor · term` to a token's numbers.
fn add<R: Real>(tensor: &mut [R], n: usize, factor: R, term: &[R]) {
    let sums = &mut tensor[n * term.len()..][..term.len()];
    for (sum, &x) in sums.iter_mut().zip(term) {
        *sum = *sum + factor * x;
    }
}

/// Adds `factor · term²`.
fn add_squares<R: Real>(tensor: &mut [R], n: usize, factor: R, term: &[R]) {
    let sums = &mut tensor[n * term.len()..][..term.len()];
    for (sum, &x) in sums.iter_mut().zip(term) {
        *sum = *sum + factor * (x * x);
    }
}

pub(super) fn evaluate<R: Real>(problem: &Problem, x: &Numbers<R>, sample: Sample) -> Answer<R> {
    let Sizes { batch, tokens_q, tokens_k, heads_q, heads_kv, dim_k, dim_v } = problem.sizes;
    let scale = R::round(problem.scale);
    let (norms_q, norms_k) = (norms(&x.q, dim_k), norms(&x.k, dim_k));
    let (norms_dout, norms_v) = (norms(&x.dout, dim_v), norms(&x.v, dim_v));
    let mut values = Values::zero(problem);
    let mut gross = Values::zero(problem);
    let narrow = problem.precision != Precision::F32;
    let mut noise =
        narrow.then(|| Noise { output: Values::zero(problem), operands: Values::zero(problem) });
    for (entry, head) in (0..batch).flat_map(|b| (0..heads_q).map(move |h| (b, h))) {
        let first_key = (entry * heads_kv + problem.sizes.key_head(head)) * tokens_k;
        let place = |key: &u32| first_key + *key as usize;
        let nothing = R::round(f64::NEG_INFINITY);
        let sink = x.sink_logits.get(head).copied().filter(|&sink| sink > nothing);
        for query in 0..tokens_q {
            let row = (entry * heads_q + head) * tokens_q + query;
            let keys = problem.seen.keys(entry, head, query);
            let wanted = sample.has(query, tokens_q);
            if !wanted && !keys.iter().any(|&key| sample.has(key as usize, tokens_k)) {
                continue;
            }
            if keys.is_empty() {
                values.lse[row] = sink.unwrap_or(nothing);
                if sink.is_some() {
                    let dlse = x.dlse[row];
                    values.dsink_logits[head] = values.dsink_logits[head] + dlse;
                    gross.dsink_logits[head] = gross.dsink_logits[head] + dlse * dlse;
                }
                continue;
            }
            let (q, dout) = (token(&x.q, row, dim_k), token(&x.dout, row, dim_v));

            // Scores, their slopes, and the size of their terms.
            let mut scores = Vec::with_capacity(keys.len());
            for key in keys {
                let k = token(&x.k, place(key), dim_k);
                let z = scale * R::dot(q, k);
                let score = transform(problem, x, z, head, query, *key as usize);
                let terms = scale * norms_q[row] * norms_k[place(key)];
                scores.push((score, (terms * terms + score.bias * score.bias).sqrt()));
            }

            // The softmax.
            let most = scores.iter().map(|(score, _)| score.new).chain(sink);
            let most = most.fold(scores[0].0.new, |most, s| if s > most { s } else { most });
            let powers: Vec<R> = scores.iter().map(|s| (s.0.new - most).exp()).collect();
            let of_sink = sink.map_or(R::default(), |sink| (sink - most).exp());
            let sum = powers.iter().fold(R::default(), |sum, &e| sum + e) + of_sink;
            let lse = most + sum.ln();
            let p: Vec<R> = powers.iter().map(|&power| power / sum).collect();
            let kept = |key: &u32| {
                let query = problem.query_positions[query];
                let key = problem.key_positions[*key as usize];
                R::round(problem.transform.kept(entry, heads_q, head, query, key))
            };
            let kept: Vec<R> = keys.iter().map(kept).collect();
            let mut out = vec![R::default(); dim_v];
            for ((&p, &r), key) in p.iter().zip(&kept).zip(keys) {
                add(&mut out, 0, r * p, token(&x.v, place(key), dim_v));
            }

            // Its gradient.
            let dp: Vec<R> = keys
                .iter()
                .zip(&kept)
                .map(|(key, &r)| r * R::dot(dout, token(&x.v, place(key), dim_v)))
                .collect();
            let delta = R::dot(dout, &out);
            let dlse = x.dlse[row];

            if wanted {
                values.out[row * dim_v..][..dim_v].copy_from_slice(&out);
            }
            values.lse[row] = lse;
            gross.lse[row] = lse * lse;
            let p_sink = of_sink / sum;
            if sink.is_some() {
                let term = p_sink * (dlse - delta);
                values.dsink_logits[head] = values.dsink_logits[head] + term;
                let spread = p
                    .iter()
                    .zip(&scores)
                    .fold(R::from(1.0), |spread, (&p, s)| spread + p * p * s.1 * s.1);
                let terms = dout
                    .iter()
                    .zip(&out)
                    .fold(R::default(), |sum, (&dout, &out)| sum + (dout * out) * (dout * out));
                // Elements of an output share the error of their row's total.
                let square = p_sink * p_sink * (dlse * dlse + delta * delta + terms * spread);
                gross.dsink_logits[head] = gross.dsink_logits[head] + square;
            }
            for (n, key) in keys.iter().enumerate() {
                let place = place(key);
                let (score, g) = scores[n];
                let ds = p[n] * (dp[n] - delta + dlse);
                let dz = scale * score.slope * ds;
                let (r, terms) = (kept[n], kept[n] * norms_dout[row] * norms_v[place]);
                let dp_gross = (dp[n] * dp[n] + terms * terms).sqrt();
                let ds_gross = p[n] * (dp_gross + delta.abs() + dlse.abs());
                let h = scale * score.slope_gross * ds_gross;
                let spread = R::from(1.0) + g * g;
                let (pp, hh) = (r * r * p[n] * p[n] * spread, h * h * spread);
                score.add_bias(&mut values, head, ds);
                score.add_bias_square(&mut gross, head, ds_gross * ds_gross * spread);
                if wanted {
                    let (k, v) = (token(&x.k, place, dim_k), token(&x.v, place, dim_v));
                    add(&mut values.dq, row, dz, k);
                    gross.lse[row] = gross.lse[row] + p[n] * p[n] * g * g;
                    add_squares(&mut gross.out, row, pp, v);
                    add_squares(&mut gross.dq, row, hh, k);
                }
                if sample.has(*key as usize, tokens_k) {
                    add(&mut values.dk, place, dz, q);
                    add(&mut values.dv, place, r * p[n], dout);
                    add_squares(&mut gross.dk, place, hh, q);
                    add_squares(&mut gross.dv, place, pp, dout);
                }
            }

            // What roundings add to it.
            let Some(Noise { output, operands }) = &mut noise else { continue };
            let (mut means, mut squares) = (vec![R::default(); dim_k], vec![R::default(); dim_v]);
            for (n, key) in keys.iter().enumerate() {
                add(
                    &mut means,
                    0,
                    scale * scores[n].0.slope * p[n],
                    token(&x.k, place(key), dim_k),
                );
                let rp = kept[n] * p[n];
                add_squares(&mut squares, 0, rp * rp, token(&x.v, place(key), dim_v));
            }
            let (mut a, mut b) = (R::default(), R::default());
            for ((&dout, &out), &square) in dout.iter().zip(&out).zip(&squares) {
                let error = R::from(problem.precision.round(out.into())) - out;
                a = a + dout * dout * (error * error);
                b = b + dout * dout * square;
            }
            if sink.is_some() {
                let square = p_sink * p_sink;
                output.dsink_logits[head] = output.dsink_logits[head] + square * a;
                operands.dsink_logits[head] = operands.dsink_logits[head] + square * b;
            }
            // All keys of a row share the error of its delta.
            let (mut of_table, mut of_slope) = (BTreeMap::new(), R::default());
            for (n, (score, _)) in scores.iter().enumerate() {
                if let Some(value) = score.value {
                    let sum = of_table.entry(value).or_insert(R::default());
                    *sum = *sum + p[n];
                }
                of_slope = of_slope + p[n] * score.distance;
            }
            for (into, square) in [(&mut *output, a), (&mut *operands, b)] {
                for (&value, &sum) in &of_table {
                    into.dbias_table[value] = into.dbias_table[value] + square * sum * sum;
                }
                if let Some(sum) = into.dalibi_slopes.get_mut(head) {
                    *sum = *sum + square * of_slope * of_slope;
                }
            }
            if wanted {
                add(&mut operands.out, row, R::from(1.0), &squares);
                add_squares(&mut output.dq, row, a, &means);
                add_squares(&mut operands.dq, row, b, &means);
            }
            for (n, key) in keys.iter().enumerate() {
                let score = scores[n].0;
                let ds = p[n] * (dp[n] - delta + dlse);
                score.add_bias_square(operands, head, ds * ds);
                let c = scale * score.slope * p[n];
                let dz = c * (dp[n] - delta + dlse);
                if wanted {
                    add_squares(&mut operands.dq, row, dz * dz, token(&x.k, place(key), dim_k));
                }
                if sample.has(*key as usize, tokens_k) {
                    add_squares(&mut output.dk, place(key), a * c * c, q);
                    add_squares(&mut operands.dk, place(key), b * c * c + dz * dz, q);
                    let rp = kept[n] * p[n];
                    add_squares(&mut operands.dv, place(key), rp * rp, dout);
                }
            }
        }
    }
    take_roots(&mut gross);
    if let Some(Noise { output, operands }) = &mut noise {
        take_roots(output);
        take_roots(operands);
    }
    Answer { values, gross, noise }
}
