//! Views of ndarray's arrays, whatever their strides, and tensors as arrays.

use ndarray::{Array4, ArrayView, ArrayViewMut, Dimension, Ix3, Ix4};

use std::marker::PhantomData;

use super::extent::{Extent, check_injective};
use super::{Tensor, View, ViewMut};
use crate::dims::{Dims, Order, Strides};
use crate::error::Result;

/// Axes of an array that is a tensor: four, or three without a batch.
pub trait TensorAxes: Dimension + sealed::Sealed {}

impl TensorAxes for Ix3 {}
impl TensorAxes for Ix4 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for ndarray::Ix3 {}
    impl Sealed for ndarray::Ix4 {}
}

fn extent(shape: &[usize], strides: &[isize], order: Order) -> Extent {
    // Without a batch axis there is one entry, whose stride is never used.
    let (batch, batch_stride, axis) = match shape.len() {
        3 => (1, 0, 0),
        _ => (shape[0], strides[0], 1),
    };
    let (token, head) = match order {
        Order::Bshd => (axis, axis + 1),
        Order::Bhsd => (axis + 1, axis),
    };
    let dim = axis + 2;
    Extent {
        dims: Dims { batch, tokens: shape[token], heads: shape[head], dim: shape[dim] },
        strides: Strides {
            batch: batch_stride,
            tokens: strides[token],
            heads: strides[head],
            dim: strides[dim],
        },
    }
}

impl<'a, T: Copy> View<'a, T> {
    /// An array of four axes, or of three where the batch is one entry, in the given order and with
    /// whatever strides it has.
    ///
    /// ```
    /// use longspan::{Order, View};
    /// use ndarray::{Array3, Array4, s};
    ///
    /// let array = Array4::<f32>::zeros((1, 8, 100, 64));
    /// let every_second = array.slice(s![.., .., ..;2, ..]);
    /// let view = View::from_ndarray(every_second, Order::Bhsd);
    /// assert_eq!((view.dims().tokens, view.strides().tokens), (50, 128));
    ///
    /// let array = Array3::<f32>::zeros((100, 8, 64));
    /// let view = View::from_ndarray(array.view(), Order::Bshd);
    /// assert_eq!((view.dims().batch, view.dims().tokens, view.dims().heads), (1, 100, 8));
    /// ```
    pub fn from_ndarray<D: TensorAxes>(array: ArrayView<'a, T, D>, order: Order) -> Self {
        let extent = extent(array.shape(), array.strides(), order);
        View { first: array.as_ptr(), extent, memory: PhantomData }
    }
}

impl<'a, T: Copy> ViewMut<'a, T> {
    /// An array of four axes, or of three where the batch is one entry, in the given order and with
    /// whatever strides it has.
    ///
    /// ```
    /// use longspan::{Order, ViewMut};
    /// use ndarray::Array4;
    ///
    /// let mut array = Array4::<f32>::zeros((1, 100, 8, 64));
    /// let view = ViewMut::from_ndarray(array.view_mut(), Order::Bshd)?;
    /// assert_eq!(view.dims().heads, 8);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn from_ndarray<D: TensorAxes>(
        mut array: ArrayViewMut<'a, T, D>,
        order: Order,
    ) -> Result<Self> {
        let extent = extent(array.shape(), array.strides(), order);
        check_injective(&extent)?;
        Ok(ViewMut { first: array.as_mut_ptr(), extent, memory: PhantomData })
    }
}

impl<T: Copy> Tensor<T> {
    /// The tensor as an array, with its axes in its order; nothing is copied.
    ///
    /// ```
    /// use longspan::{Dims, Order, Tensor};
    ///
    /// let dims = Dims { batch: 1, tokens: 2, heads: 3, dim: 4 };
    /// let tensor = Tensor::new((0..24).map(|i| i as f32).collect(), dims, Order::Bshd)?;
    /// let array = tensor.into_ndarray();
    /// assert_eq!((array.shape(), array[[0, 1, 2, 3]]), (&[1, 2, 3, 4][..], 23.0));
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn into_ndarray(self) -> Array4<T> {
        let Dims { batch, tokens, heads, dim } = self.dims();
        let shape = match self.order() {
            Order::Bshd => (batch, tokens, heads, dim),
            Order::Bhsd => (batch, heads, tokens, dim),
        };
        Array4::from_shape_vec(shape, self.into_vec()).expect("a tensor has as many elements")
    }
}
