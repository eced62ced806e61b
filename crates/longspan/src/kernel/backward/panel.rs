//! A panel of keys at work: its scratch, how it is opened and closed.

use super::{Backward, QUERIES};
use crate::dtype::Element;
use crate::gemm::Rows;
use crate::kernel::Scratch;
use crate::kernel::adjust::{KEY_TERMS, QUERY_TERMS};
use crate::kernel::finite::AllFinite;
use crate::kernel::fused::FusedKernel;
use crate::kernel::pack::{FromLanes, Meet, ToLanes};
use crate::simd::{LANES, Simd};
use crate::tasks::backward::Grid;
use crate::tensor::Strided;

/// A panel of keys at work: scratch of a thread.
pub(crate) struct KeyPanel {
    pub(super) first: usize,
    pub(super) keys: usize,
    /// LANES keys per tile: Kᵗ, Vᵗ, dKᵗ, dVᵗ, one tile after the other.
    pub(super) keys_transposed: *mut f32,
    pub(super) values_transposed: *mut f32,
    pub(super) dk_transposed: *mut f32,
    pub(super) dv_transposed: *mut f32,
    /// K, whole vectors per row, with 0 in place of what isn't finite.
    pub(super) key_rows: Rows,
    /// Whether the keys of each tile are finite.
    pub(super) finite: [bool; MOST_TILES],
    /// Scores, then probabilities; and the gradient of the probabilities: queries × LANES.
    pub(super) scores: Rows,
    pub(super) gradients: Rows,
    /// The gradient of the products: queries of a group × keys of the key panel.
    pub(super) products: Rows,
    /// dQ of a tile over this key panel alone: a level of the sum over all keys.
    pub(super) dq: Rows,
    /// What additions need of the queries of a group and of the keys of a tile, and the factors and
    /// derivatives of a tile: queries × LANES.
    pub(super) query_terms: Rows,
    pub(super) key_terms: Rows,
    pub(super) factors: Rows,
    pub(super) derivatives: Rows,
    /// Operands, packed: Kᵗ and Vᵗ tile after tile, and K; those of a group of queries; clean
    /// copies of numbers that aren't finite, and what is packed of those.
    pub(super) keys_packed: *mut f32,
    pub(super) values_packed: *mut f32,
    pub(super) rows_packed: *mut f32,
    pub(super) left: [*mut f32; 5],
    pub(super) right: [*mut f32; 2],
    pub(super) clean: *mut f32,
}

/// Tiles of the largest key panel.
const MOST_TILES: usize = 8;

impl<X: FusedKernel> Backward<'_, X> {
    pub(super) fn row_len(&self) -> usize {
        self.dim.next_multiple_of(X::Simd::WIDTH)
    }

    /// Numbers of a tile of dKᵗ or dVᵗ.
    pub(super) fn sums_len(dims: usize) -> usize {
        dims.next_multiple_of(X::TARGET_ROWS) * LANES
    }

    /// Numbers of a tile of Kᵗ or Vᵗ that is packed.
    pub(super) fn packed_len(dims: usize) -> usize {
        X::packed_rhs_len(dims, LANES).next_multiple_of(LANES)
    }

    fn lengths(grid: Grid, (dim, value_dim): (usize, usize), has_additions: bool) -> [usize; 23] {
        let panel = grid.panel.next_multiple_of(LANES);
        let tiles = panel / LANES;
        let row = dim.next_multiple_of(X::Simd::WIDTH);
        let queries = X::GROUP * QUERIES;
        let adjusted = |len| if has_additions { len } else { 0 };
        [
            dim * panel,
            value_dim * panel,
            tiles * Self::sums_len(dim),
            tiles * Self::sums_len(value_dim),
            panel * row,
            QUERIES * LANES,
            QUERIES * LANES,
            queries * panel,
            QUERIES * row,
            adjusted(QUERY_TERMS * queries),
            adjusted(KEY_TERMS * LANES),
            adjusted(QUERIES * LANES),
            adjusted(QUERIES * LANES),
            tiles * Self::packed_len(dim),
            tiles * Self::packed_len(value_dim),
            X::packed_rhs_len(panel, row),
            X::packed_lhs_len(queries, dim),
            X::packed_lhs_len(queries, value_dim),
            X::packed_lhs_len(dim, queries),
            X::packed_lhs_len(value_dim, queries),
            X::packed_lhs_len(queries, panel),
            X::packed_rhs_len(queries, LANES),
            X::packed_rhs_len(queries, LANES),
        ]
    }

    /// Numbers of scratch for clean copies of queries or of dO, and for what is made of them.
    pub(crate) fn finite_copy_len((dim, value_dim): (usize, usize)) -> usize {
        let dims = dim.max(value_dim);
        QUERIES * dims + X::packed_lhs_len(dims, QUERIES)
    }

    /// Numbers of scratch that a key panel needs, given the head dims of keys and values.
    pub(crate) fn workspace_len(grid: Grid, dims: (usize, usize), has_additions: bool) -> usize {
        let lengths = Self::lengths(grid, dims, has_additions);
        lengths.iter().map(|len| len.next_multiple_of(LANES)).sum()
    }

    /// Packs the keys and values of a key panel, and sets its gradients to zero.
    ///
    /// # Safety
    ///
    /// `q`, `k`, `v` and `dout` must be tensors that are readable and not written, `dim`, `dim`,
    /// `value_dim` and `value_dim` wide, at least 1 each. `k` and `v` must have this entry, key
    /// head, and `keys` keys, the first one of the key panel among them. The key panel is open
    /// until the scratch is used otherwise.
    pub(crate) unsafe fn open(
        &self,
        scratch: &mut Scratch,
        (entry, head): (usize, usize),
        panel: u32,
    ) -> KeyPanel {
        let (dims, has_additions) = ((self.dim, self.value_dim), self.additions.is_some());
        let len = Self::workspace_len(self.grid, dims, has_additions);
        let mut next = scratch.elements.reserve(len);
        let parts = Self::lengths(self.grid, dims, has_additions).map(|len| {
            let part = next;
            // SAFETY: `workspace` is the sum of these lengths, so that each part ends in it.
            next = unsafe { next.add(len.next_multiple_of(LANES)) };
            part
        });
        let [
            keys_transposed,
            values_transposed,
            dk_transposed,
            dv_transposed,
            key_rows,
            scores,
            gradients,
            products,
            dq,
            query_terms,
            key_terms,
            factors,
            derivatives,
            keys_packed,
            values_packed,
            rows_packed,
            left_q,
            left_dout,
            left_q_transposed,
            left_dout_transposed,
            left_products,
            right_probabilities,
            right_products,
        ] = parts;
        let first = panel as usize * self.grid.panel;
        let row = self.row_len();
        let mut panel = KeyPanel {
            first,
            keys: (self.keys - first).min(self.grid.panel),
            keys_transposed,
            values_transposed,
            dk_transposed,
            dv_transposed,
            key_rows: Rows { first: key_rows, row },
            finite: [true; MOST_TILES],
            scores: Rows { first: scores, row: LANES },
            gradients: Rows { first: gradients, row: LANES },
            products: Rows { first: products, row: self.grid.panel.next_multiple_of(LANES) },
            dq: Rows { first: dq, row },
            query_terms: Rows { first: query_terms, row: X::GROUP * QUERIES },
            key_terms: Rows { first: key_terms, row: LANES },
            factors: Rows { first: factors, row: LANES },
            derivatives: Rows { first: derivatives, row: LANES },
            keys_packed,
            values_packed,
            rows_packed,
            left: [left_q, left_dout, left_q_transposed, left_dout_transposed, left_products],
            right: [right_probabilities, right_products],
            clean: scratch.clean.reserve(Self::finite_copy_len(dims)),
        };
        let simd = self.tiles.simd();
        // SAFETY: the parts of the room are as large as `lengths` says: for tiles of `LANES` keys,
        // of which the key panel has `tiles`, and for its keys in rows of `row` elements. Nothing
        // else refers to them. Keys of the key panel are in `k` and `v`, as this function demands.
        unsafe {
            let tiles = panel.keys.div_ceil(LANES);
            std::ptr::write_bytes(dk_transposed, 0, tiles * Self::sums_len(self.dim));
            std::ptr::write_bytes(dv_transposed, 0, tiles * Self::sums_len(self.value_dim));
            for tile in 0..tiles {
                let (key, tokens) = panel.tile_keys(tile);
                for (tensor, transposed, packed, dims) in [
                    (self.k, keys_transposed, keys_packed, self.dim),
                    (self.v, values_transposed, values_packed, self.value_dim),
                ] {
                    let target = tile_of(transposed, dims * LANES, tile);
                    if tokens < LANES {
                        std::ptr::write_bytes(target.first, 0, dims * LANES);
                    }
                    let source = tensor.head(entry, head, key);
                    simd.call(ToLanes { source, tokens, dims, target, lane: 0 });
                    let packed = packed.add(tile * Self::packed_len(dims));
                    self.tiles.pack_rhs(target, dims, LANES, packed);
                }
                let matrix = self.k.head(entry, head, key);
                panel.finite[tile] =
                    simd.call(AllFinite { matrix, rows: tokens, columns: self.dim });
            }
            let source = self.k.head(entry, head, first);
            for key in 0..panel.keys {
                let to = panel.key_rows.at(key, 0).first;
                for dim in 0..self.dim {
                    let x = (*source.at(key, dim).first).to_f32();
                    *to.add(dim) = if x.is_finite() { x } else { 0.0 };
                }
                std::ptr::write_bytes(to.add(self.dim), 0, row - self.dim);
            }
            self.tiles.pack_rhs(panel.key_rows, panel.keys, row, rows_packed);
        }
        panel
    }

    /// Adds the key panel's dK and dV to the tensors, or writes them to a buffer of rows, dK before
    /// dV.
    ///
    /// # Safety
    ///
    /// `panel` must be open, for this entry and key head. `dk` and `dv` must be tensors with its
    /// keys, which no other thread reads or writes; or else the buffer have `grid.panel` rows of
    /// both for it alone.
    pub(crate) unsafe fn close(
        &self,
        panel: &KeyPanel,
        (entry, head): (usize, usize),
        buffer: Option<*mut f32>,
    ) {
        let simd = self.tiles.simd();
        // SAFETY: keys of the key panel are in the tensors, or in the buffer from the key panel's
        // first on, as this function demands; sums of a tile have at least `dims` rows of `LANES`
        // elements, and are the key panel's own.
        unsafe {
            for tile in 0..panel.keys.div_ceil(LANES) {
                let (key, tokens) = panel.tile_keys(tile);
                let mut before = 0;
                for (tensor, transposed, dims) in [
                    (self.dk, panel.dk_transposed, self.dim),
                    (self.dv, panel.dv_transposed, self.value_dim),
                ] {
                    let (target, meet) = match buffer {
                        None => (tensor.head(entry, head, key), Meet::Add),
                        Some(buffer) => {
                            let first =
                                buffer.add(before + (key - panel.first) * dims).cast_const();
                            (Strided { first, row: dims as isize, column: 1 }, Meet::Replace)
                        }
                    };
                    let source = tile_of(transposed, Self::sums_len(dims), tile);
                    let factors = std::ptr::null();
                    simd.call(FromLanes { source, lane: 0, factors, tokens, dims, target, meet });
                    before += self.grid.panel * dims;
                }
            }
        }
    }
}

/// Tile `index` of those of `len` elements, LANES per row, that lie one after the other.
///
/// # Safety
///
/// There must be so many tiles in the allocation of `first`.
pub(super) unsafe fn tile_of(first: *mut f32, len: usize, index: usize) -> Rows {
    // SAFETY: the tile is in the allocation, as this function demands.
    Rows { first: unsafe { first.add(index * len) }, row: LANES }
}

impl KeyPanel {
    /// The first key of a tile, and how many it has.
    pub(super) fn tile_keys(&self, tile: usize) -> (usize, usize) {
        (self.first + tile * LANES, (self.keys - tile * LANES).min(LANES))
    }

    /// Sets the gradients of products of the first queries of a group and a tile of keys to zero.
    ///
    /// # Safety
    ///
    /// The panel must be open, and `queries` those of a group at most.
    pub(super) unsafe fn clear_products(&self, tile: usize, queries: usize) {
        for query in 0..queries {
            // SAFETY: products have a row per query of a group, with whole tiles of keys.
            unsafe {
                std::ptr::write_bytes(self.products.at(query, tile * LANES).first, 0, LANES);
            }
        }
    }
}
