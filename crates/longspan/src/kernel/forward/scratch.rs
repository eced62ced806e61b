//! Scratch of a thread, and how it is cut.

use super::{Forward, LONGEST, Stack};
use crate::exec::Arena;
use crate::score::Transform;
use crate::simd::LANES;
use crate::tile::{Rows, Tiles};

/// One tile: up to [`LANES`] queries, of one head or of several.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Qᵗ, and where it is kept ready.
    pub(super) queries: Rows,
    pub(super) ready: *mut f32,
    /// A, and l as one more row of it.
    pub(super) sums: Rows,
    /// The same of earlier stretches, and the maxima they are relative to.
    pub(super) folded: Rows,
    pub(super) folded_maxima: *mut f32,
    /// Keys since they were folded, and how often they were.
    pub(super) counts: *mut [u32; 2],
    /// m and a.
    pub(super) maxima: *mut f32,
    pub(super) factors: *mut f32,
    /// Positions and slopes, where the transform looks at them.
    pub(super) positions: *mut f32,
    pub(super) slopes: *mut f32,
    /// Lanes that hold a query.
    pub(super) lanes: usize,
    /// The first of them among the lanes of the unit.
    pub(super) first: usize,
}

/// Scratch of a thread, cut for one unit.
pub(super) struct Room {
    pub(super) tiles: *mut f32,
    pub(super) tile: usize,
    pub(super) scores: *mut f32,
    pub(super) key_positions: *mut f32,
    pub(super) keys: *mut f32,
    pub(super) values: *mut f32,
    pub(super) right: *mut f32,
    /// For clean copies of values, and what is made ready of them: null in a first attempt.
    pub(super) clean: *mut f32,
}

impl<X: Tiles, T: Transform> Forward<'_, X, T> {
    fn tile_len(&self) -> usize {
        let ready = X::right_room(self.dim, LANES).next_multiple_of(LANES);
        LANES * (self.dim + 2 * (self.sum_rows() + 1) + 6) + ready
    }

    /// Rows of A.
    pub(super) fn sum_rows(&self) -> usize {
        self.value_dim.next_multiple_of(X::TARGET_ROWS)
    }

    fn lengths(&self, tiles: usize) -> [usize; 6] {
        [
            tiles * self.tile_len(),
            X::MOST_SCORES + X::TARGET_ROWS * LANES,
            LONGEST,
            X::left_room(LONGEST, self.dim),
            X::left_room(self.value_dim, LONGEST),
            X::right_room(LONGEST, LANES),
        ]
    }

    /// Numbers of scratch for clean values.
    pub(super) fn clean_room(&self) -> usize {
        LONGEST * self.value_dim + X::left_room(self.value_dim, LONGEST)
    }

    /// Numbers of scratch that units of up to so many tiles need.
    pub(crate) fn room(&self, tiles: usize) -> usize {
        let many = self.lengths(tiles).iter().map(|len| len.next_multiple_of(LANES)).sum();
        self.few_room().max(many)
    }

    /// Scratch for so many tiles.
    pub(super) fn cut(&self, arena: &mut Arena, tiles: usize) -> Room {
        let mut next = arena.room(self.room(tiles));
        let [tiles, scores, key_positions, keys, values, right] = self.lengths(tiles).map(|len| {
            let part = next;
            // SAFETY: `room` is at least the sum of these lengths, so that each part ends in it.
            next = unsafe { next.add(len.next_multiple_of(LANES)) };
            part
        });
        let (tile, clean) = (self.tile_len(), std::ptr::null_mut());
        Room { tiles, tile, scores, key_positions, keys, values, right, clean }
    }

    /// Tile `index` of a row.
    ///
    /// # Safety
    ///
    /// `room` must be what [`cut`](Self::cut) gave for the tiles of all rows of `stack`, and
    /// `index` be below the number of tiles of `row`, one of them.
    unsafe fn tile(
        &self,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        row: u32,
        index: usize,
    ) -> Tile {
        let lanes = stack.lanes(row);
        let number = (row - stack.rows.0) as usize * stack.per_row + index;
        // SAFETY: `number` is below the number of tiles of all rows, of which the room has as many
        // parts of `tile_len` elements; what follows are the parts of one, in the order that it adds
        // them up.
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
    ///
    /// # Safety
    ///
    /// `room` must be what [`cut`](Self::cut) gave for the tiles of all rows of `stack`, and `row`
    /// be one of them.
    pub(super) unsafe fn tiles_of(
        &self,
        room: &Room,
        stack: &Stack<'_, X::Element>,
        row: u32,
    ) -> impl Iterator<Item = Tile> + Clone {
        let lanes = stack.lanes(row);
        let tiles = 0..lanes.div_ceil(LANES);
        // SAFETY: `tile` has the condition of this function, and a row so many tiles.
        tiles.map(move |index| unsafe { self.tile(room, stack, row, index) })
    }
}
