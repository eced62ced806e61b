//! The steps between the products of an estimate.

use super::Room;
use crate::dtype::Element;
use crate::gemm::Rows;
use crate::simd::math::exp_difference;
use crate::simd::{LANES, Operation, Simd, WIDEST};
use crate::tensor::Strided;

/// Multiplies queries by the scale, and writes half of the squares of the first rows.
///
/// # Safety
///
/// `terms` rows of [`LANES`] must be readable and writable, and `spreads` rows writable at
/// `squares`, none of them shared; `spreads` at most `terms`.
pub(super) struct Scale {
    pub(super) queries: Rows,
    pub(super) terms: usize,
    pub(super) squares: Rows,
    pub(super) spreads: usize,
    pub(super) scale: f32,
}

impl Operation for Scale {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let (scale, half) = (simd.splat(self.scale), simd.splat(0.5));
        for row in 0..self.terms {
            for lane in (0..LANES).step_by(S::WIDTH) {
                // SAFETY: rows are below `terms` and `spreads`, vectors within `LANES`.
                unsafe {
                    let at = self.queries.at(row, lane).first;
                    let x = simd.mul(simd.load(at), scale);
                    simd.store(at, x);
                    if row < self.spreads {
                        let square = simd.mul(simd.mul(x, x), half);
                        simd.store(self.squares.at(row, lane).first, square);
                    }
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
/// `groups` rows of [`LANES`] scores must be readable and writable, as many spreads readable, and a
/// weight per row.
pub(super) struct AddSpread<E> {
    pub(super) scores: Rows,
    pub(super) spreads: Rows,
    /// `ln w`, in column 0.
    pub(super) weights: Strided<E>,
    pub(super) groups: usize,
}

impl<E: Element> Operation for AddSpread<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let two = simd.splat(2.0);
        for group in 0..self.groups {
            // SAFETY: rows are below `groups`, vectors within `LANES`.
            unsafe {
                let weight = (*self.weights.at(group, 0).first).to_f32();
                let weight = simd.splat(weight.max(0.0));
                for lane in (0..LANES).step_by(S::WIDTH) {
                    let spread = simd.load(self.spreads.at(group, lane).first);
                    let root = simd.sqrt(simd.mul(spread, weight));
                    let bounded = simd.sub(simd.mul(two, root), weight);
                    let added = simd.select(simd.less(weight, spread), bounded, spread);
                    let at = self.scores.at(group, lane).first;
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
/// `groups` rows of scores must be readable, maxima and totals too and writable, and [`LANES`] sums
/// per block writable; none of them shared.
pub(super) struct Accumulate {
    pub(super) room: Room,
    pub(super) groups: usize,
    pub(super) per_block: usize,
    pub(super) sums: *mut f32,
}

impl Operation for Accumulate {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let Accumulate { room, groups, per_block, sums } = self;
        let nothing = simd.splat(f32::NEG_INFINITY);
        for lane in (0..LANES).step_by(S::WIDTH) {
            // SAFETY: rows are below `groups`, vectors within `LANES`.
            unsafe {
                let before = simd.load(room.maxima.add(lane));
                let mut maximum = before;
                for group in 0..groups {
                    maximum = simd.max(simd.load(room.scores.at(group, lane).first), maximum);
                }
                simd.store(room.maxima.add(lane), maximum);
                // Where everything is −∞ so far, differences are taken from 0.
                let base = simd.select(simd.less(nothing, maximum), maximum, simd.splat(0.0));
                let factor = exp_difference(simd, before, base);
                let mut total = simd.mul(simd.load(room.totals.add(lane)), factor);
                for first in (0..groups).step_by(per_block) {
                    let mut sum = simd.splat(0.0);
                    for group in first..(first + per_block).min(groups) {
                        let score = simd.load(room.scores.at(group, lane).first);
                        sum = simd.add(sum, exp_difference(simd, score, base));
                    }
                    simd.store(sums.add(first / per_block * LANES + lane), sum);
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
