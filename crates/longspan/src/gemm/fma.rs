//! Products by vector instructions.
//!
//! `pack_lhs` is read number by number, each spread over a vector, so it may have any strides; only
//! where they are very long is it copied first.
//!
mod product;

use std::marker::PhantomData;

use self::product::{Add, Operands, Overwrite, Product, Scale};
use super::{Beta, MicroKernel, Multiply, Rows};
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
        let Multiply { target, keep, left, right, size, ahead } = work;
        let operands = Operands { target, left, right, size, ahead };
        // SAFETY: `multiply` demands these operands, this target, and a factor per column where it is
        // scaled.
        unsafe {
            match keep {
                Beta::Zero => self.0.call(Product { operands, keep: Overwrite }),
                Beta::One => self.0.call(Product { operands, keep: Add }),
                Beta::PerColumn(factors) => {
                    self.0.call(Product { operands, keep: Scale(factors) });
                }
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
