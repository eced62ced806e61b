//! What is done to scores between the product of queries and keys and the softmax.
//!
//! A transform is a type parameter of both kernels: [`Transform::apply`] gives the new score,
//! [`Transform::pull`] takes a gradient back through it. Another transform is another
//! implementation here and another arm in `run.rs`, and nothing else.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::simd::Simd;
use crate::simd::math::tanh;

/// What is done to scores before the softmax.
///
/// ```
/// use longspan::{Attention, Layout, Pattern, Score, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(100, 100))?;
/// let gemma = Attention::new(layout).score(Score::Softcap(50.0));
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub enum Score {
    /// Nothing.
    #[default]
    Plain,
    /// `cap · tanh(score / cap)`: no score beyond ±cap (Gemma).
    Softcap(f32),
    /// `score − slope · |query − key|` with one slope per query head, by global positions (ALiBi).
    Alibi(Arc<[f32]>),
}

impl Score {
    pub(crate) fn check(&self, heads: usize) -> Result<()> {
        match self {
            Score::Plain => Ok(()),
            Score::Softcap(cap) if cap.is_finite() && *cap > 0.0 => Ok(()),
            Score::Softcap(cap) => Err(Error::Number {
                what: "the softcap",
                value: *cap,
                rule: "a positive, finite number",
            }),
            Score::Alibi(slopes) => {
                if slopes.len() != heads {
                    let (len, expected) = (slopes.len(), heads);
                    return Err(Error::Length { what: "the list of slopes", len, expected });
                }
                match slopes.iter().find(|slope| !slope.is_finite()) {
                    Some(&value) => {
                        Err(Error::Number { what: "a slope", value, rule: "a finite number" })
                    }
                    None => Ok(()),
                }
            }
        }
    }
}

/// Where the scores of a vector stand: tokens of the tile side by side in its lanes, one token of
/// the other kind for all of them. Positions count from a base that both share.
#[derive(Clone, Copy)]
pub(crate) struct Place<F> {
    /// Position of each lane's token.
    pub(crate) lanes: F,
    /// Position of the other token.
    pub(crate) other: F,
    /// The slope of each lane's query head.
    pub(crate) slopes: F,
}

/// A change of scores, and its derivative.
pub(crate) trait Transform: Copy + Send + Sync {
    /// Whether [`Place`] is looked at.
    const PLACED: bool;

    /// Whether scores stay as they are.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only matrix units ask"))]
    const NOTHING: bool = false;

    /// The new scores.
    fn apply<S: Simd>(self, simd: S, scores: S::F, place: Place<S::F>) -> S::F;

    /// Multiplies `gradient` with respect to new scores into that with respect to old ones.
    fn pull<S: Simd>(self, simd: S, new_scores: S::F, gradient: S::F) -> S::F;
}

/// No change.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl Transform for Plain {
    const PLACED: bool = false;
    const NOTHING: bool = true;

    #[inline(always)]
    fn apply<S: Simd>(self, _: S, scores: S::F, _: Place<S::F>) -> S::F {
        scores
    }

    #[inline(always)]
    fn pull<S: Simd>(self, _: S, _: S::F, gradient: S::F) -> S::F {
        gradient
    }
}

/// `cap · tanh(score / cap)`.
#[derive(Clone, Copy)]
pub(crate) struct Softcap(pub(crate) f32);

impl Transform for Softcap {
    const PLACED: bool = false;

    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, scores: S::F, _: Place<S::F>) -> S::F {
        let part = simd.div(scores, simd.splat(self.0));
        simd.mul(simd.splat(self.0), tanh(simd, part))
    }

    #[inline(always)]
    fn pull<S: Simd>(self, simd: S, new_scores: S::F, gradient: S::F) -> S::F {
        let part = simd.div(new_scores, simd.splat(self.0));
        simd.mul(gradient, simd.fnma(part, part, simd.splat(1.0)))
    }
}

/// `score − slope · |query − key|`.
#[derive(Clone, Copy)]
pub(crate) struct Alibi;

impl Transform for Alibi {
    const PLACED: bool = true;

    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, scores: S::F, place: Place<S::F>) -> S::F {
        let distance = simd.abs(simd.sub(place.lanes, place.other));
        simd.fnma(place.slopes, distance, scores)
    }

    #[inline(always)]
    fn pull<S: Simd>(self, _: S, _: S::F, gradient: S::F) -> S::F {
        gradient
    }
}
