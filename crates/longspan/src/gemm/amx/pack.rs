//! Operands in blocks of the matrix unit.

use std::arch::x86_64::*;

use super::{BLOCK, Blocks, SIDE, TERMS};
use crate::gemm::Rows;
use crate::isa::features;
use crate::simd::{Avx512, Simd};
use crate::tensor::Strided;

features::amx! { enable
    /// Rows of elements that lie side by side: a block's rows are pieces of them.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves.
    /// `m` rows of `k` elements side by side must be readable, and the blocks of `m × k` elements
    /// writable at `to`, without one that is read.
    pub(super) unsafe fn left_rows(matrix: Strided<u16>, (m, k): (usize, usize), to: Blocks) {
        let along = k.div_ceil(TERMS);
        for row in 0..m.next_multiple_of(SIDE) {
            for block in 0..along {
                let count = if row < m { (k - block * TERMS).min(TERMS) } else { 0 };
                let mask = u32::MAX.checked_shr((TERMS - count) as u32).unwrap_or(0);
                // SAFETY: the mask keeps `count` elements of a row below `m`, up to column `k`; the
                // block is one of `m × k` elements. Both are demanded. The pointers wrap, since a
                // row past the last one isn't read.
                unsafe {
                    let from = matrix.first.wrapping_offset(row as isize * matrix.row);
                    let from = from.wrapping_add(block * TERMS);
                    let numbers = _mm512_maskz_loadu_epi16(mask, from.cast());
                    let at = to.at(row / SIDE, block).first.cast_mut().add(row % SIDE * TERMS);
                    _mm512_storeu_si512(at.cast(), numbers);
                }
            }
        }
    }
}

features::amx! { enable
    /// Columns of elements that lie side by side: pairs of columns make words, and a square of
    /// words is transposed.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves. `k`
    /// columns of `m` elements side by side must be readable, and the blocks of `m × k` elements
    /// writable at `to`, without one that is read.
    pub(super) unsafe fn left_columns(
        simd: Avx512,
        matrix: Strided<u16>,
        (m, k): (usize, usize),
        to: Blocks,
    ) {
        for block in 0..k.div_ceil(TERMS) {
            let columns = (k - block * TERMS).min(TERMS);
            for across in 0..m.div_ceil(SIDE) {
                let mask = u16::MAX >> (SIDE - (m - across * SIDE).min(SIDE));
                let mut words = [[0_u32; SIDE]; SIDE];
                for (pair, words) in words[..columns.div_ceil(2)].iter_mut().enumerate() {
                    // SAFETY: the masks keep rows below `m` of columns below `k`, which are
                    // demanded; the words of a pair are a vector's.
                    unsafe {
                        let at = matrix.at(across * SIDE, block * TERMS + 2 * pair).first;
                        let second = if 2 * pair + 1 < columns { mask } else { 0 };
                        let low = _mm256_maskz_loadu_epi16(mask, at.cast());
                        let next = at.wrapping_offset(matrix.column);
                        let high = _mm256_maskz_loadu_epi16(second, next.cast());
                        let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high));
                        let both = _mm512_or_si512(_mm512_cvtepu16_epi32(low), high);
                        _mm512_storeu_si512(words.as_mut_ptr().cast(), both);
                    }
                }
                // SAFETY: a block is a square of `SIDE` words, one of those that are demanded;
                // `words` is another.
                unsafe {
                    let to = to.at(across, block).first.cast_mut();
                    simd.transpose(words.as_ptr().cast(), SIDE as isize, to.cast(), SIDE as isize)
                };
            }
        }
    }
}

/// Any strides.
///
/// # Safety
///
/// The `m × k` elements must be readable, and their blocks writable at `to`, without one that is
/// read.
pub(super) unsafe fn left_numbers(matrix: Strided<u16>, (m, k): (usize, usize), to: Blocks) {
    for row in 0..m.next_multiple_of(SIDE) {
        for column in 0..k.next_multiple_of(TERMS) {
            // SAFETY: a number is read where its row and column are below `m` and `k`; it is
            // written in the blocks of so many elements. Both are demanded.
            unsafe {
                let block = to.at(row / SIDE, column / TERMS).first.cast_mut();
                let inside = row < m && column < k;
                *block.add(row % SIDE * TERMS + column % TERMS) =
                    if inside { *matrix.at(row, column).first } else { 0 };
            }
        }
    }
}

features::amx! { enable
    /// Two vectors of f32, rounded: numbers of `first`, then of `second`.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves.
    pub(super) fn rounded(first: __m512, second: __m512) -> __m512i {
        // SAFETY: both are 512 bits without a meaning of their own.
        unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)) }
    }
}

features::amx! { enable
    /// Numbers of two rows, one row's behind the other's, as pairs.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves.
    pub(super) fn interleaved(rows: __m512i) -> __m512i {
        let mut order = [0_u16; 32];
        for i in 0..16 {
            (order[2 * i], order[2 * i + 1]) = (i as u16, 16 + i as u16);
        }
        // SAFETY: `order` is a vector's 64 bytes.
        _mm512_permutexvar_epi16(unsafe { _mm512_loadu_si512(order.as_ptr().cast()) }, rows)
    }
}

features::amx! { enable
    /// The high part of each number: the nearest one of 8 bits, which a bf16 number is. Of infinite
    /// numbers it is finite, and what is left of them infinite.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves.
    fn high(x: __m512) -> __m512 {
        const LARGEST: f32 = f32::from_bits(0x7f7f_0000);
        // The smaller one in size, with the sign of `x`.
        let x = _mm512_range_ps::<0b0010>(x, _mm512_set1_ps(LARGEST));
        let halfway = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        _mm512_castsi512_ps(_mm512_and_si512(halfway, _mm512_set1_epi32(-0x1_0000)))
    }
}

features::amx! { enable
    /// The high and the low parts of two vectors of f32, as pairs of one of each or one vector behind
    /// the other. Of numbers that aren't finite, NaN or infinity is the low part.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves.
    pub(super) fn parts<const PAIRS: bool>(first: __m512, second: __m512) -> [__m512i; 2] {
        let highs = [high(first), high(second)];
        let lows = rounded(_mm512_sub_ps(first, highs[0]), _mm512_sub_ps(second, highs[1]));
        let highs = highs.map(|high| _mm512_castps_si512(high));
        if PAIRS {
            let even = _mm512_srli_epi32::<16>(highs[0]);
            [_mm512_or_si512(even, highs[1]), interleaved(lows)]
        } else {
            let mut order = [0_u16; 32];
            for (i, word) in order.iter_mut().enumerate() {
                *word = 2 * i as u16 + 1;
            }
            // SAFETY: `order` is a vector's 64 bytes.
            let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
            [_mm512_permutex2var_epi16(highs[0], order, highs[1]), lows]
        }
    }
}

features::amx! { enable
    /// Pairs of rows of f32, rounded or in [`parts`], and interleaved.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves. `k` rows
    /// of `n` elements, whole vectors, must be readable, and the blocks of `k × n` elements
    /// writable at `to`, without one that is read.
    pub(super) unsafe fn right<const PARTS: usize>(matrix: Rows, k: usize, n: usize, to: *mut u16) {
        let all = Blocks::<PARTS> { first: to, along: k.div_ceil(TERMS) };
        // SAFETY: rows below `k` are read, a vector at a time up to `n`. Blocks are those of `k × n`
        // elements. Both are demanded.
        unsafe {
            for pair in 0..all.along * SIDE {
                for column in (0..n).step_by(SIDE) {
                    let row = |row: usize| match row < k {
                        true => _mm512_loadu_ps(matrix.at(row, column).first),
                        false => _mm512_setzero_ps(),
                    };
                    let (first, second) = (row(2 * pair), row(2 * pair + 1));
                    let block = all.at(column / SIDE, pair / SIDE).first.cast_mut();
                    let at = block.add(pair % SIDE * TERMS);
                    if PARTS == 1 {
                        let numbers = interleaved(rounded(first, second));
                        _mm512_storeu_si512(at.cast(), numbers);
                    } else {
                        let [high, low] = parts::<true>(first, second);
                        _mm512_storeu_si512(at.cast(), high);
                        _mm512_storeu_si512(at.add(BLOCK).cast(), low);
                    }
                }
            }
        }
    }
}
