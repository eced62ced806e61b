//! Tensors to write.

use std::marker::PhantomData;

use super::View;
use super::extent::{Extent, check_injective, check_pointer, offset, within};
use crate::dims::{Dims, Order, Strides};
use crate::dtype::{Element, ElementType};
use crate::error::Result;

/// A tensor to write; no two of its elements share memory.
///
/// ```
/// use longspan::{Dims, Order, Strides, ViewMut};
///
/// let mut data = vec![0.0_f32; 24];
/// let dims = Dims { batch: 1, tokens: 3, heads: 2, dim: 4 };
/// assert!(ViewMut::new(&mut data, dims, Order::Bhsd).is_ok());
/// let shared = Strides { batch: 0, tokens: 4, heads: 0, dim: 1 };
/// assert!(ViewMut::strided(&mut data, 0, dims, shared).is_err());
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    pub(super) first: *mut T,
    pub(super) extent: Extent,
    pub(super) memory: PhantomData<&'a mut [T]>,
}

// SAFETY: a view is an exclusive borrow of its elements: `new` and `strided` take one, `from_raw`
// demands it.
unsafe impl<T: Send> Send for ViewMut<'_, T> {}
// SAFETY: nothing is written through a shared reference to it.
unsafe impl<T: Sync> Sync for ViewMut<'_, T> {}

impl<'a, T: Copy> ViewMut<'a, T> {
    /// A contiguous tensor: all of `data`, its axes in the given order.
    pub fn new(data: &'a mut [T], dims: Dims, order: Order) -> Result<Self> {
        let extent = View::new(data, dims, order)?.extent;
        Ok(ViewMut { first: data.as_mut_ptr(), extent, memory: PhantomData })
    }

    /// A tensor with any strides whose first element is `data[first]`; every element has to lie
    /// within `data`, and no two on top of each other.
    pub fn strided(data: &'a mut [T], first: usize, dims: Dims, strides: Strides) -> Result<Self> {
        let extent = Extent { dims, strides };
        let first = within(data.len(), first, &extent)?;
        check_injective(&extent)?;
        // SAFETY: `within` returns an index that isn't past the end of `data`.
        let first = unsafe { data.as_mut_ptr().add(first) };
        Ok(ViewMut { first, extent, memory: PhantomData })
    }

    /// A tensor at a pointer, for bindings to other languages.
    ///
    /// Misaligned pointers, extents that can't be counted and strides that put two elements on
    /// top of each other are errors.
    ///
    /// # Safety
    ///
    /// Every element of the extent must lie in one allocation, be initialised, and be neither
    /// read nor written by anything else for as long as the view lives. Longspan itself refuses
    /// calls whose outputs overlap each other or an input.
    pub unsafe fn from_raw(first: *mut T, dims: Dims, strides: Strides) -> Result<Self> {
        let extent = Extent { dims, strides };
        check_pointer(first, &extent)?;
        check_injective(&extent)?;
        Ok(ViewMut { first, extent, memory: PhantomData })
    }

    /// The same tensor, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { first: self.first, extent: self.extent, memory: PhantomData }
    }

    /// The same tensor, to read.
    pub fn as_view(&self) -> View<'_, T> {
        View { first: self.first, extent: self.extent, memory: PhantomData }
    }

    /// How many elements each axis has.
    pub fn dims(&self) -> Dims {
        self.extent.dims
    }

    /// Elements from one index of each axis to the next.
    pub fn strides(&self) -> Strides {
        self.extent.strides
    }

    /// The first element.
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.first
    }

    /// All elements, where they lie one after the other as `[batch, head, token, dim]`.
    ///
    /// ```
    /// use longspan::{Dims, Order, ViewMut};
    ///
    /// let (mut data, dims) = (vec![1.0_f32; 12], Dims { batch: 1, tokens: 3, heads: 2, dim: 2 });
    /// let mut view = ViewMut::new(&mut data, dims, Order::Bhsd)?;
    /// view.as_mut_slice().unwrap()[3] = 7.0;
    /// assert_eq!(view.as_view().get(0, 1, 0, 1), Some(7.0));
    /// assert!(ViewMut::new(&mut data, dims, Order::Bshd)?.as_mut_slice().is_none());
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn as_mut_slice(&mut self) -> Option<&mut [T]> {
        let Extent { dims, strides } = self.extent;
        let (len, plain) = (dims.elements()?, Order::Bhsd.strides(dims));
        let axes = |strides: Strides| {
            let steps = [strides.batch, strides.heads, strides.tokens, strides.dim];
            // An axis of one index has no step.
            let counts = [dims.batch, dims.heads, dims.tokens, dims.dim];
            steps.into_iter().zip(counts).map(|(step, count)| if count > 1 { step } else { 0 })
        };
        if len == 0 {
            return Some(&mut []);
        }
        // SAFETY: where strides are those of contiguous axes, the `len` elements from the first on
        // are those of the view, each once, and the view is exclusive.
        axes(strides)
            .eq(axes(plain))
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.first, len) })
    }

    /// Writes the numbers of one token and head.
    ///
    /// # Panics
    ///
    /// If there is no such token, or `from` hasn't got the length of a head.
    pub fn write_row(&mut self, batch: usize, token: usize, head: usize, from: &[T]) {
        let Extent { dims, strides } = self.extent;
        assert_eq!(from.len(), dims.dim, "numbers of a head");
        if from.is_empty() {
            return;
        }
        let row = offset(&self.extent, [batch, token, head, 0]).expect("a row of the view");
        for (dim, &number) in from.iter().enumerate() {
            // SAFETY: `offset` has found the row in the extent, and `dim` is below its length; the
            // view is exclusive.
            unsafe { *self.first.offset(row + dim as isize * strides.dim) = number };
        }
    }

    /// Writes `value` to every element.
    pub fn fill(&mut self, value: T) {
        let Extent { dims, strides } = self.extent;
        for batch in 0..dims.batch {
            for token in 0..dims.tokens {
                for head in 0..dims.heads {
                    let row = batch as isize * strides.batch
                        + token as isize * strides.tokens
                        + head as isize * strides.heads;
                    // SAFETY: indices are below the dims, so that the row is in the extent.
                    let row = unsafe { self.first.offset(row) };
                    if strides.dim == 1 {
                        // SAFETY: the row is in the extent, its elements side by side; the view is
                        // exclusive.
                        unsafe { std::slice::from_raw_parts_mut(row, dims.dim) }.fill(value);
                        continue;
                    }
                    for dim in 0..dims.dim {
                        // SAFETY: as above, one by one.
                        unsafe { *row.offset(dim as isize * strides.dim) = value };
                    }
                }
            }
        }
    }
}

impl<'a, E: Element> ViewMut<'a, E> {
    /// The same view, if its elements are f32.
    pub(crate) fn into_f32(self) -> std::result::Result<ViewMut<'a, f32>, Self> {
        match E::TYPE {
            ElementType::F32 => {
                Ok(ViewMut { first: self.first.cast(), extent: self.extent, memory: PhantomData })
            }
            _ => Err(self),
        }
    }
}
