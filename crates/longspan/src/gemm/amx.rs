//! Products by AMX, Intel's matrix unit: bf16 operands, f32 sums.
//!
//! A tile register holds 16 rows of 64 bytes. `tdpbf16ps` adds the product of 16 × 32 and 32 × 16
//! bf16 numbers to 16 × 16 f32 sums. The right operand has pairs of rows interleaved: one 32-bit
//! word holds the numbers of two neighbouring rows.
//!
//! ```text
//! left:  blocks of 16 rows × 32 columns, those of 16 rows one after the other
//! right: blocks of 32 rows × 16 columns, those of 16 columns one after the other
//! ```
//!
//! Blocks are filled up with zeros. Products of bf16 numbers are exact in f32; subnormal numbers
//! count as 0.

mod pack;
mod split;
mod tiles;

use std::arch::asm;
use std::cell::Cell;
use std::marker::PhantomData;

use self::pack::{left_columns, left_numbers, left_rows, right};
pub(crate) use self::split::{Parts, SplitAmx};
use self::tiles::Terms;
use super::{Beta, MicroKernel, Multiply, Rows};
use crate::isa;
use crate::simd::{Avx512, Operation, Simd};
use crate::tensor::Strided;

/// Rows of a block of the left operand, columns of one of the right, rows and columns of sums.
pub(crate) const SIDE: usize = 16;
/// Terms of a block.
pub(crate) const TERMS: usize = 32;
/// bf16 numbers of a block.
const BLOCK: usize = SIDE * TERMS;

/// bf16 operands, multiplied by the matrix unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(Avx512);

impl Amx {
    /// # Panics
    ///
    /// If it isn't available.
    pub(crate) fn new() -> Self {
        assert!(isa::amx::is_available(), "AMX on a CPU without it");
        // SAFETY: `is_available` is only true where `Isa::Avx512` is available.
        Amx(unsafe { Avx512::new_unchecked() })
    }
}

/// An operand in blocks; of numbers that are the sum of several `PARTS`, the blocks of those one after
/// the other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks<const PARTS: usize = 1> {
    pub(crate) first: *const u16,
    /// Blocks along the terms.
    pub(crate) along: usize,
}

impl<const PARTS: usize> Blocks<PARTS> {
    /// From a block across and a block along the terms on.
    ///
    /// # Safety
    ///
    /// It must be a block of the operand, or the one right behind the last.
    pub(crate) unsafe fn at(self, across: usize, along: usize) -> Self {
        let block = across * self.along + along;
        // SAFETY: the offset stays in the operand, as this function demands.
        Blocks { first: unsafe { self.first.add(block * PARTS * BLOCK) }, ..self }
    }
}

/// A thread's tile registers, configured. It stays on its thread.
pub(crate) struct Session(PhantomData<*const ()>);

thread_local! {
    /// Sessions of a thread: a hook that runs within one may call attention again. All of them have
    /// the same configuration, which the first one loads and the last one releases.
    static SESSIONS: Cell<usize> = const { Cell::new(0) };
}

#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Session {
    fn begin(_: Amx) -> Self {
        if SESSIONS.replace(SESSIONS.get() + 1) == 0 {
            let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
            row_bytes[..8].fill(64);
            rows[..8].fill(SIDE as u8);
            let all =
                Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
            // SAFETY: an `Amx` proves that the unit is there. 64 bytes are read, those of the
            // configuration: palette 1 with eight registers of 16 rows of 64 bytes, as it allows.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &all, options(nostack, readonly)) };
        }
        Session(PhantomData)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if SESSIONS.replace(SESSIONS.get() - 1) == 1 {
            // SAFETY: `begin` has configured the registers of this thread, since a session isn't
            // `Send`; sums are stored before each product ends, so that nothing is lost.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}

// SAFETY: blocks cover operands whose sides are rounded up to `SIDE` and `TERMS`, 2 bytes each, as
// `packed_lhs_len` and `packed_rhs_len` count in f32; `multiply` writes blocks of `SIDE` rows.
unsafe impl MicroKernel for Amx {
    type Element = half::bf16;
    type Simd = Avx512;
    type Lhs = Blocks;
    type Rhs = Blocks;
    type Session = Session;

    const GRAIN: usize = TERMS;
    const TARGET_ROWS: usize = SIDE;
    const PACKS: bool = true;

    fn simd(self) -> Avx512 {
        self.0
    }

    fn session(self) -> Session {
        Session::begin(self)
    }

    fn packed_lhs_len(m: usize, k: usize) -> usize {
        m.next_multiple_of(SIDE) * k.next_multiple_of(TERMS) / 2
    }

    fn packed_rhs_len(k: usize, n: usize) -> usize {
        n.next_multiple_of(SIDE) * k.next_multiple_of(TERMS) / 2
    }

    unsafe fn pack_lhs(
        self,
        matrix: Strided<half::bf16>,
        m: usize,
        k: usize,
        workspace: *mut f32,
    ) -> Blocks {
        // SAFETY: as `pack_lhs` demands; the part is the operand.
        unsafe { self.pack_lhs_part(matrix, (m, k), (0, 0), (m, k), workspace) }
    }

    unsafe fn pack_lhs_part(
        self,
        matrix: Strided<half::bf16>,
        part: (usize, usize),
        (row, column): (usize, usize),
        (_, k): (usize, usize),
        workspace: *mut f32,
    ) -> Blocks {
        let matrix = cast(matrix);
        let whole = Blocks { first: workspace.cast::<u16>(), along: k.div_ceil(TERMS) };
        // SAFETY: `pack_lhs_part` demands that the matrix is readable and that the blocks of an
        // operand of this size are its own, among them those of a part that starts at whole blocks;
        // an `Amx` proves the features of `features::amx`.
        unsafe {
            let to = Self::lhs_at(whole, row, column);
            match (matrix.row, matrix.column) {
                (_, 1) => left_rows(matrix, part, to),
                (1, _) => left_columns(self.0, matrix, part, to),
                _ => left_numbers(matrix, part, to),
            }
        }
        whole
    }

    unsafe fn lhs_at(left: Blocks, row: usize, column: usize) -> Blocks {
        debug_assert!(row.is_multiple_of(SIDE) && column.is_multiple_of(TERMS));
        // SAFETY: `lhs_at` demands that they are in the operand.
        unsafe { left.at(row / SIDE, column / TERMS) }
    }

    unsafe fn pack_rhs(self, matrix: Rows, k: usize, n: usize, workspace: *mut f32) -> Blocks {
        let to = workspace.cast::<u16>();
        // SAFETY: `pack_rhs` demands that the matrix is readable, `n` whole vectors and
        // `packed_rhs_len(k, n)` numbers, those of all blocks, its own; an `Amx` proves the
        // features of `features::amx`.
        unsafe { right::<1>(matrix, k, n, to) };
        Blocks { first: to, along: k.div_ceil(TERMS) }
    }

    unsafe fn packed_rhs(self, _: Rows, k: usize, _: usize, workspace: *mut f32) -> Blocks {
        Blocks { first: workspace.cast::<u16>(), along: k.div_ceil(TERMS) }
    }

    unsafe fn rhs_at(right: Blocks, row: usize, column: usize) -> Blocks {
        debug_assert!(row.is_multiple_of(TERMS) && column.is_multiple_of(SIDE));
        // SAFETY: `rhs_at` demands that they are in the operand.
        unsafe { right.at(column / SIDE, row / TERMS) }
    }

    unsafe fn multiply(self, work: Multiply<Blocks, Blocks>) {
        // SAFETY: `multiply` has the condition of `by_blocks`.
        unsafe { by_blocks(self.0, work) };
    }
}

/// `target ← keep(target) + left · right`, two by two blocks at a time.
///
/// # Safety
///
/// That of [`multiply`](MicroKernel::multiply).
unsafe fn by_blocks<const PARTS: usize>(simd: Avx512, work: Multiply<Blocks<PARTS>, Blocks<PARTS>>)
where
    Blocks<PARTS>: Terms,
{
    let Multiply { target, keep, left, right, size, .. } = work;
    debug_assert!(size.n.is_multiple_of(SIDE));
    let (rows, columns) = (size.m.div_ceil(SIDE), size.n / SIDE);
    let terms = size.k.div_ceil(TERMS);
    debug_assert!(terms > 0);
    // SAFETY: `multiply` demands operands of m × k and k × n elements, which have these blocks,
    // a target of rows rounded up to `SIDE` and of n columns, a multiple of a vector's `SIDE`
    // elements, a factor per column where it is scaled, at least one term, and a session.
    unsafe {
        if let Beta::PerColumn(factors) = keep {
            simd.call(ScaleColumns { target, factors, m: size.m, n: size.n });
        }
        let keep = !matches!(keep, Beta::Zero);
        for row in (0..rows).step_by(2) {
            for column in (0..columns).step_by(2) {
                let at = target.at(row * SIDE, column * SIDE);
                let (left, right) = (left.at(row, 0), right.at(column, 0));
                few(at, left, right, [rows - row, columns - column], terms, keep);
            }
        }
    }
}

/// Sums of up to two by two blocks.
///
/// # Safety
///
/// `rows` blocks across of `pack_lhs` and `columns` of `pack_rhs`, two at most, must have `terms`
/// blocks each, one at least. The `SIDE × SIDE` sums of each pair must be readable and writable at
/// `target`, and shared with neither operand. A [`Session`] of this thread must be alive.
unsafe fn few<const PARTS: usize>(
    target: Rows,
    left: Blocks<PARTS>,
    right: Blocks<PARTS>,
    [rows, columns]: [usize; 2],
    terms: usize,
    keep: bool,
) where
    Blocks<PARTS>: Terms,
{
    // SAFETY: a second block of rows or columns is only used where there is one, and this function
    // demands the rest.
    unsafe {
        if rows > 1 && columns > 1 {
            let (left, right) = ([left, left.at(1, 0)], [right, right.at(1, 0)]);
            return Terms::four(target, left, right, terms, keep);
        }
        Terms::one(target, left, right, terms, keep);
        if rows > 1 {
            Terms::one(target.at(SIDE, 0), left.at(1, 0), right, terms, keep);
        }
        if columns > 1 {
            Terms::one(target.at(0, SIDE), left, right.at(1, 0), terms, keep);
        }
    }
}

fn cast(matrix: Strided<half::bf16>) -> Strided<u16> {
    Strided { first: matrix.first.cast(), row: matrix.row, column: matrix.column }
}

/// Multiplies columns by their factors, but for vectors of them where all are 1.
///
/// # Safety
///
/// m rows of n elements of `target`, whole vectors, must be readable and writable, and n factors be
/// readable and no part of it.
struct ScaleColumns {
    target: Rows,
    factors: *const f32,
    m: usize,
    n: usize,
}

impl Operation for ScaleColumns {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let ScaleColumns { target, factors, m, n } = self;
        // SAFETY: rows and columns stay below `m` and `n`, and the type demands the rest.
        unsafe {
            for column in (0..n).step_by(S::WIDTH) {
                let own = std::slice::from_raw_parts(factors.add(column), S::WIDTH);
                if own.iter().all(|&factor| factor == 1.0) {
                    continue;
                }
                let factor = simd.load(factors.add(column));
                for row in 0..m {
                    let at = target.at(row, column).first;
                    simd.store(at, simd.mul(simd.load(at), factor));
                }
            }
        }
    }
}
