//! What is done to scores between the product of queries and keys and the softmax, and to
//! probabilities behind it.
//!
//! [`Score`] and [`Dropout`] are what callers set, [`Additions`] what kernels read: where there is
//! nothing to do they have none, and run the same instructions as if this file did not exist.

use std::sync::Arc;

use longspan_pattern::splitmix64;

use crate::error::{Error, Result};
use crate::simd::{WIDEST, is_kept};

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
    pub(crate) bias_table: Option<BiasTable>,
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

    /// `score + table[head, query − key]`, distances clamped to those of the table (T5).
    #[must_use]
    pub fn bias_table(mut self, table: BiasTable) -> Self {
        self.bias_table = Some(table);
        self
    }

    /// Whether biases depend on positions.
    pub(crate) fn is_positional(&self) -> bool {
        self.alibi_slopes.is_some() || self.bias_table.is_some()
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
        if let Some(BiasTable { heads: len, .. }) = self.bias_table
            && len != heads
        {
            let what = "the first axis of the bias table, query heads,";
            return Err(Error::Length { what, len, expected: heads });
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
        if let Some(table) = &self.bias_table {
            own.bias_table = Some(table.of_heads(first, step, count));
        }
        own
    }
}

/// A relative-position table: a bias per query head and distance `query − key`, clamped to
/// `−right..=left`. Clones share memory.
///
/// ```
/// use longspan::{Attention, BiasTable, Layout, Pattern, Score, Shape};
///
/// // Two heads; keys right of the query, at it, one left of it, and two or more.
/// let values = [-9.0, 0.5, 0.25, 0.125, -9.0, 1.0, 0.5, 0.25];
/// let table = BiasTable::new(&values, 2, 1)?;
/// let layout = Layout::compile(&Pattern::full(), &Shape::new(100, 100))?;
/// let attention = Attention::new(layout).bias_table(table);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct BiasTable {
    heads: usize,
    left: usize,
    right: usize,
    /// Rows of distances, from `−right` on and from `left` on, with the outermost ones repeated
    /// `WIDEST` times more: a vector that starts within reach of the clamped distances is in the row.
    ascending: Arc<[f32]>,
    descending: Arc<[f32]>,
}

impl BiasTable {
    /// The farthest distances that a table may have: f32 holds those of any pair exactly up to there.
    pub const MAX_DISTANCE: usize = 1 << 23;

    /// A table of `left + 1 + right` values per head: `values[head, clamp(query − key, −right, left) +
    /// right]`.
    pub fn new(values: &[f32], left: usize, right: usize) -> Result<Self> {
        let farthest = left.max(right);
        if farthest > Self::MAX_DISTANCE {
            let (what, rule) = ("the farthest distance of the bias table", "at most 2^23");
            return Err(Error::Number { what, value: farthest as f32, rule });
        }
        let len = left + right + 1;
        if !values.len().is_multiple_of(len) {
            let expected = values.len().div_ceil(len) * len;
            let what = "the bias table, left + right + 1 values per query head,";
            return Err(Error::Length { what, len: values.len(), expected });
        }
        if let Some(&value) = values.iter().find(|value| !value.is_finite()) {
            let what = "a value of the bias table";
            return Err(Error::Number { what, value, rule: "a finite number" });
        }
        let padded = |row: &[f32], order: &dyn Fn(usize) -> usize| -> Vec<f32> {
            let clamped = |index: usize| index.saturating_sub(WIDEST).min(len - 1);
            (0..len + 2 * WIDEST).map(|index| row[order(clamped(index))]).collect()
        };
        let rows = |order: &dyn Fn(usize) -> usize| {
            values.chunks(len).flat_map(|row| padded(row, order)).collect()
        };
        Ok(BiasTable {
            heads: values.len() / len,
            left,
            right,
            ascending: rows(&|index| index),
            descending: rows(&|index| len - 1 - index),
        })
    }

    /// Values of all heads.
    pub(crate) fn values(&self) -> usize {
        self.heads * (self.left + self.right + 1)
    }

    fn of_heads(&self, first: usize, step: usize, count: usize) -> BiasTable {
        let row = self.left + self.right + 1 + 2 * WIDEST;
        let own = |rows: &[f32]| {
            rows.chunks(row).skip(first).step_by(step).take(count).flatten().copied().collect()
        };
        let (ascending, descending) = (own(&self.ascending), own(&self.descending));
        BiasTable { heads: count, ascending, descending, ..*self }
    }
}

/// A table as kernels read it.
#[derive(Clone, Copy)]
pub(crate) struct Lookup<'a> {
    ascending: &'a [f32],
    descending: &'a [f32],
    left: usize,
    right: usize,
}

impl<'a> Lookup<'a> {
    /// Values per head.
    pub(crate) fn len(&self) -> usize {
        self.left + self.right + 1
    }

    /// Elements per head of what is looked up in.
    pub(crate) fn row(&self) -> usize {
        self.len() + 2 * WIDEST
    }

    /// The ascending row of a head.
    pub(crate) fn ascending(&self, head: usize) -> &'a [f32] {
        &self.ascending[head * self.row()..][..self.row()]
    }

    /// The descending row of a head.
    pub(crate) fn descending(&self, head: usize) -> &'a [f32] {
        &self.descending[head * self.row()..][..self.row()]
    }

    /// The bias of a distance; 0 for a head that the table hasn't got.
    pub(crate) fn bias(&self, head: usize, distance: f32) -> f32 {
        let index = head * self.row() + self.ascending_index(distance);
        if head * self.row() < self.ascending.len() { self.ascending[index] } else { 0.0 }
    }

    /// Where the values of `distance` and those above it lie in an ascending row: at least `WIDEST`
    /// elements before its end.
    #[inline(always)]
    pub(crate) fn ascending_index(&self, distance: f32) -> usize {
        self.clamped(distance as i64 + self.right as i64)
    }

    /// Where the values of `distance` and those below it lie in a descending row: likewise.
    #[inline(always)]
    pub(crate) fn descending_index(&self, distance: f32) -> usize {
        self.clamped(self.left as i64 - distance as i64)
    }

    #[inline(always)]
    fn clamped(&self, index: i64) -> usize {
        let widest = WIDEST as i64;
        (index + widest).clamp(0, self.len() as i64 + widest) as usize
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

    /// Whether a pair is kept: the words of its query, and the key's position.
    pub(crate) fn keeps(&self, words: [u32; 2], key: i64) -> bool {
        is_kept(key as u32, words, self.threshold())
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
    pub(crate) table: Option<Lookup<'a>>,
    pub(crate) dropout: Option<Dropout>,
    /// Query heads of the call.
    pub(crate) heads: usize,
}

impl<'a> Additions<'a> {
    /// Those of a call, if it has any.
    pub(crate) fn of(score: &'a Score, dropout: Option<Dropout>, heads: usize) -> Option<Self> {
        let softcap = score.softcap;
        let slopes = score.alibi_slopes.as_deref().unwrap_or(&[]);
        let table = score.bias_table.as_ref().map(|table| Lookup {
            ascending: &table.ascending,
            descending: &table.descending,
            left: table.left,
            right: table.right,
        });
        let dropout = dropout.filter(|dropout| dropout.p > 0.0);
        let additions = Additions { softcap, slopes, table, dropout, heads };
        (additions.change_scores() || dropout.is_some()).then_some(additions)
    }

    /// Whether scores change.
    pub(crate) fn change_scores(&self) -> bool {
        self.softcap.is_some() || self.is_positional()
    }

    /// Whether they depend on distances.
    pub(crate) fn is_positional(&self) -> bool {
        !self.slopes.is_empty() || self.table.is_some()
    }
}
