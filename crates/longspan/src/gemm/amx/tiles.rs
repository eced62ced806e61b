//! Tile registers at work: sums of one and of two by two blocks.

use std::arch::asm;

use super::{Blocks, Rows, SIDE};

/// Blocks that can be multiplied.
pub(super) trait Terms: Copy {
    /// Sums of two by two blocks.
    ///
    /// # Safety
    ///
    /// That of [`few`](super::few) with two rows and two columns.
    unsafe fn four(target: Rows, left: [Self; 2], right: [Self; 2], terms: usize, keep: bool);

    /// Sums of one block.
    ///
    /// # Safety
    ///
    /// That of [`few`](super::few) with one row and one column.
    unsafe fn one(target: Rows, left: Self, right: Self, terms: usize, keep: bool);
}

/// Sums of two by two blocks: those of the target or zeros, the steps for each block along the terms, and
/// the pointers' way to the next block.
macro_rules! four {
    (
        $target:ident, $left:ident, $right:ident, $terms:ident, $keep:ident; $bytes:literal bytes:
        $($step:literal,)+
    ) => {
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
            $($step,)+
            concat!("add {a}, ", $bytes),
            concat!("add {b}, ", $bytes),
            concat!("add {e}, ", $bytes),
            concat!("add {f}, ", $bytes),
            "dec {terms}",
            "jnz 2b",
            "tilestored [{c} + {row}], tmm0",
            "tilestored [{c} + {row} + 64], tmm1",
            "tilestored [{d} + {row}], tmm2",
            "tilestored [{d} + {row} + 64], tmm3",
            keep = in(reg) i32::from($keep),
            c = in(reg) $target.first,
            d = in(reg) $target.at(SIDE, 0).first,
            row = in(reg) $target.row * 4,
            line = in(reg) 64_usize,
            a = inout(reg) $left[0].first => _,
            b = inout(reg) $left[1].first => _,
            e = inout(reg) $right[0].first => _,
            f = inout(reg) $right[1].first => _,
            terms = inout(reg) $terms => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// The same for one block.
macro_rules! one {
    (
        $target:ident, $left:ident, $right:ident, $terms:ident, $keep:ident; $bytes:literal bytes:
        $($step:literal,)+
    ) => {
        asm!(
            "test {keep:e}, {keep:e}",
            "jz 3f",
            "tileloadd tmm0, [{c} + {row}]",
            "jmp 2f",
            "3:",
            "tilezero tmm0",
            "2:",
            $($step,)+
            concat!("add {a}, ", $bytes),
            concat!("add {e}, ", $bytes),
            "dec {terms}",
            "jnz 2b",
            "tilestored [{c} + {row}], tmm0",
            keep = in(reg) i32::from($keep),
            c = in(reg) $target.first,
            row = in(reg) $target.row * 4,
            line = in(reg) 64_usize,
            a = inout(reg) $left.first => _,
            e = inout(reg) $right.first => _,
            terms = inout(reg) $terms => _,
            out("tmm0") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

impl Terms for Blocks<1> {
    unsafe fn four(target: Rows, left: [Self; 2], right: [Self; 2], terms: usize, keep: bool) {
        // SAFETY: `tileloadd` reads and `tilestored` writes 16 rows of 64 bytes: of operands a block of
        // 1,024 bytes, `terms` of them one after the other, of the target 16 sums of 16 rows that are
        // `target.row` elements apart. This function demands them all, and that a session has
        // configured the registers. `terms` isn't 0, so that the loop ends. All registers it writes are
        // outputs.
        unsafe {
            four! { target, left, right, terms, keep; 1024 bytes:
                "tileloadd tmm4, [{a} + {line}]",
                "tileloadd tmm6, [{e} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{f} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{b} + {line}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
            }
        }
    }

    unsafe fn one(target: Rows, left: Self, right: Self, terms: usize, keep: bool) {
        // SAFETY: as in `four`, for one block of each operand and of sums.
        unsafe {
            one! { target, left, right, terms, keep; 1024 bytes:
                "tileloadd tmm4, [{a} + {line}]",
                "tileloadd tmm6, [{e} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
            }
        }
    }
}

/// A high and a low part, of which the product of both low ones is left out.
impl Terms for Blocks<2> {
    unsafe fn four(target: Rows, left: [Self; 2], right: [Self; 2], terms: usize, keep: bool) {
        // SAFETY: as above, for two blocks of 1,024 bytes per operand and term, one after the other. First
        // come the high parts on the left with the low ones on the right, then with the high ones, then the
        // low parts on the left with the high ones on the right.
        unsafe {
            four! { target, left, right, terms, keep; 2048 bytes:
                "tileloadd tmm4, [{a} + {line}]",
                "tileloadd tmm6, [{e} + {line} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{f} + {line} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{b} + {line}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm6, [{e} + {line}]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm7, [{f} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm4, [{a} + {line} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{b} + {line} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
            }
        }
    }

    unsafe fn one(target: Rows, left: Self, right: Self, terms: usize, keep: bool) {
        // SAFETY: as in `four`, for one block of each operand and of sums.
        unsafe {
            one! { target, left, right, terms, keep; 2048 bytes:
                "tileloadd tmm4, [{a} + {line}]",
                "tileloadd tmm6, [{e} + {line}]",
                "tileloadd tmm5, [{a} + {line} + 1024]",
                "tileloadd tmm7, [{e} + {line} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm7",
                "tdpbf16ps tmm0, tmm5, tmm6",
                "tdpbf16ps tmm0, tmm4, tmm6",
            }
        }
    }
}
