//! The matrix part: products of small matrices that lie in cache.
//!
//! Attention is five products and some arithmetic between them. Kernels see them through
//! [`Tiles`]: operands are made ready (`left`, `right`), then multiplied. What "ready" means is the
//! implementation's own: [`Direct`] reads f32 operands where they lie and widens others; a matrix
//! unit converts and repacks them into the room it is given, probabilities too.
//!
//! ```text
//! target[m × n] ← target · (nothing, 1, or a factor a column) + left[m × k] · right[k × n]
//! ```
//!
//! `right` and `target` are rows of whole vectors in scratch; the columns are the tokens of a tile,
//! side by side. `left` is keys, values, queries or gradients as the caller has them, with any
//! strides.

#[cfg(target_arch = "x86_64")]
mod amx;
mod direct;

#[cfg(target_arch = "x86_64")]
pub(crate) use self::amx::{Amx, is_available as amx_is_available, unit as amx_unit};
pub(crate) use self::direct::Direct;
use crate::element::Element;
use crate::kernel::backward::differentiate::Differentiate;
use crate::kernel::forward::softmax::Softmax;
use crate::score::Transform;
use crate::simd::Simd;

/// A matrix of which single numbers are read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strided<E = f32> {
    /// The number at row 0, column 0.
    pub(crate) first: *const E,
    /// From one row to the next.
    pub(crate) row: isize,
    /// From one column to the next.
    pub(crate) column: isize,
}

impl<E: Copy> Strided<E> {
    /// The part of it that starts at a row and a column.
    ///
    /// # Safety
    ///
    /// The number at that row and column must be in the allocation that the matrix lies in, or be
    /// the one right behind it.
    #[inline(always)]
    pub(crate) unsafe fn at(self, row: usize, column: usize) -> Self {
        let offset = row as isize * self.row + column as isize * self.column;
        // SAFETY: the offset stays in the allocation, as this function demands.
        Strided { first: unsafe { self.first.offset(offset) }, ..self }
    }

    /// Rows and columns exchanged.
    #[inline(always)]
    pub(crate) fn transposed(self) -> Self {
        Strided { first: self.first, row: self.column, column: self.row }
    }
}

/// A matrix of whole vectors per row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    /// The number at row 0, column 0.
    pub(crate) first: *mut f32,
    /// From one row to the next.
    pub(crate) row: usize,
}

impl Rows {
    /// The part of it that starts at a row and a column.
    ///
    /// # Safety
    ///
    /// The number at that row and column must be in the allocation that the matrix lies in, or be
    /// the one right behind it.
    #[inline(always)]
    pub(crate) unsafe fn at(self, row: usize, column: usize) -> Self {
        // SAFETY: the offset stays in the allocation, as this function demands.
        Rows { first: unsafe { self.first.add(row * self.row + column) }, ..self }
    }

    /// The same numbers, to be read one by one.
    #[inline(always)]
    pub(crate) fn strided(self) -> Strided {
        Strided { first: self.first, row: self.row as isize, column: 1 }
    }
}

/// What becomes of the numbers that the target holds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Keep {
    /// They are overwritten.
    Nothing,
    /// They are added to.
    All,
    /// They are multiplied by a factor a column first.
    Scaled(*const f32),
}

/// The sizes of a product. `n` is a whole number of vectors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// The most terms that are summed before the sum is added to that of the others. Rounding errors
    /// of a sum in two levels grow as `√(piece + k / piece)`, not as `√k`.
    pub(crate) piece: usize,
}

/// Terms a piece of a product of queries and keys, or of gradients and values. The error of a score
/// enters every probability, and counts most where the probability is large.
pub(crate) const OVER_DIMS: usize = 16;

/// Terms a piece of a sum over tokens.
pub(crate) const OVER_TOKENS: usize = 64;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows that will be read soon: asked for while a product is at work, where memory is what limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    first: *const u8,
    /// Bytes from one row to the next.
    row: isize,
    rows: usize,
    /// Bytes of a row.
    bytes: usize,
}

impl Ahead {
    /// Nothing.
    pub(crate) const NOTHING: Ahead = Ahead { first: std::ptr::null(), row: 0, rows: 0, bytes: 0 };

    /// Rows of a matrix, which needn't exist. Only rows whose numbers lie side by side are worth it.
    pub(crate) fn of<E: Element>(matrix: Strided<E>, rows: usize, columns: usize) -> Self {
        let size = size_of::<E>();
        let bytes = if matrix.column == 1 { columns * size } else { 0 };
        Ahead { first: matrix.first.cast(), row: matrix.row * size as isize, rows, bytes }
    }

    /// The rows that fall to `from..to` of work of size `of`.
    #[inline(always)]
    fn share(self, from: usize, to: usize, of: usize) -> Ahead {
        if self.rows == 0 {
            return self;
        }
        let (first, end) = (self.rows * from / of.max(1), self.rows * to / of.max(1));
        Ahead { rows: end, ..self }.from(first)
    }

    /// What is left without the first rows.
    #[inline(always)]
    fn from(self, rows: usize) -> Ahead {
        let first = self.first.wrapping_offset(rows as isize * self.row);
        Ahead { first, rows: self.rows - rows, ..self }
    }

    /// Asks for the next rows, and takes them away.
    #[inline(always)]
    fn next<S: Simd>(&mut self, simd: S, rows: usize) {
        let rows = rows.min(self.rows);
        for row in 0..rows {
            let first = self.first.wrapping_offset(row as isize * self.row);
            for byte in (0..self.bytes).step_by(LINE) {
                simd.prefetch(first.wrapping_add(byte));
            }
        }
        *self = self.from(rows);
    }
}

/// `target ← keep(target) + left · right`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Multiply<L, R> {
    pub(crate) target: Rows,
    pub(crate) keep: Keep,
    pub(crate) left: L,
    pub(crate) right: R,
    pub(crate) size: Size,
    pub(crate) ahead: Ahead,
}

/// How operands are made ready, and multiplied.
///
/// An operand is made ready once and used many times, in parts too: keys and values of a stretch
/// for all queries of a unit, queries for all stretches.
///
/// # Safety
///
/// [`left`](Self::left) writes no more than [`left_room`](Self::left_room) elements of its room,
/// [`right`](Self::right) and [`differentiate`](Self::differentiate) no more than
/// [`right_room`](Self::right_room), and [`multiply`](Self::multiply) no more rows of a target than
/// those of the product, rounded up to [`TARGET_ROWS`](Self::TARGET_ROWS). An operand that is used
/// within its `m × k` or `k × n` elements is read nowhere but in its matrix and its room. Kernels
/// lay out their scratch by these sizes.
pub(crate) unsafe trait Tiles: Copy + Send + Sync {
    /// What the caller's tensors hold.
    type Element: Element;
    /// The vectors that go with it.
    type Simd: Simd;
    /// An operand on the left, ready.
    type Left: Copy;
    /// An operand on the right, ready.
    type Right: Copy;
    /// What a thread holds while it multiplies.
    type Session;

    /// Rows and columns of a [part](Self::part) start at multiples of this.
    const GRAIN: usize;

    /// Rows of a target come in multiples of this: the last ones hold nothing of use.
    const TARGET_ROWS: usize;

    /// The most lanes of a stretch, and the most of its keys × lanes: whole vectors, up to
    /// [`LANES`](crate::simd::LANES).
    const MOST_LANES: usize;
    const MOST_SCORES: usize;

    /// Whether it takes time to make an operand of a tensor ready.
    const PACKS: bool;

    /// Tiles of queries whose sums over queries are one product.
    const GROUP: usize;

    /// Whether sums over keys are worth a third level: not where their terms are bf16.
    const FOLDS: bool;

    /// The token of the vectors.
    fn simd(self) -> Self::Simd;

    /// Sets this thread up; the session's end releases what was set up.
    fn session(self) -> Self::Session;

    /// f32 numbers of room that [`left`](Self::left) may use.
    fn left_room(m: usize, k: usize) -> usize;

    /// f32 numbers of room that [`right`](Self::right) may use.
    fn right_room(k: usize, n: usize) -> usize;

    /// Makes `matrix[m × k]` of a tensor ready.
    ///
    /// # Safety
    ///
    /// For as long as the operand is used, the matrix must be readable and not written, and
    /// `left_room(m, k)` elements of `room`, which share nothing with it, be its own.
    unsafe fn left(
        self,
        matrix: Strided<Self::Element>,
        m: usize,
        k: usize,
        room: *mut f32,
    ) -> Self::Left;

    /// The part of an operand that starts at a row and a column.
    ///
    /// # Safety
    ///
    /// They must be in it, and multiples of [`GRAIN`](Self::GRAIN).
    unsafe fn part(left: Self::Left, row: usize, column: usize) -> Self::Left;

    /// Makes `matrix[k × n]` of scratch ready.
    ///
    /// # Safety
    ///
    /// `n` must be a whole number of vectors. For as long as the operand is used, the matrix must
    /// be readable and not written, and `right_room(k, n)` elements of `room`, which share nothing
    /// with it, be its own.
    unsafe fn right(self, matrix: Rows, k: usize, n: usize, room: *mut f32) -> Self::Right;

    /// What [`right`](Self::right) gave for the same arguments.
    ///
    /// # Safety
    ///
    /// It must have been called, or [`differentiate`](Self::differentiate) with this room, and its
    /// condition still hold.
    unsafe fn again(self, matrix: Rows, k: usize, n: usize, room: *mut f32) -> Self::Right;

    /// The part of an operand that starts at a row, and at a column that is a multiple of a
    /// vector's width.
    ///
    /// # Safety
    ///
    /// They must be in it, and the row a multiple of [`GRAIN`](Self::GRAIN).
    unsafe fn right_part(right: Self::Right, row: usize, column: usize) -> Self::Right;

    /// Multiplies.
    ///
    /// # Safety
    ///
    /// The operands must be ready (the conditions of [`left`](Self::left) and
    /// [`right`](Self::right) still hold) and at least `m × k` and `k × n` large, `k` at least 1,
    /// `n` a whole number of vectors. `n` elements of `m` rows of the target, rounded up to
    /// [`TARGET_ROWS`](Self::TARGET_ROWS), must be readable and writable by this thread alone and
    /// shared with neither operand; there must be `n` factors where it is scaled. A
    /// [`session`](Self::session) of this thread must be alive.
    unsafe fn multiply(self, work: Multiply<Self::Left, Self::Right>);

    /// Scores, softmax and sums of values, for one stretch after the other.
    ///
    /// # Safety
    ///
    /// That of [`multiply`](Self::multiply) for both products of each stretch, keys × lanes and
    /// value dims × lanes; that of its [`Softmax`]; and `right_room(keys, lanes)` elements of its
    /// room must be its own. Stretches are asked for one after the other: what one of them writes,
    /// the next may read.
    unsafe fn attend<T: Transform>(self, stretches: impl Iterator<Item = Stretch<Self, T>>);

    /// The arithmetic between the products of the backward pass. Probabilities and gradients of
    /// products become ready as operands on the right, which [`again`](Self::again) gives; the latter
    /// as one on the left too.
    ///
    /// # Safety
    ///
    /// That of [`Differentiate`]; and the rooms must be this thread's own, `right_room` of the
    /// group's queries × [`LANES`](crate::simd::LANES) and `left_room` of the group's queries × the
    /// slab's keys large, with the tile inside.
    unsafe fn differentiate<T: Transform>(self, work: Differentiate<T>, rooms: Rooms);

    /// The gradients of products of all tiles of a slab of `k` keys, as an operand on the left.
    ///
    /// # Safety
    ///
    /// [`differentiate`](Self::differentiate) must have been given this room for the tiles that are
    /// used, and nothing have written it or `products` since.
    unsafe fn differentiated(products: Rows, k: usize, room: *mut f32) -> Self::Left;
}

/// Where a tile of [`Differentiate`] goes besides its own matrices.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only matrix units ask"))]
pub(crate) struct Rooms {
    /// Room for the probabilities and for the gradients of products on the right, of all queries of a
    /// group.
    pub(crate) right: [*mut f32; 2],
    /// Room for the gradients of products on the left, of all queries of the group and all keys of the
    /// slab.
    pub(crate) left: *mut f32,
    /// The tile's first query in the group and its first key in the slab, and how many these have.
    pub(crate) queries: (usize, usize),
    pub(crate) keys: (usize, usize),
    /// Whether the matrices are read afterwards.
    pub(crate) keep: bool,
}

/// Some keys for some lanes of a tile: `A ← a·A + Vᵗ · softmax(K · Qᵗ)`.
pub(crate) struct Stretch<X: Tiles, T> {
    /// K and Qᵗ.
    pub(crate) keys: X::Left,
    pub(crate) queries: X::Right,
    /// Terms of a score.
    pub(crate) dim: usize,
    /// What is done to the scores, and where they are.
    pub(crate) softmax: Softmax<T>,
    /// Vᵗ, and its rows.
    pub(crate) values: X::Left,
    pub(crate) value_dim: usize,
    /// A.
    pub(crate) sums: Rows,
    /// Room for the probabilities, ready.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only matrix units ask"))]
    pub(crate) room: *mut f32,
    /// What is read soon: while scores are made, and while values are summed.
    pub(crate) ahead: [Ahead; 2],
}
