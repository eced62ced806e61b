//! What is done to scores, and the gradients of its parameters.

use super::evaluate::{Numbers, Real, Values};
use super::{Problem, Table, Transform};

/// A transformed score.
#[derive(Clone, Copy)]
pub(super) struct Score<R> {
    pub(super) new: R,
    /// What was added to it.
    pub(super) bias: R,
    /// Derivative with respect to the old one, and the size of its terms.
    pub(super) slope: R,
    pub(super) slope_gross: R,
    /// The value of the table, and the distance.
    pub(super) value: Option<usize>,
    pub(super) distance: R,
}

impl<R: Real> Score<R> {
    /// Adds the gradient of the score to those of biases.
    pub(super) fn add_bias(&self, values: &mut Values<R>, head: usize, ds: R) {
        if let Some(value) = self.value {
            values.dbias_table[value] = values.dbias_table[value] + ds;
        }
        if let Some(sum) = values.dalibi_slopes.get_mut(head) {
            *sum = *sum - ds * self.distance;
        }
    }

    /// The same of squares.
    pub(super) fn add_bias_square(&self, values: &mut Values<R>, head: usize, square: R) {
        if let Some(value) = self.value {
            values.dbias_table[value] = values.dbias_table[value] + square;
        }
        if let Some(sum) = values.dalibi_slopes.get_mut(head) {
            *sum = *sum + square * self.distance * self.distance;
        }
    }
}

/// What is done to the product `z` of a query and a key.
pub(super) fn transform<R: Real>(
    problem: &Problem,
    x: &Numbers<R>,
    z: R,
    head: usize,
    query: usize,
    key: usize,
) -> Score<R> {
    let (zero, one) = (R::default(), R::from(1.0));
    let Transform { softcap, slopes, table, .. } = &problem.transform;
    let mut score =
        Score { new: z, bias: zero, slope: one, slope_gross: one, value: None, distance: zero };
    if let Some(cap) = softcap {
        let cap = R::from(*cap);
        let t = (z / cap).tanh();
        (score.new, score.slope, score.slope_gross) = (cap * t, one - t * t, one + t * t);
    }
    let own = &problem.score_positions;
    let [queries, keys] = match own.get(head % own.len().max(1)) {
        Some([queries, keys]) => [queries, keys],
        None => [&problem.query_positions, &problem.key_positions],
    };
    let distance = queries[query] - keys[key];
    if !slopes.is_empty() {
        score.distance = R::round(distance.unsigned_abs() as f64);
        score.bias = zero - x.slopes[head] * score.distance;
    }
    if let Some(Table { left, right, .. }) = *table {
        let index = (distance.clamp(-(right as i64), left as i64) + right as i64) as usize;
        let value = head * (left + right + 1) + index;
        score.value = Some(value);
        score.bias = score.bias + x.table[value];
    }
    score.new = score.new + score.bias;
    score
}
