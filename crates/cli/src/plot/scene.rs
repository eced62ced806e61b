//! A display list: rectangles and text in whole pixels, independent of the output format.

use super::palette::{Color, PAGE};
use super::text::Type;

pub(crate) struct Scene {
    pub(crate) width: i32,
    pub(crate) height: i32,
    items: Vec<Item>,
}

enum Item {
    Rectangle(Rectangle, Color),
    Text((i32, i32), String, Type),
}

#[derive(Clone, Copy)]
pub(super) struct Rectangle {
    pub(super) x: i32,
    pub(super) y: i32,
    pub(super) width: i32,
    pub(super) height: i32,
}

/// What a scene is drawn on.
pub(super) trait Canvas {
    fn rectangle(&mut self, place: Rectangle, color: Color);

    /// Text that is vertically centered on a point.
    fn text(&mut self, at: (i32, i32), text: &str, set: &Type);
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
        self.items.push(Item::Rectangle(Rectangle { x, y, width, height }, color));
    }

    /// Text whose middle line is at `y`.
    pub(crate) fn text(&mut self, x: i32, y: i32, text: impl Into<String>, set: Type) {
        self.items.push(Item::Text((x, y), text.into(), set));
    }

    /// Draws the page and all items.
    pub(super) fn paint(&self, canvas: &mut impl Canvas) {
        canvas.rectangle(Rectangle { x: 0, y: 0, width: self.width, height: self.height }, PAGE);
        for item in &self.items {
            match item {
                Item::Rectangle(place, color) => canvas.rectangle(*place, *color),
                Item::Text(at, text, set) => canvas.text(*at, text, set),
            }
        }
    }
}
