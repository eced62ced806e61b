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
#[cfg(target_arch = "x86_64")]
pub(crate) mod coarse;
mod cover;
pub(crate) mod differentiate;

use std::sync::atomic::{AtomicU32, Ordering};

use longspan_pattern::Masks;

use self::add::AddRows;
use self::cover::{Coverage, cover, sees};
use self::differentiate::{Differentiate, correct};

use super::finite::{AllFinite, clean, left_out};
use super::pack::{FromLanes, Meet, ToLanes};
use super::{Raw, padded};
use crate::attention::RowStatistics;
use crate::element::Element;
use crate::plan::Stream;
use crate::plan::backward::Grid;
use crate::score::Transform;
use crate::simd::{LANES, Simd};
use crate::tile::{
    Ahead, Keep, Multiply, OVER_DIMS, OVER_TOKENS, Rooms, Rows, Size, Strided, Tiles,
};
use crate::workspace::Scratch;

/// The most queries of a tile.
pub(crate) const QUERIES: usize = 64;

/// Terms a piece of dQ's sum over the keys of a slab: fewer than [`OVER_TOKENS`], since the errors
/// of log-sum-exp and delta, which all terms of the row share, are in it too.
const OVER_KEYS: usize = 16;

/// Everything that is the same for all slabs of a call.
#[derive(Clone, Copy)]
pub(crate) struct Backward<'a, X: Tiles, T> {
    pub(crate) tiles: X,
    pub(crate) transform: T,
    pub(crate) scale: f32,
    /// A slope a query head; empty where the transform looks at none.
    pub(crate) slopes: &'a [f32],
    pub(crate) q: Raw<X::Element>,
    pub(crate) k: Raw<X::Element>,
    pub(crate) v: Raw<X::Element>,
    pub(crate) dout: Raw<X::Element>,
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
    /// K, whole vectors a row, with 0 in place of what isn't finite.
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
    /// Operands, ready: Kᵗ and Vᵗ tile after tile, and K; those of a tile of queries; clean copies of
    /// numbers that aren't finite, and what is made ready of those.
    keys_ready: *mut f32,
    values_ready: *mut f32,
    rows_ready: *mut f32,
    left: [*mut f32; 5],
    right: [*mut f32; 2],
    clean: *mut f32,
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

    /// Numbers of a tile of dKᵗ or dVᵗ.
    fn sums_len(dims: usize) -> usize {
        dims.next_multiple_of(X::TARGET_ROWS) * LANES
    }

    /// Numbers of a tile of Kᵗ or Vᵗ that is ready.
    fn ready_len(dims: usize) -> usize {
        X::right_room(dims, LANES).next_multiple_of(LANES)
    }

    fn lengths(&self) -> [usize; 20] {
        let slab = self.grid.slab.next_multiple_of(LANES);
        let tiles = slab / LANES;
        let (dim, value_dim) = (self.dim, self.value_dim);
        [
            dim * slab,
            value_dim * slab,
            tiles * Self::sums_len(dim),
            tiles * Self::sums_len(value_dim),
            slab * self.row_len(),
            QUERIES * LANES,
            QUERIES * LANES,
            QUERIES * slab,
            QUERIES * self.row_len(),
            slab,
            tiles * Self::ready_len(dim),
            tiles * Self::ready_len(value_dim),
            X::right_room(slab, self.row_len()),
            X::left_room(QUERIES, dim),
            X::left_room(QUERIES, value_dim),
            X::left_room(dim, QUERIES),
            X::left_room(value_dim, QUERIES),
            X::left_room(QUERIES, slab),
            X::right_room(QUERIES, LANES),
            X::right_room(QUERIES, LANES),
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
    /// The tensors must have this entry, head and slab.
    pub(crate) unsafe fn open(
        &self,
        scratch: &mut Scratch,
        (entry, head): (usize, usize),
        slab: u32,
    ) -> Slab {
        let mut next = scratch.numbers.room(self.room());
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
        // SAFETY: scratch of our own; the keys are in the tensors.
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
                    let source = tile_of(turned, Self::sums_len(dims), tile);
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
            let [left_q, left_dout, left_q_turned, left_dout_turned, _] = slab.left;
            let (dim, value_dim) = (self.dim, self.value_dim);
            let q_ready = tiles.left(q, queries, dim, left_q);
            let dout_ready = tiles.left(dout, queries, value_dim, left_dout);
            let q_turned = tiles.left(q.transposed(), dim, queries, left_q_turned);
            let dout_turned = tiles.left(dout.transposed(), value_dim, queries, left_dout_turned);
            let mut finite = None;
            // Neighbouring tiles are multiplied with K together.
            let mut pending: Option<Pending> = None;
            for index in 0..slab.keys.div_ceil(LANES) {
                let (key, keys) = slab.tile_keys(index);
                let mut bits = [0; QUERIES];
                let coverage = cover(stream.layout, &tile, (key, keys), masks, &mut bits);
                if coverage == Coverage::Empty {
                    self.multiply_keys(slab, stream, &tile, pending.take());
                    continue;
                }
                let lanes = padded(keys, X::Simd::WIDTH);
                for (target, left, (turned, ready, dims)) in [
                    (slab.scores, q_ready, (slab.keys_turned, slab.keys_ready, dim)),
                    (
                        slab.gradients,
                        dout_ready,
                        (slab.values_turned, slab.values_ready, value_dim),
                    ),
                ] {
                    let turned = tile_of(turned, dims * LANES, index);
                    let ready = ready.add(index * Self::ready_len(dims));
                    let right = tiles.again(turned, dims, LANES, ready);
                    let size = Size { m: queries, n: lanes, k: dims, piece: OVER_DIMS };
                    let (keep, ahead) = (Keep::Nothing, Ahead::NOTHING);
                    tiles.multiply(Multiply { target, keep, left, right, size, ahead });
                }

                let masked = coverage == Coverage::Partial;
                if T::PLACED {
                    let into = std::slice::from_raw_parts_mut(slab.positions, keys);
                    super::positions(stream.layout.key_positions(), key, base, into);
                }
                let careful = masked
                    && !*finite.get_or_insert_with(|| {
                        let all = |matrix, columns| {
                            simd.call(AllFinite { matrix, rows: queries, columns })
                        };
                        all(q, self.dim) && all(dout, self.value_dim)
                    });
                let products = slab.products.at(0, index * LANES);
                let differentiate = Differentiate {
                    scores: slab.scores,
                    gradients: slab.gradients,
                    products,
                    queries,
                    keys,
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
                };
                let ready = tiles.differentiate(
                    differentiate,
                    Rooms {
                        right: slab.right,
                        left: slab.left[4],
                        slab: slab.products.row,
                        first: index * LANES,
                        keep: careful || !slab.finite[index],
                    },
                );
                for (matrix, turned, (factors, right), (sums, dims)) in [
                    (
                        dout,
                        dout_turned,
                        (slab.scores, ready.probabilities),
                        (slab.dv_turned, value_dim),
                    ),
                    (q, q_turned, (products, ready.products), (slab.dk_turned, dim)),
                ] {
                    let target = tile_of(sums, Self::sums_len(dims), index);
                    let size = Size { m: dims, n: lanes, k: queries, piece: OVER_TOKENS };
                    let left = match careful {
                        false => turned,
                        true => {
                            let copy = clean(matrix, queries, dims, slab.clean.cast());
                            let after = slab.clean.add(QUERIES * dim.max(value_dim));
                            tiles.left(copy.transposed(), dims, queries, after)
                        }
                    };
                    let (keep, ahead) = (Keep::All, Ahead::NOTHING);
                    tiles.multiply(Multiply { target, keep, left, right, size, ahead });
                    if careful {
                        left_out(matrix, queries, dims, |query, dim, x| {
                            for lane in 0..lanes {
                                let factor = *factors.at(query, lane).first;
                                if factor != 0.0 {
                                    *target.at(dim, lane).first += factor * x;
                                }
                            }
                        });
                    }
                }
                pending.get_or_insert(Pending { first: index * LANES, keys: 0 }).keys += keys;
            }
            self.multiply_keys(slab, stream, &tile, pending);
        }
    }

    /// dQ ← dQ + D · K over neighbouring tiles of keys.
    unsafe fn multiply_keys(
        &self,
        slab: &Slab,
        stream: &Stream<'_>,
        tile: &QueryTile,
        pending: Option<Pending>,
    ) {
        let Some(Pending { first, keys }) = pending else { return };
        let (tiles, row, queries) = (self.tiles, self.row_len(), tile.queries);
        // SAFETY: the slab has these keys, and dQ these rows.
        unsafe {
            let products = slab.products.at(0, first);
            let differentiated = X::differentiated(slab.products, slab.products.row, slab.left[4]);
            let ready = tiles.again(slab.key_rows, slab.keys, row, slab.rows_ready);
            tiles.multiply(Multiply {
                target: slab.dq,
                keep: Keep::Nothing,
                left: X::part(differentiated, 0, first),
                right: X::right_part(ready, first, 0),
                size: Size { m: queries, n: row, k: keys, piece: OVER_KEYS },
                ahead: Ahead::NOTHING,
            });
            if !slab.finite[first / LANES..(first + keys).div_ceil(LANES)].iter().all(|&x| x) {
                let matrix = self.k.head(stream.entry, stream.key_head, slab.first + first);
                left_out(matrix, keys, self.dim, |key, dim, x| {
                    for query in 0..queries {
                        let product = *products.at(query, key).first;
                        if product != 0.0 {
                            *slab.dq.at(query, dim).first += product * x;
                        }
                    }
                });
            }
            let (rows, columns) = (queries, self.dim);
            tiles.simd().call(AddRows { from: slab.dq, to: tile.dq, rows, columns });
        }
    }
}

/// Tile `index` of those of `len` numbers, LANES a row, that lie one after the other.
unsafe fn tile_of(first: *mut f32, len: usize, index: usize) -> Rows {
    // SAFETY: the caller has so many tiles.
    Rows { first: unsafe { first.add(index * len) }, row: LANES }
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
}
