//! Steps in f32: the softmax reads and writes the matrix of scores.

use super::{FusedKernel, KeyTile, PackBuffers};
use crate::dtype::Element;
use crate::gemm::{Beta, Fma, MicroKernel, Multiply, OVER_DIMS, OVER_TOKENS, Rows, Size};
use crate::kernel::backward::differentiate::{Differentiate, WithAdditions};
use crate::simd::{LANES, Simd};
use crate::tensor::Strided;

// SAFETY: nothing of the buffers is written.
unsafe impl<S: Simd, E: Element> FusedKernel for Fma<S, E> {
    const MOST_LANES: usize = LANES;
    const MOST_SCORES: usize = 128 * LANES;
    const KEY_PANEL: usize = S::KEY_PANEL;
    const GROUP: usize = 1;
    const FOLDS: bool = true;

    unsafe fn attend<'a>(self, tiles: impl Iterator<Item = KeyTile<'a, Self>>) {
        for tile in tiles {
            let KeyTile { keys: left, queries: right, softmax, .. } = tile;
            let (scores, keys, n) = (softmax.scores, softmax.keys, softmax.lanes);
            let (target, keep) = (scores, Beta::Zero);
            let [ahead, later] = tile.ahead;
            let size = Size { m: keys, n, k: tile.dim, piece: OVER_DIMS };
            // SAFETY: `attend` demands what `multiply` does of this product.
            unsafe { self.multiply(Multiply { target, keep, left, right, size, ahead }) };

            let (target, keep) = (tile.sums, Beta::PerColumn(softmax.factors));
            // SAFETY: `attend` demands what both do; the product has written the scores.
            unsafe {
                if let Some(adjust) = tile.adjust {
                    self.simd().call(adjust);
                }
                self.simd().call(softmax);
            }

            let (left, right, ahead) = (tile.values, scores, later);
            let size = Size { m: tile.value_dim, n, k: keys, piece: OVER_TOKENS };
            // SAFETY: `attend` demands what `multiply` does of this product; its right operand are
            // the keys × lanes scores, rows of whole vectors, and `Softmax` has written the
            // factors.
            unsafe { self.multiply(Multiply { target, keep, left, right, size, ahead }) };
        }
    }

    unsafe fn differentiate(self, work: Differentiate<'_>, _: PackBuffers) {
        // SAFETY: `differentiate` demands what `Differentiate` does, and so what its `Adjust` does.
        unsafe {
            match work.adjust {
                None => self.simd().call(work),
                Some(adjust) => {
                    self.simd().call(adjust);
                    self.simd().call(WithAdditions(&work));
                }
            }
        }
    }

    unsafe fn differentiated(products: Rows, _: usize, _: *mut f32) -> Strided {
        products.strided()
    }
}
