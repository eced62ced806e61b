//! Sixteen lanes: AVX-512.

use std::arch::x86_64::*;

use super::tiles::RegisterTiles;
use super::{Operation, Simd};
use crate::isa::features;

/// The token: this CPU has what [`features::avx512`] lists.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    ///
    /// [`Isa::Avx512`](crate::Isa::Avx512) must be available.
    pub(crate) unsafe fn new_unchecked() -> Self {
        Avx512(())
    }
}

features::avx512! { enable
    /// # Safety
    ///
    /// That of [`Simd::call`]; the CPU must have what [`features::avx512`] lists, as a token
    /// proves.
    unsafe fn compiled<O: Operation>(simd: Avx512, operation: O) -> O::Output {
        // SAFETY: `eval` has the condition of `call`, which is that of this function.
        unsafe { operation.eval(simd) }
    }
}

/// Instructions of this set, in methods of the token.
macro_rules! have {
    ($e:expr) => {
        // SAFETY: `new_unchecked`, the only way to a token, demands that the CPU has the set. Where
        // memory is read or written, the method is one whose condition in `Simd` is that it may be.
        unsafe { $e }
    };
}

super::tiles::x86_64::register_tiles! {
    "zmm": avx512, spread 28,
    all {
        "zmm0" "zmm1" "zmm2" "zmm3" "zmm4" "zmm5" "zmm6" "zmm7"
        "zmm8" "zmm9" "zmm10" "zmm11" "zmm12" "zmm13" "zmm14" "zmm15"
        "zmm16" "zmm17" "zmm18" "zmm19" "zmm20" "zmm21" "zmm22" "zmm23"
        "zmm24" "zmm25" "zmm26" "zmm27" "zmm28" "zmm29" "zmm30" "zmm31"
    }
    fn tiles_of_6: right { 24 @ 0, 25 @ 64, 26 @ 128, 27 @ 192 }, left { "{left}" "{lower}" } {
        "{left}" => 0 "zmm24" @ 0, 1 "zmm25" @ 64, 2 "zmm26" @ 128, 3 "zmm27" @ 192;
        "{left} + {left_row}" => 4 "zmm24" @ 0, 5 "zmm25" @ 64, 6 "zmm26" @ 128, 7 "zmm27" @ 192;
        "{left} + 2 * {left_row}" => 8 "zmm24" @ 0, 9 "zmm25" @ 64, 10 "zmm26" @ 128, 11 "zmm27" @ 192;
        "{lower}" => 12 "zmm24" @ 0, 13 "zmm25" @ 64, 14 "zmm26" @ 128, 15 "zmm27" @ 192;
        "{lower} + {left_row}" => 16 "zmm24" @ 0, 17 "zmm25" @ 64, 18 "zmm26" @ 128, 19 "zmm27" @ 192;
        "{lower} + 2 * {left_row}" => 20 "zmm24" @ 0, 21 "zmm25" @ 64, 22 "zmm26" @ 128, 23 "zmm27" @ 192;
    }
    fn tiles_of_4: right { 24 @ 0, 25 @ 64, 26 @ 128, 27 @ 192 }, left { "{left}" "{lower}" } {
        "{left}" => 0 "zmm24" @ 0, 1 "zmm25" @ 64, 2 "zmm26" @ 128, 3 "zmm27" @ 192;
        "{left} + {left_row}" => 4 "zmm24" @ 0, 5 "zmm25" @ 64, 6 "zmm26" @ 128, 7 "zmm27" @ 192;
        "{left} + 2 * {left_row}" => 8 "zmm24" @ 0, 9 "zmm25" @ 64, 10 "zmm26" @ 128, 11 "zmm27" @ 192;
        "{lower}" => 12 "zmm24" @ 0, 13 "zmm25" @ 64, 14 "zmm26" @ 128, 15 "zmm27" @ 192;
    }
    fn narrow_tiles_of_8: right { 24 @ 0, 25 @ 64 }, left { "{left}" "{lower}" } {
        "{left}" => 0 "zmm24" @ 0, 1 "zmm25" @ 64;
        "{left} + {left_row}" => 2 "zmm24" @ 0, 3 "zmm25" @ 64;
        "{left} + 2 * {left_row}" => 4 "zmm24" @ 0, 5 "zmm25" @ 64;
        "{lower}" => 6 "zmm24" @ 0, 7 "zmm25" @ 64;
        "{lower} + {left_row}" => 8 "zmm24" @ 0, 9 "zmm25" @ 64;
        "{lower} + 2 * {left_row}" => 10 "zmm24" @ 0, 11 "zmm25" @ 64;
        "{lower} + {three_rows}" => 12 "zmm24" @ 0, 13 "zmm25" @ 64;
        "{lower} + 4 * {left_row}" => 14 "zmm24" @ 0, 15 "zmm25" @ 64;
    }
    fn narrow_tiles_of_4: right { 24 @ 0, 25 @ 64 }, left { "{left}" "{lower}" } {
        "{left}" => 0 "zmm24" @ 0, 1 "zmm25" @ 64;
        "{left} + {left_row}" => 2 "zmm24" @ 0, 3 "zmm25" @ 64;
        "{left} + 2 * {left_row}" => 4 "zmm24" @ 0, 5 "zmm25" @ 64;
        "{lower}" => 6 "zmm24" @ 0, 7 "zmm25" @ 64;
    }
}

// SAFETY: a `__m512` is 16 f32, and every method reads and writes as many as the trait says.
unsafe impl Simd for Avx512 {
    type F = __m512;
    type M = __mmask16;

    const WIDTH: usize = 16;
    const REGISTERS: usize = 32;
    const NEAREST: bool = false;
    const TILES: &[RegisterTiles] = &[
        RegisterTiles { vectors: 4, rows: 6, run: tiles_of_6 },
        RegisterTiles { vectors: 4, rows: 4, run: tiles_of_4 },
        RegisterTiles { vectors: 2, rows: 8, run: narrow_tiles_of_8 },
        RegisterTiles { vectors: 2, rows: 4, run: narrow_tiles_of_4 },
    ];

    #[inline(always)]
    unsafe fn call<O: Operation>(self, operation: O) -> O::Output {
        have!(compiled(self, operation))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        have!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        have!(_mm512_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m512) {
        have!(_mm512_storeu_ps(to, x))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m512 {
        have!({
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        })
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u16) -> [__m512; 2] {
        have!({
            let bits = _mm512_loadu_si512(from.cast());
            let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            let even = _mm512_slli_epi32::<16>(bits);
            [_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)]
        })
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, x: __m512) {
        // Half an ulp less the last bit that stays, so that ties go to even; NaN keeps its sign.
        have!({
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_add_epi32(bits, half);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
            let rounded = _mm512_mask_blend_epi32(nan, rounded, quiet);
            let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
            _mm256_storeu_si256(to.cast(), high)
        })
    }

    #[inline(always)]
    unsafe fn store_pairs_bf16(self, to: *mut u16, low: __m512, high: __m512) {
        have!({
            let half = _mm512_set1_epi32(0x8000);
            let low = _mm512_add_epi32(_mm512_castps_si512(low), half);
            let high = _mm512_add_epi32(_mm512_castps_si512(high), half);
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            // low >> 16 | high & upper
            let low = _mm512_srli_epi32::<16>(low);
            let both = _mm512_ternarylogic_epi32::<0xf8>(low, high, upper);
            _mm512_storeu_si512(to.cast(), both)
        })
    }

    #[inline(always)]
    unsafe fn store_two_bf16(self, to: *mut u16, low: __m512, high: __m512) {
        /// The upper halves of the words of two vectors.
        const UPPER: [u16; 32] = {
            let mut order = [0; 32];
            let mut i = 0;
            while i < 32 {
                order[i] = 2 * i as u16 + 1;
                i += 1;
            }
            order
        };
        have!({
            let half = _mm512_set1_epi32(0x8000);
            let low = _mm512_add_epi32(_mm512_castps_si512(low), half);
            let high = _mm512_add_epi32(_mm512_castps_si512(high), half);
            let order = _mm512_loadu_si512(UPPER.as_ptr().cast());
            _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(low, order, high))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m512 {
        have!(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, x: __m512) {
        have!({
            let bits = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm256_storeu_si256(to.cast(), bits)
        })
    }

    #[inline(always)]
    fn add(self, x: __m512, y: __m512) -> __m512 {
        have!(_mm512_add_ps(x, y))
    }

    #[inline(always)]
    fn sub(self, x: __m512, y: __m512) -> __m512 {
        have!(_mm512_sub_ps(x, y))
    }

    #[inline(always)]
    fn mul(self, x: __m512, y: __m512) -> __m512 {
        have!(_mm512_mul_ps(x, y))
    }

    #[inline(always)]
    fn div(self, x: __m512, y: __m512) -> __m512 {
        have!(_mm512_div_ps(x, y))
    }

    #[inline(always)]
    fn fma(self, x: __m512, y: __m512, z: __m512) -> __m512 {
        have!(_mm512_fmadd_ps(x, y, z))
    }

    #[inline(always)]
    fn fnma(self, x: __m512, y: __m512, z: __m512) -> __m512 {
        have!(_mm512_fnmadd_ps(x, y, z))
    }

    #[inline(always)]
    fn max(self, x: __m512, y: __m512) -> __m512 {
        have!(_mm512_max_ps(x, y))
    }

    #[inline(always)]
    fn min(self, x: __m512, y: __m512) -> __m512 {
        have!(_mm512_min_ps(x, y))
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        have!(_mm512_abs_ps(x))
    }

    #[inline(always)]
    fn sqrt(self, x: __m512) -> __m512 {
        have!(_mm512_sqrt_ps(x))
    }

    #[inline(always)]
    fn less(self, x: __m512, y: __m512) -> __mmask16 {
        have!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, y))
    }

    #[inline(always)]
    fn mask(self, bits: u64) -> __mmask16 {
        bits as __mmask16
    }

    #[inline(always)]
    fn select(self, mask: __mmask16, x: __m512, y: __m512) -> __m512 {
        have!(_mm512_mask_blend_ps(mask, y, x))
    }

    #[inline(always)]
    fn kept(self, key: __m512, words: [__m512; 2], threshold: u32) -> __mmask16 {
        have!({
            let [a, c] = words.map(|x| _mm512_castps_si512(x));
            let x = _mm512_xor_si512(_mm512_castps_si512(key), a);
            let x = _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x));
            let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb_352d));
            let x = _mm512_add_epi32(_mm512_xor_si512(x, _mm512_srli_epi32::<15>(x)), c);
            let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x846c_a68b_u32 as i32));
            let x = _mm512_xor_si512(x, _mm512_srli_epi32::<16>(x));
            _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32(threshold as i32))
        })
    }

    #[inline(always)]
    fn scale(self, x: __m512, n: __m512, _: __m512) -> __m512 {
        have!(_mm512_scalef_ps(x, n))
    }

    #[inline(always)]
    fn whole(self, x: __m512) -> __m512 {
        self.sub(x, self.fraction(x))
    }

    #[inline(always)]
    fn fraction(self, x: __m512) -> __m512 {
        // 0 where x is infinite.
        have!(_mm512_reduce_ps::<0x1>(x))
    }

    #[inline(always)]
    fn scale_by_whole(self, f: __m512, x: __m512) -> __m512 {
        have!(_mm512_scalef_ps(f, x))
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        have!(_mm_prefetch::<_MM_HINT_T0>(at.cast()))
    }

    #[inline(always)]
    unsafe fn sums(self, vectors: *const f32) -> __m512 {
        // Two vectors become one, four times: pairs, quads, and then whole 128-bit lanes.
        have!({
            let mut quads = [_mm512_setzero_ps(); 4];
            for (i, quad) in quads.iter_mut().enumerate() {
                let row = vectors.add(64 * i);
                let (a, b) = (_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(16)));
                let (c, d) = (_mm512_loadu_ps(row.add(32)), _mm512_loadu_ps(row.add(48)));
                let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
                let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
                *quad = _mm512_add_ps(low, high);
            }
            for half in [2, 1] {
                for i in 0..half {
                    let (a, b) = (quads[2 * i], quads[2 * i + 1]);
                    let low = _mm512_shuffle_f32x4::<0x88>(a, b);
                    quads[i] = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0xdd>(a, b));
                }
            }
            quads[0]
        })
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: isize, to: *mut f32, to_row: isize) {
        // Pairs, then quads within 128-bit lanes; then the lanes themselves, twice.
        have!({
            let row = |i: isize| _mm512_loadu_ps(from.offset(i * from_row));
            let mut quads = [_mm512_setzero_ps(); 16];
            for i in 0..4 {
                let [a, b, c, d] = [0, 1, 2, 3].map(|j| row(4 * i as isize + j));
                let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
                let (ab_, cd_) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
                quads[i] = _mm512_shuffle_ps::<0x44>(ab, cd);
                quads[4 + i] = _mm512_shuffle_ps::<0xee>(ab, cd);
                quads[8 + i] = _mm512_shuffle_ps::<0x44>(ab_, cd_);
                quads[12 + i] = _mm512_shuffle_ps::<0xee>(ab_, cd_);
            }
            for j in 0..4 {
                let [a, b, c, d] = [0, 1, 2, 3].map(|i| quads[4 * j + i]);
                let (ab, cd) =
                    (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d));
                let (ab_, cd_) =
                    (_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(c, d));
                let write = |at: usize, x| _mm512_storeu_ps(to.offset(at as isize * to_row), x);
                write(j, _mm512_shuffle_f32x4::<0x88>(ab, cd));
                write(8 + j, _mm512_shuffle_f32x4::<0xdd>(ab, cd));
                write(4 + j, _mm512_shuffle_f32x4::<0x88>(ab_, cd_));
                write(12 + j, _mm512_shuffle_f32x4::<0xdd>(ab_, cd_));
            }
        })
    }
}
