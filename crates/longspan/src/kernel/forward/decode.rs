//! The forward pass over few queries, as in decoding: memory is what limits.
//!
//! A vector of queries would be mostly empty. So keys stand side by side here, queries below each
//! other, and sums over keys run across vectors:
//!
//! ```text
//! for each key tile:
//!     S[queries × keys] ← Q · Kᵗ                   keys transposed, 64 at a time, or sums of products
//!     m' ← max(m, S);  a ← exp(m − m');  P ← exp(S − m')
//!     l ← a·l + ΣP;    A ← a·A + P · V             A[queries × dim]
//! ```

mod dots;
mod row;
mod scratch;
mod values;

use longspan_pattern::Masks;

use self::dots::{Dots, Weigh, dots_pay, place};
use self::row::RowSoftmax;
use self::scratch::Workspace;
use self::values::ValueRows;

use super::lists::{Lists, Piece, even};
use super::{Forward, MAX_KV_TILE, Stack, Target};
use crate::dtype::{Element, ElementType};
use crate::exec::Monitor;
use crate::exec::fault::{Site, fault};
use crate::gemm::{Beta, Fma, MicroKernel, Multiply, OVER_DIMS, OVER_TOKENS, Prefetch, Rows, Size};
use crate::kernel::adjust::Adjust;
use crate::kernel::finite::{AllFinite, left_out};
use crate::kernel::fused::FusedKernel;
use crate::kernel::pack::ToLanes;
use crate::kernel::{Scratch, padded};
use crate::simd::{LANES, Simd};
use crate::softmax;
use crate::tasks::Unit;
use crate::tensor::Strided;

/// The most queries × heads of the decode kernel.
pub(super) const MAX_LANES: usize = 16;

/// Words of a key tile's mask.
const WORDS: usize = MAX_KV_TILE / LANES;

/// What is known of the queries.
struct Queries {
    count: usize,
    /// m and l.
    maxima: [f32; MAX_LANES],
    totals: [f32; MAX_LANES],
    /// A bit per key of the key tile.
    bits: [[u64; WORDS]; MAX_LANES],
}

impl<X: FusedKernel> Forward<'_, X> {
    /// Computes a unit of one row of blocks with few queries; see [`rows`](Self::rows).
    ///
    /// # Safety
    ///
    /// That of [`rows`](Self::rows), for the one row of `stack`, which is that of `unit`; it must
    /// have at most `MAX_LANES` lanes.
    pub(super) unsafe fn decode(
        &self,
        stack: &mut Stack<'_, X::Element>,
        unit: &Unit,
        masks: &mut Masks<'_>,
        scratch: &mut Scratch,
        monitor: &Monitor<'_>,
    ) {
        let workspace = self.carve_decode(&mut scratch.elements);
        let row = unit.rows.0;
        // SAFETY: all functions here have the condition of `decode`, and `workspace` is what
        // `carve_decode` gave; it has `MAX_LANES` rows of sums of at least `value_dim` elements, as
        // the operation demands.
        unsafe {
            let mut queries = self.begin_decode(stack, &workspace, row);
            let lists = &mut scratch.lists;
            let masked =
                self.all_keys(stack, &workspace, unit, &mut queries, masks, lists, monitor);
            let (matrix, rows) = (workspace.sums.strided(), queries.count);
            let finite = AllFinite { matrix, rows, columns: self.value_dim };
            if masked && !self.tiles.simd().call(finite) {
                // As in `rows`: was it only 0 · ∞?
                stack.careful = true;
                queries = self.begin_decode(stack, &workspace, row);
                self.all_keys(stack, &workspace, unit, &mut queries, masks, lists, monitor);
            }
            if monitor.is_stopped() {
                return;
            }
            self.end_decode(stack, &workspace, row, &queries);
        }
    }

    /// Whether scores are sums of products of keys as they lie. Their order is another one than that of
    /// the backward pass: where one key has nearly all the weight, a probability computed there would have
    /// the errors of both sums in place of neither.
    fn keys_as_they_lie(&self, queries: usize) -> bool {
        !self.saves && dots_pay::<X::Simd>(queries, self.k.strides.dim, self.dim)
    }

    /// Copies the queries, and sets the state to what it starts from.
    ///
    /// # Safety
    ///
    /// That of [`decode`](Self::decode); `workspace` must be what [`carve_decode`](Self::carve_decode) gave,
    /// and used by nothing else.
    unsafe fn begin_decode(
        &self,
        stack: &Stack<'_, X::Element>,
        workspace: &Workspace,
        row: u32,
    ) -> Queries {
        let (stream, (first, tokens)) = (stack.stream, stack.tokens(row));
        let mut queries = Queries {
            count: tokens * stream.heads.len(),
            maxima: [f32::NEG_INFINITY; MAX_LANES],
            totals: [0.0; MAX_LANES],
            bits: [[0; WORDS]; MAX_LANES],
        };
        // SAFETY: `rows` demands tensors and a target with the queries of the row and the heads of
        // the stream. There are at most `MAX_LANES`, for which the room has rows of `query_row` and
        // `sum_row` elements; `place` gives a number below `dim`.
        unsafe {
            std::ptr::write_bytes(workspace.sums.first, 0, queries.count * self.sum_row());
            for query in 0..queries.count {
                let (head, token) = (stream.heads[query / tokens] as usize, first + query % tokens);
                let source = self.q.head(stream.entry, head, token);
                let as_they_lie = self.keys_as_they_lie(queries.count);
                for dim in 0..self.dim {
                    let at = match as_they_lie {
                        true => place::<X::Element, X::Simd>(self.k.strides.dim, self.dim, dim),
                        false => dim,
                    };
                    *workspace.queries.at(query, at).first = (*source.at(0, dim).first).to_f32();
                }
                for dim in self.dim..self.query_row() {
                    *workspace.queries.at(query, dim).first = 0.0;
                }
                if let Some(additions) = self.additions {
                    let (base, into) = (self.base(stack), workspace.query_terms.at(0, query));
                    additions.query_terms(
                        stream.layout,
                        (stream.entry, head),
                        (token, 1),
                        base,
                        into,
                    );
                }
                if let Some(state) = stack.target.state() {
                    let (m, l, acc) = state.row(stream.entry, head, token);
                    (queries.maxima[query], queries.totals[query]) = (*m, *l);
                    let sums = workspace.sums.at(query, 0).first;
                    std::ptr::copy_nonoverlapping(acc.as_ptr(), sums, self.value_dim);
                }
            }
        }
        queries
    }

    /// Writes what the queries have come to.
    ///
    /// # Safety
    ///
    /// That of [`begin_decode`](Self::begin_decode), which must have given `queries`.
    unsafe fn end_decode(
        &self,
        stack: &Stack<'_, X::Element>,
        workspace: &Workspace,
        row: u32,
        queries: &Queries,
    ) {
        let (stream, (first, tokens)) = (stack.stream, stack.tokens(row));
        for query in 0..queries.count {
            let (head, token) = (stream.heads[query / tokens] as usize, first + query % tokens);
            let (m, l) = (queries.maxima[query], queries.totals[query]);
            // SAFETY: as in `begin_decode`; the rows written are those of the unit, which no other
            // thread reads or writes.
            unsafe {
                let sums = workspace.sums.at(query, 0).first.cast_const();
                let sums = std::slice::from_raw_parts(sums, self.value_dim);
                let (to_m, to_l, acc) = match stack.target {
                    Target::Finish { output, .. } => {
                        let sink = self.sink_logits.map(|logits| logits[head]);
                        let finished = softmax::finish(m, l, sink);
                        output.write_lse((stream.entry, head, token), &finished);
                        let out = output.out.head(stream.entry, head, token);
                        for (dim, sum) in sums.iter().enumerate() {
                            *out.at(0, dim).first.cast_mut() =
                                Element::from_f32(sum * finished.factor);
                        }
                        continue;
                    }
                    Target::Extend(state) => state.row(stream.entry, head, token),
                    Target::Part(state, first) => state.row(0, 0, first + query),
                };
                (*to_m, *to_l) = (m, l);
                acc.copy_from_slice(sums);
            }
        }
    }

    /// Every key that the row sees, unless the call stops. Returns whether any were masked.
    ///
    /// # Safety
    ///
    /// That of [`begin_decode`](Self::begin_decode), which must have given `queries`.
    #[allow(clippy::too_many_arguments)]
    unsafe fn all_keys(
        &self,
        stack: &Stack<'_, X::Element>,
        workspace: &Workspace,
        unit: &Unit,
        queries: &mut Queries,
        masks: &mut Masks<'_>,
        lists: &mut Lists,
        monitor: &Monitor<'_>,
    ) -> bool {
        let (layout, row) = (stack.stream.layout, unit.rows.0);
        lists.shared.clear();
        lists.rest(layout, row, unit.columns);
        let mut masked = false;
        for pieces in lists.pieces.chunk_by(|a, b| a.to == b.from) {
            let (mut key, end) = (pieces[0].from, pieces[pieces.len() - 1].to);
            while key < end {
                if monitor.poll_in_task() {
                    return masked;
                }
                let keys = even(end - key, MAX_KV_TILE);
                let partial = see(stack, row, pieces, (key, keys), masks, queries);
                masked |= partial;
                // SAFETY: keys of pieces are the layout's, and `even` gives at most `MAX_KV_TILE`;
                // `see` has written the bits where some are masked.
                unsafe { self.decode_key_tile(stack, workspace, (key, keys), partial, queries) };
                key += keys;
            }
        }
        masked
    }

    /// A key tile: scores, softmax, sums of values.
    ///
    /// # Safety
    ///
    /// That of [`all_keys`](Self::all_keys); the keys must be the layout's, from 1 to
    /// `MAX_KV_TILE`.
    unsafe fn decode_key_tile(
        &self,
        stack: &Stack<'_, X::Element>,
        workspace: &Workspace,
        (key, keys): (usize, usize),
        masked: bool,
        queries: &mut Queries,
    ) {
        let (entry, head) = (stack.stream.entry, stack.stream.key_head);
        let simd = self.tiles.simd();
        // In f32, whatever the elements: nothing is gained by matrix units here.
        let tiles = Fma::<_, f32>::new(simd);
        let (count, value_row) = (queries.count, self.value_row());
        // SAFETY: `rows` demands tensors with the keys of the layout. The room has `MAX_LANES` rows
        // of `MAX_KV_TILE` scores and factors, a multiple of any vector's width, of `query_row` and
        // of `sum_row` elements, and terms of as many queries and keys; those of the queries there are
        // were written before, if only with elements without meaning. `sum_row` is at least `value_row`. `Fma` has sessions that
        // do nothing.
        unsafe {
            let source = self.k.head(entry, head, key);
            if self.keys_as_they_lie(count) {
                simd.call(Dots {
                    keys: source,
                    tokens: keys,
                    dims: self.dim,
                    queries: workspace.queries,
                    rows: count,
                    scores: workspace.scores,
                });
            } else {
                self.turn_and_multiply(source, keys, count, workspace);
            }
            if let Some(additions) = self.additions {
                let (layout, base) = (stack.stream.layout, self.base(stack));
                additions.key_terms(layout, (key, keys), base, workspace.key_terms);
                simd.call(Adjust {
                    additions,
                    scale: self.scale,
                    scores: workspace.scores,
                    rows: count,
                    lanes: keys.next_multiple_of(X::Simd::WIDTH),
                    queries_in_lanes: false,
                    queries: workspace.query_terms,
                    keys: workspace.key_terms,
                    derivatives: Rows { first: std::ptr::null_mut(), row: 0 },
                    factors: workspace.factors,
                });
            }
            for query in 0..count {
                let old = queries.maxima[query];
                let (maximum, sum) = simd.call(RowSoftmax {
                    scores: workspace.scores.at(query, 0).first,
                    keys,
                    scale: self.softmax_scale(),
                    bits: masked.then_some(&queries.bits[query]),
                    maximum: old,
                });
                if self.drops() {
                    for key in 0..keys {
                        *workspace.scores.at(query, key).first *=
                            *workspace.factors.at(query, key).first;
                    }
                }
                queries.maxima[query] = maximum;
                if maximum == old {
                    queries.totals[query] += sum;
                    continue;
                }
                let factor = (f64::from(old) - f64::from(maximum)).exp() as f32;
                queries.totals[query] = queries.totals[query] * factor + sum;
                let sums = workspace.sums.at(query, 0).first;
                for x in std::slice::from_raw_parts_mut(sums, value_row) {
                    *x *= factor;
                }
            }

            let values = self.v.head(entry, head, key);
            let careful = stack.careful && masked;
            if !dots_pay::<X::Simd>(count, self.v.strides.dim, self.value_dim) {
                let first = values.first.wrapping_offset(LANES as isize * values.row);
                let soon = Strided { first, ..values };
                tiles.multiply(Multiply {
                    target: workspace.sums,
                    keep: Beta::One,
                    left: workspace.scores.strided(),
                    right: self.value_rows(values, keys, careful, workspace),
                    size: Size { m: count, n: value_row, k: keys, piece: OVER_TOKENS },
                    ahead: Prefetch::of(soon, keys, self.value_dim),
                });
            } else if careful {
                let clean = self.value_rows(values, keys, careful, workspace);
                simd.call(self.weigh(clean.strided(), keys, count, workspace));
            } else {
                simd.call(self.weigh(values, keys, count, workspace));
            }
            if careful {
                left_out(values, keys, self.value_dim, |key, dim, x| {
                    for query in 0..count {
                        let p = *workspace.scores.at(query, key).first;
                        if p != 0.0 {
                            *workspace.sums.at(query, dim).first += p * x;
                        }
                    }
                });
            }
        }
    }

    fn weigh<E>(
        &self,
        values: Strided<E>,
        tokens: usize,
        rows: usize,
        workspace: &Workspace,
    ) -> Weigh<E> {
        let dims = self.value_dim;
        Weigh { values, tokens, dims, weights: workspace.scores, rows, sums: workspace.sums }
    }

    /// Scores, with keys transposed 64 at a time.
    ///
    /// # Safety
    ///
    /// That of [`decode_key_tile`](Self::decode_key_tile), for `tokens` readable keys and `rows`
    /// queries.
    unsafe fn turn_and_multiply(
        &self,
        keys: Strided<X::Element>,
        tokens: usize,
        rows: usize,
        workspace: &Workspace,
    ) {
        let simd = self.tiles.simd();
        for first in (0..tokens).step_by(LANES) {
            let some = (tokens - first).min(LANES);
            // SAFETY: `first + some` is at most `tokens`; the room has `dim` rows of `LANES` for
            // transposed keys, and scores up to `first + lanes`, which is at most `MAX_KV_TILE`,
            // since both are multiples of a vector's width.
            unsafe {
                let (source, dims, target) = (keys.at(first, 0), self.dim, workspace.transposed);
                simd.call(ToLanes { source, tokens: some, dims, target, lane: 0 });
                let lanes = padded(some, X::Simd::WIDTH);
                Fma::<_, f32>::new(simd).multiply(Multiply {
                    target: workspace.scores.at(0, first),
                    keep: Beta::Zero,
                    left: workspace.queries.strided(),
                    right: workspace.transposed,
                    size: Size { m: rows, n: lanes, k: self.dim, piece: OVER_DIMS },
                    ahead: Prefetch::NONE,
                });
            }
        }
    }

    /// Values as rows of whole f32 vectors: as they lie, or a copy, which may be a clean one.
    ///
    /// # Safety
    ///
    /// `keys` values, `MAX_KV_TILE` at most, must be readable; `workspace` must be what
    /// [`carve_decode`](Self::carve_decode) gave. What this gives is to be read, not written.
    unsafe fn value_rows(
        &self,
        values: Strided<X::Element>,
        keys: usize,
        clean: bool,
        workspace: &Workspace,
    ) -> Rows {
        let whole = values.column == 1 && self.value_row() == self.value_dim;
        if whole && !clean && values.row >= 0 && X::Element::TYPE == ElementType::F32 {
            return Rows { first: values.first.cast_mut().cast(), row: values.row as usize };
        }
        let (source, columns) = (values, self.value_dim);
        // SAFETY: the values are readable, as this function demands, and the room has `MAX_KV_TILE`
        // rows of `value_row` elements for them.
        unsafe {
            self.tiles.simd().call(ValueRows {
                source,
                keys,
                columns,
                clean,
                target: workspace.values,
            });
        }
        workspace.values
    }
}

/// Finds which keys of a key tile each query sees. Returns whether some don't see some.
fn see<E>(
    stack: &Stack<'_, E>,
    row: u32,
    pieces: &[Piece],
    (key, keys): (usize, usize),
    masks: &mut Masks<'_>,
    queries: &mut Queries,
) -> bool {
    let (layout, tokens) = (stack.stream.layout, stack.tokens(row).1);
    let per_row = layout.block().words();
    let inside = |piece: &&Piece| piece.from < key + keys && piece.to > key;
    let pieces = || pieces.iter().filter(inside);
    if pieces().all(|piece| piece.partial.is_none()) {
        return false;
    }
    let bits = &mut queries.bits[..queries.count];
    bits.iter_mut().for_each(|bits| bits.fill(0));
    for piece in pieces() {
        let (from, to) = (piece.from.max(key), piece.to.min(key + keys));
        let words = piece.partial.map(|(column, run)| {
            fault(Site::Mask);
            masks.get(row, column, &run)
        });
        for (query, bits) in bits.iter_mut().enumerate() {
            let words = words.map(|words| &words[query % tokens * per_row..][..per_row]);
            let (mut at, within) = (from, piece.from);
            while at < to {
                // As far as neither word ends.
                let (source, target) = ((at - within) % 64, (at - key) % 64);
                let count = (64 - source.max(target)).min(to - at);
                let word = words.map_or(u64::MAX, |words| words[(at - within) / 64] >> source);
                bits[(at - key) / 64] |= (word & (u64::MAX >> (64 - count))) << target;
                at += count;
            }
        }
    }
    true
}
