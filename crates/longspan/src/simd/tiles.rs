//! Register tiles of a matrix product, in assembly.
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

#[cfg(target_arch = "aarch64")]
pub(crate) mod aarch64;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86_64;

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
