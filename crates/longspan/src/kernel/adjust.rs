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
use crate::score::Additions;
use crate::simd::math::tanh;
use crate::simd::{Operation, Simd};

/// What additions need of queries: rows of a matrix with a column per query.
pub(crate) const QUERY_TERMS: usize = 4;
const POSITION: usize = 0;
const SLOPE: usize = 1;
/// Two words of dropout, given as bits.
const WORDS: [usize; 2] = [2, 3];

/// What additions need of keys: likewise, their positions, and the words of dropout.
pub(crate) const KEY_TERMS: usize = 2;
const WORD: usize = 1;

/// The position that those of a tile are counted from: that of a query nearby.
pub(crate) fn base(layout: &Layout, query: usize) -> i64 {
    layout.score_positions().map_or(0, |mut positions| positions.query(query as u64))
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
            if !self.slopes.is_empty()
                && let Ok(mut positions) = layout.score_positions()
            {
                for index in 0..count {
                    let position = positions.query((first + index) as u64);
                    *into.at(POSITION, index).first = relative(position, base);
                    *into.at(SLOPE, index).first = self.slopes[head];
                }
            }
            if let Some(dropout) = self.dropout {
                for index in 0..count {
                    let position = layout.query_positions().get((first + index) as u64);
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
            if !self.slopes.is_empty()
                && let Ok(mut positions) = layout.score_positions()
            {
                for index in 0..count {
                    let position = positions.key((first + index) as u64);
                    *into.at(POSITION, index).first = relative(position, base);
                }
            }
            if self.dropout.is_some() {
                for index in 0..count {
                    let position = layout.key_positions().get((first + index) as u64);
                    *into.at(WORD, index).first = f32::from_bits(position.unwrap_or(0) as u32);
                }
            }
        }
    }
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
    pub(crate) additions: Additions<'a>,
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
        let Additions { softcap, slopes, dropout, .. } = self.additions;
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
}
