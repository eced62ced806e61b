//! Steps for f32 operands in two parts: softmax and its gradient are those of f32, then operands are
//! packed.

use super::{FusedKernel, KeyTile, PackBuffers};
use crate::gemm::amx::{Parts, SplitAmx, TERMS};
use crate::gemm::{Beta, MicroKernel, Multiply, Prefetch, Rows, Size};
use crate::kernel::backward::differentiate::{Differentiate, WithAdditions};
use crate::simd::{LANES, Simd};

// SAFETY: `differentiate` writes blocks by `pack_rhs` and `pack_lhs_part`, which keep to these sizes.
unsafe impl FusedKernel for SplitAmx {
    const MOST_LANES: usize = LANES;
    const MOST_SCORES: usize = 128 * LANES;
    const KEY_PANEL: usize = 256;
    const GROUP: usize = 1;
    const FOLDS: bool = true;

    unsafe fn attend<'a>(self, tiles: impl Iterator<Item = KeyTile<'a, Self>>) {
        for tile in tiles {
            let KeyTile { keys: left, queries: right, softmax, .. } = tile;
            let (scores, keys, n) = (softmax.scores, softmax.keys, softmax.lanes);
            let (target, keep, ahead) = (scores, Beta::Zero, Prefetch::NONE);
            let size = Size { m: keys, n, k: tile.dim, piece: tile.dim };
            // SAFETY: `attend` demands what `multiply` does of this product.
            unsafe { self.multiply(Multiply { target, keep, left, right, size, ahead }) };

            let (target, keep) = (tile.sums, Beta::PerColumn(softmax.factors));
            let (left, size) = (tile.values, Size { m: tile.value_dim, n, k: keys, piece: keys });
            // SAFETY: `attend` demands what `Adjust`, `Softmax` and `multiply` do, and
            // `packed_rhs_len(keys, n)` elements of room; the product has written the scores, and
            // `Softmax` writes the factors.
            unsafe {
                if let Some(adjust) = tile.adjust {
                    self.simd().call(adjust);
                }
                self.simd().call(softmax);
                let right = self.pack_rhs(scores, keys, n, tile.workspace);
                self.multiply(Multiply { target, keep, left, right, size, ahead });
            }
        }
    }

    unsafe fn differentiate(self, work: Differentiate<'_>, rooms: PackBuffers) {
        let Differentiate { scores, products, queries, keys, lanes, .. } = work;
        // SAFETY: `differentiate` demands what `Differentiate` does, and so what its `Adjust` does. It
        // writes queries × lanes elements of both matrices. The rooms have the blocks of the tile: those
        // on the right of all queries of the group, which are this tile's, and that on the left from its
        // first key, a multiple of `TERMS`, on.
        unsafe {
            match work.adjust {
                None => self.simd().call(work),
                Some(adjust) => {
                    self.simd().call(adjust);
                    self.simd().call(WithAdditions(&work));
                }
            }
            for (matrix, workspace) in [scores, products].into_iter().zip(rooms.right) {
                self.pack_rhs(matrix, queries, lanes, workspace);
            }
            let at = (rooms.queries.0, rooms.keys.0);
            let size = (rooms.queries.1, rooms.keys.1);
            self.pack_lhs_part(products.strided(), (queries, keys), at, size, rooms.left);
        }
    }

    unsafe fn differentiated(_: Rows, k: usize, workspace: *mut f32) -> Parts {
        Parts { first: workspace.cast::<u16>(), along: k.div_ceil(TERMS) }
    }
}
