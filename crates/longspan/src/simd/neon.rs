//! Four lanes: Arm's Advanced SIMD, which every aarch64 CPU has.

use std::arch::aarch64::*;

use super::tiles::RegisterTiles;
use super::{Operation, Simd};

/// The token. Every target that this file is compiled for has the set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neon;

const _: () = assert!(cfg!(target_feature = "neon"), "a target with Advanced SIMD");

/// Instructions of this set, in methods of the token.
macro_rules! have {
    ($e:expr) => {
        // SAFETY: the assertion above stops the build for a target without the set. Where memory is
        // read or written, the method is one whose condition in `Simd` is that it may be.
        #[allow(unused_unsafe)]
        unsafe {
            $e
        }
    };
}

super::tiles::aarch64::register_tiles! {
    fn tiles_of_6: right { 24 25 @ 0, 26 27 @ 32 } {
        "{left}" => 0 24 1 25 @ 0, 2 26 3 27 @ 32;
        "{left}, {row}" => 4 24 5 25 @ 0, 6 26 7 27 @ 32;
        "{left}, {two_rows}" => 8 24 9 25 @ 0, 10 26 11 27 @ 32;
        "{lower}" => 12 24 13 25 @ 0, 14 26 15 27 @ 32;
        "{lower}, {row}" => 16 24 17 25 @ 0, 18 26 19 27 @ 32;
        "{lower}, {two_rows}" => 20 24 21 25 @ 0, 22 26 23 27 @ 32;
    }
    fn tiles_of_4: right { 24 25 @ 0, 26 27 @ 32 } {
        "{left}" => 0 24 1 25 @ 0, 2 26 3 27 @ 32;
        "{left}, {row}" => 4 24 5 25 @ 0, 6 26 7 27 @ 32;
        "{left}, {two_rows}" => 8 24 9 25 @ 0, 10 26 11 27 @ 32;
        "{lower}" => 12 24 13 25 @ 0, 14 26 15 27 @ 32;
    }
    fn narrow_tiles_of_7: right { 24 25 @ 0 } {
        "{left}" => 0 24 1 25 @ 0;
        "{left}, {row}" => 2 24 3 25 @ 0;
        "{left}, {two_rows}" => 4 24 5 25 @ 0;
        "{lower}" => 6 24 7 25 @ 0;
        "{lower}, {row}" => 8 24 9 25 @ 0;
        "{lower}, {two_rows}" => 10 24 11 25 @ 0;
        "{lower}, {three_rows}" => 12 24 13 25 @ 0;
    }
    fn narrow_tiles_of_4: right { 24 25 @ 0 } {
        "{left}" => 0 24 1 25 @ 0;
        "{left}, {row}" => 2 24 3 25 @ 0;
        "{left}, {two_rows}" => 4 24 5 25 @ 0;
        "{lower}" => 6 24 7 25 @ 0;
    }
}

// SAFETY: a `float32x4_t` is 4 f32, and every method reads and writes as many as the trait says.
unsafe impl Simd for Neon {
    type F = float32x4_t;
    type M = uint32x4_t;

    const WIDTH: usize = 4;
    const REGISTERS: usize = 32;
    const TILES: &[RegisterTiles] = &[
        RegisterTiles { vectors: 4, rows: 6, run: tiles_of_6 },
        RegisterTiles { vectors: 4, rows: 4, run: tiles_of_4 },
        RegisterTiles { vectors: 2, rows: 7, run: narrow_tiles_of_7 },
        RegisterTiles { vectors: 2, rows: 4, run: narrow_tiles_of_4 },
    ];

    #[inline(never)]
    unsafe fn call<O: Operation>(self, operation: O) -> O::Output {
        // SAFETY: `eval` has the condition of `call`.
        unsafe { operation.eval(self) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        have!(vdupq_n_f32(x))
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> float32x4_t {
        have!(vld1q_f32(from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: float32x4_t) {
        have!(vst1q_f32(to, x))
    }

    #[inline(always)]
    fn add(self, x: float32x4_t, y: float32x4_t) -> float32x4_t {
        have!(vaddq_f32(x, y))
    }

    #[inline(always)]
    fn sub(self, x: float32x4_t, y: float32x4_t) -> float32x4_t {
        have!(vsubq_f32(x, y))
    }

    #[inline(always)]
    fn mul(self, x: float32x4_t, y: float32x4_t) -> float32x4_t {
        have!(vmulq_f32(x, y))
    }

    #[inline(always)]
    fn div(self, x: float32x4_t, y: float32x4_t) -> float32x4_t {
        have!(vdivq_f32(x, y))
    }

    #[inline(always)]
    fn fma(self, x: float32x4_t, y: float32x4_t, z: float32x4_t) -> float32x4_t {
        have!(vfmaq_f32(z, x, y))
    }

    #[inline(always)]
    fn fnma(self, x: float32x4_t, y: float32x4_t, z: float32x4_t) -> float32x4_t {
        have!(vfmsq_f32(z, x, y))
    }

    #[inline(always)]
    fn max(self, x: float32x4_t, y: float32x4_t) -> float32x4_t {
        have!(vbslq_f32(vcgtq_f32(x, y), x, y))
    }

    #[inline(always)]
    fn min(self, x: float32x4_t, y: float32x4_t) -> float32x4_t {
        have!(vbslq_f32(vcltq_f32(x, y), x, y))
    }

    #[inline(always)]
    fn abs(self, x: float32x4_t) -> float32x4_t {
        have!(vabsq_f32(x))
    }

    #[inline(always)]
    fn sqrt(self, x: float32x4_t) -> float32x4_t {
        have!(vsqrtq_f32(x))
    }

    #[inline(always)]
    fn less(self, x: float32x4_t, y: float32x4_t) -> uint32x4_t {
        have!(vcltq_f32(x, y))
    }

    #[inline(always)]
    fn mask(self, bits: u64) -> uint32x4_t {
        // Each lane tests its own bit.
        have!({
            let own = vld1q_u32([1_u32, 2, 4, 8].as_ptr());
            vtstq_u32(vdupq_n_u32(bits as u32), own)
        })
    }

    #[inline(always)]
    fn select(self, mask: uint32x4_t, x: float32x4_t, y: float32x4_t) -> float32x4_t {
        have!(vbslq_f32(mask, x, y))
    }

    #[inline(always)]
    fn kept(self, key: float32x4_t, words: [float32x4_t; 2], threshold: u32) -> uint32x4_t {
        have!({
            let [a, c] = words.map(|x| vreinterpretq_u32_f32(x));
            let x = veorq_u32(vreinterpretq_u32_f32(key), a);
            let x = veorq_u32(x, vshrq_n_u32::<16>(x));
            let x = vmulq_u32(x, vdupq_n_u32(0x7feb_352d));
            let x = vaddq_u32(veorq_u32(x, vshrq_n_u32::<15>(x)), c);
            let x = vmulq_u32(x, vdupq_n_u32(0x846c_a68b));
            let x = veorq_u32(x, vshrq_n_u32::<16>(x));
            vcgeq_u32(x, vdupq_n_u32(threshold))
        })
    }

    #[inline(always)]
    fn scale(self, x: float32x4_t, _: float32x4_t, biased: float32x4_t) -> float32x4_t {
        // The low bits of `biased` are `n + 127`; moved up they are an exponent.
        have!({
            let power = vshlq_n_u32::<23>(vreinterpretq_u32_f32(biased));
            vmulq_f32(x, vreinterpretq_f32_u32(power))
        })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        let _ = at;
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: isize, to: *mut f32, to_row: isize) {
        have!({
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| vld1q_f32(from.offset(i * from_row)));
            let (ab, ab_) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
            let (cd, cd_) = (vtrn1q_f32(c, d), vtrn2q_f32(c, d));
            let low = |x, y| vcombine_f32(vget_low_f32(x), vget_low_f32(y));
            let high = |x, y| vcombine_f32(vget_high_f32(x), vget_high_f32(y));
            vst1q_f32(to, low(ab, cd));
            vst1q_f32(to.offset(to_row), low(ab_, cd_));
            vst1q_f32(to.offset(2 * to_row), high(ab, cd));
            vst1q_f32(to.offset(3 * to_row), high(ab_, cd_));
        })
    }
}
