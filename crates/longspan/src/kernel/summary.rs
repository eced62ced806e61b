//! Summaries of the keys of a block: groups of neighbors, or clusters; of a larger block, clusters of
//! the clusters of the blocks in it.

use std::ops::Range;

use super::masses::{PARTS, Sampling, Terms};
use super::pack::ToLanes;
use crate::dtype::{Element, load, store};
use crate::exec::Arena;
use crate::gemm::Rows;
use crate::simd::{LANES, Operation, Simd, WIDEST};
use crate::tensor::Strided;

/// The most points of a block, and so the most clusters: the keys of the largest block that has a
/// layout, or clusters of blocks in a larger one.
const MOST_POINTS: usize = 256;

/// What is summarized.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Points<'a> {
    /// Keys.
    Keys,
    /// Clusters of smaller blocks, one block after the other.
    Clusters {
        /// What they were made by.
        sampling: Sampling,
        /// [`Sampling::words`] words each.
        members: &'a [u64],
        variances: &'a [[f32; PARTS]],
    },
}

impl Points<'_> {
    /// Keys of a point.
    fn keys(&self, point: usize) -> u32 {
        match self {
            Points::Keys => 1,
            Points::Clusters { sampling, members, .. } => {
                let words = sampling.words();
                members[point * words..][..words].iter().map(|word| word.count_ones()).sum()
            }
        }
    }

    /// Adds the keys of a point to a set of keys of the larger block.
    fn join(&self, point: usize, set: &mut [u64]) {
        match self {
            Points::Keys => set[point / 64] |= 1 << (point % 64),
            Points::Clusters { sampling, members, .. } => {
                // Sizes of blocks are powers of two: a set starts at a word or lies within one.
                let first = point / sampling.groups * sampling.keys;
                let words = sampling.words();
                let own = &members[point * words..][..words];
                let set = &mut set[first / 64..];
                set.iter_mut().zip(own).for_each(|(set, own)| *set |= own << (first % 64));
            }
        }
    }

    /// The variances within a point.
    fn variances(&self, point: usize) -> [f32; PARTS] {
        match self {
            Points::Keys => [0.0; PARTS],
            Points::Clusters { variances, .. } => variances[point],
        }
    }
}

/// Writes what products with sampled queries need of the keys of a block: see [`Terms`].
///
/// # Safety
///
/// A row of `dim` elements per point must be readable, at least one and at most [`MOST_POINTS`], and
/// [`Sampling::terms`] elements per group writable at `into`. Points other than keys are for clusters
/// alone.
pub(crate) struct Summarize<'a, E> {
    pub(crate) sampling: Sampling,
    pub(crate) source: Strided<E>,
    pub(crate) points: Points<'a>,
    pub(crate) count: usize,
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
        let mut of = [0_u8; MOST_POINTS];
        let of = &mut of[..self.count];
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
            for (point, &group) in of.iter().enumerate() {
                let set = &mut self.members[usize::from(group) * words..][..words];
                self.points.join(point, set);
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
        for key in 0..self.sampling.keys {
            for column in 0..self.dim {
                // SAFETY: the key is one of the block, and read where it is there.
                unsafe {
                    let exists = key < self.count;
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
    /// That of [`Summarize`]; `of` must have a group per point.
    #[inline(always)]
    unsafe fn moments<S: Simd>(&mut self, simd: S, of: &[u8]) {
        let Summarize { sampling: Sampling { groups, .. }, dim, .. } = *self;
        let row = dim.next_multiple_of(S::WIDTH);
        let sums = self.scratch.reserve(2 * groups * row);
        let mut counts = [0.0_f32; MOST_POINTS];
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
            for (point, &group) in of.iter().enumerate() {
                let keys = self.points.keys(point) as f32;
                counts[usize::from(group)] += keys;
                let at = usize::from(group) * row;
                for column in (at..at + loaded).step_by(S::WIDTH) {
                    let x = load(simd, self.source.at(point, column - at).first);
                    let all = simd.mul(x, simd.splat(keys));
                    simd.store(sums.add(column), simd.add(simd.load(sums.add(column)), all));
                    let square = simd.load(squares.add(column));
                    simd.store(squares.add(column), simd.fma(all, x, square));
                }
                for column in loaded..dim {
                    let x = (*self.source.at(point, column).first).to_f32();
                    *sums.add(at + column) += keys * x;
                    *squares.add(at + column) += keys * x * x;
                }
                if let Some(own) = self.variances.get_mut(usize::from(group)) {
                    let add = |(sum, inner): (&mut f32, f32)| *sum += keys * inner;
                    own.iter_mut().zip(self.points.variances(point)).for_each(add);
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
                    // The variance within points, and that of points.
                    let mut between = [0.0_f32; PARTS];
                    for (part, range) in self.parts {
                        let sum = range.clone().fold(0.0, |sum, d| sum + *square.add(d));
                        between[*part] += sum;
                    }
                    for (own, (between, dims)) in own.iter_mut().zip(between.iter().zip(&dims)) {
                        *own = *own * share + between / dims.max(1.0);
                    }
                }
            }
        }
    }

    /// Assigns points to clusters by farthest-first traversal (Gonzalez): the first center is the
    /// first point, every other one the point that is farthest from all centers before it, and points
    /// belong to the center that is nearest. Lloyd's iterations from there change nothing that
    /// choices of blocks depend on.
    ///
    /// # Safety
    ///
    /// That of [`Summarize`]; `of` must have a place per point, with a 0.
    #[inline(always)]
    unsafe fn cluster<S: Simd>(&mut self, simd: S, of: &mut [u8]) {
        let Summarize { sampling: Sampling { groups, .. }, source, count, dim, .. } = *self;
        let lanes = count.next_multiple_of(LANES);
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
            for first in (0..count).step_by(LANES) {
                let target = Rows { first: turned.add(first), row: lanes };
                let (source, tokens) = (source.at(first, 0), LANES.min(count - first));
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
            for (lane, nearest) in
                std::slice::from_raw_parts_mut(nearest, lanes).iter_mut().enumerate()
            {
                let exists = lane < count && self.points.keys(lane) > 0;
                *nearest = if exists { f32::INFINITY } else { f32::NEG_INFINITY };
            }
            std::ptr::write_bytes(group_of, 0, lanes);
            let mut center = 0;
            for group in 0..groups {
                center = lists.add_center(simd, center, group as f32);
            }
            for (point, of) in of.iter_mut().enumerate() {
                *of = *group_of.add(point) as u8;
            }
        }
    }
}

/// Points as lanes, and numbers for each.
struct Lists {
    /// `[dim][lanes]`.
    turned: *const f32,
    lanes: usize,
    dim: usize,
    /// `|x|²`.
    squares: *const f32,
    /// The squared distance to the nearest center, and its number.
    nearest: *mut f32,
    group_of: *mut f32,
}

impl Lists {
    /// Assigns the points that are nearer to this one than to the centers so far; returns the one that
    /// is farthest from all of them now, the first of those.
    ///
    /// # Safety
    ///
    /// `dim` rows of `lanes` points must be readable, a whole number of [`LANES`], and the other lists
    /// as long; the center must be one of the points.
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
            let (mut distances, mut points) = ([0.0_f32; WIDEST], [0.0_f32; WIDEST]);
            simd.store(distances.as_mut_ptr(), most);
            simd.store(points.as_mut_ptr(), farthest);
            let mut best = 0;
            for lane in 1..S::WIDTH {
                let (far, most) = (distances[lane], distances[best]);
                let first = far == most && points[lane] < points[best];
                best = if far > most || first { lane } else { best };
            }
            points[best] as usize
        }
    }
}
