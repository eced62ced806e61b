//! Gather and scatter of token rows between tensors and messages.
//!
//! A message has `[batch, head, token, dim]` of some heads and tokens of a tensor.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{Element, View};

use crate::layouts::CompiledSchedule;

/// Copies the rows of some heads and tokens to the front of `into`; returns the remaining bytes.
pub(super) fn gather<'b, E: Element + Pod>(
    view: &View<'_, E>,
    heads: &[usize],
    tokens: &[usize],
    into: &'b mut [u8],
) -> &'b mut [u8] {
    let dims = view.dims();
    let elements = dims.batch * heads.len() * tokens.len() * dims.dim;
    let (mine, rest) = into.split_at_mut(elements * size_of::<E>());
    let rows: &mut [E] = cast_slice_mut(mine);
    let mut rows = rows.chunks_exact_mut(dims.dim);
    for entry in 0..dims.batch {
        for &head in heads {
            for &token in tokens {
                view.copy_row(entry, token, head, rows.next().expect("one row per token"));
            }
        }
    }
    rest
}

/// Some heads and tokens of a tensor `[batch, head, token, …]`.
#[derive(Clone, Copy)]
pub(super) struct Chosen<'a> {
    /// Heads and tokens of the tensor.
    pub(super) of: (usize, usize),
    pub(super) heads: &'a [usize],
    pub(super) tokens: &'a [usize],
}

/// The query heads of a band and some tokens, of `of` tokens.
pub(super) fn of_band<'a>(
    compiled: &'a CompiledSchedule,
    band: usize,
    of: usize,
    tokens: &'a [usize],
) -> Chosen<'a> {
    let heads = &compiled.schedule.bands[band].heads;
    Chosen { of: (compiled.problem.heads, of), heads, tokens }
}

impl Chosen<'_> {
    /// The row of each, in order; `rows` is the number of all rows.
    fn rows(&self, rows: usize) -> impl Iterator<Item = usize> + '_ {
        let (heads, tokens) = self.of;
        let batch = rows.checked_div(heads * tokens).unwrap_or(0);
        (0..batch).flat_map(move |entry| {
            self.heads.iter().flat_map(move |head| {
                let first = (entry * heads + head) * tokens;
                self.tokens.iter().map(move |token| first + token)
            })
        })
    }

    /// Copies one f32 per chosen row to the front of `into`; returns the remaining bytes.
    pub(super) fn gather<'b>(&self, list: &[f32], into: &'b mut [u8]) -> &'b mut [u8] {
        let rows: Vec<f32> = self.rows(list.len()).map(|row| list[row]).collect();
        let (mine, rest) = into.split_at_mut(size_of_val(&rows[..]));
        mine.copy_from_slice(cast_slice(&rows));
        rest
    }

    /// Copies the chosen rows of f32 `[batch, head, token, dim]`.
    pub(super) fn gather_sums(&self, list: &[f32], dim: usize, into: &mut [f32]) {
        let rows = self.rows(list.len() / dim.max(1));
        for (row, into) in rows.zip(into.chunks_exact_mut(dim.max(1))) {
            into.copy_from_slice(&list[row * dim..][..dim]);
        }
    }

    /// Adds rows to the chosen ones of f32 `[batch, head, token, dim]`.
    pub(super) fn scatter(&self, into: &mut [f32], dim: usize, from: &[f32]) {
        let rows = self.rows(into.len() / dim.max(1));
        for (row, from) in rows.zip(from.chunks_exact(dim.max(1))) {
            let to = &mut into[row * dim..][..dim];
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }

    /// A tensor of all rows, `empty` but for the chosen ones.
    pub(super) fn spread<T: Copy>(&self, batch: usize, dim: usize, empty: T, from: &[T]) -> Vec<T> {
        let rows = batch * self.of.0 * self.of.1;
        let mut all = vec![empty; rows * dim];
        for (row, from) in self.rows(rows).zip(from.chunks_exact(dim.max(1))) {
            all[row * dim..][..dim].copy_from_slice(from);
        }
        all
    }
}

/// The first `count` elements, and the bytes behind them.
pub(super) fn elements<E: Pod>(bytes: &[u8], count: usize) -> (&[E], &[u8]) {
    let (mine, rest) = bytes.split_at(count * size_of::<E>());
    (cast_slice(mine), rest)
}
