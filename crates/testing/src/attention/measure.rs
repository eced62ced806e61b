//! How wrong a result is, and how wrong it may be.
//!
//! All errors are root mean squares over a whole tensor, against the `f64` truth `t`:
//!
//! ```text
//! error = rms(got − t)         what is measured
//! best  = rms(f32(t) − t)      what rounding alone costs: a lower bound for every f32 result
//! naive = rms(naive f32 − t)   what the formulas cost when computed as written, in f32
//! ```
//!
//! The rule is `error ≤ 12 · best` for problems of unit scale, and `error ≤ naive` for all.
//!
//! Why 12: a sum of `n` terms of random sign, added up in order in `f32`, is off by about
//! `√(n/2) · best`; added up in tiles and then the tiles, by `√√n · best`. A probability has the
//! error of its score, a sum over the head dim; a result has that and the error of its own sum
//! over the tokens. So 12 holds at thousands of tokens for those who add up in three levels (a
//! few dozen terms, a tile, all tiles), and ends at about a hundred for those who add in order.
//!
//! Gradients keep it only if the log-sum-exp reaches the backward pass with more than one `f32`:
//! from 8 on, which is 1,800 keys of unit scale, one alone is off by 2.8e-7, and so is every
//! probability that is made from it, eleven times `best` before anything was computed.
//!
//! Two things keep the rule from being about luck:
//!
//! * Where terms cancel, `best` isn't possible. The gradient of the only key of a query is 0, as
//!   the difference of two sums that are equal only when they are added up in the same order. So
//!   `best` is taken to be at least `u/6 · rms(gross)`, a sixth of the unit roundoff `u = 2⁻²⁴`
//!   of the [terms' size](super::Answer). A number rounded to `f32` is off by `0.41 u` of itself
//!   (`ulp/√12`, averaged over a binade), so where nothing cancels this floor is below `best` and
//!   changes nothing.
//! * A mean over few rows is luck: a single number may happen to be an `f32` itself, and a naive
//!   sum may happen to be right. Over `n` rows the first bound is `1 + 3/n` and the second
//!   `1 + 3/√n` times as wide (the standard deviation of an estimated RMS is `1/√(2n)`, and the
//!   second compares two of them that are expected to be near each other), and what is below
//!   `6 · best` is never called worse than naive. Nor is what is below `12 · best` where there are
//!   fewer than eight rows, or where terms cancel: the naive formulas then often return exactly 0,
//!   by adding up the same numbers twice.
//!
//! # Tensors of bf16 and f16
//!
//! For a [format](super::Precision) `E`, `best = rms(E(t) − t)`. Log-sum-exps are `f32` whatever
//! tensors hold, and have the rule above. For the rest, let `x` be a result before it is rounded,
//! which the rule above is about too. `E(x)` is the nearest number to `x`, so it is no farther from
//! it than `E(t)` is, and
//!
//! ```text
//! |E(x) − t| ≤ |E(x) − x| + |x − t| ≤ |E(t) − x| + |x − t| ≤ |E(t) − t| + 2 |x − t|
//! ```
//!
//! and so are their root mean squares. The rule for those who widen, compute in `f32` and round
//! once is `error ≤ best + 2 · (what f32 may)`: 1.001 × `best` for bf16 and 1.005 × for f16 at unit
//! scale, without room for luck.
//!
//! Where [noise](super::Noise) comes in on the way, `x` is off by that besides. `dq` and `dk` of
//! everybody have that of an output that arrives rounded. All results of a
//! [matrix unit](Measure::on_matrix_unit) have that of probabilities and `dS` which are multiplied
//! as bf16: each has a rounding error of its own, so errors add up as squares do, and
//! `error ≤ 1.1 · hypot(best, noise) + 2 · (what f32 may)`. Over few rows `noise`, an expectation,
//! is luck: the first part is then `1 + 3/√n` times as wide. A `best` that happens to be below
//! [what is expected](super::Precision::noise) is taken as that, since `E(x)` is another number
//! than `E(t)`. Where many terms of about the same size add up, noise of operands is as large as
//! `best`, and a matrix unit's output is off by up to `√2 · best`; by less where one probability is
//! the most of a row, which is 1 before rows are divided by their totals and isn't rounded.
//!
//! # f32 as two bf16 numbers
//!
//! [Split products](Measure::of_split_products) have `x ≈ h + l` with `h` the nearest bf16 number to `x`
//! and `l` that to `x − h`, and leave `l · l'` out. A number rounded to bf16 is off by
//! `r = 0.41 · 2⁻⁸ = 1.6e-3` of itself, so `l` is about `r x` and off by `r² x`: a product has three errors
//! of `r² x x'`, one per operand and that of what is left out, which is `√3 r² = 4.5e-6` of it. The size of
//! all terms that a result is made of, in every product on the way to it, is what `gross` is. So
//! `error ≤ 1.1 · 4.5e-6 · rms(gross) · (1 + 3/√n) + (what f32 may)`.

use super::{Answer, Noise, Precision, Problem, Sample, Values};
use crate::close::difference;

/// How many times the best possible error a result may be off.
const MOST: f64 = 12.0;

/// How many times the expected error a result may be off that noise comes into.
const NOISE: f64 = 1.1;

/// What a split product is off, as a share of it.
const SPLIT: f64 = 4.5e-6;

/// The errors of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measure {
    /// `out`, `lse`, `dq`, `dk`, `dv` or `dsink_logits`.
    pub tensor: &'static str,
    /// RMS error of what was measured; infinite if a number is NaN or is where the truth is −∞.
    pub error: f64,
    /// RMS error of the truth rounded to what the tensor holds, or the floor of it.
    pub best: f64,
    /// The same for `f32`; differs where the tensor holds less.
    pub best_f32: f64,
    /// RMS error that is expected of a rounded truth and of noise; 0 without noise.
    pub expected: f64,
    /// The same on a matrix unit.
    pub expected_on_matrix_unit: f64,
    /// Whether the tensor holds less than `f32`.
    pub is_narrow: bool,
    /// RMS error of the naive result.
    pub naive: f64,
    /// RMS size of the terms that the results are sums of.
    pub gross: f64,
    /// Whether products are those of two bf16 numbers for each f32 number.
    pub is_split: bool,
    /// Whether it is the floor: terms cancel, or are few.
    pub cancels: bool,
    /// Rows that the means are over: queries that see a key, or keys that are seen where those are
    /// fewer, or an eighth of the numbers, since rows that see the same keys share their luck.
    pub rows: usize,
    /// Whether the absolute bound is meant for this problem.
    pub unit_scale: bool,
}

impl Measure {
    /// The measures of all results; only the tokens of the sample are looked at.
    pub fn all(
        problem: &Problem,
        truth: &Answer<f64>,
        naive: &Values<f32>,
        got: &Values<f32>,
        sample: Sample,
    ) -> Vec<Measure> {
        let sizes = &problem.sizes;
        let (queries, keys) = (sizes.tokens_q, sizes.tokens_k);
        let seeing = truth.values.lse.iter().filter(|lse| lse.is_finite()).count();
        type Pick = fn(&Values<f64>) -> &Vec<f64>;
        let one = |tensor, tokens, dim, pick: Pick, naive: &[f32], got: &[f32]| {
            let (t, gross) = (pick(&truth.values), pick(&truth.gross));
            assert_eq!(got.len(), t.len(), "{tensor} has another length than the truth");
            let rows: Vec<usize> =
                (0..t.len() / dim).filter(|row| sample.has(row % tokens, tokens)).collect();
            let elements = || rows.iter().flat_map(|row| row * dim..(row + 1) * dim);
            let live =
                rows.iter().filter(|&row| gross[row * dim..][..dim].iter().any(|&g| g > 0.0));
            let best = |precision: Precision| {
                rms(elements().map(|n| difference(precision.round(t[n]), t[n])))
            };
            let rounded = best(Precision::F32);
            let size = rms(elements().map(|n| gross[n]));
            let mut floor = Precision::F32.unit() / 6.0 * size;
            let is_list = ["dsink_logits", "dbias_table", "dalibi_slopes"].contains(&tensor);
            if is_list {
                // So few numbers that their own roundings may all be small by chance.
                floor = floor.max(Precision::F32.unit() / 2.0 * rms(elements().map(|n| t[n])));
            }
            let is_f32 = tensor == "lse" || is_list;
            let precision = if is_f32 { Precision::F32 } else { problem.precision };
            // Sink logits are f32 as well, but their gradients come from outputs that are rounded.
            let is_narrow = tensor != "lse" && problem.precision != Precision::F32;
            let best = best(precision);
            // What noise of this size and a rounded truth add up to.
            let expected = |noise: &dyn Fn(&Noise<f64>, usize) -> f64| {
                let all = truth.noise.as_ref().filter(|_| is_narrow);
                let noise = all.map_or(0.0, |all| rms(elements().map(|n| noise(all, n))));
                let usual = precision.noise() * rms(elements().map(|n| t[n]));
                if noise == 0.0 { 0.0 } else { noise.hypot(best.max(usual)) }
            };
            let unit = problem.precision.noise();
            Measure {
                tensor,
                error: rms(elements().map(|n| difference(got[n], t[n]))),
                best: best.max(floor),
                best_f32: rounded.max(floor),
                expected: expected(&|noise, n| pick(&noise.output)[n]),
                expected_on_matrix_unit: expected(&|noise, n| {
                    pick(&noise.output)[n].hypot(unit * pick(&noise.operands)[n])
                }),
                is_narrow,
                cancels: floor > rounded,
                naive: rms(elements().map(|n| difference(naive[n], t[n]))),
                gross: size,
                is_split: false,
                rows: live.count().min(seeing).min(rows.len().min(seeing) * dim / 8),
                unit_scale: problem.unit_scale,
            }
        };
        let mut all = vec![
            one("out", queries, sizes.dim_v, |values| &values.out, &naive.out, &got.out),
            one("lse", queries, 1, |values| &values.lse, &naive.lse, &got.lse),
            one("dq", queries, sizes.dim_k, |values| &values.dq, &naive.dq, &got.dq),
            one("dk", keys, sizes.dim_k, |values| &values.dk, &naive.dk, &got.dk),
            one("dv", keys, sizes.dim_v, |values| &values.dv, &naive.dv, &got.dv),
        ];
        // A sum over all rows, so that a sample of them has none.
        if sample == Sample::ALL && problem.sink_logits.is_some() {
            let (naive, got) = (&naive.dsink_logits, &got.dsink_logits);
            all.push(one("dsink_logits", 1, 1, |values| &values.dsink_logits, naive, got));
        }
        if sample == Sample::ALL && problem.transform.table.is_some() {
            let (naive, got) = (&naive.dbias_table, &got.dbias_table);
            all.push(one("dbias_table", 1, 1, |values| &values.dbias_table, naive, got));
        }
        if sample == Sample::ALL && !problem.transform.slopes.is_empty() {
            let (naive, got) = (&naive.dalibi_slopes, &got.dalibi_slopes);
            all.push(one("dalibi_slopes", 1, 1, |values| &values.dalibi_slopes, naive, got));
        }
        all
    }

    /// How many times the best possible error it is; 0 of nothing.
    pub fn ratio(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.best }
    }

    /// The same errors of a result whose probabilities and `dS` were multiplied as bf16, judged as
    /// such.
    pub fn on_matrix_unit(self) -> Measure {
        Measure { expected: self.expected_on_matrix_unit, ..self }
    }

    /// The same errors of a result whose f32 operands were multiplied as two bf16 numbers each, judged as
    /// such.
    pub fn of_split_products(self) -> Measure {
        Measure { is_split: true, ..self }
    }

    /// What the error may be at most.
    pub fn limit(&self) -> f64 {
        let rows = self.rows.max(1) as f64;
        let (few, fewer) = (1.0 + 3.0 / rows, 1.0 + 3.0 / rows.sqrt());
        let least = if self.cancels || self.rows < 8 { MOST * few } else { MOST / 2.0 };
        let relative = (self.naive * fewer).max(least * self.best_f32);
        let absolute = MOST * self.best_f32 * few;
        let sums = if self.unit_scale { absolute.min(relative) } else { relative };
        if self.is_split {
            return NOISE * SPLIT * self.gross * fewer + sums;
        }
        if !self.is_narrow {
            return sums;
        }
        self.best.max(NOISE * self.expected * fewer) + 2.0 * sums
    }

    /// Whether the error is as small as the rule says. Never where an element is NaN or infinite and
    /// shouldn't be, though the naive formulas, and with them the limit, may be as wrong.
    pub fn holds(&self) -> bool {
        self.error.is_finite() && self.error <= self.limit()
    }

    /// The error as a share of what it may be at most; infinite where an element is NaN.
    pub fn of_limit(&self) -> f64 {
        match self.error {
            0.0 => 0.0,
            error if error.is_finite() => error / self.limit(),
            _ => f64::INFINITY,
        }
    }
}

impl std::fmt::Display for Measure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Measure { tensor, error, best, naive, .. } = self;
        if self.is_narrow {
            // Two figures more: everybody is near the best.
            write!(f, "{tensor}: error {error:.3e} = {:.3} × best", self.ratio())?;
            return write!(f, " (at most {:.3})", self.limit() / best);
        }
        write!(f, "{tensor}: error {error:.3e} = {:.1} × best", self.ratio())?;
        write!(f, " (naive {:.1}, at most {:.1})", naive / best, self.limit() / best)
    }
}

fn rms(numbers: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0_u64);
    for x in numbers {
        sum += x * x;
        count += 1;
    }
    if count == 0 { 0.0 } else { (sum / count as f64).sqrt() }
}
