//! Eight lanes: AVX2 with FMA.

use std::arch::x86_64::*;

use super::tiles::RegisterTiles;
use super::{Operation, Simd};
use crate::isa::features;

/// The token: this CPU has what [`features::avx2`] lists.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    ///
    /// [`Isa::Avx2`](crate::Isa::Avx2) must be available.
    pub(crate) unsafe fn new_unchecked() -> Self {
        Avx2(())
    }
}

features::avx2! { enable
    /// # Safety
    ///
    /// That of [`Simd::call`]; the CPU must have what [`features::avx2`] lists, as a token proves.
    unsafe fn compiled<O: Operation>(simd: Avx2, operation: O) -> O::Output {
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
    "ymm": avx2, spread 15,
    all {
        "ymm0" "ymm1" "ymm2" "ymm3" "ymm4" "ymm5" "ymm6" "ymm7"
        "ymm8" "ymm9" "ymm10" "ymm11" "ymm12" "ymm13" "ymm14" "ymm15"
    }
    fn tiles_of_3: right { 12 @ 0, 13 @ 32, 14 @ 64 }, left { "{left}" } {
        "{left}" => 0 "ymm12" @ 0, 1 "ymm13" @ 32, 2 "ymm14" @ 64, 3 "[{right} + 96]" @ 96;
        "{left} + {left_row}" => 4 "ymm12" @ 0, 5 "ymm13" @ 32, 6 "ymm14" @ 64, 7 "[{right} + 96]" @ 96;
        "{left} + 2 * {left_row}" => 8 "ymm12" @ 0, 9 "ymm13" @ 32, 10 "ymm14" @ 64, 11 "[{right} + 96]" @ 96;
    }
    fn tiles_of_2: right { 8 @ 0, 9 @ 32, 10 @ 64, 11 @ 96 }, left { "{left}" } {
        "{left}" => 0 "ymm8" @ 0, 1 "ymm9" @ 32, 2 "ymm10" @ 64, 3 "ymm11" @ 96;
        "{left} + {left_row}" => 4 "ymm8" @ 0, 5 "ymm9" @ 32, 6 "ymm10" @ 64, 7 "ymm11" @ 96;
    }
    fn narrow_tiles_of_6: right { 12 @ 0, 13 @ 32 }, left { "{left}" "{lower}" } {
        "{left}" => 0 "ymm12" @ 0, 1 "ymm13" @ 32;
        "{left} + {left_row}" => 2 "ymm12" @ 0, 3 "ymm13" @ 32;
        "{left} + 2 * {left_row}" => 4 "ymm12" @ 0, 5 "ymm13" @ 32;
        "{lower}" => 6 "ymm12" @ 0, 7 "ymm13" @ 32;
        "{lower} + {left_row}" => 8 "ymm12" @ 0, 9 "ymm13" @ 32;
        "{lower} + 2 * {left_row}" => 10 "ymm12" @ 0, 11 "ymm13" @ 32;
    }
    fn narrow_tiles_of_4: right { 12 @ 0, 13 @ 32 }, left { "{left}" "{lower}" } {
        "{left}" => 0 "ymm12" @ 0, 1 "ymm13" @ 32;
        "{left} + {left_row}" => 2 "ymm12" @ 0, 3 "ymm13" @ 32;
        "{left} + 2 * {left_row}" => 4 "ymm12" @ 0, 5 "ymm13" @ 32;
        "{lower}" => 6 "ymm12" @ 0, 7 "ymm13" @ 32;
    }
}

// SAFETY: a `__m256` is 8 f32, and every method reads and writes as many as the trait says.
unsafe impl Simd for Avx2 {
    type F = __m256;
    type M = __m256;

    const WIDTH: usize = 8;
    const REGISTERS: usize = 16;
    const KEY_PANEL: usize = 192;
    const TILES: &[RegisterTiles] = &[
        RegisterTiles { vectors: 4, rows: 3, run: tiles_of_3 },
        RegisterTiles { vectors: 4, rows: 2, run: tiles_of_2 },
        RegisterTiles { vectors: 2, rows: 6, run: narrow_tiles_of_6 },
        RegisterTiles { vectors: 2, rows: 4, run: narrow_tiles_of_4 },
    ];

    #[inline(always)]
    unsafe fn call<O: Operation>(self, operation: O) -> O::Output {
        have!(compiled(self, operation))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        have!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        have!(_mm256_loadu_ps(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m256) {
        have!(_mm256_storeu_ps(to, x))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> __m256 {
        have!({
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        })
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u16) -> [__m256; 2] {
        have!({
            let bits = _mm256_loadu_si256(from.cast());
            let odd = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            let even = _mm256_slli_epi32::<16>(bits);
            [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
        })
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, x: __m256) {
        // Half an ulp less the last bit that stays, so that ties go to even; NaN keeps its sign.
        have!({
            let bits = _mm256_castps_si256(x);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, half));
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let rounded = _mm256_blendv_ps(rounded, _mm256_castsi256_ps(quiet), nan);
            let high = _mm256_srli_epi32::<16>(_mm256_castps_si256(rounded));
            let both = _mm256_packus_epi32(high, high);
            let both = _mm256_permute4x64_epi64::<0b1000>(both);
            _mm_storeu_si128(to.cast(), _mm256_castsi256_si128(both))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> __m256 {
        have!(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())))
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, x: __m256) {
        have!({
            let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm_storeu_si128(to.cast(), bits)
        })
    }

    #[inline(always)]
    fn add(self, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_add_ps(x, y))
    }

    #[inline(always)]
    fn sub(self, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_sub_ps(x, y))
    }

    #[inline(always)]
    fn mul(self, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_mul_ps(x, y))
    }

    #[inline(always)]
    fn div(self, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_div_ps(x, y))
    }

    #[inline(always)]
    fn fma(self, x: __m256, y: __m256, z: __m256) -> __m256 {
        have!(_mm256_fmadd_ps(x, y, z))
    }

    #[inline(always)]
    fn fnma(self, x: __m256, y: __m256, z: __m256) -> __m256 {
        have!(_mm256_fnmadd_ps(x, y, z))
    }

    #[inline(always)]
    fn max(self, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_max_ps(x, y))
    }

    #[inline(always)]
    fn min(self, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_min_ps(x, y))
    }

    #[inline(always)]
    fn abs(self, x: __m256) -> __m256 {
        have!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), x))
    }

    #[inline(always)]
    fn sqrt(self, x: __m256) -> __m256 {
        have!(_mm256_sqrt_ps(x))
    }

    #[inline(always)]
    fn less(self, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_cmp_ps::<_CMP_LT_OQ>(x, y))
    }

    #[inline(always)]
    fn mask(self, bits: u64) -> __m256 {
        // Each lane tests its own bit.
        have!({
            let own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), own);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, own))
        })
    }

    #[inline(always)]
    fn select(self, mask: __m256, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_blendv_ps(y, x, mask))
    }

    #[inline(always)]
    fn zero_where(self, mask: __m256, x: __m256) -> __m256 {
        have!(_mm256_andnot_ps(mask, x))
    }

    #[inline(always)]
    fn kept(self, key: __m256, words: [__m256; 2], threshold: u32) -> __m256 {
        have!({
            let [a, c] = words.map(|x| _mm256_castps_si256(x));
            let x = _mm256_xor_si256(_mm256_castps_si256(key), a);
            let x = _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x));
            let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x7feb_352d));
            let x = _mm256_add_epi32(_mm256_xor_si256(x, _mm256_srli_epi32::<15>(x)), c);
            let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x846c_a68b_u32 as i32));
            let x = _mm256_xor_si256(x, _mm256_srli_epi32::<16>(x));
            let threshold = _mm256_set1_epi32(threshold as i32);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(x, threshold), x))
        })
    }

    #[inline(always)]
    fn scale(self, x: __m256, _: __m256, biased: __m256) -> __m256 {
        // The low bits of `biased` are `n + 127`; moved up they are an exponent.
        have!({
            let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(biased));
            _mm256_mul_ps(x, _mm256_castsi256_ps(power))
        })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        have!(_mm_prefetch::<_MM_HINT_T0>(at.cast()))
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: isize, to: *mut f32, to_row: isize) {
        // Pairs, then quads within 128-bit lanes; then the lanes themselves.
        have!({
            let row = |i: isize| _mm256_loadu_ps(from.offset(i * from_row));
            let mut quads = [_mm256_setzero_ps(); 8];
            for i in 0..2 {
                let [a, b, c, d] = [0, 1, 2, 3].map(|j| row(4 * i as isize + j));
                let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
                let (ab_, cd_) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
                quads[i] = _mm256_shuffle_ps::<0x44>(ab, cd);
                quads[2 + i] = _mm256_shuffle_ps::<0xee>(ab, cd);
                quads[4 + i] = _mm256_shuffle_ps::<0x44>(ab_, cd_);
                quads[6 + i] = _mm256_shuffle_ps::<0xee>(ab_, cd_);
            }
            for j in 0..4 {
                let (a, b) = (quads[2 * j], quads[2 * j + 1]);
                let write = |at: usize, x| _mm256_storeu_ps(to.offset(at as isize * to_row), x);
                write(j, _mm256_permute2f128_ps::<0x20>(a, b));
                write(4 + j, _mm256_permute2f128_ps::<0x31>(a, b));
            }
        })
    }
}
