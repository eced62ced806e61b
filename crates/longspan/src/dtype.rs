//! The numbers that tensors hold.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::simd::Simd;

/// What a tensor holds: `f32`, [`bf16`] or [`f16`](struct@half::f16).
///
/// Whatever it is, scores, softmax, sums and log-sum-exp are f32; a result is rounded once, when it
/// is written.
pub trait Element:
    sealed::Sealed + Copy + fmt::Debug + Default + PartialEq + Send + Sync + 'static
{
    /// Which one it is.
    const TYPE: ElementType;

    /// The nearest one, ties to even.
    fn from_f32(x: f32) -> Self;

    /// The same number.
    fn to_f32(self) -> f32;
}

mod sealed {
    /// # Safety
    ///
    /// [`Element::TYPE`](super::Element::TYPE) must name this very type: pointers are cast by it.
    pub unsafe trait Sealed {}

    // SAFETY: `TYPE` is `F32`.
    unsafe impl Sealed for f32 {}
    // SAFETY: `TYPE` is `F16`.
    unsafe impl Sealed for half::f16 {}
    // SAFETY: `TYPE` is `Bf16`.
    unsafe impl Sealed for half::bf16 {}
}

impl Element for f32 {
    const TYPE: ElementType = ElementType::F32;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    const TYPE: ElementType = ElementType::Bf16;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

impl Element for f16 {
    const TYPE: ElementType = ElementType::F16;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

/// The name of an [`Element`].
///
/// ```
/// use longspan::{Element, ElementType};
///
/// assert_eq!("bf16".parse::<ElementType>()?, <half::bf16 as Element>::TYPE);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// 24 bits of precision.
    F32,
    /// 8 bits of precision, exponents as f32.
    Bf16,
    /// 11 bits of precision, numbers up to 65,504.
    F16,
}

impl ElementType {
    /// All there are.
    pub const ALL: [ElementType; 3] = [ElementType::F32, ElementType::Bf16, ElementType::F16];

    /// Bytes of one.
    pub fn size(self) -> usize {
        match self {
            ElementType::F32 => 4,
            ElementType::Bf16 | ElementType::F16 => 2,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ElementType::F32 => "f32",
            ElementType::Bf16 => "bf16",
            ElementType::F16 => "f16",
        })
    }
}

impl FromStr for ElementType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let same = |element: &ElementType| element.to_string().eq_ignore_ascii_case(text.trim());
        let name = || Error::ElementName { name: text.to_owned() };
        ElementType::ALL.into_iter().find(same).ok_or_else(name)
    }
}

/// A vector of numbers, as f32.
///
/// # Safety
///
/// `S::WIDTH` of them must be readable.
#[inline(always)]
pub(crate) unsafe fn load<E: Element, S: Simd>(simd: S, from: *const E) -> S::F {
    // SAFETY: `Sealed` demands that `TYPE` names `E`, whose bits are then 32 or 16 wide, and this
    // function that a vector of them is readable.
    unsafe {
        match E::TYPE {
            ElementType::F32 => simd.load(from.cast()),
            ElementType::Bf16 => simd.load_bf16(from.cast()),
            ElementType::F16 => simd.load_f16(from.cast()),
        }
    }
}

/// Two vectors of numbers, widened, in the order of [`paired`].
///
/// # Safety
///
/// `2 · S::WIDTH` of them must be readable.
#[inline(always)]
pub(crate) unsafe fn load_pairs<E: Element, S: Simd>(simd: S, from: *const E) -> [S::F; 2] {
    // SAFETY: as in `load`, for two vectors that follow each other.
    unsafe {
        match E::TYPE {
            ElementType::Bf16 => simd.load_bf16_pairs(from.cast()),
            _ => [load(simd, from), load(simd, from.add(S::WIDTH))],
        }
    }
}

/// Where number `index` stands in what [`load_pairs`] loads, pair after pair of vectors: as it lies
/// in memory, but for bf16, of which even ones come first.
#[inline(always)]
pub(crate) fn paired<E: Element, S: Simd>(index: usize) -> usize {
    let (first, place) = (index / (2 * S::WIDTH) * 2 * S::WIDTH, index % (2 * S::WIDTH));
    match E::TYPE {
        ElementType::Bf16 => first + place % 2 * S::WIDTH + place / 2,
        _ => index,
    }
}

/// Writes a vector of numbers, rounded.
///
/// # Safety
///
/// `S::WIDTH` of them must be writable.
#[inline(always)]
pub(crate) unsafe fn store<E: Element, S: Simd>(simd: S, to: *mut E, x: S::F) {
    // SAFETY: as in `load`, for a vector that is writable.
    unsafe {
        match E::TYPE {
            ElementType::F32 => simd.store(to.cast(), x),
            ElementType::Bf16 => simd.store_bf16(to.cast(), x),
            ElementType::F16 => simd.store_f16(to.cast(), x),
        }
    }
}
