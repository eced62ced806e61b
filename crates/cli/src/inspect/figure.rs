//! The figure of an inspection: title, axes, grids, legend.
//!
//! ```text
//! title = the pattern
//! lengths, block, density
//!            key position
//!            0    2,048    …        one such panel,
//!          0 ┌──────────┐           or one per distinct layout
//!   query    │          │
//!   position │          │
//!            └──────────┘
//! ■ Full  ■ Partial  □ skipped      what colors mean
//! ```
//!
//! Sizes are in pixels, at two pixels per point.

use longspan_pattern::{Layout, Result, Shade};

use super::axis::Axis;
use super::grid::{Grid, MASKS, Meaning, Partials, Room};
use super::inspection::Inspection;
use crate::compile::BadInput;
use crate::number::{axis, count, percent, ranges, shortened, significant};
use crate::plot::{
    self, Align, Color, FAINT_INK, Face, Format, INK, LINE, PAGE, Picture, Scene, Turn, Type,
};

/// Empty border around everything.
const MARGIN: i32 = 48;
/// Pixels of the longer side of a single panel.
const SIDE: i32 = 1_280;
/// Pixels across of several panels together.
const TOGETHER: i32 = 1_640;
/// Pixels between panels.
const BETWEEN: i32 = 56;
/// Panels at most: 4 × 4.
const MOST: usize = 16;
/// Least width, for the text.
const NARROWEST: i32 = 1_240;
/// Lines between cells need cells at least this large.
const RULED: i32 = 8;

const TITLE: f32 = 30.0;
const TEXT: f32 = 25.0;
const LABEL: f32 = 23.0;
/// Patterns above small panels.
const CODE: f32 = 19.0;
/// Height of a line of text, in ems.
const LEADING: f32 = 1.45;
/// Side of a color sample in the legend.
const SWATCH: i32 = 26;
const TICK: i32 = 10;
/// The frame, and white between it and the cells, so that a line along the edge is visible.
const FRAME: i32 = 2;
const PADDING: i32 = 4;
/// Pixels between labels, across and down.
const PER_KEY: i32 = 120;
const PER_QUERY: i32 = 64;

fn leading(em: f32) -> i32 {
    (em * LEADING).round() as i32
}

/// Smallest cell in pixels: single pixels are hard to see on a high-resolution display.
const SMALLEST_CELL: i32 = 2;
/// Largest cell that an SVG file is coarsened to.
const COARSEST_CELL: i32 = 32;
/// Items of an SVG file: a rectangle takes about 65 bytes, so these take under a megabyte.
const SVG_ITEMS: usize = 10_000;

/// Draws the layouts of an inspection. For SVG, cells grow until there are at most [`SVG_ITEMS`]
/// items.
pub(super) fn draw(inspection: &Inspection, format: Format) -> anyhow::Result<Picture> {
    let layout = &inspection.layouts[0];
    let (rows, columns) = (layout.rows().len(), layout.columns());
    if rows == 0 || columns == 0 {
        let message = format!("nothing to draw: {rows} rows × {columns} columns of blocks");
        return Err(BadInput(message).into());
    }
    let mut cell = SMALLEST_CELL;
    let mut scene = compose(inspection, cell)?;
    while format == Format::Svg && scene.len() > SVG_ITEMS && cell < COARSEST_CELL {
        cell *= 2;
        scene = compose(inspection, cell)?;
    }
    plot::render(&scene, format)
}

/// The whole picture, with cells of at least `cell` pixels.
fn compose(inspection: &Inspection, cell: i32) -> Result<Scene> {
    let drawn = inspection.drawn();
    let shown = &drawn[..drawn.len().min(MOST)];
    let panels = panels(inspection, shown, cell)?;
    let per_line = abreast(panels.len());
    let gutter = panels.iter().map(Panel::gutter).max().unwrap_or(0);
    let panel_width = gutter + panels.iter().map(|p| p.grid.across.length()).max().unwrap_or(0);
    let panel_height = panels.iter().map(Panel::height).max().unwrap_or(0);
    let lines = panels.len().div_ceil(per_line) as i32;
    let across = per_line as i32 * (panel_width + BETWEEN) - BETWEEN;
    let width = across.max(NARROWEST);

    let mut scene = Scene::new();
    let mut y = MARGIN;
    let title = Type::new(Face::Mono, TITLE, INK);
    for line in title.wrap(&title_of(inspection), width, 3) {
        scene.text(MARGIN, y + leading(TITLE) / 2, line, title);
        y += leading(TITLE);
    }
    let subtitle = Type::new(Face::Sans, TEXT, FAINT_INK);
    y += 6;
    for line in subtitle.wrap(&about(inspection)?, width, 2) {
        scene.text(MARGIN, y + leading(TEXT) / 2, line, subtitle);
        y += leading(TEXT);
    }
    y += 28;

    for (index, panel) in panels.iter().enumerate() {
        let (column, line) = ((index % per_line) as i32, (index / per_line) as i32);
        let x = MARGIN + column * (panel_width + BETWEEN) + gutter;
        panel.draw(&mut scene, x, y + line * (panel_height + BETWEEN));
    }
    y += lines * (panel_height + BETWEEN) - BETWEEN + PADDING + 36;

    y = legend(&mut scene, panels[0].grid.meaning, y, width);
    let notes = [
        cell_note(panels[0].grid.meaning, inspection.block),
        axis("key", inspection.key_offset).1.map(|note| format!("key {note}")),
        axis("query", inspection.query_offset).1.map(|note| format!("query {note}")),
        (drawn.len() > shown.len())
            .then(|| format!("{} of {} layouts are drawn", shown.len(), drawn.len())),
    ];
    y += 8;
    for line in notes.iter().flatten().flat_map(|note| subtitle.wrap(note, width, 2)) {
        scene.text(MARGIN, y + leading(TEXT) / 2, line, subtitle);
        y += leading(TEXT);
    }
    scene.width = width + 2 * MARGIN;
    scene.height = y + MARGIN - 12;
    Ok(scene)
}

/// Number of panels side by side.
fn abreast(panels: usize) -> usize {
    (1..).find(|n| n * n >= panels).unwrap_or(1)
}

fn title_of(inspection: &Inspection) -> String {
    match inspection.drawn {
        Some(head) => inspection.heads[head].pattern.clone(),
        None => inspection.pattern.clone(),
    }
}

/// The line below the title.
fn about(inspection: &Inspection) -> Result<String> {
    let layout = &inspection.layouts[0];
    let tokens = match (layout.queries(), layout.keys()) {
        (queries, keys) if queries == keys => count(keys, "token"),
        (queries, keys) => format!("{} × {}", count(queries, "query"), count(keys, "key")),
    };
    let mut parts = vec![tokens, format!("blocks of {}", inspection.block)];
    if inspection.some_rows() {
        let rows = layout.rows();
        parts.push(format!("rows {}..{} of blocks", rows.start, rows.end));
    }
    match (inspection.drawn, inspection.heads.len()) {
        (Some(head), 2..) => parts.push(format!("head {head}")),
        (None, heads @ 2..) => parts.push(format!("{heads} heads")),
        _ => {}
    }
    let heads = match inspection.drawn {
        Some(head) => &inspection.heads[head..=head],
        None => &inspection.heads[..],
    };
    let densities = heads.iter().map(|head| inspection.layouts[head.layout].density());
    let density = densities.sum::<Result<f64>>()? / heads.len() as f64;
    parts.push(format!("{} of pairs active", percent(density)));
    if density > 0.0 && density < 0.67 {
        parts.push(format!("{}× fewer than dense", significant(1.0 / density)));
    }
    Ok(parts.join(" · "))
}

fn panels(inspection: &Inspection, shown: &[(usize, Vec<usize>)], cell: i32) -> Result<Vec<Panel>> {
    let layouts: Vec<&Layout> =
        shown.iter().map(|(layout, _)| &*inspection.layouts[*layout]).collect();
    let per_line = abreast(shown.len()) as i32;
    let side = if per_line == 1 { SIDE } else { TOGETHER / per_line - BETWEEN };
    // All panels share one legend, so one with too many masks makes all of them plain.
    let mut partials = Partials::Shaded;
    for layout in &layouts {
        if layout.counts()?.partial_blocks > MASKS {
            partials = Partials::Plain;
        }
    }
    shown
        .iter()
        .zip(layouts)
        .map(|((_, heads), layout)| {
            let alone = shown.len() == 1;
            let name = if heads.len() == 1 { "head" } else { "heads" };
            Ok(Panel {
                grid: Grid::new(layout, Room { side, cell }, partials)?,
                heading: (!alone).then(|| {
                    (
                        format!("{name} {}", ranges(heads)),
                        inspection.heads[heads[0]].pattern.clone(),
                    )
                }),
                key_title: axis("key", inspection.key_offset).0,
                query_title: axis("query", inspection.query_offset).0,
            })
        })
        .collect()
}

/// One grid with its axes.
struct Panel {
    grid: Grid,
    /// The heads and their pattern, where there are several panels.
    heading: Option<(String, String)>,
    key_title: String,
    query_title: String,
}

impl Panel {
    const LABELS: Type = Type {
        face: Face::Sans,
        em: LABEL,
        ink: FAINT_INK,
        align: Align::Center,
        turn: Turn::Across,
    };

    fn key_ticks(&self) -> Vec<(usize, String)> {
        self.grid.across.ticks(PER_KEY)
    }

    fn query_ticks(&self) -> Vec<(usize, String)> {
        self.grid.down.ticks(PER_QUERY)
    }

    /// Pixels left of the grid.
    fn gutter(&self) -> i32 {
        let labels = self.query_ticks().iter().map(|(_, label)| Self::LABELS.width(label)).max();
        leading(TEXT) + 8 + labels.unwrap_or(0) + 8 + TICK + PADDING + FRAME
    }

    /// Pixels above the grid.
    fn header(&self) -> i32 {
        let heading = match self.heading {
            Some(_) => leading(LABEL) + 2 * leading(CODE) + 10,
            None => 0,
        };
        heading + leading(TEXT) + leading(LABEL) + TICK + PADDING + FRAME
    }

    fn height(&self) -> i32 {
        self.header() + self.grid.down.length()
    }

    /// Draws with the grid's left edge at `x` and the panel's top at `y`.
    fn draw(&self, scene: &mut Scene, x: i32, top: i32) {
        let grid = &self.grid;
        let (width, height) = (grid.across.length(), grid.down.length());
        let y = top + self.header();
        if let Some((heads, pattern)) = &self.heading {
            let name = Type::new(Face::Sans, LABEL, INK);
            let code = Type::new(Face::Mono, CODE, INK);
            scene.text(x, top + leading(LABEL) / 2, name.cut(heads, width), name);
            let first = top + leading(LABEL) + leading(CODE) / 2;
            for (index, line) in (0..).zip(code.wrap(&shortened(pattern, 400), width, 2)) {
                scene.text(x, first + index * leading(CODE), line, code);
            }
        }

        let outside = PADDING + FRAME;
        scene.rectangle(x - outside, y - outside, width + 2 * outside, height + 2 * outside, LINE);
        let (padded_width, padded_height) = (width + 2 * PADDING, height + 2 * PADDING);
        scene.rectangle(x - PADDING, y - PADDING, padded_width, padded_height, PAGE);
        scene.rectangle(x, y, width, height, Shade::Empty.into());
        for patch in grid.patches(|shade| shade != Shade::Empty) {
            let color = Color::from(patch.shade);
            scene.rectangle(x + patch.x, y + patch.y, patch.width, patch.height, color);
        }
        if !matches!(grid.meaning, Meaning::Blocks(..)) {
            self.rule(scene, x, y);
        }

        let axis_title = Type::new(Face::Sans, TEXT, INK).align(Align::Center);
        for (token, label) in self.key_ticks() {
            let at = x + grid.across.place(token);
            scene.rectangle(at - 1, y - outside - TICK, 2, TICK, LINE);
            scene.text(at, y - outside - TICK - leading(LABEL) / 2, label, Self::LABELS);
        }
        let above = y - outside - TICK - leading(LABEL) - leading(TEXT) / 2;
        scene.text(x + width / 2, above, axis_title.cut(&self.key_title, width), axis_title);
        let right = Self::LABELS.align(Align::Right);
        for (token, label) in self.query_ticks() {
            let at = y + grid.down.place(token);
            scene.rectangle(x - outside - TICK, at - 1, TICK, 2, LINE);
            scene.text(x - outside - TICK - 8, at, label, right);
        }
        let left = x - self.gutter() + leading(TEXT) / 2;
        let up = axis_title.upwards();
        scene.text(left, y + height / 2, up.cut(&self.query_title, height), up);
    }

    /// Thin lines between cells that are large enough, gray ones between blocks of single pairs.
    fn rule(&self, scene: &mut Scene, x: i32, y: i32) {
        let (across, down) = (&self.grid.across, &self.grid.down);
        let (width, height) = (across.length(), down.length());
        let thin = |axis: &Axis| if axis.pixels >= RULED { axis.seams() } else { Vec::new() };
        for at in thin(across) {
            scene.rectangle(x + at, y, 1, height, PAGE);
        }
        for at in thin(down) {
            scene.rectangle(x, y + at, width, 1, PAGE);
        }
        for at in across.gaps() {
            scene.rectangle(x + at, y, across.gap, height, LINE);
        }
        for at in down.gaps() {
            scene.rectangle(x, y + at, width, down.gap, LINE);
        }
    }
}

/// Draws the legend; returns the y coordinate of its end.
fn legend(scene: &mut Scene, meaning: Meaning, top: i32, width: i32) -> i32 {
    let set = Type::new(Face::Sans, TEXT, INK);
    let ramp = |kind: fn(u8) -> Shade| {
        (1..=Shade::LEVELS).step_by(2).chain([Shade::LEVELS]).map(kind).collect::<Vec<_>>()
    };
    let (full, partial) = (vec![Shade::FULL], vec![Shade::PARTIAL]);
    let entries: &[(Vec<Shade>, &str)] = match meaning {
        Meaning::Pair => &[
            (full, "pair in a Full block"),
            (partial, "pair in a Partial block"),
            (vec![Shade::Masked], "masked pair of a Partial block"),
            (vec![Shade::Empty], "block skipped"),
        ],
        Meaning::Block(Partials::Plain) => &[
            (full, "Full block: every pair active"),
            (partial, "Partial block: some pairs active"),
            (vec![Shade::Empty], "block skipped"),
        ],
        Meaning::Block(Partials::Shaded) => &[
            (full, "Full block: every pair active"),
            (ramp(Shade::Partial), "Partial block: few to most pairs active"),
            (vec![Shade::Empty], "block skipped"),
        ],
        Meaning::Blocks(..) => &[
            (ramp(Shade::Full), "mostly Full blocks"),
            (ramp(Shade::Partial), "mostly Partial blocks"),
            (vec![Shade::Empty], "no active pairs"),
        ],
    };
    let (mut x, mut y) = (MARGIN, top);
    for (shades, text) in entries {
        let swatches = shades.len() as i32 * SWATCH;
        let length = swatches + 12 + set.width(text);
        if x > MARGIN && x + length > MARGIN + width {
            (x, y) = (MARGIN, y + leading(TEXT) + 4);
        }
        let upper = y + (leading(TEXT) - SWATCH) / 2;
        scene.rectangle(x - FRAME, upper - FRAME, swatches + 2 * FRAME, SWATCH + 2 * FRAME, LINE);
        for (index, shade) in (0..).zip(shades) {
            scene.rectangle(x + index * SWATCH, upper, SWATCH, SWATCH, (*shade).into());
        }
        scene.text(x + swatches + 12, y + leading(TEXT) / 2, *text, set);
        x += length + 44;
    }
    y + leading(TEXT)
}

/// A note on cells of several blocks.
fn cell_note(meaning: Meaning, block: usize) -> Option<String> {
    let Meaning::Blocks(across, down) = meaning else { return None };
    let size = |across: f64, down: f64| format!("{} × {}", significant(across), significant(down));
    let blocks = size(across, down);
    let tokens = size(across * block as f64, down * block as f64);
    Some(format!(
        "one cell = {blocks} blocks = {tokens} tokens; shade = share of its blocks that are active"
    ))
}
