//! Views of ndarray's arrays, whatever their strides.

use ndarray::{ArrayView4, ArrayViewMut4};

use super::*;

fn extent(shape: &[usize], strides: &[isize], order: Order) -> Extent {
    let (token, head) = match order {
        Order::BatchTokenHeadDim => (1, 2),
        Order::BatchHeadTokenDim => (2, 1),
    };
    Extent {
        dims: Dims { batch: shape[0], tokens: shape[token], heads: shape[head], dim: shape[3] },
        strides: Strides {
            batch: strides[0],
            tokens: strides[token],
            heads: strides[head],
            dim: strides[3],
        },
    }
}

impl<'a, T: Copy> View<'a, T> {
    /// An array of four axes, in the given order and with whatever strides it has.
    ///
    /// ```
    /// use longspan::{Order, View};
    /// use ndarray::{Array4, s};
    ///
    /// let array = Array4::<f32>::zeros((1, 8, 100, 64));
    /// let every_second = array.slice(s![.., .., ..;2, ..]);
    /// let view = View::from_ndarray(every_second, Order::BatchHeadTokenDim);
    /// assert_eq!((view.dims().tokens, view.strides().tokens), (50, 128));
    /// ```
    pub fn from_ndarray(array: ArrayView4<'a, T>, order: Order) -> Self {
        let extent = extent(array.shape(), array.strides(), order);
        View { first: array.as_ptr(), extent, memory: PhantomData }
    }
}

impl<'a, T: Copy> ViewMut<'a, T> {
    /// An array of four axes, in the given order and with whatever strides it has.
    ///
    /// ```
    /// use longspan::{Order, ViewMut};
    /// use ndarray::Array4;
    ///
    /// let mut array = Array4::<f32>::zeros((1, 100, 8, 64));
    /// let view = ViewMut::from_ndarray(array.view_mut(), Order::BatchTokenHeadDim)?;
    /// assert_eq!(view.dims().heads, 8);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn from_ndarray(mut array: ArrayViewMut4<'a, T>, order: Order) -> Result<Self> {
        let extent = extent(array.shape(), array.strides(), order);
        check_injective(&extent)?;
        Ok(ViewMut { first: array.as_mut_ptr(), extent, memory: PhantomData })
    }
}
