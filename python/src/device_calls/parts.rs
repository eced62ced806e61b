//! A call in parts, so that few long lines don't make all lists long.
//!
//! Lists of blocks are as wide as their longest line. Sinks make one column of key blocks as long as the
//! sequence, global queries one row; all others are as long as a window. A part of its own has the few
//! wide columns as its whole key axis, another one the few wide rows as its whole query axis:
//!
//! ```text
//! narrow        narrow rows × narrow columns, over all tokens
//! wide columns  narrow rows × wide columns,   over all queries and the keys of those columns
//! wide rows     wide rows   × all columns,    over the queries of those rows and all keys
//! ```

use std::ops::{ControlFlow, Range};

use longspan::{Layout, Run};
use longspan_pattern::Error;

use crate::block_lists::{Lines, Region};
use crate::signals::Watch;

/// Lists from this many bytes on are made smaller: below, a second call of a kernel costs more than what
/// they take of a device's memory.
pub(super) const LONG_LISTS: usize = 1 << 20;

/// Parts are made where lists have at most one byte in so many then.
const SMALLER: usize = 2;

/// Rows or columns that are counted between two looks at signals.
const LINES: usize = 1 << 14;

/// Rows and columns with parts of their own; ascending.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Wide {
    rows: Vec<u32>,
    columns: Vec<u32>,
    /// Whether all blocks are in one of them.
    all: bool,
}

impl Wide {
    /// Those of layouts that one call has. A function of the numbers of their blocks alone; none where all
    /// lists take less than `least` bytes.
    pub(super) fn of(layouts: &[&Layout], least: usize, watch: &mut Watch) -> Result<Self, Error> {
        let Some(first) = layouts.first() else { return Ok(Wide::default()) };
        let (lines, across) = (first.rows().len(), first.columns() as usize);
        let mut row_lengths = vec![0; lines];
        for layout in layouts {
            count(&mut row_lengths, |row| layout.row(row), &[], watch)?;
        }
        let (of_rows, rows) = Chosen::of(&row_lengths, across);
        let mut column_lengths = vec![0; across];
        for layout in layouts {
            let transpose = layout.transpose_with(|_, _| watch.look())?;
            count(&mut column_lengths, |column| transpose.column(column), &rows, watch)?;
        }
        let (of_columns, columns) = Chosen::of(&column_lengths, lines);
        let bytes = |indices: usize| indices.saturating_mul(layouts.len() * size_of::<i32>());
        let before = bytes(of_rows.before + of_columns.before);
        let after = bytes(of_rows.after + of_columns.after);
        let worth = before >= least && SMALLER * after <= before;
        if !worth {
            return Ok(Wide::default());
        }
        let mut lengths = column_lengths.iter().zip(0..);
        let all =
            lengths.all(|(&length, column)| length == 0 || columns.binary_search(&column).is_ok());
        Ok(Wide { rows, columns, all })
    }

    /// The blocks of each part that has any.
    pub(super) fn regions(&self) -> Vec<Region<'_>> {
        let rows = Lines::without(&self.rows);
        let mut regions = Vec::with_capacity(3);
        if !self.all {
            regions.push(Region { rows, columns: Lines::without(&self.columns) });
        }
        if !self.columns.is_empty() {
            let columns = Lines::Only(&self.columns);
            regions.push(Region { rows, columns });
        }
        if !self.rows.is_empty() {
            regions.push(Region { rows: Lines::Only(&self.rows), columns: Lines::All });
        }
        regions
    }
}

/// Raises the length of each line to the blocks that a layout has there outside of `others`.
fn count<'a>(
    lengths: &mut [usize],
    runs: impl Fn(u32) -> &'a [Run],
    others: &[u32],
    watch: &mut Watch,
) -> Result<(), Error> {
    let rows = lengths.len() as u64;
    for (line, length) in lengths.iter_mut().enumerate() {
        let own = |run: &Run| {
            let below = |bound: u32| others.partition_point(|&other| other < bound);
            run.len as usize - (below(run.end()) - below(run.start))
        };
        *length = (*length).max(runs(line as u32).iter().map(own).sum());
        if line % LINES == LINES - 1 && watch.look() == ControlFlow::Break(()) {
            return Err(Error::Stopped { row: line as u64, rows });
        }
    }
    Ok(())
}

/// Indices that the lists along an axis have room for.
struct Chosen {
    /// In one part.
    before: usize,
    /// With the longest lines as a part of their own, by rows and by columns.
    after: usize,
}

impl Chosen {
    /// The lines that are left out so that the others are short; none unless that takes far fewer indices.
    fn of(lengths: &[usize], across: usize) -> (Self, Vec<u32>) {
        let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
        order.sort_by_key(|&line| (std::cmp::Reverse(lengths[line as usize]), line));
        let length = |index: usize| order.get(index).map_or(0, |&line| lengths[line as usize]);
        let before = lengths.len() * length(0);
        let with = |wide: usize| match wide {
            0 => before,
            _ => lengths.len() * length(wide) + wide * (length(0) + across),
        };
        // Only where lengths differ: lines of one length stay together.
        let ends = (1..lengths.len()).filter(|&wide| length(wide) < length(wide - 1));
        let best = ends.min_by_key(|&wide| with(wide)).unwrap_or(0);
        let wide = if SMALLER * with(best) <= before { best } else { 0 };
        let mut lines = order[..wide].to_vec();
        lines.sort_unstable();
        (Chosen { before, after: with(wide) }, lines)
    }
}

/// The tokens of some rows or columns of blocks; `tokens` has those of one.
pub(super) fn tokens(lines: &[u32], tokens: impl Fn(u32) -> Range<usize>) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for own in lines.iter().map(|&line| tokens(line)) {
        match ranges.last_mut() {
            Some(last) if last.end == own.start => last.end = own.end,
            _ => ranges.push(own),
        }
    }
    ranges
}
