//! Where the elements of a view lie, and whether two views share any.

use crate::dims::{Dims, Strides};
use crate::error::{Error, Result};

/// What both kinds of view share: where the elements lie, checked once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) dims: Dims,
    pub(super) strides: Strides,
}

impl Extent {
    pub(super) fn axes(&self) -> [(usize, isize); 4] {
        let Extent { dims, strides } = self;
        [
            (dims.batch, strides.batch),
            (dims.tokens, strides.tokens),
            (dims.heads, strides.heads),
            (dims.dim, strides.dim),
        ]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.axes().iter().any(|axis| axis.0 == 0)
    }

    /// The lowest and highest offset of an element from the first one; nothing without elements.
    /// An error where an offset can't be counted in bytes.
    pub(super) fn reach(&self) -> Result<Option<(isize, isize)>> {
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
    pub(super) fn nested(&self) -> Vec<(usize, usize)> {
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
    pub(super) fn is_injective(&self) -> bool {
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
    /// all that lies within it; otherwise whether the ranges of memory that they span touch.
    pub(super) fn meets(&self, other: &Extent, distance: isize) -> bool {
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
        pub(super) fn solve(axes: &[(usize, isize, isize)], left: isize) -> bool {
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

/// The index of the first element in a slice of `len`, if all elements lie in it.
pub(super) fn within(len: usize, first: usize, extent: &Extent) -> Result<usize> {
    let Some((low, high)) = extent.reach()? else { return Ok(0) };
    let lowest = isize::try_from(first).ok().and_then(|first| first.checked_add(low));
    let highest = first.checked_add(high as usize);
    match (lowest, highest) {
        (Some(0..), Some(highest)) if highest < len => Ok(first),
        _ => Err(Error::Outside { first, low, high, len }),
    }
}

pub(super) fn check_pointer<T>(first: *const T, extent: &Extent) -> Result<()> {
    if extent.reach()?.is_none() {
        return Ok(());
    }
    if first.is_null() || !first.is_aligned() {
        return Err(Error::Misaligned { address: first as usize, align: align_of::<T>() });
    }
    Ok(())
}

pub(super) fn check_injective(extent: &Extent) -> Result<()> {
    if extent.is_empty() || extent.is_injective() {
        return Ok(());
    }
    Err(Error::SelfOverlap { dims: extent.dims, strides: extent.strides })
}

pub(super) fn offset(extent: &Extent, index: [usize; 4]) -> Option<isize> {
    let mut offset = 0;
    for (index, (len, stride)) in index.into_iter().zip(extent.axes()) {
        if index >= len {
            return None;
        }
        offset += index as isize * stride;
    }
    Some(offset)
}
