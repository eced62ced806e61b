//! Colors of pictures: those of [`Shade`]s, text and lines.

use longspan_pattern::Shade;

/// Red, green, blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Color(pub(super) [u8; 3]);

impl From<Shade> for Color {
    fn from(shade: Shade) -> Self {
        Color(shade.rgb())
    }
}

pub(crate) const PAGE: Color = Color([255, 255, 255]);
pub(crate) const INK: Color = Color([32, 36, 40]);
pub(crate) const FAINT_INK: Color = Color([98, 104, 112]);
/// The frame, ticks, and lines between blocks.
pub(crate) const LINE: Color = Color([196, 201, 207]);
