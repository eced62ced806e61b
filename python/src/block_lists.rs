//! A layout, or some of its rows and columns, as FlexAttention's lists of blocks.
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
use crate::tensor::items_mut;

/// Lines that are written between two looks at signals.
const LINES: usize = 4_096;

/// How many indices a line has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    /// As many as there are blocks across.
    All,
    /// As many as the longest line has, at least one.
    Longest,
    /// As many as the longest line has. At least two, and at least two lines: torch's compiler makes
    /// another kernel where an axis has one element or none.
    LongestOfTwo,
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

    /// The least number of lines and of indices per line.
    fn least(self) -> (usize, usize) {
        if self == Width::LongestOfTwo { (2, 2) } else { (0, 1) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Axis {
    Rows,
    Columns,
}

/// Which rows or columns of a layout lists have; numbers are ascending.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Lines<'a> {
    All,
    /// All but these, under their own numbers: these stay empty.
    Without(&'a [u32]),
    /// These, numbered from 0 on.
    Only(&'a [u32]),
}

/// The blocks that lists have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Region<'a> {
    pub(crate) rows: Lines<'a>,
    pub(crate) columns: Lines<'a>,
}

impl Region<'_> {
    pub(crate) const ALL: Region<'static> = Region { rows: Lines::All, columns: Lines::All };

    /// The lines along an axis, and those across.
    fn of(&self, axis: Axis) -> (Lines<'_>, Lines<'_>) {
        match axis {
            Axis::Rows => (self.rows, self.columns),
            Axis::Columns => (self.columns, self.rows),
        }
    }
}

impl<'a> Lines<'a> {
    pub(crate) fn without(others: &'a [u32]) -> Self {
        if others.is_empty() { Lines::All } else { Lines::Without(others) }
    }

    /// How many there are, of `all`.
    fn count(&self, all: usize) -> usize {
        match self {
            Lines::All | Lines::Without(_) => all,
            Lines::Only(chosen) => chosen.len(),
        }
    }

    /// The number in the layout of a line, unless it stays empty.
    fn line(&self, index: usize) -> Option<u32> {
        match self {
            Lines::All => Some(index as u32),
            Lines::Without(others) => {
                others.binary_search(&(index as u32)).is_err().then_some(index as u32)
            }
            Lines::Only(chosen) => Some(chosen[index]),
        }
    }

    /// Calls `each` with those of adjacent numbers that are among the lines, renumbered.
    fn within(&self, numbers: Range<u32>, mut each: impl FnMut(Range<u32>)) {
        let inside = |list: &[u32]| {
            let index = |bound: u32| list.partition_point(|&number| number < bound);
            index(numbers.start)..index(numbers.end)
        };
        match self {
            Lines::All => each(numbers),
            Lines::Without(others) => {
                let mut start = numbers.start;
                for &other in &others[inside(others)] {
                    if start < other {
                        each(start..other);
                    }
                    start = other + 1;
                }
                if start < numbers.end {
                    each(start..numbers.end);
                }
            }
            Lines::Only(chosen) => {
                let Range { start, end } = inside(chosen);
                if start < end {
                    each(start as u32..end as u32);
                }
            }
        }
    }
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
    (batch, heads): (usize, usize),
    region: Region<'_>,
    width: Width,
) -> PyResult<Bound<'py, PyTuple>> {
    let grids = |watch: &mut Watch| {
        layouts.iter().map(|layout| Grid::new(layout, region, watch)).collect::<Result<Vec<_>, _>>()
    };
    let grids = signals::released(py, grids, errors::raise_pattern)?;
    let mut arrays = Vec::with_capacity(2 * LISTS.len());
    let (least_lines, least_width) = width.least();
    for (axis, kind) in LISTS {
        let (lines, across) = grids.first().map_or((0, 0), |grid| grid.size(axis));
        let room = match width {
            Width::All => across,
            _ => py.detach(|| longest(&grids, axis, kind)),
        };
        let (lines, room) = (lines.max(least_lines), room.max(least_width));
        let counts = zeros(py, &[batch, heads, lines])?;
        let indices = zeros(py, &[batch, heads, lines, room])?;
        // SAFETY: `zeros` made contiguous arrays of so many 32-bit numbers just now; nothing else
        // has them until they are returned, behind the last use of the slices.
        let (into_counts, into_indices) = unsafe {
            let all = batch * heads * lines;
            (items_mut(&counts, all)?, items_mut(&indices, all * room)?)
        };
        let write = |watch: &mut Watch| {
            let counts = into_counts.chunks_exact_mut(lines.max(1));
            let indices = into_indices.chunks_exact_mut((lines * room).max(1));
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
    region: Region<'a>,
    /// Rows and columns that have all of their tokens; behind them comes at most one that hasn't.
    whole_rows: u32,
    whole_columns: u32,
}

impl<'a> Grid<'a> {
    fn new(layout: &'a Layout, region: Region<'a>, watch: &mut Watch) -> Result<Self, Error> {
        let block = layout.block().get();
        let (rows, columns) = (layout.rows().end, layout.columns());
        if let Some(blocks) = [rows, columns].into_iter().find(|&n| i32::try_from(n).is_err()) {
            return Err(Error::TooManyBlocks { what: "int32", blocks: blocks.into() });
        }
        Ok(Grid {
            layout,
            transpose: layout.transpose_with(|_, _| watch.look())?,
            region,
            whole_rows: (layout.queries() / block) as u32,
            whole_columns: (layout.keys() / block) as u32,
        })
    }

    /// Lines along an axis, and blocks across.
    fn size(&self, axis: Axis) -> (usize, usize) {
        let rows = self.region.rows.count(self.layout.rows().len());
        let columns = self.region.columns.count(self.layout.columns() as usize);
        match axis {
            Axis::Rows => (rows, columns),
            Axis::Columns => (columns, rows),
        }
    }

    /// Calls `each` with the blocks of a line of the region that are of a kind, ascending.
    fn blocks(&self, axis: Axis, kind: Kind, index: usize, mut each: impl FnMut(Range<u32>)) {
        let (along, across) = self.region.of(axis);
        let Some(line) = along.line(index) else { return };
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
                across.within(blocks, &mut each);
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
        let (width, lines) = (indices.len() / counts.len(), self.size(axis).0);
        let room = counts.iter_mut().zip(indices.chunks_exact_mut(width));
        for (line, (count, indices)) in room.take(lines).enumerate() {
            let mut written = 0;
            self.blocks(axis, kind, line, |blocks| {
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
    let of_line = |grid: &Grid<'_>, line: usize| {
        let mut count = 0;
        grid.blocks(axis, kind, line, |blocks| count += blocks.len());
        count
    };
    let of_grid =
        |grid: &Grid<'_>| (0..grid.size(axis).0).map(|line| of_line(grid, line)).max().unwrap_or(0);
    grids.iter().map(of_grid).max().unwrap_or(0)
}

/// `numpy.zeros(shape, "int32")`.
fn zeros<'py>(py: Python<'py>, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    py.import("numpy")?.call_method1("zeros", (PyTuple::new(py, shape)?, "int32"))
}
