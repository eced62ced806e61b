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
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves.
    /// `count` elements, 16 at most, must be readable.
    unsafe fn load_some(from: *const f32, count: usize) -> __m512 {
        let mask = ((1_u32 << count) - 1) as __mmask16;
        // SAFETY: the mask keeps `count` elements, which are demanded.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

features::amx! { enable
    /// Pairs of rows of f32, rounded and interleaved.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves. `k` rows
    /// of `n` elements, whole vectors, must be readable, and the blocks of `k × n` elements
    /// writable at `to`, without one that is read.
    pub(super) unsafe fn right_rounded(matrix: Rows, k: usize, n: usize, to: *mut u16) {
        let along = k.div_ceil(TERMS);
        // Word i of the first row, then word i of the second, which lie 16 further.
        let mut order = [0_u16; 32];
        for i in 0..16 {
            (order[2 * i], order[2 * i + 1]) = (i as u16, 16 + i as u16);
        }
        // SAFETY: rows below `k` are read, a vector at a time up to `n`; of others nothing is, so
        // that their pointers may wrap. Blocks are those of `k × n` elements. Both are demanded.
        unsafe {
            let order = _mm512_loadu_si512(order.as_ptr().cast());
            for pair in 0..along * SIDE {
                for column in (0..n).step_by(SIDE) {
                    let row = |row: usize| {
                        let inside = if row < k { 16 } else { 0 };
                        load_some(matrix.first.wrapping_add(row * matrix.row + column), inside)
                    };
                    let numbers = _mm512_cvtne2ps_pbh(row(2 * pair + 1), row(2 * pair));
                    let numbers = std::mem::transmute::<__m512bh, __m512i>(numbers);
                    let numbers = _mm512_permutexvar_epi16(order, numbers);
                    let block = (column / SIDE) * along + pair / SIDE;
                    let at = to.add(block * BLOCK + pair % SIDE * TERMS);
                    _mm512_storeu_si512(at.cast(), numbers);
                }
            }
        }
    }
}
