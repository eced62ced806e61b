//! Gather and scatter of token rows between tensors and messages.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use longspan::{Element, View};

/// Copies the rows of some tokens, `[batch, head, token, dim]`, to the front of `into`; returns the
/// remaining bytes.
pub(super) fn gather<'b, E: Element + Pod>(
    view: &View<'_, E>,
    tokens: &[usize],
    into: &'b mut [u8],
) -> &'b mut [u8] {
    let dims = view.dims();
    let elements = dims.batch * dims.heads * tokens.len() * dims.dim;
    let (mine, rest) = into.split_at_mut(elements * size_of::<E>());
    let rows: &mut [E] = cast_slice_mut(mine);
    let mut rows = rows.chunks_exact_mut(dims.dim);
    for entry in 0..dims.batch {
        for head in 0..dims.heads {
            for &token in tokens {
                view.copy_row(entry, token, head, rows.next().expect("one row per token"));
            }
        }
    }
    rest
}

/// Copies one f32 per row of some tokens, likewise.
pub(super) fn gather_rows<'b>(
    list: &[f32],
    of: usize,
    tokens: &[usize],
    into: &'b mut [u8],
) -> &'b mut [u8] {
    let heads = list.len().checked_div(of).unwrap_or(0);
    let (mine, rest) = into.split_at_mut(heads * tokens.len() * size_of::<f32>());
    let rows: &mut [f32] = cast_slice_mut(mine);
    for head in 0..heads {
        for (index, &token) in tokens.iter().enumerate() {
            rows[head * tokens.len() + index] = list[head * of + token];
        }
    }
    rest
}

/// Adds the rows of some tokens, `[head, token, dim]`, to those of all `of` tokens.
pub(super) fn scatter(into: &mut [f32], of: usize, dim: usize, tokens: &[usize], from: &[f32]) {
    let rows = into.len() / dim.max(1);
    let heads = rows.checked_div(of).unwrap_or(0);
    for head in 0..heads {
        for (index, &token) in tokens.iter().enumerate() {
            let to = &mut into[(head * of + token) * dim..][..dim];
            let from = &from[(head * tokens.len() + index) * dim..][..dim];
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }
}

/// The first `count` elements, and the bytes behind them.
pub(super) fn elements<E: Pod>(bytes: &[u8], count: usize) -> (&[E], &[u8]) {
    let (mine, rest) = bytes.split_at(count * size_of::<E>());
    (cast_slice(mine), rest)
}
