//! Products by vector instructions.
//!
//! `pack_lhs` is read number by number, each spread over a vector, so it may have any strides; only
//! where they are very long is it copied first.
//!
//! A register tile holds as many sums as the registers allow, started at zero and added to the
//! target at the end. Sums are thereby taken in levels, within a [piece](Size::piece), over pieces
//! and over products, which keeps the error of a long row near that of a short one.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use std::marker::PhantomData;

use super::{Beta, MicroKernel, Multiply, Prefetch, Rows, Size};
use crate::dtype::{Element, ElementType, load};
use crate::simd::{Operation, Simd};
use crate::tensor::Strided;

/// f32 operands, multiplied by vector instructions; other elements are widened first, and tokens
/// that lie far apart are brought together.
#[derive(Debug)]
pub(crate) struct Fma<S, E>(S, PhantomData<fn() -> E>);

impl<S: Copy, E> Clone for Fma<S, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Copy, E> Copy for Fma<S, E> {}

impl<S, E> Fma<S, E> {
    pub(crate) fn new(simd: S) -> Self {
        Fma(simd, PhantomData)
    }
}

// SAFETY: `pack_lhs` writes `m · k` elements, `pack_rhs` and `differentiate` none of their rooms,
// and `multiply` the rows of the product; operands are matrices themselves, or copies of `m · k`
// elements.
unsafe impl<S: Simd, E: Element> MicroKernel for Fma<S, E> {
    type Element = E;
    type Simd = S;
    type Lhs = Strided;
    type Rhs = Rows;
    type Session = ();

    const GRAIN: usize = 1;
    const TARGET_ROWS: usize = 1;
    const PACKS: bool = !matches!(E::TYPE, ElementType::F32);

    fn simd(self) -> S {
        self.0
    }

    fn session(self) {}

    fn packed_lhs_len(m: usize, k: usize) -> usize {
        m * k
    }

    fn packed_rhs_len(_: usize, _: usize) -> usize {
        0
    }

    #[inline(always)]
    unsafe fn pack_lhs(
        self,
        matrix: Strided<E>,
        m: usize,
        k: usize,
        workspace: *mut f32,
    ) -> Strided {
        let Strided { first, row, column } = matrix;
        if E::TYPE == ElementType::F32 && !matrix.is_far_apart() {
            return Strided { first: first.cast(), row, column };
        }
        // SAFETY: as `pack_lhs` demands; the part is the operand.
        unsafe { self.pack_lhs_part(matrix, (m, k), (0, 0), (m, k), workspace) }
    }

    #[inline(always)]
    unsafe fn pack_lhs_part(
        self,
        matrix: Strided<E>,
        part: (usize, usize),
        at: (usize, usize),
        size: (usize, usize),
        workspace: *mut f32,
    ) -> Strided {
        // Along the numbers that lie side by side, whichever way round that is.
        let transposed = matrix.column != 1 && matrix.row == 1;
        let turn = |(m, k)| if transposed { (k, m) } else { (m, k) };
        let source = if transposed { matrix.transposed() } else { matrix };
        let ((rows, columns), (row, column), (_, stride)) = (turn(part), turn(at), turn(size));
        let whole = Rows { first: workspace, row: stride };
        // SAFETY: `pack_lhs_part` demands that the matrix is readable, and that as many elements of
        // the room as `size` has are the operand's own, in which the part lies.
        unsafe { self.0.call(Widen { source, rows, columns, target: whole.at(row, column) }) };
        if transposed { whole.strided().transposed() } else { whole.strided() }
    }

    #[inline(always)]
    unsafe fn lhs_at(left: Strided, row: usize, column: usize) -> Strided {
        // SAFETY: `lhs_at` demands that they are in the operand.
        unsafe { left.at(row, column) }
    }

    #[inline(always)]
    unsafe fn pack_rhs(self, matrix: Rows, _: usize, _: usize, _: *mut f32) -> Rows {
        matrix
    }

    #[inline(always)]
    unsafe fn packed_rhs(self, matrix: Rows, _: usize, _: usize, _: *mut f32) -> Rows {
        matrix
    }

    #[inline(always)]
    unsafe fn rhs_at(right: Rows, row: usize, column: usize) -> Rows {
        // SAFETY: `rhs_at` demands that they are in the operand.
        unsafe { right.at(row, column) }
    }

    #[inline(always)]
    unsafe fn multiply(self, work: Multiply<Strided, Rows>) {
        let Multiply { target, mut keep, left, right, size, ahead } = work;
        let piece = if S::FUSED { size.piece } else { size.piece / 2 };
        let mut done = 0;
        loop {
            let k = (size.k - done).min(piece);
            // SAFETY: `done` is below `size.k`, and `multiply` demands operands of so many columns
            // and rows.
            let (left, right) = unsafe { (left.at(0, done), right.at(done, 0)) };
            let ahead = ahead.share(done, done + k, size.k);
            let operands = Operands { target, left, right, size: Size { k, ..size }, ahead };
            // SAFETY: `multiply` demands these operands, of which `done..done + k` is a part, this
            // target, and a factor per column where it is scaled.
            unsafe {
                match keep {
                    Beta::Zero => self.0.call(Product { operands, keep: Overwrite }),
                    Beta::One => self.0.call(Product { operands, keep: Add }),
                    Beta::PerColumn(factors) => {
                        self.0.call(Product { operands, keep: Scale(factors) });
                    }
                }
            }
            keep = Beta::One;
            done += k;
            if done >= size.k {
                break;
            }
        }
    }
}

/// Writes a matrix as f32, row after row.
///
/// # Safety
///
/// rows × columns elements must be readable at `source` and writable at `target`, none of them
/// shared.
struct Widen<E> {
    source: Strided<E>,
    rows: usize,
    columns: usize,
    target: Rows,
}

impl<E: Element> Operation for Widen<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let Widen { source, rows, columns, target } = self;
        let whole = if source.column == 1 { columns / S::WIDTH * S::WIDTH } else { 0 };
        // SAFETY: rows and columns stay below those of both matrices, which the type demands;
        // vectors are only loaded from elements that lie side by side.
        unsafe {
            for row in 0..rows {
                let (from, to) = (source.at(row, 0), target.at(row, 0).first);
                for column in (0..whole).step_by(S::WIDTH) {
                    simd.store(to.add(column), load(simd, from.first.add(column)));
                }
                for column in whole..columns {
                    *to.add(column) = (*from.at(0, column).first).to_f32();
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Operands {
    target: Rows,
    left: Strided,
    right: Rows,
    size: Size,
    ahead: Prefetch,
}

/// How a register tile meets the target.
trait Meet: Copy {
    /// The new vector at `target`, given its sums.
    ///
    /// # Safety
    ///
    /// `S::WIDTH` elements of `target` must be readable, and as many factors, where there are any,
    /// from that of `column` on.
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, column: usize, sum: S::F) -> S::F;
}

#[derive(Clone, Copy)]
struct Overwrite;
#[derive(Clone, Copy)]
struct Add;
#[derive(Clone, Copy)]
struct Scale(*const f32);

impl Meet for Overwrite {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, _: S, _: *const f32, _: usize, sum: S::F) -> S::F {
        sum
    }
}

impl Meet for Add {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, _: usize, sum: S::F) -> S::F {
        // SAFETY: `meet` demands that the vector is readable.
        simd.add(unsafe { simd.load(target) }, sum)
    }
}

impl Meet for Scale {
    #[inline(always)]
    unsafe fn meet<S: Simd>(self, simd: S, target: *const f32, column: usize, sum: S::F) -> S::F {
        // SAFETY: `meet` demands that the vector and its factors are readable.
        unsafe { simd.fma(simd.load(target), simd.load(self.0.add(column)), sum) }
    }
}

/// `target ← keep(target) + left · right`.
///
/// # Safety
///
/// `pack_lhs` must have m × k readable elements and `pack_rhs` k rows of n, `n` be a whole number
/// of vectors, m rows of n elements of `target` be readable and writable and shared with neither,
/// and n factors be readable where it is scaled.
struct Product<K> {
    operands: Operands,
    keep: K,
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
            if S::REGISTERS >= 32 {
                while vector + 4 <= vectors {
                    self.panel::<S, 6, 4>(simd, vector);
                    vector += 4;
                }
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
        let mut row = 0;
        let m = self.operands.size.m;
        // SAFETY: `tile` is given `M` rows from one on that is at most `m - M`, the condition of
        // each arm; the vectors are in the rows, as this function demands.
        unsafe {
            while row + M <= m {
                self.tile::<S, M, N>(simd, row, vector);
                row += M;
            }
            while row + 4 <= m {
                self.tile::<S, 4, N>(simd, row, vector);
                row += 4;
            }
            match m - row {
                3 => self.tile::<S, 3, N>(simd, row, vector),
                2 => self.tile::<S, 2, N>(simd, row, vector),
                1 => self.tile::<S, 1, N>(simd, row, vector),
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
