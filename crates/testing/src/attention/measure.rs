//! How wrong a result is, and how wrong it may be.
//!
//! All errors are root mean squares over a whole tensor, against the `f64` truth `t`:
//!
//! ```text
//! error = rms(got − t)         what is measured
//! best  = rms(f32(t) − t)      what rounding alone costs: nobody who returns f32 does better
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

use super::{Answer, Problem, Sample, Values};

/// How many times the best possible error a result may be off.
const MOST: f64 = 12.0;

/// The errors of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measure {
    /// `out`, `lse`, `dq`, `dk` or `dv`.
    pub tensor: &'static str,
    /// RMS error of what was measured; infinite if a number is NaN or is where the truth is −∞.
    pub error: f64,
    /// RMS error of the truth rounded to `f32`, or the floor of it.
    pub best: f64,
    /// RMS error of the naive result.
    pub naive: f64,
    /// Whether it is the floor: terms cancel, or are few.
    pub cancels: bool,
    /// Rows that the means are over: queries that see a key, or keys that are seen where those are
    /// fewer, or an eighth of the numbers, since rows that see the same keys share their luck.
    pub rows: usize,
    /// Whether the absolute bound is meant for this problem.
    pub unit_scale: bool,
}

impl Measure {
    /// The measures of all five results; only the tokens of the sample are looked at.
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
            let rounded = rms(elements().map(|n| difference(t[n] as f32, t[n])));
            let floor = UNIT / 6.0 * rms(elements().map(|n| gross[n]));
            Measure {
                tensor,
                error: rms(elements().map(|n| difference(got[n], t[n]))),
                best: rounded.max(floor),
                cancels: floor > rounded,
                naive: rms(elements().map(|n| difference(naive[n], t[n]))),
                rows: live.count().min(seeing).min(rows.len().min(seeing) * dim / 8),
                unit_scale: problem.unit_scale,
            }
        };
        vec![
            one("out", queries, sizes.dim_v, |values| &values.out, &naive.out, &got.out),
            one("lse", queries, 1, |values| &values.lse, &naive.lse, &got.lse),
            one("dq", queries, sizes.dim_k, |values| &values.dq, &naive.dq, &got.dq),
            one("dk", keys, sizes.dim_k, |values| &values.dk, &naive.dk, &got.dk),
            one("dv", keys, sizes.dim_v, |values| &values.dv, &naive.dv, &got.dv),
        ]
    }

    /// How many times the best possible error it is; 0 of nothing.
    pub fn ratio(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { self.error / self.best }
    }

    /// What the error may be at most.
    pub fn limit(&self) -> f64 {
        let rows = self.rows.max(1) as f64;
        let (few, fewer) = (1.0 + 3.0 / rows, 1.0 + 3.0 / rows.sqrt());
        let least = if self.cancels || self.rows < 8 { MOST * few } else { MOST / 2.0 };
        let relative = (self.naive * fewer).max(least * self.best);
        let absolute = MOST * self.best * few;
        if self.unit_scale { absolute.min(relative) } else { relative }
    }

    /// Whether the error is as small as the rule says.
    pub fn holds(&self) -> bool {
        self.error <= self.limit()
    }
}

impl std::fmt::Display for Measure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Measure { tensor, error, best, naive, .. } = self;
        write!(f, "{tensor}: error {error:.3e} = {:.1} × best", self.ratio())?;
        write!(f, " (naive {:.1}, at most {:.1})", naive / best, self.limit() / best)
    }
}

/// Unit roundoff of `f32`: half the distance from 1 to the next number.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

/// 0 for equal numbers, infinities included; infinite where one of them is no number.
fn difference(got: f32, truth: f64) -> f64 {
    let got = f64::from(got);
    if got == truth {
        return 0.0;
    }
    let difference = (got - truth).abs();
    if difference.is_nan() { f64::INFINITY } else { difference }
}

fn rms(numbers: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0_u64);
    for x in numbers {
        sum += x * x;
        count += 1;
    }
    if count == 0 { 0.0 } else { (sum / count as f64).sqrt() }
}
