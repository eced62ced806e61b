//! The arithmetic between the products: probabilities, and the gradient of scores.

use crate::score::{Place, Transform};
use crate::simd::math::exp_difference;
use crate::simd::{Operation, Simd};
use crate::tile::Rows;

/// Scores become probabilities, and the gradient of probabilities that of the products q·k.
pub(super) struct Differentiate<T> {
    pub(super) scores: Rows,
    pub(super) gradients: Rows,
    pub(super) products: Rows,
    pub(super) queries: usize,
    /// A whole number of vectors.
    pub(super) lanes: usize,
    pub(super) scale: f32,
    pub(super) transform: T,
    /// A word a query, or null where all is seen.
    pub(super) bits: *const u64,
    pub(super) lse: *const f32,
    pub(super) delta: *const f32,
    pub(super) slope: f32,
    pub(super) positions: *const f32,
    pub(super) query_positions: *const f32,
}

impl<T: Transform> Operation for Differentiate<T> {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        // SAFETY: whoever makes the operation vouches for queries × lanes numbers.
        unsafe {
            if self.bits.is_null() {
                self.rows::<S, false>(simd)
            } else {
                self.rows::<S, true>(simd)
            }
        }
    }
}

impl<T: Transform> Differentiate<T> {
    #[inline(always)]
    unsafe fn rows<S: Simd, const MASKED: bool>(&self, simd: S) {
        let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
        let scale = simd.splat(self.scale);
        // SAFETY: queries and lanes stay within the matrices.
        unsafe {
            for query in 0..self.queries {
                let lse = *self.lse.add(query);
                // A row that has seen nothing has no probabilities.
                let lse = simd.splat(if lse == f32::NEG_INFINITY { f32::INFINITY } else { lse });
                let delta = simd.splat(*self.delta.add(query));
                let word = if MASKED { *self.bits.add(query) } else { 0 };
                let scores = self.scores.at(query, 0).first;
                let gradients = self.gradients.at(query, 0).first;
                let products = self.products.at(query, 0).first;
                for lane in (0..self.lanes).step_by(S::WIDTH) {
                    let mut place = Place { lanes: zero, other: zero, slopes: zero };
                    if T::PLACED {
                        place.lanes = simd.load(self.positions.add(lane));
                        place.other = simd.splat(*self.query_positions.add(query));
                        place.slopes = simd.splat(self.slope);
                    }
                    let score = simd.mul(simd.load(scores.add(lane)), scale);
                    let score = self.transform.apply(simd, score, place);
                    // No probability is above 1, however coarse the log-sum-exp.
                    let above = simd.less(lse, score);
                    let mut p = simd.select(above, one, exp_difference(simd, score, lse));
                    let gradient = simd.sub(simd.load(gradients.add(lane)), delta);
                    let gradient = self.transform.pull(simd, score, simd.mul(p, gradient));
                    let mut product = simd.mul(gradient, scale);
                    if MASKED {
                        let mask = simd.mask(word >> lane);
                        p = simd.select(mask, p, zero);
                        product = simd.select(mask, product, zero);
                    }
                    simd.store(scores.add(lane), p);
                    simd.store(products.add(lane), product);
                }
            }
        }
    }
}
