//! What a layout is compiled for: lengths, offsets, maps, rows, padding, block size. Used by
//! `coverage` and all layers above it.

use std::ops::Range;

use crate::arith::Divisor;
use crate::error::{Error, Result};
use crate::pattern::Pattern;
use crate::positions::{MAX_POSITION, Positions, Progression};

/// Tokens per block: 16 to 256, mostly 64 by default ([`Shape::block_for`]).
///
/// 64 because a tile of 64 × 64 scores and its operands fit into L2 at every head dim, and one
/// machine word is one mask row.
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

    /// Tokens per block.
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
/// the other methods restrict or move it. [`Layout::compile`](crate::Layout::compile) validates it.
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
    tokens_q: usize,
    tokens_k: usize,
    query_offset: Option<i64>,
    key_offset: i64,
    query_map: Option<Positions>,
    key_map: Option<Positions>,
    rows: Option<Range<u64>>,
    key_padding: Option<Range<usize>>,
    block: Option<BlockSize>,
    mask_bytes: Option<u64>,
    max_bytes: u64,
    max_work: u64,
}

/// Runs of a layout from which on long strides get larger blocks.
const MANY_RUNS: u128 = 1 << 16;

impl Shape {
    /// Default of [`max_bytes`](Self::max_bytes): 4 GiB. A quarter of it is for the runs, at most
    /// ninety million.
    pub const MAX_BYTES: u64 = 1 << 32;

    /// Default of [`max_work`](Self::max_work): 2^30 units, about a second of one core in a release
    /// build.
    pub const MAX_WORK: u64 = 1 << 30;

    /// `tokens_q` queries at the last of `tokens_k` positions, all of them local.
    pub fn new(tokens_q: usize, tokens_k: usize) -> Self {
        Shape {
            tokens_q,
            tokens_k,
            query_offset: None,
            key_offset: 0,
            query_map: None,
            key_map: None,
            rows: None,
            key_padding: None,
            block: None,
            mask_bytes: None,
            max_bytes: Self::MAX_BYTES,
            max_work: Self::MAX_WORK,
        }
    }

    /// Queries and keys of the whole sequence.
    pub(crate) fn tokens(&self) -> (usize, usize) {
        (self.tokens_q, self.tokens_k)
    }

    /// Query `i` has position `i + offset`. The default is `key_offset + tokens_k − tokens_q`: the
    /// queries are the last positions.
    pub fn query_offset(mut self, offset: i64) -> Self {
        self.query_offset = Some(offset);
        self
    }

    /// Key `j` has position `j + offset`; `j` by default.
    pub fn key_offset(mut self, offset: i64) -> Self {
        self.key_offset = offset;
        self
    }

    /// Only these queries are local, in this order. The positions are global and include the
    /// offset.
    pub fn query_map(mut self, positions: Positions) -> Self {
        self.query_map = Some(positions);
        self
    }

    /// Only these keys are local, in this order.
    pub fn key_map(mut self, positions: Positions) -> Self {
        self.key_map = Some(positions);
        self
    }

    /// Compiles only these rows of query blocks.
    pub fn rows(mut self, rows: Range<u64>) -> Self {
        self.rows = Some(rows);
        self
    }

    /// Only these keys are tokens; the others are padding and masked. Indices are relative to the
    /// first key of the whole sequence, independent of offset and map.
    pub fn key_padding(mut self, keys: Range<usize>) -> Self {
        self.key_padding = Some(keys);
        self
    }

    /// Tokens per block. Default: 64; for long sequences see [`block_for`](Self::block_for).
    pub fn block(mut self, block: BlockSize) -> Self {
        self.block = Some(block);
        self
    }

    /// The shape with the block that these patterns get unless one is set: 64, and 128 or 256 where a
    /// stride is longer than a block and the layout of a whole sequence would have more than 65,536
    /// runs because of it. Layouts of one set have one block.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let (strided, shape) = (Pattern::strided(128)?, |n| Shape::new(n, n));
    /// assert_eq!(Layout::compile(&strided, &shape(10_000))?.block().get(), 64);
    /// assert_eq!(Layout::compile(&strided, &shape(1_000_000))?.block().get(), 128);
    /// let shape = shape(1_000_000).block_for([&strided, &Pattern::causal()]);
    /// assert_eq!(Layout::compile(&Pattern::causal(), &shape)?.block().get(), 128);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    #[must_use]
    pub fn block_for<'p>(mut self, patterns: impl IntoIterator<Item = &'p Pattern>) -> Self {
        let whole = self.query_map.is_none() && self.key_map.is_none() && self.rows.is_none();
        if self.block.is_some() || !whole {
            return self;
        }
        let least = BlockSize::default().get() as u64;
        let longest = patterns.into_iter().map(Pattern::longest_step).max().unwrap_or(0);
        // About a run per row of blocks and stride.
        let runs = self.tokens_q as u128 / u128::from(least) * self.tokens_k as u128;
        if longest > least && runs / u128::from(longest) > MANY_RUNS {
            let block = longest.checked_next_power_of_two().unwrap_or(u64::MAX);
            self.block = Some(BlockSize(block.min(BlockSize::MAX.0.into()) as u16));
        }
        self
    }

    /// Memory limit of stored masks; the others are computed on demand. Default: an eighth of the
    /// memory of the runs, at least six masks and at most 2 MiB. The most used masks are stored.
    pub fn mask_bytes(mut self, bytes: u64) -> Self {
        self.mask_bytes = Some(bytes);
        self
    }

    /// Memory limit of compilation, and of the layout with its transpose, beyond which calls fail
    /// with [`Error::TooLarge`]; [`MAX_BYTES`](Self::MAX_BYTES) by default. Excludes tables of
    /// constant size (about 8 MiB) and the masks that [`mask_bytes`](Self::mask_bytes) limits.
    pub fn max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Work limit of compiling, and of each of counting, hashing, comparing, transposing, drawing
    /// and reading masks, beyond which calls fail with [`Error::TooMuchWork`];
    /// [`MAX_WORK`](Self::MAX_WORK) by default. A unit is about a nanosecond; the same pattern and
    /// shape take the same number of units on every machine.
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

    /// Whether there are offsets.
    pub(crate) fn has_offsets(&self) -> bool {
        self.query_offset.is_some() || self.key_offset != 0
    }

    /// Whether there are maps or padding.
    pub(crate) fn is_restricted(&self) -> bool {
        self.query_map.is_some() || self.key_map.is_some() || self.is_padded()
    }

    /// Whether the shape has padding.
    pub(crate) fn is_padded(&self) -> bool {
        self.key_padding.is_some()
    }

    /// Whether the shape has a mask budget.
    pub(crate) fn has_mask_budget(&self) -> bool {
        self.mask_bytes.is_some()
    }

    /// Upper bound of the compiled rows; not validated.
    pub(crate) fn row_count(&self) -> u64 {
        let queries = self.query_map.as_ref().map_or(self.tokens_q, Positions::len);
        let all = queries.div_ceil(self.block.unwrap_or_default().get()) as u64;
        self.rows.as_ref().map_or(all, |r| r.end.saturating_sub(r.start).min(all))
    }

    /// Validates the shape and resolves positions.
    pub(crate) fn resolve(&self) -> Result<Frame> {
        let queries = axis("queries", self.tokens_q)?;
        let keys = axis("keys", self.tokens_k)?;
        let key_offset = self.key_offset;
        let key_end = span("keys", key_offset, keys)?;
        let query_offset = self.query_offset.unwrap_or(key_end - queries);
        let query_end = span("queries", query_offset, queries)?;

        let query_positions = resolve_positions(
            "query",
            self.query_map.as_ref(),
            query_offset..query_end,
            self.tokens_q,
        )?;
        let key_positions =
            resolve_positions("key", self.key_map.as_ref(), key_offset..key_end, self.tokens_k)?;

        let block = self.block.unwrap_or_default();
        let rows_all = blocks("queries", query_positions.len(), block.get())?;
        let columns = blocks("keys", key_positions.len(), block.get())?;
        let rows = self.rows.clone().unwrap_or(0..rows_all.into());
        inside("rows", &rows, rows_all.into())?;
        let valid = match &self.key_padding {
            Some(valid) => {
                let indices = valid.start as u64..valid.end as u64;
                inside("the keys of key_padding", &indices, self.tokens_k as u64)?;
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
            block,
            divisor: Divisor::new(block.get() as i64),
            mask_bytes: self.mask_bytes,
            max_bytes: self.max_bytes,
            max_work: self.max_work,
        })
    }
}

/// A validated shape.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) tokens_q: i64,
    pub(crate) query_offset: i64,
    /// One past the last key's position, at least 0: the required end of documents.
    pub(crate) key_end: i64,
    pub(crate) queries: Positions,
    pub(crate) keys: Positions,
    pub(crate) rows: Range<u32>,
    pub(crate) columns: u32,
    pub(crate) valid: Option<Range<i64>>,
    pub(crate) block: BlockSize,
    /// The block size as a divisor.
    pub(crate) divisor: Divisor,
    pub(crate) mask_bytes: Option<u64>,
    pub(crate) max_bytes: u64,
    pub(crate) max_work: u64,
}

impl Frame {
    /// Local query indices of a row of blocks.
    pub(crate) fn row_tokens(&self, row: u32) -> Range<i64> {
        tokens(row, self.block, &self.queries)
    }

    /// Local key indices of a column of blocks.
    pub(crate) fn column_tokens(&self, column: u32) -> Range<i64> {
        tokens(column, self.block, &self.keys)
    }
}

fn tokens(index: u32, block: BlockSize, positions: &Positions) -> Range<i64> {
    let block = block.get() as i64;
    let start = i64::from(index) * block;
    start..(start + block).min(positions.len() as i64)
}

fn axis(what: &'static str, tokens: usize) -> Result<i64> {
    if tokens as u64 > MAX_POSITION as u64 {
        return Err(Error::TooFar { what, value: tokens as i128 });
    }
    Ok(tokens as i64)
}

/// One past the last position of `tokens` tokens from `offset` on.
fn span(what: &'static str, offset: i64, tokens: i64) -> Result<i64> {
    let end = i128::from(offset) + i128::from(tokens);
    for value in [i128::from(offset), end] {
        if value.unsigned_abs() > MAX_POSITION as u128 {
            return Err(Error::TooFar { what, value });
        }
    }
    Ok(end as i64)
}

fn resolve_positions(
    what: &'static str,
    map: Option<&Positions>,
    inside: Range<i64>,
    tokens: usize,
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

fn blocks(what: &'static str, tokens: usize, block: usize) -> Result<u32> {
    let blocks = tokens.div_ceil(block) as u64;
    // The maximum is reserved, so that one past the last block is a valid index.
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
