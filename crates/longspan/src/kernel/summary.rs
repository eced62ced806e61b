//! Summaries of the keys of a block: groups of neighbors, or clusters.

use super::masses::{Sampling, Terms};
use super::pack::ToLanes;
use crate::dtype::{Element, load};
use crate::exec::Arena;
use crate::gemm::Rows;
use crate::simd::{LANES, Operation, Simd};
use crate::tensor::Strided;

/// The weight of a group without keys: its exponential is 0 beside any other.
const NOTHING: f32 = -1e30;

/// Lloyd's iterations of a clustering.
const ROUNDS: usize = 3;

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
    pub(crate) scratch: &'a mut Arena,
}

impl<E: Element> Operation for Summarize<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(mut self, simd: S) {
        let Sampling { groups, .. } = self.sampling;
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
            let terms = self.sampling.terms(self.dim);
            for group in 0..groups {
                let members = &self.members[group * words..][..words];
                let count: u32 = members.iter().map(|word| word.count_ones()).sum();
                let weight = if count == 0 { NOTHING } else { (count as f32).ln() };
                let last = self.sampling.score_terms(self.dim) - 1;
                *self.into.add(group * terms + last) = E::from_f32(weight);
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
        let (terms, per_group) = (self.sampling.terms(self.dim), self.sampling.keys_per_group());
        for key in 0..self.sampling.block {
            for column in 0..self.dim {
                // SAFETY: the key is one of a group of the block, and read where it is there.
                unsafe {
                    let exists = key < self.keys;
                    let x = if exists { *self.source.at(key, column).first } else { E::default() };
                    let term = key % per_group * self.dim + column;
                    *self.into.add(key / per_group * terms + term) = x;
                }
            }
        }
    }

    /// Writes the mean of each group, and the variances of clusters.
    ///
    /// # Safety
    ///
    /// That of [`Summarize`]; `of` must have a group per key.
    #[inline(always)]
    unsafe fn moments<S: Simd>(&mut self, simd: S, of: &[u8]) {
        let Summarize { sampling: Sampling { groups, .. }, dim, .. } = *self;
        let terms = self.sampling.terms(dim);
        let variances = self.sampling.terms == Terms::Clusters;
        let row = dim.next_multiple_of(S::WIDTH);
        let sums = self.scratch.reserve(2 * groups * row);
        // SAFETY: rows of `row` elements, two per group, are in the room; columns below `dim` are in
        // the source, and vectors of it only loaded where its elements lie side by side.
        unsafe {
            std::ptr::write_bytes(sums, 0, 2 * groups * row);
            let squares = sums.add(groups * row);
            let whole = if self.source.column == 1 { dim / S::WIDTH * S::WIDTH } else { 0 };
            for (key, &group) in of.iter().enumerate() {
                let at = usize::from(group) * row;
                for column in (0..whole).step_by(S::WIDTH) {
                    let x = load(simd, self.source.at(key, column).first);
                    let (sum, square) = (sums.add(at + column), squares.add(at + column));
                    simd.store(sum, simd.add(simd.load(sum), x));
                    simd.store(square, simd.fma(x, x, simd.load(square)));
                }
                for column in whole..dim {
                    let x = (*self.source.at(key, column).first).to_f32();
                    *sums.add(at + column) += x;
                    *squares.add(at + column) += x * x;
                }
            }
            let words = self.sampling.words();
            for group in 0..groups {
                let members = &self.members[group * words..][..words];
                let count: u32 = members.iter().map(|word| word.count_ones()).sum();
                let share = 1.0 / count.max(1) as f32;
                let into = self.into.add(group * terms);
                for column in 0..dim {
                    let mean = *sums.add(group * row + column) * share;
                    *into.add(column) = E::from_f32(mean);
                    if variances {
                        let square = *squares.add(group * row + column) * share;
                        *into.add(dim + 1 + column) = E::from_f32((square - mean * mean).max(0.0));
                    }
                }
            }
        }
    }

    /// Assigns keys to clusters: starts from keys that are far apart, then Lloyd's iterations.
    ///
    /// Keys are lanes: `|c|² − 2 c·k` orders the centers of a key as distances do.
    ///
    /// # Safety
    ///
    /// That of [`Summarize`]; `of` must have a place per key.
    #[inline(always)]
    unsafe fn cluster<S: Simd>(&mut self, simd: S, of: &mut [u8]) {
        let Summarize { sampling: Sampling { groups, .. }, source, keys, dim, .. } = *self;
        let lanes = keys.next_multiple_of(LANES);
        let lens = [dim * lanes, (groups + 1) * dim, lanes, lanes, lanes, lanes];
        let mut next = self.scratch.reserve(lens.iter().sum());
        let [turned, centers, squares, nearest, distances, group_of] = lens.map(|len| {
            let part = next;
            // SAFETY: the parts add up to the room.
            next = unsafe { next.add(len) };
            part
        });
        let lists = Lists { turned, lanes, dim, distances };
        // SAFETY: all indices are below the lengths above, lanes whole vectors.
        unsafe {
            std::ptr::write_bytes(turned, 0, dim * lanes);
            for first in (0..keys).step_by(LANES) {
                let target = Rows { first: turned.add(first), row: lanes };
                let (source, tokens) = (source.at(first, 0), LANES.min(keys - first));
                ToLanes { source, tokens, dims: dim, target, lane: 0 }.eval(simd);
            }
            // The mean, and squares of all keys.
            let mean = centers.add(groups * dim);
            for d in 0..dim {
                let row = std::slice::from_raw_parts(turned.add(d * lanes), keys);
                *mean.add(d) = row.iter().sum::<f32>() / keys as f32;
            }
            for lane in (0..lanes).step_by(S::WIDTH) {
                let mut sum = simd.splat(0.0);
                for d in 0..dim {
                    let x = simd.load(turned.add(d * lanes + lane));
                    sum = simd.fma(x, x, sum);
                }
                simd.store(squares.add(lane), sum);
            }
            // Farthest from the mean first, then farthest from all centers so far.
            std::slice::from_raw_parts_mut(nearest, lanes).fill(f32::INFINITY);
            let mut center = mean.cast_const();
            for group in 0..groups {
                lists.distances(simd, center);
                for lane in (0..lanes).step_by(S::WIDTH) {
                    let far =
                        simd.add(simd.load(distances.add(lane)), simd.load(squares.add(lane)));
                    let before = simd.load(nearest.add(lane));
                    // The mean is no center.
                    let far = if group < 2 { far } else { simd.min(far, before) };
                    simd.store(nearest.add(lane), far);
                }
                let list = std::slice::from_raw_parts(nearest, keys);
                let mut farthest = 0;
                for (key, &far) in list.iter().enumerate() {
                    farthest = if far > list[farthest] { key } else { farthest };
                }
                let to = centers.add(group * dim);
                (0..dim).for_each(|d| *to.add(d) = *turned.add(d * lanes + farthest));
                center = to;
            }
            for _ in 0..ROUNDS {
                for group in 0..groups {
                    lists.distances(simd, centers.add(group * dim));
                    for lane in (0..lanes).step_by(S::WIDTH) {
                        let far = simd.load(distances.add(lane));
                        let (near, at) = (nearest.add(lane), group_of.add(lane));
                        let number = simd.splat(group as f32);
                        if group == 0 {
                            simd.store(near, far);
                            simd.store(at, number);
                            continue;
                        }
                        let before = simd.load(near);
                        let nearer = simd.less(far, before);
                        simd.store(near, simd.select(nearer, far, before));
                        simd.store(at, simd.select(nearer, number, simd.load(at)));
                    }
                }
                self.centers(simd, std::slice::from_raw_parts(group_of, keys), centers);
            }
            for (key, of) in of.iter_mut().enumerate() {
                *of = *group_of.add(key) as u8;
            }
        }
    }

    /// Moves each center to the mean of its keys; one without keys stays.
    ///
    /// # Safety
    ///
    /// That of [`Summarize`]; a center per group must be writable, `group_of` have a group per key.
    #[inline(always)]
    unsafe fn centers<S: Simd>(&self, simd: S, group_of: &[f32], centers: *mut f32) {
        let dim = self.dim;
        let mut counts = [0.0_f32; MOST_KEYS];
        group_of.iter().for_each(|&group| counts[group as usize] += 1.0);
        // SAFETY: groups are below those of a block, columns below `dim`; vectors of the source are
        // only loaded where its elements lie side by side.
        unsafe {
            for (group, &count) in counts[..self.sampling.groups].iter().enumerate() {
                if count > 0.0 {
                    std::slice::from_raw_parts_mut(centers.add(group * dim), dim).fill(0.0);
                }
            }
            let whole = if self.source.column == 1 { dim / S::WIDTH * S::WIDTH } else { 0 };
            for (key, &group) in group_of.iter().enumerate() {
                let center = centers.add(group as usize * dim);
                let share = 1.0 / counts[group as usize];
                for column in (0..whole).step_by(S::WIDTH) {
                    let x = load(simd, self.source.at(key, column).first);
                    let at = center.add(column);
                    simd.store(at, simd.fma(x, simd.splat(share), simd.load(at)));
                }
                for column in whole..dim {
                    *center.add(column) += (*self.source.at(key, column).first).to_f32() * share;
                }
            }
        }
    }
}

/// Keys as lanes, and a number for each.
struct Lists {
    turned: *const f32,
    lanes: usize,
    dim: usize,
    distances: *mut f32,
}

impl Lists {
    /// Writes `|c|² − 2 c·k` for every key.
    ///
    /// # Safety
    ///
    /// `dim` rows of `lanes` must be readable, as many distances writable, and the center `dim` wide.
    #[inline(always)]
    unsafe fn distances<S: Simd>(&self, simd: S, center: *const f32) {
        let Lists { turned, lanes, dim, distances } = *self;
        // SAFETY: lanes are a multiple of `LANES`, and so of four vectors or of one.
        unsafe {
            let center = std::slice::from_raw_parts(center, dim);
            let square = simd.splat(center.iter().map(|x| x * x).sum());
            for first in (0..lanes).step_by(4 * S::WIDTH) {
                let mut sums = [square; 4];
                for (d, &x) in center.iter().enumerate() {
                    let factor = simd.splat(-2.0 * x);
                    let row = turned.add(d * lanes + first);
                    for (index, sum) in sums.iter_mut().enumerate() {
                        *sum = simd.fma(simd.load(row.add(index * S::WIDTH)), factor, *sum);
                    }
                }
                for (index, sum) in sums.into_iter().enumerate() {
                    simd.store(distances.add(first + index * S::WIDTH), sum);
                }
            }
        }
    }
}
