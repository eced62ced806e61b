//! Tensors to read.

use std::marker::PhantomData;

use super::extent::{Extent, check_pointer, offset, within};
use crate::dims::{Dims, Order, Strides};
use crate::error::{Error, Result};

/// A tensor to read.
///
/// ```
/// use longspan::{Dims, Order, View};
///
/// let data: Vec<f32> = (0..24).map(|x| x as f32).collect();
/// let dims = Dims { batch: 1, tokens: 3, heads: 2, dim: 4 };
/// let view = View::new(&data, dims, Order::Bshd)?;
/// assert_eq!(view.get(0, 2, 1, 3), Some(23.0));
/// assert!(View::new(&data[1..], dims, Order::Bshd).is_err());
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    pub(super) first: *const T,
    pub(super) extent: Extent,
    pub(super) memory: PhantomData<&'a [T]>,
}

// SAFETY: a view is a shared borrow of its elements: `new` and `strided` take one, `from_raw`
// demands it.
unsafe impl<T: Sync> Send for View<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for View<'_, T> {}

impl<'a, T: Copy> View<'a, T> {
    /// A contiguous tensor: all of `data`, its axes in the given order.
    pub fn new(data: &'a [T], dims: Dims, order: Order) -> Result<Self> {
        let elements = dims.elements().ok_or(Error::Overflow { dims })?;
        if data.len() != elements {
            return Err(Error::Length { what: "the slice", len: data.len(), expected: elements });
        }
        let extent = Extent { dims, strides: order.strides(dims) };
        Ok(View { first: data.as_ptr(), extent, memory: PhantomData })
    }

    /// A tensor with any strides whose first element is `data[first]`; every element has to lie
    /// within `data`.
    ///
    /// ```
    /// use longspan::{Dims, Strides, View};
    ///
    /// // One sequence read backwards, the same for three heads.
    /// let data = [1.0_f32, 2.0, 3.0, 4.0];
    /// let dims = Dims { batch: 1, tokens: 4, heads: 3, dim: 1 };
    /// let strides = Strides { batch: 0, tokens: -1, heads: 0, dim: 1 };
    /// let view = View::strided(&data, 3, dims, strides)?;
    /// assert_eq!(view.get(0, 0, 2, 0), Some(4.0));
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn strided(data: &'a [T], first: usize, dims: Dims, strides: Strides) -> Result<Self> {
        let extent = Extent { dims, strides };
        let first = within(data.len(), first, &extent)?;
        // SAFETY: `within` returns an index that isn't past the end of `data`.
        let first = unsafe { data.as_ptr().add(first) };
        Ok(View { first, extent, memory: PhantomData })
    }

    /// A tensor at a pointer, for bindings to other languages.
    ///
    /// Misaligned pointers and extents that can't be counted are errors.
    ///
    /// # Safety
    ///
    /// Every element of the extent must lie in one allocation, be initialised, and not be written
    /// to for as long as the view lives.
    pub unsafe fn from_raw(first: *const T, dims: Dims, strides: Strides) -> Result<Self> {
        let extent = Extent { dims, strides };
        check_pointer(first, &extent)?;
        Ok(View { first, extent, memory: PhantomData })
    }

    /// The element at an index, if there is one.
    pub fn get(&self, batch: usize, token: usize, head: usize, dim: usize) -> Option<T> {
        let offset = offset(&self.extent, [batch, token, head, dim])?;
        // SAFETY: `offset` has found the index in the extent, whose elements a view may read.
        Some(unsafe { *self.first.offset(offset) })
    }

    /// Some tokens of each sequence.
    ///
    /// ```
    /// use longspan::{Dims, Order, View};
    ///
    /// let dims = Dims { batch: 1, tokens: 3, heads: 1, dim: 1 };
    /// let view = View::new(&[1.0_f32, 2.0, 3.0], dims, Order::Bshd)?;
    /// assert_eq!(view.tokens(1..3).get(0, 0, 0, 0), Some(2.0));
    /// # Ok::<_, longspan::Error>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If there are no such tokens.
    #[must_use]
    pub fn tokens(&self, tokens: std::ops::Range<usize>) -> Self {
        let Extent { dims, strides } = self.extent;
        assert!(
            tokens.start <= tokens.end && tokens.end <= dims.tokens,
            "tokens {tokens:?} of {}",
            dims.tokens
        );
        // Without elements the first one may be anywhere: it stays where it is.
        let by = if tokens.is_empty() { 0 } else { tokens.start as isize * strides.tokens };
        let first = self.first.wrapping_offset(by);
        let dims = Dims { tokens: tokens.len(), ..dims };
        View { first, extent: Extent { dims, strides }, memory: PhantomData }
    }

    /// Copies the numbers of one token and head to `into`.
    ///
    /// ```
    /// use longspan::{Dims, Strides, View};
    ///
    /// let dims = Dims { batch: 1, tokens: 2, heads: 1, dim: 2 };
    /// let strides = Strides { batch: 0, tokens: 1, heads: 0, dim: 2 };
    /// let turned = View::strided(&[1.0_f32, 2.0, 3.0, 4.0], 0, dims, strides)?;
    /// let mut row = [0.0; 2];
    /// turned.copy_row(0, 1, 0, &mut row);
    /// assert_eq!(row, [2.0, 4.0]);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If there is no such token, or `into` hasn't got the length of a head.
    pub fn copy_row(&self, batch: usize, token: usize, head: usize, into: &mut [T]) {
        let Extent { dims, strides } = self.extent;
        assert_eq!(into.len(), dims.dim, "numbers of a head");
        if into.is_empty() {
            return;
        }
        let row = offset(&self.extent, [batch, token, head, 0]).expect("a row of the view");
        // SAFETY: the row lies within the extent, whose elements are readable; `into` is a borrow
        // of its own.
        unsafe {
            let row = self.first.offset(row);
            if strides.dim == 1 {
                std::ptr::copy_nonoverlapping(row, into.as_mut_ptr(), dims.dim);
                return;
            }
            for (dim, to) in into.iter_mut().enumerate() {
                *to = *row.offset(dim as isize * strides.dim);
            }
        }
    }

    /// How many elements each axis has.
    pub fn dims(&self) -> Dims {
        self.extent.dims
    }

    /// Elements from one index of each axis to the next.
    pub fn strides(&self) -> Strides {
        self.extent.strides
    }

    /// The order of axes of a contiguous tensor that comes nearest to these strides: what a new
    /// tensor beside it has.
    pub fn order(&self) -> Order {
        let Extent { dims, strides } = self.extent;
        let heads_outside = strides.heads.unsigned_abs() > strides.tokens.unsigned_abs();
        if heads_outside && dims.heads > 1 { Order::Bhsd } else { Order::Bshd }
    }

    /// The first element.
    pub fn as_ptr(&self) -> *const T {
        self.first
    }
}
