//! Steps for bf16 operands: probabilities and gradients of products are packed as they are
//! computed.

use super::{FusedKernel, KeyTile, PackBuffers};
use crate::gemm::amx::{Amx, Blocks, SIDE, TERMS};
use crate::gemm::{Beta, MicroKernel, Multiply, Prefetch, Rows, Size};
use crate::kernel::backward::QUERIES;
use crate::kernel::backward::differentiate::Differentiate;
use crate::kernel::backward::dsoftmax_bf16::{self, DsoftmaxBf16};
use crate::kernel::forward::softmax_bf16::{Begin, Weigh};
use crate::simd::Simd;

// SAFETY: blocks cover operands whose sides are rounded up to `SIDE` and `TERMS`, 2 bytes each, as
// `packed_lhs_len` and `packed_rhs_len` count in f32.
unsafe impl FusedKernel for Amx {
    const MOST_LANES: usize = 2 * SIDE;
    const MOST_SCORES: usize = 512 * Self::MOST_LANES;
    const GROUP: usize = 4;
    const FOLDS: bool = false;

    unsafe fn attend<'a>(self, tiles: impl Iterator<Item = KeyTile<'a, Self>>) {
        for tile in tiles {
            let KeyTile { keys: left, queries: right, softmax, .. } = tile;
            let (keys, n) = (softmax.keys, softmax.lanes);
            let (target, keep, ahead) = (softmax.scores, Beta::Zero, Prefetch::NONE);
            let size = Size { m: keys, n, k: tile.dim, piece: tile.dim };
            // SAFETY: `attend` demands what `multiply` does of this product.
            unsafe { self.multiply(Multiply { target, keep, left, right, size, ahead }) };

            let packed = tile.workspace.cast::<u16>();
            // SAFETY: `attend` demands what `Softmax` does, and `packed_rhs_len(keys, n)` elements
            // of room, those of the blocks; the product has written the scores. `Avx512` is
            // `WIDEST`.
            unsafe {
                if let Some(adjust) = tile.adjust {
                    self.simd().call(adjust);
                }
                self.simd().call(Begin { softmax: &softmax });
                self.simd().call(Weigh { softmax: &softmax, packed });
            }

            let (target, keep) = (tile.sums, Beta::PerColumn(softmax.factors));
            let right = Blocks { first: packed, along: keys.div_ceil(TERMS) };
            let (left, size) = (tile.values, Size { m: tile.value_dim, n, k: keys, piece: keys });
            // SAFETY: `attend` demands what `multiply` does of this product; `Weigh` has written
            // all blocks of its right operand, and `Begin` the factors.
            unsafe { self.multiply(Multiply { target, keep, left, right, size, ahead }) };
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
