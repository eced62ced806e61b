//! Colors of pictures: those of [`Shade`]s, text and lines.

use longspan_pattern::Shade;
use plotters_backend::{BackendColor, BackendStyle};

/// Red, green, blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Color(u8, u8, u8);

impl BackendStyle for Color {
    fn color(&self) -> BackendColor {
        BackendColor { alpha: 1.0, rgb: (self.0, self.1, self.2) }
    }
}

impl From<Shade> for Color {
    fn from(shade: Shade) -> Self {
        let [red, green, blue] = shade.rgb();
        Color(red, green, blue)
    }
}

pub(crate) const PAGE: Color = Color(255, 255, 255);
pub(crate) const INK: Color = Color(32, 36, 40);
pub(crate) const FAINT_INK: Color = Color(98, 104, 112);
/// The frame, ticks, and lines between blocks.
pub(crate) const LINE: Color = Color(196, 201, 207);
