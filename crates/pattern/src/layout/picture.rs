//! What a picture of a layout shows: blocks, binned to a given number of cells.

use std::ops::ControlFlow;

use super::{Layout, RunKind};
use crate::error::Result;
use crate::meter::go_on;

/// Units of a cell, and of a run that is drawn; a cell takes as many bytes.
const CELL: u64 = 8;

/// Shares of a cell's blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cell {
    /// Blocks of which every pair is seen.
    pub full: f32,
    /// Blocks of which some pairs are seen.
    pub partial: f32,
}

/// A layout seen from afar: rows of cells, each the shares of the blocks that fall into it.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// Cells across, over the columns.
    pub width: u32,
    /// Cells down, over the rows.
    pub height: u32,
    /// Row by row.
    pub cells: Vec<Cell>,
}

impl Picture {
    /// The cell in a column and row of the picture.
    ///
    /// # Panics
    ///
    /// If there is no such cell.
    pub fn cell(&self, x: u32, y: u32) -> Cell {
        assert!(x < self.width && y < self.height, "no cell ({x}, {y})");
        self.cells[y as usize * self.width as usize + x as usize]
    }
}

impl Layout {
    /// The layout as at most `width` × `height` cells; a cell is one block where they suffice.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let layout = Layout::compile(&Pattern::causal(), &Shape::new(1 << 20, 1 << 20))?;
    /// let picture = layout.picture(4, 4)?;
    /// assert_eq!(picture.cell(0, 3).full, 1.0);
    /// assert_eq!(picture.cell(3, 0).full + picture.cell(3, 0).partial, 0.0);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn picture(&self, width: u32, height: u32) -> Result<Picture> {
        self.picture_with(width, height, go_on)
    }

    /// The same, with a hook that may end the work: see [`compile_with`](Self::compile_with).
    pub fn picture_with(
        &self,
        width: u32,
        height: u32,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Picture> {
        let mut meter = self.meter(&mut progress);
        let (rows, columns) = (self.rows(), self.columns());
        let height = height.min(rows.len() as u32);
        let width = width.min(columns);
        // Before memory is taken for them.
        meter.spend(CELL * u64::from(width) * u64::from(height));
        if meter.halted() {
            return Err(self.halted(&meter, "drawing"));
        }
        let mut cells = vec![Cell::default(); width as usize * height as usize];
        // Ends of a cell's blocks, rounded down.
        let edge = |cell: u32, cells: u32, blocks: u32| {
            (u64::from(cell) * u64::from(blocks) / u64::from(cells)) as u32
        };
        for y in 0..height {
            let line = &mut cells[y as usize * width as usize..][..width as usize];
            let first = rows.start + edge(y, height, rows.len() as u32);
            let last = rows.start + edge(y + 1, height, rows.len() as u32);
            for (row, run) in
                (first..last).flat_map(|row| self.row(row).iter().map(move |run| (row, run)))
            {
                meter.at_row((row - rows.start).into());
                meter.spend(CELL);
                if meter.halted() {
                    return Err(self.halted(&meter, "drawing"));
                }
                let mut x = cell_of(run.start, width, columns);
                let mut at = run.start;
                while at < run.end() {
                    let end = edge(x + 1, width, columns).min(run.end());
                    let blocks = (end - at) as f32;
                    meter.spend(1);
                    match run.kind() {
                        RunKind::Full => line[x as usize].full += blocks,
                        RunKind::Partial => line[x as usize].partial += blocks,
                    }
                    at = end;
                    x += 1;
                }
            }
            for (x, cell) in (0..).zip(line) {
                let across = edge(x + 1, width, columns) - edge(x, width, columns);
                let blocks = f64::from(across) * f64::from(last - first);
                cell.full = (f64::from(cell.full) / blocks) as f32;
                cell.partial = (f64::from(cell.partial) / blocks) as f32;
            }
        }
        Ok(Picture { width, height, cells })
    }
}

/// The cell that a column falls into: the last whose first column isn't beyond it.
fn cell_of(column: u32, cells: u32, columns: u32) -> u32 {
    let (column, cells, columns) = (u64::from(column), u64::from(cells), u64::from(columns));
    (((column + 1) * cells - 1) / columns) as u32
}
