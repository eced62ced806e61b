//! Layouts from blocks that were chosen elsewhere.

use super::compile::push_run;
use super::masks::{Interner, MaskTable};
use super::{FULL, Layout, Run};
use crate::error::{Error, Result};
use crate::shape::Shape;

/// Rows of blocks, as other libraries have them: a compressed sparse row matrix of blocks.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// The blocks of row `r` are those from `starts[r]` to `starts[r + 1]`.
    pub starts: &'a [usize],
    /// The column of each block, ascending within a row.
    pub columns: &'a [u32],
    /// What of the blocks is seen.
    pub masks: BlockMasks<'a>,
}

/// What of each block is seen.
#[derive(Debug, Clone, Copy)]
pub enum BlockMasks<'a> {
    /// Everything.
    Full,
    /// Each block's mask by number, or everything.
    Numbered {
        /// For each block the number of its mask; `None` is everything.
        numbers: &'a [Option<u32>],
        /// The masks one after the other, in the form that [`Masks`](super::Masks) has.
        words: &'a [u64],
    },
}

impl Layout {
    /// A layout of blocks that were chosen elsewhere, from the content or by another library. The
    /// shape gives lengths, rows and block size; offsets, maps, padding and a mask budget have no
    /// place in it and are refused.
    ///
    /// Blocks out of order, outside the shape, or with bits past the last token are errors. A
    /// block whose mask lets nothing through is left out, and one whose mask lets everything
    /// through is Full.
    ///
    /// ```
    /// use longspan_pattern::{BlockMasks, Blocks, Layout, Shape};
    ///
    /// let blocks = Blocks { starts: &[0, 1, 3], columns: &[0, 0, 1], masks: BlockMasks::Full };
    /// let layout = Layout::from_blocks(&Shape::new(128, 128), blocks)?;
    /// assert_eq!(layout.counts()?.active_pairs, 3 * 64 * 64);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn from_blocks(shape: &Shape, blocks: Blocks<'_>) -> Result<Self> {
        let frame = shape.resolve()?;
        let rows = frame.rows.len();
        let fail = |message: String| Err(Error::Blocks(message));
        if shape.is_moved() {
            return fail("offsets, maps and padding are part of the blocks; leave them out".into());
        }
        if shape.has_mask_budget() {
            return fail("masks made elsewhere are all stored; leave the mask budget out".into());
        }
        let Blocks { starts, columns, masks } = blocks;
        if starts.len() != rows + 1 {
            return fail(format!("{} row starts, expected {}", starts.len(), rows + 1));
        }
        if starts[0] != 0 || starts[rows] != columns.len() {
            let (first, last) = (starts[0], starts[rows]);
            let blocks = columns.len();
            return fail(format!("row starts run from {first} to {last}, expected 0 to {blocks}"));
        }
        let size = frame.block.get() * frame.block.words();
        let (numbers, words) = match masks {
            BlockMasks::Full => (None, &[][..]),
            BlockMasks::Numbered { numbers, words } => (Some(numbers), words),
        };
        if numbers.is_some_and(|numbers| numbers.len() != columns.len()) {
            return fail(format!("mask numbers must be one a block, {} blocks", columns.len()));
        }
        if words.len() % size != 0 {
            return fail(format!("{} mask words, expected a multiple of {size}", words.len()));
        }

        let mut table = MaskTable::new(size);
        let mut interner = Interner::default();
        let mut runs = Vec::new();
        let mut run_starts = vec![0u32];
        let edges = Edges { block: frame.block.get(), per_row: frame.block.words() };
        for (index, row) in frame.rows.clone().enumerate() {
            let (from, to) = (starts[index], starts[index + 1]);
            if from > to || to > columns.len() {
                return fail(format!(
                    "row {row} runs from block {from} to {to}, expected ascending"
                ));
            }
            let row_start = runs.len();
            let queries = frame.row_tokens(row);
            let mut next = 0;
            for at in from..to {
                let column = columns[at];
                if column < next || column >= frame.columns {
                    return fail(format!(
                        "row {row} has column {column}, expected ascending columns below {}",
                        frame.columns
                    ));
                }
                next = column + 1;
                let Some(number) = numbers.and_then(|numbers| numbers[at]) else {
                    push_run(&mut runs, row_start, Run { start: column, len: 1, mask: FULL });
                    continue;
                };
                let Some(mask) = words.chunks_exact(size).nth(number as usize) else {
                    let masks = words.len() / size;
                    return fail(format!("block ({row}, {column}) has mask {number} of {masks}"));
                };
                let keys = frame.column_tokens(column);
                let tokens = |range: std::ops::Range<i64>| (range.end - range.start) as usize;
                let (queries, keys) = (tokens(queries.clone()), tokens(keys));
                if !edges.fits(mask, queries, keys) {
                    return fail(format!(
                        "the mask of block ({row}, {column}) has bits past its {queries} queries \
                         and {keys} keys"
                    ));
                }
                let mask = match super::masks::ones(mask) as usize {
                    0 => continue,
                    ones if ones == queries * keys => FULL,
                    _ => interner.intern(&mut table, mask),
                };
                push_run(&mut runs, row_start, Run { start: column, len: 1, mask });
            }
            match u32::try_from(runs.len()) {
                Ok(len) if size_of_val(&runs[..]) as u64 <= frame.max_bytes => run_starts.push(len),
                _ => {
                    let (limit, row) = (frame.max_bytes, row.into());
                    return Err(Error::TooLarge { limit, row, rows: rows as u64 });
                }
            }
        }
        runs.shrink_to_fit();
        table.shrink();
        Ok(Layout::new(frame, None, run_starts, runs, table, (0, 0)))
    }
}

/// The form of a mask.
struct Edges {
    block: usize,
    per_row: usize,
}

impl Edges {
    /// Whether all bits lie within the given tokens.
    fn fits(&self, mask: &[u64], queries: usize, keys: usize) -> bool {
        let beyond = |word: usize| match keys.saturating_sub(word * 64) {
            0 => u64::MAX,
            64.. => 0,
            left => u64::MAX << left,
        };
        debug_assert_eq!(mask.len(), self.block * self.per_row);
        mask.chunks_exact(self.per_row).enumerate().all(|(query, row)| {
            row.iter().enumerate().all(|(word, bits)| {
                bits & if query < queries { beyond(word) } else { u64::MAX } == 0
            })
        })
    }
}
