//! The arithmetic between the products: probabilities, and the gradient of scores.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use crate::gemm::Rows;
use crate::kernel::adjust::Adjust;
use crate::kernel::reference::{MOST_NEAR, Reference, binary_scale};
use crate::simd::math::exp_difference;
use crate::simd::{Operation, Simd};

/// Scores become probabilities, and the gradient of probabilities that of the products q·k.
///
/// # Safety
///
/// queries × lanes elements, `lanes` a whole number of vectors up to 64, must be readable and
/// writable at `scores`, readable at `gradients` and writable at `products`. There must be a
/// readable word of bits per query, unless they are null, and a log-sum-exp, correction and delta.
/// Where there is an [`Adjust`], its condition must hold for these scores, with factors if there is
/// dropout and derivatives if there is a softcap or gradients of scores are kept. Nothing that is written may be shared with anything
/// else here.
pub(crate) struct Differentiate<'a> {
    pub(crate) scores: Rows,
    pub(crate) gradients: Rows,
    pub(crate) products: Rows,
    pub(crate) queries: usize,
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only matrix units ask"))]
    pub(crate) keys: usize,
    /// Keys, and what fills up their last vector.
    pub(crate) lanes: usize,
    pub(crate) scale: f32,
    /// What additions do to the scores before this.
    pub(crate) adjust: Option<Adjust<'a>>,
    /// Whether gradients of scores replace its derivatives.
    pub(crate) keep_gradients: bool,
    /// A word per query, or null where all is seen.
    pub(crate) bits: *const u64,
    pub(crate) lse: *const f32,
    /// `exp(−rest)` of each query's log-sum-exp.
    pub(crate) corrections: *const f32,
    pub(crate) delta: *const f32,
}

/// `exp(−rest)` for each rest of a log-sum-exp.
pub(super) fn correct(rests: &[f32], corrections: &mut [f32]) {
    for (&rest, correction) in rests.iter().zip(corrections) {
        // Small ones, up to |lse| = 2,048, have no need of an exponential: `rest² / 2` is nothing.
        let small = rest.abs() <= 1.3e-4;
        *correction = if small { 1.0 - rest } else { (-f64::from(rest)).exp() as f32 };
    }
}

impl Operation for Differentiate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        debug_assert!(self.adjust.is_none());
        // SAFETY: `rows` has the condition of the type, and is masked where there are bits.
        unsafe {
            match self.bits.is_null() {
                true => self.rows::<S, false, false>(simd),
                false => self.rows::<S, true, false>(simd),
            }
        }
    }
}

/// [`Differentiate`] with additions: a function of its own, so that the other one is compiled as if
/// there were none.
///
/// # Safety
///
/// That of [`Differentiate`].
pub(crate) struct WithAdditions<'a>(pub(crate) &'a Differentiate<'a>);

impl Operation for WithAdditions<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        // SAFETY: as above.
        unsafe {
            match self.0.bits.is_null() {
                true => self.0.rows::<S, false, true>(simd),
                false => self.0.rows::<S, true, true>(simd),
            }
        }
    }
}

impl Differentiate<'_> {
    /// The factor that scores still have: those that additions change are scaled.
    #[inline(always)]
    pub(super) fn score_scale(&self) -> f32 {
        match self.adjust {
            Some(adjust) if adjust.additions.change_scores() => 1.0,
            _ => self.scale,
        }
    }

    /// What dropout multiplies the probabilities of one query and one vector of keys by, and the
    /// softcap the gradients of its scores.
    ///
    /// # Safety
    ///
    /// That of [`Differentiate`]; the query and the vector must end within the matrices.
    #[inline(always)]
    pub(super) unsafe fn factors<S: Simd>(&self, simd: S, query: usize, lane: usize) -> [S::F; 2] {
        let one = simd.splat(1.0);
        let Some(adjust) = &self.adjust else { return [one; 2] };
        let factor = |some: bool, of: Rows| match some {
            // SAFETY: the type demands a factor per pair here.
            true => unsafe { simd.load(of.at(query, lane).first) },
            false => one,
        };
        let additions = &adjust.additions;
        [
            factor(additions.dropout.is_some(), adjust.factors),
            factor(additions.softcap.is_some(), adjust.derivatives),
        ]
    }

    /// Writes gradients of scores of one query and one vector of keys, if they are wanted.
    ///
    /// # Safety
    ///
    /// That of [`Differentiate`]; the query and the vector must end within the matrices.
    #[inline(always)]
    pub(super) unsafe fn keep<S: Simd>(&self, simd: S, (query, lane): (usize, usize), x: S::F) {
        if let Some(adjust) = &self.adjust
            && self.keep_gradients
        {
            // SAFETY: the type demands a derivative per pair here.
            unsafe { simd.store(adjust.derivatives.at(query, lane).first, x) };
        }
    }

    /// # Safety
    ///
    /// That of [`Differentiate`]; `MASKED` only where bits aren't null.
    #[inline(always)]
    unsafe fn rows<S: Simd, const MASKED: bool, const ADDITIONS: bool>(&self, simd: S) {
        for query in 0..self.queries {
            // SAFETY: the type demands a log-sum-exp per query; `row` has the condition of this function.
            unsafe {
                match S::FUSED && (*self.lse.add(query)).abs() < MOST_NEAR {
                    true => self.row::<S, MASKED, ADDITIONS, true>(simd, query),
                    false => self.row::<S, MASKED, ADDITIONS, false>(simd, query),
                }
            }
        }
    }

    /// # Safety
    ///
    /// That of [`rows`](Self::rows), for a query below `queries`.
    #[inline(always)]
    unsafe fn row<S: Simd, const MASKED: bool, const ADDITIONS: bool, const NEAR: bool>(
        &self,
        simd: S,
        query: usize,
    ) {
        let mut lane = 0;
        // SAFETY: `vectors` are given lanes below `lanes`, a whole number of vectors, and the rest is as
        // this function demands.
        unsafe {
            while lane + 2 * S::WIDTH <= self.lanes {
                self.vectors::<S, 2, MASKED, ADDITIONS, NEAR>(simd, query, lane);
                lane += 2 * S::WIDTH;
            }
            if lane < self.lanes {
                self.vectors::<S, 1, MASKED, ADDITIONS, NEAR>(simd, query, lane);
            }
        }
    }

    /// `K` vectors of a row from a lane on.
    ///
    /// # Safety
    ///
    /// That of [`row`](Self::row); the vectors must end within the lanes.
    #[inline(always)]
    unsafe fn vectors<
        S: Simd,
        const K: usize,
        const MASKED: bool,
        const ADDITIONS: bool,
        const NEAR: bool,
    >(
        &self,
        simd: S,
        query: usize,
        lane: usize,
    ) {
        let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
        let scale = simd.splat(self.scale);
        let score_scale = if ADDITIONS { self.score_scale() } else { self.scale };
        let binary = binary_scale(simd, score_scale);
        let score_scale = simd.splat(score_scale);
        // SAFETY: the query is below `queries`, vectors of lanes below `lanes`, as the type demands
        // of all matrices and lists.
        unsafe {
            let lse = *self.lse.add(query);
            // A row that has seen nothing has no probabilities.
            let lse = simd.splat(if lse == f32::NEG_INFINITY { f32::INFINITY } else { lse });
            let reference = Reference::new(simd, lse);
            let correction = simd.splat(*self.corrections.add(query));
            let delta = simd.splat(*self.delta.add(query));
            let word = if MASKED { *self.bits.add(query) } else { 0 };
            let scores = self.scores.at(query, 0).first;
            let gradients = self.gradients.at(query, 0).first;
            let products = self.products.at(query, 0).first;
            // No score is above the log-sum-exp and no probability above 1, though other roundings
            // than those of the forward pass may make them so.
            let mut powers = [zero; K];
            for k in 0..K {
                powers[k] = simd.load(scores.add(lane + k * S::WIDTH));
            }
            powers = match NEAR {
                true => reference.exact_weights(simd, powers, binary),
                false => powers.map(|score| {
                    let score = simd.mul(score, score_scale);
                    exp_difference(simd, simd.min(lse, score), lse)
                }),
            };
            for k in 0..K {
                let lane = lane + k * S::WIDTH;
                let mut p = simd.min(one, simd.mul(powers[k], correction));
                let mut gradient = simd.load(gradients.add(lane));
                let [kept, derivative] = match ADDITIONS {
                    true => self.factors(simd, query, lane),
                    false => [one; 2],
                };
                if ADDITIONS {
                    gradient = simd.mul(gradient, kept);
                }
                let gradient = simd.mul(p, simd.sub(gradient, delta));
                let mut product = simd.mul(gradient, scale);
                if ADDITIONS {
                    product = simd.mul(product, derivative);
                    p = simd.mul(p, kept);
                    let mask = if MASKED { word >> lane } else { u64::MAX };
                    let gradient = simd.select(simd.mask(mask), gradient, zero);
                    self.keep(simd, (query, lane), gradient);
                }
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
