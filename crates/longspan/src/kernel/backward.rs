//! The backward pass over one panel of keys.
//!
//! ```text
//! for each panel of keys:
//!     pack them, LANES side by side:                   Kᵗ[dim × lanes], Vᵗ, and K itself in rows
//!     for each tile of queries that sees some of them:
//!         S ← Q · Kᵗ;  P ← exp(S − lse) · exp(−rest)   queries × lanes; masked ones 0
//!         D ← dO · Vᵗ; D ← P ∘ (D − delta) · scale     gradient of the products q·k
//!         dVᵗ ← dVᵗ + dOᵗ · P
//!         dKᵗ ← dKᵗ + Qᵗ · D
//!         dQ ← dQ + D · K                              when it is this key panel's turn
//!     dK, dV ← dK + (dKᵗ)ᵗ, dV + (dVᵗ)ᵗ
//! ```
//!
//! Five products, each score once. Q and dO are read where they lie. The products of a score run
//! over the head dim in the order of the forward pass, so scores have the same bits in both.

mod add;
mod cover;
pub(crate) mod differentiate;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dsoftmax_bf16;
mod group;
mod panel;
mod sums;

use std::sync::atomic::{AtomicU32, Ordering};

use longspan_pattern::Masks;

use self::cover::{Coverage, STRIPS, cover, patches, sees};
use self::differentiate::{Differentiate, correct};
use self::group::{Group, Patch, Pending, Queries, QueryTile};
pub(crate) use self::panel::KeyPanel;
use self::panel::tile_of;

use super::adjust::{self, Adjust};
use super::bias::BiasSums;
use super::finite::AllFinite;
use super::padded;
use crate::exec::Monitor;
use crate::exec::fault::{Site, count_pairs, fault};
use crate::gemm::{Beta, Multiply, OVER_DIMS, Prefetch, Size};
use crate::kernel::fused::{FusedKernel, PackBuffers};
use crate::score::Additions;
use crate::simd::{LANES, Simd};
use crate::softmax::RowStatistics;
use crate::tasks::Stream;
use crate::tasks::backward::Grid;
use crate::tensor::Raw;
use crate::tensor::Strided;

/// The most queries of a tile.
pub(crate) const QUERIES: usize = 64;

/// The most tiles of queries of a group.
const MOST_GROUP: usize = 4;

/// Terms per piece of dQ's sum over the keys of a key panel: fewer than [`OVER_TOKENS`](crate::gemm::OVER_TOKENS), since the
/// errors of log-sum-exp and delta, which all terms of the row share, are in it too.
const OVER_KEYS: usize = 16;

/// Everything that is the same for all key panels of a call.
#[derive(Clone, Copy)]
pub(crate) struct Backward<'a, X: FusedKernel> {
    pub(crate) tiles: X,
    pub(crate) scale: f32,
    pub(crate) additions: Option<&'a Additions<'a>>,
    /// Whether gradients of tables or slopes are wanted.
    pub(crate) bias_gradients: bool,
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

/// Orders the additions to dQ: one counter per chain.
#[derive(Clone, Copy)]
pub(crate) struct OrderedWriter<'a> {
    pub(crate) counter: &'a AtomicU32,
    pub(crate) rank: u32,
}

impl OrderedWriter<'_> {
    /// Waits for the ticket of this rank; `false` where `give_up` says so first.
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

    /// Admits the next ticket.
    pub(crate) fn leave(&self) {
        self.counter.store(self.rank + 1, Ordering::Release);
    }
}

/// Where the dQ of a query panel goes.
#[derive(Clone, Copy)]
pub(crate) enum QueryTarget {
    /// To the tensor.
    Tensor,
    /// To a buffer: rows from the query panel's first query on, `dim` numbers each.
    Buffer(*mut f32),
}

impl<X: FusedKernel> Backward<'_, X> {
    /// All queries of a query panel and head that see keys of the key panel, unless the call stops.
    ///
    /// # Safety
    ///
    /// `panel` must be [open](Self::open), for the entry and key head of the stream. The tensors
    /// must have its entry, `head` and the queries of its layout, and `rows` a number for each of
    /// their rows. The target must have the query panel's dQ, which no other thread reads or
    /// writes: a buffer from the query panel's first query on to the last one of its last row of
    /// blocks. A [session](crate::gemm::MicroKernel::session) of this thread must be alive.
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn query_panel(
        &self,
        panel: &mut KeyPanel,
        stream: &Stream<'_>,
        head: usize,
        query_panel: u32,
        target: QueryTarget,
        (masks, bias): (&mut Masks<'_>, &mut BiasSums),
        monitor: &Monitor<'_>,
    ) {
        const { assert!(X::GROUP <= MOST_GROUP) };
        let layout = stream.layout;
        let first_of_query_panel = query_panel as usize * self.grid.query_panel;
        let mut group = Group::EMPTY;
        for row in self.grid.rows(layout, query_panel) {
            if !sees(layout, row, panel) {
                continue;
            }
            let tokens = layout.row_tokens(row);
            for query in tokens.clone().step_by(QUERIES) {
                let queries = (tokens.end - query).min(QUERIES);
                let dq = match target {
                    // SAFETY: `query_panel` demands a tensor with the queries of the layout.
                    QueryTarget::Tensor => unsafe { self.dq.head(stream.entry, head, query) },
                    QueryTarget::Buffer(buffer) => Strided {
                        // SAFETY: `query_panel` demands a buffer with all queries of the query
                        // panel's rows, which start in it.
                        first: unsafe { buffer.add((query - first_of_query_panel) * self.dim) },
                        row: self.dim as isize,
                        column: 1,
                    },
                };
                if group.len == X::GROUP || group.end().is_some_and(|end| end != query) {
                    if monitor.poll_in_task() {
                        return;
                    }
                    fault(Site::Kernel);
                    // SAFETY: `queries` has the condition of `query_panel`, and `Group` keeps
                    // neighbours that are whole tiles but for the last one.
                    unsafe { self.queries(panel, stream, head, group.tiles(), (masks, bias)) };
                    group = Group::EMPTY;
                }
                group.push(QueryTile { row, query, queries, within: query - tokens.start, dq });
            }
        }
        // SAFETY: as above.
        unsafe { self.queries(panel, stream, head, group.tiles(), (masks, bias)) };
    }

    /// Neighbouring tiles of queries against the key panel.
    ///
    /// # Safety
    ///
    /// That of [`query_panel`](Self::query_panel), for tiles of queries of its rows, at most
    /// `X::GROUP`, that follow each other and have `QUERIES` each, but for the last one.
    unsafe fn queries(
        &self,
        panel: &mut KeyPanel,
        stream: &Stream<'_>,
        head: usize,
        group: &[QueryTile],
        (masks, bias): (&mut Masks<'_>, &mut BiasSums),
    ) {
        let [QueryTile { query, .. }, ..] = *group else { return };
        let queries = group.iter().map(|tile| tile.queries).sum();
        let tiles = self.tiles;
        // SAFETY: `query_panel` demands tensors and statistics with the queries of the layout. The
        // open key panel has room for operands and terms of `X::GROUP · QUERIES` queries, and terms
        // of `LANES` keys. `at` is made here, for `queries` of them; all functions have the condition of
        // this one, and are given tiles of the key panel and of the group. A tile is differentiated
        // before it is summed or multiplied.
        unsafe {
            let q = self.q.head(stream.entry, head, query);
            let dout = self.dout.head(stream.entry, head, query);
            let row = stream.row(head, query);
            let mut corrections = [1.0; MOST_GROUP * QUERIES];
            if let Some(rests) = self.rows.lse_lo {
                correct(&rests[row..row + queries], &mut corrections);
            }
            let mut base = 0;
            if let Some(additions) = self.additions {
                base = adjust::base(stream.layout, query);
                let at = (stream.entry, head);
                additions.query_terms(stream.layout, at, (query, queries), base, panel.query_terms);
            }
            let [left_q, left_dout, left_q_transposed, left_dout_transposed, _] = panel.left;
            let (dim, value_dim) = (self.dim, self.value_dim);
            let at = Queries::<X> {
                all: queries,
                row,
                q,
                dout,
                q_packed: tiles.pack_lhs(q, queries, dim, left_q),
                dout_packed: tiles.pack_lhs(dout, queries, value_dim, left_dout),
                q_transposed: tiles.pack_lhs(q.transposed(), dim, queries, left_q_transposed),
                dout_transposed: tiles.pack_lhs(
                    dout.transposed(),
                    value_dim,
                    queries,
                    left_dout_transposed,
                ),
                corrections: &corrections,
            };
            let mut finite = [None; MOST_GROUP];
            // Neighbouring tiles of keys are multiplied with K together.
            let mut pending: [Pending; MOST_GROUP] = Default::default();
            for index in 0..panel.keys.div_ceil(LANES) {
                let (key, keys) = panel.tile_keys(index);
                if let Some(additions) = self.additions {
                    additions.key_terms(stream.layout, (key, keys), base, panel.key_terms);
                }
                // Neighbouring tiles of queries are summed together.
                let mut run = Patch::default();
                for (number, tile) in group.iter().enumerate() {
                    let mut bits = [0; QUERIES];
                    let coverage = cover(stream.layout, tile, (key, keys), masks, &mut bits);
                    if coverage == Coverage::Empty {
                        let pending = std::mem::take(&mut pending[number]);
                        self.multiply_keys(panel, stream, tile, number, pending);
                        self.sum(panel, &at, index, &run.take());
                        continue;
                    }
                    let first = number * QUERIES;
                    let whole = Patch { queries: first..first + tile.queries, keys: 0..keys };
                    let masked = coverage == Coverage::Partial;
                    let careful = masked
                        && !*finite[number]
                            .get_or_insert_with(|| self.is_finite(&at, number, tile));
                    // Tiles that are summed one by one leave out what none of their queries sees.
                    let mut parts: [Patch; STRIPS] = Default::default();
                    parts[0] = whole.clone();
                    if masked && X::GRAIN == 1 {
                        parts = patches(&bits[..tile.queries], first, keys);
                    }
                    if parts[0] != whole {
                        panel.clear_products(index, tile.queries);
                    }
                    let bits = masked.then_some(&bits);
                    for part in parts.iter().filter(|part| !part.queries.is_empty()) {
                        self.differentiate(panel, &at, index, part, bits, careful);
                        if let Some(additions) = self.additions
                            && self.bias_gradients
                        {
                            let (within, lane) = (part.within(), part.keys.start);
                            let gradients = panel.derivatives.at(within.start, lane);
                            let terms = panel.query_terms.at(0, part.queries.start);
                            let queries = (within.len(), terms);
                            let keys = (part.keys.len(), panel.key_terms.at(0, lane));
                            bias.add(tiles.simd(), additions, head, gradients, queries, keys);
                        }
                        if careful {
                            self.sum(panel, &at, index, &run.take());
                            self.sum_careful(panel, &at, index, part);
                        } else if *part == whole {
                            run.add(part.clone());
                        } else {
                            self.sum(panel, &at, index, part);
                        }
                        let of_panel = |key| index * LANES + key;
                        let keys = of_panel(part.keys.start)..of_panel(part.keys.end);
                        pending[number].add(part.within(), keys);
                    }
                }
                self.sum(panel, &at, index, &run);
            }
            for ((number, tile), pending) in group.iter().enumerate().zip(pending) {
                self.multiply_keys(panel, stream, tile, number, pending);
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

    /// Probabilities and gradients of products of queries and keys of a tile.
    ///
    /// # Safety
    ///
    /// That of [`queries`](Self::queries), for `at` that it made, tile `index` of the key panel, and
    /// queries of one tile; terms of these keys must be placed. Where `GRAIN` is not 1, the part must
    /// be the whole tile.
    unsafe fn differentiate(
        &self,
        panel: &KeyPanel,
        at: &Queries<'_, X>,
        index: usize,
        part: &Patch,
        bits: Option<&[u64; QUERIES]>,
        careful: bool,
    ) {
        let (first, queries) = (part.queries.start, part.queries.len());
        let (within, lane, keys) = (part.within(), part.keys.start, part.keys.len());
        let (tiles, lanes) = (self.tiles, padded(keys, X::Simd::WIDTH));
        let bits = bits.map(|bits| {
            let mut own = [0; QUERIES];
            let words = own.iter_mut().zip(&bits[within.clone()]);
            words.for_each(|(own, &bits)| *own = bits >> lane);
            own
        });
        count_pairs(queries, lanes);
        // SAFETY: `open` has made Kᵗ and Vᵗ of the tile packed, and `queries` its q and dO; scores
        // and gradients have `QUERIES` rows of `LANES`, a multiple of `TARGET_ROWS`. Statistics
        // have the rows of the tile, and `corrections` and terms those of all queries of a group. Products and rooms are those of the key panel, for its keys and the queries of a
        // group.
        unsafe {
            for (target, left, (transposed, packed, dims)) in [
                (panel.scores, at.q_packed, (panel.keys_transposed, panel.keys_packed, self.dim)),
                (
                    panel.gradients,
                    at.dout_packed,
                    (panel.values_transposed, panel.values_packed, self.value_dim),
                ),
            ] {
                let transposed = tile_of(transposed, dims * LANES, index);
                let packed = packed.add(index * Self::packed_len(dims));
                let right = tiles.packed_rhs(transposed, dims, LANES, packed);
                let (target, right) = (target.at(within.start, lane), X::rhs_at(right, 0, lane));
                let size = Size { m: queries, n: lanes, k: dims, piece: OVER_DIMS };
                let (left, keep, ahead) = (X::lhs_at(left, first, 0), Beta::Zero, Prefetch::NONE);
                tiles.multiply(Multiply { target, keep, left, right, size, ahead });
            }
            let row = at.row + first;
            let scores = panel.scores.at(within.start, lane);
            let work = Differentiate {
                scores,
                gradients: panel.gradients.at(within.start, lane),
                products: panel.products.at(first, index * LANES + lane),
                queries,
                keys,
                lanes,
                scale: self.scale,
                adjust: self.additions.map(|additions| Adjust {
                    additions,
                    scale: self.scale,
                    scores,
                    rows: queries,
                    lanes,
                    queries_in_lanes: false,
                    queries: panel.query_terms.at(0, first),
                    keys: panel.key_terms.at(0, lane),
                    derivatives: panel.derivatives.at(within.start, lane),
                    factors: panel.factors.at(within.start, lane),
                }),
                keep_gradients: self.bias_gradients,
                bits: bits.as_ref().map_or(std::ptr::null(), |bits| bits.as_ptr()),
                lse: self.rows.lse.as_ptr().add(row),
                corrections: at.corrections.as_ptr().add(first),
                delta: self.rows.delta.as_ptr().add(row),
            };
            let rooms = PackBuffers {
                right: panel.right,
                left: panel.left[4],
                queries: (first, at.all),
                keys: (index * LANES + lane, panel.products.row),
                keep: careful || !panel.finite[index],
            };
            tiles.differentiate(work, rooms);
        }
    }
}
