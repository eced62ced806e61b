//! Gradients of biases: sums of gradients of scores by head and distance.
//!
//! A tile of the backward pass adds the gradients of its scores along diagonals: f32 sums of one
//! tile, then f64 sums of a unit. Units are added up in their order, whatever thread ran them.

use crate::gemm::Rows;
use crate::score::Additions;
use crate::simd::{Operation, Simd, WIDEST};

use super::adjust::{POSITION, are_consecutive};

/// What a unit adds up: the gradients of the tables and slopes of some query heads.
#[derive(Debug, Default)]
pub(crate) struct BiasSums {
    /// The first of the heads.
    first: usize,
    /// Sums of one tile: a descending row of a table, 0 between tiles.
    tile: Vec<f32>,
    /// `len` sums per head.
    table: Vec<f64>,
    len: usize,
    slopes: Vec<f64>,
}

impl BiasSums {
    /// Sets all sums of `heads` heads from `first` on to 0.
    pub(crate) fn clear(&mut self, additions: &Additions<'_>, first: usize, heads: usize) {
        let (len, row) = additions.table.map_or((0, 0), |table| (table.len(), table.row()));
        (self.first, self.len) = (first, len);
        self.tile.clear();
        self.tile.resize(row, 0.0);
        self.table.clear();
        self.table.resize(heads * len, 0.0);
        self.slopes.clear();
        self.slopes.resize(heads, 0.0);
    }

    /// Adds all sums to those of all heads.
    pub(crate) fn add_to(&self, table: &mut [f64], slopes: &mut [f64]) {
        let add = |into: &mut [f64], from: &[f64]| {
            into.iter_mut().zip(from).for_each(|(into, from)| *into += from);
        };
        if !table.is_empty() {
            add(&mut table[self.first * self.len..], &self.table);
        }
        if !slopes.is_empty() {
            add(&mut slopes[self.first..], &self.slopes);
        }
    }

    /// Adds a tile of gradients of scores.
    ///
    /// # Safety
    ///
    /// queries × keys gradients of scores must be readable, rounded up to whole vectors, and terms of
    /// these queries, of one head, and keys.
    pub(crate) unsafe fn add<S: Simd>(
        &mut self,
        simd: S,
        additions: &Additions<'_>,
        head: usize,
        gradients: Rows,
        (queries, query_terms): (usize, Rows),
        (keys, key_terms): (usize, Rows),
    ) {
        let head_of_unit = head - self.first;
        let sums = self.tile.as_mut_ptr();
        let add = AddTile { additions, gradients, queries, keys, query_terms, key_terms, sums };
        // SAFETY: this function demands the rest, and `clear` made sums for a row of the table.
        let Touched { first, end, slope } = unsafe { simd.call(add) };
        self.slopes[head_of_unit] -= f64::from(slope);
        for index in first..end {
            let sum = std::mem::take(&mut self.tile[index]);
            let descending = index.saturating_sub(WIDEST).min(self.len - 1);
            self.table[head_of_unit * self.len + self.len - 1 - descending] += f64::from(sum);
        }
    }
}

/// What a tile has changed: sums of distances, and the sum for the slope.
struct Touched {
    first: usize,
    end: usize,
    slope: f32,
}

/// Adds gradients of scores to sums by distance, and multiplied by it to one sum.
///
/// # Safety
///
/// That of [`BiasSums::add`]; and where there is a table, sums of one of its rows must be readable
/// and writable.
struct AddTile<'a> {
    additions: &'a Additions<'a>,
    gradients: Rows,
    queries: usize,
    keys: usize,
    query_terms: Rows,
    key_terms: Rows,
    sums: *mut f32,
}

impl Operation for AddTile<'_> {
    type Output = Touched;

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) -> Touched {
        let (mut first, mut end) = (usize::MAX, 0);
        let zero = simd.splat(0.0);
        let mut slope = zero;
        // SAFETY: queries, keys and vectors are those that the type demands; a lane's index is one of
        // a row of the table, with a vector from it on where the lanes are consecutive.
        unsafe {
            for lane in (0..self.keys).step_by(S::WIDTH) {
                let count = (self.keys - lane).min(S::WIDTH);
                let inside = simd.mask(u64::MAX >> (64 - count));
                let table = self.additions.table.map(|table| {
                    (table, count == S::WIDTH && are_consecutive(self.key_terms, lane, count))
                });
                let keys = simd.load(self.key_terms.at(POSITION, lane).first);
                for query in 0..self.queries {
                    let gradient = simd.load(self.gradients.at(query, lane).first);
                    let gradient = simd.select(inside, gradient, zero);
                    let position = *self.query_terms.at(POSITION, query).first;
                    if !self.additions.slopes.is_empty() {
                        let distance = simd.abs(simd.sub(simd.splat(position), keys));
                        slope = simd.fma(gradient, simd.select(inside, distance, zero), slope);
                    }
                    let Some((table, consecutive)) = table else { continue };
                    let index = |lane: usize| {
                        table.descending_index(position - *self.key_terms.at(POSITION, lane).first)
                    };
                    if consecutive {
                        let index = index(lane);
                        let at = self.sums.add(index);
                        simd.store(at, simd.add(simd.load(at), gradient));
                        (first, end) = (first.min(index), end.max(index + S::WIDTH));
                    } else {
                        let mut lanes = [0.0; WIDEST];
                        simd.store(lanes.as_mut_ptr(), gradient);
                        for (n, gradient) in lanes[..count].iter().enumerate() {
                            let index = index(lane + n);
                            *self.sums.add(index) += gradient;
                            (first, end) = (first.min(index), end.max(index + 1));
                        }
                    }
                }
            }
            let mut lanes = [0.0; WIDEST];
            simd.store(lanes.as_mut_ptr(), slope);
            Touched { first: first.min(end), end, slope: lanes[..S::WIDTH].iter().sum() }
        }
    }
}
