//! Conversions of half types against the `half` crate, and sums of vectors, on every instruction
//! set of this CPU.

use half::{bf16, f16};

use super::*;
use crate::dtype::{Element, load, load_pairs, paired, store};
use crate::isa::Isa;

/// A half type's bits.
trait Half: Element {
    fn of(bits: u16) -> Self;
    fn bits(self) -> u16;
}

impl Half for bf16 {
    fn of(bits: u16) -> Self {
        bf16::from_bits(bits)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

impl Half for f16 {
    fn of(bits: u16) -> Self {
        f16::from_bits(bits)
    }
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

/// Numbers of one type as another, a vector at a time.
#[derive(Clone, Copy)]
enum Convert<'a, E> {
    Widen(&'a [E], &'a std::cell::RefCell<Vec<f32>>),
    Narrow(&'a [f32], &'a std::cell::RefCell<Vec<E>>),
}

impl<E: Element> Operation for Convert<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        // SAFETY: lengths are asserted to be whole vectors of the widest set, which those of any
        // set divide; `resize` makes the other list as long.
        unsafe {
            match self {
                Convert::Widen(from, to) => {
                    assert!(from.len().is_multiple_of(WIDEST));
                    let mut to = to.borrow_mut();
                    to.resize(from.len(), 0.0);
                    for at in (0..from.len()).step_by(S::WIDTH) {
                        simd.store(to.as_mut_ptr().add(at), load(simd, from.as_ptr().add(at)));
                    }
                }
                Convert::Narrow(from, to) => {
                    assert!(from.len().is_multiple_of(WIDEST));
                    let mut to = to.borrow_mut();
                    to.resize(from.len(), E::default());
                    for at in (0..from.len()).step_by(S::WIDTH) {
                        let x = simd.load(from.as_ptr().add(at));
                        store(simd, to.as_mut_ptr().add(at), x);
                    }
                }
            }
        }
    }
}

impl<E: Element> WithSimd for Convert<'_, E> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        // SAFETY: `Convert` has no condition: its `eval` asserts the lengths of its lists.
        unsafe { simd.call(self) };
    }
}

/// All 65,536 numbers. NaN stays NaN, of the same sign.
fn widening<E: Half>() {
    let all: Vec<E> = (0..=u16::MAX).map(E::of).collect();
    for isa in Isa::available() {
        let wide = std::cell::RefCell::new(Vec::new());
        dispatch(isa, Convert::Widen(&all, &wide));
        for (&x, wide) in all.iter().zip(wide.into_inner()) {
            let expected = x.to_f32();
            let same = wide.to_bits() == expected.to_bits();
            let both_nan = wide.is_nan() && expected.is_nan();
            let same_sign = wide.is_sign_negative() == expected.is_sign_negative();
            assert!(same || both_nan && same_sign, "{isa}: {:#06x} as {wide}", x.bits());
        }
    }
}

/// Every number of the half type, what lies halfway to the next and right beside that, and as many
/// bits drawn at random as there are numbers.
fn narrowing<E: Half>() {
    let mut numbers = Vec::new();
    for bits in 0..=u16::MAX {
        let (x, next) = (E::of(bits).to_f32(), E::of(bits.wrapping_add(1)).to_f32());
        let tie = ((f64::from(x) + f64::from(next)) / 2.0) as f32;
        numbers.extend([x, tie, tie.next_up(), tie.next_down()]);
        let random = u32::from(bits).wrapping_mul(0x9E37_79B9).rotate_left(13) ^ 0x5A5A_1234;
        numbers.extend([random, random.wrapping_mul(0x85EB_CA6B)].map(f32::from_bits));
    }
    // Ties with infinity, the least subnormal numbers, NaN of either kind and sign.
    let edges = [65_520.0, 65_519.996, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1), 2.98e-8];
    numbers.extend(edges.into_iter().flat_map(|x| [x, -x]));
    let nans = [0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFF80_0001, 0x7FFF_FFFF, 0x7F7F_FFFF];
    numbers.extend(nans.map(f32::from_bits));
    numbers.resize(numbers.len().next_multiple_of(WIDEST), 0.0);
    for isa in Isa::available() {
        let narrow = std::cell::RefCell::new(Vec::<E>::new());
        dispatch(isa, Convert::Narrow(&numbers, &narrow));
        for (&x, got) in numbers.iter().zip(narrow.into_inner()) {
            let expected = E::from_f32(x);
            if x.is_nan() {
                let kept = got.to_f32().is_sign_negative() == x.is_sign_negative();
                assert!(got.to_f32().is_nan() && kept, "{isa}: {:#010x}", x.to_bits());
            } else {
                assert_eq!(got.bits(), expected.bits(), "{isa}: {x} ({:#010x})", x.to_bits());
            }
        }
    }
}

#[test]
fn widening_bf16() {
    widening::<bf16>();
}

#[test]
fn widening_f16() {
    widening::<f16>();
}

#[test]
fn narrowing_bf16() {
    narrowing::<bf16>();
}

#[test]
fn narrowing_f16() {
    narrowing::<f16>();
}

/// Pairs of vectors hold what single ones do, in the order that `paired` says.
struct Pairs<'a, E>(&'a [E]);

impl<E: Element> WithSimd for Pairs<'_, E> {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        /// # Safety
        ///
        /// The list must consist of whole pairs of the widest vectors.
        struct Load<'a, E>(&'a [E], &'a std::cell::RefCell<Vec<f32>>);
        impl<E: Element> Operation for Load<'_, E> {
            type Output = ();

            #[inline(always)]
            unsafe fn eval<S: Simd>(self, simd: S) {
                let mut to = self.1.borrow_mut();
                to.resize(self.0.len(), 0.0);
                for at in (0..self.0.len()).step_by(2 * S::WIDTH) {
                    // SAFETY: the list has whole pairs of vectors, as the type demands, and
                    // `resize` made the other one as long.
                    unsafe {
                        let [first, second] = load_pairs(simd, self.0.as_ptr().add(at));
                        simd.store(to.as_mut_ptr().add(at), first);
                        simd.store(to.as_mut_ptr().add(at + S::WIDTH), second);
                    }
                }
            }
        }
        let found = std::cell::RefCell::new(Vec::new());
        assert!(self.0.len().is_multiple_of(2 * WIDEST));
        // SAFETY: just asserted.
        unsafe { simd.call(Load(self.0, &found)) };
        let found = found.into_inner();
        for (index, x) in self.0.iter().enumerate() {
            assert_eq!(found[paired::<E, S>(index)], x.to_f32(), "number {index} of {}", E::TYPE);
        }
    }
}

#[test]
fn pairs_of_vectors() {
    let numbers: Vec<f32> = (0..4 * WIDEST).map(|n| n as f32 - 17.5).collect();
    for isa in Isa::available() {
        dispatch(isa, Pairs(&numbers));
        dispatch(isa, Pairs(&numbers.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()));
        dispatch(isa, Pairs(&numbers.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()));
    }
}

/// The sum of each vector, in its lane.
struct Sums;

impl WithSimd for Sums {
    type Output = ();

    fn with<S: Simd>(self, simd: S) {
        /// # Safety
        ///
        /// The list must have as many elements as the widest square.
        struct Add<'a>(&'a [f32], &'a std::cell::RefCell<[f32; WIDEST]>);
        impl Operation for Add<'_> {
            type Output = ();

            #[inline(always)]
            unsafe fn eval<S: Simd>(self, simd: S) {
                // SAFETY: the square is as large as the widest vector's, as the type demands, and
                // the sums have `WIDEST` elements.
                unsafe { simd.store(self.1.borrow_mut().as_mut_ptr(), simd.sums(self.0.as_ptr())) }
            }
        }
        let numbers: Vec<f32> = (0..WIDEST * WIDEST).map(|n| (n * n % 97) as f32).collect();
        let found = std::cell::RefCell::new([0.0; WIDEST]);
        // SAFETY: `numbers` has `WIDEST²`.
        unsafe { simd.call(Add(&numbers, &found)) };
        for (lane, sum) in found.into_inner().into_iter().enumerate().take(S::WIDTH) {
            let vector = &numbers[lane * S::WIDTH..][..S::WIDTH];
            assert_eq!(sum, vector.iter().sum::<f32>(), "lane {lane}");
        }
    }
}

#[test]
fn sums_of_vectors() {
    Isa::available().into_iter().for_each(|isa| dispatch(isa, Sums));
}
