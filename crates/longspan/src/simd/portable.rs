//! Four lanes of plain Rust, for any CPU.
//!
//! Multiplication and addition round separately here: a fused one without the instruction is a
//! call into the mathematics library.

use super::{Operation, Simd};

/// The token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

const WIDTH: usize = 4;
type F = [f32; WIDTH];

#[inline(always)]
fn zip(x: F, y: F, with: impl Fn(f32, f32) -> f32) -> F {
    [with(x[0], y[0]), with(x[1], y[1]), with(x[2], y[2]), with(x[3], y[3])]
}

/// Whether dropout keeps a pair: the word of its key and those of its query, mixed, are at least
/// `threshold`.
#[inline(always)]
pub(crate) fn is_kept(key: u32, [a, c]: [u32; 2], threshold: u32) -> bool {
    let x = key ^ a;
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_add(c).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16) >= threshold
}

// SAFETY: a vector is 4 f32, and every method reads and writes as many as the trait says; any CPU
// has what plain Rust compiles to.
unsafe impl Simd for Portable {
    type F = F;
    type M = [bool; WIDTH];

    const WIDTH: usize = WIDTH;
    const REGISTERS: usize = 16;
    const FUSED: bool = false;

    #[inline(never)]
    unsafe fn call<O: Operation>(self, operation: O) -> O::Output {
        // SAFETY: `eval` has the condition of `call`.
        unsafe { operation.eval(self) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; WIDTH]
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> F {
        // SAFETY: `load` demands that `WIDTH` elements are readable.
        unsafe { from.cast::<F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: F) {
        // SAFETY: `store` demands that `WIDTH` elements are writable.
        unsafe { to.cast::<F>().write_unaligned(x) }
    }

    #[inline(always)]
    fn add(self, x: F, y: F) -> F {
        zip(x, y, |x, y| x + y)
    }

    #[inline(always)]
    fn sub(self, x: F, y: F) -> F {
        zip(x, y, |x, y| x - y)
    }

    #[inline(always)]
    fn mul(self, x: F, y: F) -> F {
        zip(x, y, |x, y| x * y)
    }

    #[inline(always)]
    fn div(self, x: F, y: F) -> F {
        zip(x, y, |x, y| x / y)
    }

    #[inline(always)]
    fn fma(self, x: F, y: F, z: F) -> F {
        self.add(self.mul(x, y), z)
    }

    #[inline(always)]
    fn fnma(self, x: F, y: F, z: F) -> F {
        self.sub(z, self.mul(x, y))
    }

    #[inline(always)]
    fn max(self, x: F, y: F) -> F {
        zip(x, y, |x, y| if x > y { x } else { y })
    }

    #[inline(always)]
    fn min(self, x: F, y: F) -> F {
        zip(x, y, |x, y| if x < y { x } else { y })
    }

    #[inline(always)]
    fn abs(self, x: F) -> F {
        x.map(f32::abs)
    }

    #[inline(always)]
    fn sqrt(self, x: F) -> F {
        x.map(f32::sqrt)
    }

    #[inline(always)]
    fn less(self, x: F, y: F) -> Self::M {
        [x[0] < y[0], x[1] < y[1], x[2] < y[2], x[3] < y[3]]
    }

    #[inline(always)]
    fn mask(self, bits: u64) -> Self::M {
        [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0, bits & 8 != 0]
    }

    #[inline(always)]
    fn select(self, mask: Self::M, x: F, y: F) -> F {
        let pick = |i: usize| if mask[i] { x[i] } else { y[i] };
        [pick(0), pick(1), pick(2), pick(3)]
    }

    #[inline(always)]
    fn kept(self, key: F, [a, c]: [F; 2], threshold: u32) -> Self::M {
        std::array::from_fn(|i| {
            is_kept(key[i].to_bits(), [a[i].to_bits(), c[i].to_bits()], threshold)
        })
    }

    #[inline(always)]
    fn scale(self, x: F, _: F, biased: F) -> F {
        // The low bits of `biased` are `n + 127`; moved up they are an exponent.
        let power = biased.map(|b| f32::from_bits(b.to_bits() << 23));
        self.mul(x, power)
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        let _ = at;
    }

    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: isize, to: *mut f32, to_row: isize) {
        for i in 0..WIDTH as isize {
            for j in 0..WIDTH as isize {
                // SAFETY: `i` and `j` are below `WIDTH`, and `transpose` demands both squares.
                unsafe { *to.offset(j * to_row + i) = *from.offset(i * from_row + j) };
            }
        }
    }
}
