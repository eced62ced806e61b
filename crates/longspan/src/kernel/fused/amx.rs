//! Steps for bf16 operands: probabilities and gradients of products are packed as they are
//! computed.

use super::{FusedKernel, KeyTile, PackBuffers};
use crate::gemm::amx::{Amx, Blocks, SIDE, TERMS};
use crate::gemm::{Beta, MicroKernel, Multiply, Prefetch, Rows, Size};
use crate::kernel::backward::QUERIES;
use crate::kernel::backward::differentiate::Differentiate;
use crate::kernel::backward::dsoftmax_bf16::{self, DsoftmaxBf16};
use crate::kernel::forward::softmax::Softmax;
use crate::kernel::forward::softmax_bf16::{Begin, Flow, SLACK, Weigh};
use crate::simd::{LANES, Simd};

// SAFETY: blocks cover operands whose sides are rounded up to `SIDE` and `TERMS`, 2 bytes each, as
// `packed_lhs_len` and `packed_rhs_len` count in f32.
unsafe impl FusedKernel for Amx {
    const MOST_LANES: usize = 2 * SIDE;
    const MOST_SCORES: usize = 512 * Self::MOST_LANES;
    const KEY_PANEL: usize = 512;
    const GROUP: usize = 4;
    const FOLDS: bool = false;

    unsafe fn attend<'a>(self, tiles: impl Iterator<Item = KeyTile<'a, Self>>) {
        for tile in tiles {
            // SAFETY: `attend` demands the condition of each tile.
            unsafe {
                if !self.flow(&tile) {
                    self.in_steps(&tile);
                }
            }
        }
    }

    unsafe fn differentiate(self, mut work: Differentiate<'_>, rooms: PackBuffers) {
        // Products of lanes that hold no key must be 0: they are summed over.
        let inside = u64::MAX.checked_shl(work.keys as u32).map_or(u64::MAX, |above| !above);
        let bits = [inside; QUERIES];
        if work.bits.is_null() && work.keys < work.lanes {
            work.bits = bits.as_ptr();
        }
        let (query, key) = (rooms.queries.0, rooms.keys.0);
        let [right_along, left_along] =
            [rooms.queries.1, rooms.keys.1].map(|terms| terms.div_ceil(TERMS));
        // SAFETY: `differentiate` demands what `Differentiate` does, of which bits of `QUERIES`
        // queries are a part that is alive here, and rooms with the blocks of the tile inside: from
        // its first query, a multiple of `TERMS`, and its first key, one of `LANES`, on.
        unsafe {
            if let Some(adjust) = work.adjust {
                self.simd().call(adjust);
            }
            self.simd().call(DsoftmaxBf16 {
                work: &work,
                shared: &dsoftmax_bf16::shared(&work),
                right: rooms.right.map(|workspace| {
                    let all: Blocks = Blocks { first: workspace.cast(), along: right_along };
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

    unsafe fn differentiated(_: Rows, k: usize, workspace: *mut f32) -> Blocks {
        Blocks { first: workspace.cast::<u16>(), along: k.div_ceil(TERMS) }
    }
}

impl Amx {
    /// Scores of `keys` keys from `key` on.
    ///
    /// # Safety
    ///
    /// That of [`attend`](FusedKernel::attend) for this tile, and keys of it; there must be room for these
    /// scores at `target`.
    unsafe fn scores(self, tile: &KeyTile<'_, Self>, (key, keys): (usize, usize), target: Rows) {
        let size = Size { m: keys, n: tile.softmax.lanes, k: tile.dim, piece: tile.dim };
        let (keep, right, ahead) = (Beta::Zero, tile.queries, Prefetch::NONE);
        // SAFETY: `attend` demands what `multiply` does of the product of all keys, and this function
        // the rest.
        unsafe {
            let left = Self::lhs_at(tile.keys, key, 0);
            self.multiply(Multiply { target, keep, left, right, size, ahead });
        }
    }

    /// Adds the sums of values.
    ///
    /// # Safety
    ///
    /// That of [`attend`](FusedKernel::attend) for this tile, whose blocks of probabilities are written; so
    /// must be the factors, where there are some.
    unsafe fn sum(self, tile: &KeyTile<'_, Self>, keep: Beta) {
        let (keys, n) = (tile.softmax.keys, tile.softmax.lanes);
        let right = Blocks { first: tile.workspace.cast(), along: keys.div_ceil(TERMS) };
        let (target, left, ahead) = (tile.sums, tile.values, Prefetch::NONE);
        let size = Size { m: tile.value_dim, n, k: keys, piece: keys };
        // SAFETY: `attend` demands what `multiply` does of this product.
        unsafe { self.multiply(Multiply { target, keep, left, right, size, ahead }) };
    }

    /// All scores, then their softmax, then the sums.
    ///
    /// # Safety
    ///
    /// That of [`attend`](FusedKernel::attend) for this tile.
    unsafe fn in_steps(self, tile: &KeyTile<'_, Self>) {
        let softmax = &tile.softmax;
        // SAFETY: `attend` demands what `Softmax` does, and `packed_rhs_len(keys, lanes)` elements of room,
        // those of the blocks. `Avx512` is `WIDEST`.
        unsafe {
            self.scores(tile, (0, softmax.keys), softmax.scores);
            if let Some(adjust) = tile.adjust {
                self.simd().call(adjust);
            }
            self.simd().call(Begin { softmax, slack: SLACK });
            self.simd().call(Weigh { softmax, packed: tile.workspace.cast() });
            self.sum(tile, Beta::PerColumn(softmax.factors));
        }
    }

    /// 32 keys at a time: their scores are weighed while they are in the first-level cache. Returns whether
    /// the tile is done; if not, all of it is left to do: a score was too far above its lane's maximum.
    ///
    /// # Safety
    ///
    /// That of [`attend`](FusedKernel::attend) for this tile.
    unsafe fn flow(self, tile: &KeyTile<'_, Self>) -> bool {
        let softmax = &tile.softmax;
        if tile.adjust.is_some() || !softmax.flows() {
            return false;
        }
        let (packed, scores, lanes) = (tile.workspace.cast(), softmax.scores, softmax.lanes);
        let (mut totals, mut greatest) = ([0.0; LANES], [f32::NEG_INFINITY; LANES]);
        // SAFETY: `attend` demands what `Softmax` does, room for the scores of all keys, of which each block
        // uses the first rows, and the blocks at `workspace`. `Avx512` is `WIDEST`.
        unsafe {
            for block in 0..softmax.keys.div_ceil(TERMS) {
                let key = block * TERMS;
                let keys = (softmax.keys - key).min(TERMS);
                self.scores(tile, (key, keys), scores);
                if block == 0 && !softmax.is_near() {
                    // Lanes without a maximum get that of the first block, and none of the others another.
                    let softmax = &Softmax { keys, ..*softmax };
                    self.simd().call(Begin { softmax, slack: f32::MAX });
                    if !softmax.is_near() {
                        return false;
                    }
                }
                if block == 0 {
                    std::ptr::copy_nonoverlapping(softmax.totals, totals.as_mut_ptr(), lanes);
                }
                let (totals, greatest) = (totals.as_mut_ptr(), greatest.as_mut_ptr());
                self.simd().call(Flow { softmax, packed, block, totals, greatest });
            }
            if !softmax.fits(&greatest[..lanes]) {
                return false;
            }
            std::ptr::copy_nonoverlapping(totals.as_ptr(), softmax.totals, lanes);
            self.sum(tile, Beta::One);
        }
        true
    }
}
