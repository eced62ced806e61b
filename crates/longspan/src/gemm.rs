//! The matrix part: products of small matrices that lie in cache.
//!
//! Attention is five products and some arithmetic between them. Kernels see them through
//! [`MicroKernel`]: operands are packed (`pack_lhs`, `pack_rhs`), then multiplied. What "packed"
//! means is the implementation's own: [`Fma`] reads f32 operands where they lie and widens others;
//! a matrix unit converts and repacks them into the room it is given, probabilities too.
//!
//! ```text
//! target[m × n] ← target · (nothing, 1, or one factor per column) + left[m × k] · right[k × n]
//! ```
//!
//! `pack_rhs` and `target` are rows of whole vectors in scratch; the columns are the tokens of a
//! tile, side by side. `pack_lhs` is keys, values, queries or gradients as the caller has them,
//! with any strides.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod fma;

pub(crate) use self::fma::Fma;
use crate::dtype::Element;
use crate::simd::Simd;
use crate::tensor::Strided;

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

/// What the target is multiplied by before the product is added to it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Beta {
    /// The target is overwritten.
    Zero,
    /// The product is added to it.
    One,
    /// A factor per column.
    PerColumn(*const f32),
}

/// The sizes of a product. `n` is a whole number of vectors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// The most terms that are summed before the sum is added to that of the others. Rounding
    /// errors of a sum in two levels grow as `√(piece + k / piece)`, not as `√k`.
    pub(crate) piece: usize,
}

/// Terms per piece of a product of queries and keys, or of gradients and values. The error of a score
/// enters every probability, and counts most where the probability is large.
pub(crate) const OVER_DIMS: usize = 16;

/// Terms per piece of a sum over tokens.
pub(crate) const OVER_TOKENS: usize = 64;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows that will be read soon: asked for while a product is at work, where memory is what limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefetch {
    first: *const u8,
    /// Bytes from one row to the next.
    row: isize,
    rows: usize,
    /// Bytes of a row.
    bytes: usize,
}

impl Prefetch {
    /// No rows.
    pub(crate) const NONE: Prefetch =
        Prefetch { first: std::ptr::null(), row: 0, rows: 0, bytes: 0 };

    /// Rows of a matrix, which needn't exist. Only rows whose numbers lie side by side are worth
    /// it.
    pub(crate) fn of<E: Element>(matrix: Strided<E>, rows: usize, columns: usize) -> Self {
        let size = size_of::<E>();
        let bytes = if matrix.column == 1 { columns * size } else { 0 };
        Prefetch { first: matrix.first.cast(), row: matrix.row * size as isize, rows, bytes }
    }

    /// The rows that fall to `from..to` of work of size `of`.
    #[inline(always)]
    fn share(self, from: usize, to: usize, of: usize) -> Prefetch {
        if self.rows == 0 {
            return self;
        }
        let (first, end) = (self.rows * from / of.max(1), self.rows * to / of.max(1));
        Prefetch { rows: end, ..self }.from(first)
    }

    /// What is left without the first rows.
    #[inline(always)]
    fn from(self, rows: usize) -> Prefetch {
        let first = self.first.wrapping_offset(rows as isize * self.row);
        Prefetch { first, rows: self.rows - rows, ..self }
    }

    /// Asks for all rows.
    pub(crate) fn all<S: Simd>(mut self, simd: S) {
        self.next(simd, self.rows);
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
    pub(crate) keep: Beta,
    pub(crate) left: L,
    pub(crate) right: R,
    pub(crate) size: Size,
    pub(crate) ahead: Prefetch,
}

/// How operands are packed, and multiplied.
///
/// An operand is packed once and used many times, in parts too: keys and values of a key tile
/// for all queries of a unit, queries for all key tiles.
///
/// # Safety
///
/// [`pack_lhs`](Self::pack_lhs) writes no more than [`packed_lhs_len`](Self::packed_lhs_len)
/// elements of its room, [`pack_rhs`](Self::pack_rhs) no more than
/// [`packed_rhs_len`](Self::packed_rhs_len), and [`multiply`](Self::multiply) no more rows of a
/// target than those of the product, rounded up to [`TARGET_ROWS`](Self::TARGET_ROWS). An operand
/// that is used within its `m × k` or `k × n` elements is read nowhere but in its matrix and its
/// room. Kernels lay out their scratch by these sizes.
pub(crate) unsafe trait MicroKernel: Copy + Send + Sync {
    /// What the caller's tensors hold.
    type Element: Element;
    /// The vectors that go with it.
    type Simd: Simd;
    /// An operand on the left, packed.
    type Lhs: Copy;
    /// An operand on the right, packed.
    type Rhs: Copy;
    /// What a thread holds while it multiplies.
    type Session;

    /// Rows and columns of a [part](Self::lhs_at) start at multiples of this.
    const GRAIN: usize;

    /// Rows of a target come in multiples of this: the last ones hold nothing of use.
    const TARGET_ROWS: usize;

    /// Whether packing an operand of a tensor takes time.
    const PACKS: bool;

    /// The token of the vectors.
    fn simd(self) -> Self::Simd;

    /// Sets this thread up; the session's end releases what was set up.
    fn session(self) -> Self::Session;

    /// f32 numbers of room that [`pack_lhs`](Self::pack_lhs) may use.
    fn packed_lhs_len(m: usize, k: usize) -> usize;

    /// f32 numbers of room that [`pack_rhs`](Self::pack_rhs) may use.
    fn packed_rhs_len(k: usize, n: usize) -> usize;

    /// Packs `matrix[m × k]` of a tensor.
    ///
    /// # Safety
    ///
    /// For as long as the operand is used, the matrix must be readable and not written, and
    /// `packed_lhs_len(m, k)` elements of `workspace`, which share nothing with it, be its own.
    unsafe fn pack_lhs(
        self,
        matrix: Strided<Self::Element>,
        m: usize,
        k: usize,
        workspace: *mut f32,
    ) -> Self::Lhs;

    /// Packs `matrix[m × k]` of a tensor as the part of an operand of `size` that starts at row and
    /// column `at`; returns the operand. Only where operands are [packed](Self::PACKS).
    ///
    /// # Safety
    ///
    /// That of [`pack_lhs`](Self::pack_lhs), with `packed_lhs_len` of `size`. Parts must not
    /// overlap, start at multiples of [`GRAIN`](Self::GRAIN) and have the strides of one tensor; an
    /// operand is packed once all of its parts are.
    unsafe fn pack_lhs_part(
        self,
        matrix: Strided<Self::Element>,
        part: (usize, usize),
        at: (usize, usize),
        size: (usize, usize),
        workspace: *mut f32,
    ) -> Self::Lhs;

    /// The part of an operand that starts at a row and a column.
    ///
    /// # Safety
    ///
    /// They must be in it, and multiples of [`GRAIN`](Self::GRAIN).
    unsafe fn lhs_at(left: Self::Lhs, row: usize, column: usize) -> Self::Lhs;

    /// Packs `matrix[k × n]` of scratch.
    ///
    /// # Safety
    ///
    /// `n` must be a whole number of vectors. For as long as the operand is used, the matrix must
    /// be readable and not written, and `packed_rhs_len(k, n)` elements of `workspace`, which share
    /// nothing with it, be its own.
    unsafe fn pack_rhs(self, matrix: Rows, k: usize, n: usize, workspace: *mut f32) -> Self::Rhs;

    /// What [`pack_rhs`](Self::pack_rhs) gave for the same arguments.
    ///
    /// # Safety
    ///
    /// It must have been called, or the steps of a fused kernel have packed into this room, and its
    /// condition still hold.
    unsafe fn packed_rhs(self, matrix: Rows, k: usize, n: usize, workspace: *mut f32) -> Self::Rhs;

    /// The part of an operand that starts at a row, and at a column that is a multiple of a
    /// vector's width.
    ///
    /// # Safety
    ///
    /// They must be in it, and the row a multiple of [`GRAIN`](Self::GRAIN).
    unsafe fn rhs_at(right: Self::Rhs, row: usize, column: usize) -> Self::Rhs;

    /// Multiplies.
    ///
    /// # Safety
    ///
    /// The operands must be packed (the conditions of [`pack_lhs`](Self::pack_lhs) and
    /// [`pack_rhs`](Self::pack_rhs) still hold) and at least `m × k` and `k × n` large, `k` at
    /// least 1, `n` a whole number of vectors. `n` elements of `m` rows of the target, rounded up
    /// to [`TARGET_ROWS`](Self::TARGET_ROWS), must be readable and writable by this thread alone
    /// and shared with neither operand; there must be `n` factors where it is scaled. A
    /// [`session`](Self::session) of this thread must be alive.
    unsafe fn multiply(self, work: Multiply<Self::Lhs, Self::Rhs>);
}
