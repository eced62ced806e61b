//! Keys for the lanes of a tile: which go together, and what is done with them.

use super::lists::{Span, even};
use super::scratch::{Tile, Workspace};
use super::softmax::{Fold, Softmax};
use super::{FOLD, Forward, KV_TILE, MAX_KV_TILE, Stack, most_keys};
use crate::dtype::Element;
use crate::exec::fault::count_pairs;
use crate::gemm::{Prefetch, Rows};
use crate::kernel::adjust::Adjust;
use crate::kernel::finite::{clean, left_out};
use crate::kernel::fused::{FusedKernel, KeyTile};
use crate::kernel::padded;
use crate::simd::{LANES, Simd};
use crate::tensor::Strided;

/// Some keys and their values, packed.
#[derive(Clone, Copy)]
pub(super) struct Ready<X: FusedKernel> {
    /// The first key, and the one after the last.
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) keys: X::Lhs,
    pub(super) values: X::Lhs,
}

/// Some keys and some lanes of a tile.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The first key, and how many.
    pub(super) keys: (usize, usize),
    /// The first key among those whose terms are in the room.
    pub(super) offset: usize,
    /// The first lane, and how many.
    pub(super) lanes: (usize, usize),
    /// A word per key, where some are masked: bit `i` is lane `i` of the tile.
    pub(super) bits: Option<*const u64>,
}

impl<X: FusedKernel> Forward<'_, X> {
    /// Makes keys and their values packed.
    ///
    /// # Safety
    ///
    /// That of [`attempt`](Self::attempt); `key..key + keys` must be keys of the layout,
    /// `MAX_KV_TILE` at most. They are packed until the next call with the same room.
    pub(super) unsafe fn packed(
        &self,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        key: usize,
        keys: usize,
    ) -> Ready<X> {
        let (entry, head) = (stack.stream.entry, stack.stream.key_head);
        // SAFETY: `rows` demands tensors with the keys of the layout, and the room has parts for
        // `MAX_KV_TILE` keys and values (`lengths`), which nothing but what this gives refers to.
        unsafe {
            let k = self.k.head(entry, head, key);
            let v = self.v.head(entry, head, key);
            self.prefetch_beside(k, keys, self.dim);
            self.prefetch_beside(v, keys, self.value_dim);
            let v = v.transposed();
            Ready {
                first: key,
                end: key + keys,
                keys: self.tiles.pack_lhs(k, keys, self.dim, workspace.keys),
                values: self.tiles.pack_lhs(v, self.value_dim, keys, workspace.values),
            }
        }
    }

    /// Asks for what lies beside the rows of a short view with a step: the rows of the next one.
    pub(super) fn prefetch_beside<E: Element>(
        &self,
        matrix: Strided<E>,
        rows: usize,
        columns: usize,
    ) {
        if self.keys <= LANES && matrix.is_far_apart() {
            let first = matrix.first.wrapping_add(columns);
            let beside = Prefetch::of(Strided { first, ..matrix }, rows, columns);
            beside.all(self.tiles.simd());
        }
    }

    /// Makes the keys of spans and their values packed, side by side, as keys 0 to `keys`.
    ///
    /// # Safety
    ///
    /// That of [`packed`](Self::packed), for the `keys` keys of all spans. All but the last must be
    /// whole `GRAIN`s, and operands [be packed](crate::gemm::MicroKernel::PACKS).
    pub(super) unsafe fn packed_spans(
        &self,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        spans: &[Span],
        keys: usize,
    ) -> Ready<X> {
        let (tiles, entry, head) = (self.tiles, stack.stream.entry, stack.stream.key_head);
        let (dim, value_dim) = (self.dim, self.value_dim);
        let mut packed = None;
        for &Span { from, to, at, .. } in spans {
            let len = to - from;
            // SAFETY: as in `packed`: spans are keys of the layout, side by side in the room's parts
            // for `MAX_KV_TILE` keys and values.
            unsafe {
                let k = self.k.head(entry, head, from);
                let v = self.v.head(entry, head, from).transposed();
                let (into, size) = (workspace.keys, (keys, dim));
                let keys_packed = tiles.pack_lhs_part(k, (len, dim), (at, 0), size, into);
                let (into, size) = (workspace.values, (value_dim, keys));
                let values = tiles.pack_lhs_part(v, (value_dim, len), (0, at), size, into);
                packed = Some(Ready { first: 0, end: keys, keys: keys_packed, values });
            }
        }
        packed.expect("at least one span")
    }

    /// A key tile from `key` on with a word of `bits` each.
    ///
    /// Queries see different keys at the edge of a window: vectors of them are then worked on by
    /// themselves, in groups of four, two or one, over no more keys than a group sees. The widest
    /// groups are the fastest, so the choice is that of least work.
    ///
    /// # Safety
    ///
    /// That of [`attempt`](Self::attempt), for a tile that was started; keys from `key` on, one per
    /// word, must be among those that are packed and have their terms placed.
    pub(super) unsafe fn masked(
        &self,
        tile: &Tile,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        packed: &Ready<X>,
        key: usize,
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
        let (mut size, _) = *sizes.iter().min_by_key(|size| cost(size)).expect("there are four");
        if self.uniform {
            // Sums are taken from the first key on, whatever other rows the tile has.
            (size, seen[0]) = (LANES, (0, bits.len()));
        }
        for (index, group) in seen[..vectors].chunks(size).enumerate() {
            let (start, end) = union(group);
            if start < end {
                let lane = index * size * width;
                let lanes = (lane, (tile.lanes - lane).min(size * width));
                let keys = (key + start, end - start);
                let bits = Some(bits[start..].as_ptr());
                // SAFETY: `key_tiles` has this function's condition, and is given a part of its
                // keys, a word of bits for each, and lanes of the tile.
                unsafe {
                    self.key_tiles(
                        tile,
                        workspace,
                        stack,
                        packed,
                        Part { keys, offset: start, lanes, bits },
                    )
                };
            }
        }
    }

    /// Keys for some lanes of a tile, in as many key tiles as their scores have room for.
    ///
    /// # Safety
    ///
    /// That of [`key_tile`](Self::key_tile), and [`attempt`](Self::attempt).
    pub(super) unsafe fn key_tiles(
        &self,
        tile: &Tile,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        packed: &Ready<X>,
        part: Part,
    ) {
        // SAFETY: `parts` cuts the part into ones with at most `MOST_LANES` lanes and `most_keys`
        // keys, as `key_tile` demands. Its scores are used by one key tile after the other; after a
        // careful one they hold its probabilities, as `add_left_out` demands.
        unsafe {
            if stack.careful && part.bits.is_some() {
                for part in self.parts(part) {
                    let one = self.key_tile(tile, workspace, stack, packed, part);
                    self.tiles.attend(std::iter::once(one));
                    self.add_left_out(tile, workspace, stack, part);
                }
            } else {
                let parts = self.parts(part);
                self.tiles
                    .attend(parts.map(|part| self.key_tile(tile, workspace, stack, packed, part)));
            }
        }
    }

    /// Cuts a part into those that a key tile has room for: some lanes after the others, each with
    /// all keys.
    pub(super) fn parts(&self, part: Part) -> impl Iterator<Item = Part> + use<X> {
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

    /// Keys for some lanes of a tile: what [`attend`](FusedKernel::attend) may be given.
    ///
    /// # Safety
    ///
    /// `tile`, `workspace` and `stack` must be as [`attempt`](Self::attempt) demands and the tile
    /// be started. The keys of the part must be among those of `packed`, from a multiple of `GRAIN`
    /// on, with terms from `offset` on and a readable word of bits each; lanes must be the
    /// tile's, from a whole vector on. Of both there may be as many as [`parts`](Self::parts)
    /// gives.
    pub(super) unsafe fn key_tile(
        &self,
        tile: &Tile,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        packed: &Ready<X>,
        part: Part,
    ) -> KeyTile<'_, X> {
        let (key, keys) = part.keys;
        let (lane, lanes) = (part.lanes.0, padded(part.lanes.1, X::Simd::WIDTH));
        let (tiles, entry, head) = (self.tiles, stack.stream.entry, stack.stream.key_head);
        count_pairs(lanes, keys);
        // SAFETY: `start` made the queries packed in the tile; lanes, rounded up to whole vectors,
        // are below `LANES`, the length of all lists of a tile and of its rows. Keys of `packed`
        // are in the tensors; `next` isn't 0 where there is a key behind them. Scores of at most
        // `MOST_SCORES` elements, with rows rounded up to `TARGET_ROWS`, and probabilities of
        // `MAX_KV_TILE` keys have parts of the room.
        unsafe {
            let queries = tiles.packed_rhs(tile.queries, self.dim, LANES, tile.packed);
            let values = self.v.head(entry, head, key);
            let next = (self.keys - key - keys).min(KV_TILE);
            let ahead = match stack.lone && next > 0 {
                true => [
                    Prefetch::of(values, keys, self.value_dim),
                    Prefetch::of(self.k.head(entry, head, key + keys), next, self.dim),
                ],
                false => [Prefetch::NONE; 2],
            };
            let careful = stack.careful && part.bits.is_some();
            let scores = Rows { first: workspace.scores, row: lanes };
            let factors = if self.drops() { workspace.factors } else { std::ptr::null_mut() };
            let factors = Rows { first: factors, row: lanes };
            let adjust = self.additions.map(|additions| Adjust {
                additions,
                scale: self.scale,
                scores,
                rows: keys,
                lanes,
                queries_in_lanes: true,
                queries: tile.terms.at(0, lane),
                keys: workspace.key_terms.at(0, part.offset),
                derivatives: Rows { first: std::ptr::null_mut(), row: 0 },
                factors,
            });
            KeyTile {
                adjust,
                keys: X::lhs_at(packed.keys, key - packed.first, 0),
                queries: X::rhs_at(queries, 0, lane),
                dim: self.dim,
                softmax: Softmax {
                    scores,
                    factors_of_pairs: factors,
                    keep: careful,
                    keys,
                    lanes,
                    scale: self.softmax_scale(),
                    mask: part.bits.map(|bits| (bits, lane)),
                    maxima: tile.maxima.add(lane),
                    totals: tile.sums.at(self.sum_rows(), lane).first,
                    factors: tile.factors.add(lane),
                },
                values: match careful {
                    false => X::lhs_at(packed.values, 0, key - packed.first),
                    true => self.clean_values(workspace, values, keys),
                },
                value_dim: self.value_dim,
                sums: tile.sums.at(0, lane),
                workspace: workspace.right,
                ahead,
            }
        }
    }

    /// Adds what clean values left out to lanes that see it. The probabilities are those of the
    /// key tile that was just done.
    ///
    /// # Safety
    ///
    /// That of [`key_tile`](Self::key_tile), for the part that the room's scores are of.
    unsafe fn add_left_out(
        &self,
        tile: &Tile,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        part: Part,
    ) {
        let (key, keys) = part.keys;
        let lanes = padded(part.lanes.1, X::Simd::WIDTH);
        let probabilities = Rows { first: workspace.scores, row: lanes };
        // SAFETY: as in `key_tile`: keys of the tensors, scores of keys × lanes, sums of
        // `value_dim` rows.
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
    ///
    /// # Safety
    ///
    /// The tile must be one of [`tiles_of`](Self::tiles_of) that was started, and used by nothing
    /// else.
    pub(super) unsafe fn count(&self, tile: &Tile, keys: usize) {
        if !X::FOLDS {
            return;
        }
        // SAFETY: counts are a part of the tile, written by `start`, and its alone; `fold` has the
        // condition of this function, and has folded before where it was counted.
        unsafe {
            let counts = &mut *tile.counts;
            counts[0] += keys as u32;
            if counts[0] >= FOLD {
                self.fold(tile, counts[1] == 0);
                *counts = [0, counts[1] + 1];
            }
        }
    }

    /// Values without what isn't finite, packed.
    ///
    /// # Safety
    ///
    /// `keys` values, `MAX_KV_TILE` at most, must be readable, and `workspace.clean` have
    /// [`finite_copy_len`](Self::finite_copy_len) elements.
    unsafe fn clean_values(
        &self,
        workspace: &Workspace,
        values: Strided<X::Element>,
        keys: usize,
    ) -> X::Lhs {
        // SAFETY: `finite_copy_len` is `MAX_KV_TILE · value_dim` f32 for the copy (elements are no
        // larger than f32), and `packed_lhs_len` of what is packed of it behind them.
        unsafe {
            let copy = clean(values, keys, self.value_dim, workspace.clean.cast());
            let after = workspace.clean.add(MAX_KV_TILE * self.value_dim);
            self.tiles.pack_lhs(copy.transposed(), self.value_dim, keys, after)
        }
    }

    /// Adds the sums to those of earlier key tiles, and restarts them at 0.
    ///
    /// # Safety
    ///
    /// The tile must be one of [`tiles_of`](Self::tiles_of) that was started, and used by nothing
    /// else; unless it is the first time, it must have been folded before.
    pub(super) unsafe fn fold(&self, tile: &Tile, first: bool) {
        let Tile { sums, folded, maxima, folded_maxima, .. } = *tile;
        let rows = self.sum_rows() + 1;
        // SAFETY: a tile has `rows` rows of `LANES` for both, and `LANES` maxima for both.
        unsafe {
            self.tiles.simd().call(Fold { sums, folded, maxima, folded_maxima, rows, first });
        }
    }
}
