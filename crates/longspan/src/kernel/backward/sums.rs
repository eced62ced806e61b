//! The three products of gradients: dV and dK over runs of queries, dQ over runs of keys.

use super::add::AddRows;
use super::group::{Patch, Pending, Queries, QueryTile};
use super::panel::{KeyPanel, tile_of};
use super::{Backward, OVER_KEYS, QUERIES};
use crate::gemm::{Beta, Multiply, OVER_TOKENS, Prefetch, Rows, Size};
use crate::kernel::finite::{clean, left_out};
use crate::kernel::fused::FusedKernel;
use crate::kernel::padded;
use crate::simd::{LANES, Simd};
use crate::tasks::Stream;
use crate::tensor::Strided;

impl<X: FusedKernel> Backward<'_, X> {
    /// dVᵗ ← dVᵗ + dOᵗ · P and dKᵗ ← dKᵗ + Qᵗ · D over neighbouring queries.
    ///
    /// # Safety
    ///
    /// That of [`differentiate`](Self::differentiate), which must have been called for the queries
    /// and keys of the run and tile `index` of the key panel, and for no other tile of keys since. The
    /// first query must be a multiple of `GRAIN`, and the run have all keys of the tile unless that
    /// is 1.
    pub(super) unsafe fn sum(
        &self,
        panel: &KeyPanel,
        at: &Queries<'_, X>,
        index: usize,
        run: &Patch,
    ) {
        if run.queries.is_empty() {
            return;
        }
        // SAFETY: `sums` and `add_products` have the condition of `sum`.
        unsafe {
            for sum in self.sums(panel, at, index, run) {
                self.add_products(&sum, X::lhs_at(sum.transposed, 0, run.queries.start), run);
            }
        }
    }

    /// The same for queries of one tile that has elements that aren't finite, which only keys that are
    /// seen may meet.
    ///
    /// # Safety
    ///
    /// That of [`sum`](Self::sum), for a run within one tile, whose matrices were kept.
    pub(super) unsafe fn sum_careful(
        &self,
        panel: &KeyPanel,
        at: &Queries<'_, X>,
        index: usize,
        run: &Patch,
    ) {
        // SAFETY: as in `sum`. `finite_copy_len` is `QUERIES` rows of the wider of both, for
        // elements no larger than f32, and `packed_lhs_len` of what is packed of them behind that.
        unsafe {
            for sum in self.sums(panel, at, index, run) {
                let (matrix, dims) = (sum.matrix.at(run.queries.start, 0), sum.dims);
                let queries = run.queries.len();
                let copy = clean(matrix, queries, dims, panel.clean.cast());
                let after = panel.clean.add(QUERIES * self.dim.max(self.value_dim));
                let left = self.tiles.pack_lhs(copy.transposed(), dims, queries, after);
                self.add_products(&sum, left, run);
                left_out(matrix, queries, dims, |query, dim, x| {
                    for lane in 0..sum.lanes {
                        let factor = *sum.factors.at(query, lane).first;
                        if factor != 0.0 {
                            *sum.target.at(dim, lane).first += factor * x;
                        }
                    }
                });
            }
        }
    }

    /// Adds the product of one sum.
    ///
    /// # Safety
    ///
    /// That of [`sum`](Self::sum), which `sum` must be one of; `left` must be packed, `sum.dims` ×
    /// the queries of the run.
    unsafe fn add_products(&self, sum: &Sum<X>, left: X::Lhs, run: &Patch) {
        let (target, keep, ahead) = (sum.target, Beta::One, Prefetch::NONE);
        let size = Size { m: sum.dims, n: sum.lanes, k: run.queries.len(), piece: OVER_TOKENS };
        // SAFETY: the operand on the right has the queries and keys of the run, from a multiple of
        // `GRAIN` on; the target has `dims` rows, rounded up to `TARGET_ROWS` (`sums_len`), of
        // `LANES`.
        unsafe {
            let right = X::rhs_at(sum.right, run.queries.start, run.keys.start);
            self.tiles.multiply(Multiply { target, keep, left, right, size, ahead });
        }
    }

    /// The two sums over queries of a tile of keys: dV's and dK's.
    ///
    /// # Safety
    ///
    /// That of [`sum`](Self::sum).
    unsafe fn sums(
        &self,
        panel: &KeyPanel,
        at: &Queries<'_, X>,
        index: usize,
        run: &Patch,
    ) -> [Sum<X>; 2] {
        let (lane, lanes) = (run.keys.start, padded(run.keys.len(), X::Simd::WIDTH));
        // SAFETY: products have the queries of a group and the keys of the key panel, the run and
        // tile `index` among them; `differentiate` has been given the rooms on the right. There is
        // a tile of sums for each of keys.
        unsafe {
            let products = panel.products.at(0, index * LANES);
            [
                (
                    (at.dout, at.dout_transposed),
                    (panel.scores, panel.scores.at(run.within().start, lane)),
                    (panel.dv_transposed, self.value_dim),
                    panel.right[0],
                ),
                (
                    (at.q, at.q_transposed),
                    (products, products.at(run.queries.start, lane)),
                    (panel.dk_transposed, self.dim),
                    panel.right[1],
                ),
            ]
            .map(|((matrix, transposed), (all, factors), (sums, dims), workspace)| {
                Sum {
                    matrix,
                    transposed,
                    factors,
                    right: self.tiles.packed_rhs(all, at.all, lanes, workspace),
                    target: tile_of(sums, Self::sums_len(dims), index).at(0, lane),
                    dims,
                    lanes,
                }
            })
        }
    }

    /// dQ ← dQ + D · K over neighbouring tiles of keys.
    ///
    /// # Safety
    ///
    /// That of [`queries`](Self::queries), for tile `number` of the group, which must have been
    /// differentiated against the pending keys.
    pub(super) unsafe fn multiply_keys(
        &self,
        panel: &KeyPanel,
        stream: &Stream<'_>,
        tile: &QueryTile,
        number: usize,
        pending: Pending,
    ) {
        let (tiles, row) = (self.tiles, self.row_len());
        // SAFETY: pending keys are some of the key panel's, from a multiple of `GRAIN` on, and the
        // key panel is open: it has K in rows, packed, products of the group and of its keys, and
        // `QUERIES` rows of `row` elements for dQ alone. `k` has the keys. `tile.dq` has the rows of
        // the tile, which `query_panel` demands that no other thread reads or writes.
        unsafe {
            let differentiated =
                X::differentiated(panel.products, panel.products.row, panel.left[4]);
            let packed = tiles.packed_rhs(panel.key_rows, panel.keys, row, panel.rows_packed);
            for (queries, keys) in pending.runs(tile.queries) {
                let (first, rows) = (number * QUERIES + queries.start, queries.len());
                tiles.multiply(Multiply {
                    target: panel.dq,
                    keep: Beta::Zero,
                    left: X::lhs_at(differentiated, first, keys.start),
                    right: X::rhs_at(packed, keys.start, 0),
                    size: Size { m: rows, n: row, k: keys.len(), piece: OVER_KEYS },
                    ahead: Prefetch::NONE,
                });
                let key_tiles = keys.start / LANES..keys.end.div_ceil(LANES);
                if !panel.finite[key_tiles].iter().all(|&x| x) {
                    let products = panel.products.at(first, keys.start);
                    let key = panel.first + keys.start;
                    let matrix = self.k.head(stream.entry, stream.key_head, key);
                    left_out(matrix, keys.len(), self.dim, |key, dim, x| {
                        for query in 0..rows {
                            let product = *products.at(query, key).first;
                            if product != 0.0 {
                                *panel.dq.at(query, dim).first += product * x;
                            }
                        }
                    });
                }
                let (to, columns) = (tile.dq.at(queries.start, 0), self.dim);
                tiles.simd().call(AddRows { from: panel.dq, to, rows, columns });
            }
        }
    }
}

/// `target ← target + matrixᵗ · factors`, for a tile of keys.
struct Sum<X: FusedKernel> {
    matrix: Strided<X::Element>,
    transposed: X::Lhs,
    factors: Rows,
    right: X::Rhs,
    target: Rows,
    dims: usize,
    lanes: usize,
}
