//! How rows begin and end: from the caller's queries into lanes, and out of them.

use super::scratch::{Tile, Workspace};
use super::{Forward, Stack, Target};
use crate::gemm::Rows;
use crate::kernel::finite::AllFinite;
use crate::kernel::fused::FusedKernel;
use crate::kernel::pack::{FromLanes, Meet, ToLanes};
use crate::simd::{LANES, Simd};
use crate::softmax;
use crate::tasks::Unit;

impl<X: FusedKernel> Forward<'_, X> {
    /// The pieces of a tile that belong to one head each: `(head, token, lane, count)`.
    fn pieces(tile: &Tile, tokens: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let (first, end) = (tile.first, tile.first + tile.lanes);
        let mut next = first;
        std::iter::from_fn(move || {
            (next < end).then(|| {
                let (head, token) = (next / tokens, next % tokens);
                let count = (tokens - token).min(end - next);
                let piece = (head, token, next - first, count);
                next += count;
                piece
            })
        })
    }

    /// Packs the queries, and sets the state to what it starts from.
    ///
    /// # Safety
    ///
    /// That of [`attempt`](Self::attempt), for a tile of a row of the stack.
    pub(super) unsafe fn start(&self, tile: &Tile, stack: &Stack<'_, X::Element>, row: u32) {
        let simd = self.tiles.simd();
        let (stream, target) = (stack.stream, stack.target);
        let (first, tokens) = stack.tokens(row);
        // SAFETY: `tile` has room for `dim` and `sum_rows + 1` rows of `LANES`, lists of `LANES`,
        // and the operand (`tile_len`), which nothing else refers to. `pieces` are heads of the
        // stream and tokens of the row, each in a lane of the tile: `rows` demands tensors and a
        // target with them.
        unsafe {
            if tile.lanes < LANES {
                std::ptr::write_bytes(tile.queries.first, 0, self.dim * LANES);
            }
            std::ptr::write_bytes(tile.sums.first, 0, (self.sum_rows() + 1) * LANES);
            *tile.counts = [0; 2];
            std::slice::from_raw_parts_mut(tile.maxima, LANES).fill(f32::NEG_INFINITY);
            for (head, token, lane, count) in Self::pieces(tile, tokens) {
                let head = stream.heads[head] as usize;
                let source = self.q.head(stream.entry, head, first + token);
                let (dims, target_rows) = (self.dim, tile.queries);
                simd.call(ToLanes { source, tokens: count, dims, target: target_rows, lane });
                self.prefetch_beside(source, count, self.dim);
                if let Some(additions) = self.additions {
                    let (at, tokens) = ((stream.entry, head), (first + token, count));
                    let (base, into) = (self.base(stack), tile.terms.at(0, lane));
                    additions.query_terms(stream.layout, at, tokens, base, into);
                }
                if let Some(state) = target.state() {
                    let [maxima, totals, source] = state.rows(stream.entry, head, first + token);
                    let lane_totals = tile.sums.at(self.sum_rows(), lane).first;
                    let mut seen = false;
                    for index in 0..count {
                        let maximum = *maxima.at(index, 0).first;
                        seen |= maximum != f32::NEG_INFINITY;
                        *tile.maxima.add(lane + index) = maximum;
                        *lane_totals.add(index) = *totals.at(index, 0).first;
                    }
                    // Rows that have seen nothing have the sums that lanes begin with.
                    if seen {
                        let (tokens, dims, target) = (count, self.value_dim, tile.sums);
                        simd.call(ToLanes { source, tokens, dims, target, lane });
                    }
                }
            }
            self.tiles.pack_rhs(tile.queries, self.dim, LANES, tile.packed);
        }
    }

    /// Writes what the tile has come to.
    ///
    /// # Safety
    ///
    /// That of [`attempt`](Self::attempt), for a tile of a row of the stack that was started.
    pub(super) unsafe fn end(&self, tile: &Tile, stack: &Stack<'_, X::Element>, row: u32) {
        let simd = self.tiles.simd();
        let (stream, target) = (stack.stream, stack.target);
        let (first, tokens) = stack.tokens(row);
        let dims = self.value_dim;
        // SAFETY: as in `start`; the rows of the target that are written are those of the tile's
        // lanes, which no other thread reads or writes.
        unsafe {
            let folded = (*tile.counts)[1] > 0;
            if folded {
                self.fold(tile, false);
            }
            let source = if folded { tile.folded } else { tile.sums };
            let totals = source.at(self.sum_rows(), 0).first;
            for (head, token, lane, count) in Self::pieces(tile, tokens) {
                let head = stream.heads[head] as usize;
                let [to_maxima, to_totals, target] = match target {
                    Target::Finish { output, .. } => {
                        let at = (stream.entry, head, first + token);
                        let sink = self.sink_logits.map(|logits| logits[head]);
                        for index in lane..lane + count {
                            let (m, l) = (*tile.maxima.add(index), *totals.add(index));
                            let finished = softmax::finish(m, l, sink);
                            *tile.factors.add(index) = finished.factor;
                            output.write_lse((at.0, at.1, at.2 + index - lane), &finished);
                        }
                        let target = output.out.head(at.0, at.1, at.2);
                        self.prefetch_beside(target, count, dims);
                        let factors = tile.factors.cast_const();
                        let meet = Meet::Replace;
                        simd.call(FromLanes {
                            source,
                            lane,
                            factors,
                            tokens: count,
                            dims,
                            target,
                            meet,
                        });
                        continue;
                    }
                    Target::Extend(state) => state.rows(stream.entry, head, first + token),
                    Target::Part(state, first) => state.rows(0, 0, first + tile.first + lane),
                };
                for index in 0..count {
                    *to_maxima.at(index, 0).first.cast_mut() = *tile.maxima.add(lane + index);
                    *to_totals.at(index, 0).first.cast_mut() = *totals.add(lane + index);
                }
                let (factors, meet) = (std::ptr::null(), Meet::Replace);
                simd.call(FromLanes { source, lane, factors, tokens: count, dims, target, meet });
            }
        }
    }

    /// Whether the sums of all rows are finite.
    ///
    /// # Safety
    ///
    /// That of [`attempt`](Self::attempt); the tiles of all rows must have been started.
    pub(super) unsafe fn all_finite(
        &self,
        stack: &Stack<'_, X::Element>,
        unit: &Unit,
        workspace: &Workspace,
    ) -> bool {
        // SAFETY: rows are those of the stack. Sums, and what was folded of them, have more than
        // `value_dim` rows of `LANES` elements; both are the tile's own, as its counts are.
        (unit.rows.0..unit.rows.1).all(|row| unsafe {
            self.tiles_of(workspace, stack, row).all(|tile| {
                let finite = |sums: Rows| {
                    let (matrix, rows) = (sums.strided(), self.value_dim);
                    self.tiles.simd().call(AllFinite { matrix, rows, columns: tile.lanes })
                };
                let folded = (*tile.counts)[1] > 0;
                finite(tile.sums) && (!folded || finite(tile.folded))
            })
        })
    }
}
