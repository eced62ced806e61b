//! Operands on the left, in blocks of high and of low parts.

use std::arch::x86_64::*;

use super::super::pack::parts;
use super::super::{BLOCK, SIDE, TERMS};
use super::Parts;
use crate::isa::features;
use crate::simd::{Avx512, Simd};
use crate::tensor::Strided;

features::amx! { enable
    /// Writes the parts of 32 numbers of a row.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves. `count` numbers,
    /// 32 at most, must be readable; others count as 0. Row `row` of two blocks must be writable at
    /// `block`, and no part of what is read.
    unsafe fn write_row(from: *const f32, count: usize, block: *mut u16, row: usize) {
        let mask = ((1_u64 << count) - 1) as u32;
        // SAFETY: the masks keep `count` numbers. Pointers wrap, since what they leave out isn't read.
        unsafe {
            let first = _mm512_maskz_loadu_ps(mask as u16, from);
            let second = _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16));
            let [high, low] = parts::<false>(first, second);
            let at = block.add(row * TERMS);
            _mm512_storeu_si512(at.cast(), high);
            _mm512_storeu_si512(at.add(BLOCK).cast(), low);
        }
    }
}

features::amx! { enable
    /// Rows of numbers that lie side by side.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves. `m` rows of `k`
    /// numbers side by side must be readable, and the blocks of `m × k` numbers writable at `to`, without
    /// one that is read.
    pub(super) unsafe fn left_rows(matrix: Strided, (m, k): (usize, usize), to: Parts) {
        for row in 0..m.next_multiple_of(SIDE) {
            for along in 0..k.div_ceil(TERMS) {
                let count = if row < m { (k - along * TERMS).min(TERMS) } else { 0 };
                let from = matrix.first.wrapping_offset(row as isize * matrix.row);
                // SAFETY: `count` numbers of a row below `m`, up to column `k`, are readable, and the
                // block is one of `m × k` numbers. Both are demanded.
                unsafe {
                    let block = to.at(row / SIDE, along).first.cast_mut();
                    write_row(from.wrapping_add(along * TERMS), count, block, row % SIDE);
                }
            }
        }
    }
}

features::amx! { enable
    /// Columns of numbers that lie side by side: pairs of columns make words, and squares of words are
    /// transposed.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves. `k` columns of
    /// `m` numbers side by side must be readable, and the blocks of `m × k` numbers writable at `to`,
    /// without one that is read.
    pub(super) unsafe fn left_columns(
        simd: Avx512,
        matrix: Strided,
        (m, k): (usize, usize),
        to: Parts,
    ) {
        for along in 0..k.div_ceil(TERMS) {
            let columns = (k - along * TERMS).min(TERMS);
            for across in 0..m.div_ceil(SIDE) {
                let mask = u16::MAX >> (SIDE - (m - across * SIDE).min(SIDE));
                let mut words = [[[0_u32; SIDE]; SIDE]; 2];
                for pair in 0..columns.div_ceil(2) {
                    // SAFETY: the masks keep rows below `m` of columns below `k`, which are demanded; the
                    // words of a pair are a vector's.
                    unsafe {
                        let at = matrix.at(across * SIDE, along * TERMS + 2 * pair).first;
                        let odd = if 2 * pair + 1 < columns { mask } else { 0 };
                        let first = _mm512_maskz_loadu_ps(mask, at);
                        let next = at.wrapping_offset(matrix.column);
                        let second = _mm512_maskz_loadu_ps(odd, next);
                        for (words, part) in words.iter_mut().zip(parts::<true>(first, second)) {
                            _mm512_storeu_si512(words[pair].as_mut_ptr().cast(), part);
                        }
                    }
                }
                for (part, words) in words.iter().enumerate() {
                    // SAFETY: a block is a square of `SIDE` words, one of those that are demanded;
                    // `words` is another.
                    unsafe {
                        let to = to.at(across, along).first.cast_mut().add(part * BLOCK).cast();
                        simd.transpose(words.as_ptr().cast(), SIDE as isize, to, SIDE as isize);
                    }
                }
            }
        }
    }
}

features::amx! { enable
    /// Any strides.
    ///
    /// # Safety
    ///
    /// The CPU must have what [`features::amx`] lists, as an [`Amx`](super::Amx) proves. The `m × k`
    /// numbers must be readable, and their blocks writable at `to`, without one that is read.
    pub(super) unsafe fn left_numbers(matrix: Strided, (m, k): (usize, usize), to: Parts) {
        for row in 0..m.next_multiple_of(SIDE) {
            for along in 0..k.div_ceil(TERMS) {
                let count = if row < m { (k - along * TERMS).min(TERMS) } else { 0 };
                let mut numbers = [0.0; TERMS];
                for (column, number) in numbers[..count].iter_mut().enumerate() {
                    // SAFETY: row and column are below `m` and `k`.
                    *number = unsafe { *matrix.at(row, along * TERMS + column).first };
                }
                // SAFETY: the block is one of `m × k` numbers; the list is 32 long.
                unsafe {
                    let block = to.at(row / SIDE, along).first.cast_mut();
                    write_row(numbers.as_ptr(), count, block, row % SIDE);
                }
            }
        }
    }
}
