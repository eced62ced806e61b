//! Very few queries: keys and values as they lie, and no operand packed.
//!
//! ```text
//! scores    for each vector of keys, each query:
//!               sums[key] ← Σ over vectors of dims: q · k        one vector per key
//!               turn the square of sums, and add its rows        one lane per key
//! values    for each query, a few vectors of dims:
//!               A ← A + Σ over keys: p · v
//! ```
//!
//! One square is transposed for each query, in place of one for each vector of dims; what is
//! narrower than f32 is widened on its way to the multiplication.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use crate::dtype::{Element, ElementType, load_pairs, paired};
use crate::gemm::Rows;
use crate::simd::{LANES, Operation, Simd, WIDEST};
use crate::tensor::Strided;

/// Whether turning sums takes at most half of what turning keys would.
pub(super) fn dots_pay<S: Simd>(rows: usize, dims: usize) -> bool {
    2 * rows <= dims.div_ceil(S::WIDTH)
}

/// Whether pairs of vectors lie in one piece, given how far numbers are from each other.
fn is_plain<S: Simd>(column: isize, dims: usize) -> bool {
    column == 1 && dims.is_multiple_of(2 * S::WIDTH)
}

/// Where number `dim` of a query stands that keys are multiplied with as they lie.
pub(super) fn place<E: Element, S: Simd>(column: isize, dims: usize, dim: usize) -> usize {
    if is_plain::<S>(column, dims) { paired::<E, S>(dim) } else { dim }
}

/// Numbers of a token from `dim` on, of `dims`, with 0 behind them: two vectors, in the order of
/// [`paired`] where they lie in one piece.
///
/// # Safety
///
/// `dims` elements of the token must be readable. Where `PLAIN`, they must lie side by side, and
/// `dim` be at least a pair of vectors before the end.
#[inline(always)]
unsafe fn vectors<S: Simd, E: Element, const PLAIN: bool>(
    simd: S,
    token: Strided<E>,
    dim: usize,
    dims: usize,
) -> [S::F; 2] {
    // SAFETY: a pair of vectors is in the token where `PLAIN`; else elements below `dims` are read.
    // `numbers` has a pair of the widest vectors.
    unsafe {
        if PLAIN {
            return load_pairs(simd, token.first.add(dim));
        }
        let mut numbers = [0.0; 2 * WIDEST];
        for lane in 0..(2 * S::WIDTH).min(dims.saturating_sub(dim)) {
            numbers[lane] = (*token.at(0, dim + lane).first).to_f32();
        }
        [simd.load(numbers.as_ptr()), simd.load(numbers.as_ptr().add(S::WIDTH))]
    }
}

/// The products of `rows` queries with `tokens` keys, in whole vectors of keys.
///
/// # Safety
///
/// tokens × dims elements of `keys` must be readable, one token at least; so must `rows` rows of
/// `queries` of dims, rounded up to pairs of vectors. As many rows of scores of tokens, rounded up
/// to whole vectors, must be writable, and shared with neither.
pub(super) struct Dots<E> {
    pub(super) keys: Strided<E>,
    pub(super) tokens: usize,
    pub(super) dims: usize,
    /// Queries in whole pairs of vectors, with 0 behind them; numbers where [`place`] says.
    pub(super) queries: Rows,
    pub(super) rows: usize,
    pub(super) scores: Rows,
}

impl<E: Element> Operation for Dots<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        // SAFETY: the matrices are as the type demands, and `is_plain` says what it has to.
        unsafe {
            match is_plain::<S>(self.keys.column, self.dims) {
                true => self.scores::<S, true>(simd),
                false => self.scores::<S, false>(simd),
            }
        }
    }
}

impl<E: Element> Dots<E> {
    /// # Safety
    ///
    /// That of [`Dots`]; `PLAIN` only where [`is_plain`].
    #[inline(always)]
    unsafe fn scores<S: Simd, const PLAIN: bool>(&self, simd: S) {
        let mut square = [0.0_f32; WIDEST * WIDEST];
        // SAFETY: tokens are below `tokens`, queries below `rows`; dims go up by pairs of vectors,
        // which `queries` has whole, and keys where `PLAIN`; scores are stored a vector at a time.
        // `Dots` demands all of them. `square` holds one of the widest vectors.
        unsafe {
            for first in (0..self.tokens).step_by(S::WIDTH) {
                for query in 0..self.rows {
                    let q = self.queries.at(query, 0).first;
                    for t in 0..S::WIDTH {
                        // Behind the last key, it again.
                        let key = self.keys.at((first + t).min(self.tokens - 1), 0);
                        let mut sum = simd.splat(0.0);
                        for dim in (0..self.dims).step_by(2 * S::WIDTH) {
                            let k = vectors::<S, E, PLAIN>(simd, key, dim, self.dims);
                            for n in 0..2 {
                                sum = simd.fma(k[n], simd.load(q.add(dim + n * S::WIDTH)), sum);
                            }
                        }
                        simd.store(square.as_mut_ptr().add(t * S::WIDTH), sum);
                    }
                    simd.store(self.scores.at(query, first).first, simd.sums(square.as_ptr()));
                }
                for t in 0..S::WIDTH {
                    let soon = (LANES + first + t) as isize * self.keys.row;
                    simd.prefetch(self.keys.first.wrapping_offset(soon).cast());
                }
            }
        }
    }
}

/// Adds the values of `tokens` keys, each times its probability, to the sums of `rows` queries.
///
/// # Safety
///
/// tokens × dims elements of `values` must be readable, and `rows` rows of `tokens` weights. As
/// many rows of sums of dims, rounded up to pairs of vectors, must be readable and writable, and
/// shared with neither.
pub(super) struct Weigh<E> {
    pub(super) values: Strided<E>,
    pub(super) tokens: usize,
    pub(super) dims: usize,
    pub(super) weights: Rows,
    pub(super) rows: usize,
    /// In whole pairs of vectors.
    pub(super) sums: Rows,
}

/// Pairs of vectors of sums that are in registers together, for even and for odd keys.
const TOGETHER: usize = 2;

/// Keys whose values are summed up before they are added to others, half of them each in even and
/// odd sums: as accurate as [`OVER_TOKENS`](crate::gemm::OVER_TOKENS)(crate::gemm::OVER_TOKENS).
const PIECE: usize = 128;

impl<E: Element> Operation for Weigh<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let plain = is_plain::<S>(self.values.column, self.dims);
        // SAFETY: queries are below `rows`, and `first` below `dims`; `PLAIN` is what `is_plain`
        // says.
        unsafe {
            for query in 0..self.rows {
                for first in (0..self.dims).step_by(TOGETHER * 2 * S::WIDTH) {
                    match (self.dims - first <= 2 * S::WIDTH, plain) {
                        (true, true) => self.columns::<S, 1, true>(simd, query, first),
                        (true, false) => self.columns::<S, 1, false>(simd, query, first),
                        (false, true) => self.columns::<S, TOGETHER, true>(simd, query, first),
                        (false, false) => self.columns::<S, TOGETHER, false>(simd, query, first),
                    }
                }
            }
        }
    }
}

impl<E: Element> Weigh<E> {
    /// `N` pairs of vectors of the sums of a query, from dim `first` on.
    ///
    /// # Safety
    ///
    /// That of [`Weigh`], for a query below `rows` and a dim below `dims` that is a multiple of a
    /// pair of vectors; `PLAIN` only where [`is_plain`].
    #[inline(always)]
    unsafe fn columns<S: Simd, const N: usize, const PLAIN: bool>(
        &self,
        simd: S,
        query: usize,
        first: usize,
    ) {
        let zero = [[simd.splat(0.0); 2]; N];
        // SAFETY: keys are below `tokens`, as `add` demands; sums are only touched in pairs of
        // vectors that begin below `dims`, which `Weigh` demands. `numbers` has a pair of the
        // widest vectors.
        unsafe {
            let weights = self.weights.at(query, 0).first.cast_const();
            let mut total = zero;
            for start in (0..self.tokens).step_by(PIECE) {
                let end = self.tokens.min(start + PIECE);
                let (mut even, mut odd) = (zero, zero);
                let pairs = start + (end - start) / 2 * 2;
                for key in (start..pairs).step_by(2) {
                    self.add::<S, N, PLAIN>(simd, &mut even, weights, key, first);
                    self.add::<S, N, PLAIN>(simd, &mut odd, weights, key + 1, first);
                }
                if pairs < end {
                    self.add::<S, N, PLAIN>(simd, &mut even, weights, pairs, first);
                }
                for n in 0..N {
                    for half in 0..2 {
                        let both = simd.add(even[n][half], odd[n][half]);
                        total[n][half] = simd.add(total[n][half], both);
                    }
                }
            }
            for n in 0..N {
                let dim = first + n * 2 * S::WIDTH;
                if dim >= self.dims {
                    break;
                }
                let to = self.sums.at(query, dim).first;
                if !PLAIN || E::TYPE != ElementType::Bf16 {
                    for half in 0..2 {
                        let to = to.add(half * S::WIDTH);
                        simd.store(to, simd.add(simd.load(to), total[n][half]));
                    }
                    continue;
                }
                let mut numbers = [0.0; 2 * WIDEST];
                for half in 0..2 {
                    simd.store(numbers.as_mut_ptr().add(half * S::WIDTH), total[n][half]);
                }
                for number in 0..2 * S::WIDTH {
                    *to.add(number) += numbers[paired::<E, S>(number)];
                }
            }
        }
    }

    /// Adds the values of one key.
    ///
    /// # Safety
    ///
    /// That of [`columns`](Self::columns), for a key below `tokens` and the weights of the query.
    #[inline(always)]
    unsafe fn add<S: Simd, const N: usize, const PLAIN: bool>(
        &self,
        simd: S,
        sums: &mut [[S::F; 2]; N],
        weights: *const f32,
        key: usize,
        first: usize,
    ) {
        // SAFETY: the key has a weight and `dims` values, as `Weigh` demands.
        unsafe {
            let (weight, row) = (simd.splat(*weights.add(key)), self.values.at(key, 0));
            for n in 0..N {
                let v = vectors::<S, E, PLAIN>(simd, row, first + n * 2 * S::WIDTH, self.dims);
                for half in 0..2 {
                    sums[n][half] = simd.fma(v[half], weight, sums[n][half]);
                }
            }
        }
    }
}
