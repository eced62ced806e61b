//! Register tiles of AVX2 and AVX-512.

/// Functions for register tiles of some rows each.
///
/// Registers of vectors are given by number: one that an element of the left is spread over, and per
/// function those that hold vectors of the right, with their byte in a row. A function lists the
/// registers that move on to the next column of the left, and per row the address of its element there
/// and its sums: register, vector on the right (a register, or memory), byte in a row.
macro_rules! register_tiles {
    (
        $v:literal: $isa:ident, spread $x:literal, all $all:tt
        $(fn $name:ident: right $right:tt, left $left:tt $tile:tt)+
    ) => {
        $(super::tiles::x86_64::register_tile! {
            fn $name: $v: $isa, right $right, left $left, spread $x, all $all $tile
        })+
    };
}
pub(crate) use register_tiles;

macro_rules! register_tile {
    (
        fn $name:ident: $v:literal: $isa:ident, right { $($right:literal @ $at:literal),+ },
        left { $($left:literal)+ }, spread $x:literal, all { $($register:tt)+ }
        { $($address:literal => $($sum:literal $with:literal @ $byte:literal),+;)+ }
    ) => {
        crate::isa::features::$isa! { enable
        /// # Safety
        ///
        /// That of [`TileColumn`](super::tiles::TileColumn).
        unsafe fn $name(column: &mut super::tiles::TileColumn) {
            use std::mem::offset_of;
            use super::tiles::TileColumn;

            macro_rules! load_right {
                () => { concat!($("vmovups ", $v, $right, ", [{right} + ", $at, "]\n",)+) };
            }
            macro_rules! next_term {
                () => { concat!(
                    "add {right}, {right_row}\n",
                    $("add ", $left, ", {left_column}\n",)+
                ) };
            }
            // A step that adds to the sums.
            macro_rules! add_step {
                () => { concat!(
                    load_right!(),
                    $(
                        "vbroadcastss ", $v, $x, ", dword ptr [", $address, "]\n",
                        $("vfmadd231ps ", $v, $sum, ", ", $v, $x, ", ", $with, "\n",)+
                    )+
                    next_term!(),
                ) };
            }
            // The same for each row after its sums went to the target.
            macro_rules! drain_step {
                ($put:ident) => { concat!(
                    load_right!(),
                    $(
                        $($put!($sum, $byte),)+
                        "vbroadcastss ", $v, $x, ", dword ptr [", $address, "]\n",
                        $("vmulps ", $v, $sum, ", ", $v, $x, ", ", $with, "\n",)+
                        "add {target}, {target_row}\n",
                    )+
                    next_term!(),
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
                    "vmovups ", $v, $x, ", [{target} + ", $b, "]\n",
                    "vfmadd231ps ", $v, $s, ", ", $v, $x, ", [{count} + ", $b, "]\n",
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
                        $(concat!("vmulps ", $v, $sum, ", ", $v, $x, ", ", $with),)+
                    )+
                    next_term!(),
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
                    "test {count}, 1",
                    "jz 4f",
                    add_step!(),
                    "dec {count}",
                    "jz 5f",
                    ".p2align 5",
                    "4:",
                    add_step!(),
                    add_step!(),
                    // Some CPUs don't keep decoded jumps that lie across two halves of a cache line.
                    ".p2align 4",
                    "sub {count}, 2",
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
pub(crate) use register_tile;
