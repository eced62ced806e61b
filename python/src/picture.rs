//! Pictures of layouts: for notebooks as SVG, for terminals as text.
//!
//! Both are [`Layout::picture`] drawn cell by cell; colours are those of the command line's figures.

use longspan::{BlockSize, Heads, Layout, Pattern, Shape};
use longspan_pattern::svg::{Align, Svg, TextStyle, Turn};
use longspan_pattern::{Error, Result, Shade};

use crate::signals::Watch;

/// Cells along a side of a picture, at most.
const CELLS: u32 = 64;
/// Pixels along the longer side of a picture.
const SIDE: f64 = 256.0;
const GAP: f64 = 16.0;
const CAPTION: TextStyle<'static> = TextStyle {
    family: "sans-serif",
    em: 12.0,
    rgb: [98, 104, 112],
    align: Align::Left,
    turn: Turn::Across,
};
/// Layouts that are drawn side by side; the rest is a number in the caption.
const MOST_PANELS: usize = 4;
/// Tokens of a pattern that doesn't say: one block per cell.
const TOKENS: usize = 4_096;
/// A pattern over more tokens isn't drawn unasked.
const MOST_TOKENS: usize = 1 << 24;
/// A character is twice as high as wide.
const LINES: u32 = CELLS / 2;

/// Layouts as a self-contained SVG: the first few of `all` there are.
pub(crate) fn svg(layouts: &[&Layout], all: usize, watch: &mut Watch) -> Result<String> {
    let shown = &layouts[..layouts.len().min(MOST_PANELS)];
    let mut svg = Svg::default();
    let (mut left, mut bottom) = (0.0, 0.0_f64);
    for layout in shown {
        let (width, height) = panel(layout, left, &mut svg, watch)?;
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
    svg.text((0.0, bottom + 14.0), &caption, CAPTION);
    Ok(svg.file((left - GAP).max(SIDE), bottom + 26.0))
}

/// Draws one layout from `left` on; its width and height.
fn panel(layout: &Layout, left: f64, svg: &mut Svg, watch: &mut Watch) -> Result<(f64, f64)> {
    let picture = layout.picture_with(CELLS, CELLS, |_, _| watch.look())?;
    let longer = picture.width.max(picture.height).max(1);
    let cell = SIDE / f64::from(longer);
    let (width, height) = (cell * f64::from(picture.width), cell * f64::from(picture.height));
    svg.rectangle([left, 0.0, width, height], Shade::Empty.rgb());
    let shades: Vec<_> = picture.cells.iter().map(|cell| Shade::of(*cell)).collect();
    for (y, row) in shades.chunks_exact(picture.width.max(1) as usize).enumerate() {
        let mut x = 0;
        for run in row.chunk_by(|a, b| a == b) {
            if run[0] != Shade::Empty {
                let place = [x, y, run.len(), 1].map(|cells| cells as f64 * cell);
                svg.rectangle([left + place[0], place[1], place[2], place[3]], run[0].rgb());
            }
            x += run.len();
        }
    }
    Ok((width, height))
}

/// The picture of a pattern, or nothing where it can't be compiled for a length of our choice.
pub(crate) fn of_patterns(patterns: &Heads, watch: &mut Watch) -> Result<Option<String>> {
    let all = patterns.count().unwrap_or(1);
    let mut layouts = Vec::new();
    let panels = all * patterns.entries().unwrap_or(1);
    for panel in 0..panels.min(MOST_PANELS) {
        let pattern = patterns.entry(panel / all).get(panel % all, all)?;
        let Some(layout) = compile(pattern, watch)? else { return Ok(None) };
        layouts.push(layout);
    }
    svg(&layouts.iter().collect::<Vec<_>>(), panels, watch).map(Some)
}

/// Compiles a pattern for [`TOKENS`], or for the tokens that its documents or sequences have.
fn compile(pattern: &Pattern, watch: &mut Watch) -> Result<Option<Layout>> {
    let (mut queries, mut keys) = (TOKENS, TOKENS);
    for _ in 0..3 {
        let tokens = queries.max(keys);
        if tokens > MOST_TOKENS {
            return Ok(None);
        }
        let block = tokens.div_ceil(CELLS as usize).clamp(16, 64) as u64;
        let shape = Shape::new(queries, keys).block(BlockSize::new(block)?);
        match Layout::compile_with(pattern, &shape, |_, _| watch.look()) {
            Ok(layout) => return Ok(Some(layout)),
            Err(error @ Error::Stopped { .. }) => return Err(error),
            Err(Error::Sum { argument: "query lengths", sum, .. }) => queries = sum as usize,
            Err(Error::Sum { argument: "lengths", sum, .. }) => {
                (queries, keys) = (sum as usize, sum as usize);
            }
            Err(Error::Sum { sum, .. }) => keys = sum as usize,
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
