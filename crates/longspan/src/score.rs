//! What is done to scores between the product of queries and keys and the softmax, and to
//! probabilities behind it.
//!
//! [`Score`] and [`Dropout`] are what callers set, [`Additions`] what kernels read: where there is
//! nothing to do they have none, and run the same instructions as if this file did not exist.

use std::sync::Arc;

use longspan_pattern::splitmix64;

use crate::error::{Error, Result};

/// What is done to scores before the softmax: `softcap(scale · q·k) + bias`, where `bias` is the sum
/// of ALiBi and a relative-position table. Each part is optional.
///
/// Both biases are functions of the distance of query and key. Positions are those that the
/// innermost pattern uses: global ones, or those within a sequence of `packed`.
///
/// ```
/// use longspan::{Attention, Layout, Pattern, Score, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(100, 100))?;
/// let score = Score::default().softcap(50.0).alibi_slopes([0.5, 0.25]);
/// let attention = Attention::new(layout).score(score);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Score {
    pub(crate) softcap: Option<f32>,
    pub(crate) alibi_slopes: Option<Arc<[f32]>>,
}

impl Score {
    /// `cap · tanh(score / cap)`: no score beyond ±cap (Gemma).
    #[must_use]
    pub fn softcap(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// `score − slope · |query − key|` with one slope per query head (ALiBi).
    #[must_use]
    pub fn alibi_slopes(mut self, slopes: impl Into<Arc<[f32]>>) -> Self {
        self.alibi_slopes = Some(slopes.into());
        self
    }

    /// Whether biases depend on positions.
    pub(crate) fn is_positional(&self) -> bool {
        self.alibi_slopes.is_some()
    }

    pub(crate) fn check(&self, heads: usize) -> Result<()> {
        if let Some(cap) = self.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            let rule = "a positive, finite number";
            return Err(Error::Number { what: "the softcap", value: cap, rule });
        }
        if let Some(slopes) = &self.alibi_slopes {
            if slopes.len() != heads {
                let (len, expected) = (slopes.len(), heads);
                return Err(Error::Length { what: "the list of slopes", len, expected });
            }
            if let Some(&value) = slopes.iter().find(|slope| !slope.is_finite()) {
                return Err(Error::Number { what: "a slope", value, rule: "a finite number" });
            }
        }
        Ok(())
    }

    /// That of every `step`-th head from `first` on, `count` of them.
    pub(crate) fn of_heads(&self, first: usize, step: usize, count: usize) -> Score {
        let mut own = self.clone();
        if let Some(slopes) = &self.alibi_slopes {
            own.alibi_slopes =
                Some(slopes[first..].iter().step_by(step).take(count).copied().collect());
        }
        own
    }
}

/// Dropout of probabilities: pairs are dropped with probability `p`, and the kept ones multiplied by
/// `1 / (1 − p)`. The denominator of the softmax is that of all pairs.
///
/// Whether a pair is kept is a function of the seed, the batch entry, the query head and the global
/// positions of query and key alone: the same in both passes, for any number of threads and ranks
/// and on every instruction set.
///
/// ```
/// use longspan::{Attention, Dropout, Layout, Pattern, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(100, 100))?;
/// let attention = Attention::new(layout).dropout(Dropout::new(0.1, 7)?);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    pub(crate) p: f64,
    pub(crate) seed: u64,
    /// The batch entry and query heads of a call that has some of them, as a caller counts.
    pub(crate) part: Option<HeadPart>,
}

/// One batch entry, and every `step`-th of `of` query heads from `first` on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HeadPart {
    pub(crate) entry: usize,
    pub(crate) first: usize,
    pub(crate) step: usize,
    pub(crate) of: usize,
}

impl Dropout {
    /// Drops pairs with probability `p`, from 0 to below 1.
    pub fn new(p: f64, seed: u64) -> Result<Self> {
        if (0.0..1.0).contains(&p) {
            return Ok(Dropout { p, seed, part: None });
        }
        let (what, rule) = ("the dropout probability", "a number from 0 to below 1");
        Err(Error::Number { what, value: p as f32, rule })
    }

    /// Pairs are kept where their word is at least this.
    pub(crate) fn threshold(&self) -> u32 {
        (self.p * (1_u64 << 32) as f64) as u32
    }

    /// What kept probabilities are multiplied by.
    pub(crate) fn factor(&self) -> f32 {
        (1.0 / (1.0 - self.p)) as f32
    }

    /// Two words per query, of which and the key's position the word of a pair is made.
    pub(crate) fn query_words(&self, entry: usize, head: usize, of: usize, query: i64) -> [u32; 2] {
        let (entry, head, of) = match self.part {
            Some(part) => (part.entry, part.first + part.step * head, part.of),
            None => (entry, head, of),
        };
        let stream = splitmix64(
            self.seed ^ (entry as u64).wrapping_mul(of as u64).wrapping_add(head as u64),
        );
        let word = splitmix64(stream ^ query as u64);
        [word as u32, (word >> 32) as u32]
    }
}

/// What kernels do to scores and probabilities: at least one of these.
#[derive(Clone, Copy)]
pub(crate) struct Additions<'a> {
    pub(crate) softcap: Option<f32>,
    /// A slope per query head; empty where there are none.
    pub(crate) slopes: &'a [f32],
    pub(crate) dropout: Option<Dropout>,
    /// Query heads of the call.
    pub(crate) heads: usize,
}

impl<'a> Additions<'a> {
    /// Those of a call, if it has any.
    pub(crate) fn of(score: &'a Score, dropout: Option<Dropout>, heads: usize) -> Option<Self> {
        let softcap = score.softcap;
        let slopes = score.alibi_slopes.as_deref().unwrap_or(&[]);
        let dropout = dropout.filter(|dropout| dropout.p > 0.0);
        let some = softcap.is_some() || !slopes.is_empty() || dropout.is_some();
        some.then_some(Additions { softcap, slopes, dropout, heads })
    }

    /// Whether scores change.
    pub(crate) fn change_scores(&self) -> bool {
        self.softcap.is_some() || !self.slopes.is_empty()
    }
}
