//! Scores as [`Additions`] change them, and factors of probabilities.
//!
//! A pass over the tile of scores between its product and the softmax, in the cache. The softmax of
//! a call without additions doesn't know of it; that of a call with them finds its scores scaled.
//!
//! Both kernels have tokens of one kind side by side in lanes and of the other one below the other,
//! the one queries, the other keys: the lists below are read as vectors for the former, and one by
//! one for the latter.

use longspan_pattern::Layout;

use crate::gemm::Rows;
use crate::score::{Additions, Lookup};
use crate::simd::math::tanh;
use crate::simd::{Operation, Simd, WIDEST};

/// What additions need of queries: rows of a matrix with a column per query.
pub(crate) const QUERY_TERMS: usize = 5;
pub(super) const POSITION: usize = 0;
const SLOPE: usize = 1;
/// The query head, given as bits.
const HEAD: usize = 2;
/// Two words of dropout, given as bits.
const WORDS: [usize; 2] = [3, 4];

/// What additions need of keys: likewise, their positions, and the words of dropout.
pub(crate) const KEY_TERMS: usize = 2;
const WORD: usize = 1;

/// The position that those of a tile are counted from: that of a query nearby.
pub(crate) fn base(layout: &Layout, query: usize) -> i64 {
    layout.score_positions().map_or(0, |mut positions| positions.query(query))
}

/// A position in f32: exact within 2^24 of the base.
fn relative(position: i64, base: i64) -> f32 {
    position.wrapping_sub(base) as f32
}

impl Additions<'_> {
    /// Writes the terms of `count` queries of a head, from `first` on.
    ///
    /// # Safety
    ///
    /// `count` columns of `QUERY_TERMS` rows must be writable at `into`.
    pub(crate) unsafe fn query_terms(
        &self,
        layout: &Layout,
        (entry, head): (usize, usize),
        (first, count): (usize, usize),
        base: i64,
        into: Rows,
    ) {
        // SAFETY: columns are below `count` and rows below `QUERY_TERMS`.
        unsafe {
            if self.is_positional()
                && let Ok(mut positions) = layout.score_positions()
            {
                let slope = self.slopes.get(head).copied().unwrap_or(0.0);
                for index in 0..count {
                    let position = positions.query(first + index);
                    *into.at(POSITION, index).first = relative(position, base);
                    *into.at(SLOPE, index).first = slope;
                    *into.at(HEAD, index).first = f32::from_bits(head as u32);
                }
            }
            if let Some(dropout) = self.dropout {
                for index in 0..count {
                    let position = layout.query_positions().get(first + index);
                    let words = dropout.query_words(entry, head, self.heads, position.unwrap_or(0));
                    for (row, word) in WORDS.into_iter().zip(words) {
                        *into.at(row, index).first = f32::from_bits(word);
                    }
                }
            }
        }
    }

    /// Writes the terms of `count` keys from `first` on.
    ///
    /// # Safety
    ///
    /// `count` columns of `KEY_TERMS` rows must be writable at `into`.
    pub(crate) unsafe fn key_terms(
        &self,
        layout: &Layout,
        (first, count): (usize, usize),
        base: i64,
        into: Rows,
    ) {
        // SAFETY: columns are below `count` and rows below `KEY_TERMS`.
        unsafe {
            if self.is_positional()
                && let Ok(mut positions) = layout.score_positions()
            {
                for index in 0..count {
                    let position = positions.key(first + index);
                    *into.at(POSITION, index).first = relative(position, base);
                }
            }
            if self.dropout.is_some() {
                for index in 0..count {
                    let position = layout.key_positions().get(first + index);
                    *into.at(WORD, index).first = f32::from_bits(position.unwrap_or(0) as u32);
                }
            }
        }
    }
}

/// Whether the positions of `count` tokens from `lane` on are consecutive.
///
/// # Safety
///
/// Their terms must be readable.
#[inline(always)]
pub(super) unsafe fn are_consecutive(terms: Rows, lane: usize, count: usize) -> bool {
    // SAFETY: this function demands so many.
    let positions =
        unsafe { std::slice::from_raw_parts(terms.at(POSITION, lane).first.cast_const(), count) };
    positions.windows(2).all(|pair| pair[1] - pair[0] == 1.0)
}

/// Whether `count` queries from `lane` on are of one head.
///
/// # Safety
///
/// Their terms must be readable.
#[inline(always)]
unsafe fn have_one_head(terms: Rows, lane: usize, count: usize) -> bool {
    // SAFETY: this function demands so many.
    let heads =
        unsafe { std::slice::from_raw_parts(terms.at(HEAD, lane).first.cast::<u32>(), count) };
    heads.windows(2).all(|pair| pair[0] == pair[1])
}

/// Changes a tile of products into scores, and writes what else depends on pairs.
///
/// # Safety
///
/// rows × lanes elements, `lanes` a whole number of vectors, must be readable and writable at
/// `scores`, and writable at `derivatives` and `factors` unless these are null. Terms of all queries
/// and keys must be readable: of lanes and of rows, as `queries_in_lanes` says. Nothing that is
/// written may be shared with anything else here.
#[derive(Clone, Copy)]
pub(crate) struct Adjust<'a> {
    pub(crate) additions: &'a Additions<'a>,
    pub(crate) scale: f32,
    pub(crate) scores: Rows,
    pub(crate) rows: usize,
    pub(crate) lanes: usize,
    pub(crate) queries_in_lanes: bool,
    /// Terms of the queries and of the keys.
    pub(crate) queries: Rows,
    pub(crate) keys: Rows,
    /// The derivative of the softcap, where there is one.
    pub(crate) derivatives: Rows,
    /// What dropout multiplies probabilities by, where there is one.
    pub(crate) factors: Rows,
}

impl Operation for Adjust<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        // SAFETY: both have the condition of the type, and the kind of tokens that it says.
        unsafe {
            match self.queries_in_lanes {
                true => self.tile::<S, true>(simd),
                false => self.tile::<S, false>(simd),
            }
        }
    }
}

impl Adjust<'_> {
    /// # Safety
    ///
    /// That of [`Adjust`]; `QUERIES` must be its `queries_in_lanes`.
    #[inline(always)]
    unsafe fn tile<S: Simd, const QUERIES: bool>(&self, simd: S) {
        let Additions { softcap, slopes, table, dropout, .. } = *self.additions;
        let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
        let scale = simd.splat(self.scale);
        let changes = self.additions.change_scores();
        // SAFETY: vectors end within the lanes and rows are below `rows`, as the type demands of all
        // matrices and of the terms.
        unsafe {
            for lane in (0..self.lanes).step_by(S::WIDTH) {
                let query = |term: usize, row: usize| match QUERIES {
                    true => simd.load(self.queries.at(term, lane).first),
                    false => simd.splat(*self.queries.at(term, row).first),
                };
                let key = |term: usize, row: usize| match QUERIES {
                    true => simd.splat(*self.keys.at(term, row).first),
                    false => simd.load(self.keys.at(term, lane).first),
                };
                let consecutive = table.is_some()
                    && match QUERIES {
                        true => {
                            are_consecutive(self.queries, lane, S::WIDTH)
                                && have_one_head(self.queries, lane, S::WIDTH)
                        }
                        false => are_consecutive(self.keys, lane, S::WIDTH),
                    };
                for row in 0..self.rows {
                    if changes {
                        let at = self.scores.at(row, lane).first;
                        let mut score = simd.mul(simd.load(at), scale);
                        if let Some(cap) = softcap {
                            let part = tanh(simd, simd.div(score, simd.splat(cap)));
                            score = simd.mul(simd.splat(cap), part);
                            if !self.derivatives.first.is_null() {
                                let derivative = simd.fnma(part, part, one);
                                simd.store(self.derivatives.at(row, lane).first, derivative);
                            }
                        }
                        if !slopes.is_empty() {
                            let distance = simd.sub(query(POSITION, row), key(POSITION, row));
                            score = simd.fnma(query(SLOPE, row), simd.abs(distance), score);
                        }
                        if let Some(table) = table {
                            let bias = match consecutive {
                                true => self.consecutive::<S, QUERIES>(simd, table, row, lane),
                                false => self.gathered::<S, QUERIES>(simd, table, row, lane),
                            };
                            score = simd.add(score, bias);
                        }
                        simd.store(at, score);
                    }
                    if let Some(dropout) = dropout {
                        let words = WORDS.map(|term| query(term, row));
                        let kept = simd.kept(key(WORD, row), words, dropout.threshold());
                        let factor = simd.select(kept, simd.splat(dropout.factor()), zero);
                        simd.store(self.factors.at(row, lane).first, factor);
                    }
                }
            }
        }
    }

    /// The query and the key of a pair, by their places in the lists.
    #[inline(always)]
    fn pair<const QUERIES: bool>(row: usize, lane: usize) -> (usize, usize) {
        if QUERIES { (lane, row) } else { (row, lane) }
    }

    /// Head and distance of a pair.
    ///
    /// # Safety
    ///
    /// That of [`Adjust`], for a pair of the tile.
    #[inline(always)]
    unsafe fn head_and_distance<const QUERIES: bool>(
        &self,
        row: usize,
        lane: usize,
    ) -> (usize, f32) {
        let (query, key) = Self::pair::<QUERIES>(row, lane);
        // SAFETY: the terms are those of the pair.
        unsafe {
            let head = (*self.queries.at(HEAD, query).first).to_bits() as usize;
            let query = *self.queries.at(POSITION, query).first;
            (head, query - *self.keys.at(POSITION, key).first)
        }
    }

    /// Biases of a vector of consecutive positions of one head.
    ///
    /// # Safety
    ///
    /// That of [`Adjust`], for pairs of the tile.
    #[inline(always)]
    unsafe fn consecutive<S: Simd, const QUERIES: bool>(
        &self,
        simd: S,
        table: Lookup<'_>,
        row: usize,
        lane: usize,
    ) -> S::F {
        // SAFETY: the index is at least `WIDEST` elements before the end of the row, and no vector is
        // wider.
        unsafe {
            let (head, distance) = self.head_and_distance::<QUERIES>(row, lane);
            let (values, index) = match QUERIES {
                true => (table.ascending(head), table.ascending_index(distance)),
                false => (table.descending(head), table.descending_index(distance)),
            };
            simd.load(values.as_ptr().add(index))
        }
    }

    /// Biases of a vector, one by one.
    ///
    /// # Safety
    ///
    /// That of [`Adjust`], for pairs of the tile.
    #[inline(always)]
    unsafe fn gathered<S: Simd, const QUERIES: bool>(
        &self,
        simd: S,
        table: Lookup<'_>,
        row: usize,
        lane: usize,
    ) -> S::F {
        let mut biases = [0.0; WIDEST];
        // SAFETY: pairs of the vector are those of the tile; the array has `WIDEST` elements, and no
        // vector is wider.
        unsafe {
            for (n, bias) in biases[..S::WIDTH].iter_mut().enumerate() {
                let (head, distance) = self.head_and_distance::<QUERIES>(row, lane + n);
                *bias = table.bias(head, distance);
            }
            simd.load(biases.as_ptr())
        }
    }
}
