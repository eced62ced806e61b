//! Register tiles of a matrix product, in assembly for x86-64.
//!
//! ```text
//! for each register tile of rows, for each piece of k:
//!     sums ← Σ left · right over the piece                   in registers
//!     target ← keep(target) + sums                           during the first step of the next piece
//! ```
//!
//! Sums are taken in levels, pieces in registers and then in the target, which costs an addition, a
//! load and a store per sum and piece. Done all at once behind a piece, these wait for its last
//! products and fill the scheduler, so that multiplication stops. Here each row is drained where the
//! next piece, of this register tile or of the one below, overwrites its sums: additions and products
//! alternate, and none of them waits. Compilers move the stores together again.

/// Register tiles of one panel of columns, one below the other.
///
/// # Safety
///
/// [`run`](RegisterTiles::run) reads `rows · tiles` rows of `k` elements on the left, `k` rows of
/// `vectors` vectors on the right, and as many factors if sums are [kept](Keep::Scale) so; it reads and
/// writes the rows of vectors of the target. Strides are in bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct TileColumn {
    pub(crate) left: *const f32,
    pub(crate) left_row: isize,
    pub(crate) left_column: isize,
    /// From one register tile to the next.
    pub(crate) left_tile: isize,
    pub(crate) right: *const f32,
    pub(crate) right_row: usize,
    pub(crate) target: *mut f32,
    pub(crate) target_row: usize,
    pub(crate) target_tile: usize,
    pub(crate) factors: *const f32,
    /// What the first piece does with the target; the others add to it.
    pub(crate) keep: Keep,
    pub(crate) tiles: usize,
    /// Pieces, and the terms of all but the last one and of that: at least 1 each.
    pub(crate) pieces: usize,
    pub(crate) piece: usize,
    pub(crate) last: usize,
}

/// What is done with the target's elements before sums are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Keep {
    /// They are overwritten.
    Overwrite = 0,
    /// They are kept.
    Add = 1,
    /// They are multiplied by a factor per column.
    Scale = 2,
}

/// The register tiles of an instruction set: so many vectors, and a number of rows.
#[derive(Clone, Copy)]
pub(crate) struct RegisterTiles {
    pub(crate) vectors: usize,
    pub(crate) rows: usize,
    pub(crate) run: unsafe fn(&mut TileColumn),
}

/// Functions for register tiles of some rows each.
///
/// Registers of vectors are given by number: those of the right with their byte in a row, one that an
/// element of the left is spread over, and a spare one; per row the address of its element on the left,
/// and its sums: register, vector on the right, byte in a row.
#[cfg(target_arch = "x86_64")]
macro_rules! register_tiles {
    (
        $v:literal: $isa:ident, right $right:tt, spread $x:literal, spare $spare:literal,
        all $all:tt
        $(fn $name:ident $tile:tt)+
    ) => {
        $(super::tiles::register_tile! {
            fn $name: $v: $isa, right $right, spread $x, spare $spare, all $all $tile
        })+
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use register_tiles;

#[cfg(target_arch = "x86_64")]
macro_rules! register_tile {
    (
        fn $name:ident: $v:literal: $isa:ident, right { $($right:literal @ $at:literal),+ },
        spread $x:literal, spare $spare:literal, all { $($register:tt)+ }
        { $($address:literal => $($sum:literal $with:literal @ $byte:literal),+;)+ }
    ) => {
        crate::isa::features::$isa! { enable
        /// # Safety
        ///
        /// That of [`TileColumn`](super::tiles::TileColumn).
        unsafe fn $name(column: &mut super::tiles::TileColumn) {
            use std::mem::offset_of;
            use super::tiles::TileColumn;

            // Vectors of the right, and the step to the next ones.
            macro_rules! load_right {
                () => { concat!(
                    $("vmovups ", $v, $right, ", [{right} + ", $at, "]\n",)+
                    "add {right}, {right_row}\n",
                ) };
            }
            macro_rules! next_column {
                () => { "add {left}, {left_column}\nadd {lower}, {left_column}\n" };
            }
            // A step that adds to the sums.
            macro_rules! add_step {
                () => { concat!(
                    load_right!(),
                    $(
                        "vbroadcastss ", $v, $x, ", dword ptr [", $address, "]\n",
                        $("vfmadd231ps ", $v, $sum, ", ", $v, $x, ", ", $v, $with, "\n",)+
                    )+
                    next_column!(),
                ) };
            }
            // The same for each row after its sums went to the target.
            macro_rules! drain_step {
                ($put:ident) => { concat!(
                    load_right!(),
                    $(
                        "vbroadcastss ", $v, $x, ", dword ptr [", $address, "]\n",
                        $(
                            $put!($sum, $byte),
                            "vmulps ", $v, $sum, ", ", $v, $x, ", ", $v, $with, "\n",
                        )+
                        "add {target}, {target_row}\n",
                    )+
                    next_column!(),
                ) };
            }
            macro_rules! finish {
                ($put:ident) => { concat!(
                    $($($put!($sum, $byte),)+ "add {target}, {target_row}\n",)+
                ) };
            }
            macro_rules! overwrite {
                ($s:literal, $b:literal) => { concat!(
                    "vmovups [{target} + ", $b, "], ", $v, $s, "\n",
                ) };
            }
            macro_rules! add {
                ($s:literal, $b:literal) => { concat!(
                    "vaddps ", $v, $s, ", ", $v, $s, ", [{target} + ", $b, "]\n",
                    overwrite!($s, $b),
                ) };
            }
            macro_rules! scale {
                ($s:literal, $b:literal) => { concat!(
                    "vmovups ", $v, $spare, ", [{target} + ", $b, "]\n",
                    "vfmadd231ps ", $v, $s, ", ", $v, $spare, ", [{count} + ", $b, "]\n",
                    overwrite!($s, $b),
                ) };
            }

            // SAFETY: the instructions read and write what the type says. `left` and `lower` point to the
            // first and fourth row; `tiles` counts down, `pieces` counts down per tile.
            unsafe {
                std::arch::asm!(
                    "mov {left}, [{column} + {LEFT}]",
                    "lea {lower}, [{left} + {three_rows}]",
                    "mov {right}, [{column} + {RIGHT}]",
                    load_right!(),
                    $(
                        concat!("vbroadcastss ", $v, $x, ", dword ptr [", $address, "]"),
                        $(concat!("vmulps ", $v, $sum, ", ", $v, $x, ", ", $v, $with),)+
                    )+
                    next_column!(),
                    // A tile, from its second step on.
                    "2:",
                    "mov {pieces}, [{column} + {PIECES}]",
                    "mov {keep}, [{column} + {KEEP}]",
                    // A piece.
                    "3:",
                    "mov {count}, [{column} + {PIECE}]",
                    "dec {pieces}",
                    "cmovz {count}, [{column} + {LAST}]",
                    "dec {count}",
                    "jz 5f",
                    ".p2align 5",
                    "4:",
                    add_step!(),
                    // Some CPUs don't keep decoded jumps that lie across two halves of a cache line.
                    ".p2align 4",
                    "dec {count}",
                    "jnz 4b",
                    "5:",
                    "test {pieces}, {pieces}",
                    "jnz 6f",
                    // The next piece is the first one of the next tile.
                    "dec qword ptr [{column} + {TILES}]",
                    "jz 8f",
                    "mov {right}, [{column} + {RIGHT}]",
                    "mov {left}, [{column} + {LEFT}]",
                    "add {left}, [{column} + {LEFT_TILE}]",
                    "mov [{column} + {LEFT}], {left}",
                    "lea {lower}, [{left} + {three_rows}]",
                    "6:",
                    "cmp {keep}, 1",
                    "jb 61f",
                    "ja 62f",
                    drain_step!(add),
                    "jmp 63f",
                    "61:",
                    drain_step!(overwrite),
                    "jmp 63f",
                    "62:",
                    "mov {count}, [{column} + {FACTORS}]",
                    drain_step!(scale),
                    "63:",
                    "mov {keep}, 1",
                    "test {pieces}, {pieces}",
                    "jz 2b",
                    // Back to the first row of the tile.
                    "sub {target}, [{column} + {TARGET_TILE}]",
                    "jmp 3b",
                    "8:",
                    "cmp {keep}, 1",
                    "jb 81f",
                    "ja 82f",
                    finish!(add),
                    "jmp 9f",
                    "81:",
                    finish!(overwrite),
                    "jmp 9f",
                    "82:",
                    "mov {count}, [{column} + {FACTORS}]",
                    finish!(scale),
                    "9:",
                    column = in(reg) &raw mut *column,
                    left = out(reg) _,
                    lower = out(reg) _,
                    left_row = in(reg) column.left_row,
                    three_rows = in(reg) 3 * column.left_row,
                    left_column = in(reg) column.left_column,
                    right = out(reg) _,
                    right_row = in(reg) column.right_row,
                    target = inout(reg) column.target => _,
                    target_row = in(reg) column.target_row,
                    count = out(reg) _,
                    pieces = out(reg) _,
                    keep = out(reg) _,
                    LEFT = const offset_of!(TileColumn, left),
                    RIGHT = const offset_of!(TileColumn, right),
                    PIECES = const offset_of!(TileColumn, pieces),
                    PIECE = const offset_of!(TileColumn, piece),
                    LAST = const offset_of!(TileColumn, last),
                    KEEP = const offset_of!(TileColumn, keep),
                    FACTORS = const offset_of!(TileColumn, factors),
                    TILES = const offset_of!(TileColumn, tiles),
                    LEFT_TILE = const offset_of!(TileColumn, left_tile),
                    TARGET_TILE = const offset_of!(TileColumn, target_tile),
                    $(out($register) _,)+
                    options(nostack),
                );
            }
        }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use register_tile;
