//! Pictures: a [`Scene`] of rectangles and text in whole pixels, written as PNG or SVG.
//!
//! `inspect` and `plan` compose scenes; nothing here depends on what they show. Both formats are
//! drawn from the same scene on a [`Canvas`].

mod bitmap;
mod palette;
mod scene;
mod text;

use anyhow::Result;
pub(crate) use longspan_pattern::svg::{Align, Turn};
use longspan_pattern::svg::{Svg, TextStyle};

use bitmap::Bitmap;
pub(crate) use palette::{Color, FAINT_INK, INK, LINE, PAGE};
pub(crate) use scene::Scene;
use scene::{Canvas, Rectangle};
pub(crate) use text::{Face, Type};

/// File format of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Png,
    Svg,
}

/// The contents of a file, and the size in pixels.
pub(crate) struct Picture {
    pub(crate) file: Vec<u8>,
    pub(crate) size: (u32, u32),
}

/// Writes a scene in the given format.
pub(crate) fn render(scene: &Scene, format: Format) -> Result<Picture> {
    let size = (scene.width as u32, scene.height as u32);
    let file = match format {
        Format::Png => {
            let mut bitmap = Bitmap::new(size);
            scene.paint(&mut bitmap);
            bitmap.png()?
        }
        Format::Svg => {
            let mut svg = Svg::default();
            scene.paint(&mut svg);
            svg.file(size.0.into(), size.1.into()).into_bytes()
        }
    };
    Ok(Picture { file, size })
}

impl Canvas for Svg {
    fn rectangle(&mut self, place: Rectangle, color: Color) {
        let Rectangle { x, y, width, height } = place;
        self.rectangle([x, y, width, height].map(f64::from), color.0);
    }

    fn text(&mut self, (x, y): (i32, i32), text: &str, set: &Type) {
        let Type { face, em, ink, align, turn } = *set;
        let style = TextStyle { family: face.family(), em: em.into(), rgb: ink.0, align, turn };
        self.text((x.into(), y.into()), text, style);
    }
}
