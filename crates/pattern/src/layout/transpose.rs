//! The transpose: columns of runs from rows of runs.
//!
//! Going down the rows, a column's run opens at the first row that has the block and closes after
//! the last. Comparing adjacent rows run by run finds exactly the columns that change, so the work
//! is that of reading the rows and writing the columns: a run of a million blocks that the next
//! row repeats is one comparison.

use super::{Layout, Run};
use crate::error::{Error, Result};
use crate::meter::Meter;

/// The columns of a layout: for each column of key blocks the runs of query blocks that attend to
/// it. Masks are those of the rows, not transposed: read them with the same
/// [`Masks`](super::Masks).
///
/// ```
/// use longspan_pattern::{Layout, Pattern, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(640, 640))?;
/// // Key block 3 is Partial for query block 3 and Full for the six after it.
/// let column = layout.transpose()?.column(3);
/// assert_eq!(column.iter().map(|run| (run.start, run.len)).collect::<Vec<_>>(), [(3, 1), (4, 6)]);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transpose {
    starts: Vec<u32>,
    runs: Vec<Run>,
}

impl Transpose {
    /// The runs of query blocks that attend to a column of key blocks, ascending.
    ///
    /// # Panics
    ///
    /// If there is no such column.
    pub fn column(&self, column: u32) -> &[Run] {
        let column = column as usize;
        &self.runs[self.starts[column] as usize..self.starts[column + 1] as usize]
    }

    /// Number of runs in all columns.
    pub fn run_count(&self) -> usize {
        self.runs.len()
    }

    /// Memory in bytes.
    pub fn bytes(&self) -> usize {
        self.starts.capacity() * size_of::<u32>() + self.runs.capacity() * size_of::<Run>()
    }
}

pub(super) fn transpose(layout: &Layout, mut meter: Meter<'_>) -> Result<Transpose> {
    let columns = layout.columns() as usize;
    let limit = layout.frame.max_bytes;
    let rows = layout.rows().len() as u64;
    if columns as u64 > layout.frame.max_starts() {
        return Err(Error::TooLarge { limit, row: rows, rows });
    }
    let mut starts = vec![0u32; columns + 1];
    let mut total = 0u64;
    changes(layout, &mut meter, |_, from, to, before, _| {
        if before.is_some() {
            total += u64::from(to - from);
            // Beyond the limit the counts are not used.
            starts[from as usize..to as usize].iter_mut().for_each(|n| *n = n.wrapping_add(1));
        }
    })?;
    if total > layout.frame.max_runs() as u64 {
        return Err(Error::TooLarge { limit, row: rows, rows });
    }
    // Exclusive prefix sum: the index of each column's next run.
    let mut sum = 0;
    for start in &mut starts {
        sum += std::mem::replace(start, sum);
    }
    let mut runs = vec![Run { start: 0, len: 0, mask: 0 }; total as usize];
    changes(layout, &mut meter, |row, from, to, before, after| {
        for column in from as usize..to as usize {
            // The open run of a column is at its final index, without its length.
            if before.is_some() {
                let run = &mut runs[starts[column] as usize];
                run.len = row - run.start;
                starts[column] += 1;
            }
            if let Some(mask) = after {
                runs[starts[column] as usize] = Run { start: row, len: 0, mask };
            }
        }
    })?;
    // Each start has advanced to its column's end, the next column's start.
    starts.rotate_right(1);
    starts[0] = 0;
    Ok(Transpose { starts, runs })
}

/// Units per run read.
const READ: u64 = 4;
/// Units per column in which a run opens or closes: a scattered write.
const CHANGE: u64 = 16;

/// Calls `visit(row, from, to, before, after)` for the columns `from..to` whose mask is `before`
/// in the row above and `after` in `row`, where they differ; one row past the last included.
fn changes(
    layout: &Layout,
    meter: &mut Meter<'_>,
    mut visit: impl FnMut(u32, u32, u32, Option<u32>, Option<u32>),
) -> Result<()> {
    let rows = layout.rows();
    let mut above: &[Run] = &[];
    for row in rows.start..=rows.end {
        let here = if row < rows.end { layout.row(row) } else { &[] };
        let (mut i, mut j, mut at) = (0, 0, 0);
        meter.at_row((row - rows.start).into());
        meter.spend(READ * (1 + above.len() + here.len()) as u64);
        while i < above.len() || j < here.len() {
            let (a, b) = (above.get(i), here.get(j));
            let before = a.filter(|run| run.start <= at);
            let after = b.filter(|run| run.start <= at);
            let mut end = u32::MAX;
            for (next, current) in [(a, before), (b, after)] {
                if let Some(run) = next {
                    end = end.min(if current.is_some() { run.end() } else { run.start });
                }
            }
            let (before, after) = (before.map(|run| run.mask), after.map(|run| run.mask));
            if before != after && at < end {
                meter.spend(CHANGE * u64::from(end - at));
                if meter.halted() {
                    return Err(layout.halted(meter, "transposing"));
                }
                visit(row, at, end, before, after);
            }
            at = end;
            i += usize::from(a.is_some_and(|run| run.end() <= at));
            j += usize::from(b.is_some_and(|run| run.end() <= at));
        }
        above = here;
    }
    Ok(())
}
