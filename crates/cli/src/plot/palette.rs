//! Colours of figures: those of [`Shade`]s, and of what stands around them.

use longspan_pattern::Shade;
use plotters_backend::{BackendColor, BackendStyle};

/// Red, green, blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Colour(u8, u8, u8);

impl BackendStyle for Colour {
    fn color(&self) -> BackendColor {
        BackendColor { alpha: 1.0, rgb: (self.0, self.1, self.2) }
    }
}

impl From<Shade> for Colour {
    fn from(shade: Shade) -> Self {
        let [red, green, blue] = shade.rgb();
        Colour(red, green, blue)
    }
}

pub(super) const PAGE: Colour = Colour(255, 255, 255);
pub(super) const INK: Colour = Colour(32, 36, 40);
pub(super) const FAINT_INK: Colour = Colour(98, 104, 112);
/// The frame, ticks, and lines between blocks.
pub(super) const LINE: Colour = Colour(196, 201, 207);
