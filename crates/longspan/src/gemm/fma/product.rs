//! A product of f32 matrices in register tiles.
//!
//! A register tile holds as many sums as the registers allow, started at zero and added to the
//! target at the end. Sums are thereby taken in levels, within a [piece](Size::piece), over pieces
//! and over products, which keeps the error of a long row near that of a short one.
//!
//! Whole tiles of the instruction sets that have them are [assembly](crate::simd::tiles); what is
//! compiled here is the rest of rows and vectors, and everything of other instruction sets.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use std::ops::Range;

use crate::gemm::{Prefetch, Rows, Size};
use crate::simd::tiles::{Keep, RegisterTiles, TileColumn};
use crate::simd::{Operation, Simd};
use crate::tensor::Strided;

/// Terms after which register tiles begin again with the first row: so many rows of the right stay in
/// the first-level cache, of 32 KB or more, and in a few ways of its sets, since they lie a tile's width
/// apart.
const CHUNK: usize = 64;

#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) target: Rows,
    pub(super) left: Strided,
    pub(super) right: Rows,
    pub(super) size: Size,
    pub(super) ahead: Prefetch,
}

/// How a register tile meets the target.
pub(super) trait Meet: Copy {
    /// The new vector at `target`, given its sums.
    ///
    /// # Safety
    ///
    /// `S::WIDTH` elements of `target` must be readable, and as many factors, where there are any,
    /// from that of `column` on.
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, column: usize, sum: S::F) -> S::F;

    /// The same for register tiles in assembly, and the factors from a column on.
    fn keep(self, column: usize) -> (Keep, *const f32);
}

/// Terms per piece: without fused multiplication twice as much is rounded.
fn rounded_piece<S: Simd>(piece: usize) -> usize {
    if S::FUSED { piece } else { piece / 2 }
}

#[derive(Clone, Copy)]
pub(super) struct Overwrite;
#[derive(Clone, Copy)]
pub(super) struct Add;
#[derive(Clone, Copy)]
pub(super) struct Scale(pub(super) *const f32);

impl Meet for Overwrite {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, _: S, _: *const f32, _: usize, sum: S::F) -> S::F {
        sum
    }

    fn keep(self, _: usize) -> (Keep, *const f32) {
        (Keep::Overwrite, std::ptr::null())
    }
}

impl Meet for Add {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, _: usize, sum: S::F) -> S::F {
        // SAFETY: `meet` demands that the vector is readable.
        simd.add(unsafe { simd.load(target) }, sum)
    }

    fn keep(self, _: usize) -> (Keep, *const f32) {
        (Keep::Add, std::ptr::null())
    }
}

impl Meet for Scale {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, column: usize, sum: S::F) -> S::F {
        // SAFETY: `meet` demands that the vector and its factors are readable.
        unsafe { simd.fma(simd.load(target), simd.load(self.0.add(column)), sum) }
    }

    fn keep(self, column: usize) -> (Keep, *const f32) {
        (Keep::Scale, self.0.wrapping_add(column))
    }
}

/// `target ← keep(target) + left · right`.
///
/// # Safety
///
/// `pack_lhs` must have m × k readable elements and `pack_rhs` k rows of n, `n` be a whole number
/// of vectors, m rows of n elements of `target` be readable and writable and shared with neither,
/// and n factors be readable where it is scaled.
pub(super) struct Product<K> {
    pub(super) operands: Operands,
    pub(super) keep: K,
}

impl<K: Meet> Operation for Product<K> {
    type Output = ();

    /// Panels of four, two and one vectors; the rows of a register tile are what then fits.
    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let vectors = self.operands.size.n / S::WIDTH;
        debug_assert_eq!(self.operands.size.n % S::WIDTH, 0);
        let mut vector = 0;
        // SAFETY: `panel` is given `N` vectors from one on that is at most `vectors - N`, the
        // condition of each arm, and the matrices are as the type demands.
        unsafe {
            while (S::REGISTERS >= 32 || !S::TILES.is_empty()) && vector + 4 <= vectors {
                match S::REGISTERS >= 32 {
                    true => self.panel::<S, 6, 4>(simd, vector),
                    false => self.panel::<S, 2, 4>(simd, vector),
                }
                vector += 4;
            }
            while vector + 2 <= vectors {
                match S::REGISTERS >= 32 {
                    true => self.panel::<S, 12, 2>(simd, vector),
                    false => self.panel::<S, 6, 2>(simd, vector),
                }
                vector += 2;
            }
            if vector < vectors {
                match S::REGISTERS >= 32 {
                    true => self.panel::<S, 16, 1>(simd, vector),
                    false => self.panel::<S, 12, 1>(simd, vector),
                }
            }
        }
    }
}

impl<K: Meet> Product<K> {
    /// All rows of `N` vectors of columns.
    ///
    /// # Safety
    ///
    /// That of [`Product`]; and `vector + N` vectors must be in a row of the target.
    #[inline(always)]
    unsafe fn panel<S: Simd, const M: usize, const N: usize>(&self, simd: S, vector: usize) {
        // SAFETY: both have the condition of this function; `rest` is given a part of `0..k` that isn't
        // empty.
        unsafe {
            let first = self.whole_tiles::<S, N>(simd, vector);
            let Size { m, k, piece, .. } = self.operands.size;
            if first == m {
                return;
            }
            let piece = rounded_piece::<S>(piece);
            self.rest::<S, K, M, N>(simd, (first, vector), (0, k.min(piece)), self.keep);
            for from in (piece..k).step_by(piece) {
                let part = (from, k.min(from + piece));
                self.rest::<S, Add, M, N>(simd, (first, vector), part, Add);
            }
        }
    }

    /// The rows that register tiles in assembly have. Returns the first one that is left.
    ///
    /// # Safety
    ///
    /// That of [`panel`](Self::panel).
    #[inline(always)]
    unsafe fn whole_tiles<S: Simd, const N: usize>(&self, simd: S, vector: usize) -> usize {
        let Operands { size: Size { m, k, piece, .. }, ahead, .. } = self.operands;
        let piece = rounded_piece::<S>(piece);
        let chunk = (CHUNK / piece).max(1) * piece;
        let mut first = 0;
        for tile in S::TILES.iter().filter(|tile| tile.vectors == N) {
            let mut tiles = (m - first) / tile.rows;
            // Few rows by themselves would wait for their own products: with those of the last tile they
            // become smaller tiles, of four after tiles of six and of two after tiles of three.
            let alone = (m - first) % tile.rows;
            if tile.rows == 6 && (alone == 1 || alone == 2) || tile.rows == 3 && alone == 1 {
                tiles = tiles.saturating_sub(1);
            }
            if tiles == 0 {
                continue;
            }
            let rows = first..first + tiles * tile.rows;
            let soon = if vector == 0 { ahead } else { Prefetch::NONE };
            // What is asked for comes between register tiles.
            let step = if soon.rows == 0 { rows.len() } else { tile.rows };
            for from in (0..k).step_by(chunk) {
                let terms = from..k.min(from + chunk);
                let soon = soon.share(terms.start, terms.end, k);
                for row in rows.clone().step_by(step) {
                    soon.share(row, row + step, m).all(simd);
                    // SAFETY: the rows are below `m` and a multiple of the tile's, the terms are some of
                    // `k`, and the vectors are in the target, as `panel` demands.
                    unsafe {
                        self.column(tile, row..row + step, terms.clone(), vector * S::WIDTH, piece);
                    }
                }
            }
            first = rows.end;
        }
        first
    }

    /// Register tiles one below the other, over some terms.
    ///
    /// # Safety
    ///
    /// That of [`Product`]; the tile must be of this instruction set, and the rows a multiple of its, at
    /// least one tile. Rows, terms, at least one, and as many vectors as it has must be those of the
    /// product.
    #[inline(always)]
    unsafe fn column(
        &self,
        tile: &RegisterTiles,
        rows: Range<usize>,
        terms: Range<usize>,
        column: usize,
        piece: usize,
    ) {
        let Operands { target, left, right, .. } = self.operands;
        let pieces = terms.len().div_ceil(piece);
        let (keep, factors) = match terms.start {
            0 => self.keep.keep(column),
            _ => Add.keep(column),
        };
        let bytes = |elements: isize| elements * size_of::<f32>() as isize;
        // SAFETY: this function demands what the function of the tile does.
        unsafe {
            let to = target.at(rows.start, column);
            (tile.run)(&mut TileColumn {
                left: left.at(rows.start, terms.start).first,
                left_row: bytes(left.row),
                left_column: bytes(left.column),
                left_tile: bytes(left.row * tile.rows as isize),
                right: right.at(terms.start, column).first,
                right_row: right.row * size_of::<f32>(),
                target: to.first,
                target_row: to.row * size_of::<f32>(),
                target_tile: to.row * tile.rows * size_of::<f32>(),
                factors,
                keep,
                tiles: rows.len() / tile.rows,
                pieces,
                piece: piece.min(terms.len()),
                last: terms.len() - (pieces - 1) * piece,
            });
        }
    }

    /// Rows from the first one on and a piece of `k`.
    ///
    /// # Safety
    ///
    /// That of [`panel`](Self::panel); the row must be in the target, and the piece be a part of `0..k`.
    #[inline(always)]
    unsafe fn rest<S: Simd, L: Meet, const M: usize, const N: usize>(
        &self,
        simd: S,
        (mut row, vector): (usize, usize),
        (from, to): (usize, usize),
        keep: L,
    ) {
        let Operands { target, left, right, size, ahead } = self.operands;
        let m = size.m;
        // SAFETY: the piece is in both operands, as `Product` demands them. `tile` is given `M` rows
        // from one on that is at most `m - M`, the condition of each arm; the vectors are in the rows,
        // as this function demands.
        unsafe {
            let ahead = ahead.share(from, to, size.k);
            let (left, right) = (left.at(0, from), right.at(from, 0));
            let size = Size { k: to - from, ..size };
            let piece = Product { operands: Operands { target, left, right, size, ahead }, keep };
            while row + M <= m {
                piece.tile::<S, M, N>(simd, row, vector);
                row += M;
            }
            while row + 4 <= m {
                piece.tile::<S, 4, N>(simd, row, vector);
                row += 4;
            }
            match m - row {
                3 => piece.tile::<S, 3, N>(simd, row, vector),
                2 => piece.tile::<S, 2, N>(simd, row, vector),
                1 => piece.tile::<S, 1, N>(simd, row, vector),
                _ => {}
            }
        }
    }

    /// `M` rows of `N` vectors, their sums in registers.
    ///
    /// # Safety
    ///
    /// That of [`Product`]; and `row + M` rows and `vector + N` vectors must be in the target.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize, const N: usize>(
        &self,
        simd: S,
        row: usize,
        vector: usize,
    ) {
        let Operands { target, left, right, size, ahead } = self.operands;
        // SAFETY: `row + M` rows are in `pack_lhs` and `target`, `vector + N` vectors in the rows
        // of `pack_rhs` and `target`, as this function demands. `Reader` takes `size.k` steps in
        // all: the turns of four, and what is left.
        unsafe {
            let column = vector * S::WIDTH;
            let mut at = Reader::new(left.at(row, 0), right.at(0, column));
            let mut sums = [[simd.splat(0.0); N]; M];
            let turns = size.k / 4;
            if ahead.rows > 0 && vector == 0 {
                let mut ahead = ahead.share(row, row + M, size.m);
                let rows = ahead.rows.div_ceil(turns.max(1));
                for _ in 0..turns {
                    ahead.next(simd, rows);
                    for _ in 0..4 {
                        at.step::<S, M, N>(simd, &mut sums);
                    }
                }
            } else {
                // Four steps per iteration: the loop is short enough for its end to be foreseen.
                for _ in 0..turns {
                    at.step::<S, M, N>(simd, &mut sums);
                    at.step::<S, M, N>(simd, &mut sums);
                    at.step::<S, M, N>(simd, &mut sums);
                    at.step::<S, M, N>(simd, &mut sums);
                }
            }
            for _ in 0..size.k % 4 {
                at.step::<S, M, N>(simd, &mut sums);
            }
            for m in 0..M {
                let target = target.at(row + m, column).first;
                for n in 0..N {
                    let at = target.add(n * S::WIDTH);
                    let sum = self.keep.meet(simd, at, column + n * S::WIDTH, sums[m][n]);
                    simd.store(at, sum);
                }
            }
        }
    }
}

/// Walks along `k`.
struct Reader {
    /// Four rows per pointer: an address is then a pointer, or one plus a stride times 1, 2 or 3.
    left: [*const f32; 4],
    row: isize,
    column: isize,
    right: *const f32,
    right_row: usize,
}

impl Reader {
    #[inline(always)]
    fn new(left: Strided, right: Rows) -> Self {
        let group = |group: isize| left.first.wrapping_offset(4 * group * left.row);
        Reader {
            left: [group(0), group(1), group(2), group(3)],
            row: left.row,
            column: left.column,
            right: right.first,
            right_row: right.row,
        }
    }

    /// Adds one column of the left times one row of the right, and moves on.
    ///
    /// # Safety
    ///
    /// The column that it has come to must have `M` readable rows, and the row `N` readable
    /// vectors.
    #[inline(always)]
    unsafe fn step<S: Simd, const M: usize, const N: usize>(
        &mut self,
        simd: S,
        sums: &mut [[S::F; N]; M],
    ) {
        // SAFETY: this function demands both; row `m` of the left is `m % 4` rows behind pointer
        // `m / 4`. Pointers move on by wrapping offsets, since the last step leads past the end.
        unsafe {
            let mut vectors = [simd.splat(0.0); N];
            for n in 0..N {
                vectors[n] = simd.load(self.right.add(n * S::WIDTH));
            }
            for m in 0..M {
                let x = simd.splat(*self.left[m / 4].offset((m % 4) as isize * self.row));
                for n in 0..N {
                    sums[m][n] = simd.fma(x, vectors[n], sums[m][n]);
                }
            }
            for left in &mut self.left[..M.div_ceil(4)] {
                *left = left.wrapping_offset(self.column);
            }
            self.right = self.right.wrapping_add(self.right_row);
        }
    }
}
