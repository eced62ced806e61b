//! Register tiles of Advanced SIMD.

/// Functions for register tiles of some rows each.
///
/// Per row: the address of its element on the left, which moves on with `left` and `lower`, and its
/// sums, one per vector of the right: register, and the vector's. Pairs of vectors lie side by side,
/// the first pair in `v24` and `v25`; `v28` has the element.
macro_rules! register_tiles {
    ($(fn $name:ident: right { $($low:literal $high:literal @ $at:literal),+ } {
        $($address:literal => $($a:literal $with_a:literal $b:literal $with_b:literal @ $byte:literal),+;)+
    })+) => { $(
        /// # Safety
        ///
        /// That of [`TileColumn`](super::tiles::TileColumn).
        unsafe fn $name(column: &mut super::tiles::TileColumn) {
            use std::mem::offset_of;
            use super::tiles::TileColumn;

            macro_rules! load_right {
                () => { concat!(
                    $("ldp q", $low, ", q", $high, ", [{right}, #", $at, "]\n",)+
                    "add {right}, {right}, {right_row}\n",
                ) };
            }
            macro_rules! next_term {
                () => { concat!(
                    "add {left}, {left}, {left_column}\n",
                    "add {lower}, {lower}, {left_column}\n",
                ) };
            }
            // One term of all sums; they begin with it, or have it added.
            macro_rules! step {
                ($multiply:literal) => { concat!(
                    load_right!(),
                    $(
                        "ldr s28, [", $address, "]\n",
                        $(
                            $multiply, " v", $a, ".4s, v", $with_a, ".4s, v28.s[0]\n",
                            $multiply, " v", $b, ".4s, v", $with_b, ".4s, v28.s[0]\n",
                        )+
                    )+
                    next_term!(),
                ) };
            }
            // The first term of the next piece, of each row after its sums went to the target.
            macro_rules! drain_step {
                ($put:ident) => { concat!(
                    load_right!(),
                    $(
                        $($put!($a, $b, $byte),)+
                        "ldr s28, [", $address, "]\n",
                        $(
                            "fmul v", $a, ".4s, v", $with_a, ".4s, v28.s[0]\n",
                            "fmul v", $b, ".4s, v", $with_b, ".4s, v28.s[0]\n",
                        )+
                        "add {target}, {target}, {target_row}\n",
                    )+
                    next_term!(),
                ) };
            }
            macro_rules! finish {
                ($put:ident) => { concat!(
                    $($($put!($a, $b, $byte),)+ "add {target}, {target}, {target_row}\n",)+
                ) };
            }
            macro_rules! overwrite {
                ($x:literal, $y:literal, $to:literal) => { concat!(
                    "stp q", $x, ", q", $y, ", [{target}, #", $to, "]\n",
                ) };
            }
            macro_rules! add {
                ($x:literal, $y:literal, $to:literal) => { concat!(
                    "ldp q28, q29, [{target}, #", $to, "]\n",
                    "fadd v", $x, ".4s, v", $x, ".4s, v28.4s\n",
                    "fadd v", $y, ".4s, v", $y, ".4s, v29.4s\n",
                    overwrite!($x, $y, $to),
                ) };
            }
            macro_rules! scale {
                ($x:literal, $y:literal, $to:literal) => { concat!(
                    "ldp q28, q29, [{target}, #", $to, "]\n",
                    "ldp q30, q31, [{other}, #", $to, "]\n",
                    "fmla v", $x, ".4s, v28.4s, v30.4s\n",
                    "fmla v", $y, ".4s, v29.4s, v31.4s\n",
                    overwrite!($x, $y, $to),
                ) };
            }

            // SAFETY: the instructions read and write what the type says. `left` and `lower` point to the
            // first and fourth row; `tiles` counts down, `pieces` counts down per tile.
            unsafe {
                std::arch::asm!(
                    "ldr {left}, [{column}, #{LEFT}]",
                    "add {lower}, {left}, {three_rows}",
                    "ldr {right}, [{column}, #{RIGHT}]",
                    step!("fmul"),
                    // A tile, from its second term on.
                    "2:",
                    "ldr {pieces}, [{column}, #{PIECES}]",
                    "ldr {keep}, [{column}, #{KEEP}]",
                    // A piece.
                    "3:",
                    "ldr {count}, [{column}, #{PIECE}]",
                    "ldr {other}, [{column}, #{LAST}]",
                    "subs {pieces}, {pieces}, #1",
                    "csel {count}, {other}, {count}, eq",
                    "subs {count}, {count}, #1",
                    "b.eq 5f",
                    ".p2align 5",
                    "4:",
                    step!("fmla"),
                    "subs {count}, {count}, #1",
                    "b.ne 4b",
                    "5:",
                    "cbnz {pieces}, 6f",
                    // The next piece is the first one of the next tile.
                    "ldr {other}, [{column}, #{TILES}]",
                    "subs {other}, {other}, #1",
                    "str {other}, [{column}, #{TILES}]",
                    "b.eq 8f",
                    "ldr {right}, [{column}, #{RIGHT}]",
                    "ldr {left}, [{column}, #{LEFT}]",
                    "ldr {other}, [{column}, #{LEFT_TILE}]",
                    "add {left}, {left}, {other}",
                    "str {left}, [{column}, #{LEFT}]",
                    "add {lower}, {left}, {three_rows}",
                    "6:",
                    "cmp {keep}, #1",
                    "b.lo 61f",
                    "b.hi 62f",
                    drain_step!(add),
                    "b 63f",
                    "61:",
                    drain_step!(overwrite),
                    "b 63f",
                    "62:",
                    "ldr {other}, [{column}, #{FACTORS}]",
                    drain_step!(scale),
                    "63:",
                    "mov {keep}, #1",
                    "cbz {pieces}, 2b",
                    // Back to the first row of the tile.
                    "ldr {other}, [{column}, #{TARGET_TILE}]",
                    "sub {target}, {target}, {other}",
                    "b 3b",
                    "8:",
                    "cmp {keep}, #1",
                    "b.lo 81f",
                    "b.hi 82f",
                    finish!(add),
                    "b 9f",
                    "81:",
                    finish!(overwrite),
                    "b 9f",
                    "82:",
                    "ldr {other}, [{column}, #{FACTORS}]",
                    finish!(scale),
                    "9:",
                    column = in(reg) &raw mut *column,
                    left = out(reg) _,
                    lower = out(reg) _,
                    row = in(reg) column.left_row,
                    two_rows = in(reg) 2 * column.left_row,
                    three_rows = in(reg) 3 * column.left_row,
                    left_column = in(reg) column.left_column,
                    right = out(reg) _,
                    right_row = in(reg) column.right_row,
                    target = inout(reg) column.target => _,
                    target_row = in(reg) column.target_row,
                    count = out(reg) _,
                    pieces = out(reg) _,
                    keep = out(reg) _,
                    other = out(reg) _,
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
                    out("v0") _, out("v1") _, out("v2") _, out("v3") _, out("v4") _, out("v5") _,
                    out("v6") _, out("v7") _, out("v8") _, out("v9") _, out("v10") _, out("v11") _,
                    out("v12") _, out("v13") _, out("v14") _, out("v15") _, out("v16") _, out("v17") _,
                    out("v18") _, out("v19") _, out("v20") _, out("v21") _, out("v22") _, out("v23") _,
                    out("v24") _, out("v25") _, out("v26") _, out("v27") _, out("v28") _, out("v29") _,
                    out("v30") _, out("v31") _,
                    options(nostack),
                );
            }
        }
    )+ };
}
pub(crate) use register_tiles;
