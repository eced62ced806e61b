//! What is drawn, before anybody knows onto what.
//!
//! Composition works out every rectangle and every piece of text in whole pixels; painting hands
//! them to a backend and decides nothing. So PNG and SVG show the same.

use anyhow::{Result, anyhow};
use plotters_backend::DrawingBackend;

use super::palette::{Colour, PAGE};
use super::text::Type;

pub(super) struct Scene {
    pub(super) width: i32,
    pub(super) height: i32,
    items: Vec<Item>,
}

enum Item {
    /// Left, top, right, bottom; the last two are outside.
    Rectangle(i32, i32, i32, i32, Colour),
    Text(i32, i32, String, Type),
}

impl Scene {
    pub(super) fn new() -> Self {
        Scene { width: 0, height: 0, items: Vec::new() }
    }

    /// How many things are drawn.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn rectangle(&mut self, x: i32, y: i32, width: i32, height: i32, colour: Colour) {
        self.items.push(Item::Rectangle(x, y, x + width, y + height, colour));
    }

    /// Text whose middle line is at `y`.
    pub(super) fn text(&mut self, x: i32, y: i32, text: impl Into<String>, set: Type) {
        self.items.push(Item::Text(x, y, text.into(), set));
    }

    /// Draws all of it.
    pub(super) fn paint<B: DrawingBackend>(&self, backend: &mut B) -> Result<()> {
        let failed = |error| anyhow!("drawing failed: {error}");
        backend.draw_rect((0, 0), (self.width, self.height), &PAGE, true).map_err(failed)?;
        for item in &self.items {
            match item {
                Item::Rectangle(left, top, right, bottom, colour) => {
                    backend.draw_rect((*left, *top), (*right, *bottom), colour, true)
                }
                Item::Text(x, y, text, set) => backend.draw_text(text, set, (*x, *y)),
            }
            .map_err(failed)?;
        }
        backend.present().map_err(failed)
    }
}
