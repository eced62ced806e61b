//! Summaries of the keys of a block: groups of neighbors, or clusters.

use std::ops::Range;

use super::masses::{PARTS, Sampling, Terms};
use super::pack::ToLanes;
use crate::dtype::{Element, load, store};
use crate::exec::Arena;
use crate::gemm::Rows;
use crate::simd::{LANES, Operation, Simd, WIDEST};
use crate::tensor::Strided;

/// The largest block, and so the most clusters.
const MOST_KEYS: usize = 256;

/// Writes what products with sampled queries need of the keys of a block: see [`Terms`].
///
/// # Safety
///
/// `keys` rows of `dim` elements must be readable, at least one and at most those of a block, and
/// [`Sampling::terms`] elements per group writable at `into`.
pub(crate) struct Summarize<'a, E> {
    pub(crate) sampling: Sampling,
    pub(crate) source: Strided<E>,
    pub(crate) keys: usize,
    pub(crate) dim: usize,
    pub(crate) into: *mut E,
    /// [`Sampling::words`] words per group, all 0: the keys of each.
    pub(crate) members: &'a mut [u64],
    /// The mean variance of each part of the head dim in each cluster, all 0 before; empty for other
    /// terms.
    pub(crate) variances: &'a mut [[f32; PARTS]],
    /// Those of the head dim.
    pub(crate) parts: &'a [(usize, Range<usize>)],
    pub(crate) scratch: &'a mut Arena,
}

impl<E: Element> Operation for Summarize<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(mut self, simd: S) {
        let mut of = [0_u8; MOST_KEYS];
        let of = &mut of[..self.keys];
        // SAFETY: as the type demands; groups are below those of a block.
        unsafe {
            match self.sampling.terms {
                Terms::Clusters => self.cluster(simd, of),
                _ => {
                    let per_group = self.sampling.keys_per_group();
                    of.iter_mut().enumerate().for_each(|(key, of)| *of = (key / per_group) as u8);
                }
            }
            let words = self.sampling.words();
            for (key, &group) in of.iter().enumerate() {
                self.members[usize::from(group) * words + key / 64] |= 1 << (key % 64);
            }
            match self.sampling.terms {
                Terms::Antidiagonals => self.copy(),
                _ => self.moments(simd, of),
            }
        }
    }
}

impl<E: Element> Summarize<'_, E> {
    /// Writes all keys, one after the other; zeros for those that are missing.
    ///
    /// # Safety
    ///
    /// That of [`Summarize`].
    #[inline(always)]
    unsafe fn copy(&self) {
        for key in 0..self.sampling.block {
            for column in 0..self.dim {
                // SAFETY: the key is one of the block, and read where it is there.
                unsafe {
                    let exists = key < self.keys;
                    let x = if exists { *self.source.at(key, column).first } else { E::default() };
                    *self.into.add(key * self.dim + column) = x;
                }
            }
        }
    }

    /// Writes the mean of each group, and of clusters the mean variance of each part of the head dim;
    /// zeros for a group without keys.
    ///
    /// # Safety
    ///
    /// That of [`Summarize`]; `of` must have a group per key.
    #[inline(always)]
    unsafe fn moments<S: Simd>(&mut self, simd: S, of: &[u8]) {
        let Summarize { sampling: Sampling { groups, .. }, dim, .. } = *self;
        let row = dim.next_multiple_of(S::WIDTH);
        let sums = self.scratch.reserve(2 * groups * row);
        let mut counts = [0.0_f32; MOST_KEYS];
        // Dims per part.
        let mut dims = [0.0_f32; PARTS];
        self.parts.iter().for_each(|(part, range)| dims[*part] += range.len() as f32);
        // SAFETY: two rows of `row` elements per group are in the room; columns below `dim` are in the
        // source and the target, and vectors of the source only loaded where its elements lie side
        // by side.
        unsafe {
            std::ptr::write_bytes(sums, 0, 2 * groups * row);
            let squares = sums.add(groups * row);
            let whole = dim / S::WIDTH * S::WIDTH;
            let loaded = if self.source.column == 1 { whole } else { 0 };
            for (key, &group) in of.iter().enumerate() {
                counts[usize::from(group)] += 1.0;
                let at = usize::from(group) * row;
                for column in (at..at + loaded).step_by(S::WIDTH) {
                    let x = load(simd, self.source.at(key, column - at).first);
                    simd.store(sums.add(column), simd.add(simd.load(sums.add(column)), x));
                    let square = simd.load(squares.add(column));
                    simd.store(squares.add(column), simd.fma(x, x, square));
                }
                for column in loaded..dim {
                    let x = (*self.source.at(key, column).first).to_f32();
                    *sums.add(at + column) += x;
                    *squares.add(at + column) += x * x;
                }
            }
            for (group, count) in counts[..groups].iter().enumerate() {
                let share = 1.0 / count.max(1.0);
                let (sum, square) = (sums.add(group * row), squares.add(group * row));
                let into = self.into.add(group * dim);
                // Rows end with zeros where the head dim is no whole number of vectors.
                for column in (0..row).step_by(S::WIDTH) {
                    let share = simd.splat(share);
                    let mean = simd.mul(simd.load(sum.add(column)), share);
                    let square = square.add(column);
                    let variance = simd.fnma(mean, mean, simd.mul(simd.load(square), share));
                    simd.store(square, simd.max(variance, simd.splat(0.0)));
                    if column < whole {
                        store(simd, into.add(column), mean);
                    }
                }
                for column in whole..dim {
                    *into.add(column) = E::from_f32(*sum.add(column) * share);
                }
                if let Some(own) = self.variances.get_mut(group) {
                    for (part, range) in self.parts {
                        own[*part] = range.clone().fold(own[*part], |sum, d| sum + *square.add(d));
                    }
                    let divide = |(sum, dims): (&mut f32, &f32)| *sum /= dims.max(1.0);
                    own.iter_mut().zip(&dims).for_each(divide);
                }
            }
        }
    }

    /// Assigns keys to clusters by farthest-first traversal (Gonzalez): the first center is the
    /// first key, every other one the key that is farthest from all centers before it, and keys
    /// belong to the center that is nearest. Lloyd's iterations from there change nothing that
    /// choices of blocks depend on.
    ///
    /// # Safety
    ///
    /// That of [`Summarize`]; `of` must have a place per key, with a 0.
    #[inline(always)]
    unsafe fn cluster<S: Simd>(&mut self, simd: S, of: &mut [u8]) {
        let Summarize { sampling: Sampling { groups, .. }, source, keys, dim, .. } = *self;
        let lanes = keys.next_multiple_of(LANES);
        let lens = [dim * lanes, lanes, lanes, lanes];
        let mut next = self.scratch.reserve(lens.iter().sum());
        let [turned, squares, nearest, group_of] = lens.map(|len| {
            let part = next;
            // SAFETY: the parts add up to the room.
            next = unsafe { next.add(len) };
            part
        });
        let lists = Lists { turned, lanes, dim, squares, nearest, group_of };
        // SAFETY: all indices are below the lengths above, lanes whole vectors.
        unsafe {
            std::ptr::write_bytes(turned, 0, dim * lanes);
            for first in (0..keys).step_by(LANES) {
                let target = Rows { first: turned.add(first), row: lanes };
                let (source, tokens) = (source.at(first, 0), LANES.min(keys - first));
                ToLanes { source, tokens, dims: dim, target, lane: 0 }.eval(simd);
            }
            for lane in (0..lanes).step_by(S::WIDTH) {
                let mut sum = simd.splat(0.0);
                for d in 0..dim {
                    let x = simd.load(turned.add(d * lanes + lane));
                    sum = simd.fma(x, x, sum);
                }
                simd.store(squares.add(lane), sum);
            }
            // Lanes without a key are never the farthest.
            let list = std::slice::from_raw_parts_mut(nearest, lanes);
            list[..keys].fill(f32::INFINITY);
            list[keys..].fill(f32::NEG_INFINITY);
            std::ptr::write_bytes(group_of, 0, lanes);
            let mut center = 0;
            for group in 0..groups {
                center = lists.add_center(simd, center, group as f32);
            }
            for (key, of) in of.iter_mut().enumerate() {
                *of = *group_of.add(key) as u8;
            }
        }
    }
}

/// Keys as lanes, and numbers for each.
struct Lists {
    /// `[dim][lanes]`.
    turned: *const f32,
    lanes: usize,
    dim: usize,
    /// `|k|²`.
    squares: *const f32,
    /// The squared distance to the nearest center, and its number.
    nearest: *mut f32,
    group_of: *mut f32,
}

impl Lists {
    /// Assigns the keys that are nearer to this key than to the centers so far; returns the one that
    /// is farthest from all of them now, the first of those.
    ///
    /// # Safety
    ///
    /// `dim` rows of `lanes` keys must be readable, a whole number of [`LANES`], and the other lists
    /// as long; the center must be one of the keys.
    #[inline(always)]
    unsafe fn add_center<S: Simd>(&self, simd: S, center: usize, group: f32) -> usize {
        let Lists { turned, lanes, dim, squares, nearest, group_of } = *self;
        let numbers: [f32; WIDEST] = std::array::from_fn(|lane| lane as f32);
        // SAFETY: lanes are a multiple of four vectors, dims below `dim`.
        unsafe {
            let (mut most, mut farthest) = (simd.splat(f32::NEG_INFINITY), simd.splat(0.0));
            let (group, two) = (simd.splat(group), simd.splat(2.0));
            let square = simd.splat(*squares.add(center));
            for first in (0..lanes).step_by(4 * S::WIDTH) {
                // Dims in two halves, so that more sums are under way.
                let mut halves = [[simd.splat(0.0); 4]; 2];
                for d in 0..dim.div_ceil(2) {
                    for (half, sums) in halves.iter_mut().enumerate() {
                        let d = d + half * dim.div_ceil(2);
                        if d == dim {
                            continue;
                        }
                        let row = turned.add(d * lanes);
                        let factor = simd.splat(*row.add(center));
                        for (index, sum) in sums.iter_mut().enumerate() {
                            let x = simd.load(row.add(first + index * S::WIDTH));
                            *sum = simd.fma(x, factor, *sum);
                        }
                    }
                }
                let [low, high] = halves;
                for (index, (low, high)) in low.into_iter().zip(high).enumerate() {
                    let lane = first + index * S::WIDTH;
                    let dot = simd.add(low, high);
                    let both = simd.add(square, simd.load(squares.add(lane)));
                    let far = simd.fnma(two, dot, both);
                    let before = simd.load(nearest.add(lane));
                    let nearer = simd.less(far, before);
                    let near = simd.select(nearer, far, before);
                    simd.store(nearest.add(lane), near);
                    let of = group_of.add(lane);
                    simd.store(of, simd.select(nearer, group, simd.load(of)));
                    let number = simd.add(simd.splat(lane as f32), simd.load(numbers.as_ptr()));
                    let further = simd.less(most, near);
                    most = simd.select(further, near, most);
                    farthest = simd.select(further, number, farthest);
                }
            }
            let (mut distances, mut keys) = ([0.0_f32; WIDEST], [0.0_f32; WIDEST]);
            simd.store(distances.as_mut_ptr(), most);
            simd.store(keys.as_mut_ptr(), farthest);
            let mut best = 0;
            for lane in 1..S::WIDTH {
                let (far, most) = (distances[lane], distances[best]);
                let first = far == most && keys[lane] < keys[best];
                best = if far > most || first { lane } else { best };
            }
            keys[best] as usize
        }
    }
}
