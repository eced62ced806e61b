//! Layouts from a given list of blocks.

use super::compile::push_run;
use super::masks::{Interner, MaskTable};
use super::{FULL, Layout, Run};
use crate::error::{Error, Result};
use crate::shape::Shape;

/// Rows of blocks in block compressed sparse row (BSR) form.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    /// The blocks of row `r` are `starts[r]..starts[r + 1]`.
    pub starts: &'a [usize],
    /// The column of each block, ascending within a row.
    pub columns: &'a [u32],
    /// The masks of the blocks.
    pub masks: BlockMasks<'a>,
}

/// The masks of a list of blocks.
#[derive(Debug, Clone, Copy)]
pub enum BlockMasks<'a> {
    /// No masks: all pairs of every block are active.
    Full,
    /// One mask number per block.
    Numbered {
        /// The mask number of each block; `None` is a Full block.
        numbers: &'a [Option<u32>],
        /// The masks, contiguous, in the format of [`Masks`](super::Masks).
        words: &'a [u64],
    },
}

impl Layout {
    /// A layout of given blocks, selected by content or by another library. The shape has lengths,
    /// rows, block size and offsets, which say where tokens are; maps, padding and a mask budget are
    /// errors.
    ///
    /// Blocks out of order, outside the shape, or with bits past the last token are errors. A
    /// block whose mask is all zeros is dropped; one whose mask is all ones becomes Full.
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
        if shape.is_restricted() {
            return fail(
                "maps and padding are part of the blocks; omit them from the shape".into(),
            );
        }
        if shape.has_mask_budget() {
            return fail("all given masks are stored; omit the mask budget from the shape".into());
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
            return fail(format!("expected one mask number per block, {} blocks", columns.len()));
        }
        if words.len() % size != 0 {
            return fail(format!("{} mask words, expected a multiple of {size}", words.len()));
        }

        let mut table = MaskTable::new(size);
        let mut interner = Interner::default();
        let mut runs = Vec::new();
        let mut run_starts = vec![0u32];
        let edges = MaskForm { block: frame.block.get(), per_row: frame.block.words() };
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
                Ok(len) if runs.len() <= frame.max_runs() => run_starts.push(len),
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

/// Dimensions of a mask.
struct MaskForm {
    block: usize,
    per_row: usize,
}

impl MaskForm {
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
