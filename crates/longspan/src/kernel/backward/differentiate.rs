//! The arithmetic between the products: probabilities, and the gradient of scores.

use crate::gemm::Rows;
use crate::score::{Place, Transform};
use crate::simd::math::exp_difference;
use crate::simd::{Operation, Simd};

/// Scores become probabilities, and the gradient of probabilities that of the products q·k.
///
/// # Safety
///
/// queries × lanes elements, `lanes` a whole number of vectors up to 64, must be readable and
/// writable at `scores`, readable at `gradients` and writable at `products`. There must be a
/// readable word of bits per query, unless they are null, and a log-sum-exp, correction and delta.
/// Where the transform is placed, positions of the lanes and of the queries must be readable.
/// Nothing that is written may be shared with anything else here.
pub(crate) struct Differentiate<T> {
    pub(crate) scores: Rows,
    pub(crate) gradients: Rows,
    pub(crate) products: Rows,
    pub(crate) queries: usize,
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only matrix units ask"))]
    pub(crate) keys: usize,
    /// Keys, and what fills up their last vector.
    pub(crate) lanes: usize,
    pub(crate) scale: f32,
    pub(crate) transform: T,
    /// A word per query, or null where all is seen.
    pub(crate) bits: *const u64,
    pub(crate) lse: *const f32,
    /// `exp(−rest)` of each query's log-sum-exp.
    pub(crate) corrections: *const f32,
    pub(crate) delta: *const f32,
    pub(crate) slope: f32,
    pub(crate) positions: *const f32,
    pub(crate) query_positions: *const f32,
}

/// `exp(−rest)` for each rest of a log-sum-exp.
pub(super) fn correct(rests: &[f32], corrections: &mut [f32]) {
    for (&rest, correction) in rests.iter().zip(corrections) {
        // Small ones, up to |lse| = 2,048, have no need of an exponential: `rest² / 2` is nothing.
        let small = rest.abs() <= 1.3e-4;
        *correction = if small { 1.0 - rest } else { (-f64::from(rest)).exp() as f32 };
    }
}

impl<T: Transform> Operation for Differentiate<T> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        // SAFETY: `rows` has the condition of the type, and is masked where there are bits.
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
    /// # Safety
    ///
    /// That of [`Differentiate`]; `MASKED` only where bits aren't null.
    #[inline(always)]
    unsafe fn rows<S: Simd, const MASKED: bool>(&self, simd: S) {
        let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
        let scale = simd.splat(self.scale);
        // SAFETY: queries are below `queries`, vectors of lanes below `lanes`, as the type demands
        // of all matrices and lists.
        unsafe {
            for query in 0..self.queries {
                let lse = *self.lse.add(query);
                // A row that has seen nothing has no probabilities.
                let lse = simd.splat(if lse == f32::NEG_INFINITY { f32::INFINITY } else { lse });
                let correction = simd.splat(*self.corrections.add(query));
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
                    // No score is above the log-sum-exp and no probability above 1, though
                    // other roundings than those of the forward pass may make them so.
                    let power = exp_difference(simd, simd.min(lse, score), lse);
                    let mut p = simd.min(one, simd.mul(power, correction));
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
