//! Down-sampled pictures: blocks binned to a given number of cells.

use std::ops::ControlFlow;

use super::{Layout, RunKind};
use crate::error::Result;
use crate::meter::ignore_progress;

/// Units per cell and per run; also the bytes per cell.
const CELL: u64 = 8;

/// Fractions of a cell's blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cell {
    /// Full blocks.
    pub full: f32,
    /// Partial blocks.
    pub partial: f32,
}

/// A down-sampled layout: rows of cells, each with the fractions of its blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    /// Cells per row.
    pub width: u32,
    /// Rows of cells.
    pub height: u32,
    /// Cells, row-major.
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
    /// The layout as at most `width` × `height` cells, each at least one block.
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
        self.picture_with(width, height, ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
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
        // Checked before the cells are allocated.
        meter.spend(CELL * u64::from(width) * u64::from(height));
        if meter.halted() {
            return Err(self.halted(&meter, "drawing"));
        }
        let mut cells = vec![Cell::default(); width as usize * height as usize];
        let (across, down) = (edges(columns, width), edges(rows.len() as u32, height));
        for (y, ends) in down.windows(2).enumerate() {
            let line = &mut cells[y * width as usize..][..width as usize];
            for row in rows.start + ends[0]..rows.start + ends[1] {
                meter.at_row((row - rows.start).into());
                let mut x = 0;
                for run in self.row(row) {
                    meter.spend(CELL);
                    if meter.halted() {
                        return Err(self.halted(&meter, "drawing"));
                    }
                    let mut at = run.start;
                    while at < run.end() {
                        // Runs ascend, so cells only advance.
                        while across[x + 1] <= at {
                            x += 1;
                        }
                        let end = across[x + 1].min(run.end());
                        let blocks = (end - at) as f32;
                        meter.spend(1);
                        match run.kind() {
                            RunKind::Full => line[x].full += blocks,
                            RunKind::Partial => line[x].partial += blocks,
                        }
                        at = end;
                    }
                }
            }
            for (cell, columns) in line.iter_mut().zip(across.windows(2)) {
                let blocks = f64::from(columns[1] - columns[0]) * f64::from(ends[1] - ends[0]);
                cell.full = (f64::from(cell.full) / blocks) as f32;
                cell.partial = (f64::from(cell.partial) / blocks) as f32;
            }
        }
        Ok(Picture { width, height, cells })
    }
}

/// The first block of each cell and the end of the last cell.
fn edges(blocks: u32, cells: u32) -> Vec<u32> {
    let edge = |cell: u32| u64::from(cell) * u64::from(blocks) / u64::from(cells.max(1));
    (0..=cells).map(|cell| edge(cell) as u32).collect()
}
