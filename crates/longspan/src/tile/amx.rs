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

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

use self::pack::{left_columns, left_numbers, left_rows, right_rounded};
use super::{Ahead, Keep, Multiply, Rooms, Rows, Size, Stretch, Strided, Tiles};
use crate::kernel::backward::QUERIES;
use crate::kernel::backward::coarse::{self, Coarse};
use crate::kernel::backward::differentiate::Differentiate;
use crate::kernel::forward::coarse::{Begin, Weigh};
use crate::score::Transform;
use crate::simd::{Avx512, Operation, Simd};

/// Rows of a block of the left operand, columns of one of the right, rows and columns of sums.
const SIDE: usize = 16;
/// Terms of a block.
const TERMS: usize = 32;
/// bf16 numbers of a block.
const BLOCK: usize = SIDE * TERMS;

/// Whether this CPU has the unit and the system lets this process use it.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_unit() && ask_permission())
}

fn has_unit() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    // The leaf exists wherever AVX-512 does.
    let leaf = || __cpuid_count(7, 0).edx;
    crate::Isa::Avx512.is_available()
        && is_x86_feature_detected!("avx512bf16")
        && leaf() & (BF16 | TILE) == BF16 | TILE
}

/// Tile registers are large, so Linux saves them only for processes that ask; threads there are and
/// threads to come are covered.
#[cfg(target_os = "linux")]
fn ask_permission() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: the call changes nothing but what the kernel saves for this process.
    unsafe {
        asm!(
            "syscall",
            inout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn ask_permission() -> bool {
    false
}

/// bf16 operands, multiplied by the matrix unit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(Avx512);

impl Amx {
    /// # Panics
    ///
    /// If it isn't [available](is_available).
    pub(crate) fn new() -> Self {
        assert!(is_available(), "AMX on a CPU without it");
        // SAFETY: the unit is only available with AVX-512.
        Amx(unsafe { Avx512::new_unchecked() })
    }
}

/// An operand in blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks {
    first: *const u16,
    /// Blocks along the terms.
    along: usize,
}

impl Blocks {
    /// From a block across and a block along the terms on.
    unsafe fn at(self, across: usize, along: usize) -> Self {
        // SAFETY: the caller says that they are in it.
        Blocks { first: unsafe { self.first.add((across * self.along + along) * BLOCK) }, ..self }
    }
}

/// A thread's tile registers, configured.
pub(crate) struct Session(());

#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Session {
    fn begin() -> Self {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].fill(64);
        rows[..8].fill(SIDE as u8);
        let all = Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: the unit is there, and the configuration a legal one.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &all, options(nostack, readonly)) };
        Session(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: the registers hold nothing that anybody needs.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

impl Tiles for Amx {
    type Element = half::bf16;
    type Simd = Avx512;
    type Left = Blocks;
    type Right = Blocks;
    type Session = Session;

    const GRAIN: usize = TERMS;
    const TARGET_ROWS: usize = SIDE;
    const MOST_LANES: usize = 2 * SIDE;
    const MOST_SCORES: usize = 512 * Self::MOST_LANES;
    const PACKS: bool = true;
    const GROUP: usize = 4;
    const FOLDS: bool = false;

    fn simd(self) -> Avx512 {
        self.0
    }

    fn session(self) -> Session {
        Session::begin()
    }

    fn left_room(m: usize, k: usize) -> usize {
        m.next_multiple_of(SIDE) * k.next_multiple_of(TERMS) / 2
    }

    fn right_room(k: usize, n: usize) -> usize {
        n.next_multiple_of(SIDE) * k.next_multiple_of(TERMS) / 2
    }

    unsafe fn left(
        self,
        matrix: Strided<half::bf16>,
        m: usize,
        k: usize,
        room: *mut f32,
    ) -> Blocks {
        let to = room.cast::<u16>();
        let matrix = cast(matrix);
        // SAFETY: the caller's.
        unsafe {
            match (matrix.row, matrix.column) {
                (_, 1) => left_rows(matrix, m, k, to),
                (1, _) => left_columns(self.0, matrix, m, k, to),
                _ => left_numbers(matrix, m, k, to),
            }
        }
        Blocks { first: to, along: k.div_ceil(TERMS) }
    }

    unsafe fn part(left: Blocks, row: usize, column: usize) -> Blocks {
        debug_assert!(row.is_multiple_of(SIDE) && column.is_multiple_of(TERMS));
        // SAFETY: the caller's.
        unsafe { left.at(row / SIDE, column / TERMS) }
    }

    unsafe fn right(self, matrix: Rows, k: usize, n: usize, room: *mut f32) -> Blocks {
        let to = room.cast::<u16>();
        // SAFETY: the caller's; the unit is only there with AVX-512 and its bf16 conversions.
        unsafe { right_rounded(matrix, k, n, to) };
        Blocks { first: to, along: k.div_ceil(TERMS) }
    }

    unsafe fn again(self, _: Rows, k: usize, _: usize, room: *mut f32) -> Blocks {
        Blocks { first: room.cast::<u16>(), along: k.div_ceil(TERMS) }
    }

    unsafe fn right_part(right: Blocks, row: usize, column: usize) -> Blocks {
        debug_assert!(row.is_multiple_of(TERMS) && column.is_multiple_of(SIDE));
        // SAFETY: the caller's.
        unsafe { right.at(column / SIDE, row / TERMS) }
    }

    unsafe fn multiply(self, work: Multiply<Blocks, Blocks>) {
        let Multiply { target, keep, left, right, size, .. } = work;
        debug_assert!(size.n.is_multiple_of(SIDE));
        let (rows, columns) = (size.m.div_ceil(SIDE), size.n / SIDE);
        let terms = size.k.div_ceil(TERMS);
        // SAFETY: the caller's matrices have these blocks.
        unsafe {
            if let Keep::Scaled(factors) = keep {
                self.0.call(ScaleColumns { target, factors, m: size.m, n: size.n });
            }
            let keep = !matches!(keep, Keep::Nothing);
            for row in (0..rows).step_by(2) {
                for column in (0..columns).step_by(2) {
                    let at = target.at(row * SIDE, column * SIDE);
                    let (left, right) = (left.at(row, 0), right.at(column, 0));
                    few(at, left, right, [rows - row, columns - column], terms, keep);
                }
            }
        }
    }

    unsafe fn attend<T: Transform>(self, stretches: impl Iterator<Item = Stretch<Self, T>>) {
        for stretch in stretches {
            let Stretch { keys: left, queries: right, softmax, .. } = stretch;
            let (keys, n) = (softmax.keys, softmax.lanes);
            let (target, keep, ahead) = (softmax.scores, Keep::Nothing, Ahead::NOTHING);
            let size = Size { m: keys, n, k: stretch.dim, piece: stretch.dim };
            // SAFETY: the caller's.
            unsafe { self.multiply(Multiply { target, keep, left, right, size, ahead }) };

            let packed = stretch.room.cast::<u16>();
            self.0.call(Begin { softmax: &softmax });
            self.0.call(Weigh { softmax: &softmax, packed });

            let (target, keep) = (stretch.sums, Keep::Scaled(softmax.factors));
            let right = Blocks { first: packed, along: keys.div_ceil(TERMS) };
            let (left, size) =
                (stretch.values, Size { m: stretch.value_dim, n, k: keys, piece: keys });
            // SAFETY: the caller's.
            unsafe { self.multiply(Multiply { target, keep, left, right, size, ahead }) };
        }
    }

    unsafe fn differentiate<T: Transform>(self, mut work: Differentiate<T>, rooms: Rooms) {
        // Products of lanes that hold no key must be 0: they are summed over.
        let inside = u64::MAX.checked_shl(work.keys as u32).map_or(u64::MAX, |above| !above);
        let bits = [inside; QUERIES];
        if work.bits.is_null() && work.keys < work.lanes {
            work.bits = bits.as_ptr();
        }
        let (query, key) = (rooms.queries.0, rooms.keys.0);
        let [right_along, left_along] =
            [rooms.queries.1, rooms.keys.1].map(|terms| terms.div_ceil(TERMS));
        // SAFETY: the caller's.
        unsafe {
            self.0.call(Coarse {
                work: &work,
                shared: &coarse::shared(&work),
                right: rooms.right.map(|room| {
                    let all = Blocks { first: room.cast(), along: right_along };
                    all.at(0, query / TERMS).first.cast_mut()
                }),
                right_along,
                left: Self::differentiated(work.products, rooms.keys.1, rooms.left)
                    .at(query / SIDE, key / TERMS)
                    .first
                    .cast_mut(),
                left_along,
                keep: rooms.keep,
            });
        }
    }

    unsafe fn differentiated(_: Rows, k: usize, room: *mut f32) -> Blocks {
        Blocks { first: room.cast::<u16>(), along: k.div_ceil(TERMS) }
    }
}

/// Sums of up to two by two blocks.
unsafe fn few(
    target: Rows,
    left: Blocks,
    right: Blocks,
    [rows, columns]: [usize; 2],
    terms: usize,
    keep: bool,
) {
    // SAFETY: the caller has these blocks and sums.
    unsafe {
        if rows > 1 && columns > 1 {
            let (left, right) = ([left, left.at(1, 0)], [right, right.at(1, 0)]);
            return four(target, left, right, terms, keep);
        }
        one(target, left, right, terms, keep);
        if rows > 1 {
            one(target.at(SIDE, 0), left.at(1, 0), right, terms, keep);
        }
        if columns > 1 {
            one(target.at(0, SIDE), left, right.at(1, 0), terms, keep);
        }
    }
}

fn cast(matrix: Strided<half::bf16>) -> Strided<u16> {
    Strided { first: matrix.first.cast(), row: matrix.row, column: matrix.column }
}

/// Sums of two by two blocks.
unsafe fn four(target: Rows, left: [Blocks; 2], right: [Blocks; 2], terms: usize, keep: bool) {
    // SAFETY: the caller has these blocks and sums; tile registers are configured by a session.
    unsafe {
        asm!(
            "test {keep:e}, {keep:e}",
            "jz 3f",
            "tileloadd tmm0, [{c} + {row}]",
            "tileloadd tmm1, [{c} + {row} + 64]",
            "tileloadd tmm2, [{d} + {row}]",
            "tileloadd tmm3, [{d} + {row} + 64]",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{a} + {line}]",
            "tileloadd tmm6, [{e} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{f} + {line}]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{b} + {line}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 1024",
            "add {b}, 1024",
            "add {e}, 1024",
            "add {f}, 1024",
            "dec {terms}",
            "jnz 2b",
            "tilestored [{c} + {row}], tmm0",
            "tilestored [{c} + {row} + 64], tmm1",
            "tilestored [{d} + {row}], tmm2",
            "tilestored [{d} + {row} + 64], tmm3",
            keep = in(reg) i32::from(keep),
            c = in(reg) target.first,
            d = in(reg) target.at(SIDE, 0).first,
            row = in(reg) target.row * 4,
            line = in(reg) 64_usize,
            a = inout(reg) left[0].first => _,
            b = inout(reg) left[1].first => _,
            e = inout(reg) right[0].first => _,
            f = inout(reg) right[1].first => _,
            terms = inout(reg) terms => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Sums of one block.
unsafe fn one(target: Rows, left: Blocks, right: Blocks, terms: usize, keep: bool) {
    // SAFETY: as `four`.
    unsafe {
        asm!(
            "test {keep:e}, {keep:e}",
            "jz 3f",
            "tileloadd tmm0, [{c} + {row}]",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            "2:",
            "tileloadd tmm4, [{a} + {line}]",
            "tileloadd tmm6, [{e} + {line}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "add {a}, 1024",
            "add {e}, 1024",
            "dec {terms}",
            "jnz 2b",
            "tilestored [{c} + {row}], tmm0",
            keep = in(reg) i32::from(keep),
            c = in(reg) target.first,
            row = in(reg) target.row * 4,
            line = in(reg) 64_usize,
            a = inout(reg) left.first => _,
            e = inout(reg) right.first => _,
            terms = inout(reg) terms => _,
            out("tmm0") _, out("tmm4") _, out("tmm6") _,
            options(nostack),
        );
    }
}

/// Multiplies columns by their factors, but for vectors of them where all are 1.
struct ScaleColumns {
    target: Rows,
    factors: *const f32,
    m: usize,
    n: usize,
}

impl Operation for ScaleColumns {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        let ScaleColumns { target, factors, m, n } = self;
        // SAFETY: whoever makes the operation vouches for the target and a factor a column.
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
