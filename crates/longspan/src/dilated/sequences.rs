//! Sequences of several lengths: which tokens are one, those of a batch entry, its valid keys, or each of
//! several that lie side by side. `parts` makes the components of one sequence at a time.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use longspan_pattern::residues::Members;
use longspan_pattern::{Pattern, Positions, Progression, Shape};

use super::Dilated;
use crate::check;
use crate::components::Place;
use crate::dims::{Dims, Sizes};
use crate::error::{Error, Result};

impl Dilated {
    /// For a batch with padding: only the keys `valid[entry]` of each batch entry are tokens. They are
    /// a sequence of their own, in which segments, offsets, [`within`](Self::within) and
    /// [`also`](Self::also) count from the first of them. Queries at other positions have output 0,
    /// log-sum-exp −∞ and no gradient, with sinks too.
    ///
    /// ```
    /// use longspan::{Dilated, Dims, Inputs, Order, Tensor};
    ///
    /// let dims = Dims { batch: 2, tokens: 40, heads: 2, dim: 8 };
    /// let data: Vec<f32> = (0..dims.elements().unwrap()).map(|i| (i as f32).sin()).collect();
    /// let x = Tensor::new(data, dims, Order::Bshd)?;
    /// // The second entry is padded on the left.
    /// let dilated = Dilated::new([(8, 1), (16, 2)])?.padded([0..40, 10..40]);
    /// let output = dilated.forward(Inputs::new(x.view(), x.view(), x.view()))?;
    /// assert_eq!(output.out.view().get(1, 9, 0, 0), Some(0.0));
    /// assert_eq!(output.lse[2 * 40 + 9], f32::NEG_INFINITY);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    ///
    /// A [pattern](crate::Pattern::dilated) under padding counts from position 0 instead.
    #[must_use]
    pub fn padded(mut self, valid: impl IntoIterator<Item = Range<usize>>) -> Self {
        self.sequences = Sequences::Padded(valid.into_iter().collect());
        self
    }

    /// For sequences that lie side by side in tensors of batch 1: sequence `i` has the queries
    /// `cu_seqlens_q[i]..cu_seqlens_q[i + 1]` and keys likewise, and segments, offsets,
    /// [`within`](Self::within) and [`also`](Self::also) count from its first key. With fewer queries than
    /// keys the queries of a sequence are its last. Dropout of sequence `i` is that of batch entry `i`.
    ///
    /// ```
    /// use longspan::Dilated;
    ///
    /// let packed = Dilated::new([(8, 1), (16, 2)])?.packed_cu_seqlens(&[0, 10, 40], &[0, 10, 40])?;
    /// assert!(Dilated::new([(8, 1)])?.packed_cu_seqlens(&[0, 10], &[0, 7, 10]).is_err());
    /// # let _ = packed;
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn packed_cu_seqlens(mut self, cu_seqlens_q: &[u64], cu_seqlens_k: &[u64]) -> Result<Self> {
        self.sequences = Sequences::packed(cu_seqlens_q, cu_seqlens_k)?;
        Ok(self)
    }

    /// Whether padding and packed sequences, if any, are those of `batch` sequences of `tokens` tokens
    /// that are queries and keys.
    pub fn check_lengths(&self, batch: usize, tokens: usize) -> Result<()> {
        self.sequences.check(batch, tokens, tokens)
    }

    /// Sets log-sum-exps of rows outside of all sequences to −∞, whatever sinks made of them. The lists
    /// are of `dims`, whose tokens are queries at these positions.
    pub fn exclude(
        &self,
        queries: &Positions,
        dims: Dims,
        lse: &mut [f32],
        mut lse_lo: Option<&mut [f32]>,
    ) -> Result<()> {
        let Sequences::Padded(_) = self.sequences else { return Ok(()) };
        let (rows, tokens) = (dims.rows(), dims.tokens);
        check::axis("queries", "tokens", queries.len(), tokens, "as the rows")?;
        let given = [Some(lse.len()), lse_lo.as_ref().map(|list| list.len())];
        if let Some(&len) = given.iter().flatten().find(|len| **len != rows) {
            return Err(Error::Length { what: "lse", len, expected: rows });
        }
        for entry in 0..dims.batch {
            let mut token = 0;
            for Progression { start, step, len } in queries.progressions() {
                for i in 0..len {
                    if self.sequences.excludes(entry, start + (step * i) as i64) {
                        for head in 0..dims.heads {
                            let row = (entry * dims.heads + head) * tokens + token;
                            lse[row] = f32::NEG_INFINITY;
                            if let Some(list) = &mut lse_lo {
                                list[row] = 0.0;
                            }
                        }
                    }
                    token += 1;
                }
            }
        }
        Ok(())
    }

    /// The sequences of some queries and keys of a sequence of `tokens` tokens.
    pub(super) fn sequences_of(
        &self,
        tokens: usize,
        queries: &Positions,
        keys: &Positions,
    ) -> Result<Vec<Sequence>> {
        self.check_lengths(self.sequences.batch().unwrap_or(1), tokens)?;
        let axis = QueryAxis { offset: 0, count: tokens };
        Ok(self.sequences.split(tokens, axis, queries, keys))
    }

    /// The queries of a call. Those of packed sequences count by themselves.
    pub(super) fn query_axis(&self, sizes: &Sizes) -> QueryAxis {
        let Sizes { queries, keys, .. } = *sizes;
        let last = keys as i64 - queries as i64;
        let offset = match self.sequences {
            Sequences::Packed { .. } => 0,
            _ => self.query_offset.unwrap_or(last),
        };
        QueryAxis { offset, count: queries }
    }
}

/// Where segments begin to count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Sequences {
    /// All tokens of every batch entry.
    #[default]
    Entries,
    /// The valid keys of each batch entry, and the queries at their positions.
    Padded(Arc<[Range<usize>]>),
    /// Several side by side in one batch entry: where each begins, and the end.
    Packed { queries: Arc<[u64]>, keys: Arc<[u64]> },
}

impl fmt::Display for Sequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sequences::Entries => Ok(()),
            Sequences::Padded(valid) => write!(f, ", keys {valid:?}"),
            Sequences::Packed { queries, keys } if queries == keys => {
                write!(f, ", cu_seqlens {keys:?}")
            }
            Sequences::Packed { queries, keys } => {
                write!(f, ", cu_seqlens {queries:?} and {keys:?}")
            }
        }
    }
}

/// The queries of a call: where their axis begins, in positions of keys, and how many there are.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueryAxis {
    pub(super) offset: i64,
    pub(super) count: usize,
}

/// Queries and keys of one sequence.
#[derive(Debug)]
pub(super) struct Sequence {
    /// `None` where every batch entry is such a sequence.
    pub(super) place: Option<Place>,
    /// That of all its tokens.
    pub(super) shape: Shape,
    pub(super) queries: Members,
    pub(super) keys: Members,
}

impl Sequences {
    pub(super) fn packed(queries: &[u64], keys: &[u64]) -> Result<Self> {
        Pattern::packed_cu_seqlens(queries, keys, Pattern::full())?;
        Ok(Sequences::Packed { queries: queries.into(), keys: keys.into() })
    }

    /// Whether they are those of tensors with so many batch entries, queries and keys.
    pub(super) fn check(&self, batch: usize, queries: usize, keys: usize) -> Result<()> {
        match self {
            Sequences::Entries => Ok(()),
            Sequences::Padded(valid) => {
                check::axis("padding", "batch", valid.len(), batch, "as q")?;
                let wrong = |range: &Range<usize>| range.start > range.end || range.end > keys;
                match valid.iter().position(wrong) {
                    Some(entry) => Err(Error::Padding { entry, valid: valid[entry].clone(), keys }),
                    None => Ok(()),
                }
            }
            Sequences::Packed { queries: cu_seqlens_q, keys: cu_seqlens_k } => {
                check::axis("q", "batch", batch, 1, "packed sequences lie side by side")?;
                let end = |list: &[u64]| list.last().map_or(0, |&end| end as usize);
                check::axis("cu_seqlens_q", "end", end(cu_seqlens_q), queries, "the tokens of q")?;
                check::axis("cu_seqlens_k", "end", end(cu_seqlens_k), keys, "the tokens of k")
            }
        }
    }

    /// The batch entries that they are of, where these differ.
    pub(super) fn batch(&self) -> Option<usize> {
        match self {
            Sequences::Entries => None,
            Sequences::Padded(valid) => Some(valid.len()),
            Sequences::Packed { .. } => Some(1),
        }
    }

    /// The sequences that have any of the queries and of the keys at the given positions. `tokens` are
    /// those of the key axis.
    pub(super) fn split(
        &self,
        tokens: usize,
        axis: QueryAxis,
        queries: &Positions,
        keys: &Positions,
    ) -> Vec<Sequence> {
        let QueryAxis { offset, count } = axis;
        let mut found = match self {
            Sequences::Entries => vec![Sequence {
                place: None,
                shape: Shape::new(count, tokens).query_offset(offset),
                queries: Members::all(queries),
                keys: Members::all(keys),
            }],
            Sequences::Padded(valid) => {
                let of_entry = |(entry, valid): (usize, &Range<usize>)| {
                    let bounds = [valid.start as i64, valid.end as i64];
                    let [first, end] = bounds;
                    let [Some(queries), Some(keys)] = [queries, keys]
                        .map(|all| Members::in_ranges(all, &bounds, |_| -first).pop())
                    else {
                        unreachable!("one range");
                    };
                    let from = offset.clamp(first, end);
                    let to = (offset + count as i64).clamp(from, end);
                    let shape = Shape::new((to - from) as usize, valid.len());
                    Sequence {
                        place: Some(Place { entry, sequence: entry }),
                        shape: shape.query_offset(from - first),
                        queries,
                        keys,
                    }
                };
                valid.iter().enumerate().map(of_entry).collect()
            }
            Sequences::Packed { queries: cu_seqlens_q, keys: cu_seqlens_k } => {
                let length = |list: &[u64], sequence| (list[sequence + 1] - list[sequence]) as i64;
                // With fewer queries than keys they are the last.
                let shift = |sequence: usize| {
                    let before = cu_seqlens_q[sequence] as i64;
                    length(cu_seqlens_k, sequence) - length(cu_seqlens_q, sequence) - before
                };
                let bounds = |list: &[u64]| list.iter().map(|&b| b as i64).collect::<Vec<_>>();
                let queries = Members::in_ranges(queries, &bounds(cu_seqlens_q), shift);
                let starts = bounds(cu_seqlens_k);
                let keys = Members::in_ranges(keys, &starts, |sequence| -starts[sequence]);
                let sequence = |(sequence, (queries, keys))| {
                    let tokens = length(cu_seqlens_k, sequence) as usize;
                    Sequence {
                        place: Some(Place { entry: 0, sequence }),
                        shape: Shape::new(length(cu_seqlens_q, sequence) as usize, tokens),
                        queries,
                        keys,
                    }
                };
                queries.into_iter().zip(keys).enumerate().map(sequence).collect()
            }
        };
        found.retain(|sequence| !sequence.queries.is_empty() && !sequence.keys.is_empty());
        found
    }

    /// Whether a position of a query is in none of the sequences of a batch entry.
    pub(super) fn excludes(&self, entry: usize, position: i64) -> bool {
        match self {
            Sequences::Padded(valid) => {
                !usize::try_from(position).is_ok_and(|token| valid[entry].contains(&token))
            }
            _ => false,
        }
    }
}
