//! A picture of characters.
//!
//! With color, a character shows two cells, one above the other, as `▀` with a foreground and a
//! background color: cells are square. Without, a character is one cell, and its darkness
//! distinguishes Full from Partial. A cell of several blocks has the kind of most of its active
//! blocks, so that thin lines stay visible. The size follows the width of the terminal.

use std::fmt::Write;

use anstyle::{Ansi256Color, Color, Style};
use longspan_pattern::{Cell, Layout, Result};

use super::inspection::{ByHead, Inspection};
use crate::number::{axis, ranges, shortened, significant, thousands};

/// Columns where the width of the terminal isn't known.
const COLUMNS: usize = 80;
/// Characters across of a single picture: at least, and at most.
const WIDTHS: (usize, usize) = (8, 96);
/// Characters across and down of one of several pictures, without its frame.
const SMALL: (usize, usize) = (20, 10);
/// Columns between pictures.
const GAP: usize = 2;
/// Pictures side by side at most, and where the width isn't known.
const ABREAST: usize = 4;
/// Pictures in total.
const MOST: usize = 16;

/// Blue and orange: distinguishable with every kind of color vision, on dark and on light.
const FULL: Color = Color::Ansi256(Ansi256Color(33));
const PARTIAL: Color = Color::Ansi256(Ansi256Color(214));

/// What distinguishes Full from Partial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ink {
    Color,
    Shades,
}

/// The picture with its axes and legend; several small ones where heads differ. `columns` is the
/// width of the terminal, where known.
pub(super) fn picture(inspection: &Inspection, ink: Ink, columns: Option<usize>) -> Result<String> {
    let drawn = inspection.drawn();
    let layout = &inspection.layouts[drawn[0].0];
    if layout.rows().is_empty() || layout.columns() == 0 {
        return Ok("no blocks, so no picture\n".into());
    }
    match drawn.len() {
        1 => large(inspection, drawn[0].0, ink, columns.unwrap_or(COLUMNS)),
        _ => small(inspection, &drawn, ink, columns),
    }
}

/// Characters across and down of a single picture: three fifths of the terminal's width, and no
/// more than fits beside the labels and the frame.
fn room(columns: usize, gutter: usize) -> (usize, usize) {
    let fits = columns.saturating_sub(gutter + 3);
    let across = (columns * 3 / 5).min(fits).clamp(WIDTHS.0, WIDTHS.1);
    (across, across / 2)
}

/// How many small pictures fit side by side.
fn abreast(columns: usize) -> usize {
    ((columns + GAP) / (SMALL.0 + 2 + GAP)).clamp(1, ABREAST)
}

fn large(inspection: &Inspection, index: usize, ink: Ink, columns: usize) -> Result<String> {
    let layout = &inspection.layouts[index];
    let rows = layout.rows();
    let first = thousands(layout.row_tokens(rows.start).start);
    let end = thousands(layout.row_tokens(rows.end - 1).end);
    let (key_name, key_note) = axis("key", inspection.key_offset);
    let (query_name, query_note) = axis("query", inspection.query_offset);
    let (query, name) = query_name.split_once(' ').expect("two words");

    let gutter = [first.len(), end.len(), query.len(), name.len()].into_iter().max().unwrap_or(0);
    let raster = Raster::new(layout, room(columns, gutter), ink)?;
    let lines = raster.lines();
    let border = "─".repeat(raster.width);
    let mut text = String::new();
    let keys = thousands(layout.keys());
    // Both ends of the key axis, its name between them if it fits.
    let mut between = key_name.as_str();
    let space = raster.width.saturating_sub(keys.len() + 1);
    if space < key_name.len() + 2 {
        let _ = writeln!(text, "{:gutter$}  {key_name}", "");
        between = "";
    }
    let _ = writeln!(text, "{:gutter$}  0{between:^space$}{keys}", "");
    let _ = writeln!(text, "{first:>gutter$} ┌{border}┐");
    for (index, line) in lines.iter().enumerate() {
        let label = match (index + 1).checked_sub(lines.len() / 2) {
            Some(0) => query,
            Some(1) => name,
            _ => "",
        };
        let _ = writeln!(text, "{label:>gutter$} │{line}│");
    }
    let _ = writeln!(text, "{end:>gutter$} └{border}┘");
    let _ = writeln!(text, "{:gutter$}  {}", "", raster.legend(ink));
    for (what, note) in [("key", key_note), ("query", query_note)] {
        if let Some(note) = note {
            let _ = writeln!(text, "{:gutter$}  {what} {note}", "");
        }
    }
    Ok(text)
}

fn small(
    inspection: &Inspection,
    drawn: &[(usize, Vec<usize>)],
    ink: Ink,
    columns: Option<usize>,
) -> Result<String> {
    let abreast = columns.map_or(ABREAST, abreast);
    let mut text = String::new();
    let mut legend = String::new();
    for group in drawn[..drawn.len().min(MOST)].chunks(abreast) {
        let mut columns = Vec::new();
        for (layout, heads) in group {
            let raster = Raster::new(&inspection.layouts[*layout], SMALL, ink)?;
            let name = if heads.len() == 1 { "head" } else { "heads" };
            let title = shortened(&format!("{name} {}", ranges(heads)), raster.width + 2);
            let border = "─".repeat(raster.width);
            let mut lines = vec![format!("{title:<width$}", width = raster.width + 2)];
            lines.push(format!("┌{border}┐"));
            lines.extend(raster.lines().iter().map(|line| format!("│{line}│")));
            lines.push(format!("└{border}┘"));
            legend = raster.legend(ink);
            columns.push(lines);
        }
        for line in 0..columns[0].len() {
            let side_by_side: Vec<&str> = columns.iter().map(|c| c[line].as_str()).collect();
            let _ = writeln!(text, "{}", side_by_side.join("  ").trim_end());
        }
    }
    if drawn.len() > MOST {
        let _ = writeln!(text, "{MOST} of {} layouts; --head draws any", drawn.len());
    }
    debug_assert_eq!(inspection.by_head, ByHead::Yes);
    let _ = writeln!(text, "{legend}; keys across, queries down");
    Ok(text)
}

/// What a cell shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Empty,
    /// Most active blocks are Partial.
    Partial(Amount),
    /// At least half of the active blocks are Full.
    Full(Amount),
}

/// How many of a cell's blocks are active.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amount {
    Few,
    Most,
}

impl Mark {
    fn of(cell: Cell) -> Self {
        let active = cell.full + cell.partial;
        let amount = if active < 0.5 { Amount::Few } else { Amount::Most };
        match active {
            0.0 => Mark::Empty,
            _ if cell.full >= cell.partial => Mark::Full(amount),
            _ => Mark::Partial(amount),
        }
    }

    fn shade(self) -> char {
        match self {
            Mark::Empty => ' ',
            Mark::Partial(Amount::Few) => '░',
            Mark::Partial(Amount::Most) => '▒',
            Mark::Full(Amount::Few) => '▓',
            Mark::Full(Amount::Most) => '█',
        }
    }

    fn color(self) -> Option<Color> {
        match self {
            Mark::Empty => None,
            Mark::Partial(_) => Some(PARTIAL),
            Mark::Full(_) => Some(FULL),
        }
    }
}

/// A layout as cells of the size that characters have.
struct Raster {
    /// Cells, and characters, across.
    width: usize,
    cells: Vec<Vec<Mark>>,
    /// Blocks that a cell holds, across and down.
    blocks: (f64, f64),
    ink: Ink,
}

impl Raster {
    fn new(layout: &Layout, room: (usize, usize), ink: Ink) -> Result<Self> {
        let (columns, rows) = (layout.columns() as usize, layout.rows().len());
        let (width, height) = size(columns, rows, room, ink);
        let picture = layout.picture(width as u32, height as u32)?;
        let (across, down) = (picture.width as usize, picture.height as usize);
        let cells = (0..height)
            .map(|y| {
                let cell = |x| {
                    Mark::of(picture.cell((x * across / width) as u32, (y * down / height) as u32))
                };
                (0..width).map(cell).collect()
            })
            .collect();
        let blocks = (columns as f64 / across as f64, rows as f64 / down as f64);
        Ok(Raster { width, cells, blocks, ink })
    }

    fn lines(&self) -> Vec<String> {
        match self.ink {
            Ink::Shades => {
                self.cells.iter().map(|row| row.iter().map(|mark| mark.shade()).collect()).collect()
            }
            Ink::Color => self.cells.chunks(2).map(|pair| self.half_blocks(pair)).collect(),
        }
    }

    /// Two rows of cells as one line.
    fn half_blocks(&self, rows: &[Vec<Mark>]) -> String {
        let colors = |x: usize| (rows[0][x].color(), rows.get(1).and_then(|row| row[x].color()));
        let mut line = String::new();
        let mut x = 0;
        while x < self.width {
            let pair = colors(x);
            let count = (x..self.width).take_while(|&x| colors(x) == pair).count();
            let (style, character) = match pair {
                (None, None) => (Style::new(), ' '),
                (Some(top), None) => (Style::new().fg_color(Some(top)), '▀'),
                (None, Some(bottom)) => (Style::new().fg_color(Some(bottom)), '▄'),
                (Some(top), Some(bottom)) if top == bottom => {
                    (Style::new().fg_color(Some(top)), '█')
                }
                (top, bottom) => (Style::new().fg_color(top).bg_color(bottom), '▀'),
            };
            let _ = write!(line, "{style}{}{style:#}", character.to_string().repeat(count));
            x += count;
        }
        line
    }

    fn legend(&self, ink: Ink) -> String {
        let (across, down) = (significant(self.blocks.0), significant(self.blocks.1));
        let binned = self.blocks != (1.0, 1.0);
        match ink {
            Ink::Shades if binned => format!(
                "█ ▓ Full, ▒ ░ Partial; one character is {across} × {down} blocks, ▓ ░ under half active"
            ),
            Ink::Shades => "█ Full, ▒ Partial".into(),
            Ink::Color => {
                let [full, partial] = [FULL, PARTIAL].map(|c| Style::new().fg_color(Some(c)));
                let kinds = format!("{full}█{full:#} Full, {partial}█{partial:#} Partial");
                match binned {
                    true => format!("{kinds}; one cell is {across} × {down} blocks"),
                    false => kinds,
                }
            }
        }
    }
}

/// Cells across and down: whole multiples of the blocks where they fit, and square to the eye,
/// to which a character is twice as high as wide.
fn size(columns: usize, rows: usize, room: (usize, usize), ink: Ink) -> (usize, usize) {
    // Rows of cells in a line of characters, and so how much higher than wide a cell is.
    let (per_line, tall) = match ink {
        Ink::Shades => (1, 2.0),
        Ink::Color => (2, 1.0),
    };
    let (most_across, most_down) = (room.0, room.1 * per_line);
    let ratio = rows as f64 / columns as f64;
    // Never so flat or so narrow that nothing can be seen.
    let (least_across, least_down) = (room.0 / 6, 2 * per_line);
    let wide = (most_down as f64 * tall / ratio).round() as usize;
    let width = whole(columns, wide.clamp(least_across, most_across));
    let high = (width as f64 * ratio / tall).round() as usize;
    (width, whole(rows, high.clamp(least_down, most_down)))
}

/// The largest multiple of `blocks` that fits, or all that fits where not even one does.
fn whole(blocks: usize, fits: usize) -> usize {
    if blocks > fits { fits } else { fits / blocks * blocks }
}

#[cfg(test)]
mod tests {
    use longspan_pattern::{Pattern, Shape};

    use super::*;

    const LARGE: (usize, usize) = (48, 24);

    #[test]
    fn pictures_follow_the_terminal() {
        // The default, a wide, a very wide, a narrow and a tiny terminal.
        let cases = [(80, 48), (120, 72), (300, 96), (40, 24), (20, 8), (0, 8)];
        for (columns, across) in cases {
            assert_eq!(room(columns, 9), (across, across / 2), "{columns} columns");
        }
        // Long labels leave less.
        assert_eq!(room(30, 20), (8, 4));
        assert_eq!(room(50, 25), (22, 11));
        assert_eq!([94, 93, 46, 45, 10, 500].map(abreast), [4, 3, 2, 1, 1, 4]);
    }

    #[test]
    fn blocks_stay_square() {
        assert_eq!(size(6, 6, LARGE, Ink::Shades), (48, 24));
        assert_eq!(size(6, 6, LARGE, Ink::Color), (48, 48));
        assert_eq!(size(40, 40, LARGE, Ink::Shades), (40, 20));
        assert_eq!(size(16_384, 16_384, LARGE, Ink::Shades), (48, 24));
        assert_eq!(size(16_384, 1, LARGE, Ink::Shades), (48, 2));
        assert_eq!(size(1, 500, LARGE, Ink::Shades), (8, 24));
    }

    #[test]
    fn two_cells_share_character() -> longspan_pattern::Result<()> {
        let layout = Layout::compile(&Pattern::causal(), &Shape::new(256, 256))?;
        let lines = Raster::new(&layout, (4, 2), Ink::Color)?.lines();
        // Rows of blocks: P... | FP.. / FFP. | FFFP
        let (full, partial) = ("\u{1b}[38;5;33m", "\u{1b}[38;5;214m");
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0], format!("{partial}\u{1b}[48;5;33m▀\u{1b}[0m{partial}▄\u{1b}[0m  "));
        assert!(lines[1].starts_with(&format!("{full}██\u{1b}[0m")), "{:?}", lines[1]);
        Ok(())
    }
}
