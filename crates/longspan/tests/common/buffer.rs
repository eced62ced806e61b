//! Numbers in strided memory.
//!
//! Tests think in dense `[batch][head][token][dim]` tensors, as the oracle does. A [`Buffer`] puts
//! such a tensor into memory as a [`Placement`] says and fills what lies between its elements with
//! a NaN of its own bits: a kernel that reads it shows NaN, one that writes it is caught.

use half::{bf16, f16};
use longspan::{Dims, Element, Order, Strides, View, ViewMut};
use longspan_testing::Precision;

/// The order that the oracle's tensors have.
pub(crate) fn dense_order() -> Order {
    Order::Bhsd
}

/// How a tensor lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Without gaps.
    Contiguous(Order),
    /// In that order with an odd gap behind every axis.
    Gaps(Order),
    /// With gaps, every axis but the last backwards.
    Reversed(Order),
    /// With gaps and every axis backwards, the last one too.
    AllReversed(Order),
    /// The numbers of a head three apart.
    Spread(Order),
    /// The numbers of a head outermost.
    DimOutermost,
}

impl Placement {
    pub(crate) const ALL: [Placement; 11] = [
        Placement::Contiguous(Order::Bshd),
        Placement::Contiguous(Order::Bhsd),
        Placement::Gaps(Order::Bshd),
        Placement::Gaps(Order::Bhsd),
        Placement::Reversed(Order::Bshd),
        Placement::Reversed(Order::Bhsd),
        Placement::AllReversed(Order::Bshd),
        Placement::AllReversed(Order::Bhsd),
        Placement::Spread(Order::Bshd),
        Placement::Spread(Order::Bhsd),
        Placement::DimOutermost,
    ];

    /// Strides, the index of the first element, and how many elements of memory it takes.
    fn strides(self, dims: Dims) -> (Strides, usize, usize) {
        let Dims { batch, tokens, heads, dim } = dims;
        // Axes from the innermost out, each with the gap behind it and whether it is backwards.
        #[derive(Clone, Copy)]
        enum Axis {
            Batch,
            Tokens,
            Heads,
            Dim,
        }
        let inner = |order| match order {
            Order::Bshd => [Axis::Dim, Axis::Heads, Axis::Tokens, Axis::Batch],
            Order::Bhsd => [Axis::Dim, Axis::Tokens, Axis::Heads, Axis::Batch],
        };
        let (order, step, gap, backwards) = match self {
            Placement::Contiguous(order) => (inner(order), 1, 0, [false; 4]),
            Placement::Gaps(order) => (inner(order), 1, 3, [false; 4]),
            Placement::Reversed(order) => (inner(order), 1, 5, [false, true, true, true]),
            Placement::AllReversed(order) => (inner(order), 1, 1, [true; 4]),
            Placement::Spread(order) => (inner(order), 3, 2, [false; 4]),
            Placement::DimOutermost => {
                ([Axis::Heads, Axis::Tokens, Axis::Batch, Axis::Dim], 1, 1, [false; 4])
            }
        };
        let mut strides = Strides { batch: 0, tokens: 0, heads: 0, dim: 0 };
        let (mut stride, mut first, mut last) = (step, 0, 0);
        for (axis, backwards) in order.into_iter().zip(backwards) {
            let (len, place) = match axis {
                Axis::Batch => (batch, &mut strides.batch),
                Axis::Tokens => (tokens, &mut strides.tokens),
                Axis::Heads => (heads, &mut strides.heads),
                Axis::Dim => (dim, &mut strides.dim),
            };
            let reach = len.saturating_sub(1) * stride;
            if backwards {
                *place = -(stride as isize);
                first += reach;
            } else {
                *place = stride as isize;
                last += reach;
            }
            stride = stride * len.max(1) + gap;
        }
        let elements = if dims.elements() == Some(0) { 0 } else { first + last + 1 };
        (strides, first, elements)
    }
}

/// What a tensor holds, to tests.
pub(crate) trait Number: Element {
    /// What the oracle calls it.
    const PRECISION: Precision;

    /// What lies between the elements: a NaN that no arithmetic makes.
    const GAP: Self;

    /// What an output holds before it is written: another one.
    const POISON: Self;

    /// The greatest finite one.
    const MOST: Self;

    /// Whether both have the same bits.
    fn is(self, other: Self) -> bool;
}

macro_rules! number {
    ($type:ident, $precision:ident, $gap:literal, $poison:literal) => {
        impl Number for $type {
            const PRECISION: Precision = Precision::$precision;
            const GAP: Self = $type::from_bits($gap);
            const POISON: Self = $type::from_bits($poison);
            const MOST: Self = $type::MAX;

            fn is(self, other: Self) -> bool {
                self.to_bits() == other.to_bits()
            }
        }
    };
}

number!(f32, F32, 0x7FAB_CDEF, 0x7FEE_DEAD);
number!(bf16, Bf16, 0x7FAB, 0x7FEE);
number!(f16, F16, 0x7DAB, 0x7FEE);

/// A tensor in strided memory of its own.
#[derive(Clone)]
pub(crate) struct BufferOf<E> {
    data: Vec<E>,
    first: usize,
    dims: Dims,
    strides: Strides,
}

pub(crate) type Buffer = BufferOf<f32>;

impl<E: Number> BufferOf<E> {
    /// A tensor to be written, poisoned.
    pub(crate) fn poisoned(dims: Dims, placement: Placement) -> Self {
        let (strides, first, elements) = placement.strides(dims);
        let mut data = vec![E::GAP; elements];
        Self::each(first, dims, strides, |_, at| data[at] = E::POISON);
        BufferOf { data, first, dims, strides }
    }

    /// A tensor with these numbers, `[batch][head][token][dim]`, rounded if need be.
    pub(crate) fn of(dense: &[f32], dims: Dims, placement: Placement) -> Self {
        assert_eq!(Some(dense.len()), dims.elements());
        let (strides, first, elements) = placement.strides(dims);
        let mut data = vec![E::GAP; elements];
        Self::each(first, dims, strides, |n, at| data[at] = E::from_f32(dense[n]));
        BufferOf { data, first, dims, strides }
    }

    pub(crate) fn view(&self) -> View<'_, E> {
        View::strided(&self.data, self.first, self.dims, self.strides).unwrap()
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_, E> {
        ViewMut::strided(&mut self.data, self.first, self.dims, self.strides).unwrap()
    }

    /// The numbers, `[batch][head][token][dim]`. Panics if memory between them was written.
    pub(crate) fn dense(&self) -> Vec<f32> {
        let mut dense = vec![E::default(); self.dims.elements().unwrap()];
        Self::each(self.first, self.dims, self.strides, |n, at| dense[n] = self.data[at]);
        let gaps = |data: &[E]| data.iter().filter(|x| x.is(E::GAP)).count();
        let expected = self.data.len() - dense.len() + gaps(&dense);
        assert_eq!(gaps(&self.data), expected, "memory between elements was written");
        dense.into_iter().map(E::to_f32).collect()
    }

    /// The dense number of each element, and where it lies.
    #[inline(always)]
    fn each(first: usize, dims: Dims, strides: Strides, mut f: impl FnMut(usize, usize)) {
        let Dims { batch, tokens, heads, dim } = dims;
        let Strides { batch: sb, tokens: st, heads: sh, dim: sd } = strides;
        let mut n = 0;
        for b in 0..batch as isize {
            for h in 0..heads as isize {
                for t in 0..tokens as isize {
                    let mut at = first as isize + b * sb + h * sh + t * st;
                    for _ in 0..dim {
                        f(n, at as usize);
                        (n, at) = (n + 1, at + sd);
                    }
                }
            }
        }
    }
}
