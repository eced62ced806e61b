//! The forward pass over one row of blocks.
//!
//! ```text
//! for each row of query blocks, for the query heads that share a key head:
//!     pack the queries, LANES side by side:            Qᵗ[dim × lanes]
//!     (m, l, A) ← the state so far, or (−∞, 0, 0)
//!     for each stretch of keys that the row sees:
//!         S[keys × lanes] ← K · Qᵗ                     scores, transformed; masked ones −∞
//!         m' ← max(m, S);  a ← exp(m − m');  P ← exp(S − m')
//!         l ← a·l + ΣP;    A ← a·A + Vᵗ · P            A[dim × lanes]
//!     out ← A / l,  lse ← m + ln l                     or the state itself
//! ```
//!
//! Sums over keys run down the columns, so each lane is a query and nothing is summed across a
//! vector. K and V are read where they lie.

pub(crate) mod coarse;
mod few;
mod lists;
pub(crate) mod softmax;

use longspan_pattern::Masks;

pub(crate) use self::lists::Lists;
use self::lists::{Piece, even};
use self::softmax::{Fold, Softmax};

use super::finite::{AllFinite, clean, left_out};
use super::pack::{FromLanes, Meet, ToLanes, transpose_bits};
use super::{Raw, padded};
use crate::plan::{Stream, Unit};
use crate::score::Transform;
use crate::simd::{LANES, Simd};
use crate::state::RawState;
use crate::tile::{Ahead, Rows, Stretch, Strided, Tiles};
use crate::workspace::{Arena, Scratch};

/// The most keys between two looks at the maximum: their scores and values stay in the first-level
/// cache, and it divides by the rows of a register tile.
const STRETCH: usize = 128;

/// The most keys of a stretch of few lanes, which has as many scores as one of all.
const LONGEST: usize = 4 * STRETCH;

/// The most keys of a stretch of so many lanes.
fn most_keys<X: Tiles>(lanes: usize) -> usize {
    (X::MOST_SCORES / lanes).min(LONGEST)
}

/// Keys whose sums are added up before they are added to those of all others: a third level of sums,
/// so that errors of a row of thousands of keys stay those of a short one.
const FOLD: u32 = 1024;

/// Everything that is the same for all rows of a call.
#[derive(Clone, Copy)]
pub(crate) struct Forward<'a, X: Tiles, T> {
    pub(crate) tiles: X,
    pub(crate) transform: T,
    pub(crate) scale: f32,
    /// A slope a query head; empty where the transform looks at none.
    pub(crate) slopes: &'a [f32],
    pub(crate) q: Raw<X::Element>,
    pub(crate) k: Raw<X::Element>,
    pub(crate) v: Raw<X::Element>,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) keys: usize,
}

/// Where the rows of a unit go.
#[derive(Clone, Copy)]
pub(crate) enum Target<E> {
    /// To output and log-sum-exp; its rest may be null.
    Output { out: Raw<E>, lse: *mut f32, lse_rest: *mut f32 },
    /// On from a state, back into it: a row for each batch entry, head and token.
    Extend(RawState),
    /// Into a state of its own: the lanes of this unit are rows from the given one on.
    Part(RawState, usize),
}

// SAFETY: units write disjoint rows.
unsafe impl<E> Send for Target<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for Target<E> {}

/// One tile: up to [`LANES`] queries, of one head or of several.
#[derive(Clone, Copy)]
struct Tile {
    /// Qᵗ, and where it is kept ready.
    queries: Rows,
    ready: *mut f32,
    /// A, and l as one more row of it.
    sums: Rows,
    /// The same of earlier stretches, and the maxima they are relative to.
    folded: Rows,
    folded_maxima: *mut f32,
    /// Keys since they were folded, and how often they were.
    counts: *mut [u32; 2],
    /// m and a.
    maxima: *mut f32,
    factors: *mut f32,
    /// Positions and slopes, where the transform looks at them.
    positions: *mut f32,
    slopes: *mut f32,
    /// Lanes that hold a query.
    lanes: usize,
    /// The first of them among the lanes of the unit.
    first: usize,
}

/// Scratch of a thread, cut for one unit.
struct Room {
    tiles: *mut f32,
    tile: usize,
    scores: *mut f32,
    key_positions: *mut f32,
    keys: *mut f32,
    values: *mut f32,
    right: *mut f32,
    /// For clean copies of values, and what is made ready of them: null in a first attempt.
    clean: *mut f32,
}

/// Some keys and their values, ready.
#[derive(Clone, Copy)]
struct Ready<X: Tiles> {
    /// The first key.
    first: usize,
    keys: X::Left,
    values: X::Left,
}

/// The rows of blocks of a unit, and how their tiles are numbered: those of a row together.
#[derive(Clone, Copy)]
struct Stack<'a, E> {
    stream: &'a Stream<'a>,
    rows: (u32, u32),
    /// Tiles a full row has.
    per_row: usize,
    target: Target<E>,
    /// Whether products leave out what is masked.
    careful: bool,
    /// Whether there is only one tile: keys and values are then used once, and memory is what
    /// limits, so they are asked for early.
    lone: bool,
}

impl<E> Stack<'_, E> {
    /// The first query of a row, and how many it has.
    fn tokens(&self, row: u32) -> (usize, usize) {
        let tokens = self.stream.layout.row_tokens(row);
        (tokens.start as usize, (tokens.end - tokens.start) as usize)
    }

    /// Queries × heads of a row.
    fn lanes(&self, row: u32) -> usize {
        self.tokens(row).1 * self.stream.heads.len()
    }
}

impl<X: Tiles, T: Transform> Forward<'_, X, T> {
    fn tile_len(&self) -> usize {
        let ready = X::right_room(self.dim, LANES).next_multiple_of(LANES);
        LANES * (self.dim + 2 * (self.sum_rows() + 1) + 6) + ready
    }

    /// Rows of A.
    fn sum_rows(&self) -> usize {
        self.value_dim.next_multiple_of(X::TARGET_ROWS)
    }

    fn lengths(&self, tiles: usize) -> [usize; 6] {
        [
            tiles * self.tile_len(),
            (STRETCH + X::TARGET_ROWS) * LANES,
            LONGEST,
            X::left_room(LONGEST, self.dim),
            X::left_room(self.value_dim, LONGEST),
            X::right_room(LONGEST, LANES),
        ]
    }

    /// Numbers of scratch for clean values.
    fn clean_room(&self) -> usize {
        LONGEST * self.value_dim + X::left_room(self.value_dim, LONGEST)
    }

    /// Numbers of scratch that units of up to so many tiles need.
    pub(crate) fn room(&self, tiles: usize) -> usize {
        let many = self.lengths(tiles).iter().map(|len| len.next_multiple_of(LANES)).sum();
        self.few_room().max(many)
    }

    fn cut(&self, arena: &mut Arena, tiles: usize) -> Room {
        let mut next = arena.room(self.room(tiles));
        let [tiles, scores, key_positions, keys, values, right] = self.lengths(tiles).map(|len| {
            let part = next;
            // SAFETY: the parts add up to the room.
            next = unsafe { next.add(len.next_multiple_of(LANES)) };
            part
        });
        let (tile, clean) = (self.tile_len(), std::ptr::null_mut());
        Room { tiles, tile, scores, key_positions, keys, values, right, clean }
    }

    /// Tile `index` of a row.
    fn tile(&self, room: &Room, stack: &Stack<'_, X::Element>, row: u32, index: usize) -> Tile {
        let lanes = stack.lanes(row);
        let number = (row - stack.rows.0) as usize * stack.per_row + index;
        // SAFETY: `room` holds the tiles of all rows.
        unsafe {
            let queries = room.tiles.add(number * room.tile);
            let sums = queries.add(self.dim * LANES);
            let folded = sums.add((self.sum_rows() + 1) * LANES);
            let rows = folded.add((self.sum_rows() + 1) * LANES);
            Tile {
                queries: Rows { first: queries, row: LANES },
                ready: rows.add(6 * LANES),
                sums: Rows { first: sums, row: LANES },
                folded: Rows { first: folded, row: LANES },
                maxima: rows,
                folded_maxima: rows.add(LANES),
                factors: rows.add(2 * LANES),
                positions: rows.add(3 * LANES),
                slopes: rows.add(4 * LANES),
                counts: rows.add(5 * LANES).cast(),
                lanes: (lanes - index * LANES).min(LANES),
                first: index * LANES,
            }
        }
    }

    /// The tiles of a row.
    fn tiles_of(
        &self,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        row: u32,
    ) -> impl Iterator<Item = Tile> + Clone {
        let lanes = stack.lanes(row);
        (0..lanes.div_ceil(LANES)).map(move |index| self.tile(room, stack, row, index))
    }

    /// Computes the rows of `unit`.
    ///
    /// # Safety
    ///
    /// The tensors and the target must be as large as the layout and the stream say, and nobody
    /// else may write the rows of this unit.
    pub(crate) unsafe fn rows(
        &self,
        stream: &Stream<'_>,
        unit: &Unit,
        target: Target<X::Element>,
        masks: &mut Masks<'_>,
        scratch: &mut Scratch,
    ) {
        let per_row = stream.lanes().div_ceil(LANES);
        let tiles = per_row * (unit.rows.1 - unit.rows.0) as usize;
        let lone = tiles == 1;
        let mut stack = Stack { stream, rows: unit.rows, per_row, target, careful: false, lone };
        if unit.rows.1 - unit.rows.0 == 1 && stack.lanes(unit.rows.0) <= few::FEW {
            // SAFETY: the caller's.
            return unsafe { self.few(&mut stack, unit, masks, scratch) };
        }
        let mut room = self.cut(&mut scratch.numbers, tiles);
        let lists = &mut scratch.lists;
        // SAFETY: lanes stand for tokens of these rows; keys are those that the layout names.
        unsafe {
            if self.attempt(&stack, unit, &room, masks, lists) {
                return;
            }
            // A sum isn't finite, and something was masked: was it only 0 · ∞?
            stack.careful = true;
            room.clean = scratch.clean.room(self.clean_room());
            self.attempt(&stack, unit, &room, masks, lists);
        }
    }

    /// Computes the rows, and writes them unless a careful attempt has to follow.
    unsafe fn attempt(
        &self,
        stack: &Stack<'_, X::Element>,
        unit: &Unit,
        room: &Room,
        masks: &mut Masks<'_>,
        lists: &mut Lists,
    ) -> bool {
        let layout = stack.stream.layout;
        let mut masked = false;
        // SAFETY: the caller's.
        unsafe {
            for row in unit.rows.0..unit.rows.1 {
                for tile in self.tiles_of(room, stack, row) {
                    self.start(&tile, stack, row);
                }
            }
            // What all rows see in full is read once for all of them.
            lists.share(layout, unit);
            for &(from, to) in &lists.shared {
                let (mut key, end) = (from as usize, to as usize);
                while key < end {
                    let keys = even(end - key, most_keys::<X>(X::MOST_LANES));
                    let keys = keys.next_multiple_of(X::GRAIN).min(end - key);
                    let ready = self.ready(room, stack, key, keys);
                    // Positions are counted from those of a row, so rows can't go together then.
                    let together = if T::PLACED { 1 } else { unit.rows.1 - unit.rows.0 };
                    for first in (unit.rows.0..unit.rows.1).step_by(together as usize) {
                        self.place_keys(room, stack, first, key, keys);
                        let tiles = (first..first + together)
                            .flat_map(|row| self.tiles_of(room, stack, row));
                        let all = |lanes| Part { keys: (key, keys), offset: 0, lanes, bits: None };
                        self.tiles.attend(tiles.clone().flat_map(|tile| {
                            let parts = self.parts(all((0, tile.lanes)));
                            parts.map(move |part| self.stretch(&tile, room, stack, &ready, part))
                        }));
                        tiles.for_each(|tile| self.count(&tile, keys));
                    }
                    key += keys;
                }
            }
            for row in unit.rows.0..unit.rows.1 {
                lists.rest(layout, row, unit.columns);
                let mut at = 0;
                while at < lists.pieces.len() {
                    // Pieces that touch go together, cut evenly; long Full ones by themselves, so
                    // that they are not cut into groups of vectors.
                    let mut end = at + 1;
                    while end < lists.pieces.len()
                        && lists.pieces[end].from == lists.pieces[end - 1].to
                        && lists.pieces[end].is_long() == lists.pieces[end - 1].is_long()
                    {
                        end += 1;
                    }
                    let pieces = &lists.pieces[at..end];
                    let (mut key, last) =
                        (pieces[0].from as usize, pieces[pieces.len() - 1].to as usize);
                    while key < last {
                        let keys = even(last - key, LONGEST);
                        masked |= self.mixed(
                            stack,
                            room,
                            row,
                            pieces,
                            (key, keys),
                            masks,
                            &mut lists.bits,
                        );
                        key += keys;
                    }
                    at = end;
                }
            }
            if masked && !stack.careful && !self.all_finite(stack, unit, room) {
                return false;
            }
            for row in unit.rows.0..unit.rows.1 {
                for tile in self.tiles_of(room, stack, row) {
                    self.end(&tile, stack, row);
                }
            }
        }
        true
    }

    /// Whether the sums of all rows are finite.
    unsafe fn all_finite(&self, stack: &Stack<'_, X::Element>, unit: &Unit, room: &Room) -> bool {
        (unit.rows.0..unit.rows.1).all(|row| {
            self.tiles_of(room, stack, row).all(|tile| {
                let finite = |sums: Rows| {
                    let (matrix, rows) = (sums.strided(), self.value_dim);
                    self.tiles.simd().call(AllFinite { matrix, rows, columns: tile.lanes })
                };
                // SAFETY: the tile is scratch of our own.
                let folded = unsafe { (*tile.counts)[1] > 0 };
                finite(tile.sums) && (!folded || finite(tile.folded))
            })
        })
    }

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
    unsafe fn start(&self, tile: &Tile, stack: &Stack<'_, X::Element>, row: u32) {
        let simd = self.tiles.simd();
        let (stream, target) = (stack.stream, stack.target);
        let (first, tokens) = stack.tokens(row);
        // SAFETY: the tile is scratch of our own; rows of tensors are those of its lanes.
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
                if T::PLACED {
                    let positions = std::slice::from_raw_parts_mut(tile.positions.add(lane), count);
                    let base = super::base(stream.layout, first);
                    let of = stream.layout.query_positions();
                    super::positions(of, first + token, base, positions);
                    let slopes = std::slice::from_raw_parts_mut(tile.slopes.add(lane), count);
                    slopes.fill(self.slopes[head]);
                }
                if let Target::Extend(state) = target {
                    let row = stream.row(head, first + token);
                    std::ptr::copy_nonoverlapping(
                        state.maxima.add(row),
                        tile.maxima.add(lane),
                        count,
                    );
                    std::ptr::copy_nonoverlapping(
                        state.totals.add(row),
                        tile.sums.at(self.sum_rows(), lane).first,
                        count,
                    );
                    let (source, target) = (state.rows(row), tile.sums);
                    simd.call(ToLanes {
                        source,
                        tokens: count,
                        dims: self.value_dim,
                        target,
                        lane,
                    });
                }
            }
            self.tiles.right(tile.queries, self.dim, LANES, tile.ready);
        }
    }

    /// Makes keys and their values ready.
    unsafe fn ready(
        &self,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        key: usize,
        keys: usize,
    ) -> Ready<X> {
        let (entry, head) = (stack.stream.entry, stack.stream.key_head);
        // SAFETY: keys are the layout's, and the room holds LONGEST of them.
        unsafe {
            let k = self.k.head(entry, head, key);
            let v = self.v.head(entry, head, key).transposed();
            Ready {
                first: key,
                keys: self.tiles.left(k, keys, self.dim, room.keys),
                values: self.tiles.left(v, self.value_dim, keys, room.values),
            }
        }
    }

    /// Writes what the tile has come to.
    unsafe fn end(&self, tile: &Tile, stack: &Stack<'_, X::Element>, row: u32) {
        let simd = self.tiles.simd();
        let (stream, target) = (stack.stream, stack.target);
        let (first, tokens) = stack.tokens(row);
        let dims = self.value_dim;
        // SAFETY: rows written are those of the tile's lanes, which are this unit's own.
        unsafe {
            let folded = (*tile.counts)[1] > 0;
            if folded {
                self.fold(tile, false);
            }
            let source = if folded { tile.folded } else { tile.sums };
            let totals = source.at(self.sum_rows(), 0).first;
            for (head, token, lane, count) in Self::pieces(tile, tokens) {
                let head = stream.heads[head] as usize;
                let row = stream.row(head, first + token);
                let (state, row) = match target {
                    Target::Output { out, lse, lse_rest } => {
                        for index in lane..lane + count {
                            let (m, l) = (*tile.maxima.add(index), *totals.add(index));
                            let finished = crate::state::finish(m, l);
                            *tile.factors.add(index) = finished.factor;
                            *lse.add(row + index - lane) = finished.lse;
                            if !lse_rest.is_null() {
                                *lse_rest.add(row + index - lane) = finished.lse_rest;
                            }
                        }
                        let target = out.head(stream.entry, head, first + token);
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
                    Target::Extend(state) => (state, row),
                    Target::Part(state, first) => (state, first + tile.first + lane),
                };
                std::ptr::copy_nonoverlapping(tile.maxima.add(lane), state.maxima.add(row), count);
                std::ptr::copy_nonoverlapping(totals.add(lane), state.totals.add(row), count);
                let (target, factors, meet) = (state.rows(row), std::ptr::null(), Meet::Replace);
                simd.call(FromLanes { source, lane, factors, tokens: count, dims, target, meet });
            }
        }
    }

    unsafe fn place_keys(
        &self,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        row: u32,
        key: usize,
        keys: usize,
    ) {
        if T::PLACED {
            // SAFETY: the room holds STRETCH of them.
            let into = unsafe { std::slice::from_raw_parts_mut(room.key_positions, keys) };
            let layout = stack.stream.layout;
            let base = super::base(layout, stack.tokens(row).0);
            super::positions(layout.key_positions(), key, base, into);
        }
    }

    /// A stretch of keys of one row, some of them masked. Returns whether any were.
    #[allow(clippy::too_many_arguments)]
    unsafe fn mixed(
        &self,
        stack: &Stack<'_, X::Element>,
        room: &Room,
        row: u32,
        pieces: &[Piece],
        (key, keys): (usize, usize),
        masks: &mut Masks<'_>,
        bits: &mut [[u64; LONGEST]],
    ) -> bool {
        let (layout, tokens) = (stack.stream.layout, stack.tokens(row).1);
        let per_row = layout.block().words();
        let mut masked = false;
        // SAFETY: the caller's.
        unsafe {
            let ready = self.ready(room, stack, key, keys);
            self.place_keys(room, stack, row, key, keys);
            for piece in pieces {
                let (from, to) = (piece.from as usize, piece.to as usize);
                let (from, to) = (from.max(key), to.min(key + keys));
                if from >= to {
                    continue;
                }
                let Some((column, run)) = piece.partial else {
                    for bits in &mut bits[..stack.per_row] {
                        bits[from - key..to - key].fill(u64::MAX);
                    }
                    continue;
                };
                masked = true;
                let words = masks.get(row, column, &run);
                let start = layout.column_tokens(column).start as usize;
                for tile in self.tiles_of(room, stack, row) {
                    let by_key = &mut bits[tile.first / LANES];
                    for word in (from - start) / LANES..(to - start).div_ceil(LANES) {
                        let mut square = [0; LANES];
                        for (lane, square) in square[..tile.lanes].iter_mut().enumerate() {
                            *square = words[(tile.first + lane) % tokens * per_row + word];
                        }
                        transpose_bits(&mut square);
                        let first = start + word * LANES;
                        let (from, to) = (from.max(first), to.min(first + LANES));
                        by_key[from - key..to - key]
                            .copy_from_slice(&square[from - first..to - first]);
                    }
                }
            }
            for tile in self.tiles_of(room, stack, row) {
                if masked {
                    let bits = &bits[tile.first / LANES][..keys];
                    self.masked(&tile, room, stack, &ready, bits);
                } else {
                    let lanes = (0, tile.lanes);
                    self.stretches(
                        &tile,
                        room,
                        stack,
                        &ready,
                        Part { keys: (key, keys), offset: 0, lanes, bits: None },
                    );
                }
                self.count(&tile, keys);
            }
        }
        masked
    }

    /// A stretch of keys with a word of `bits` each.
    ///
    /// Queries see different keys at the edge of a window: vectors of them are then worked on by
    /// themselves, in groups of four, two or one, over no more keys than a group sees. The widest
    /// groups are the fastest, so the choice is that of least work.
    unsafe fn masked(
        &self,
        tile: &Tile,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        ready: &Ready<X>,
        bits: &[u64],
    ) {
        let width = X::Simd::WIDTH;
        let vectors = tile.lanes.div_ceil(width);
        let mut seen = [(0, 0); LANES];
        for (vector, seen) in seen[..vectors].iter_mut().enumerate() {
            let lanes = (u64::MAX >> (LANES - width)) << (vector * width);
            let first = bits.iter().position(|bits| bits & lanes != 0).unwrap_or(0);
            let last = bits.iter().rposition(|bits| bits & lanes != 0);
            let end = last.map_or(0, |last| (last + 1).next_multiple_of(X::GRAIN));
            *seen = (first / X::GRAIN * X::GRAIN, end.min(bits.len()));
        }
        let union = |group: &[(usize, usize)]| {
            let some = || group.iter().filter(|seen| seen.0 < seen.1);
            let start = some().map(|seen| seen.0).min().unwrap_or(0);
            (start, some().map(|seen| seen.1).max().unwrap_or(0))
        };
        // Hundredths of the time that a vector and key take in groups of each size.
        let cost = |&(size, time): &(usize, usize)| {
            let groups = seen[..vectors].chunks(size);
            groups
                .map(|group| (union(group), group.len()))
                .map(|((a, b), n)| (b - a) * n * time)
                .sum::<usize>()
        };
        let sizes = [(LANES, 100), (4, 100), (2, 108), (1, 150)];
        let (size, _) = *sizes.iter().min_by_key(|size| cost(size)).expect("there are four");
        for (index, group) in seen[..vectors].chunks(size).enumerate() {
            let (start, end) = union(group);
            if start < end {
                let lane = index * size * width;
                let lanes = (lane, (tile.lanes - lane).min(size * width));
                let keys = (ready.first + start, end - start);
                let bits = Some(bits[start..].as_ptr());
                // SAFETY: parts of what the caller vouches for.
                unsafe {
                    self.stretches(
                        tile,
                        room,
                        stack,
                        ready,
                        Part { keys, offset: start, lanes, bits },
                    )
                };
            }
        }
    }

    /// Keys for some lanes of a tile, in as many stretches as their scores have room for.
    unsafe fn stretches(
        &self,
        tile: &Tile,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        ready: &Ready<X>,
        part: Part,
    ) {
        // SAFETY: the caller's.
        unsafe {
            if stack.careful && part.bits.is_some() {
                for part in self.parts(part) {
                    let one = self.stretch(tile, room, stack, ready, part);
                    self.tiles.attend(std::iter::once(one));
                    self.add_left_out(tile, room, stack, part);
                }
            } else {
                let parts = self.parts(part);
                self.tiles.attend(parts.map(|part| self.stretch(tile, room, stack, ready, part)));
            }
        }
    }

    /// Cuts a part into those that a stretch has room for: some lanes after the others, each with
    /// all keys.
    fn parts(&self, part: Part) -> impl Iterator<Item = Part> + use<X, T> {
        let (first, lanes) = part.lanes;
        let (start, end) = (part.keys.0, part.keys.0 + part.keys.1);
        (0..lanes).step_by(X::MOST_LANES).flat_map(move |lane| {
            let lanes = (first + lane, (lanes - lane).min(X::MOST_LANES));
            let most = most_keys::<X>(padded(lanes.1, X::Simd::WIDTH));
            let mut key = start;
            std::iter::from_fn(move || {
                (key < end).then(|| {
                    let keys = even(end - key, most).next_multiple_of(X::GRAIN).min(end - key);
                    let before = key - start;
                    key += keys;
                    // There is a word for each key.
                    let bits = part.bits.map(|bits| bits.wrapping_add(before));
                    Part { keys: (start + before, keys), offset: part.offset + before, lanes, bits }
                })
            })
        })
    }

    /// Keys for some lanes of a tile.
    unsafe fn stretch(
        &self,
        tile: &Tile,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        ready: &Ready<X>,
        part: Part,
    ) -> Stretch<X, T> {
        let (key, keys) = part.keys;
        let (lane, lanes) = (part.lanes.0, padded(part.lanes.1, X::Simd::WIDTH));
        let (tiles, entry, head) = (self.tiles, stack.stream.entry, stack.stream.key_head);
        // SAFETY: keys are the layout's, lanes the tile's, and scratch is our own.
        unsafe {
            let queries = tiles.again(tile.queries, self.dim, LANES, tile.ready);
            let values = self.v.head(entry, head, key);
            let next = (self.keys - key - keys).min(STRETCH);
            let ahead = match stack.lone && next > 0 {
                true => [
                    Ahead::of(values, keys, self.value_dim),
                    Ahead::of(self.k.head(entry, head, key + keys), next, self.dim),
                ],
                false => [Ahead::NOTHING; 2],
            };
            let careful = stack.careful && part.bits.is_some();
            Stretch {
                keys: X::part(ready.keys, key - ready.first, 0),
                queries: X::right_part(queries, 0, lane),
                dim: self.dim,
                softmax: Softmax {
                    scores: Rows { first: room.scores, row: lanes },
                    keep: careful,
                    keys,
                    lanes,
                    scale: self.scale,
                    transform: self.transform,
                    mask: part.bits.map(|bits| (bits, lane)),
                    maxima: tile.maxima.add(lane),
                    totals: tile.sums.at(self.sum_rows(), lane).first,
                    factors: tile.factors.add(lane),
                    positions: tile.positions.add(lane),
                    slopes: tile.slopes.add(lane),
                    key_positions: room.key_positions.add(part.offset),
                },
                values: match careful {
                    false => X::part(ready.values, 0, key - ready.first),
                    true => self.clean_values(room, values, keys),
                },
                value_dim: self.value_dim,
                sums: tile.sums.at(0, lane),
                room: room.right,
                ahead,
            }
        }
    }

    /// Adds what clean values left out to those who see it. The probabilities are those of the
    /// stretch that was just done.
    unsafe fn add_left_out(
        &self,
        tile: &Tile,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        part: Part,
    ) {
        let (key, keys) = part.keys;
        let lanes = padded(part.lanes.1, X::Simd::WIDTH);
        let probabilities = Rows { first: room.scores, row: lanes };
        // SAFETY: as `stretch`.
        unsafe {
            let values = self.v.head(stack.stream.entry, stack.stream.key_head, key);
            let sums = tile.sums.at(0, part.lanes.0);
            left_out(values, keys, self.value_dim, |key, dim, x| {
                for lane in 0..lanes {
                    let p = *probabilities.at(key, lane).first;
                    if p != 0.0 {
                        *sums.at(dim, lane).first += p * x;
                    }
                }
            });
        }
    }

    /// Counts keys of a tile, and folds its sums when they are many.
    unsafe fn count(&self, tile: &Tile, keys: usize) {
        if !X::FOLDS {
            return;
        }
        // SAFETY: the tile is scratch of our own.
        unsafe {
            let counts = &mut *tile.counts;
            counts[0] += keys as u32;
            if counts[0] >= FOLD {
                self.fold(tile, counts[1] == 0);
                *counts = [0, counts[1] + 1];
            }
        }
    }

    /// Values without what isn't finite, ready.
    unsafe fn clean_values(
        &self,
        room: &Room,
        values: Strided<X::Element>,
        keys: usize,
    ) -> X::Left {
        // SAFETY: a careful attempt has room for LONGEST of them, and for what is made of them.
        unsafe {
            let copy = clean(values, keys, self.value_dim, room.clean.cast());
            let after = room.clean.add(LONGEST * self.value_dim);
            self.tiles.left(copy.transposed(), self.value_dim, keys, after)
        }
    }

    /// Adds the sums to those of earlier stretches, and begins anew.
    unsafe fn fold(&self, tile: &Tile, first: bool) {
        let Tile { sums, folded, maxima, folded_maxima, .. } = *tile;
        let rows = self.sum_rows() + 1;
        self.tiles.simd().call(Fold { sums, folded, maxima, folded_maxima, rows, first });
    }
}

/// Some keys and some lanes of a tile.
#[derive(Clone, Copy)]
struct Part {
    /// The first key, and how many.
    keys: (usize, usize),
    /// The first key among those whose positions are in the room.
    offset: usize,
    /// The first lane, and how many.
    lanes: (usize, usize),
    /// A word a key, where some are masked: bit `i` is lane `i` of the tile.
    bits: Option<*const u64>,
}
