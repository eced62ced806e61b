//! Tensors with four named axes, as strided views.
//!
//! The element at `(batch, token, head, dim)` lies at
//! `batch · strides.batch + token · strides.tokens + head · strides.heads + dim · strides.dim`
//! elements from the first. Strides are signed and, for what is only read, may be zero: a
//! transposed, reversed or broadcast tensor is a view like any other, and nothing is ever copied
//! to change the order of axes.
//!
//! [`View`] reads and [`ViewMut`] writes borrowed memory; [`Tensor`] owns its own. What
//! is written must not overlap itself: a [`ViewMut`] whose elements share memory can't be made.

pub(crate) mod allocate;
mod extent;
#[cfg(feature = "ndarray")]
pub(crate) mod from_ndarray;
mod memory;
mod owned;
mod raw;
mod select;
mod view;
mod view_mut;

pub(crate) use self::allocate::{allocatable, size_of_list};
pub(crate) use self::memory::Memory;
pub use self::owned::Tensor;
pub(crate) use self::raw::{Raw, Strided};
pub(crate) use self::select::Selection;
pub use self::view::View;
pub use self::view_mut::ViewMut;
