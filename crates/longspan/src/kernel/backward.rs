//! The backward pass over one slab of keys.
//!
//! ```text
//! for each slab of keys:
//!     pack them, LANES side by side:                   Kᵗ[dim × lanes], Vᵗ, and K itself in rows
//!     for each tile of queries that sees some of them:
//!         S ← Q · Kᵗ;  P ← exp(S − lse) · exp(−rest)   queries × lanes; masked ones 0
//!         D ← dO · Vᵗ; D ← P ∘ (D − delta) · scale     gradient of the products q·k
//!         dVᵗ ← dVᵗ + dOᵗ · P
//!         dKᵗ ← dKᵗ + Qᵗ · D
//!         dQ ← dQ + D · K                              when it is this slab's turn
//!     dK, dV ← dK + (dKᵗ)ᵗ, dV + (dVᵗ)ᵗ
//! ```
//!
//! Five products, each score once. Q and dO are read where they lie. The products of a score run
//! over the head dim in the order of the forward pass, so scores have the same bits in both.

mod add;
mod cover;
mod differentiate;

use std::sync::atomic::{AtomicU32, Ordering};

use longspan_pattern::Masks;

use self::add::AddRows;
use self::cover::{Coverage, cover, sees};
use self::differentiate::{Differentiate, correct};

use super::finite::AllFinite;
use super::pack::{FromLanes, Meet, ToLanes};
use super::{Raw, padded};
use crate::attention::RowStatistics;
use crate::plan::Stream;
use crate::plan::backward::Grid;
use crate::score::Transform;
use crate::simd::{LANES, Simd};
use crate::tile::{
    Ahead, Keep, Multiply, OVER_DIMS, OVER_TOKENS, Rows, Size, Strided, Terms, Tiles,
};
use crate::workspace::Arena;

/// The most queries of a tile.
const QUERIES: usize = 64;

/// Terms a piece of dQ's sum over the keys of a slab: fewer than [`OVER_TOKENS`], since the errors
/// of log-sum-exp and delta, which all terms of the row share, are in it too.
const OVER_KEYS: usize = 16;

/// Everything that is the same for all slabs of a call.
#[derive(Clone, Copy)]
pub(crate) struct Backward<'a, X, T> {
    pub(crate) tiles: X,
    pub(crate) transform: T,
    pub(crate) scale: f32,
    /// A slope a query head; empty where the transform looks at none.
    pub(crate) slopes: &'a [f32],
    pub(crate) q: Raw,
    pub(crate) k: Raw,
    pub(crate) v: Raw,
    pub(crate) dout: Raw,
    pub(crate) dq: Raw,
    pub(crate) dk: Raw,
    pub(crate) dv: Raw,
    pub(crate) rows: RowStatistics<'a>,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) keys: usize,
    pub(crate) grid: Grid,
}

/// A slab of keys at work: scratch of a thread.
pub(crate) struct Slab {
    first: usize,
    keys: usize,
    /// LANES keys a tile: Kᵗ, Vᵗ, dKᵗ, dVᵗ, one tile after the other.
    keys_turned: *mut f32,
    values_turned: *mut f32,
    dk_turned: *mut f32,
    dv_turned: *mut f32,
    /// K, whole vectors a row.
    key_rows: Rows,
    /// Whether the keys of each tile are finite.
    finite: [bool; MOST_TILES],
    /// Scores, then probabilities; and the gradient of the probabilities: queries × LANES.
    scores: Rows,
    gradients: Rows,
    /// The gradient of the products: queries × keys of the slab.
    products: Rows,
    /// dQ of a tile over this slab alone: a level of the sum over all keys.
    dq: Rows,
    positions: *mut f32,
    left: *mut f32,
    right: *mut f32,
}

/// Tiles of the largest slab.
const MOST_TILES: usize = 8;

/// Who may add to dQ now: a counter a chain.
#[derive(Clone, Copy)]
pub(crate) struct Turnstile<'a> {
    pub(crate) counter: &'a AtomicU32,
    pub(crate) rank: u32,
}

impl Turnstile<'_> {
    /// Waits for the turn; `false` where `give_up` says so first.
    pub(crate) fn enter(&self, give_up: impl Fn() -> bool) -> bool {
        let mut spins = 0_u32;
        while self.counter.load(Ordering::Acquire) != self.rank {
            if give_up() {
                return false;
            }
            spins += 1;
            if spins < 200 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        true
    }

    /// Lets the next one go.
    pub(crate) fn leave(&self) {
        self.counter.store(self.rank + 1, Ordering::Release);
    }
}

/// Where the dQ of a band goes.
#[derive(Clone, Copy)]
pub(crate) enum QueryTarget {
    /// To the tensor.
    Tensor,
    /// To a buffer: rows from the band's first query on, `dim` numbers each.
    Buffer(*mut f32),
}

impl<X: Tiles, T: Transform> Backward<'_, X, T> {
    fn row_len(&self) -> usize {
        self.dim.next_multiple_of(X::Simd::WIDTH)
    }

    fn lengths(&self) -> [usize; 12] {
        let slab = self.grid.slab.next_multiple_of(LANES);
        let longest = self.dim.max(self.value_dim).max(QUERIES).max(slab);
        [
            self.dim * slab,
            self.value_dim * slab,
            self.dim * slab,
            self.value_dim * slab,
            slab * self.row_len(),
            QUERIES * LANES,
            QUERIES * LANES,
            QUERIES * slab,
            QUERIES * self.row_len(),
            slab,
            X::left_room(longest, longest),
            X::right_room(longest, longest.max(self.row_len())),
        ]
    }

    /// Numbers of scratch that a slab needs.
    pub(crate) fn room(&self) -> usize {
        self.lengths().iter().map(|len| len.next_multiple_of(LANES)).sum()
    }

    /// Packs the keys and values of a slab, and sets its gradients to zero.
    ///
    /// # Safety
    ///
    /// The tensors must have this entry, head and slab.
    pub(crate) unsafe fn open(
        &self,
        arena: &mut Arena,
        (entry, head): (usize, usize),
        slab: u32,
    ) -> Slab {
        let mut next = arena.room(self.room());
        let parts = self.lengths().map(|len| {
            let part = next;
            // SAFETY: the parts add up to the room.
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
            left,
            right,
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
            left,
            right,
        };
        let simd = self.tiles.simd();
        // SAFETY: scratch of our own; the keys are in the tensors.
        unsafe {
            let tiles = slab.keys.div_ceil(LANES);
            std::ptr::write_bytes(dk_turned, 0, tiles * self.dim * LANES);
            std::ptr::write_bytes(dv_turned, 0, tiles * self.value_dim * LANES);
            for tile in 0..tiles {
                let (key, tokens) = slab.tile_keys(tile);
                for (tensor, turned, dims) in
                    [(self.k, keys_turned, self.dim), (self.v, values_turned, self.value_dim)]
                {
                    let target = turned_tile(turned, dims, tile);
                    if tokens < LANES {
                        std::ptr::write_bytes(target.first, 0, dims * LANES);
                    }
                    let source = tensor.head(entry, head, key);
                    simd.call(ToLanes { source, tokens, dims, target, lane: 0 });
                }
                let matrix = self.k.head(entry, head, key);
                slab.finite[tile] =
                    simd.call(AllFinite { matrix, rows: tokens, columns: self.dim });
            }
            let source = self.k.head(entry, head, first);
            for key in 0..slab.keys {
                let to = slab.key_rows.at(key, 0).first;
                for dim in 0..self.dim {
                    *to.add(dim) = *source.at(key, dim).first;
                }
                std::ptr::write_bytes(to.add(self.dim), 0, row - self.dim);
            }
        }
        slab
    }

    /// Adds the slab's dK and dV to the tensors, or writes them to a buffer of rows, dK before dV.
    ///
    /// # Safety
    ///
    /// Nobody else may write them.
    pub(crate) unsafe fn close(
        &self,
        slab: &Slab,
        (entry, head): (usize, usize),
        buffer: Option<*mut f32>,
    ) {
        let simd = self.tiles.simd();
        // SAFETY: the caller's tensors have these keys, and buffers are as large as a slab.
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
                    let source = turned_tile(turned, dims, tile);
                    let factors = std::ptr::null();
                    simd.call(FromLanes { source, lane: 0, factors, tokens, dims, target, meet });
                    before += self.grid.slab * dims;
                }
            }
        }
    }

    /// All queries of a band and head that see keys of the slab.
    ///
    /// # Safety
    ///
    /// The tensors must have them; nobody else may write the band's dQ.
    pub(crate) unsafe fn band(
        &self,
        slab: &mut Slab,
        stream: &Stream<'_>,
        head: usize,
        band: u32,
        target: QueryTarget,
        masks: &mut Masks<'_>,
    ) {
        let layout = stream.layout;
        let first_of_band = band as usize * self.grid.band;
        for row in self.grid.rows(layout, band) {
            if !sees(layout, row, slab) {
                continue;
            }
            let tokens = layout.row_tokens(row);
            let (start, end) = (tokens.start as usize, tokens.end as usize);
            for query in (start..end).step_by(QUERIES) {
                let queries = (end - query).min(QUERIES);
                let dq = match target {
                    // SAFETY: the caller's tensor has this row.
                    QueryTarget::Tensor => unsafe { self.dq.head(stream.entry, head, query) },
                    QueryTarget::Buffer(buffer) => Strided {
                        // SAFETY: buffers hold the rows of a band.
                        first: unsafe { buffer.add((query - first_of_band) * self.dim) },
                        row: self.dim as isize,
                        column: 1,
                    },
                };
                let tile = QueryTile { head, row, query, queries, within: query - start, dq };
                // SAFETY: the caller's.
                unsafe { self.queries(slab, stream, tile, masks) };
            }
        }
    }

    /// One tile of queries against the slab.
    unsafe fn queries(
        &self,
        slab: &mut Slab,
        stream: &Stream<'_>,
        tile: QueryTile,
        masks: &mut Masks<'_>,
    ) {
        let QueryTile { head, query, queries, .. } = tile;
        let tiles = self.tiles;
        let simd = tiles.simd();
        // SAFETY: queries and keys are those of the tensors, scratch is our own.
        unsafe {
            let q = self.q.head(stream.entry, head, query);
            let dout = self.dout.head(stream.entry, head, query);
            let row = stream.row(head, query);
            let (lse, delta) = (self.rows.lse.as_ptr().add(row), self.rows.delta.as_ptr().add(row));
            let mut corrections = [1.0; QUERIES];
            if let Some(rests) = self.rows.lse_rest {
                correct(&rests[row..row + queries], &mut corrections);
            }
            let base = if T::PLACED { super::base(stream.layout, query) } else { 0 };
            let mut query_positions = [0.0; QUERIES];
            if T::PLACED {
                let into = &mut query_positions[..queries];
                super::positions(stream.layout.query_positions(), query, base, into);
            }
            let slope = if T::PLACED { self.slopes[head] } else { 0.0 };
            let mut finite = None;
            // Neighbouring tiles are multiplied with K together.
            let mut pending: Option<Pending> = None;
            for index in 0..slab.keys.div_ceil(LANES) {
                let (key, keys) = slab.tile_keys(index);
                let mut bits = [0; QUERIES];
                let coverage = cover(stream.layout, &tile, (key, keys), masks, &mut bits);
                if coverage == Coverage::Empty {
                    self.multiply_keys(slab, &tile, pending.take());
                    continue;
                }
                let lanes = padded(keys, X::Simd::WIDTH);
                let left = tiles.left(q, queries, self.dim, slab.left);
                let right = tiles.right(
                    turned_tile(slab.keys_turned, self.dim, index),
                    self.dim,
                    lanes,
                    slab.right,
                );
                let size = Size { m: queries, n: lanes, k: self.dim, piece: OVER_DIMS };
                tiles.multiply(Multiply {
                    target: slab.scores,
                    keep: Keep::Nothing,
                    left,
                    right,
                    size,
                    terms: Terms::All,
                    ahead: Ahead::NOTHING,
                });
                let left = tiles.left(dout, queries, self.value_dim, slab.left);
                let values = turned_tile(slab.values_turned, self.value_dim, index);
                let right = tiles.right(values, self.value_dim, lanes, slab.right);
                let size = Size { m: queries, n: lanes, k: self.value_dim, piece: OVER_DIMS };
                tiles.multiply(Multiply {
                    target: slab.gradients,
                    keep: Keep::Nothing,
                    left,
                    right,
                    size,
                    terms: Terms::All,
                    ahead: Ahead::NOTHING,
                });

                let masked = coverage == Coverage::Partial;
                if T::PLACED {
                    let into = std::slice::from_raw_parts_mut(slab.positions, keys);
                    super::positions(stream.layout.key_positions(), key, base, into);
                }
                let products = slab.products.at(0, index * LANES);
                simd.call(Differentiate {
                    scores: slab.scores,
                    gradients: slab.gradients,
                    products,
                    queries,
                    lanes,
                    scale: self.scale,
                    transform: self.transform,
                    bits: if masked { bits.as_ptr() } else { std::ptr::null() },
                    lse,
                    corrections: corrections.as_ptr(),
                    delta,
                    slope,
                    positions: slab.positions,
                    query_positions: query_positions.as_ptr(),
                });

                let careful = masked
                    && !*finite.get_or_insert_with(|| {
                        let all = |matrix, columns| {
                            simd.call(AllFinite { matrix, rows: queries, columns })
                        };
                        all(q, self.dim) && all(dout, self.value_dim)
                    });
                for (matrix, right, turned, dims) in [
                    (dout, slab.scores, slab.dv_turned, self.value_dim),
                    (q, products, slab.dk_turned, self.dim),
                ] {
                    let target = turned_tile(turned, dims, index);
                    let size = Size { m: dims, n: lanes, k: queries, piece: OVER_TOKENS };
                    let terms = if careful { Terms::RightNotZero } else { Terms::All };
                    let left = tiles.left(matrix.transposed(), dims, queries, slab.left);
                    let right = tiles.right(right, queries, lanes, slab.right);
                    tiles.multiply(Multiply {
                        target,
                        keep: Keep::All,
                        left,
                        right,
                        size,
                        terms,
                        ahead: Ahead::NOTHING,
                    });
                }
                let careful = masked && !slab.finite[index];
                let join = pending.get_or_insert(Pending {
                    first: index * LANES,
                    keys: 0,
                    careful: false,
                });
                join.keys += keys;
                join.careful |= careful;
            }
            self.multiply_keys(slab, &tile, pending);
        }
    }

    /// dQ ← dQ + D · K over neighbouring tiles of keys.
    unsafe fn multiply_keys(&self, slab: &Slab, tile: &QueryTile, pending: Option<Pending>) {
        let Some(Pending { first, keys, careful }) = pending else { return };
        let (tiles, row) = (self.tiles, self.row_len());
        let size = Size { m: tile.queries, n: row, k: keys, piece: OVER_KEYS };
        // SAFETY: the slab has these keys, and dQ these rows.
        unsafe {
            let products = slab.products.at(0, first).strided();
            let rows = slab.key_rows.at(first, 0);
            let left = tiles.left(products, tile.queries, keys, slab.left);
            let right = tiles.right(rows, keys, row, slab.right);
            let terms = if careful { Terms::LeftNotZero } else { Terms::All };
            tiles.multiply(Multiply {
                target: slab.dq,
                keep: Keep::Nothing,
                left,
                right,
                size,
                terms,
                ahead: Ahead::NOTHING,
            });
            let (rows, columns) = (tile.queries, self.dim);
            tiles.simd().call(AddRows { from: slab.dq, to: tile.dq, rows, columns });
        }
    }
}

/// Tile `index` of matrices [dims × LANES] that lie one after the other.
unsafe fn turned_tile(first: *mut f32, dims: usize, index: usize) -> Rows {
    // SAFETY: the caller has so many tiles.
    Rows { first: unsafe { first.add(index * dims * LANES) }, row: LANES }
}

impl Slab {
    /// The first key of a tile, and how many it has.
    fn tile_keys(&self, tile: usize) -> (usize, usize) {
        (self.first + tile * LANES, (self.keys - tile * LANES).min(LANES))
    }
}

/// Up to [`QUERIES`] queries of one row of blocks.
#[derive(Clone, Copy)]
struct QueryTile {
    head: usize,
    row: u32,
    query: usize,
    queries: usize,
    /// The first one's place in its block.
    within: usize,
    dq: Strided,
}

/// Tiles of keys that wait for their product.
struct Pending {
    /// The first key, counted from the slab's.
    first: usize,
    keys: usize,
    careful: bool,
}
