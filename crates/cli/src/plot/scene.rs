//! A display list: rectangles and text in whole pixels, independent of the output format.

use anyhow::{Result, anyhow};
use plotters_backend::DrawingBackend;

use super::palette::{Color, PAGE};
use super::text::Type;

pub(crate) struct Scene {
    pub(crate) width: i32,
    pub(crate) height: i32,
    items: Vec<Item>,
}

enum Item {
    /// Left, top, right, bottom; the last two are exclusive.
    Rectangle(i32, i32, i32, i32, Color),
    Text(i32, i32, String, Type),
}

impl Scene {
    pub(crate) fn new() -> Self {
        Scene { width: 0, height: 0, items: Vec::new() }
    }

    /// Number of items.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    pub(crate) fn rectangle(&mut self, x: i32, y: i32, width: i32, height: i32, color: Color) {
        self.items.push(Item::Rectangle(x, y, x + width, y + height, color));
    }

    /// Text whose middle line is at `y`.
    pub(crate) fn text(&mut self, x: i32, y: i32, text: impl Into<String>, set: Type) {
        self.items.push(Item::Text(x, y, text.into(), set));
    }

    /// Draws all items with a backend.
    pub(crate) fn paint<B: DrawingBackend>(&self, backend: &mut B) -> Result<()> {
        let failed = |error| anyhow!("drawing failed: {error}");
        backend.draw_rect((0, 0), (self.width, self.height), &PAGE, true).map_err(failed)?;
        for item in &self.items {
            match item {
                Item::Rectangle(left, top, right, bottom, color) => {
                    backend.draw_rect((*left, *top), (*right, *bottom), color, true)
                }
                Item::Text(x, y, text, set) => backend.draw_text(text, set, (*x, *y)),
            }
            .map_err(failed)?;
        }
        backend.present().map_err(failed)
    }
}
