//! Text in pictures.
//!
//! A PNG file needs outlines, so the DejaVu fonts are embedded. An SVG file names them, with
//! fallbacks; widths are the same for both.
//!
//! [`Type`] draws its glyphs itself, at fractions of a pixel and with their own bearings: at this
//! size whole pixels would give uneven spacing.

use std::sync::LazyLock;

use ab_glyph::{Font, FontRef, PxScale, ScaleFont, point};

use super::palette::Color;
use super::{Align, Turn};

/// The two typefaces: one for prose, one for patterns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Face {
    Sans,
    Mono,
}

impl Face {
    fn font(self) -> &'static FontRef<'static> {
        static SANS: LazyLock<FontRef<'static>> = LazyLock::new(|| parse(dejavu::sans::regular()));
        static MONO: LazyLock<FontRef<'static>> =
            LazyLock::new(|| parse(dejavu::sans_mono::regular()));
        match self {
            Face::Sans => &SANS,
            Face::Mono => &MONO,
        }
    }

    pub(super) fn family(self) -> &'static str {
        match self {
            Face::Sans => "DejaVu Sans, Verdana, sans-serif",
            Face::Mono => "DejaVu Sans Mono, Menlo, Consolas, monospace",
        }
    }
}

fn parse(bytes: &'static [u8]) -> FontRef<'static> {
    FontRef::try_from_slice(bytes).expect("a font that is part of the program")
}

/// Levels of a pixel's coverage: few enough for a palette of 256 colors, which makes a PNG file a
/// third as large.
const COVERS: f32 = 16.0;

/// Typeface, size, color, alignment and direction of text.
#[derive(Clone, Copy)]
pub(crate) struct Type {
    pub(crate) face: Face,
    /// Pixels of an em.
    pub(crate) em: f32,
    pub(crate) ink: Color,
    pub(crate) align: Align,
    pub(crate) turn: Turn,
}

impl Type {
    pub(crate) fn new(face: Face, em: f32, ink: Color) -> Self {
        Type { face, em, ink, align: Align::Left, turn: Turn::Across }
    }

    pub(crate) fn align(self, align: Align) -> Self {
        Type { align, ..self }
    }

    pub(crate) fn upwards(self) -> Self {
        Type { turn: Turn::Up, ..self }
    }

    /// Width of `text` in pixels.
    pub(crate) fn width(&self, text: &str) -> i32 {
        self.set(text, |_, _| {}).ceil() as i32
    }

    /// The text cut to `room` pixels.
    pub(crate) fn cut(&self, text: &str, room: i32) -> String {
        if self.width(text) <= room {
            return text.into();
        }
        let mut kept: Vec<char> = text.chars().collect();
        while kept.pop().is_some() {
            let shorter = format!("{}…", kept.iter().collect::<String>().trim_end());
            if self.width(&shorter) <= room {
                return shorter;
            }
        }
        String::new()
    }

    /// The text in at most `most` lines of `room` pixels, broken at spaces; the last line is cut.
    pub(crate) fn wrap(&self, text: &str, room: i32, most: usize) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        let mut words = text.split(' ').peekable();
        while let Some(word) = words.next() {
            let joined = lines.last().map(|line| format!("{line} {word}"));
            match joined {
                Some(joined) if self.width(&joined) <= room => {
                    *lines.last_mut().expect("joined") = joined
                }
                _ if lines.len() < most => lines.push(word.into()),
                _ => {
                    let rest: Vec<&str> = std::iter::once(word).chain(words).collect();
                    let last = lines.last_mut().expect("at least one line");
                    *last = self.cut(&format!("{last} {}", rest.join(" ")), room);
                    break;
                }
            }
        }
        lines.iter().map(|line| self.cut(line, room)).collect()
    }

    fn scale(&self) -> PxScale {
        let font = self.face.font();
        // ab_glyph counts a font's height from its lowest to its highest, not its em.
        let em = font.units_per_em().unwrap_or(1_000.0);
        PxScale::from(self.em * font.height_unscaled() / em)
    }

    /// Walks over the glyphs with their places; the width of all.
    fn set(&self, text: &str, mut each: impl FnMut(char, f32)) -> f32 {
        let font = self.face.font().as_scaled(self.scale());
        let mut x = 0.0;
        let mut before = None;
        for c in text.chars() {
            let glyph = font.glyph_id(c);
            if let Some(before) = before {
                x += font.kern(before, glyph);
            }
            each(c, x);
            x += font.h_advance(glyph);
            before = Some(glyph);
        }
        x
    }

    /// Calls `dot` with each pixel that text across covers, as steps right and down from its point,
    /// and with the share of it that is covered.
    pub(super) fn rasterize(&self, text: &str, mut dot: impl FnMut(i32, i32, f32)) {
        let font = self.face.font();
        let left = match self.align {
            Align::Left => 0,
            Align::Center => -self.width(text) / 2,
            Align::Right => -self.width(text),
        };
        // Where an SVG viewer puts the baseline of text that is centered on a point: half the
        // height of an x, which is 0.55 em, below it.
        let baseline = self.em * 0.55 / 2.0;
        self.set(text, |c, x| {
            let glyph = font.glyph_id(c).with_scale_and_position(self.scale(), point(x, baseline));
            let Some(outline) = font.outline_glyph(glyph) else { return };
            let corner = outline.px_bounds().min;
            outline.draw(|x, y, cover| {
                let cover = (cover.min(1.0) * COVERS).round() / COVERS;
                if cover > 0.0 {
                    dot(left + corner.x as i32 + x as i32, corner.y as i32 + y as i32, cover);
                }
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::palette::INK;
    use super::*;

    #[test]
    fn text_keeps_to_its_room() {
        let mono = Type::new(Face::Mono, 10.0, INK);
        let room = mono.width("causal & full");
        assert_eq!(mono.cut("causal & full", room), "causal & full");
        assert_eq!(mono.cut("causal & fully", room), "causal & ful…");
        assert_eq!(mono.wrap("causal & full | sinks(4)", room, 3), ["causal & full", "| sinks(4)"]);
        assert_eq!(mono.wrap("causal & full | sinks(4)", room, 1), ["causal & ful…"]);
    }
}
