//! Pictures: a [`Scene`] of rectangles and text in whole pixels, written as PNG or SVG.
//!
//! `inspect` and `plan` compose scenes; nothing here depends on what they show. Both formats are
//! rendered from the same scene by a plotters backend.

mod palette;
mod scene;
mod text;

use std::collections::HashMap;

use anyhow::Result;
use plotters_bitmap::BitMapBackend;
use plotters_svg::SVGBackend;

pub(crate) use palette::{Color, FAINT_INK, INK, LINE, PAGE};
pub(crate) use scene::Scene;
pub(crate) use text::{Face, Turn, Type};

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
    let file = match format {
        Format::Png => png(scene)?,
        Format::Svg => svg(scene)?,
    };
    Ok(Picture { file, size: (scene.width as u32, scene.height as u32) })
}

fn svg(scene: &Scene) -> Result<Vec<u8>> {
    let mut text = String::new();
    let size = (scene.width as u32, scene.height as u32);
    scene.paint(&mut SVGBackend::with_string(&mut text, size))?;
    // Cells touch: smoothing their edges would leave seams between them.
    Ok(text.replacen("<svg ", "<svg shape-rendering=\"crispEdges\" ", 1).into_bytes())
}

fn png(scene: &Scene) -> Result<Vec<u8>> {
    let size = (scene.width as u32, scene.height as u32);
    let mut pixels = vec![0; 3 * scene.width as usize * scene.height as usize];
    scene.paint(&mut BitMapBackend::with_buffer(&mut pixels, size))?;

    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, size.0, size.1);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    match indexed(&pixels) {
        Some((palette, indices)) => {
            encoder.set_color(png::ColorType::Indexed);
            encoder.set_palette(palette);
            // Neighboring indices are not correlated.
            encoder.set_filter(png::Filter::NoFilter);
            encoder.write_header()?.write_image_data(&indices)?;
        }
        None => {
            encoder.set_color(png::ColorType::Rgb);
            encoder.write_header()?.write_image_data(&pixels)?;
        }
    }
    Ok(file)
}

/// The pixels as indices into a palette; `None` where they have more than 256 colors.
fn indexed(pixels: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut known: HashMap<[u8; 3], u8> = HashMap::new();
    let mut palette = Vec::new();
    let mut indices = Vec::with_capacity(pixels.len() / 3);
    for pixel in pixels.chunks_exact(3) {
        let color = [pixel[0], pixel[1], pixel[2]];
        let index = match known.get(&color) {
            Some(&index) => index,
            None => {
                let index = u8::try_from(known.len()).ok()?;
                palette.extend_from_slice(&color);
                known.insert(color, index);
                index
            }
        };
        indices.push(index);
    }
    Some((palette, indices))
}
