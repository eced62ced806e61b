//! A layout as FlexAttention's lists of blocks.
//!
//! For each row of query blocks, and from the layout's own transpose for each column of key blocks,
//! the numbers of the blocks that are seen in part and of those that are seen in full:
//!
//! ```text
//! counts   [batch, heads, lines]          blocks of each line
//! indices  [batch, heads, lines, width]   their numbers, ascending; zeros behind them
//! ```
//!
//! Only what a line has is written, the rest are NumPy's zeros: the time follows the number of
//! blocks, and for lists as wide as the layout has columns the pages that are touched.
//!
//! A block that reaches past the last token is never full there: FlexAttention takes what isn't
//! there for not seen, so that its kernels look at the mask where a sequence ends.

use std::ops::{ControlFlow, Range};

use longspan::Layout;
use longspan_pattern::{Error, Run, RunKind, Transpose};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors;
use crate::signals::{self, Watch};

/// Lines that are written between two looks at signals.
const LINES: usize = 4_096;

/// How many indices a line has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// As many as there are blocks across.
    All,
    /// As many as the longest line has, at least one.
    Longest,
}

impl Width {
    pub(crate) fn read(text: &str) -> PyResult<Self> {
        match text {
            "all" => Ok(Width::All),
            "longest" => Ok(Width::Longest),
            other => Err(errors::value(format!(
                "width is {other:?}, expected \"all\" (room for all blocks of a line) or \
                 \"longest\" (for those of the longest line)"
            ))),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Axis {
    Rows,
    Columns,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Partial,
    Full,
}

/// The order in which a BlockMask takes its lists.
const LISTS: [(Axis, Kind); 4] = [
    (Axis::Rows, Kind::Partial),
    (Axis::Rows, Kind::Full),
    (Axis::Columns, Kind::Partial),
    (Axis::Columns, Kind::Full),
];

/// `(counts, indices)` of partial and full blocks by rows, then by columns: eight arrays of int32.
/// `layouts` has one for each of `batch` × `heads`.
pub(crate) fn lists<'py>(
    py: Python<'py>,
    layouts: &[&Layout],
    batch: usize,
    heads: usize,
    width: Width,
) -> PyResult<Bound<'py, PyTuple>> {
    let grids = |watch: &mut Watch| {
        layouts.iter().map(|layout| Grid::new(layout, watch)).collect::<Result<Vec<_>, _>>()
    };
    let grids = signals::released(py, grids, errors::raise_pattern)?;
    let mut arrays = Vec::with_capacity(2 * LISTS.len());
    for (axis, kind) in LISTS {
        let (lines, across) = grids.first().map_or((0, 0), |grid| grid.size(axis));
        let width = match width {
            Width::All => across,
            Width::Longest => py.detach(|| longest(&grids, axis, kind)),
        };
        let width = width.max(1);
        let counts = zeros(py, &[batch, heads, lines])?;
        let indices = zeros(py, &[batch, heads, lines, width])?;
        // SAFETY: `zeros` made contiguous arrays of so many 32-bit numbers just now; nothing else
        // has them until they are returned, behind the last use of the slices.
        let (into_counts, into_indices) = unsafe {
            let all = batch * heads * lines;
            (numbers(&counts, all)?, numbers(&indices, all * width)?)
        };
        let write = |watch: &mut Watch| {
            let counts = into_counts.chunks_exact_mut(lines.max(1));
            let indices = into_indices.chunks_exact_mut((lines * width).max(1));
            for (grid, (counts, indices)) in grids.iter().zip(counts.zip(indices)) {
                grid.write(axis, kind, counts, indices, watch)?;
            }
            Ok(())
        };
        signals::released(py, write, errors::raise_pattern)?;
        arrays.extend([counts, indices]);
    }
    PyTuple::new(py, arrays)
}

/// Rows and columns of one layout.
struct Grid<'a> {
    layout: &'a Layout,
    transpose: &'a Transpose,
    /// Rows and columns that have all of their tokens; behind them comes at most one that hasn't.
    whole_rows: u32,
    whole_columns: u32,
}

impl<'a> Grid<'a> {
    fn new(layout: &'a Layout, watch: &mut Watch) -> Result<Self, Error> {
        let block = layout.block().get();
        let (rows, columns) = (layout.rows().end, layout.columns());
        if let Some(blocks) = [rows, columns].into_iter().find(|&n| i32::try_from(n).is_err()) {
            return Err(Error::TooManyBlocks { what: "int32", blocks: blocks.into() });
        }
        Ok(Grid {
            layout,
            transpose: layout.transpose_with(|_, _| watch.look())?,
            whole_rows: (layout.queries() / block) as u32,
            whole_columns: (layout.keys() / block) as u32,
        })
    }

    /// Lines along an axis, and blocks across.
    fn size(&self, axis: Axis) -> (usize, usize) {
        let (rows, columns) = (self.layout.rows().len(), self.layout.columns() as usize);
        match axis {
            Axis::Rows => (rows, columns),
            Axis::Columns => (columns, rows),
        }
    }

    /// Calls `each` with the blocks of a line that are of a kind, ascending.
    fn blocks(&self, axis: Axis, kind: Kind, line: u32, mut each: impl FnMut(Range<u32>)) {
        let (runs, whole_lines, whole_across): (&[Run], _, _) = match axis {
            Axis::Rows => (self.layout.row(line), self.whole_rows, self.whole_columns),
            Axis::Columns => (self.transpose.column(line), self.whole_columns, self.whole_rows),
        };
        // Full blocks of the layout from here on aren't full to FlexAttention.
        let cut = if line < whole_lines { whole_across } else { 0 };
        for run in runs {
            let blocks = match (run.kind(), kind) {
                (RunKind::Partial, Kind::Partial) => run.start..run.end(),
                (RunKind::Partial, Kind::Full) => continue,
                (RunKind::Full, Kind::Full) => run.start..run.end().min(cut),
                (RunKind::Full, Kind::Partial) => run.start.max(cut)..run.end(),
            };
            if !blocks.is_empty() {
                each(blocks);
            }
        }
    }

    fn write(
        &self,
        axis: Axis,
        kind: Kind,
        counts: &mut [i32],
        indices: &mut [i32],
        watch: &mut Watch,
    ) -> Result<(), Error> {
        let width = indices.len() / counts.len();
        for (line, (count, indices)) in
            counts.iter_mut().zip(indices.chunks_exact_mut(width)).enumerate()
        {
            let mut written = 0;
            self.blocks(axis, kind, line as u32, |blocks| {
                let room = &mut indices[written..written + blocks.len()];
                room.iter_mut().zip(blocks).for_each(|(index, block)| *index = block as i32);
                written += room.len();
            });
            *count = written as i32;
            if line % LINES == LINES - 1 && watch.look() == ControlFlow::Break(()) {
                let rows = self.layout.rows().len() as u64;
                return Err(Error::Stopped { row: line as u64, rows });
            }
        }
        Ok(())
    }
}

fn longest(grids: &[Grid<'_>], axis: Axis, kind: Kind) -> usize {
    let of_line = |grid: &Grid<'_>, line: u32| {
        let mut count = 0;
        grid.blocks(axis, kind, line, |blocks| count += blocks.len());
        count
    };
    let of_grid = |grid: &Grid<'_>| {
        (0..grid.size(axis).0 as u32).map(|line| of_line(grid, line)).max().unwrap_or(0)
    };
    grids.iter().map(of_grid).max().unwrap_or(0)
}

/// `numpy.zeros(shape, "int32")`.
fn zeros<'py>(py: Python<'py>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    py.import("numpy")?.call_method1("zeros", (PyTuple::new(py, shape)?, "int32"))
}

/// The numbers of an array.
///
/// # Safety
///
/// It must be contiguous and hold `len` numbers of 32 bits; for `'a` nothing else may read or write
/// it.
unsafe fn numbers<'a>(array: &Bound<'_, PyAny>, len: usize) -> PyResult<&'a mut [i32]> {
    let interface = array.getattr("__array_interface__")?;
    let (address, _): (usize, bool) = interface.get_item("data")?.extract()?;
    let data = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: this function demands `len` numbers there for `'a`; NumPy has an aligned address for
    // empty arrays too.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, len) })
}
