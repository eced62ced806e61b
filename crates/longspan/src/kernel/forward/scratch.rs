//! Scratch of a thread, and how it is cut.

use super::{Forward, MAX_KV_TILE, Stack};
use crate::exec::Arena;
use crate::gemm::Rows;
use crate::kernel::adjust::{KEY_TERMS, QUERY_TERMS};
use crate::kernel::fused::FusedKernel;
use crate::simd::LANES;

/// One tile: up to [`LANES`] queries, of one head or of several.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Qᵗ, and where it is kept packed.
    pub(super) queries: Rows,
    pub(super) packed: *mut f32,
    /// A, and l as one more row of it.
    pub(super) sums: Rows,
    /// The same of earlier key tiles, and the maxima they are relative to.
    pub(super) folded: Rows,
    pub(super) folded_maxima: *mut f32,
    /// Keys since they were folded, and how often they were.
    pub(super) counts: *mut [u32; 2],
    /// m and a.
    pub(super) maxima: *mut f32,
    pub(super) factors: *mut f32,
    /// What additions need of the queries.
    pub(super) terms: Rows,
    /// Lanes that hold a query.
    pub(super) lanes: usize,
    /// The first of them among the lanes of the unit.
    pub(super) first: usize,
}

/// Scratch of a thread, cut for one unit.
pub(super) struct Workspace {
    pub(super) tiles: *mut f32,
    pub(super) tile: usize,
    pub(super) scores: *mut f32,
    /// What additions need of keys, and factors of dropout.
    pub(super) key_terms: Rows,
    pub(super) factors: *mut f32,
    pub(super) keys: *mut f32,
    pub(super) values: *mut f32,
    pub(super) right: *mut f32,
    /// For clean copies of values, and what is packed of them: null in a first attempt.
    pub(super) clean: *mut f32,
}

impl<X: FusedKernel> Forward<'_, X> {
    fn tile_len(&self) -> usize {
        let packed = X::packed_rhs_len(self.dim, LANES).next_multiple_of(LANES);
        LANES * (self.dim + 2 * (self.sum_rows() + 1) + self.tile_lists()) + packed
    }

    /// Lists of `LANES` elements of a tile.
    fn tile_lists(&self) -> usize {
        4 + if self.additions.is_some() { QUERY_TERMS } else { 0 }
    }

    /// Rows of A.
    pub(super) fn sum_rows(&self) -> usize {
        self.value_dim.next_multiple_of(X::TARGET_ROWS)
    }

    fn lengths(&self, tiles: usize) -> [usize; 7] {
        let adjusted = |len| if self.additions.is_some() { len } else { 0 };
        [
            tiles * self.tile_len(),
            X::MOST_SCORES + X::TARGET_ROWS * LANES,
            adjusted(KEY_TERMS * MAX_KV_TILE),
            adjusted(X::MOST_SCORES),
            X::packed_lhs_len(MAX_KV_TILE, self.dim),
            X::packed_lhs_len(self.value_dim, MAX_KV_TILE),
            X::packed_rhs_len(MAX_KV_TILE, LANES),
        ]
    }

    /// Numbers of scratch for clean values.
    pub(super) fn finite_copy_len(&self) -> usize {
        MAX_KV_TILE * self.value_dim + X::packed_lhs_len(self.value_dim, MAX_KV_TILE)
    }

    /// Numbers of scratch that units of up to so many tiles need.
    pub(crate) fn workspace_len(&self, tiles: usize) -> usize {
        let many = self.lengths(tiles).iter().map(|len| len.next_multiple_of(LANES)).sum();
        self.decode_workspace_len().max(many)
    }

    /// Scratch for so many tiles.
    pub(super) fn carve(&self, arena: &mut Arena, tiles: usize) -> Workspace {
        let mut next = arena.reserve(self.workspace_len(tiles));
        let [tiles, scores, key_terms, factors, keys, values, right] =
            self.lengths(tiles).map(|len| {
                let part = next;
                // SAFETY: `workspace` is at least the sum of these lengths, so that each part ends
                // in it.
                next = unsafe { next.add(len.next_multiple_of(LANES)) };
                part
            });
        let (tile, clean) = (self.tile_len(), std::ptr::null_mut());
        let key_terms = Rows { first: key_terms, row: MAX_KV_TILE };
        Workspace { tiles, tile, scores, key_terms, factors, keys, values, right, clean }
    }

    /// Tile `index` of a row.
    ///
    /// # Safety
    ///
    /// `workspace` must be what [`carve`](Self::carve) gave for the tiles of all rows of `stack`, and
    /// `index` be below the number of tiles of `row`, one of them.
    unsafe fn tile(
        &self,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        row: u32,
        index: usize,
    ) -> Tile {
        let lanes = stack.lanes(row);
        let number = (row - stack.rows.0) as usize * stack.per_row + index;
        // SAFETY: `number` is below the number of tiles of all rows, of which the room has as many
        // parts of `tile_len` elements; what follows are the parts of one, in the order that it
        // adds them up.
        unsafe {
            let queries = workspace.tiles.add(number * workspace.tile);
            let sums = queries.add(self.dim * LANES);
            let folded = sums.add((self.sum_rows() + 1) * LANES);
            let rows = folded.add((self.sum_rows() + 1) * LANES);
            Tile {
                queries: Rows { first: queries, row: LANES },
                packed: rows.add(self.tile_lists() * LANES),
                sums: Rows { first: sums, row: LANES },
                folded: Rows { first: folded, row: LANES },
                maxima: rows,
                folded_maxima: rows.add(LANES),
                factors: rows.add(2 * LANES),
                counts: rows.add(3 * LANES).cast(),
                terms: Rows { first: rows.add(4 * LANES), row: LANES },
                lanes: (lanes - index * LANES).min(LANES),
                first: index * LANES,
            }
        }
    }

    /// The tiles of a row.
    ///
    /// # Safety
    ///
    /// `workspace` must be what [`carve`](Self::carve) gave for the tiles of all rows of `stack`, and
    /// `row` be one of them.
    pub(super) unsafe fn tiles_of(
        &self,
        workspace: &Workspace,
        stack: &Stack<'_, X::Element>,
        row: u32,
    ) -> impl Iterator<Item = Tile> + Clone {
        let lanes = stack.lanes(row);
        let tiles = 0..lanes.div_ceil(LANES);
        // SAFETY: `tile` has the condition of this function, and a row so many tiles.
        tiles.map(move |index| unsafe { self.tile(workspace, stack, row, index) })
    }
}
