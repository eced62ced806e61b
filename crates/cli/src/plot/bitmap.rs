//! A canvas of pixels, and PNG files.

use std::collections::HashMap;

use anyhow::Result;

use super::palette::Color;
use super::scene::{Canvas, Rectangle};
use super::text::Type;
use super::{PAGE, Turn};

/// Red, green and blue of each pixel, row by row.
pub(super) struct Bitmap {
    size: (u32, u32),
    pixels: Vec<[u8; 3]>,
}

impl Canvas for Bitmap {
    fn rectangle(&mut self, place: Rectangle, color: Color) {
        let Rectangle { x, y, width, height } = place;
        let side = |start: i32, length: i32, end: u32| {
            let inside = |at: i32| (at.max(0) as usize).min(end as usize);
            inside(start)..inside(start + length)
        };
        let (across, down) = (side(x, width, self.size.0), side(y, height, self.size.1));
        for row in
            self.pixels.chunks_exact_mut(self.size.0 as usize).take(down.end).skip(down.start)
        {
            row[across.clone()].fill(color.0);
        }
    }

    fn text(&mut self, (x, y): (i32, i32), text: &str, set: &Type) {
        set.rasterize(text, |right, down, cover| {
            let (x, y) = match set.turn {
                Turn::Across => (x + right, y + down),
                Turn::Up => (x + down, y - right),
            };
            if (0..self.size.0 as i32).contains(&x) && (0..self.size.1 as i32).contains(&y) {
                let pixel = &mut self.pixels[y as usize * self.size.0 as usize + x as usize];
                for (part, ink) in pixel.iter_mut().zip(set.ink.0) {
                    let (from, to) = (f32::from(*part), f32::from(ink));
                    *part = (from + (to - from) * cover).round() as u8;
                }
            }
        });
    }
}

impl Bitmap {
    pub(super) fn new(size: (u32, u32)) -> Self {
        Bitmap { size, pixels: vec![PAGE.0; size.0 as usize * size.1 as usize] }
    }

    pub(super) fn png(&self) -> Result<Vec<u8>> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, self.size.0, self.size.1);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_compression(png::Compression::High);
        match self.indexed() {
            Some((palette, indices)) => {
                encoder.set_color(png::ColorType::Indexed);
                encoder.set_palette(palette);
                // Neighboring indices are not correlated.
                encoder.set_filter(png::Filter::NoFilter);
                encoder.write_header()?.write_image_data(&indices)?;
            }
            None => {
                encoder.set_color(png::ColorType::Rgb);
                encoder.write_header()?.write_image_data(self.pixels.as_flattened())?;
            }
        }
        Ok(file)
    }

    /// A palette and the pixels as indices into it; `None` where they have more than 256 colors.
    fn indexed(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        let mut known: HashMap<[u8; 3], u8> = HashMap::new();
        let mut palette = Vec::new();
        let mut indices = Vec::with_capacity(self.pixels.len());
        for color in &self.pixels {
            let index = match known.get(color) {
                Some(&index) => index,
                None => {
                    let index = u8::try_from(known.len()).ok()?;
                    palette.extend_from_slice(color);
                    known.insert(*color, index);
                    index
                }
            };
            indices.push(index);
        }
        Some((palette, indices))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Align, Face, INK};
    use super::*;

    /// Pixels that are not the page's: left, top, right and bottom, the last two exclusive.
    fn bounds(bitmap: &Bitmap) -> [usize; 4] {
        let width = bitmap.size.0 as usize;
        let inked = (0..bitmap.pixels.len()).filter(|&at| bitmap.pixels[at] != PAGE.0);
        inked.fold([usize::MAX, usize::MAX, 0, 0], |[left, top, right, bottom], at| {
            let (x, y) = (at % width, at / width);
            [left.min(x), top.min(y), right.max(x + 1), bottom.max(y + 1)]
        })
    }

    #[test]
    fn items_are_cut_at_the_edges() {
        let mut bitmap = Bitmap::new((20, 10));
        bitmap.rectangle(Rectangle { x: 15, y: -5, width: 50, height: 8 }, INK);
        assert_eq!(bounds(&bitmap), [15, 0, 20, 3]);
        bitmap.text((0, 0), "causal", &Type::new(Face::Sans, 15.0, INK).align(Align::Center));
    }

    #[test]
    fn text_has_its_width_and_direction() {
        let set = Type::new(Face::Sans, 20.0, INK).align(Align::Right);
        let width = set.width("HHHH") as usize;
        let mut bitmap = Bitmap::new((200, 200));
        bitmap.text((100, 100), "HHHH", &set);
        let [left, top, right, bottom] = bounds(&bitmap);
        // Bearings are a tenth of an em per side.
        assert!((98 - width..=104 - width).contains(&left) && (96..=100).contains(&right));
        // Capitals are 0.73 em above the baseline, which is 0.275 em below the point.
        assert_eq!((top, bottom), (90, 106));
        let mut turned = Bitmap::new((200, 200));
        turned.text((100, 100), "HHHH", &set.upwards());
        assert_eq!(bounds(&turned), [top, 201 - right, bottom, 201 - left]);
    }
}
