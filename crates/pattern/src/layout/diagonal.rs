//! Toeplitz patterns: those that depend on `key − query` alone, such as windows, strides and their
//! combinations.
//!
//! If queries and keys have the same step, all whole blocks of a diagonal have the same mask, and
//! rows + columns evaluations decide rows × columns blocks:
//!
//! ```text
//! compile   a list of runs along the diagonals; row r is its part from −r on, moved by r
//! count,    the sum over row r + 1 is that of row r shifted by one column: one block enters on
//! hash      the left and one leaves on the right
//! ```
//!
//! Where rows repeat or periods are short, evaluating row by row costs less. Calls switch to
//! diagonals after [`DIAGONAL_WORK`] units.

use super::compile::{Builder, Refused};
use super::contents::{Accumulator, BlockContent, BlockGroup, Contents};
use super::evaluate::BlockClass;
use super::pool::{BlockKind, FULL_BLOCK, ON_DEMAND_BLOCK};
use crate::shape::Frame;

/// Units of row-by-row work, about a tenth of a second, before switching to diagonals.
pub(super) const DIAGONAL_WORK: u64 = if cfg!(test) { 1 << 12 } else { 1 << 27 };

/// Units per row of the sliding window.
const SHIFTED: u64 = 64;

/// The end of the rows and the number of columns of whole blocks.
fn whole(frame: &Frame) -> (u32, u32) {
    let block = frame.block.get();
    let rows = (frame.queries.len() / block) as u32;
    (rows.min(frame.rows.end), (frame.keys.len() / block) as u32)
}

/// Adjacent diagonals `start..end` of one kind; a diagonal's index is column − row.
struct Diagonals {
    start: i64,
    end: i64,
    kind: BlockKind,
}

impl Builder<'_, '_> {
    /// Writes the rows from `from` on that have whole blocks; returns their number.
    pub(super) fn along_diagonals(
        &mut self,
        from: u32,
        starts: &mut Vec<u32>,
    ) -> Result<u32, Refused> {
        let frame = self.pool.frame();
        let (rows, columns) = whole(frame);
        if rows <= from {
            return Ok(0);
        }
        let mut diagonals: Vec<Diagonals> = Vec::new();
        for diagonal in 1 - i64::from(rows)..i64::from(columns) - i64::from(from) {
            let row = (-diagonal).max(from.into());
            let kind = self.kind(row as u32, (row + diagonal) as u32);
            self.check()?;
            match diagonals.last_mut() {
                Some(last) if last.kind == kind => last.end = diagonal + 1,
                _ => diagonals.push(Diagonals { start: diagonal, end: diagonal + 1, kind }),
            }
            // Twice the size of a run, and held beside the runs: half of their share of the memory.
            if diagonals.len() > self.max_runs / 4 {
                return Err(Refused::TooLarge);
            }
        }
        for row in from..rows {
            self.begin_row(row);
            let (low, high) = (-i64::from(row), i64::from(columns) - i64::from(row));
            let first = diagonals.partition_point(|diagonals| diagonals.end <= low);
            for part in diagonals[first..].iter().take_while(|part| part.start < high) {
                let (start, end) = (part.start.max(low) - low, part.end.min(high) - low);
                self.push(start as u32, end as u32, part.kind)?;
            }
            if columns < frame.columns {
                let kind = self.kind(row, columns);
                self.push(columns, columns + 1, kind)?;
            }
            self.check()?;
            starts.push(self.runs.len() as u32);
        }
        Ok(rows - from)
    }

    fn kind(&mut self, row: u32, column: u32) -> BlockKind {
        match self.evaluator.classify(row, column, &mut self.meter) {
            BlockClass::Empty => BlockKind::Empty,
            BlockClass::Full => FULL_BLOCK,
            BlockClass::Partial => ON_DEMAND_BLOCK,
        }
    }
}

impl Contents<'_, '_> {
    /// Reduces the rows from `from` on that have whole blocks; returns their number, fewer if the
    /// meter has halted.
    pub(super) fn along_diagonals(&mut self, from: u32, accumulator: &mut impl Accumulator) -> u32 {
        let frame = &self.layout.frame;
        let (rows, columns) = whole(frame);
        let pairs = (frame.block.get() * frame.block.get()) as u32;
        // Content by diagonal index; evaluated on entering and on leaving the window.
        let content = |contents: &mut Self, diagonal: i64| {
            let row = (-diagonal).max(from.into());
            match contents.content_of(row as u32, (row + diagonal) as u32) {
                BlockContent::Mask(0, _) => None,
                BlockContent::Mask(all, _) if all == pairs => Some(BlockContent::Full),
                content => Some(content),
            }
        };
        for column in (0..columns).rev() {
            let enters = content(self, i64::from(column) - i64::from(from));
            accumulator.slide(columns, enters, None);
            if self.meter.halted() {
                return 0;
            }
        }
        for row in from..rows {
            self.meter.at_row((row - frame.rows.start).into());
            self.meter.spend(SHIFTED);
            accumulator.add_window();
            if columns < frame.columns {
                let (queries, keys) = (frame.row_tokens(row), frame.column_tokens(columns));
                let all = ((queries.end - queries.start) * (keys.end - keys.start)) as u32;
                let group = BlockGroup { start: columns, step: 1, count: 1 };
                match self.content_of(row, columns) {
                    BlockContent::Mask(0, _) => {}
                    BlockContent::Mask(ones, _) if ones == all => {
                        accumulator.add(row, group, BlockContent::Full)
                    }
                    content => accumulator.add(row, group, content),
                }
            }
            accumulator.end_row();
            if row + 1 < rows && columns > 0 {
                let enters = content(self, -i64::from(row) - 1);
                let leaves = content(self, i64::from(columns) - 1 - i64::from(row));
                accumulator.slide(columns, enters, leaves);
            }
            if self.meter.halted() {
                return row - from;
            }
        }
        rows.saturating_sub(from)
    }
}

#[cfg(test)]
mod tests {
    use crate::coverage::LoweredPattern;
    use crate::{BlockMasks, BlockSize, Blocks, Layout, Pattern, RunKind, Shape};

    /// In tests, calls switch to diagonals after a row or two. Every pair is compared with the
    /// predicate, counts and hash with those of an imported layout with the same masks.
    #[test]
    fn rows_along_diagonals_are_exact() {
        let patterns = [
            "strided(17) | strided(19) | strided(23)",
            "strided(33) & !strided(37) & !strided(41)",
            "causal & (strided(21) | window(40, 0) & strided(3))",
            "!strided(2) & strided(67)",
            "window(300, 50) & !window(100, 20) & strided(5) | strided(400)",
        ];
        let shapes = [(400, 400, 16), (390, 403, 16), (600, 350, 32), (333, 500, 48)];
        for text in patterns {
            let pattern: Pattern = text.parse().unwrap();
            let mut lowered = LoweredPattern::new(&pattern, None, 0..1 << 20);
            for (queries, keys, block) in shapes {
                let block = BlockSize::new(block).unwrap();
                let plain = Shape::new(queries, keys).block(block);
                for offset in [-90, 57] {
                    let shape = plain.clone().query_offset(offset);
                    let layout = Layout::compile(&pattern, &shape).unwrap();
                    let copy = copied(&layout, &plain, |q, k| lowered.allows(q + offset, k));
                    let name = format!("{text} of {queries} × {keys}, offset {offset}");
                    assert_eq!(layout.counts(), copy.counts(), "{name}");
                    assert_eq!(layout.hash(), copy.hash(), "{name}");
                }
            }
        }
    }

    /// An imported layout with the masks of a predicate; asserts that the blocks agree.
    fn copied(layout: &Layout, shape: &Shape, mut allows: impl FnMut(i64, i64) -> bool) -> Layout {
        let per_row = layout.block().words();
        let (mut starts, mut columns, mut numbers, mut words) = (vec![0], vec![], vec![], vec![]);
        for row in layout.rows() {
            let mut kinds = vec![None; layout.columns() as usize];
            for run in layout.row(row) {
                kinds[run.start as usize..run.end() as usize].fill(Some(run.kind()));
            }
            for column in 0..layout.columns() {
                let mut mask = vec![0_u64; per_row * layout.block().get()];
                let (queries, keys) = (layout.row_tokens(row), layout.column_tokens(column));
                let (mut any, mut all) = (false, true);
                for (i, q) in queries.enumerate() {
                    for (j, k) in keys.clone().enumerate() {
                        let allowed = allows(q as i64, k as i64);
                        (any, all) = (any | allowed, all & allowed);
                        mask[i * per_row + j / 64] |= u64::from(allowed) << (j % 64);
                    }
                }
                let kind = match (any, all) {
                    (false, _) => None,
                    (_, true) => Some(RunKind::Full),
                    _ => Some(RunKind::Partial),
                };
                assert_eq!(kinds[column as usize], kind, "block ({row}, {column})");
                if any {
                    columns.push(column);
                    numbers.push(Some(numbers.len() as u32));
                    words.extend(mask);
                }
            }
            starts.push(columns.len());
        }
        let masks = BlockMasks::Numbered { numbers: &numbers, words: &words };
        Layout::from_blocks(shape, Blocks { starts: &starts, columns: &columns, masks }).unwrap()
    }
}
