//! A picture from which a stranger understands a pattern, as PNG or SVG.
//!
//! ```text
//! layout → grid.rs (what each cell shows) → figure.rs (where everything goes)
//!        → scene.rs (rectangles and text in whole pixels) → a plotters backend
//! ```
//!
//! One scene serves both formats; only an SVG file has to stay small, so for it cells grow until
//! there are few enough rectangles.

mod axis;
mod figure;
mod grid;
mod palette;
mod scene;
mod text;
mod timeline;

use std::collections::HashMap;

use anyhow::Result;
use plotters_bitmap::BitMapBackend;
use plotters_svg::SVGBackend;

use crate::compile::BadInput;
use crate::inspect::Inspection;
use crate::plan::Planned;
use scene::Scene;

/// Pixels of a cell: one would be hard to see, and shows less than half of it on a fine screen.
const SMALLEST_CELL: i32 = 2;
/// Pixels of a cell past which an SVG file is as large as it is.
const COARSEST_CELL: i32 = 32;
/// A rectangle takes about 90 bytes, so these take under a megabyte.
const SVG_ITEMS: usize = 10_000;

/// What kind of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Png,
    Svg,
}

/// A file, and its size in pixels.
pub(crate) struct Picture {
    pub(crate) file: Vec<u8>,
    pub(crate) size: (u32, u32),
}

/// Draws the layouts of an inspection.
pub(crate) fn draw(inspection: &Inspection, format: Format) -> Result<Picture> {
    let layout = &inspection.layouts[0];
    let (rows, columns) = (layout.rows().len(), layout.columns());
    if rows == 0 || columns == 0 {
        let message = format!("nothing to draw: {rows} rows × {columns} columns of blocks");
        return Err(BadInput(message).into());
    }
    let mut cell = SMALLEST_CELL;
    let mut scene = figure::compose(inspection, cell)?;
    while format == Format::Svg && scene.len() > SVG_ITEMS && cell < COARSEST_CELL {
        cell *= 2;
        scene = figure::compose(inspection, cell)?;
    }
    finished(&scene, format)
}

/// Draws what ranks of a plan do when.
pub(crate) fn timelines(planned: &Planned, format: Format) -> Result<Picture> {
    finished(&timeline::compose(planned), format)
}

fn finished(scene: &Scene, format: Format) -> Result<Picture> {
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
            // Indices of neighbours have nothing to do with each other.
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

/// The pixels as indices into a palette, if 256 colours suffice.
fn indexed(pixels: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut known: HashMap<[u8; 3], u8> = HashMap::new();
    let mut palette = Vec::new();
    let mut indices = Vec::with_capacity(pixels.len() / 3);
    for pixel in pixels.chunks_exact(3) {
        let colour = [pixel[0], pixel[1], pixel[2]];
        let index = match known.get(&colour) {
            Some(&index) => index,
            None => {
                let index = u8::try_from(known.len()).ok()?;
                palette.extend_from_slice(&colour);
                known.insert(colour, index);
                index
            }
        };
        indices.push(index);
    }
    Some((palette, indices))
}
