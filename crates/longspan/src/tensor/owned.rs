//! Tensors that own their elements.

use super::{View, ViewMut, allocatable, allocate};
use crate::dims::{Dims, Order};
use crate::dtype::Element;
use crate::error::Result;

/// A tensor that owns its elements, contiguous.
///
/// ```
/// use longspan::{Dims, Order, Tensor};
///
/// let dims = Dims { batch: 1, tokens: 2, heads: 1, dim: 2 };
/// let mut tensor = Tensor::filled(0.0_f32, dims, Order::Bhsd)?;
/// tensor.as_mut_slice()[3] = 1.0;
/// assert_eq!(tensor.view().get(0, 1, 0, 1), Some(1.0));
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor<T> {
    data: Vec<T>,
    dims: Dims,
    order: Order,
}

impl<E: Element> Tensor<E> {
    /// A tensor of zeros, which the system makes when they are first read or written.
    ///
    /// ```
    /// use longspan::{Dims, Error, Order, Tensor};
    ///
    /// let dims = Dims { batch: 1, tokens: 2, heads: 1, dim: 2 };
    /// assert_eq!(Tensor::<f32>::zeros(dims, Order::Bhsd)?.as_slice(), [0.0; 4]);
    /// // More than any address space has.
    /// let dims = Dims { tokens: 1 << 58, ..dims };
    /// let refused = Tensor::<f32>::zeros(dims, Order::Bhsd);
    /// assert_eq!(refused, Err(Error::OutOfMemory { bytes: 1 << 61 }));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn zeros(dims: Dims, order: Order) -> Result<Self> {
        let data = allocate::zeros(allocatable::<E>(dims)?)?;
        Ok(Tensor { data, dims, order })
    }
}

impl<T: Copy> Tensor<T> {
    /// A tensor of equal elements, all of them written; [`zeros`](Tensor::zeros) costs less.
    pub fn filled(value: T, dims: Dims, order: Order) -> Result<Self> {
        let data = allocate::filled(value, allocatable::<T>(dims)?)?;
        Ok(Tensor { data, dims, order })
    }

    /// A tensor of these elements, its axes in the given order.
    pub fn new(data: Vec<T>, dims: Dims, order: Order) -> Result<Self> {
        View::new(&data, dims, order)?;
        Ok(Tensor { data, dims, order })
    }

    /// To read.
    pub fn view(&self) -> View<'_, T> {
        View::new(&self.data, self.dims, self.order).expect("checked when it was made")
    }

    /// To write.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut::new(&mut self.data, self.dims, self.order).expect("checked when it was made")
    }

    /// How many elements each axis has.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// The order of the axes.
    pub fn order(&self) -> Order {
        self.order
    }

    /// All elements, in order.
    pub fn as_slice(&self) -> &[T] {
        &self.data
    }

    /// All elements, in order, to write.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.data
    }

    /// The elements alone.
    pub fn into_vec(self) -> Vec<T> {
        self.data
    }
}
