//! Tensors with four named axes, as strided views.
//!
//! The element at `(batch, token, head, dim)` lies at
//! `batch · strides.batch + token · strides.tokens + head · strides.heads + dim · strides.dim`
//! elements from the first. Strides are signed and, for what is only read, may be zero: a
//! transposed, reversed or broadcast tensor is a view like any other, and nothing is ever copied
//! to change the order of axes.
//!
//! [`View`] reads and [`ViewMut`] writes memory of somebody else's; [`Tensor`] owns its own. What
//! is written must not overlap itself: a [`ViewMut`] whose elements share memory can't be made.

pub(crate) mod allocate;
#[cfg(feature = "ndarray")]
mod from_ndarray;
mod memory;
mod select;
mod tensor;

use std::marker::PhantomData;

pub(crate) use self::memory::Memory;
pub(crate) use self::select::{Selection, Steps};
pub use self::tensor::Tensor;

use crate::element::{Element, ElementType};
use crate::error::{Error, Result};

/// How many elements each axis has.
///
/// ```
/// use longspan::Dims;
///
/// let dims = Dims { batch: 2, tokens: 1_000, heads: 8, dim: 64 };
/// assert_eq!(dims.elements(), Some(1_024_000));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Sequences.
    pub batch: usize,
    /// Positions of each sequence.
    pub tokens: usize,
    /// Heads, of queries or of keys and values.
    pub heads: usize,
    /// Numbers a head.
    pub dim: usize,
}

impl Dims {
    /// The product of all axes, if it can be counted.
    pub fn elements(&self) -> Option<usize> {
        if [self.batch, self.tokens, self.heads, self.dim].contains(&0) {
            return Some(0);
        }
        self.batch.checked_mul(self.tokens)?.checked_mul(self.heads)?.checked_mul(self.dim)
    }

    /// Rows of the softmax: one a batch entry, head and token.
    pub(crate) fn rows(&self) -> usize {
        self.batch * self.heads * self.tokens
    }
}

/// Elements from one index of an axis to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strides {
    /// From one sequence to the next.
    pub batch: isize,
    /// From one token to the next.
    pub tokens: isize,
    /// From one head to the next.
    pub heads: isize,
    /// From one number of a head to the next.
    pub dim: isize,
}

/// The order of the axes of a contiguous tensor, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// `[batch, token, head, dim]`: flash-attn, candle, most model code before its transpose.
    BatchTokenHeadDim,
    /// `[batch, head, token, dim]`: PyTorch's SDPA and FlexAttention.
    BatchHeadTokenDim,
}

impl Order {
    /// The strides of a contiguous tensor in this order. Where [`Dims::elements`] can be counted,
    /// they can, or there are no elements and they don't matter.
    fn strides(self, dims: Dims) -> Strides {
        let Dims { batch: _, tokens, heads, dim } = dims;
        let (token, head) = match self {
            Order::BatchTokenHeadDim => (heads.wrapping_mul(dim), dim),
            Order::BatchHeadTokenDim => (dim, tokens.wrapping_mul(dim)),
        };
        Strides {
            batch: tokens.wrapping_mul(heads).wrapping_mul(dim) as isize,
            tokens: token as isize,
            heads: head as isize,
            dim: 1,
        }
    }
}

/// What both kinds of view share: where the elements lie, checked once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) dims: Dims,
    pub(crate) strides: Strides,
}

impl Extent {
    fn axes(&self) -> [(usize, isize); 4] {
        let Extent { dims, strides } = self;
        [
            (dims.batch, strides.batch),
            (dims.tokens, strides.tokens),
            (dims.heads, strides.heads),
            (dims.dim, strides.dim),
        ]
    }

    fn is_empty(&self) -> bool {
        self.axes().iter().any(|axis| axis.0 == 0)
    }

    /// The lowest and highest offset of an element from the first one; nothing without elements.
    /// An error where an offset can't be counted in bytes.
    fn reach(&self) -> Result<Option<(isize, isize)>> {
        if self.is_empty() {
            return Ok(None);
        }
        let overflow = || Error::Overflow { dims: self.dims };
        let (mut low, mut high) = (0_isize, 0_isize);
        for (len, stride) in self.axes() {
            let last = isize::try_from(len - 1).map_err(|_| overflow())?;
            let last = last.checked_mul(stride).ok_or_else(overflow)?;
            let end = if last < 0 { &mut low } else { &mut high };
            *end = end.checked_add(last).ok_or_else(overflow)?;
        }
        let span = high.checked_sub(low).and_then(|span| span.checked_mul(16));
        span.ok_or_else(overflow).map(|_| Some((low, high)))
    }

    /// Axes of more than one element, by the size of their stride, smallest first.
    fn nested(&self) -> Vec<(usize, usize)> {
        let mut axes: Vec<_> = self
            .axes()
            .into_iter()
            .filter(|axis| axis.0 > 1)
            .map(|(len, stride)| (stride.unsigned_abs(), len))
            .collect();
        axes.sort_unstable();
        axes
    }

    /// Whether no two indices share an element: every stride steps over all that lies within it.
    fn is_injective(&self) -> bool {
        let mut within = 0_usize;
        for (stride, len) in self.nested() {
            if stride <= within {
                return false;
            }
            within += stride * (len - 1);
        }
        true
    }

    /// Whether a view of this extent and one of `other`, whose first element lies `distance`
    /// elements further, share an element. Exact where both have the same strides, each larger than
    /// all that lies within it; otherwise whether the stretches of memory that they span touch.
    fn meets(&self, other: &Extent, distance: isize) -> bool {
        let (Ok(Some(a)), Ok(Some(b))) = (self.reach(), other.reach()) else { return false };
        if distance + b.1 < a.0 || a.1 < distance + b.0 {
            return false;
        }
        let both = Dims {
            batch: usize::max(self.dims.batch, other.dims.batch),
            tokens: usize::max(self.dims.tokens, other.dims.tokens),
            heads: usize::max(self.dims.heads, other.dims.heads),
            dim: usize::max(self.dims.dim, other.dims.dim),
        };
        let both = Extent { dims: both, strides: self.strides };
        if self.strides != other.strides || both.reach().is_err() || !both.is_injective() {
            return true;
        }
        // Is there an index of each with Σ (i − j) · stride = distance? Strides nest, so the
        // largest decides first, and only the two multiples next to what is left can do.
        fn solve(axes: &[(usize, isize, isize)], left: isize) -> bool {
            let Some((&(stride, most, least), inner)) = axes.split_last() else { return left == 0 };
            let stride = stride as isize;
            let near = left.div_euclid(stride);
            [near, near + 1]
                .into_iter()
                .any(|n| least <= n && n <= most && solve(inner, left - n * stride))
        }
        let mut axes: Vec<(usize, isize, isize)> = self
            .axes()
            .into_iter()
            .zip(other.axes())
            .filter(|((a, _), (b, _))| *a > 1 || *b > 1)
            .map(|((a, stride), (b, _))| {
                // Index of self minus index of other, counted along a positive stride.
                let (most, least) = (a as isize - 1, 1 - b as isize);
                if stride < 0 {
                    (stride.unsigned_abs(), -least, -most)
                } else {
                    (stride as usize, most, least)
                }
            })
            .collect();
        axes.sort_unstable();
        solve(&axes, distance)
    }
}

/// A tensor to read.
///
/// ```
/// use longspan::{Dims, Order, View};
///
/// let data: Vec<f32> = (0..24).map(|x| x as f32).collect();
/// let dims = Dims { batch: 1, tokens: 3, heads: 2, dim: 4 };
/// let view = View::new(&data, dims, Order::BatchTokenHeadDim)?;
/// assert_eq!(view.get(0, 2, 1, 3), Some(23.0));
/// assert!(View::new(&data[1..], dims, Order::BatchTokenHeadDim).is_err());
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T> {
    first: *const T,
    extent: Extent,
    memory: PhantomData<&'a [T]>,
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
    /// let view = View::new(&[1.0_f32, 2.0, 3.0], dims, Order::BatchTokenHeadDim)?;
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
        // SAFETY: the row lies within the extent, whose elements are readable; `into` is a borrow of
        // its own.
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
        if heads_outside && dims.heads > 1 {
            Order::BatchHeadTokenDim
        } else {
            Order::BatchTokenHeadDim
        }
    }

    /// The first element.
    pub fn as_ptr(&self) -> *const T {
        self.first
    }
}

/// A tensor to write; no two of its elements share memory.
///
/// ```
/// use longspan::{Dims, Order, Strides, ViewMut};
///
/// let mut data = vec![0.0_f32; 24];
/// let dims = Dims { batch: 1, tokens: 3, heads: 2, dim: 4 };
/// assert!(ViewMut::new(&mut data, dims, Order::BatchHeadTokenDim).is_ok());
/// let shared = Strides { batch: 0, tokens: 4, heads: 0, dim: 1 };
/// assert!(ViewMut::strided(&mut data, 0, dims, shared).is_err());
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    first: *mut T,
    extent: Extent,
    memory: PhantomData<&'a mut [T]>,
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
    /// let mut view = ViewMut::new(&mut data, dims, Order::BatchHeadTokenDim)?;
    /// view.as_mut_slice().unwrap()[3] = 7.0;
    /// assert_eq!(view.as_view().get(0, 1, 0, 1), Some(7.0));
    /// assert!(ViewMut::new(&mut data, dims, Order::BatchTokenHeadDim)?.as_mut_slice().is_none());
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn as_mut_slice(&mut self) -> Option<&mut [T]> {
        let Extent { dims, strides } = self.extent;
        let (len, plain) = (dims.elements()?, Order::BatchHeadTokenDim.strides(dims));
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

/// How many elements there are, if memory could hold them.
pub(crate) fn allocatable<T>(dims: Dims) -> Result<usize> {
    let elements = dims.elements();
    let bytes = elements.and_then(|elements| elements.checked_mul(size_of::<T>()));
    match (elements, bytes) {
        (Some(elements), Some(bytes)) if isize::try_from(bytes).is_ok() => Ok(elements),
        _ => Err(Error::Overflow { dims }),
    }
}

/// The index of the first element in a slice of `len`, if all elements lie in it.
fn within(len: usize, first: usize, extent: &Extent) -> Result<usize> {
    let Some((low, high)) = extent.reach()? else { return Ok(0) };
    let lowest = isize::try_from(first).ok().and_then(|first| first.checked_add(low));
    let highest = first.checked_add(high as usize);
    match (lowest, highest) {
        (Some(0..), Some(highest)) if highest < len => Ok(first),
        _ => Err(Error::Outside { first, low, high, len }),
    }
}

fn check_pointer<T>(first: *const T, extent: &Extent) -> Result<()> {
    if extent.reach()?.is_none() {
        return Ok(());
    }
    if first.is_null() || !first.is_aligned() {
        return Err(Error::Misaligned { address: first as usize, align: align_of::<T>() });
    }
    Ok(())
}

fn check_injective(extent: &Extent) -> Result<()> {
    if extent.is_empty() || extent.is_injective() {
        return Ok(());
    }
    Err(Error::SelfOverlap { dims: extent.dims, strides: extent.strides })
}

fn offset(extent: &Extent, index: [usize; 4]) -> Option<isize> {
    let mut offset = 0;
    for (index, (len, stride)) in index.into_iter().zip(extent.axes()) {
        if index >= len {
            return None;
        }
        offset += index as isize * stride;
    }
    Some(offset)
}
