//! Patterns that depend on `key − query` alone, such as windows, strides and all made of them.
//!
//! Where queries and keys have the same step, every whole block of a diagonal then has the same
//! mask. So rows × columns of blocks are known after a look at rows + columns of them:
//!
//! ```text
//! compile   a list of runs along the diagonals; row r is its part from −r on, moved by r
//! count,    a sum over the columns of row r + 1 is that of row r moved along by one column, with
//! hash      one block that enters on the left and one that leaves on the right
//! ```
//!
//! Where rows repeat or periods are short, rows one by one cost less. So this is what calls turn to
//! when they have spent [`COSTLY`] units on rows one by one.

use super::compile::{Builder, Refused};
use super::parts::{Comb, Content, Fold, Parts};
use super::pool::{ALL, Kind, LATER};
use super::walk::Seen;
use crate::shape::Frame;

/// Units of work, about a tenth of a second, after which rows one by one are too slow.
pub(super) const COSTLY: u64 = if cfg!(test) { 1 << 12 } else { 1 << 27 };

/// Units of a row whose sum is moved along.
const MOVED: u64 = 64;

/// Whole blocks: one past the last row, and how many columns.
fn whole(frame: &Frame) -> (u32, u32) {
    let block = frame.block.get() as u64;
    let rows = (frame.queries.len() / block) as u32;
    (rows.min(frame.rows.end), (frame.keys.len() / block) as u32)
}

/// Blocks of a diagonal and those after it that are of one kind: from number `start` on to below
/// `end`, a diagonal's number being column − row.
struct Diagonals {
    start: i64,
    end: i64,
    kind: Kind,
}

impl Builder<'_, '_> {
    /// Writes the rows from `from` on that have whole blocks, and tells how many they are.
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
        for number in 1 - i64::from(rows)..i64::from(columns) - i64::from(from) {
            let row = (-number).max(from.into());
            let kind = self.kind(row as u32, (row + number) as u32);
            self.check()?;
            match diagonals.last_mut() {
                Some(last) if last.kind == kind => last.end = number + 1,
                _ => diagonals.push(Diagonals { start: number, end: number + 1, kind }),
            }
            if diagonals.len() > self.most_runs {
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

    fn kind(&mut self, row: u32, column: u32) -> Kind {
        match self.walker.classify(row, column, &mut self.meter) {
            Seen::Nothing => Kind::Empty,
            Seen::Everything => ALL,
            Seen::Some => LATER,
        }
    }
}

impl Parts<'_, '_> {
    /// Adds up the rows from `from` on that have whole blocks, and tells how many they are; fewer
    /// where the meter has halted.
    pub(super) fn along_diagonals(&mut self, from: u32, fold: &mut impl Fold) -> u32 {
        let frame = &self.layout.frame;
        let (rows, columns) = whole(frame);
        let pairs = (frame.block.get() * frame.block.get()) as u32;
        // A block's content by the number of its diagonal; each is asked for twice, as one that
        // enters and as one that leaves.
        let content = |parts: &mut Self, number: i64| {
            let row = (-number).max(from.into());
            match parts.make(row as u32, (row + number) as u32) {
                Content::Mask(0, _) => None,
                Content::Mask(all, _) if all == pairs => Some(Content::Full),
                content => Some(content),
            }
        };
        for column in (0..columns).rev() {
            let enters = content(self, i64::from(column) - i64::from(from));
            fold.slide(columns, enters, None);
            if self.meter.halted() {
                return 0;
            }
        }
        for row in from..rows {
            self.meter.at_row((row - frame.rows.start).into());
            self.meter.spend(MOVED);
            fold.add_window();
            if columns < frame.columns {
                let (queries, keys) = (frame.row_tokens(row), frame.column_tokens(columns));
                let all = ((queries.end - queries.start) * (keys.end - keys.start)) as u32;
                let comb = Comb { start: columns, step: 1, count: 1 };
                match self.make(row, columns) {
                    Content::Mask(0, _) => {}
                    Content::Mask(ones, _) if ones == all => fold.add(row, comb, Content::Full),
                    content => fold.add(row, comb, content),
                }
            }
            fold.end_row();
            if row + 1 < rows && columns > 0 {
                let enters = content(self, -i64::from(row) - 1);
                let leaves = content(self, i64::from(columns) - 1 - i64::from(row));
                fold.slide(columns, enters, leaves);
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
    use crate::plan::Plan;
    use crate::{BlockMasks, BlockSize, Blocks, Layout, Pattern, RunKind, Shape};

    /// In tests calls turn to diagonals after a row or two. Every pair is compared with the
    /// predicate, and counts and hash with those of a layout of the same masks without a pattern.
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
            let mut plan = Plan::new(&pattern, None, 0..1 << 20);
            for (queries, keys, block) in shapes {
                let block = BlockSize::new(block).unwrap();
                let plain = Shape::new(queries, keys).block(block);
                for offset in [-90, 57] {
                    let shape = plain.clone().query_offset(offset);
                    let layout = Layout::compile(&pattern, &shape).unwrap();
                    let copy = copied(&layout, &plain, |q, k| plan.allows(q + offset, k));
                    let name = format!("{text} of {queries} × {keys}, offset {offset}");
                    assert_eq!(layout.counts(), copy.counts(), "{name}");
                    assert_eq!(layout.hash(), copy.hash(), "{name}");
                }
            }
        }
    }

    /// A layout of the masks that a predicate gives, after comparing which blocks there are.
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
                let (mut seen, mut all) = (false, true);
                for (i, q) in queries.enumerate() {
                    for (j, k) in keys.clone().enumerate() {
                        let allowed = allows(q as i64, k as i64);
                        (seen, all) = (seen | allowed, all & allowed);
                        mask[i * per_row + j / 64] |= u64::from(allowed) << (j % 64);
                    }
                }
                let kind = match (seen, all) {
                    (false, _) => None,
                    (_, true) => Some(RunKind::Full),
                    _ => Some(RunKind::Partial),
                };
                assert_eq!(kinds[column as usize], kind, "block ({row}, {column})");
                if seen {
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
