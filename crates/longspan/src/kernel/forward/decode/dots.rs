//! Very few queries: keys and values as they lie, and no operand packed.
//!
//! ```text
//! scores    for each vector of keys, each few queries:
//!               sums[query, key] ← Σ over vectors of dims: q · k     one vector per query and key
//!               turn the square of sums, and add its rows            one lane per key
//! values    for each few queries, a few vectors of dims:
//!               A ← A + Σ over keys: p · v
//! ```
//!
//! One square is transposed for each query, in place of one for each vector of dims; what is
//! narrower than f32 is widened on its way to the multiplication. Each line of keys and values is
//! requested some tokens ahead: the CPU's own requests stop where it computes in between.

#![expect(clippy::needless_range_loop, reason = "arrays of vectors stay in registers this way")]

use crate::dtype::{Element, ElementType, load_pairs, paired};
use crate::gemm::{OVER_TOKENS, Rows};
use crate::simd::{Operation, Simd, WIDEST};
use crate::tensor::Strided;

/// Queries that share what is loaded of keys and values, where there are registers for their sums.
const SHARED: usize = 4;

/// Whether using tokens as they lie takes less time than transposing or copying them would, given how far
/// their numbers are from each other.
pub(super) fn dots_pay<S: Simd>(rows: usize, column: isize, dims: usize) -> bool {
    let vectors = dims.div_ceil(S::WIDTH);
    match S::REGISTERS >= 32 && is_plain::<S>(column, dims) {
        true => rows <= 2 * vectors,
        false => 2 * rows <= vectors,
    }
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

/// Tokens from the one that is read to the one that is requested: some thousand bytes.
const AHEAD: isize = 32;

/// Requests the same numbers of a later token as [`vectors`] reads, line by line.
#[inline(always)]
fn request<S: Simd, E: Element, const PLAIN: bool>(simd: S, token: Strided<E>, dim: usize) {
    let soon = token.first.wrapping_offset(AHEAD * token.row).wrapping_add(dim).cast::<u8>();
    if PLAIN {
        for byte in (0..2 * S::WIDTH * size_of::<E>()).step_by(64) {
            simd.prefetch(soon.wrapping_add(byte));
        }
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

/// Sums of a query and each of as many keys as a vector has lanes.
type Square = [f32; WIDEST * WIDEST];

impl<E: Element> Operation for Dots<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let plain = is_plain::<S>(self.keys.column, self.dims);
        let mut squares = [[0.0; WIDEST * WIDEST]; SHARED];
        // SAFETY: the matrices are as the type demands, `is_plain` says what it has to, and `Q` queries
        // from one on that is at most `rows - Q` are below `rows`.
        unsafe {
            for first in (0..self.tokens).step_by(S::WIDTH) {
                let mut query = 0;
                while S::REGISTERS >= 32 && query + SHARED <= self.rows {
                    let at = (query, first);
                    match plain {
                        true => self.scores::<S, SHARED, true>(simd, &mut squares, at),
                        false => self.scores::<S, SHARED, false>(simd, &mut squares, at),
                    }
                    query += SHARED;
                }
                for query in query..self.rows {
                    let at = (query, first);
                    match plain {
                        true => self.scores::<S, 1, true>(simd, &mut squares, at),
                        false => self.scores::<S, 1, false>(simd, &mut squares, at),
                    }
                }
            }
        }
    }
}

impl<E: Element> Dots<E> {
    /// The scores of `Q` queries and a vector of keys.
    ///
    /// # Safety
    ///
    /// That of [`Dots`]; `query + Q` queries must be among the rows, `first` below `tokens`, a multiple of
    /// the vector's width; `PLAIN` only where [`is_plain`].
    #[inline(always)]
    unsafe fn scores<S: Simd, const Q: usize, const PLAIN: bool>(
        &self,
        simd: S,
        squares: &mut [Square; SHARED],
        (query, first): (usize, usize),
    ) {
        // SAFETY: tokens are below `tokens`, queries below `rows`; dims go up by pairs of vectors,
        // which `queries` has whole, and keys where `PLAIN`; scores are stored a vector at a time.
        // `Dots` demands all of them. A square holds one of the widest vectors.
        unsafe {
            for t in 0..S::WIDTH {
                // Behind the last key, it again.
                let key = self.keys.at((first + t).min(self.tokens - 1), 0);
                let mut sums = [simd.splat(0.0); Q];
                for dim in (0..self.dims).step_by(2 * S::WIDTH) {
                    let k = vectors::<S, E, PLAIN>(simd, key, dim, self.dims);
                    if query == 0 {
                        request::<S, E, PLAIN>(simd, key, dim);
                    }
                    for n in 0..2 {
                        for q in 0..Q {
                            let at = self.queries.at(query + q, dim + n * S::WIDTH).first;
                            sums[q] = simd.fma(k[n], simd.load(at), sums[q]);
                        }
                    }
                }
                for q in 0..Q {
                    simd.store(squares[q].as_mut_ptr().add(t * S::WIDTH), sums[q]);
                }
            }
            for q in 0..Q {
                let to = self.scores.at(query + q, first).first;
                simd.store(to, simd.sums(squares[q].as_ptr()));
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

/// Pairs of vectors of sums per query that are in registers together.
const TOGETHER: usize = 2;

impl<E: Element> Operation for Weigh<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let plain = is_plain::<S>(self.values.column, self.dims);
        let mut query = 0;
        // SAFETY: `Q` queries from one on that is at most `rows - Q` are below `rows`; `PLAIN` is what
        // `is_plain` says. One query has sums of even and of odd keys, so that enough of them are
        // independent.
        unsafe {
            while S::REGISTERS >= 32 && query + SHARED <= self.rows {
                match plain {
                    true => self.queries::<S, SHARED, 1, true>(simd, query),
                    false => self.queries::<S, SHARED, 1, false>(simd, query),
                }
                query += SHARED;
            }
            for query in query..self.rows {
                match plain {
                    true => self.queries::<S, 1, 2, true>(simd, query),
                    false => self.queries::<S, 1, 2, false>(simd, query),
                }
            }
        }
    }
}

impl<E: Element> Weigh<E> {
    /// All dims of `Q` queries.
    ///
    /// # Safety
    ///
    /// That of [`Weigh`], for queries below `rows`; `PLAIN` only where [`is_plain`].
    #[inline(always)]
    unsafe fn queries<S: Simd, const Q: usize, const W: usize, const PLAIN: bool>(
        &self,
        simd: S,
        query: usize,
    ) {
        for first in (0..self.dims).step_by(TOGETHER * 2 * S::WIDTH) {
            // SAFETY: this function demands what is left, and `first` is below `dims`.
            unsafe {
                match self.dims - first <= 2 * S::WIDTH {
                    true => self.columns::<S, Q, W, 1, PLAIN>(simd, query, first),
                    false => self.columns::<S, Q, W, TOGETHER, PLAIN>(simd, query, first),
                }
            }
        }
    }

    /// `N` pairs of vectors of the sums of `Q` queries, from dim `first` on; keys are added to `W`
    /// sums in turn.
    ///
    /// # Safety
    ///
    /// That of [`Weigh`], for queries below `rows` and a dim below `dims` that is a multiple of a
    /// pair of vectors; `PLAIN` only where [`is_plain`].
    #[inline(always)]
    unsafe fn columns<
        S: Simd,
        const Q: usize,
        const W: usize,
        const N: usize,
        const PLAIN: bool,
    >(
        &self,
        simd: S,
        query: usize,
        first: usize,
    ) {
        let zero = [[[simd.splat(0.0); 2]; N]; Q];
        // Keys whose values are summed up before they are added to others.
        let piece = OVER_TOKENS * W;
        // SAFETY: keys are below `tokens`, as `add` demands; sums are only touched in pairs of
        // vectors that begin below `dims`, which `Weigh` demands.
        unsafe {
            let mut total = zero;
            for start in (0..self.tokens).step_by(piece) {
                let end = self.tokens.min(start + piece);
                let mut ways = [zero; W];
                let mut key = start;
                while key + W <= end {
                    for way in 0..W {
                        self.add::<S, Q, N, PLAIN>(simd, &mut ways[way], (query, key + way), first);
                    }
                    key += W;
                }
                for key in key..end {
                    self.add::<S, Q, N, PLAIN>(simd, &mut ways[0], (query, key), first);
                }
                for q in 0..Q {
                    for n in 0..N {
                        for half in 0..2 {
                            let mut sum = ways[0][q][n][half];
                            for way in &ways[1..] {
                                sum = simd.add(sum, way[q][n][half]);
                            }
                            total[q][n][half] = simd.add(total[q][n][half], sum);
                        }
                    }
                }
            }
            for q in 0..Q {
                for n in 0..N {
                    let dim = first + n * 2 * S::WIDTH;
                    if dim < self.dims {
                        self.store::<S, PLAIN>(simd, (query + q, dim), total[q][n]);
                    }
                }
            }
        }
    }

    /// Adds to a pair of vectors of the sums.
    ///
    /// # Safety
    ///
    /// That of [`Weigh`], for a query below `rows` and a dim below `dims` that is a multiple of a
    /// pair of vectors; `PLAIN` as for the [values](vectors).
    #[inline(always)]
    unsafe fn store<S: Simd, const PLAIN: bool>(
        &self,
        simd: S,
        (query, dim): (usize, usize),
        pair: [S::F; 2],
    ) {
        // SAFETY: the sums are in whole pairs of vectors, as `Weigh` demands; `numbers` has a pair of the
        // widest vectors.
        unsafe {
            let to = self.sums.at(query, dim).first;
            if !PLAIN || E::TYPE != ElementType::Bf16 {
                for half in 0..2 {
                    let to = to.add(half * S::WIDTH);
                    simd.store(to, simd.add(simd.load(to), pair[half]));
                }
                return;
            }
            let mut numbers = [0.0; 2 * WIDEST];
            for half in 0..2 {
                simd.store(numbers.as_mut_ptr().add(half * S::WIDTH), pair[half]);
            }
            for number in 0..2 * S::WIDTH {
                *to.add(number) += numbers[paired::<E, S>(number)];
            }
        }
    }

    /// Adds the values of one key.
    ///
    /// # Safety
    ///
    /// That of [`columns`](Self::columns), for a key below `tokens`.
    #[inline(always)]
    unsafe fn add<S: Simd, const Q: usize, const N: usize, const PLAIN: bool>(
        &self,
        simd: S,
        sums: &mut [[[S::F; 2]; N]; Q],
        (query, key): (usize, usize),
        first: usize,
    ) {
        // SAFETY: the key has a weight per query and `dims` values, as `Weigh` demands.
        unsafe {
            let row = self.values.at(key, 0);
            for n in 0..N {
                let dim = first + n * 2 * S::WIDTH;
                let v = vectors::<S, E, PLAIN>(simd, row, dim, self.dims);
                if query == 0 {
                    request::<S, E, PLAIN>(simd, row, dim);
                }
                for q in 0..Q {
                    let weight = simd.splat(*self.weights.at(query + q, key).first);
                    for half in 0..2 {
                        sums[q][n][half] = simd.fma(v[half], weight, sums[q][n][half]);
                    }
                }
            }
        }
    }
}
