//! Layouts from tiles of a boolean mask.
//!
//! A tile is a rectangle of pairs with a boolean mask, or Full. FlexAttention's `BlockMask` is a list of
//! them, of any size; a mask of all pairs is one tile. Each row of blocks is made of the tiles that it
//! touches:
//!
//! ```text
//! tile that covers a block of the row and is Full ──▶ Full block
//! other tiles: their pairs ──pack──▶ words of the block's mask ──▶ Full, Partial or dropped
//! ```
//!
//! Time is that of the pairs of tiles with a mask, one byte each, and of the number of blocks; memory that
//! of the distinct masks, one bit per pair.

use std::ops::{ControlFlow, Range};

use super::blocks::{BlockMasks, Blocks};
use super::masks::{Interner, MaskTable, ones};
use super::{Layout, RunKind};
use crate::error::{Error, Result};
use crate::meter::{Meter, ignore_progress};
use crate::pattern::Pattern;
use crate::positions::{Positions, Progression};
use crate::shape::{Frame, Shape};

/// Tiles of a boolean mask; pairs outside of all tiles are masked.
#[derive(Debug, Clone, Copy)]
pub struct Tiles<'a, B = bool> {
    /// Queries and keys per tile; tiles at the end of an axis reach past the last token.
    pub size: (usize, usize),
    /// The tiles of row `r` are `starts[r]..starts[r + 1]`.
    pub starts: &'a [usize],
    /// The column of each tile, ascending within a row.
    pub columns: &'a [u32],
    /// Which of the masks each tile has; `None` is a Full tile.
    pub numbers: &'a [Option<u32>],
    /// The masks, `[mask, query, key]`; an element that is not 0 is an active pair.
    pub masks: &'a [B],
}

/// Units per word that is packed.
const PACKED: u64 = 8;

/// Units per block of a row.
const BLOCK: u64 = 16;

impl Layout {
    /// The layout of the pairs that are active in a list of tiles. The shape is as for
    /// [`from_blocks`](Self::from_blocks).
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape, Tiles};
    ///
    /// // `window(50, 0)` in tiles of 100 × 100: the diagonal, and the corner before it.
    /// let active = |query: usize, key: usize| key <= query && query <= key + 50;
    /// let mut masks: Vec<bool> = (0..10_000).map(|p| active(p / 100, p % 100)).collect();
    /// masks.extend((0..10_000).map(|p| active(p / 100 + 100, p % 100)));
    /// let tiles = Tiles {
    ///     size: (100, 100),
    ///     starts: &[0, 1, 3, 5],
    ///     columns: &[0, 0, 1, 1, 2],
    ///     numbers: &[Some(0), Some(1), Some(0), Some(1), Some(0)],
    ///     masks: &masks,
    /// };
    /// let layout = Layout::from_tiles(&Shape::new(300, 300), tiles)?;
    /// let window = Layout::compile(&Pattern::window(50, 0)?, &Shape::new(300, 300))?;
    /// assert!(layout.same_pairs(&window)?);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn from_tiles<B: Copy + Into<u8>>(shape: &Shape, tiles: Tiles<'_, B>) -> Result<Self> {
        Self::from_tiles_with(shape, tiles, ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn from_tiles_with<B: Copy + Into<u8>>(
        shape: &Shape,
        tiles: Tiles<'_, B>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        let frame = shape.resolve()?;
        check(&frame, &tiles)?;
        let mut meter = Meter::new(frame.max_work, frame.rows.len() as u64, &mut progress);
        let mut row = Row::new(&frame);
        let (mut starts, mut columns, mut numbers) = (vec![0], Vec::new(), Vec::new());
        let mut interner = Interner::default();
        let mut table = MaskTable::new(row.size);
        for band in frame.rows.clone() {
            meter.at_row((band - frame.rows.start).into());
            row.clear(frame.row_tokens(band));
            row.add(&tiles, &mut meter);
            if meter.halted() {
                return Err(meter.error("reading tiles", |_| "given tiles".into()));
            }
            row.finish(|column, mask| {
                columns.push(column);
                numbers.push(mask.map(|mask| interner.intern(&mut table, mask)));
            });
            starts.push(columns.len());
        }
        let masks = BlockMasks::Numbered { numbers: &numbers, words: table.words() };
        Layout::from_blocks(shape, Blocks { starts: &starts, columns: &columns, masks })
    }

    /// The layout of the pairs that are true in a mask `[queries, keys]`, for a shape of as many. The
    /// mask is read once. Where the shape has no offsets the queries are the last positions, and all
    /// are at least 0.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let causal: Vec<bool> = (0..100 * 100).map(|pair| pair % 100 <= pair / 100).collect();
    /// let layout = Layout::from_mask(&causal, Shape::new(100, 100))?;
    /// assert!(layout.same_pairs(&Layout::compile(&Pattern::causal(), &Shape::new(100, 100))?)?);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn from_mask<B: Copy + Into<u8>>(mask: &[B], shape: Shape) -> Result<Self> {
        Self::from_mask_with(mask, shape, ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn from_mask_with<B: Copy + Into<u8>>(
        mask: &[B],
        shape: Shape,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        let (queries, keys) = shape.tokens();
        if queries.checked_mul(keys) != Some(mask.len()) {
            return Err(Error::Mask { len: mask.len(), queries, keys });
        }
        let first = |tokens: usize, others: usize| tokens.saturating_sub(others) as i64;
        let shape = match shape.has_offsets() {
            true => shape,
            false => shape.query_offset(first(keys, queries)).key_offset(first(queries, keys)),
        };
        // All of it is one tile.
        let tiles = usize::from(!mask.is_empty());
        let tiles = Tiles {
            size: (queries.max(1), keys.max(1)),
            starts: &[0, tiles][..1 + usize::from(queries > 0)],
            columns: &[0][..tiles],
            numbers: &[Some(0)][..tiles],
            masks: mask,
        };
        Self::from_tiles_with(&shape, tiles, progress)
    }

    /// The pairs of the layout as a pattern, a list of key ranges per query. Positions are those of the
    /// layout, at least 0 and without gaps.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Shape};
    ///
    /// let mask = [true, false, false, true, true, false];
    /// let layout = Layout::from_mask(&mask, Shape::new(2, 3))?;
    /// let pattern = layout.to_pattern()?;
    /// assert_eq!(pattern.to_string(), "blocks(1, [[], [0], [0..2]])");
    /// assert!(Layout::compile(&pattern, &Shape::new(2, 3))?.same_pairs(&layout)?);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn to_pattern(&self) -> Result<Pattern> {
        self.to_pattern_with(ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn to_pattern_with(
        &self,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Pattern> {
        let first = |positions: &Positions, what| {
            let mut parts = positions.progressions();
            let Progression { start, step, len } =
                parts.next().unwrap_or(Progression { start: 0, step: 1, len: 0 });
            if start < 0 || (step > 1 && len > 1) || parts.next().is_some() {
                return Err(Error::Blocks(format!(
                    "{what} have positions below 0 or with gaps, expected consecutive ones from 0 on: \
                     a pattern of blocks has no others"
                )));
            }
            Ok(start as u64)
        };
        let first_query = first(self.query_positions(), "queries")?;
        let first_key = first(self.key_positions(), "keys")?;
        let mut meter = self.meter(&mut progress);
        let mut rows = vec![Vec::new(); first_query as usize + self.queries()];
        let (per_row, mut masks) = (self.block().words(), self.masks());
        for row in self.rows() {
            meter.at_row((row - self.rows().start).into());
            let tokens = self.row_tokens(row);
            let rows = &mut rows[first_query as usize..][tokens];
            for run in self.row(row) {
                if run.kind() == RunKind::Full {
                    let to = self.column_tokens(run.end() - 1).end as u64;
                    let keys =
                        self.column_tokens(run.start).start as u64 + first_key..to + first_key;
                    rows.iter_mut().for_each(|ranges| join(ranges, keys.clone()));
                    continue;
                }
                for column in run.start..run.end() {
                    let start = self.column_tokens(column).start as u64 + first_key;
                    let words = masks.get_with(row, column, run, &mut meter);
                    for (ranges, words) in rows.iter_mut().zip(words.chunks_exact(per_row)) {
                        ranges_of(words, |keys| join(ranges, start + keys.start..start + keys.end));
                    }
                    meter.spend(PACKED * (self.block().get() * per_row) as u64);
                    if meter.halted() {
                        return Err(self.halted(&meter, "reading masks"));
                    }
                }
            }
        }
        Pattern::blocks(1, rows)
    }
}

/// Appends a range, joined with the last one where they touch.
fn join(ranges: &mut Vec<Range<u64>>, keys: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == keys.start => last.end = keys.end,
        _ => ranges.push(keys),
    }
}

/// The ranges of bits that are set.
fn ranges_of(words: &[u64], mut each: impl FnMut(Range<u64>)) {
    for (index, &word) in words.iter().enumerate() {
        let (mut left, first) = (word, 64 * index as u64);
        while left != 0 {
            let start = left.trailing_zeros();
            let len = (!(left >> start)).trailing_zeros().min(64 - start);
            each(first + u64::from(start)..first + u64::from(start + len));
            left &= u64::MAX.checked_shl(start + len).unwrap_or(0);
        }
    }
}

/// Refuses tiles that are not those of the frame.
fn check<B>(frame: &Frame, tiles: &Tiles<'_, B>) -> Result<()> {
    let Tiles { size: (queries, keys), starts, columns, numbers, masks } = *tiles;
    let fail = |message: String| Err(Error::Blocks(message));
    if queries == 0 || keys == 0 {
        return fail(format!("tiles of {queries} × {keys} pairs, expected at least 1 × 1"));
    }
    let rows = frame.queries.len().div_ceil(queries);
    if starts.len() != rows + 1 {
        return fail(format!("{} starts of rows of tiles, expected {}", starts.len(), rows + 1));
    }
    let ascending = starts.windows(2).all(|pair| pair[0] <= pair[1]);
    if !ascending || starts.first() != Some(&0) || starts.last() != Some(&columns.len()) {
        return fail(format!(
            "starts of rows of tiles, expected ascending from 0 to {}, the number of tiles",
            columns.len()
        ));
    }
    if numbers.len() != columns.len() {
        return fail(format!("{} mask numbers for {} tiles", numbers.len(), columns.len()));
    }
    let count = queries.checked_mul(keys).map_or(0, |pairs| masks.len() / pairs);
    if let Some(number) = numbers.iter().flatten().find(|&&number| number as usize >= count) {
        return fail(format!("a tile has mask {number} of {count}"));
    }
    let limit = frame.keys.len().div_ceil(keys) as u64;
    for (row, bounds) in starts.windows(2).enumerate() {
        let columns = &columns[bounds[0]..bounds[1]];
        let ascending = columns.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || columns.last().is_some_and(|&last| u64::from(last) >= limit) {
            return fail(format!(
                "row {row} of tiles has columns {columns:?}, expected ascending ones below {limit}"
            ));
        }
    }
    Ok(())
}

/// What a block of a row is, while tiles are added to it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Untouched,
    Full,
    /// Where its words begin.
    Masked(usize),
}

/// A row of blocks that is made of tiles.
struct Row<'a> {
    frame: &'a Frame,
    /// Words per row of a mask, and per mask.
    per_row: usize,
    size: usize,
    queries: Range<usize>,
    /// Of each column of blocks.
    content: Vec<Content>,
    touched: Vec<u32>,
    words: Vec<u64>,
}

impl<'a> Row<'a> {
    fn new(frame: &'a Frame) -> Self {
        let per_row = frame.block.words();
        Row {
            frame,
            per_row,
            size: per_row * frame.block.get(),
            queries: 0..0,
            content: vec![Content::Untouched; frame.columns as usize],
            touched: Vec::new(),
            words: Vec::new(),
        }
    }

    fn clear(&mut self, queries: Range<i64>) {
        self.queries = queries.start as usize..queries.end as usize;
        for column in self.touched.drain(..) {
            self.content[column as usize] = Content::Untouched;
        }
        self.words.clear();
    }

    fn add<B: Copy + Into<u8>>(&mut self, tiles: &Tiles<'_, B>, meter: &mut Meter<'_>) {
        let (height, width) = tiles.size;
        let (first, last) = (self.queries.start / height, (self.queries.end - 1) / height);
        for tile_row in first..=last {
            let top = tile_row * height;
            let queries = self.queries.start.max(top)..self.queries.end.min(top + height);
            for tile in tiles.starts[tile_row]..tiles.starts[tile_row + 1] {
                let left = tiles.columns[tile] as usize * width;
                let keys = left..(left + width).min(self.frame.keys.len());
                let Some(number) = tiles.numbers[tile] else {
                    self.fill(&queries, &keys, meter);
                    continue;
                };
                let mask = &tiles.masks[number as usize * height * width..][..height * width];
                let mask = &mask[(queries.start - top) * width..(queries.end - top) * width];
                self.pack(&queries, &keys, mask, width, meter);
                if meter.halted() {
                    return;
                }
            }
        }
    }

    /// Sets all pairs of a rectangle.
    fn fill(&mut self, queries: &Range<usize>, keys: &Range<usize>, meter: &mut Meter<'_>) {
        let block = self.frame.block.get();
        for column in keys.start / block..keys.end.div_ceil(block) {
            meter.spend(BLOCK);
            let tokens = self.frame.column_tokens(column as u32);
            let tokens = tokens.start as usize..tokens.end as usize;
            let inside = keys.start.max(tokens.start)..keys.end.min(tokens.end);
            if inside == tokens && *queries == self.queries {
                self.touch(column);
                self.content[column] = Content::Full;
                continue;
            }
            let Some(at) = self.masked(column) else { continue };
            meter.spend(PACKED * queries.len() as u64);
            for query in queries.clone() {
                let at = at + (query - self.queries.start) * self.per_row;
                let bits = inside.start - tokens.start..inside.end - tokens.start;
                set(&mut self.words[at..at + self.per_row], bits);
            }
        }
    }

    /// Sets the pairs of a rectangle that are active in a mask, `width` elements per query.
    fn pack<B: Copy + Into<u8>>(
        &mut self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        mask: &[B],
        width: usize,
        meter: &mut Meter<'_>,
    ) {
        let block = self.frame.block.get();
        let columns = keys.start / block..keys.end.div_ceil(block);
        for column in columns.clone() {
            self.masked(column);
        }
        for (query, row) in queries.clone().zip(mask.chunks_exact(width)) {
            let row = &row[..keys.len()];
            let line = (query - self.queries.start) * self.per_row;
            for column in columns.clone() {
                let Content::Masked(at) = self.content[column] else { continue };
                let words = &mut self.words[at + line..at + line + self.per_row];
                let (start, end) = (column * block, (column + 1) * block);
                let from = keys.start.max(start);
                let active = &row[from - keys.start..keys.end.min(end) - keys.start];
                pack(active, from - start, words);
            }
            meter.spend(PACKED * (columns.len() * self.per_row) as u64);
            if meter.halted() {
                return;
            }
        }
    }

    /// Where the words of a block begin; `None` if it is Full.
    fn masked(&mut self, column: usize) -> Option<usize> {
        match self.content[column] {
            Content::Full => None,
            Content::Masked(at) => Some(at),
            Content::Untouched => {
                self.touch(column);
                let at = self.words.len();
                self.words.resize(at + self.size, 0);
                self.content[column] = Content::Masked(at);
                Some(at)
            }
        }
    }

    fn touch(&mut self, column: usize) {
        if self.content[column] == Content::Untouched {
            self.touched.push(column as u32);
        }
    }

    /// Calls `each` with the active blocks, ascending: the column and, unless it is Full, the mask.
    fn finish(&mut self, mut each: impl FnMut(u32, Option<&[u64]>)) {
        self.touched.sort_unstable();
        for &column in &self.touched {
            let Content::Masked(at) = self.content[column as usize] else {
                each(column, None);
                continue;
            };
            let mask = &self.words[at..at + self.size];
            let keys = self.frame.column_tokens(column);
            let pairs = self.queries.len() * (keys.end - keys.start) as usize;
            match ones(mask) as usize {
                0 => {}
                ones if ones == pairs => each(column, None),
                _ => each(column, Some(mask)),
            }
        }
    }
}

/// Sets a range of bits.
fn set(words: &mut [u64], bits: Range<usize>) {
    for (index, word) in words.iter_mut().enumerate() {
        let (low, high) = (64 * index, 64 * index + 64);
        let (from, to) = (bits.start.max(low), bits.end.min(high));
        if from < to {
            *word |= (u64::MAX >> (64 - (to - from))) << (from - low);
        }
    }
}

/// Sets the bits from `first` on whose elements are not 0.
fn pack<B: Copy + Into<u8>>(active: &[B], first: usize, words: &mut [u64]) {
    let mut bit = first;
    let mut left = active;
    while !left.is_empty() {
        let (now, rest) = left.split_at(left.len().min(64 - bit % 64));
        words[bit / 64] |= packed(now) << (bit % 64);
        (bit, left) = (bit + now.len(), rest);
    }
}

/// At most 64 elements as bits, eight at a time.
#[inline]
fn packed<B: Copy + Into<u8>>(active: &[B]) -> u64 {
    /// All bits of each byte but the highest.
    const LOW: u64 = 0x7F7F_7F7F_7F7F_7F7F;
    /// Moves the lowest bit of byte `n` to bit `56 + n`.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let (eights, rest) = active.as_chunks::<8>();
    let mut bits = 0;
    for (index, eight) in eights.iter().enumerate() {
        let bytes = u64::from_le_bytes(eight.map(Into::into));
        // The highest bit of each byte that is not 0, as its lowest one.
        let set = (((bytes & LOW) + LOW) | bytes) >> 7 & !LOW >> 7;
        bits |= (set.wrapping_mul(GATHER) >> 56) << (8 * index);
    }
    for (index, &element) in rest.iter().enumerate() {
        bits |= u64::from(element.into() != 0) << (8 * eights.len() + index);
    }
    bits
}
