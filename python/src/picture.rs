//! Pictures of layouts: for notebooks as SVG, for terminals as text.
//!
//! Both are [`Layout::picture`] drawn cell by cell; colours are those of the command line's figures.

use std::fmt::Write;

use longspan::{BlockSize, Heads, Layout, Pattern, Shape};
use longspan_pattern::{Error, Result, Shade};

use crate::signals::Watch;

/// Cells along a side of a picture, at most.
const CELLS: u32 = 64;
/// Pixels along the longer side of a picture.
const SIDE: f64 = 256.0;
const GAP: f64 = 16.0;
/// Layouts that are drawn side by side; the rest is a number in the caption.
const MOST_PANELS: usize = 4;
/// Tokens of a pattern that doesn't say: one block per cell.
const TOKENS: u64 = 4_096;
/// A pattern over more tokens isn't drawn unasked.
const MOST_TOKENS: u64 = 1 << 24;
/// A character is twice as high as wide.
const LINES: u32 = CELLS / 2;

/// Layouts as a self-contained SVG: the first few of `all` there are.
pub(crate) fn svg(layouts: &[&Layout], all: usize, watch: &mut Watch) -> Result<String> {
    let shown = &layouts[..layouts.len().min(MOST_PANELS)];
    let mut body = String::new();
    let (mut left, mut bottom) = (0.0, 0.0_f64);
    for layout in shown {
        let (width, height) = panel(layout, left, &mut body, watch)?;
        left += width + GAP;
        bottom = bottom.max(height);
    }
    let caption = match shown.first() {
        None => "no layout".into(),
        Some(first) => {
            let more = match shown.len() == all {
                true => String::new(),
                false => format!(", the first {} of {all}", shown.len()),
            };
            format!(
                "{} × {} tokens, blocks of {}{more}",
                first.queries(),
                first.keys(),
                first.block().get()
            )
        }
    };
    let width = (left - GAP).max(SIDE);
    let text = bottom + 18.0;
    let height = bottom + 26.0;
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" \
         shape-rendering=\"crispEdges\">\n<title>{caption}</title>\n{body}\
         <text x=\"0\" y=\"{text}\" font-family=\"sans-serif\" font-size=\"12\" \
         fill=\"#626870\">{caption}</text>\n</svg>\n"
    ))
}

/// Draws one layout from `left` on; its width and height.
fn panel(layout: &Layout, left: f64, body: &mut String, watch: &mut Watch) -> Result<(f64, f64)> {
    let picture = layout.picture_with(CELLS, CELLS, |_, _| watch.look())?;
    let longer = picture.width.max(picture.height).max(1);
    let cell = SIDE / f64::from(longer);
    let (width, height) = (cell * f64::from(picture.width), cell * f64::from(picture.height));
    let mut rectangle = |x: f64, y: f64, width: f64, height: f64, shade: Shade| {
        let [r, g, b] = shade.rgb();
        let x = left + x;
        // Writing to a string doesn't fail.
        let _ = writeln!(
            body,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" \
             fill=\"#{r:02x}{g:02x}{b:02x}\"/>"
        );
    };
    rectangle(0.0, 0.0, width, height, Shade::Empty);
    for y in 0..picture.height {
        let mut x = 0;
        while x < picture.width {
            let shade = Shade::of(picture.cell(x, y));
            let first = x;
            while x < picture.width && Shade::of(picture.cell(x, y)) == shade {
                x += 1;
            }
            if shade != Shade::Empty {
                let at = f64::from(first) * cell;
                rectangle(at, f64::from(y) * cell, f64::from(x - first) * cell, cell, shade);
            }
        }
    }
    Ok((width, height))
}

/// The picture of a pattern, or nothing where it can't be compiled for a length of our choice.
pub(crate) fn of_patterns(patterns: &Heads, watch: &mut Watch) -> Result<Option<String>> {
    let all = patterns.count().unwrap_or(1);
    let mut layouts = Vec::new();
    for head in 0..all.min(MOST_PANELS) {
        let Some(layout) = compile(patterns.get(head, all)?, watch)? else { return Ok(None) };
        layouts.push(layout);
    }
    svg(&layouts.iter().collect::<Vec<_>>(), all, watch).map(Some)
}

/// Compiles a pattern for [`TOKENS`], or for the tokens that its documents or sequences have.
fn compile(pattern: &Pattern, watch: &mut Watch) -> Result<Option<Layout>> {
    let (mut queries, mut keys) = (TOKENS, TOKENS);
    for _ in 0..3 {
        let tokens = queries.max(keys);
        if tokens > MOST_TOKENS {
            return Ok(None);
        }
        let block = tokens.div_ceil(CELLS.into()).clamp(16, 64);
        let shape = Shape::new(queries, keys).block(BlockSize::new(block)?);
        match Layout::compile_with(pattern, &shape, |_, _| watch.look()) {
            Ok(layout) => return Ok(Some(layout)),
            Err(error @ Error::Stopped { .. }) => return Err(error),
            Err(Error::Sum { argument: "query lengths", sum, .. }) => queries = sum as u64,
            Err(Error::Sum { argument: "lengths", sum, .. }) => {
                (queries, keys) = (sum as u64, sum as u64);
            }
            Err(Error::Sum { sum, .. }) => keys = sum as u64,
            Err(_) => return Ok(None),
        }
    }
    Ok(None)
}

/// A layout as lines of text: `█` full, `▒` partial, `·` nothing.
pub(crate) fn text(layout: &Layout, watch: &mut Watch) -> Result<String> {
    let picture = layout.picture_with(CELLS, LINES, |_, _| watch.look())?;
    let line = |y| {
        let cells = (0..picture.width).map(|x| match Shade::of(picture.cell(x, y)) {
            Shade::Empty | Shade::Masked => '·',
            Shade::Partial(_) => '▒',
            Shade::Full(_) => '█',
        });
        cells.collect::<String>()
    };
    Ok((0..picture.height).map(line).collect::<Vec<_>>().join("\n"))
}
