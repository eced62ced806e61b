//! Every so many tokens and heads of a tensor, as another view of it.

use std::marker::PhantomData;

use longspan_pattern::residues::Steps;

use super::extent::Extent;
use super::{View, ViewMut};
use crate::dims::{Dims, Strides};

/// Tokens and heads of one batch entry. Its tokens come in segments that look alike, which are the
/// batch entries of the new view: token `t` of entry `s` is token `segments[s] + tokens[t]` of the
/// old one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Selection {
    pub(crate) entry: usize,
    pub(crate) segments: Steps,
    pub(crate) tokens: Steps,
    pub(crate) heads: Steps,
}

impl Extent {
    /// Where the first selected element lies, from the first of all, and how the others lie to it.
    fn select(&self, selection: &Selection) -> (isize, Extent) {
        let Selection { entry, segments, tokens, heads } = *selection;
        let Extent { dims, strides } = *self;
        let chosen =
            Dims { batch: segments.count, tokens: tokens.count, heads: heads.count, ..dims };
        let selected = Extent {
            dims: chosen,
            strides: Strides {
                batch: strides.tokens.wrapping_mul(segments.step as isize),
                tokens: strides.tokens.wrapping_mul(tokens.step as isize),
                heads: strides.heads.wrapping_mul(heads.step as isize),
                dim: strides.dim,
            },
        };
        if selected.is_empty() {
            return (0, selected);
        }
        // Segments follow each other, or all begin within a step of the first.
        let follow = segments.count <= 1 || tokens.last() < tokens.first + segments.step;
        let apart = follow || segments.last() - segments.first < tokens.step;
        let inside = segments.last() + tokens.last() < dims.tokens && heads.last() < dims.heads;
        assert!(apart && inside && entry < dims.batch, "{selection:?} of {dims:?}");
        let first = entry as isize * strides.batch
            + (segments.first + tokens.first) as isize * strides.tokens
            + heads.first as isize * strides.heads;
        (first, selected)
    }
}

impl<'a, T: Copy> View<'a, T> {
    /// The first element of every head.
    pub(crate) fn first_dim(&self) -> View<'a, T> {
        let Extent { dims, strides } = self.extent;
        let dims = Dims { dim: dims.dim.min(1), ..dims };
        View { extent: Extent { dims, strides }, ..*self }
    }

    /// The selected tokens and heads.
    ///
    /// # Panics
    ///
    /// If there are no such tokens or heads.
    pub(crate) fn select(&self, selection: &Selection) -> View<'a, T> {
        let (first, extent) = self.extent.select(selection);
        View { first: self.first.wrapping_offset(first), extent, memory: PhantomData }
    }
}

impl<T: Copy> ViewMut<'_, T> {
    /// The selected tokens and heads, to write.
    ///
    /// # Panics
    ///
    /// If there are no such tokens or heads.
    pub(crate) fn select(&mut self, selection: &Selection) -> ViewMut<'_, T> {
        let (first, extent) = self.extent.select(selection);
        ViewMut { first: self.first.wrapping_offset(first), extent, memory: PhantomData }
    }
}
