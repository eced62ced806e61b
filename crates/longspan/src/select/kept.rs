//! How much attention mass a selection keeps.

use longspan_pattern::{LayoutSet, Positions, Progression, splitmix64};

use super::{Measured, Selection};
use crate::arguments::{Inputs, Output};
use crate::attention::Attention;
use crate::dims::{Dims, Order};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::exec::Hook;
use crate::tensor::{Tensor, View};

/// The share of attention mass that a selection keeps: `exp(lse over the choice − lse over the
/// base)` per query and head, measured on sampled queries.
#[derive(Debug, Clone, PartialEq)]
pub struct KeptMass {
    /// The mean over all queries and heads, estimated.
    pub mean: f64,
    /// A 95 % confidence interval of that mean.
    pub interval: (f64, f64),
    /// The kept mass of each sampled query and head, ascending.
    pub sampled: Vec<f32>,
}

impl KeptMass {
    /// The kept mass that a share of the sampled queries stay below: `quantile(0.05)` is what all
    /// but the worst 5 % reach.
    pub fn quantile(&self, share: f64) -> Option<f32> {
        let last = self.sampled.len().checked_sub(1)?;
        self.sampled.get((share.clamp(0.0, 1.0) * last as f64).round() as usize).copied()
    }
}

/// Positions that are sampled first: two per stratum of the sequence.
const PILOT: usize = 256;

/// The widest interval that is not narrowed by more samples.
const WIDTH: f64 = 0.008;

/// What rounding of log-sum-exps may add to an error: all of it where every query is sampled.
const ROUNDING: f64 = 1e-6;

impl Selection {
    /// Measures the kept mass, given the log-sum-exp of attention over the
    /// [`layouts`](Self::layouts), `[batch, head, token]`. Attention must have the scale and options
    /// of the selector.
    ///
    /// Queries are sampled two per stratum of the sequence, as many as an interval of 0.01 takes;
    /// for those, attention over the base pattern is computed.
    pub fn kept_mass<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        lse: &[f32],
    ) -> Result<KeptMass> {
        self.kept_mass_with(q, k, lse, 0, Hook::none())
    }

    /// The same with a choice of sampled queries, and a hook.
    pub fn kept_mass_with<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        lse: &[f32],
        seed: u64,
        mut hook: Hook<'_>,
    ) -> Result<KeptMass> {
        let (tokens, rows) = (q.dims().tokens, q.dims().rows());
        if lse.len() != rows {
            return Err(Error::Length { what: "lse", len: lse.len(), expected: rows });
        }
        let pilot = self.sample(q, k, lse, &strata(tokens, PILOT, seed), hook.reborrow())?;
        let width = pilot.interval.1 - pilot.interval.0;
        if width <= WIDTH || tokens <= PILOT {
            return Ok(pilot);
        }
        let samples = (PILOT as f64 * (width / WIDTH).powi(2) * 1.1).ceil() as usize;
        self.sample(q, k, lse, &strata(tokens, samples, splitmix64(seed ^ 1)), hook)
    }

    fn sample<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        lse: &[f32],
        strata: &[Stratum],
        hook: Hook<'_>,
    ) -> Result<KeptMass> {
        let Dims { batch, tokens, heads, dim } = q.dims();
        let picks: Vec<usize> = strata.iter().flat_map(Stratum::picks).collect();
        let dims = Dims { batch, tokens: picks.len(), heads, dim };
        let mut sampled = Tensor::<E>::zeros(dims, Order::Bhsd)?;
        for (row, into) in sampled.as_mut_slice().chunks_exact_mut(dim).enumerate() {
            let (pair, pick) = (row / picks.len(), picks[row % picks.len()]);
            q.copy_row(pair / heads, pick, pair % heads, into);
        }
        let Measured { base, shape, padding } = &self.measured;
        let first = self.layouts.get(0, 0).query_positions();
        let position = |&pick: &usize| {
            let start = first.get(pick).expect("a query of the layout");
            Progression { start, step: 1, len: 1 }
        };
        let positions = Positions::new(picks.iter().map(position))?;
        let shape = shape.clone().query_map(positions);
        let layouts = LayoutSet::compile(base, heads, &shape, padding, None)?;
        // Values are not used: the first element of each key is the narrowest.
        let inputs = Inputs::new(sampled.view(), k, k.first_dim());
        let attention = Attention::new(layouts).options(self.options.clone());
        let mut output = Output::zeros(Dims { dim: 1, ..dims }, Order::Bhsd)?;
        attention.forward_into(inputs, output.as_mut(), hook)?;
        let whole = output.lse;

        let mut kept = vec![0.0_f32; whole.len()];
        for (row, kept) in kept.iter_mut().enumerate() {
            let own = lse[row / picks.len() * tokens + picks[row % picks.len()]];
            // A query without keys loses nothing.
            *kept = if whole[row] == f32::NEG_INFINITY { 1.0 } else { (own - whole[row]).exp() };
        }
        // Queries of one position are not independent: their mean is one observation.
        let means: Vec<f64> = (0..picks.len())
            .map(|pick| {
                let rows = kept.iter().skip(pick).step_by(picks.len());
                rows.map(|&kept| f64::from(kept)).sum::<f64>() / (batch * heads) as f64
            })
            .collect();
        let (mean, error) = estimate(strata, &means, tokens);
        let half = 1.96 * error + ROUNDING;
        kept.sort_unstable_by(f32::total_cmp);
        Ok(KeptMass { mean, interval: (mean - half, (mean + half).min(1.0)), sampled: kept })
    }
}

/// Consecutive queries, and two of them or the only one.
#[derive(Debug, Clone, Copy)]
struct Stratum {
    len: usize,
    picks: (usize, Option<usize>),
}

impl Stratum {
    fn picks(&self) -> impl Iterator<Item = usize> + use<> {
        std::iter::once(self.picks.0).chain(self.picks.1)
    }
}

/// Cuts `tokens` queries into strata with `samples` picks in all: every query where that is as many.
fn strata(tokens: usize, samples: usize, seed: u64) -> Vec<Stratum> {
    let count = (samples / 2).clamp(1, tokens.div_ceil(2).max(1));
    let edge = |index: usize| (tokens as u128 * index as u128 / count as u128) as usize;
    let stratum = |index: usize| {
        let (first, len) = (edge(index), edge(index + 1) - edge(index));
        let draw = |number: u64, below: usize| {
            let word = splitmix64(splitmix64(seed ^ index as u64).wrapping_add(number));
            ((u128::from(word) * below as u128) >> 64) as usize
        };
        if len < 2 {
            return (len == 1).then_some(Stratum { len, picks: (first, None) });
        }
        let (a, b) = (draw(0, len), draw(1, len - 1));
        let b = if b >= a { b + 1 } else { b };
        Some(Stratum { len, picks: (first + a.min(b), Some(first + a.max(b))) })
    };
    (0..count).filter_map(stratum).collect()
}

/// The mean over all queries and its standard error, given that of each pick: strata have the
/// weight of their queries, and two picks of a stratum give its variance.
fn estimate(strata: &[Stratum], means: &[f64], tokens: usize) -> (f64, f64) {
    let (mut mean, mut variance, mut next) = (0.0, 0.0, 0);
    for stratum in strata {
        let weight = stratum.len as f64 / tokens as f64;
        let own = &means[next..next + stratum.picks().count()];
        next += own.len();
        mean += weight * own.iter().sum::<f64>() / own.len() as f64;
        if let [a, b] = own {
            let left = 1.0 - 2.0 / stratum.len as f64;
            variance += weight * weight * (a - b) * (a - b) / 4.0 * left;
        }
    }
    (mean, variance.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strata_cover_all_queries() {
        for (tokens, samples) in [(1, 8), (2, 2), (7, 256), (100, 8), (1_000, 999), (5, 5)] {
            let strata = strata(tokens, samples, 3);
            assert_eq!(strata.iter().map(|stratum| stratum.len).sum::<usize>(), tokens);
            let picks: Vec<_> = strata.iter().flat_map(Stratum::picks).collect();
            assert!(picks.is_sorted_by(|a, b| a < b) && picks[picks.len() - 1] < tokens);
        }
    }

    #[test]
    fn intervals_cover_the_mean() {
        let value = |token: usize| (splitmix64(token as u64) as f64 / u64::MAX as f64).powi(3);
        let tokens = 10_000;
        let truth = (0..tokens).map(value).sum::<f64>() / tokens as f64;
        let covered = (0..1_000).filter(|&seed| {
            let strata = strata(tokens, 200, seed);
            let means: Vec<_> = strata.iter().flat_map(Stratum::picks).map(value).collect();
            let (mean, error) = estimate(&strata, &means, tokens);
            (mean - truth).abs() <= 1.96 * error
        });
        let covered = covered.count();
        assert!((930..=965).contains(&covered), "{covered} of 1000");
    }
}
