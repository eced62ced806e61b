//! The steps between the products of an estimate.

use std::ops::Range;

use super::{PARTS, Room, part};
use crate::gemm::Rows;
use crate::simd::math::exp_difference;
use crate::simd::{LANES, Operation, Simd, WIDEST};

/// Multiplies queries by the scale.
///
/// # Safety
///
/// `terms` rows of [`LANES`] must be readable and writable, and not shared.
pub(super) struct Scale {
    pub(super) queries: Rows,
    pub(super) terms: usize,
    pub(super) scale: f32,
}

impl Operation for Scale {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let scale = simd.splat(self.scale);
        for row in 0..self.terms {
            for lane in (0..LANES).step_by(S::WIDTH) {
                // SAFETY: rows are below `terms`, vectors within `LANES`.
                unsafe {
                    let at = self.queries.at(row, lane).first;
                    simd.store(at, simd.mul(simd.load(at), scale));
                }
            }
        }
    }
}

/// Writes half of the sum of squares of each part of the head dim.
///
/// # Safety
///
/// `dim` rows of [`LANES`] must be readable, and [`PARTS`] rows writable.
pub(super) struct Squares {
    pub(super) queries: Rows,
    pub(super) dim: usize,
    pub(super) squares: Rows,
}

impl Operation for Squares {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        // SAFETY: rows are below `dim` and the parts, vectors within `LANES`.
        unsafe {
            std::ptr::write_bytes(self.squares.first, 0, PARTS * LANES);
            for d in 0..self.dim {
                let part = part(d, self.dim);
                for lane in (0..LANES).step_by(S::WIDTH) {
                    let x = simd.load(self.queries.at(d, lane).first);
                    let sum = self.squares.at(part, lane).first;
                    let half = simd.mul(x, simd.splat(0.5));
                    simd.store(sum, simd.fma(half, x, simd.load(sum)));
                }
            }
        }
    }
}

/// Adds to the scores of each group what the spread of its keys adds to the logarithm of their sum.
///
/// The mean of `exp(x)` over normally distributed `x` of variance `2c` is `exp(c)` times that of
/// their mean. But among `w` keys the largest is about `2 √(c ln w)` above the mean: from
/// `c = ln w` on the sum is that of the largest alone, `2 √(c ln w) − ln w` above the mean's.
///
/// # Safety
///
/// A row of [`LANES`] scores per weight must be readable and writable, and [`PARTS`] rows of squares
/// readable. The lanes must be whole vectors.
pub(super) struct AddSpread<'a> {
    pub(super) room: Room,
    pub(super) lanes: Range<usize>,
    /// `ln w` of each group.
    pub(super) weights: &'a [f32],
    pub(super) variances: &'a [[f32; PARTS]],
}

impl Operation for AddSpread<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let two = simd.splat(2.0);
        for lane in self.lanes.clone().step_by(S::WIDTH) {
            let mut squares = [simd.splat(0.0); PARTS];
            for (part, squares) in squares.iter_mut().enumerate() {
                // SAFETY: there is a row per part, vectors are within `LANES`.
                *squares = unsafe { simd.load(self.room.squares.at(part, lane).first) };
            }
            for (group, (weight, variances)) in self.weights.iter().zip(self.variances).enumerate()
            {
                let mut spread = simd.splat(0.0);
                for (square, variance) in squares.into_iter().zip(variances) {
                    spread = simd.fma(square, simd.splat(*variance), spread);
                }
                let weight = simd.splat(weight.max(0.0));
                let root = simd.sqrt(simd.mul(spread, weight));
                let bounded = simd.sub(simd.mul(two, root), weight);
                let added = simd.select(simd.less(weight, spread), bounded, spread);
                // SAFETY: there is a row per weight, vectors are within `LANES`.
                unsafe {
                    let at = self.room.scores.at(group, lane).first;
                    simd.store(at, simd.add(simd.load(at), added));
                }
            }
        }
    }
}

/// Continues maxima and totals with the scores of a chunk, and writes a sum per block and lane,
/// relative to the new maxima.
///
/// # Safety
///
/// A row of scores per weight must be readable, maxima and totals too and writable, and [`LANES`]
/// sums per block writable; none of them shared. The lanes must be whole vectors.
pub(super) struct Accumulate<'a> {
    pub(super) room: Room,
    pub(super) lanes: Range<usize>,
    /// What is added to the scores of each group.
    pub(super) weights: &'a [f32],
    pub(super) per_block: usize,
    pub(super) sums: *mut f32,
}

impl Operation for Accumulate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let Accumulate { room, lanes, weights, per_block, sums } = self;
        let nothing = simd.splat(f32::NEG_INFINITY);
        for lane in lanes.step_by(S::WIDTH) {
            // SAFETY: there is a row per weight, vectors are within `LANES`.
            unsafe {
                let before = simd.load(room.maxima.add(lane));
                let mut maximum = before;
                for (group, &weight) in weights.iter().enumerate() {
                    let score = simd.load(room.scores.at(group, lane).first);
                    maximum = simd.max(simd.add(score, simd.splat(weight)), maximum);
                }
                simd.store(room.maxima.add(lane), maximum);
                // Where everything is −∞ so far, differences are taken from 0.
                let base = simd.select(simd.less(nothing, maximum), maximum, simd.splat(0.0));
                let factor = exp_difference(simd, before, base);
                let mut total = simd.mul(simd.load(room.totals.add(lane)), factor);
                for (block, weights) in weights.chunks(per_block).enumerate() {
                    let mut sum = simd.splat(0.0);
                    for (group, &weight) in weights.iter().enumerate() {
                        let at = room.scores.at(block * per_block + group, lane).first;
                        let score = simd.add(simd.load(at), simd.splat(weight));
                        sum = simd.add(sum, exp_difference(simd, score, base));
                    }
                    simd.store(sums.add(block * LANES + lane), sum);
                    total = simd.add(total, sum);
                }
                simd.store(room.totals.add(lane), total);
            }
        }
    }
}

/// `exp(maxima of a chunk − maxima) / totals`, and 0 for lanes that attend to nothing.
///
/// # Safety
///
/// [`LANES`] elements of each list must be readable, and of the result writable.
pub(super) struct Factors {
    pub(super) lists: [*const f32; 3],
    pub(super) into: *mut f32,
}

impl Operation for Factors {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let (zero, nothing) = (simd.splat(0.0), simd.splat(f32::NEG_INFINITY));
        let [chunk, all, totals] = self.lists;
        for lane in (0..LANES).step_by(S::WIDTH) {
            // SAFETY: vectors within `LANES`.
            unsafe {
                let (all, total) = (simd.load(all.add(lane)), simd.load(totals.add(lane)));
                let base = simd.select(simd.less(nothing, all), all, zero);
                let factor = exp_difference(simd, simd.load(chunk.add(lane)), base);
                let factor = simd.div(factor, total);
                let factor = simd.select(simd.less(zero, total), factor, zero);
                simd.store(self.into.add(lane), factor);
            }
        }
    }
}

/// Adds to each block's mass the sums of a row's lanes, multiplied by their factors.
///
/// # Safety
///
/// For each mass, as many elements as there are factors must be readable, [`LANES`] apart.
pub(super) struct Reduce<'a> {
    pub(super) from: *const f32,
    pub(super) factors: &'a [f32],
    pub(super) into: &'a mut [f32],
}

impl Operation for Reduce<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let Reduce { from, factors, into } = self;
        let mut vectors = [0.0_f32; WIDEST * WIDEST];
        let mut sums = [0.0_f32; WIDEST];
        for (number, masses) in into.chunks_mut(S::WIDTH).enumerate() {
            // SAFETY: blocks are below those of `into`, lanes below the factors; the arrays have
            // room for the widest vectors.
            unsafe {
                for block in 0..masses.len() {
                    let row = from.add((number * S::WIDTH + block) * LANES);
                    let whole = factors.len() / S::WIDTH * S::WIDTH;
                    let mut sum = simd.splat(0.0);
                    for lane in (0..whole).step_by(S::WIDTH) {
                        let factor = simd.load(factors.as_ptr().add(lane));
                        sum = simd.fma(simd.load(row.add(lane)), factor, sum);
                    }
                    let at = vectors.as_mut_ptr().add(block * S::WIDTH);
                    simd.store(at, sum);
                    for (lane, factor) in factors.iter().enumerate().skip(whole) {
                        *at += *row.add(lane) * factor;
                    }
                }
                simd.store(sums.as_mut_ptr(), simd.sums(vectors.as_ptr()));
            }
            masses.iter_mut().zip(&sums).for_each(|(mass, sum)| *mass += sum);
        }
    }
}
