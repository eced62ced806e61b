//! Estimates of the attention mass of key blocks, from samples of queries and summaries of keys.
//!
//! ```text
//! for each band of rows of query blocks, for one query head:
//!     pack the sampled queries, LANES side by side:    Qᵗ[terms × lanes]
//!     for each chunk of key blocks that a row of the band attends to:
//!         S[groups × lanes] ← G · Qᵗ                   scores of a group's mean key
//!         S ← S + bounded(V · (Q²)ᵗ)                   clusters: their spread along the query
//!         S ← S + ln(keys of the group that are active); −∞ where none is
//!         m' ← max(m, S);  l ← exp(m − m')·l + Σ exp(S − m')
//!         M[blocks × lanes] ← Σ exp(S − m') over the groups of a block, and m' of the chunk
//!     mass of a block for a row ← Σ over its lanes of M · exp(m' − m) / l
//! ```
//!
//! A lane's numbers depend on its query and on the keys alone, chunks start at fixed columns: the
//! masses of a row are the same in every band, for any number of threads.

mod lanes;
mod steps;

use std::ops::Range;

use longspan_pattern::{Layout, Masks, Run, RunKind};

use self::lanes::ActiveLanes;
use self::steps::{Accumulate, AddSpread, Factors, Reduce, Scale, Squares};
use super::pack::ToLanes;
use crate::exec::Arena;
use crate::gemm::{Beta, MicroKernel, Multiply, OVER_DIMS, Prefetch, Rows, Size};
use crate::simd::{LANES, Simd, WIDEST};
use crate::tensor::{Raw, Strided};

/// The most groups of keys of a chunk.
const MAX_GROUPS: usize = 128;

/// Parts of the head dim whose variances are told apart.
pub(crate) const PARTS: usize = 8;

/// The part of the head dim that a dim belongs to: `d` and `d + dim / 2`, which rotary embedding turns
/// by one angle, to the same, and neighbors.
pub(crate) fn part(d: usize, dim: usize) -> usize {
    let half = dim.div_ceil(2);
    d % half * PARTS.min(half) / half
}

/// The dims of a head in ranges of one part each, ascending.
pub(crate) fn part_ranges(dim: usize) -> Vec<(usize, Range<usize>)> {
    let mut ranges: Vec<(usize, Range<usize>)> = Vec::new();
    for d in 0..dim {
        let own = part(d, dim);
        match ranges.last_mut() {
            Some((part, range)) if *part == own => range.end = d + 1,
            _ => ranges.push((own, d..d + 1)),
        }
    }
    ranges
}

/// How the keys of a group are summarized, and queries that are multiplied with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terms {
    /// Means of neighboring keys.
    Means,
    /// Means of similar keys, and variances of parts of the head dim; queries, and sums of their
    /// squares.
    Clusters,
    /// All of some neighboring keys, as many queries in reverse order.
    Antidiagonals,
}

/// What an estimate is made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sampling {
    pub(crate) terms: Terms,
    /// Queries of a row.
    pub(crate) queries: usize,
    /// Queries per sampled one; divides those of a row.
    pub(crate) step: usize,
    /// Keys of a block.
    pub(crate) keys: usize,
    /// Groups of keys per block; divides it, but for clusters.
    pub(crate) groups: usize,
}

impl Sampling {
    /// Terms of a group for a head dim.
    pub(crate) fn terms(&self, dim: usize) -> usize {
        match self.terms {
            Terms::Means | Terms::Clusters => dim,
            Terms::Antidiagonals => self.keys_per_group() * dim,
        }
    }

    /// Keys of a group of neighbors.
    pub(crate) fn keys_per_group(&self) -> usize {
        self.keys / self.groups
    }

    /// 64-bit words of a set of keys of a block.
    pub(crate) fn words(&self) -> usize {
        self.keys.div_ceil(64)
    }

    /// The first sampled query of a row of so many, and how many there are.
    fn lanes(&self, tokens: usize) -> (usize, usize) {
        let first = match self.terms {
            // The last query of a lane attends to what the others do, under causal patterns.
            Terms::Antidiagonals => self.step.min(tokens) - 1,
            _ => (self.step / 2).min(tokens - 1),
        };
        (first, (tokens - 1 - first) / self.step + 1)
    }

    /// Sampled queries of a whole row.
    fn lanes_per_row(&self) -> usize {
        self.queries / self.step
    }

    /// Rows of blocks per band.
    pub(crate) fn rows_per_band(&self) -> usize {
        LANES / self.lanes_per_row()
    }
}

/// Everything that is the same for all bands of a call.
#[derive(Clone, Copy)]
pub(crate) struct Masses<'a, X: MicroKernel> {
    pub(crate) tiles: X,
    pub(crate) sampling: Sampling,
    pub(crate) scale: f32,
    pub(crate) q: Raw<X::Element>,
    /// Summaries of groups, `[1, summarized key head, group, term]`.
    pub(crate) groups: Raw<X::Element>,
    /// The keys of each group, [`Sampling::words`] words of its block.
    pub(crate) members: &'a [u64],
    /// The logarithm of the number of keys of each group.
    pub(crate) weights: &'a [f32],
    /// Variances of the parts of the head dim in each group; none but for clusters.
    pub(crate) variances: &'a [[f32; PARTS]],
    pub(crate) dim: usize,
    /// Blocks of keys of a key head.
    pub(crate) columns: usize,
    /// The queries of rows, and the masks of Partial runs.
    pub(crate) layout: &'a Layout,
}

/// A band: rows of one head.
#[derive(Debug, Clone)]
pub(crate) struct Band<'a> {
    pub(crate) entry: usize,
    pub(crate) head: usize,
    /// The key head, among those of which there are summaries.
    pub(crate) summarized: usize,
    pub(crate) rows: Range<u32>,
    /// The blocks of keys that each row attends to.
    pub(crate) runs: &'a [Vec<Run>],
}

/// What one thread works with.
#[derive(Debug, Default)]
pub(crate) struct BandScratch {
    matrices: Arena,
    /// `[column of a chunk][LANES]`, relative to the maxima of the chunk; one chunk after the other.
    sums: Arena,
    chunks: Vec<Chunk>,
    mask: Vec<u64>,
}

/// A chunk that was computed.
#[derive(Debug)]
struct Chunk {
    columns: Range<u32>,
    /// The lanes of rows that attend to its columns.
    lanes: ActiveLanes,
    maxima: [f32; LANES],
}

/// Pointers into a thread's matrices.
#[derive(Clone, Copy)]
struct Room {
    queries: Rows,
    scores: Rows,
    /// Half of the sum of squares of each part of the head dim.
    squares: Rows,
    maxima: *mut f32,
    totals: *mut f32,
    packed_queries: *mut f32,
    packed_keys: *mut f32,
}

impl<X: MicroKernel> Masses<'_, X> {
    /// Columns of a chunk.
    fn columns_per_chunk(&self) -> u32 {
        (MAX_GROUPS / self.sampling.groups).max(1) as u32
    }

    fn lanes_per_row(&self) -> usize {
        self.sampling.lanes_per_row()
    }

    /// Adds the masses of the band's rows to `masses`, one list of all columns per row: the sum over
    /// sampled queries of each block's share of the softmax. Blocks that a row does not attend to get
    /// nothing.
    ///
    /// # Safety
    ///
    /// `q` must be a tensor with the entry, the head and the queries of the layout, `dim` wide;
    /// `groups` one of the summaries of its keys, as wide as [`Sampling::terms`]; both readable and
    /// not written. The sampling must have the rows of the layout, and no more than [`LANES`] queries
    /// per row; its blocks of keys too, where runs are Partial; `members`, `weights` and, for clusters, `variances` those of all groups; the band at most
    /// [`Sampling::rows_per_band`] rows of the layout. A session of this thread must be alive.
    pub(crate) unsafe fn band(
        &self,
        band: &Band<'_>,
        scratch: &mut BandScratch,
        masses: &mut [Vec<f32>],
    ) {
        let layout = self.layout;
        let room = self.carve(&mut scratch.matrices);
        let per_block = self.sampling.groups;
        scratch.chunks.clear();
        // SAFETY: as this function demands, with the rooms that `carve` made for these sizes and
        // sums for a column each; what is packed stays until the band is done. Chunks are columns
        // of the layout, so that `groups` has their groups.
        unsafe {
            let right = self.pack(band, room);
            std::slice::from_raw_parts_mut(room.maxima, LANES).fill(f32::NEG_INFINITY);
            std::slice::from_raw_parts_mut(room.totals, LANES).fill(0.0);
            let mut masks = layout.masks_in(std::mem::take(&mut scratch.mask));
            let (mut column, mut computed) = (0, 0);
            while let Some(active) = self.next_chunk(band, column) {
                column = (active.start / self.columns_per_chunk() + 1) * self.columns_per_chunk();
                let lanes = self.active_lanes(band, &active);
                let (first, count) = (active.start as usize * per_block, active.len() * per_block);
                let matrix = self.groups.head(0, band.summarized, first);
                let group = self.group(band, active.start);
                let groups = group..group + count;
                self.multiply(matrix, groups.clone(), right, &lanes, room);
                for index in 0..band.runs.len() {
                    if lanes.contains(index * self.lanes_per_row()) {
                        self.mask_row(band, index, &active, room, &mut masks);
                    }
                }
                let from = computed * LANES;
                computed += active.len();
                let sums = scratch.sums.reserve(computed * LANES).add(from);
                let weights = &self.weights[groups];
                for lanes in lanes.ranges() {
                    self.tiles.simd().call(Accumulate { room, lanes, weights, per_block, sums });
                }
                let maxima = *room.maxima.cast::<[f32; LANES]>();
                scratch.chunks.push(Chunk { columns: active, lanes, maxima });
            }
            scratch.mask = masks.into_words();
            let mut sums = scratch.sums.reserve(computed * LANES);
            for Chunk { columns, lanes, maxima } in &scratch.chunks {
                let mut factors = [0.0; LANES];
                let lists = [maxima.as_ptr(), room.maxima, room.totals];
                self.tiles.simd().call(Factors { lists, into: factors.as_mut_ptr() });
                let per_row = self.lanes_per_row();
                for (index, masses) in masses.iter_mut().enumerate() {
                    let lane = index * per_row;
                    if lanes.contains(lane) {
                        let into = &mut masses[columns.start as usize..columns.end as usize];
                        let (from, factors) = (sums.add(lane), &factors[lane..lane + per_row]);
                        self.tiles.simd().call(Reduce { from, factors, into });
                    }
                }
                sums = sums.add(columns.len() * LANES);
            }
        }
    }

    fn carve(&self, arena: &mut Arena) -> Room {
        let rows = MAX_GROUPS.max(self.sampling.groups).next_multiple_of(X::TARGET_ROWS);
        let line = |len: usize| len.next_multiple_of(WIDEST);
        let terms = self.sampling.terms(self.dim);
        let lens = [
            terms * LANES,
            rows * LANES,
            PARTS * LANES,
            LANES,
            LANES,
            line(X::packed_rhs_len(terms, LANES)),
            line(X::packed_lhs_len(rows, terms)),
        ];
        let mut next = arena.reserve(lens.iter().sum());
        let [queries, scores, squares, maxima, totals, packed_queries, packed_keys] =
            lens.map(|len| {
                let part = next;
                // SAFETY: the parts add up to the room.
                next = unsafe { next.add(len) };
                part
            });
        let [queries, scores, squares] =
            [queries, scores, squares].map(|first| Rows { first, row: LANES });
        Room { queries, scores, squares, maxima, totals, packed_queries, packed_keys }
    }

    /// Computes the scores of some groups, from the first one on, without their weights.
    ///
    /// # Safety
    ///
    /// That of [`band`](Self::band), for at most as many groups as a chunk has.
    unsafe fn multiply(
        &self,
        matrix: Strided<X::Element>,
        groups: Range<usize>,
        right: X::Rhs,
        lanes: &ActiveLanes,
        room: Room,
    ) {
        let (m, terms) = (groups.len(), self.sampling.terms(self.dim));
        // SAFETY: groups and the operand on the right have all terms; the room was carved for them,
        // and the squares of the queries are in it.
        unsafe {
            let left = self.tiles.pack_lhs(matrix, m, terms, room.packed_keys);
            for lanes in lanes.ranges() {
                let right = X::rhs_at(right, 0, lanes.start);
                let size = Size { m, n: lanes.len(), k: terms, piece: OVER_DIMS };
                let target = room.scores.at(0, lanes.start);
                let (keep, ahead) = (Beta::Zero, Prefetch::NONE);
                self.tiles.multiply(Multiply { target, keep, left, right, size, ahead });
                if self.sampling.terms == Terms::Clusters {
                    let (weights, variances) =
                        (&self.weights[groups.clone()], &self.variances[groups.clone()]);
                    self.tiles.simd().call(AddSpread { room, lanes, weights, variances });
                }
            }
        }
    }

    /// The columns of the next chunk, from a column on, that a row of the band attends to.
    fn next_chunk(&self, band: &Band<'_>, from: u32) -> Option<Range<u32>> {
        let rows = || {
            let after = |runs: &Vec<Run>| runs.partition_point(|run| run.end() <= from);
            band.runs.iter().map(move |runs| &runs[after(runs)..])
        };
        let first = rows().filter_map(|runs| runs.first()).map(|run| run.start.max(from)).min()?;
        let end = (first / self.columns_per_chunk() + 1) * self.columns_per_chunk();
        let inside = |run: &&Run| run.start < end;
        let last = rows().filter_map(|runs| runs.iter().take_while(inside).last());
        Some(first..last.map(|run| run.end().min(end)).max()?)
    }

    /// The lanes of the rows that attend to columns of a chunk: often few rows, where a choice was
    /// made before.
    fn active_lanes(&self, band: &Band<'_>, columns: &Range<u32>) -> ActiveLanes {
        let mut lanes = ActiveLanes::default();
        for (index, runs) in band.runs.iter().enumerate() {
            let next = runs.partition_point(|run| run.end() <= columns.start);
            if runs.get(next).is_some_and(|run| run.start < columns.end) {
                lanes.add(index * self.lanes_per_row()..(index + 1) * self.lanes_per_row());
            }
        }
        lanes
    }

    /// Packs the sampled queries of the band.
    ///
    /// # Safety
    ///
    /// That of [`band`](Self::band); `room` must be what [`carve`](Self::carve) gave.
    unsafe fn pack(&self, band: &Band<'_>, room: Room) -> X::Rhs {
        let simd = self.tiles.simd();
        let Sampling { step, terms: kind, .. } = self.sampling;
        let terms = self.sampling.terms(self.dim);
        // SAFETY: sampled queries are those of the rows, lanes those of the band's rows; the room
        // has a row of `LANES` per term.
        unsafe {
            std::ptr::write_bytes(room.queries.first, 0, terms * LANES);
            // Queries of whole rows are sampled evenly over all of them; the last may be shorter.
            let end = band.rows.end;
            let shorter = self.layout.row_tokens(end - 1).len() < self.sampling.queries;
            let whole = band.rows.start..end - u32::from(shorter);
            for rows in [whole.clone(), whole.end..end].into_iter().filter(|rows| !rows.is_empty())
            {
                let token = self.layout.row_tokens(rows.start).start;
                let tokens = self.layout.row_tokens(rows.end - 1).end - token;
                let (first, lanes) = self.sampling.lanes(tokens);
                let lane = (rows.start - band.rows.start) as usize * self.lanes_per_row();
                let sampled = |token: usize| {
                    let rows = self.q.head(band.entry, band.head, token);
                    Strided { row: rows.row * step as isize, ..rows }
                };
                let copy = |token, target, tokens| {
                    let (source, dims) = (sampled(token), self.dim);
                    simd.call(ToLanes { source, tokens, dims, target, lane });
                };
                match kind {
                    Terms::Means | Terms::Clusters => copy(token + first, room.queries, lanes),
                    Terms::Antidiagonals => {
                        for back in 0..step.min(first + 1) {
                            let target = room.queries.at(back * self.dim, 0);
                            copy(token + first - back, target, lanes);
                        }
                    }
                }
            }
            let scale = match kind {
                Terms::Antidiagonals => self.scale / step as f32,
                _ => self.scale,
            };
            simd.call(Scale { queries: room.queries, terms, scale });
            if kind == Terms::Clusters {
                simd.call(Squares { queries: room.queries, dim: self.dim, squares: room.squares });
            }
            self.tiles.pack_rhs(room.queries, terms, LANES, room.packed_queries)
        }
    }

    /// Takes from the scores of the lanes of a row of the band what it does not attend to in the
    /// columns of a chunk.
    ///
    /// # Safety
    ///
    /// The scores must be those of the chunk, and the row one of the band.
    unsafe fn mask_row(
        &self,
        band: &Band<'_>,
        index: usize,
        columns: &Range<u32>,
        room: Room,
        masks: &mut Masks<'_>,
    ) {
        let Sampling { groups, step, .. } = self.sampling;
        let (row, lane) = (band.rows.start + index as u32, index * self.lanes_per_row());
        let tokens = self.layout.row_tokens(row);
        let (first, lanes) = self.sampling.lanes(tokens.len());
        // SAFETY: columns are those of the chunk, groups those of a block and lanes below `LANES`,
        // so that the score is in the matrix.
        let score = |column: u32, group: usize, lane: usize| unsafe {
            let row = (column - columns.start) as usize * groups + group;
            &mut *room.scores.at(row, lane).first
        };
        let clear = |columns: Range<u32>, lanes: Range<usize>| {
            for column in columns {
                for group in 0..groups {
                    for lane in lanes.clone() {
                        *score(column, group, lane) = f32::NEG_INFINITY;
                    }
                }
            }
        };
        // Lanes without a query.
        clear(columns.clone(), lane + lanes..lane + self.lanes_per_row());
        let lanes = lane..lane + lanes;
        let runs = &band.runs[index];
        let mut next = columns.start;
        for run in &runs[runs.partition_point(|run| run.end() <= columns.start)..] {
            if run.start >= columns.end {
                break;
            }
            clear(next..run.start.max(next), lanes.clone());
            let (from, to) = (run.start.max(columns.start), run.end().min(columns.end));
            next = to;
            if run.kind() == RunKind::Full {
                continue;
            }
            for column in from..to {
                let words = masks.get(row, column, run);
                let per_query = words.len() / self.sampling.queries;
                let members = self.members(band, column);
                for lane in lanes.clone() {
                    let query = first + (lane - lanes.start) * step;
                    let active = &words[query * per_query..][..per_query];
                    for (group, members) in members.chunks_exact(per_query).enumerate() {
                        let score = score(column, group, lane);
                        *score = match count_active(members, active) {
                            (0, _) => f32::NEG_INFINITY,
                            (active, all) if active == all => continue,
                            (active, all) => *score + (active as f32 / all as f32).ln(),
                        };
                    }
                }
            }
        }
        clear(next..columns.end, lanes);
    }

    /// The keys of each group of a block.
    fn members(&self, band: &Band<'_>, column: u32) -> &[u64] {
        let words = self.sampling.words();
        &self.members[self.group(band, column) * words..][..self.sampling.groups * words]
    }

    /// The first group of a block, among those of all summarized key heads.
    fn group(&self, band: &Band<'_>, column: u32) -> usize {
        (band.summarized * self.columns + column as usize) * self.sampling.groups
    }
}

/// Members of a group that are active, and all of them.
fn count_active(members: &[u64], active: &[u64]) -> (u32, u32) {
    let both = members.iter().zip(active);
    let count = |words: (&u64, &u64)| ((words.0 & words.1).count_ones(), words.0.count_ones());
    both.map(count).fold((0, 0), |sums, counts| (sums.0 + counts.0, sums.1 + counts.1))
}
