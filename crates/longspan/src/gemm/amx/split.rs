//! Products of f32 numbers as three of bf16 parts.
//!
//! A number is the sum of a high and a low part of 8 bits each, but for 2⁻¹⁸ of it at most:
//!
//! ```text
//! x · y ≈ high(x) · low(y) + high(x) · high(y) + low(x) · high(y)
//! ```
//!
//! What is left out of a product, the low parts' own product and what the low parts lack, is 4.5e-6 of
//! it as a root mean square. Low parts below 2⁻¹²⁶ count as 0, as all subnormal numbers do here.

mod pack;

use self::pack::{left_columns, left_numbers, left_rows};
use super::pack::right;
use super::{Amx, Blocks, SIDE, Session, TERMS, by_blocks};
use crate::gemm::{MicroKernel, Multiply, Rows};
use crate::simd::Avx512;
use crate::tensor::Strided;

/// f32 operands in two parts, multiplied by the matrix unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitAmx(Amx);

impl SplitAmx {
    /// # Panics
    ///
    /// If the unit isn't available.
    pub(crate) fn new() -> Self {
        SplitAmx(Amx::new())
    }
}

/// An operand in blocks of high and of low parts.
pub(crate) type Parts = Blocks<2>;

// SAFETY: blocks cover operands whose sides are rounded up to `SIDE` and `TERMS`, 4 bytes each, as
// `packed_lhs_len` and `packed_rhs_len` count in f32; `multiply` writes blocks of `SIDE` rows.
unsafe impl MicroKernel for SplitAmx {
    type Element = f32;
    type Simd = Avx512;
    type Lhs = Parts;
    type Rhs = Parts;
    type Session = Session;

    const GRAIN: usize = TERMS;
    const TARGET_ROWS: usize = SIDE;
    const PACKS: bool = true;

    fn simd(self) -> Avx512 {
        self.0.simd()
    }

    fn session(self) -> Session {
        self.0.session()
    }

    fn packed_lhs_len(m: usize, k: usize) -> usize {
        2 * Amx::packed_lhs_len(m, k)
    }

    fn packed_rhs_len(k: usize, n: usize) -> usize {
        2 * Amx::packed_rhs_len(k, n)
    }

    unsafe fn pack_lhs(self, matrix: Strided, m: usize, k: usize, workspace: *mut f32) -> Parts {
        // SAFETY: as `pack_lhs` demands; the part is the operand.
        unsafe { self.pack_lhs_part(matrix, (m, k), (0, 0), (m, k), workspace) }
    }

    unsafe fn pack_lhs_part(
        self,
        matrix: Strided,
        part: (usize, usize),
        (row, column): (usize, usize),
        (_, k): (usize, usize),
        workspace: *mut f32,
    ) -> Parts {
        let whole = Parts { first: workspace.cast::<u16>(), along: k.div_ceil(TERMS) };
        // SAFETY: `pack_lhs_part` demands that the matrix is readable and that the blocks of an
        // operand of this size are its own, among them those of a part that starts at whole blocks;
        // an `Amx` proves the features of `features::amx`.
        unsafe {
            let to = Self::lhs_at(whole, row, column);
            match (matrix.row, matrix.column) {
                (_, 1) => left_rows(matrix, part, to),
                (1, _) => left_columns(self.simd(), matrix, part, to),
                _ => left_numbers(matrix, part, to),
            }
        }
        whole
    }

    unsafe fn lhs_at(left: Parts, row: usize, column: usize) -> Parts {
        debug_assert!(row.is_multiple_of(SIDE) && column.is_multiple_of(TERMS));
        // SAFETY: `lhs_at` demands that they are in the operand.
        unsafe { left.at(row / SIDE, column / TERMS) }
    }

    unsafe fn pack_rhs(self, matrix: Rows, k: usize, n: usize, workspace: *mut f32) -> Parts {
        // SAFETY: `pack_rhs` demands that the matrix is readable, `n` whole vectors and
        // `packed_rhs_len(k, n)` numbers, those of all blocks, its own; an `Amx` proves the
        // features of `features::amx`.
        unsafe {
            right::<2>(matrix, k, n, workspace.cast());
            self.packed_rhs(matrix, k, n, workspace)
        }
    }

    unsafe fn packed_rhs(self, _: Rows, k: usize, _: usize, workspace: *mut f32) -> Parts {
        Parts { first: workspace.cast::<u16>(), along: k.div_ceil(TERMS) }
    }

    unsafe fn rhs_at(right: Parts, row: usize, column: usize) -> Parts {
        debug_assert!(row.is_multiple_of(TERMS) && column.is_multiple_of(SIDE));
        // SAFETY: `rhs_at` demands that they are in the operand.
        unsafe { right.at(column / SIDE, row / TERMS) }
    }

    unsafe fn multiply(self, work: Multiply<Parts, Parts>) {
        // SAFETY: `multiply` has the condition of `by_blocks`.
        unsafe { by_blocks(self.simd(), work) };
    }
}
