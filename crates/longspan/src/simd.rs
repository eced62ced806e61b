//! Vectors of f32, whatever the instruction set.
//!
//! An instruction set is a zero-sized token, [`Simd`], which can only be had where the CPU has the
//! set: holding one is the proof that its instructions may run. What is worth vectorizing is an
//! [`Operation`]: a struct of its parameters whose `eval` is written once, over any token.
//! Parameters are mostly pointers and sizes; what has to hold of them stands in the `# Safety`
//! section of the struct, and the `unsafe` block that runs the operation proves it.
//!
//! ```text
//! simd.call(operation)  →  fn with #[target_feature]  →  operation.eval(simd), inlined into it
//! ```
//!
//! Everything below `eval` has to be `#[inline(always)]`: a vector function that is not inlined
//! into the one with the target features is a call for every addition. [`Simd::call`] may be used
//! inside an operation too, for the parts that should be functions of their own.

use half::{bf16, f16};

use self::tiles::RegisterTiles;

pub(crate) mod math;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;
pub(crate) mod tiles;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::{Portable, is_kept};

/// Work that is written once for all instruction sets.
pub(crate) trait Operation {
    /// What it gives.
    type Output;

    /// Does it. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    ///
    /// The fields must be as the `# Safety` section of the implementing type says; a type without
    /// one has no condition.
    unsafe fn eval<S: Simd>(self, simd: S) -> Self::Output;
}

/// A token of an instruction set, and what its vectors can do.
///
/// What NaN does is the same everywhere: [`max`](Self::max) and [`min`](Self::min) give their
/// second argument where either is NaN.
///
/// # Safety
///
/// A value of the type exists only where the CPU has the instructions that its methods use. `WIDTH`
/// is a power of two, at most [`WIDEST`]. Methods that take pointers read and write the `WIDTH`
/// elements (or pairs, or square) that their documentation names, and no others.
pub(crate) unsafe trait Simd: Copy + Send + Sync + 'static {
    /// A vector of f32.
    type F: Copy;
    /// A choice for each lane.
    type M: Copy;

    /// Numbers per vector; divides [`LANES`].
    const WIDTH: usize;
    /// Vector registers: decides the shape of a register tile.
    const REGISTERS: usize;

    /// Whether multiplication and addition round once: where they don't, sums are taken in shorter
    /// pieces.
    const FUSED: bool = true;

    /// Whether [`whole`](Simd::whole) rounds to the nearest number, else down.
    const NEAREST: bool = true;

    /// Keys per panel of the backward pass: five matrices of so many rows of 128 f32 fit into the
    /// second-level cache of the CPUs that have this set and no wider one.
    const KEY_PANEL: usize = 256;

    /// Register tiles in assembly, the largest first; products whose rows or vectors they don't divide
    /// are compiled for the rest.
    const TILES: &[RegisterTiles] = &[];

    /// Runs an operation as a function compiled for this instruction set.
    ///
    /// # Safety
    ///
    /// That of the operation's [`eval`](Operation::eval).
    unsafe fn call<O: Operation>(self, operation: O) -> O::Output;

    /// Every lane the same.
    fn splat(self, x: f32) -> Self::F;
    /// `WIDTH` numbers, aligned or not.
    ///
    /// # Safety
    ///
    /// `WIDTH` elements must be readable.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// Writes `WIDTH` numbers, aligned or not.
    ///
    /// # Safety
    ///
    /// They must be writable.
    unsafe fn store(self, to: *mut f32, x: Self::F);
    /// `WIDTH` bf16 numbers, given as their bits.
    ///
    /// # Safety
    ///
    /// They must be readable.
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::F {
        // SAFETY: both demand that `WIDTH` elements are readable.
        unsafe { widen(self, from, |bits| bf16::from_bits(bits).to_f32()) }
    }
    /// `2 · WIDTH` bf16 numbers: those at even places, and those at odd ones. A pair is 32 bits, so
    /// nothing has to move to another lane.
    ///
    /// # Safety
    ///
    /// They must be readable.
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u16) -> [Self::F; 2] {
        let mut numbers = [[0.0; WIDEST]; 2];
        for index in 0..2 * Self::WIDTH {
            // SAFETY: `index` is below `2 · WIDTH`, and so many are readable.
            let bits = unsafe { *from.add(index) };
            numbers[index % 2][index / 2] = bf16::from_bits(bits).to_f32();
        }
        // SAFETY: both arrays have `WIDEST` elements, and no vector is wider.
        unsafe { [self.load(numbers[0].as_ptr()), self.load(numbers[1].as_ptr())] }
    }
    /// Writes `WIDTH` bf16 numbers, the nearest ones.
    ///
    /// # Safety
    ///
    /// They must be writable.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, x: Self::F) {
        // SAFETY: both demand that `WIDTH` elements are writable.
        unsafe { narrow(self, to, x, |x| bf16::from_f32(x).to_bits()) }
    }
    /// Writes `WIDTH` pairs of bf16 numbers, one of `low` before one of `high`: the nearest ones,
    /// away from zero where two are as near. NaN stays where its last 15 bits aren't all set.
    ///
    /// # Safety
    ///
    /// They must be writable.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store_pairs_bf16(self, to: *mut u16, low: Self::F, high: Self::F) {
        // SAFETY: `2 · WIDTH` elements are writable; these are the even ones and the odd ones.
        unsafe {
            narrow_by(self, to, 2, low, upper_half);
            narrow_by(self, to.add(1), 2, high, upper_half);
        }
    }
    /// Writes `2 · WIDTH` bf16 numbers, those of `low` before those of `high`, rounded likewise.
    ///
    /// # Safety
    ///
    /// They must be writable.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn store_two_bf16(self, to: *mut u16, low: Self::F, high: Self::F) {
        // SAFETY: `2 · WIDTH` elements are writable; these are the first half and the second.
        unsafe {
            narrow_by(self, to, 1, low, upper_half);
            narrow_by(self, to.add(Self::WIDTH), 1, high, upper_half);
        }
    }
    /// `WIDTH` f16 numbers, given as their bits.
    ///
    /// # Safety
    ///
    /// They must be readable.
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Self::F {
        // SAFETY: both demand that `WIDTH` elements are readable.
        unsafe { widen(self, from, |bits| f16::from_bits(bits).to_f32()) }
    }
    /// Writes `WIDTH` f16 numbers, the nearest ones.
    ///
    /// # Safety
    ///
    /// They must be writable.
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, x: Self::F) {
        // SAFETY: both demand that `WIDTH` elements are writable.
        unsafe { narrow(self, to, x, |x| f16::from_f32(x).to_bits()) }
    }
    /// `x + y`.
    fn add(self, x: Self::F, y: Self::F) -> Self::F;
    /// `x − y`.
    fn sub(self, x: Self::F, y: Self::F) -> Self::F;
    /// `x · y`.
    fn mul(self, x: Self::F, y: Self::F) -> Self::F;
    /// `x / y`.
    fn div(self, x: Self::F, y: Self::F) -> Self::F;
    /// `x · y + z`, rounded once where the CPU can.
    fn fma(self, x: Self::F, y: Self::F, z: Self::F) -> Self::F;
    /// `z − x · y`, rounded once where the CPU can.
    fn fnma(self, x: Self::F, y: Self::F, z: Self::F) -> Self::F;
    /// The greater; `y` where either is NaN.
    fn max(self, x: Self::F, y: Self::F) -> Self::F;
    /// The smaller; `y` where either is NaN.
    fn min(self, x: Self::F, y: Self::F) -> Self::F;
    /// Without its sign.
    fn abs(self, x: Self::F) -> Self::F;
    /// The square root.
    fn sqrt(self, x: Self::F) -> Self::F;
    /// Where `x < y`; not where either is NaN.
    fn less(self, x: Self::F, y: Self::F) -> Self::M;
    /// Lane `i` where bit `i` of `bits` is set.
    fn mask(self, bits: u64) -> Self::M;
    /// `x` where the mask is set, else `y`.
    fn select(self, mask: Self::M, x: Self::F, y: Self::F) -> Self::F;
    /// 0 where the mask is set, else `x`.
    #[inline(always)]
    fn zero_where(self, mask: Self::M, x: Self::F) -> Self::F {
        self.select(mask, self.splat(0.0), x)
    }
    /// Where a pair is kept by [dropout](crate::Dropout): the words of keys and queries, given as
    /// bits, mixed, are at least `threshold`.
    fn kept(self, key: Self::F, query: [Self::F; 2], threshold: u32) -> Self::M;
    /// `x · 2^n`, where `n` is whole, from −126 to 127, and `biased` is `n` + [`ROUND`](math::ROUND).
    /// NaN stays.
    fn scale(self, x: Self::F, n: Self::F, biased: Self::F) -> Self::F;
    /// The whole number [nearest](Self::NEAREST) to `x` or the one below, for `x` from −126 to 127. NaN
    /// stays.
    #[inline(always)]
    fn whole(self, x: Self::F) -> Self::F {
        let round = self.splat(math::ROUND);
        self.sub(self.add(x, round), round)
    }
    /// `x − whole(x)`: from −½ to ½ or from 0 to 1. NaN stays.
    #[inline(always)]
    fn fraction(self, x: Self::F) -> Self::F {
        self.sub(x, self.whole(x))
    }
    /// `f · 2^whole(x)`, for `x` from −126 to 127. NaN stays.
    #[inline(always)]
    fn scale_by_whole(self, f: Self::F, x: Self::F) -> Self::F {
        self.scale(f, self.whole(x), self.add(x, self.splat(math::ROUND)))
    }
    /// Asks for the cache line of a byte, which needn't exist; a hint.
    fn prefetch(self, at: *const u8);
    /// Writes the transpose of a square of `WIDTH` elements per side: row `i` of the source starts
    /// at `from + i · from_row`, row `j` of the result at `to + j · to_row`.
    ///
    /// # Safety
    ///
    /// `WIDTH` elements must be readable in each of the `WIDTH` rows of the source and writable in
    /// each of those of the result, and none of them may be in both.
    unsafe fn transpose(self, from: *const f32, from_row: isize, to: *mut f32, to_row: isize);
    /// The sums of `WIDTH` vectors that lie one after the other: lane `i` has that of vector `i`.
    ///
    /// # Safety
    ///
    /// Their `WIDTH²` elements must be readable.
    #[inline(always)]
    unsafe fn sums(self, vectors: *const f32) -> Self::F {
        let mut turned = [0.0_f32; WIDEST * WIDEST];
        let width = Self::WIDTH as isize;
        // SAFETY: `WIDTH²` elements are readable at `vectors`; `turned`, which nothing else refers
        // to, has `WIDEST²`, and no vector is wider.
        unsafe {
            self.transpose(vectors, width, turned.as_mut_ptr(), width);
            let mut sums = [self.splat(0.0); WIDEST];
            for (t, sum) in sums[..Self::WIDTH].iter_mut().enumerate() {
                *sum = self.load(turned.as_ptr().add(t * Self::WIDTH));
            }
            let mut half = Self::WIDTH / 2;
            while half > 0 {
                for t in 0..half {
                    sums[t] = self.add(sums[t], sums[t + half]);
                }
                half /= 2;
            }
            sums[0]
        }
    }
}

/// Half-precision numbers one by one, where there is no instruction for a vector of them.
///
/// # Safety
///
/// `S::WIDTH` elements must be readable.
#[inline(always)]
unsafe fn widen<S: Simd>(simd: S, from: *const u16, number: impl Fn(u16) -> f32) -> S::F {
    let mut numbers = [0.0; WIDEST];
    for (index, to) in numbers[..S::WIDTH].iter_mut().enumerate() {
        // SAFETY: `index` is below `S::WIDTH`, and so many are readable.
        *to = number(unsafe { *from.add(index) });
    }
    // SAFETY: `numbers` has `WIDEST`, and no vector is wider.
    unsafe { simd.load(numbers.as_ptr()) }
}

/// The reverse of [`widen`].
///
/// # Safety
///
/// `S::WIDTH` elements must be writable.
#[inline(always)]
unsafe fn narrow<S: Simd>(simd: S, to: *mut u16, x: S::F, bits: impl Fn(f32) -> u16) {
    // SAFETY: with a step of 1 these are the `S::WIDTH` elements that are writable.
    unsafe { narrow_by(simd, to, 1, x, bits) }
}

/// Writes numbers as 16 bits each, `step` apart.
///
/// # Safety
///
/// `S::WIDTH` elements, `step` apart, must be writable.
#[inline(always)]
unsafe fn narrow_by<S: Simd>(
    simd: S,
    to: *mut u16,
    step: usize,
    x: S::F,
    bits: impl Fn(f32) -> u16,
) {
    let mut numbers = [0.0; WIDEST];
    // SAFETY: `numbers` has `WIDEST`, and no vector is wider.
    unsafe { simd.store(numbers.as_mut_ptr(), x) };
    for (index, &number) in numbers[..S::WIDTH].iter().enumerate() {
        // SAFETY: `index` is below `S::WIDTH`, and so many are writable, `step` apart.
        unsafe { *to.add(step * index) = bits(number) };
    }
}

/// The nearest bf16 number, away from zero where two are as near.
#[cfg(target_arch = "x86_64")]
fn upper_half(x: f32) -> u16 {
    (x.to_bits().wrapping_add(0x8000) >> 16) as u16
}

/// Numbers of the widest vector there is.
pub(crate) const WIDEST: usize = 16;

/// Tokens side by side in a tile: queries in the forward pass, keys in the backward pass. One
/// 64-bit word then holds the mask of a row, and it is a whole number of vectors everywhere.
pub(crate) const LANES: usize = 64;

/// Runs `operation` on the instruction set `isa`.
///
/// # Panics
///
/// If this CPU hasn't got it.
pub(crate) fn dispatch<O: WithSimd>(isa: crate::isa::Isa, operation: O) -> O::Output {
    use crate::isa::Isa;
    assert!(isa.is_available(), "{isa} on a CPU without it");
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the assertion above, for this `isa`.
        Isa::Avx2 => operation.with(unsafe { Avx2::new_unchecked() }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the assertion above; `Isa::Amx` is only available where `Isa::Avx512` is.
        Isa::Avx512 | Isa::Amx => operation.with(unsafe { Avx512::new_unchecked() }),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => operation.with(Neon),
        _ => operation.with(Portable),
    }
}

/// What [`dispatch`] runs: code that passes the token on, and needn't be compiled for the
/// instruction set itself.
pub(crate) trait WithSimd {
    /// What it gives.
    type Output;

    /// Does it.
    fn with<S: Simd>(self, simd: S) -> Self::Output;
}
