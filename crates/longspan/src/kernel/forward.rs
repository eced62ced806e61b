//! The forward pass over one row of blocks.
//!
//! ```text
//! for each row of query blocks, for the query heads that share a key head:
//!     pack the queries, LANES side by side:            Qᵗ[dim × lanes]
//!     (m, l, A) ← the state so far, or (−∞, 0, 0)
//!     for each key tile that the row sees:
//!         S[keys × lanes] ← K · Qᵗ                     scores, transformed; masked ones −∞
//!         m' ← max(m, S);  a ← exp(m − m');  P ← exp(S − m')
//!         l ← a·l + ΣP;    A ← a·A + Vᵗ · P            A[dim × lanes]
//!     out ← A / l,  lse ← m + ln l                     or the state itself
//! ```
//!
//! Sums over keys run down the columns, so each lane is a query and nothing is summed across a
//! vector. K and V are read where they lie.

mod decode;
mod epilogue;
mod lists;
mod masked;
mod scratch;
pub(crate) mod softmax;
// Its only user is the matrix unit of x86-64.
#[cfg(target_arch = "x86_64")]
pub(crate) mod softmax_bf16;

use longspan_pattern::Masks;

pub(crate) use self::lists::Lists;
use self::lists::{Span, even, touching};
use self::masked::{Part, Ready};
use self::scratch::Workspace;

use super::adjust;
use super::pack::transpose_bits;
use crate::exec::Monitor;
use crate::exec::fault::{Site, fault};
use crate::kernel::Scratch;
use crate::kernel::fused::FusedKernel;
use crate::score::Additions;
use crate::simd::LANES;
use crate::softmax::{RawOutput, RawState};
use crate::tasks::{Stream, Unit};
use crate::tensor::Raw;

/// The most keys between two looks at the maximum: their scores and values stay in the first-level
/// cache, and it divides by the rows of a register tile.
const KV_TILE: usize = 128;

/// The most keys of a key tile of few lanes, which has as many scores as one of all.
const MAX_KV_TILE: usize = 4 * KV_TILE;

/// The most keys of a key tile of so many lanes.
fn most_keys<X: FusedKernel>(lanes: usize) -> usize {
    (X::MOST_SCORES / lanes).min(MAX_KV_TILE)
}

/// Keys whose sums are added up before they are added to those of all others: a third level of
/// sums, so that errors of a row of thousands of keys stay those of a short one.
const FOLD: u32 = 1024;

/// Everything that is the same for all rows of a call.
#[derive(Clone, Copy)]
pub(crate) struct Forward<'a, X: FusedKernel> {
    pub(crate) tiles: X,
    pub(crate) scale: f32,
    pub(crate) additions: Option<&'a Additions<'a>>,
    /// A logit per query head, for rows that are finished; see [`crate::softmax::finish`].
    pub(crate) sink_logits: Option<&'a [f32]>,
    pub(crate) q: Raw<X::Element>,
    pub(crate) k: Raw<X::Element>,
    pub(crate) v: Raw<X::Element>,
    pub(crate) dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) keys: usize,
    /// Whether the bits of a row must not depend on which other rows a call has.
    pub(crate) uniform: bool,
    /// Whether a backward pass follows: scores are then added up in its order.
    pub(crate) saves: bool,
}

/// Where the rows of a unit go.
#[derive(Clone, Copy)]
pub(crate) enum Target<E> {
    /// To output and log-sum-exp, on from a state where there is one. It may lie in them.
    Finish { state: Option<RawState>, output: RawOutput<E> },
    /// On from a state, back into it: a row for each batch entry, head and token.
    Extend(RawState),
    /// Into a state of its own: the lanes of this unit are rows from the given one on.
    Part(RawState, usize),
}

impl<E> Target<E> {
    /// What rows go on from.
    fn state(&self) -> Option<&RawState> {
        match self {
            Target::Finish { state, .. } => state.as_ref(),
            Target::Extend(state) => Some(state),
            Target::Part(..) => None,
        }
    }
}

/// The rows of blocks of a unit, and how their tiles are numbered: those of a row together.
#[derive(Clone, Copy)]
struct Stack<'a, E> {
    stream: &'a Stream<'a>,
    rows: (u32, u32),
    /// Tiles of a full row.
    per_row: usize,
    target: Target<E>,
    /// Whether products leave out what is masked.
    careful: bool,
    /// Whether its layout has only one tile: keys and values are then used once, and memory is what
    /// limits, so they are asked for early.
    lone: bool,
}

impl<E> Stack<'_, E> {
    /// The first query of a row, and how many it has.
    fn tokens(&self, row: u32) -> (usize, usize) {
        let tokens = self.stream.layout.row_tokens(row);
        (tokens.start, tokens.len())
    }

    /// Queries × heads of a row.
    fn lanes(&self, row: u32) -> usize {
        self.tokens(row).1 * self.stream.heads.len()
    }
}

impl<X: FusedKernel> Forward<'_, X> {
    /// Computes the rows of `unit`.
    ///
    /// # Safety
    ///
    /// `q`, `k` and `v` must be tensors that are readable and not written: `dim`, `dim` and
    /// `value_dim` wide, with the entry and heads of the stream, the queries of its layout and
    /// `keys` keys, which are those of the layout too. `dim` and `value_dim` must be at least 1.
    /// The target must have the rows of this unit, `value_dim` wide, and no other thread may read
    /// or write them. A [session](crate::gemm::MicroKernel::session) of this thread must be alive.
    pub(crate) unsafe fn rows(
        &self,
        stream: &Stream<'_>,
        unit: &Unit,
        target: Target<X::Element>,
        masks: &mut Masks<'_>,
        scratch: &mut Scratch,
        monitor: &Monitor<'_>,
    ) {
        let per_row = stream.lanes().div_ceil(LANES);
        let tiles = per_row * (unit.rows.1 - unit.rows.0) as usize;
        let lone = tiles == 1 && stream.layout.rows().len() == 1;
        let mut stack = Stack { stream, rows: unit.rows, per_row, target, careful: false, lone };
        let few = unit.rows.1 - unit.rows.0 == 1 && stack.lanes(unit.rows.0) <= decode::MAX_LANES;
        if few && !self.uniform {
            // SAFETY: `decode` has the condition of `rows`, for one row of at most `FEW` lanes.
            return unsafe { self.decode(&mut stack, unit, masks, scratch, monitor) };
        }
        let mut workspace = self.carve(&mut scratch.elements, tiles);
        let lists = &mut scratch.lists;
        // SAFETY: `attempt` has the condition of `rows`, and `workspace` was cut for the tiles of
        // all rows; a second attempt has room for clean values.
        unsafe {
            if self.attempt(&stack, unit, &workspace, masks, lists, monitor) {
                return;
            }
            // A sum isn't finite, and something was masked: was it only 0 · ∞?
            stack.careful = true;
            workspace.clean = scratch.clean.reserve(self.finite_copy_len());
            self.attempt(&stack, unit, &workspace, masks, lists, monitor);
        }
    }

    /// Computes the rows, and writes them unless a careful attempt has to follow or the call stops.
    ///
    /// # Safety
    ///
    /// That of [`rows`](Self::rows) for the rows of `stack`, which are those of `unit`. `workspace`
    /// must be what [`carve`](Self::carve) gave for their tiles, with
    /// [`finite_copy_len`](Self::finite_copy_len) elements for clean values if the stack is
    /// careful, and be used by nothing else.
    unsafe fn attempt(
        &self,
        stack: &Stack<'_, X::Element>,
        unit: &Unit,
        workspace: &Workspace,
        masks: &mut Masks<'_>,
        lists: &mut Lists,
        monitor: &Monitor<'_>,
    ) -> bool {
        let layout = stack.stream.layout;
        let mut masked = false;
        // SAFETY: all functions here have the condition of `attempt`, and are given rows of the
        // unit, and keys of the layout: `Lists` takes them from its runs. `packed` is given at most
        // `MAX_KV_TILE` keys, from the start of a block or a multiple of `GRAIN` behind it; tiles
        // are started before they attend, and positions placed before they are looked at. Each key
        // tile attends to scores of its own, which nothing needs once it is done.
        unsafe {
            for row in unit.rows.0..unit.rows.1 {
                for tile in self.tiles_of(workspace, stack, row) {
                    self.start(&tile, stack, row);
                }
            }
            fault(Site::Kernel);
            // What all rows see in full is read once for all of them.
            lists.share(layout, unit, self.uniform);
            for &(from, to) in &lists.shared {
                let (mut key, end) = (from, to);
                while key < end {
                    if monitor.poll_in_task() {
                        return true;
                    }
                    let keys = even(end - key, most_keys::<X>(X::MOST_LANES));
                    let keys = keys.next_multiple_of(X::GRAIN).min(end - key);
                    let packed = self.packed(workspace, stack, key, keys);
                    self.place_keys(workspace, stack, (key, keys), 0);
                    let tiles = (unit.rows.0..unit.rows.1)
                        .flat_map(|row| self.tiles_of(workspace, stack, row));
                    let all = |lanes| Part { keys: (key, keys), offset: 0, lanes, bits: None };
                    self.tiles.attend(tiles.clone().flat_map(|tile| {
                        let parts = self.parts(all((0, tile.lanes)));
                        parts.map(move |part| self.key_tile(&tile, workspace, stack, &packed, part))
                    }));
                    tiles.for_each(|tile| self.count(&tile, keys));
                    key += keys;
                }
            }
            // Where it takes time to make keys packed, that is done once for all rows too, in parts
            // that start where blocks do.
            let aligned = layout.block().get().is_multiple_of(X::GRAIN);
            if X::PACKS && aligned && lists.unite(layout, unit) {
                for span in 0..lists.united.len() {
                    let (mut key, end) = lists.united[span];
                    while key < end {
                        let keys = even(end - key, MAX_KV_TILE);
                        let keys = keys.next_multiple_of(X::GRAIN).min(end - key);
                        let packed = self.packed(workspace, stack, key, keys);
                        for row in unit.rows.0..unit.rows.1 {
                            lists.rest(layout, row, unit.columns);
                            let packed = Some(&packed);
                            masked |=
                                self.row(stack, workspace, row, packed, masks, lists, monitor);
                        }
                        key += keys;
                    }
                }
            } else {
                for row in unit.rows.0..unit.rows.1 {
                    lists.rest(layout, row, unit.columns);
                    masked |= self.row(stack, workspace, row, None, masks, lists, monitor);
                }
            }
            if monitor.is_stopped() {
                return true;
            }
            if masked && !stack.careful && !self.all_finite(stack, unit, workspace) {
                return false;
            }
            for row in unit.rows.0..unit.rows.1 {
                for tile in self.tiles_of(workspace, stack, row) {
                    self.end(&tile, stack, row);
                }
            }
        }
        true
    }

    /// The factor that the softmax has for scores: those that additions change are scaled.
    fn softmax_scale(&self) -> f32 {
        match self.additions {
            Some(additions) if additions.change_scores() => 1.0,
            _ => self.scale,
        }
    }

    /// Whether probabilities are dropped.
    fn drops(&self) -> bool {
        self.additions.is_some_and(|additions| additions.dropout.is_some())
    }

    /// What positions of a unit are counted from.
    fn base(&self, stack: &Stack<'_, X::Element>) -> i64 {
        adjust::base(stack.stream.layout, stack.tokens(stack.rows.0).0)
    }

    /// What additions need of keys, the first and how many, where there are some; their terms are
    /// those from `at` on.
    ///
    /// # Safety
    ///
    /// `workspace` must be as [`attempt`](Self::attempt) demands, and the last term be below
    /// `MAX_KV_TILE`.
    unsafe fn place_keys(
        &self,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        keys: (usize, usize),
        at: usize,
    ) {
        if let Some(additions) = self.additions {
            let (layout, base) = (stack.stream.layout, self.base(stack));
            // SAFETY: the room holds terms of `MAX_KV_TILE` keys (`lengths`), and nothing else
            // refers to it.
            unsafe { additions.key_terms(layout, keys, base, workspace.key_terms.at(0, at)) };
        }
    }

    /// The listed pieces of a row, or what is in them of keys that are packed. Returns whether any
    /// were masked.
    ///
    /// # Safety
    ///
    /// That of [`attempt`](Self::attempt), for a row of the stack whose tiles are started. What is
    /// packed must be in `workspace`, and the pieces of `lists` be those of the row.
    #[allow(clippy::too_many_arguments)]
    unsafe fn row(
        &self,
        stack: &Stack<'_, X::Element>,
        workspace: &Workspace,
        row: u32,
        packed: Option<&Ready<X>>,
        masks: &mut Masks<'_>,
        lists: &mut Lists,
        monitor: &Monitor<'_>,
    ) -> bool {
        let aligned = stack.stream.layout.block().get().is_multiple_of(X::GRAIN);
        let mut next = 0;
        if X::PACKS && aligned && packed.is_none() {
            // SAFETY: `gathered` has the condition of this function.
            next = unsafe { self.gathered(stack, workspace, row, masks, lists, monitor) };
        }
        let (first, end) = packed.map_or((0, usize::MAX), |packed| (packed.first, packed.end));
        let mut masked = false;
        while next < lists.pieces.len() {
            let group = next..next + touching(&lists.pieces[next..]);
            next = group.end;
            let (from, to) = (lists.pieces[group.start].from, lists.pieces[group.end - 1].to);
            let (mut key, to) = (from.max(first), to.min(end));
            while key < to {
                if monitor.poll_in_task() {
                    return masked;
                }
                let keys = even(to - key, MAX_KV_TILE);
                lists.cut(group.clone(), (key, key + keys));
                // SAFETY: `packed` and `mixed` have the condition of `attempt`; `even` gives at
                // most `MAX_KV_TILE` keys, those of the pieces, and they are among those that are
                // packed.
                masked |= unsafe {
                    let own = packed.is_none().then(|| self.packed(workspace, stack, key, keys));
                    let packed = packed.or(own.as_ref()).expect("one of both");
                    self.mixed(stack, workspace, row, packed, (key, keys), masks, lists)
                };
                key += keys;
            }
        }
        masked
    }

    /// The Full pieces of a row, wherever they lie, packed side by side: a key tile of many keys
    /// costs less than many of a block each. Returns the first piece that is left.
    ///
    /// # Safety
    ///
    /// That of [`row`](Self::row), for blocks of whole `GRAIN`s.
    unsafe fn gathered(
        &self,
        stack: &Stack<'_, X::Element>,
        workspace: &Workspace,
        row: u32,
        masks: &mut Masks<'_>,
        lists: &mut Lists,
        monitor: &Monitor<'_>,
    ) -> usize {
        let (full, mut left) = lists.full_first();
        // Keys of a key tile are not followed by those of the next one.
        let stack = &Stack { lone: false, ..*stack };
        let (mut piece, mut from) = (0, 0);
        while left > 0 && !monitor.poll_in_task() {
            let keys = even(left, MAX_KV_TILE).next_multiple_of(X::GRAIN).min(left);
            lists.gather(&mut piece, &mut from, keys);
            // SAFETY: spans are keys of the row's pieces, `keys` of them, at most `MAX_KV_TILE`,
            // and all but the last of whole `GRAIN`s; they are packed as keys 0 to `keys`.
            unsafe {
                let packed = self.packed_spans(workspace, stack, &lists.spans, keys);
                self.mixed(stack, workspace, row, &packed, (0, keys), masks, lists);
            }
            left -= keys;
        }
        full
    }

    /// A key tile of one row: the spans of `lists`, some of them masked. Returns whether any were.
    ///
    /// # Safety
    ///
    /// That of [`row`](Self::row); the keys must be those of the spans, at most `MAX_KV_TILE`, and
    /// be among those that are packed.
    #[allow(clippy::too_many_arguments)]
    unsafe fn mixed(
        &self,
        stack: &Stack<'_, X::Element>,
        workspace: &Workspace,
        row: u32,
        packed: &Ready<X>,
        (key, keys): (usize, usize),
        masks: &mut Masks<'_>,
        lists: &mut Lists,
    ) -> bool {
        let (layout, tokens) = (stack.stream.layout, stack.tokens(row).1);
        let per_row = layout.block().words();
        let Lists { spans, bits, .. } = lists;
        let masked = spans.iter().any(|span| span.partial.is_some());
        // A row's scores are masked or not by what other rows attend to, which shows in bits.
        let with_bits = masked || self.uniform;
        // SAFETY: all functions here have the condition of `row`, and are given its tiles and its
        // keys; there is a word of bits per key.
        unsafe {
            for &Span { from, to, at, partial } in &*spans {
                self.place_keys(workspace, stack, (from, to - from), at);
                let Some((column, run)) = partial else {
                    for bits in &mut bits[..if with_bits { stack.per_row } else { 0 }] {
                        bits[at..at + to - from].fill(u64::MAX);
                    }
                    continue;
                };
                fault(Site::Mask);
                let words = masks.get(row, column, &run);
                let start = layout.column_tokens(column).start;
                for tile in self.tiles_of(workspace, stack, row) {
                    let by_key = &mut bits[tile.first / LANES][at..];
                    for word in (from - start) / LANES..(to - start).div_ceil(LANES) {
                        let mut square = [0; LANES];
                        for (lane, square) in square[..tile.lanes].iter_mut().enumerate() {
                            *square = words[(tile.first + lane) % tokens * per_row + word];
                        }
                        transpose_bits(&mut square);
                        let first = start + word * LANES;
                        let (start, end) = (from.max(first), to.min(first + LANES));
                        by_key[start - from..end - from]
                            .copy_from_slice(&square[start - first..end - first]);
                    }
                }
            }
            for tile in self.tiles_of(workspace, stack, row) {
                if with_bits {
                    let bits = &bits[tile.first / LANES][..keys];
                    self.masked(&tile, workspace, stack, packed, key, bits);
                } else {
                    let lanes = (0, tile.lanes);
                    self.key_tiles(
                        &tile,
                        workspace,
                        stack,
                        packed,
                        Part { keys: (key, keys), offset: 0, lanes, bits: None },
                    );
                }
                self.count(&tile, keys);
            }
        }
        masked
    }
}
