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
mod slab;

use std::sync::atomic::{AtomicU32, Ordering};

use longspan_pattern::Masks;

use self::add::AddRows;
use self::cover::{Coverage, cover, sees};
use self::differentiate::{Differentiate, correct};
pub(crate) use self::slab::Slab;
use self::slab::tile_of;

use super::finite::{AllFinite, clean, left_out};
use super::{Raw, padded};
use crate::arguments::RowStatistics;
use crate::exec::Monitor;
use crate::exec::fault::{Site, fault};
use crate::plan::Stream;
use crate::plan::backward::Grid;
use crate::score::Transform;
use crate::simd::{LANES, Simd};
use crate::tile::{
    Ahead, Keep, Multiply, OVER_DIMS, OVER_TOKENS, Rooms, Rows, Size, Strided, Tiles,
};

/// The most queries of a tile.
pub(crate) const QUERIES: usize = 64;

/// The most tiles of queries of a group.
const MOST_GROUP: usize = 4;

/// Terms a piece of dQ's sum over the keys of a slab: fewer than [`OVER_TOKENS`], since the errors
/// of log-sum-exp and delta, which all terms of the row share, are in it too.
const OVER_KEYS: usize = 16;

/// Everything that is the same for all slabs of a call.
#[derive(Clone, Copy)]
pub(crate) struct Backward<'a, X: Tiles, T> {
    pub(crate) tiles: X,
    pub(crate) transform: T,
    pub(crate) scale: f32,
    /// A slope per query head; empty where the transform looks at none.
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
    /// All queries of a band and head that see keys of the slab, unless the call stops.
    ///
    /// # Safety
    ///
    /// `slab` must be [open](Self::open), for the entry and key head of the stream. The tensors
    /// must have its entry, `head` and the queries of its layout, and `rows` a number for each of
    /// their rows. The target must have the band's dQ, which no other thread reads or writes: a
    /// buffer from the band's first query on to the last one of its last row of blocks. A
    /// [session](Tiles::session) of this thread must be alive.
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn band(
        &self,
        slab: &mut Slab,
        stream: &Stream<'_>,
        head: usize,
        band: u32,
        target: QueryTarget,
        masks: &mut Masks<'_>,
        monitor: &Monitor<'_>,
    ) {
        const { assert!(X::GROUP <= MOST_GROUP) };
        let layout = stream.layout;
        let first_of_band = band as usize * self.grid.band;
        let mut group = Group::EMPTY;
        for row in self.grid.rows(layout, band) {
            if !sees(layout, row, slab) {
                continue;
            }
            let tokens = layout.row_tokens(row);
            let (start, end) = (tokens.start as usize, tokens.end as usize);
            for query in (start..end).step_by(QUERIES) {
                let queries = (end - query).min(QUERIES);
                let dq = match target {
                    // SAFETY: `band` demands a tensor with the queries of the layout.
                    QueryTarget::Tensor => unsafe { self.dq.head(stream.entry, head, query) },
                    QueryTarget::Buffer(buffer) => Strided {
                        // SAFETY: `band` demands a buffer with all queries of the band's rows,
                        // which start in it.
                        first: unsafe { buffer.add((query - first_of_band) * self.dim) },
                        row: self.dim as isize,
                        column: 1,
                    },
                };
                if group.len == X::GROUP || group.end().is_some_and(|end| end != query) {
                    if monitor.poll_in_task() {
                        return;
                    }
                    fault(Site::Kernel);
                    // SAFETY: `queries` has the condition of `band`, and `Group` keeps neighbours that
                    // are whole tiles but for the last one.
                    unsafe { self.queries(slab, stream, head, group.tiles(), masks) };
                    group = Group::EMPTY;
                }
                group.push(QueryTile { row, query, queries, within: query - start, dq });
            }
        }
        // SAFETY: as above.
        unsafe { self.queries(slab, stream, head, group.tiles(), masks) };
    }

    /// Neighbouring tiles of queries against the slab.
    ///
    /// # Safety
    ///
    /// That of [`band`](Self::band), for tiles of queries of its rows, at most `X::GROUP`, that
    /// follow each other and have `QUERIES` each, but for the last one.
    unsafe fn queries(
        &self,
        slab: &mut Slab,
        stream: &Stream<'_>,
        head: usize,
        group: &[QueryTile],
        masks: &mut Masks<'_>,
    ) {
        let [QueryTile { query, .. }, ..] = *group else { return };
        let queries = group.iter().map(|tile| tile.queries).sum();
        let tiles = self.tiles;
        // SAFETY: `band` demands tensors and statistics with the queries of the layout. The open
        // slab has room for operands of `X::GROUP · QUERIES` queries, and `LANES` positions. `at`
        // is made here, for `queries` of them; all functions have the condition of this one, and
        // are given tiles of the slab and of the group. A tile is differentiated before it is
        // summed or multiplied.
        unsafe {
            let q = self.q.head(stream.entry, head, query);
            let dout = self.dout.head(stream.entry, head, query);
            let row = stream.row(head, query);
            let mut corrections = [1.0; MOST_GROUP * QUERIES];
            if let Some(rests) = self.rows.lse_rest {
                correct(&rests[row..row + queries], &mut corrections);
            }
            let base = if T::PLACED { super::base(stream.layout, query) } else { 0 };
            let mut positions = [0.0; MOST_GROUP * QUERIES];
            if T::PLACED {
                let into = &mut positions[..queries];
                super::positions(stream.layout.query_positions(), query, base, into);
            }
            let [left_q, left_dout, left_q_turned, left_dout_turned, _] = slab.left;
            let (dim, value_dim) = (self.dim, self.value_dim);
            let at = Queries::<X> {
                head,
                all: queries,
                row,
                q,
                dout,
                q_ready: tiles.left(q, queries, dim, left_q),
                dout_ready: tiles.left(dout, queries, value_dim, left_dout),
                q_turned: tiles.left(q.transposed(), dim, queries, left_q_turned),
                dout_turned: tiles.left(dout.transposed(), value_dim, queries, left_dout_turned),
                corrections: &corrections,
                positions: &positions,
            };
            let mut finite = [None; MOST_GROUP];
            // Neighbouring tiles of keys are multiplied with K together.
            let mut pending: [Option<Pending>; MOST_GROUP] = [None; MOST_GROUP];
            for index in 0..slab.keys.div_ceil(LANES) {
                let (key, keys) = slab.tile_keys(index);
                if T::PLACED {
                    let into = std::slice::from_raw_parts_mut(slab.positions, keys);
                    super::positions(stream.layout.key_positions(), key, base, into);
                }
                // Neighbouring tiles of queries are summed together.
                let mut run = Run::default();
                for (number, tile) in group.iter().enumerate() {
                    let mut bits = [0; QUERIES];
                    let coverage = cover(stream.layout, tile, (key, keys), masks, &mut bits);
                    if coverage == Coverage::Empty {
                        self.multiply_keys(slab, stream, tile, number, pending[number].take());
                        self.sum(slab, &at, index, run.take());
                        continue;
                    }
                    let masked = coverage == Coverage::Partial;
                    let careful = masked
                        && !*finite[number]
                            .get_or_insert_with(|| self.is_finite(&at, number, tile));
                    let bits = masked.then_some(&bits);
                    self.differentiate(slab, &at, index, (number, tile.queries), bits, careful);
                    let one = Run { first: number * QUERIES, queries: tile.queries };
                    if careful {
                        self.sum(slab, &at, index, run.take());
                        self.sum_careful(slab, &at, index, one);
                    } else {
                        run.add(one);
                    }
                    let first = index * LANES;
                    pending[number].get_or_insert(Pending { first, keys: 0 }).keys += keys;
                }
                self.sum(slab, &at, index, run);
            }
            for (number, tile) in group.iter().enumerate() {
                self.multiply_keys(slab, stream, tile, number, pending[number]);
            }
        }
    }

    /// Whether the queries and dO of a tile are finite.
    ///
    /// # Safety
    ///
    /// `tile` must be number `number` of the group that `at` was made of by
    /// [`queries`](Self::queries).
    unsafe fn is_finite(&self, at: &Queries<'_, X>, number: usize, tile: &QueryTile) -> bool {
        let simd = self.tiles.simd();
        [(at.q, self.dim), (at.dout, self.value_dim)].into_iter().all(|(matrix, columns)| {
            // SAFETY: tiles before it have `QUERIES` rows, and its own are in both tensors.
            unsafe {
                let matrix = matrix.at(number * QUERIES, 0);
                simd.call(AllFinite { matrix, rows: tile.queries, columns })
            }
        })
    }

    /// Probabilities and gradients of products of a tile of queries and a tile of keys.
    ///
    /// # Safety
    ///
    /// That of [`queries`](Self::queries), for `at` that it made, tile `index` of the slab, and
    /// tile `number` of the group, of `queries` queries; positions of these keys must be placed.
    unsafe fn differentiate(
        &self,
        slab: &Slab,
        at: &Queries<'_, X>,
        index: usize,
        (number, queries): (usize, usize),
        bits: Option<&[u64; QUERIES]>,
        careful: bool,
    ) {
        let (first, keys) = (number * QUERIES, slab.tile_keys(index).1);
        let (tiles, lanes) = (self.tiles, padded(keys, X::Simd::WIDTH));
        // SAFETY: `open` has made Kᵗ and Vᵗ of the tile ready, and `queries` its q and dO; scores
        // and gradients have `QUERIES` rows of `LANES`, a multiple of `TARGET_ROWS`. Statistics
        // have the rows of the tile, and `corrections` and `positions` elements of all queries of a
        // group. Products and rooms are those of the slab, for its keys and the queries of a group.
        unsafe {
            for (target, left, (turned, ready, dims)) in [
                (slab.scores, at.q_ready, (slab.keys_turned, slab.keys_ready, self.dim)),
                (
                    slab.gradients,
                    at.dout_ready,
                    (slab.values_turned, slab.values_ready, self.value_dim),
                ),
            ] {
                let turned = tile_of(turned, dims * LANES, index);
                let ready = ready.add(index * Self::ready_len(dims));
                let right = tiles.again(turned, dims, LANES, ready);
                let size = Size { m: queries, n: lanes, k: dims, piece: OVER_DIMS };
                let (left, keep, ahead) = (X::part(left, first, 0), Keep::Nothing, Ahead::NOTHING);
                tiles.multiply(Multiply { target, keep, left, right, size, ahead });
            }
            let row = at.row + first;
            let work = Differentiate {
                scores: slab.scores,
                gradients: slab.gradients,
                products: slab.products.at(first, index * LANES),
                queries,
                keys,
                lanes,
                scale: self.scale,
                transform: self.transform,
                bits: bits.map_or(std::ptr::null(), |bits| bits.as_ptr()),
                lse: self.rows.lse.as_ptr().add(row),
                corrections: at.corrections.as_ptr().add(first),
                delta: self.rows.delta.as_ptr().add(row),
                slope: if T::PLACED { self.slopes[at.head] } else { 0.0 },
                positions: slab.positions,
                query_positions: at.positions.as_ptr().add(first),
            };
            let rooms = Rooms {
                right: slab.right,
                left: slab.left[4],
                queries: (first, at.all),
                keys: (index * LANES, slab.products.row),
                keep: careful || !slab.finite[index],
            };
            tiles.differentiate(work, rooms);
        }
    }

    /// dVᵗ ← dVᵗ + dOᵗ · P and dKᵗ ← dKᵗ + Qᵗ · D over neighbouring tiles of queries.
    ///
    /// # Safety
    ///
    /// That of [`differentiate`](Self::differentiate), which must have been called for the tiles of
    /// the run and tile `index` of the slab, and for no other tile of keys since.
    unsafe fn sum(&self, slab: &Slab, at: &Queries<'_, X>, index: usize, run: Run) {
        if run.queries == 0 {
            return;
        }
        // SAFETY: `sums` and `add_products` have the condition of `sum`; the run starts with a
        // tile, which is a multiple of `GRAIN`.
        unsafe {
            for sum in self.sums(slab, at, index, run) {
                self.add_products(&sum, X::part(sum.turned, 0, run.first), run);
            }
        }
    }

    /// The same for one tile with elements that aren't finite, which only keys that are seen may
    /// meet.
    ///
    /// # Safety
    ///
    /// That of [`sum`](Self::sum), for a run of one tile, whose matrices were kept.
    unsafe fn sum_careful(&self, slab: &Slab, at: &Queries<'_, X>, index: usize, run: Run) {
        // SAFETY: as in `sum`. `clean_room` is `QUERIES` rows of the wider of both, for elements no
        // larger than f32, and `left_room` of what is made ready of them behind that.
        unsafe {
            for sum in self.sums(slab, at, index, run) {
                let (matrix, dims) = (sum.matrix.at(run.first, 0), sum.dims);
                let copy = clean(matrix, run.queries, dims, slab.clean.cast());
                let after = slab.clean.add(QUERIES * self.dim.max(self.value_dim));
                let left = self.tiles.left(copy.transposed(), dims, run.queries, after);
                self.add_products(&sum, left, run);
                left_out(matrix, run.queries, dims, |query, dim, x| {
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
    /// That of [`sum`](Self::sum), which `sum` must be one of; `left` must be ready, `sum.dims` ×
    /// the queries of the run.
    unsafe fn add_products(&self, sum: &Sum<X>, left: X::Left, run: Run) {
        let (target, keep, ahead) = (sum.target, Keep::All, Ahead::NOTHING);
        let size = Size { m: sum.dims, n: sum.lanes, k: run.queries, piece: OVER_TOKENS };
        // SAFETY: the operand on the right has the queries of the run, and starts with a tile, a
        // multiple of `GRAIN`; the target has `dims` rows, rounded up to `TARGET_ROWS`
        // (`sums_len`), of `LANES`.
        unsafe {
            let right = X::right_part(sum.right, run.first, 0);
            self.tiles.multiply(Multiply { target, keep, left, right, size, ahead });
        }
    }

    /// The two sums over queries of a tile of keys: dV's and dK's.
    ///
    /// # Safety
    ///
    /// That of [`sum`](Self::sum).
    unsafe fn sums(&self, slab: &Slab, at: &Queries<'_, X>, index: usize, run: Run) -> [Sum<X>; 2] {
        let lanes = padded(slab.tile_keys(index).1, X::Simd::WIDTH);
        // SAFETY: products have the queries of a group and the keys of the slab, the run and tile
        // `index` among them; `differentiate` has been given the rooms on the right. There is a
        // tile of sums for each of keys.
        unsafe {
            let products = slab.products.at(run.first, index * LANES);
            [
                (
                    at.dout,
                    at.dout_turned,
                    slab.scores,
                    slab.dv_turned,
                    self.value_dim,
                    slab.right[0],
                ),
                (at.q, at.q_turned, products, slab.dk_turned, self.dim, slab.right[1]),
            ]
            .map(|(matrix, turned, factors, sums, dims, room)| Sum {
                matrix,
                turned,
                factors,
                right: self.tiles.again(factors, at.all, lanes, room),
                target: tile_of(sums, Self::sums_len(dims), index),
                dims,
                lanes,
            })
        }
    }

    /// dQ ← dQ + D · K over neighbouring tiles of keys.
    ///
    /// # Safety
    ///
    /// That of [`queries`](Self::queries), for tile `number` of the group, which must have been
    /// differentiated against the pending keys.
    unsafe fn multiply_keys(
        &self,
        slab: &Slab,
        stream: &Stream<'_>,
        tile: &QueryTile,
        number: usize,
        pending: Option<Pending>,
    ) {
        let Some(Pending { first, keys }) = pending else { return };
        let (tiles, row, queries) = (self.tiles, self.row_len(), tile.queries);
        // SAFETY: pending keys are some of the slab's, from a tile on, and the slab is open: it has
        // K in rows, ready, products of the group and of its keys, and `QUERIES` rows of `row`
        // elements for dQ alone. `k` has the keys. `tile.dq` has the rows of the tile, which `band`
        // demands that no other thread reads or writes.
        unsafe {
            let products = slab.products.at(number * QUERIES, first);
            let differentiated = X::differentiated(slab.products, slab.products.row, slab.left[4]);
            let ready = tiles.again(slab.key_rows, slab.keys, row, slab.rows_ready);
            tiles.multiply(Multiply {
                target: slab.dq,
                keep: Keep::Nothing,
                left: X::part(differentiated, number * QUERIES, first),
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

/// Up to [`QUERIES`] queries of one row of blocks.
#[derive(Clone, Copy)]
struct QueryTile {
    row: u32,
    query: usize,
    queries: usize,
    /// The first one's place in its block.
    within: usize,
    dq: Strided,
}

/// Neighbouring tiles of queries, all but the last one of [`QUERIES`].
struct Group {
    tiles: [QueryTile; MOST_GROUP],
    len: usize,
}

impl Group {
    const EMPTY: Group = {
        let dq = Strided { first: std::ptr::null(), row: 0, column: 0 };
        let nobody = QueryTile { row: 0, query: 0, queries: 0, within: 0, dq };
        Group { tiles: [nobody; MOST_GROUP], len: 0 }
    };

    fn tiles(&self) -> &[QueryTile] {
        &self.tiles[..self.len]
    }

    fn push(&mut self, tile: QueryTile) {
        self.tiles[self.len] = tile;
        self.len += 1;
    }

    /// The query that the next tile must start with, if there are tiles: none does after a short one.
    fn end(&self) -> Option<usize> {
        let last = self.tiles().last()?;
        Some(if last.queries == QUERIES { last.query + QUERIES } else { usize::MAX })
    }
}

/// The queries of a group, and what is made of them once for all keys of a slab.
struct Queries<'a, X: Tiles> {
    head: usize,
    all: usize,
    /// The first one's place among all rows.
    row: usize,
    q: Strided<X::Element>,
    dout: Strided<X::Element>,
    q_ready: X::Left,
    dout_ready: X::Left,
    q_turned: X::Left,
    dout_turned: X::Left,
    corrections: &'a [f32],
    positions: &'a [f32],
}

/// Neighbouring queries of a group.
#[derive(Clone, Copy, Default)]
struct Run {
    first: usize,
    queries: usize,
}

impl Run {
    /// Goes on with a tile that follows.
    fn add(&mut self, tile: Run) {
        let first = if self.queries == 0 { tile.first } else { self.first };
        *self = Run { first, queries: self.queries + tile.queries };
    }

    fn take(&mut self) -> Run {
        std::mem::take(self)
    }
}

/// `target ← target + matrixᵗ · factors`, for a tile of keys.
struct Sum<X: Tiles> {
    matrix: Strided<X::Element>,
    turned: X::Left,
    factors: Rows,
    right: X::Right,
    target: Rows,
    dims: usize,
    lanes: usize,
}

/// Tiles of keys that wait for their product.
#[derive(Clone, Copy)]
struct Pending {
    /// The first key, counted from the slab's.
    first: usize,
    keys: usize,
}
