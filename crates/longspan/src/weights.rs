//! Attention weights of chosen rows, to look at.
//!
//! ```text
//! s_j = softcap(scale · q·k_j) + bias_j          over the keys j that the query may see
//! w_j = r_j · exp(s_j − m) / (Σ exp(s_j − m) + exp(sink − m))      r_j: 1, or dropout's factor
//! ```
//!
//! Kernels never hold a row of these. Here rows are few and written out, one task each: scores and
//! sums are f64, so a weight is as exact as its f32 is, and no kernel is needed for them.

use std::sync::{Mutex, PoisonError};

use longspan_pattern::{Layout, RunKind};

use crate::arguments::Inputs;
use crate::attention::Attention;
use crate::check;
use crate::dims::{Dims, Order, Sizes};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor, Tasks};
use crate::isa::Isa;
use crate::score::Additions;
use crate::tensor::{Tensor, View};

mod picture;

pub use picture::weights_svg;

/// Products of elements below which a call takes one thread: about a millisecond.
const SMALL: usize = 1 << 20;

/// Which rows [`Attention::attention_weights`] computes: queries, and all batch entries and query
/// heads unless some are chosen. Indices are in any order.
///
/// ```
/// use longspan::WeightRows;
///
/// // The last of 1,000 queries in two heads of the first batch entry.
/// let rows = WeightRows::new([999]).batch([0]).heads([0, 5]);
/// # let _ = rows;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightRows {
    queries: Vec<usize>,
    batch: Option<Vec<usize>>,
    heads: Option<Vec<usize>>,
    max_bytes: usize,
}

impl WeightRows {
    /// Default of [`max_bytes`](Self::max_bytes): 1 GiB, a row of a million keys 256 times.
    pub const MAX_BYTES: usize = 1 << 30;

    /// These queries, by their index in the tensor, of all batch entries and query heads.
    pub fn new(queries: impl Into<Vec<usize>>) -> Self {
        WeightRows { queries: queries.into(), batch: None, heads: None, max_bytes: Self::MAX_BYTES }
    }

    /// Only these batch entries.
    #[must_use]
    pub fn batch(mut self, entries: impl Into<Vec<usize>>) -> Self {
        self.batch = Some(entries.into());
        self
    }

    /// Only these query heads.
    #[must_use]
    pub fn heads(mut self, heads: impl Into<Vec<usize>>) -> Self {
        self.heads = Some(heads.into());
        self
    }

    /// Memory limit of the weights, beyond which calls fail with [`Error::TooManyWeights`];
    /// [`MAX_BYTES`](Self::MAX_BYTES) by default.
    #[must_use]
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// The axes of the weights of such rows, where `q` has the rows and there are so many keys:
    /// batch entries, rows as `tokens`, heads, and keys as `dim`.
    ///
    /// ```
    /// use longspan::{Dims, WeightRows};
    ///
    /// let q = Dims { batch: 2, tokens: 1_000, heads: 8, dim: 64 };
    /// let dims = WeightRows::new([5, 7]).heads([3]).dims(q, 1_000)?;
    /// assert_eq!(dims, Dims { batch: 2, tokens: 2, heads: 1, dim: 1_000 });
    /// assert!(WeightRows::new([1_000]).dims(q, 1_000).is_err());
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn dims(&self, q: Dims, keys: usize) -> Result<Dims> {
        let count = |axis, chosen: Option<&Vec<usize>>, len| {
            let Some(chosen) = chosen else { return Ok(len) };
            match chosen.iter().find(|&&index| index >= len) {
                Some(&index) => Err(Error::WeightRow { axis, index, len }),
                None => Ok(chosen.len()),
            }
        };
        let dims = Dims {
            batch: count("batch entry", self.batch.as_ref(), q.batch)?,
            tokens: count("query", Some(&self.queries), q.tokens)?,
            heads: count("query head", self.heads.as_ref(), q.heads)?,
            dim: keys,
        };
        let bytes = dims.elements().and_then(|elements| elements.checked_mul(size_of::<f32>()));
        match bytes {
            None => Err(Error::Overflow { dims }),
            Some(bytes) if bytes > self.max_bytes => {
                Err(Error::TooManyWeights { dims, bytes, limit: self.max_bytes })
            }
            Some(_) => Ok(dims),
        }
    }

    /// Batch entry, head and query of a row of the weights.
    fn row(&self, dims: Dims, row: usize) -> (usize, usize, usize) {
        let pick = |chosen: &Option<Vec<usize>>, index: usize| {
            chosen.as_ref().map_or(index, |chosen| chosen[index])
        };
        let (head, query) = (row / dims.tokens, self.queries[row % dims.tokens]);
        (pick(&self.batch, head / dims.heads), pick(&self.heads, head % dims.heads), query)
    }
}

impl Attention {
    /// The weights of chosen queries over all keys: what values are multiplied by, f32, `[batch,
    /// head, row, key]`, 0 where a query does not see a key.
    ///
    /// All options apply: scale, score transform and biases; a sink logit takes its share, so that
    /// rows of its head sum to less than 1; weights that dropout keeps are multiplied by `1 / (1 −
    /// p)`, and the others are 0. A row that sees no key is 0. Elements are widened and scores are
    /// f64, whatever the instruction set, the precision and the components of a forward pass.
    ///
    /// The weights of all rows of a long sequence are more than memory holds: calls are refused above
    /// [`WeightRows::max_bytes`]. Time is that of the pairs of the rows, not of the whole pattern.
    ///
    /// ```
    /// use longspan::{Attention, Dims, Inputs, Layout, Order, Pattern, Shape, Tensor, WeightRows};
    ///
    /// let pattern: Pattern = "causal & (window(8, 0) | sinks(2))".parse()?;
    /// let attention = Attention::new(Layout::compile(&pattern, &Shape::new(100, 100))?);
    /// let dims = Dims { batch: 1, tokens: 100, heads: 2, dim: 8 };
    /// let data: Vec<f32> = (0..1_600).map(|i| (i as f32).sin()).collect();
    /// let x = Tensor::new(data, dims, Order::Bhsd)?;
    ///
    /// let weights = attention.attention_weights(x.view(), x.view(), &WeightRows::new([0, 50]))?;
    /// assert_eq!(weights.dims(), Dims { batch: 1, tokens: 2, heads: 2, dim: 100 });
    /// // Query 50 sees two sinks and nine keys of its window.
    /// let row = &weights.as_slice()[100..200];
    /// assert_eq!(row.iter().filter(|&&weight| weight > 0.0).count(), 11);
    /// assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn attention_weights<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        rows: &WeightRows,
    ) -> Result<Tensor<f32>> {
        let mut weights = Tensor::zeros(rows.dims(q.dims(), k.dims().tokens)?, Order::Bhsd)?;
        self.attention_weights_into(q, k, rows, weights.as_mut_slice(), Hook::none())?;
        Ok(weights)
    }

    /// The same, written to a list of [as many](WeightRows::dims) elements, `[batch, head, row,
    /// key]`.
    pub fn attention_weights_into<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        rows: &WeightRows,
        into: &mut [f32],
        hook: Hook<'_>,
    ) -> Result<()> {
        // Values only have to fit the keys, and are not read.
        let sizes = check::inputs(&self.options, &self.layouts, &Inputs::new(q, k, k))?;
        let dims = rows.dims(q.dims(), sizes.keys)?;
        check::elements("the list of weights", into.len(), dims)?;
        Isa::choose(self.options.isa)?;
        if into.is_empty() {
            return Ok(());
        }
        let weights = Weights { attention: self, sizes, q, k };
        let products = into.len().saturating_mul(sizes.dim);
        let each: Vec<Mutex<&mut [f32]>> = into.chunks_mut(sizes.keys).map(Mutex::new).collect();
        let threads = if products < SMALL { 1 } else { each.len() };
        let monitor = Monitor::new(hook);
        let workers = self.options.workers()?.at_most(threads);
        Tasks::counted(each.len(), &monitor).run(workers, &|row| {
            let mut into = each[row].lock().unwrap_or_else(PoisonError::into_inner);
            weights.write(rows.row(dims, row), &mut into, &monitor);
        })
    }
}

/// Queries and keys of a call.
struct Weights<'a, E> {
    attention: &'a Attention,
    sizes: Sizes,
    q: View<'a, E>,
    k: View<'a, E>,
}

impl<E: Element> Weights<'_, E> {
    /// Writes one row; returns early where the call is to stop.
    fn write(
        &self,
        (entry, head, query): (usize, usize, usize),
        into: &mut [f32],
        monitor: &Monitor<'_>,
    ) {
        let Weights { attention: Attention { layouts, options, .. }, sizes, q, k } = self;
        let layout = layouts.get(entry, head);
        let additions = Additions::of(&options.score, options.dropout, sizes.heads);
        let key_head = head / (sizes.heads / sizes.key_heads);
        let scale = options.scale.map_or(1.0 / (sizes.dim as f64).sqrt(), f64::from);
        let mut narrow = vec![E::default(); sizes.dim];
        let mut widened = |view: &View<'_, E>, token, head, into: &mut Vec<f64>| {
            view.copy_row(entry, token, head, &mut narrow);
            into.clear();
            into.extend(narrow.iter().map(|x| f64::from(x.to_f32())));
        };
        let (mut own, mut other) = (Vec::new(), Vec::new());
        widened(q, query, head, &mut own);

        let keys = active_keys(layout, query);
        let mut scores = Vec::with_capacity(keys.len());
        for (count, &key) in keys.iter().enumerate() {
            if count % 1_024 == 0 && monitor.poll_in_task() {
                return;
            }
            widened(k, key, key_head, &mut other);
            scores.push(scale * dot(&own, &other));
        }
        if let Some(additions) = &additions {
            additions.change(layout, (head, query), &keys, &mut scores);
        }

        into.fill(0.0);
        let sink = options.sink_logits.as_ref().map(|logits| f64::from(logits[head]));
        let greatest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        if greatest == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
            return;
        }
        // NaN stays in the total, and makes the whole row NaN, as in a forward pass.
        let total: f64 = scores.iter().copied().chain(sink).map(|s| (s - greatest).exp()).sum();
        let dropout = additions.and_then(|additions| additions.dropout).map(|dropout| {
            let position = layout.query_positions().get(query).unwrap_or(0);
            (dropout, dropout.query_words(entry, head, sizes.heads, position))
        });
        let factor = |key| match dropout {
            None => 1.0,
            Some((dropout, words)) => {
                let position = layout.key_positions().get(key).unwrap_or(0);
                if dropout.keeps(words, position) { 1.0 / (1.0 - dropout.p) } else { 0.0 }
            }
        };
        for (&key, score) in keys.iter().zip(&scores) {
            into[key] = (factor(key) * (score - greatest).exp() / total) as f32;
        }
    }
}

impl Additions<'_> {
    /// Changes the scores of a query's keys, scaled already, in f64.
    fn change(
        &self,
        layout: &Layout,
        (head, query): (usize, usize),
        keys: &[usize],
        scores: &mut [f64],
    ) {
        if let Some(cap) = self.softcap.map(f64::from) {
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
        if !self.is_positional() {
            return;
        }
        let Ok(mut positions) = layout.score_positions() else { return };
        let position = positions.query(query);
        let slope = self.slopes.get(head).copied().map_or(0.0, f64::from);
        for (&key, score) in keys.iter().zip(scores) {
            let distance = position - positions.key(key);
            let bias = self.table.map_or(0.0, |table| table.bias(head, distance as f32));
            *score += f64::from(bias) - slope * distance.unsigned_abs() as f64;
        }
    }
}

/// The keys that a query may see, ascending.
fn active_keys(layout: &Layout, query: usize) -> Vec<usize> {
    let (row, within) = (query / layout.block().get(), query % layout.block().get());
    let per_query = layout.block().words();
    let mut masks = layout.masks();
    let mut keys = Vec::new();
    for run in layout.row(row as u32) {
        let end = layout.column_tokens(run.end() - 1).end;
        if run.kind() == RunKind::Full {
            keys.extend(layout.column_tokens(run.start).start..end);
            continue;
        }
        for column in run.start..run.end() {
            let first = layout.column_tokens(column).start;
            let mask = masks.get(row as u32, column, run);
            for (word, &bits) in mask[within * per_query..][..per_query].iter().enumerate() {
                let ones = (0..64).filter(|bit| bits >> bit & 1 != 0);
                keys.extend(ones.map(|bit| first + word * 64 + bit));
            }
        }
    }
    keys
}

/// In four sums, which a vector holds.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, b) = (a.chunks_exact(4), b.chunks_exact(4));
    let rest: f64 = a.remainder().iter().zip(b.remainder()).map(|(x, y)| x * y).sum();
    let mut sums = [0.0; 4];
    for (a, b) in a.zip(b) {
        for (sum, (x, y)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += x * y;
        }
    }
    sums.iter().sum::<f64>() + rest
}
