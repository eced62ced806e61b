//! Tokens of a tile, between the caller's rows and lanes.

use crate::dtype::{Element, ElementType, load, store};
use crate::gemm::Rows;
use crate::simd::{LANES, Operation, Simd, WIDEST};
use crate::tensor::Strided;

/// The widest vector there is, squared.
const SQUARE: usize = WIDEST * WIDEST;

/// Writes the first `tokens` rows of `source[tokens × dims]` as columns `lane..lane + tokens` of
/// `target[dims × LANES]`. The tokens that follow a tile later are asked for meanwhile.
///
/// # Safety
///
/// The rows must be readable, the columns be below `LANES` and writable, and no number be in both.
pub(crate) struct ToLanes<E> {
    pub(crate) source: Strided<E>,
    pub(crate) tokens: usize,
    pub(crate) dims: usize,
    pub(crate) target: Rows,
    pub(crate) lane: usize,
}

impl<E: Element> Operation for ToLanes<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let ToLanes { source, tokens, dims, target, lane } = self;
        debug_assert!(lane + tokens <= LANES);
        let mut square = [0.0_f32; SQUARE];
        // SAFETY: tokens and dims stay below those of both matrices, which the type demands:
        // squares take the whole vectors of both, `copy` the others. Rows of a square are only
        // loaded as vectors where their elements lie side by side.
        unsafe {
            let squares = if source.column == 1 { tokens / S::WIDTH } else { 0 };
            let whole = dims / S::WIDTH * S::WIDTH;
            for token in (0..squares * S::WIDTH).step_by(S::WIDTH) {
                for dim in (0..whole).step_by(S::WIDTH) {
                    let to = target.at(dim, lane + token);
                    let from = source.at(token, dim);
                    if !source.is_far_apart() {
                        for t in 0..S::WIDTH as isize {
                            let soon = (LANES as isize + t) * source.row;
                            simd.prefetch(from.first.wrapping_offset(soon).cast());
                        }
                    }
                    let (first, row) = if E::TYPE == ElementType::F32 {
                        (from.first.cast(), from.row)
                    } else {
                        for t in 0..S::WIDTH {
                            let x = load(simd, from.at(t, 0).first);
                            simd.store(square.as_mut_ptr().add(t * S::WIDTH), x);
                        }
                        (square.as_ptr(), S::WIDTH as isize)
                    };
                    simd.transpose(first, row, to.first, to.row as isize);
                }
            }
            let copy = |tokens: std::ops::Range<usize>, dims: std::ops::Range<usize>| {
                for token in tokens {
                    let from = source.at(token, 0);
                    for dim in dims.clone() {
                        *target.at(dim, lane + token).first = (*from.at(0, dim).first).to_f32();
                    }
                }
            };
            copy(0..squares * S::WIDTH, whole..dims);
            copy(squares * S::WIDTH..tokens, 0..dims);
        }
    }
}

/// How a number that leaves the lanes meets the one that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meet {
    /// It replaces it.
    Replace,
    /// It is added to it.
    Add,
}

/// Writes columns `lane..lane + tokens` of `source[dims × LANES]`, each multiplied by its factor
/// where there are factors, as the rows of `target[tokens × dims]`. The source is used up.
///
/// # Safety
///
/// The columns must be readable and writable and their factors readable, the rows writable, and
/// readable where they are added to; no number may be in two of them.
pub(crate) struct FromLanes<E> {
    pub(crate) source: Rows,
    pub(crate) lane: usize,
    /// A factor per lane, or null.
    pub(crate) factors: *const f32,
    pub(crate) tokens: usize,
    pub(crate) dims: usize,
    pub(crate) target: Strided<E>,
    pub(crate) meet: Meet,
}

impl<E: Element> Operation for FromLanes<E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let FromLanes { source, lane, factors, tokens, dims, target, meet } = self;
        let mut square = [0.0_f32; SQUARE];
        let width = S::WIDTH as isize;
        // SAFETY: as in `ToLanes`, with source and target exchanged.
        unsafe {
            let squares = if target.column == 1 { tokens / S::WIDTH } else { 0 };
            let whole = dims / S::WIDTH * S::WIDTH;
            if !factors.is_null() && squares > 0 {
                for token in (0..squares * S::WIDTH).step_by(S::WIDTH) {
                    let factor = simd.load(factors.add(lane + token));
                    for dim in 0..whole {
                        let at = source.at(dim, lane + token).first;
                        simd.store(at, simd.mul(simd.load(at), factor));
                    }
                }
            }
            for token in (0..squares * S::WIDTH).step_by(S::WIDTH) {
                for dim in (0..whole).step_by(S::WIDTH) {
                    let from = source.at(dim, lane + token);
                    let to = target.at(token, dim);
                    if meet == Meet::Replace && E::TYPE == ElementType::F32 {
                        let into = to.first.cast_mut().cast();
                        simd.transpose(from.first, from.row as isize, into, to.row);
                        continue;
                    }
                    simd.transpose(from.first, from.row as isize, square.as_mut_ptr(), width);
                    for t in 0..S::WIDTH {
                        let x = simd.load(square.as_ptr().add(t * S::WIDTH));
                        let into = to.at(t, 0).first.cast_mut();
                        let x = match meet {
                            Meet::Replace => x,
                            Meet::Add => simd.add(load(simd, into), x),
                        };
                        store(simd, into, x);
                    }
                }
            }
            let copy = |tokens: std::ops::Range<usize>, dims: std::ops::Range<usize>| {
                for token in tokens {
                    let factor = if factors.is_null() { 1.0 } else { *factors.add(lane + token) };
                    for dim in dims.clone() {
                        let x = *source.at(dim, lane + token).first * factor;
                        let to = target.at(token, dim).first.cast_mut();
                        let x = if meet == Meet::Add { (*to).to_f32() + x } else { x };
                        *to = E::from_f32(x);
                    }
                }
            };
            copy(0..squares * S::WIDTH, whole..dims);
            copy(squares * S::WIDTH..tokens, 0..dims);
        }
    }
}

/// Exchanges rows and columns of a square of bits: bit `j` of word `i` becomes bit `i` of word `j`.
pub(crate) fn transpose_bits(words: &mut [u64; 64]) {
    let mut half = 32;
    let mut low = u64::MAX >> 32;
    while half != 0 {
        let mut i = 0;
        while i < 64 {
            let swap = ((words[i] >> half) ^ words[i + half]) & low;
            words[i] ^= swap << half;
            words[i + half] ^= swap;
            i = (i + half + 1) & !half;
        }
        half >>= 1;
        low ^= low << half;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_turn() {
        let mut words = [0_u64; 64];
        let bit = |i: usize, j: usize| (i * 37 + j * 101 + i * j) % 7 < 3;
        for (i, word) in words.iter_mut().enumerate() {
            for j in 0..64 {
                *word |= u64::from(bit(i, j)) << j;
            }
        }
        transpose_bits(&mut words);
        for (j, word) in words.iter().enumerate() {
            for i in 0..64 {
                assert_eq!(word >> i & 1 != 0, bit(i, j), "{i}, {j}");
            }
        }
    }
}
