//! A slab of keys at work: its scratch, how it is opened and closed.

use super::{Backward, QUERIES};
use crate::element::Element;
use crate::exec::Scratch;
use crate::kernel::finite::AllFinite;
use crate::kernel::pack::{FromLanes, Meet, ToLanes};
use crate::score::Transform;
use crate::simd::{LANES, Simd};
use crate::tile::{Rows, Strided, Tiles};

/// A slab of keys at work: scratch of a thread.
pub(crate) struct Slab {
    pub(super) first: usize,
    pub(super) keys: usize,
    /// LANES keys per tile: Kᵗ, Vᵗ, dKᵗ, dVᵗ, one tile after the other.
    pub(super) keys_turned: *mut f32,
    pub(super) values_turned: *mut f32,
    pub(super) dk_turned: *mut f32,
    pub(super) dv_turned: *mut f32,
    /// K, whole vectors per row, with 0 in place of what isn't finite.
    pub(super) key_rows: Rows,
    /// Whether the keys of each tile are finite.
    pub(super) finite: [bool; MOST_TILES],
    /// Scores, then probabilities; and the gradient of the probabilities: queries × LANES.
    pub(super) scores: Rows,
    pub(super) gradients: Rows,
    /// The gradient of the products: queries of a group × keys of the slab.
    pub(super) products: Rows,
    /// dQ of a tile over this slab alone: a level of the sum over all keys.
    pub(super) dq: Rows,
    pub(super) positions: *mut f32,
    /// Operands, ready: Kᵗ and Vᵗ tile after tile, and K; those of a group of queries; clean copies of
    /// numbers that aren't finite, and what is made ready of those.
    pub(super) keys_ready: *mut f32,
    pub(super) values_ready: *mut f32,
    pub(super) rows_ready: *mut f32,
    pub(super) left: [*mut f32; 5],
    pub(super) right: [*mut f32; 2],
    pub(super) clean: *mut f32,
}

/// Tiles of the largest slab.
const MOST_TILES: usize = 8;

impl<X: Tiles, T: Transform> Backward<'_, X, T> {
    pub(super) fn row_len(&self) -> usize {
        self.dim.next_multiple_of(X::Simd::WIDTH)
    }

    /// Numbers of a tile of dKᵗ or dVᵗ.
    pub(super) fn sums_len(dims: usize) -> usize {
        dims.next_multiple_of(X::TARGET_ROWS) * LANES
    }

    /// Numbers of a tile of Kᵗ or Vᵗ that is ready.
    pub(super) fn ready_len(dims: usize) -> usize {
        X::right_room(dims, LANES).next_multiple_of(LANES)
    }

    fn lengths(&self) -> [usize; 20] {
        let slab = self.grid.slab.next_multiple_of(LANES);
        let tiles = slab / LANES;
        let (dim, value_dim) = (self.dim, self.value_dim);
        let queries = X::GROUP * QUERIES;
        [
            dim * slab,
            value_dim * slab,
            tiles * Self::sums_len(dim),
            tiles * Self::sums_len(value_dim),
            slab * self.row_len(),
            QUERIES * LANES,
            QUERIES * LANES,
            queries * slab,
            QUERIES * self.row_len(),
            slab,
            tiles * Self::ready_len(dim),
            tiles * Self::ready_len(value_dim),
            X::right_room(slab, self.row_len()),
            X::left_room(queries, dim),
            X::left_room(queries, value_dim),
            X::left_room(dim, queries),
            X::left_room(value_dim, queries),
            X::left_room(queries, slab),
            X::right_room(queries, LANES),
            X::right_room(queries, LANES),
        ]
    }

    /// Numbers of scratch for clean copies of queries or of dO, and for what is made of them.
    pub(crate) fn clean_room(&self) -> usize {
        let dims = self.dim.max(self.value_dim);
        QUERIES * dims + X::left_room(dims, QUERIES)
    }

    /// Numbers of scratch that a slab needs.
    pub(crate) fn room(&self) -> usize {
        self.lengths().iter().map(|len| len.next_multiple_of(LANES)).sum()
    }

    /// Packs the keys and values of a slab, and sets its gradients to zero.
    ///
    /// # Safety
    ///
    /// `q`, `k`, `v` and `dout` must be tensors that are readable and not written, `dim`, `dim`,
    /// `value_dim` and `value_dim` wide, at least 1 each. `k` and `v` must have this entry, key
    /// head, and `keys` keys, the first one of the slab among them. The slab is open until the
    /// scratch is used otherwise.
    pub(crate) unsafe fn open(
        &self,
        scratch: &mut Scratch,
        (entry, head): (usize, usize),
        slab: u32,
    ) -> Slab {
        let mut next = scratch.numbers.room(self.room());
        let parts = self.lengths().map(|len| {
            let part = next;
            // SAFETY: `room` is the sum of these lengths, so that each part ends in it.
            next = unsafe { next.add(len.next_multiple_of(LANES)) };
            part
        });
        let [
            keys_turned,
            values_turned,
            dk_turned,
            dv_turned,
            key_rows,
            scores,
            gradients,
            products,
            dq,
            positions,
            keys_ready,
            values_ready,
            rows_ready,
            left_q,
            left_dout,
            left_q_turned,
            left_dout_turned,
            left_products,
            right_probabilities,
            right_products,
        ] = parts;
        let first = slab as usize * self.grid.slab;
        let row = self.row_len();
        let mut slab = Slab {
            first,
            keys: (self.keys - first).min(self.grid.slab),
            keys_turned,
            values_turned,
            dk_turned,
            dv_turned,
            key_rows: Rows { first: key_rows, row },
            finite: [true; MOST_TILES],
            scores: Rows { first: scores, row: LANES },
            gradients: Rows { first: gradients, row: LANES },
            products: Rows { first: products, row: self.grid.slab.next_multiple_of(LANES) },
            dq: Rows { first: dq, row },
            positions,
            keys_ready,
            values_ready,
            rows_ready,
            left: [left_q, left_dout, left_q_turned, left_dout_turned, left_products],
            right: [right_probabilities, right_products],
            clean: scratch.clean.room(self.clean_room()),
        };
        let simd = self.tiles.simd();
        // SAFETY: the parts of the room are as large as `lengths` says: for tiles of `LANES` keys,
        // of which the slab has `tiles`, and for its keys in rows of `row` elements. Nothing else
        // refers to them. Keys of the slab are in `k` and `v`, as this function demands.
        unsafe {
            let tiles = slab.keys.div_ceil(LANES);
            std::ptr::write_bytes(dk_turned, 0, tiles * Self::sums_len(self.dim));
            std::ptr::write_bytes(dv_turned, 0, tiles * Self::sums_len(self.value_dim));
            for tile in 0..tiles {
                let (key, tokens) = slab.tile_keys(tile);
                for (tensor, turned, ready, dims) in [
                    (self.k, keys_turned, keys_ready, self.dim),
                    (self.v, values_turned, values_ready, self.value_dim),
                ] {
                    let target = tile_of(turned, dims * LANES, tile);
                    if tokens < LANES {
                        std::ptr::write_bytes(target.first, 0, dims * LANES);
                    }
                    let source = tensor.head(entry, head, key);
                    simd.call(ToLanes { source, tokens, dims, target, lane: 0 });
                    let ready = ready.add(tile * Self::ready_len(dims));
                    self.tiles.right(target, dims, LANES, ready);
                }
                let matrix = self.k.head(entry, head, key);
                slab.finite[tile] =
                    simd.call(AllFinite { matrix, rows: tokens, columns: self.dim });
            }
            let source = self.k.head(entry, head, first);
            for key in 0..slab.keys {
                let to = slab.key_rows.at(key, 0).first;
                for dim in 0..self.dim {
                    let x = (*source.at(key, dim).first).to_f32();
                    *to.add(dim) = if x.is_finite() { x } else { 0.0 };
                }
                std::ptr::write_bytes(to.add(self.dim), 0, row - self.dim);
            }
            self.tiles.right(slab.key_rows, slab.keys, row, rows_ready);
        }
        slab
    }

    /// Adds the slab's dK and dV to the tensors, or writes them to a buffer of rows, dK before dV.
    ///
    /// # Safety
    ///
    /// `slab` must be open, for this entry and key head. `dk` and `dv` must be tensors with its
    /// keys, which no other thread reads or writes; or else the buffer have `grid.slab` rows of
    /// both for it alone.
    pub(crate) unsafe fn close(
        &self,
        slab: &Slab,
        (entry, head): (usize, usize),
        buffer: Option<*mut f32>,
    ) {
        let simd = self.tiles.simd();
        // SAFETY: keys of the slab are in the tensors, or in the buffer from the slab's first on,
        // as this function demands; sums of a tile have at least `dims` rows of `LANES` elements,
        // and are the slab's own.
        unsafe {
            for tile in 0..slab.keys.div_ceil(LANES) {
                let (key, tokens) = slab.tile_keys(tile);
                let mut before = 0;
                for (tensor, turned, dims) in
                    [(self.dk, slab.dk_turned, self.dim), (self.dv, slab.dv_turned, self.value_dim)]
                {
                    let (target, meet) = match buffer {
                        None => (tensor.head(entry, head, key), Meet::Add),
                        Some(buffer) => {
                            let first = buffer.add(before + (key - slab.first) * dims).cast_const();
                            (Strided { first, row: dims as isize, column: 1 }, Meet::Replace)
                        }
                    };
                    let source = tile_of(turned, Self::sums_len(dims), tile);
                    let factors = std::ptr::null();
                    simd.call(FromLanes { source, lane: 0, factors, tokens, dims, target, meet });
                    before += self.grid.slab * dims;
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

impl Slab {
    /// The first key of a tile, and how many it has.
    pub(super) fn tile_keys(&self, tile: usize) -> (usize, usize) {
        (self.first + tile * LANES, (self.keys - tile * LANES).min(LANES))
    }
}
