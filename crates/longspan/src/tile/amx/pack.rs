//! Operands in blocks of the matrix unit.

use std::arch::x86_64::*;

use super::{BLOCK, SIDE, TERMS};
use crate::simd::{Avx512, Operation, Simd};
use crate::tile::{Rows, Strided};

/// Rows of numbers that lie side by side: a block's rows are pieces of them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn left_rows(matrix: Strided<u16>, m: usize, k: usize, to: *mut u16) {
    let along = k.div_ceil(TERMS);
    for row in 0..m.next_multiple_of(SIDE) {
        for block in 0..along {
            let count = if row < m { (k - block * TERMS).min(TERMS) } else { 0 };
            let mask = u32::MAX.checked_shr((TERMS - count) as u32).unwrap_or(0);
            // SAFETY: only numbers of the matrix are read; the room holds all blocks.
            unsafe {
                let from = matrix.first.wrapping_offset(row as isize * matrix.row);
                let from = from.wrapping_add(block * TERMS);
                let numbers = _mm512_maskz_loadu_epi16(mask, from.cast());
                let at = to.add(((row / SIDE) * along + block) * BLOCK + row % SIDE * TERMS);
                _mm512_storeu_si512(at.cast(), numbers);
            }
        }
    }
}

/// Columns of numbers that lie side by side: pairs of columns make words, and a square of words is
/// turned.
pub(super) unsafe fn left_columns(
    simd: Avx512,
    matrix: Strided<u16>,
    m: usize,
    k: usize,
    to: *mut u16,
) {
    let along = k.div_ceil(TERMS);
    for across in 0..m.div_ceil(SIDE) {
        for block in 0..along {
            let at = to.wrapping_add((across * along + block) * BLOCK);
            let rows = (m - across * SIDE).min(SIDE);
            let columns = (k - block * TERMS).min(TERMS);
            // SAFETY: the caller's; the unit is only there with AVX-512.
            unsafe {
                let from = matrix.at(across * SIDE, block * TERMS);
                simd.call(Turn { from, rows, columns, to: at });
            }
        }
    }
}

struct Turn {
    from: Strided<u16>,
    rows: usize,
    columns: usize,
    to: *mut u16,
}

impl Operation for Turn {
    type Output = ();

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) {
        let Turn { from, rows, columns, to } = self;
        let mut words = [[0_u32; SIDE]; SIDE];
        // SAFETY: whoever makes the operation vouches for these numbers and a block of room.
        unsafe {
            for (pair, words) in words.iter_mut().enumerate() {
                let first = from.first.wrapping_offset(2 * pair as isize * from.column);
                let second = first.wrapping_offset(from.column);
                let count = columns.saturating_sub(2 * pair).min(2);
                for (row, word) in words[..rows].iter_mut().enumerate() {
                    let low = if count > 0 { *first.add(row) } else { 0 };
                    let high = if count > 1 { *second.add(row) } else { 0 };
                    *word = u32::from(low) | u32::from(high) << 16;
                }
            }
            let (from, to) = (words.as_ptr().cast::<f32>(), to.cast::<f32>());
            for row in (0..SIDE).step_by(S::WIDTH) {
                for column in (0..SIDE).step_by(S::WIDTH) {
                    let (from, to) = (from.add(row * SIDE + column), to.add(column * SIDE + row));
                    simd.transpose(from, SIDE as isize, to, SIDE as isize);
                }
            }
        }
    }
}

/// Any strides.
pub(super) unsafe fn left_numbers(matrix: Strided<u16>, m: usize, k: usize, to: *mut u16) {
    let along = k.div_ceil(TERMS);
    for row in 0..m.next_multiple_of(SIDE) {
        for column in 0..along * TERMS {
            let at = ((row / SIDE) * along + column / TERMS) * BLOCK
                + row % SIDE * TERMS
                + column % TERMS;
            // SAFETY: only numbers of the matrix are read; the room holds all blocks.
            unsafe {
                let inside = row < m && column < k;
                *to.add(at) = if inside { *matrix.at(row, column).first } else { 0 };
            }
        }
    }
}

/// Rows of f32, rounded.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn left_rounded(matrix: Strided, m: usize, k: usize, to: *mut u16) {
    let along = k.div_ceil(TERMS);
    for row in 0..m.next_multiple_of(SIDE) {
        for block in 0..along {
            let count = if row < m { (k - block * TERMS).min(TERMS) } else { 0 };
            // SAFETY: only numbers of the matrix are read; the room holds all blocks.
            unsafe {
                let from = matrix.first.wrapping_offset(row as isize * matrix.row);
                let from = from.wrapping_add(block * TERMS);
                let low = load_some(from, count.min(16));
                let high = load_some(from.wrapping_add(16), count.saturating_sub(16));
                let numbers = _mm512_cvtne2ps_pbh(high, low);
                let at = to.add(((row / SIDE) * along + block) * BLOCK + row % SIDE * TERMS);
                _mm512_storeu_si512(at.cast(), std::mem::transmute::<__m512bh, __m512i>(numbers));
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn load_some(from: *const f32, count: usize) -> __m512 {
    let mask = ((1_u32 << count) - 1) as __mmask16;
    // SAFETY: the caller has so many numbers.
    unsafe { _mm512_maskz_loadu_ps(mask, from) }
}

/// Pairs of rows of f32, rounded and interleaved.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) unsafe fn right_rounded(matrix: Rows, k: usize, n: usize, to: *mut u16) {
    let along = k.div_ceil(TERMS);
    // Word i of the first row, then word i of the second, which lie 16 further.
    let mut order = [0_u16; 32];
    for i in 0..16 {
        (order[2 * i], order[2 * i + 1]) = (i as u16, 16 + i as u16);
    }
    // SAFETY: rows of the matrix are whole vectors; the room holds all blocks.
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
