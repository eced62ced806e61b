//! What a layout is compiled for: lengths, offsets, maps, rows, padding, block size.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::layout::Run;
use crate::plan::arith::Divisor;
use crate::positions::{FARTHEST, Positions, Progression};

/// How many tokens make a block: 16 to 256, and 64 where left to Longspan.
///
/// 64 because a tile of 64 × 64 scores and its operands stay in a core's first two caches at
/// every head dim, and one machine word is one mask row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockSize(u16);

impl BlockSize {
    /// The smallest block.
    pub const MIN: BlockSize = BlockSize(16);
    /// The largest block.
    pub const MAX: BlockSize = BlockSize(256);

    /// A block of `tokens` tokens.
    ///
    /// ```
    /// use longspan_pattern::BlockSize;
    ///
    /// assert_eq!(BlockSize::new(128)?.get(), 128);
    /// assert!(BlockSize::new(8).unwrap_err().to_string().contains("nearest legal size is 16"));
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn new(tokens: u64) -> Result<Self> {
        let nearest = tokens.clamp(Self::MIN.0.into(), Self::MAX.0.into());
        if nearest != tokens {
            return Err(Error::BlockSize { value: tokens, nearest });
        }
        Ok(BlockSize(tokens as u16))
    }

    /// Tokens a block.
    pub fn get(self) -> usize {
        self.0.into()
    }

    /// 64-bit words in one row of a mask.
    pub fn words(self) -> usize {
        self.get().div_ceil(64)
    }
}

impl Default for BlockSize {
    fn default() -> Self {
        BlockSize(64)
    }
}

/// What a [`Layout`](crate::Layout) is compiled for.
///
/// `Shape::new(tokens_q, tokens_k)` is the whole sequence with queries aligned to the *last* keys;
/// the rest narrows or moves it. Nothing is checked before
/// [`Layout::compile`](crate::Layout::compile).
///
/// ```
/// use longspan_pattern::{BlockSize, Layout, Pattern, Shape};
///
/// let shape = Shape::new(1_000, 1_000).block(BlockSize::new(32)?);
/// let layout = Layout::compile(&Pattern::causal(), &shape)?;
/// assert_eq!(layout.counts()?.active_pairs, 1_000 * 1_001 / 2);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    tokens_q: u64,
    tokens_k: u64,
    query_offset: Option<i64>,
    key_offset: i64,
    query_map: Option<Positions>,
    key_map: Option<Positions>,
    rows: Option<Range<u64>>,
    valid_keys: Option<Range<u64>>,
    block: BlockSize,
    mask_bytes: Option<u64>,
    max_bytes: u64,
    max_work: u64,
}

impl Shape {
    /// Bytes that the runs of a layout may take where [`max_bytes`](Self::max_bytes) is left out:
    /// 1 GiB, which is ninety million runs. No list that compilation makes takes over four times
    /// the bound, or 16 MiB where that is more.
    pub const MAX_BYTES: u64 = 1 << 30;

    /// Units of work that a call on a layout may take where [`max_work`](Self::max_work) is left
    /// out: 2^30, about a second of one core in a release build.
    pub const MAX_WORK: u64 = 1 << 30;

    /// `tokens_q` queries that are the last of `tokens_k` positions, all of them at hand.
    pub fn new(tokens_q: u64, tokens_k: u64) -> Self {
        Shape {
            tokens_q,
            tokens_k,
            query_offset: None,
            key_offset: 0,
            query_map: None,
            key_map: None,
            rows: None,
            valid_keys: None,
            block: BlockSize::default(),
            mask_bytes: None,
            max_bytes: Self::MAX_BYTES,
            max_work: Self::MAX_WORK,
        }
    }

    /// Query `i` stands at position `i + offset` (otherwise at `i + tokens_k − tokens_q`).
    pub fn query_offset(mut self, offset: i64) -> Self {
        self.query_offset = Some(offset);
        self
    }

    /// Key `j` stands at position `j + offset` (otherwise at `j`).
    pub fn key_offset(mut self, offset: i64) -> Self {
        self.key_offset = offset;
        self
    }

    /// Only these queries are at hand, in this order. The positions are global: the offset is
    /// already in them.
    pub fn query_map(mut self, positions: Positions) -> Self {
        self.query_map = Some(positions);
        self
    }

    /// Only these keys are at hand, in this order.
    pub fn key_map(mut self, positions: Positions) -> Self {
        self.key_map = Some(positions);
        self
    }

    /// Compile only these rows of query blocks.
    pub fn rows(mut self, rows: Range<u64>) -> Self {
        self.rows = Some(rows);
        self
    }

    /// Only these key numbers hold tokens; the rest is padding that nobody sees. Numbers count
    /// from the first key of the whole sequence, whatever the offset and the map.
    pub fn valid_keys(mut self, keys: Range<u64>) -> Self {
        self.valid_keys = Some(keys);
        self
    }

    /// Tokens a block.
    pub fn block(mut self, block: BlockSize) -> Self {
        self.block = block;
        self
    }

    /// Bytes that stored masks may take; the rest are made when they are read. Left out: an eighth
    /// of what the runs take, or six masks where that is more, and at most 2 MiB. Masks that are
    /// used often are stored first.
    pub fn mask_bytes(mut self, bytes: u64) -> Self {
        self.mask_bytes = Some(bytes);
        self
    }

    /// Bytes that the runs may take before compilation gives up with
    /// [`Error::TooLarge`]; [`MAX_BYTES`](Self::MAX_BYTES) where left out.
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Units of work that compiling may take, and each of counting, hashing, transposing, drawing
    /// and reading masks of the compiled layout, before it gives up with
    /// [`Error::TooMuchWork`]; [`MAX_WORK`](Self::MAX_WORK) where left out. A unit is about a
    /// nanosecond, and the same pattern and shape take the same number of units on every machine.
    ///
    /// ```
    /// use longspan_pattern::{Error, Layout, Pattern, Shape};
    ///
    /// let shape = Shape::new(1 << 16, 1 << 16).max_work(1_000);
    /// let refused = Layout::compile(&"strided(65) | strided(67)".parse()?, &shape);
    /// assert!(matches!(refused, Err(Error::TooMuchWork { limit: 1_000, .. })));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn max_work(mut self, units: u64) -> Self {
        self.max_work = units;
        self
    }

    /// Whether positions are anything but the plain ones: offsets, maps, padding.
    pub(crate) fn is_moved(&self) -> bool {
        self.query_offset.is_some()
            || self.key_offset != 0
            || self.query_map.is_some()
            || self.key_map.is_some()
            || self.is_padded()
    }

    /// Whether the shape has padding of its own.
    pub(crate) fn is_padded(&self) -> bool {
        self.valid_keys.is_some()
    }

    /// Whether the shape sets a budget for masks.
    pub(crate) fn has_mask_budget(&self) -> bool {
        self.mask_bytes.is_some()
    }

    /// Rows that would be compiled, at most; nothing is checked here.
    pub(crate) fn row_count(&self) -> u64 {
        let queries = self.query_map.as_ref().map_or(self.tokens_q, Positions::len);
        let all = queries.div_ceil(self.block.get() as u64);
        self.rows.as_ref().map_or(all, |r| r.end.saturating_sub(r.start).min(all))
    }

    /// Checks everything and works out positions.
    pub(crate) fn resolve(&self) -> Result<Frame> {
        let queries = axis("queries", self.tokens_q)?;
        let keys = axis("keys", self.tokens_k)?;
        let key_offset = self.key_offset;
        let query_offset = self.query_offset.unwrap_or(keys - queries);
        let key_end = span("keys", key_offset, keys)?;
        let query_end = span("queries", query_offset, queries)?;

        let query_positions =
            place("query", self.query_map.as_ref(), query_offset..query_end, self.tokens_q)?;
        let key_positions =
            place("key", self.key_map.as_ref(), key_offset..key_end, self.tokens_k)?;

        let block = self.block.get() as u64;
        let rows_all = blocks("queries", query_positions.len(), block)?;
        let columns = blocks("keys", key_positions.len(), block)?;
        let rows = self.rows.clone().unwrap_or(0..rows_all.into());
        inside("rows", &rows, rows_all.into())?;
        let valid = match &self.valid_keys {
            Some(valid) => {
                inside("valid keys", valid, self.tokens_k)?;
                Some(key_offset + valid.start as i64..key_offset + valid.end as i64)
            }
            None => None,
        };
        Ok(Frame {
            tokens_q: queries,
            query_offset,
            key_end: key_end.max(0),
            queries: query_positions,
            keys: key_positions,
            rows: rows.start as u32..rows.end as u32,
            columns,
            valid,
            block: self.block,
            divisor: Divisor::new(self.block.get() as i64),
            mask_bytes: self.mask_bytes,
            max_bytes: self.max_bytes,
            max_work: self.max_work,
        })
    }
}

/// A shape whose every number has been checked.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) tokens_q: i64,
    pub(crate) query_offset: i64,
    /// One past the last key's position, 0 if that is negative: where documents have to end.
    pub(crate) key_end: i64,
    pub(crate) queries: Positions,
    pub(crate) keys: Positions,
    pub(crate) rows: Range<u32>,
    pub(crate) columns: u32,
    pub(crate) valid: Option<Range<i64>>,
    pub(crate) block: BlockSize,
    /// The block size again, to divide by.
    pub(crate) divisor: Divisor,
    pub(crate) mask_bytes: Option<u64>,
    pub(crate) max_bytes: u64,
    pub(crate) max_work: u64,
}

impl Frame {
    /// Runs that fit into the bound on bytes and into an index.
    pub(crate) fn most_runs(&self) -> usize {
        (self.max_bytes / size_of::<Run>() as u64).min(u32::MAX.into()) as usize
    }

    /// Local query numbers of a row of blocks.
    pub(crate) fn row_tokens(&self, row: u32) -> Range<i64> {
        tokens(row, self.block, &self.queries)
    }

    /// Local key numbers of a column of blocks.
    pub(crate) fn column_tokens(&self, column: u32) -> Range<i64> {
        tokens(column, self.block, &self.keys)
    }
}

fn tokens(index: u32, block: BlockSize, positions: &Positions) -> Range<i64> {
    let block = block.get() as i64;
    let start = i64::from(index) * block;
    start..(start + block).min(positions.len() as i64)
}

fn axis(what: &'static str, tokens: u64) -> Result<i64> {
    if tokens > FARTHEST as u64 {
        return Err(Error::TooFar { what, value: tokens.into() });
    }
    Ok(tokens as i64)
}

/// One past the last position of `tokens` tokens from `offset` on.
fn span(what: &'static str, offset: i64, tokens: i64) -> Result<i64> {
    let end = i128::from(offset) + i128::from(tokens);
    for value in [i128::from(offset), end] {
        if value.unsigned_abs() > FARTHEST as u128 {
            return Err(Error::TooFar { what, value });
        }
    }
    Ok(end as i64)
}

fn place(
    what: &'static str,
    map: Option<&Positions>,
    inside: Range<i64>,
    tokens: u64,
) -> Result<Positions> {
    let Some(map) = map else {
        return Positions::new([Progression { start: inside.start, step: 1, len: tokens }]);
    };
    if let Some((first, last)) = map.extremes() {
        for position in [first, last] {
            if !inside.contains(&position) {
                let (first, end) = (inside.start, inside.end);
                return Err(Error::Map { what, position, first, end });
            }
        }
    }
    Ok(map.clone())
}

fn blocks(what: &'static str, tokens: u64, block: u64) -> Result<u32> {
    let blocks = tokens.div_ceil(block);
    // The last value stays free, so that one past the last block is an index too.
    match u32::try_from(blocks) {
        Ok(blocks) if blocks < u32::MAX => Ok(blocks),
        _ => Err(Error::TooManyBlocks { what, blocks }),
    }
}

fn inside(what: &'static str, range: &Range<u64>, limit: u64) -> Result<()> {
    let (start, end) = (range.start, range.end);
    if start > end || end > limit {
        return Err(Error::Range { what, start, end, limit });
    }
    Ok(())
}
