//! A pattern compiled to blocks: rows of runs.
//!
//! For each row of query blocks a [`Layout`] lists the key blocks that it sees, as sorted
//! [`Run`]s of Full or Partial blocks. Its size follows the number of runs: `causal` has two a
//! row and a window three or four, at any length. After compilation it is exact: no block is
//! stored of which no pair is seen, and no Partial block has every pair seen.
//!
//! ```text
//! compile.rs    pattern → runs           walk.rs    one row: positions → blocks
//! diagonal.rs   where all of a diagonal is alike
//! blocks.rs     foreign blocks → runs    pool.rs    which masks are stored
//! transpose.rs  columns of runs          masks.rs   bits of Partial blocks
//! picture.rs    a view from afar         shade.rs   its colours
//! seen.rs       who sees whom at all     same.rs    whether layouts are equal
//!                                        parts.rs   runs with equal masks, for
//!                                        count.rs   counting and
//!                                        digest.rs  telling layouts apart
//! ```

use std::ops::{ControlFlow, Range};
use std::sync::OnceLock;

use crate::error::{Error, Result};
use crate::meter::{Meter, Progress, go_on};
use crate::pattern::Pattern;
use crate::positions::Positions;
use crate::shape::{BlockSize, Frame, Shape};

mod blocks;
mod compile;
mod count;
mod diagonal;
mod digest;
mod masks;
mod parts;
mod picture;
mod pool;
mod same;
mod seen;
mod shade;
mod transpose;
mod walk;

pub use blocks::{BlockMasks, Blocks};
pub use count::Counts;
pub use digest::LayoutHash;
pub use masks::Masks;
pub use picture::{Cell, Picture};
pub use shade::Shade;
pub use transpose::Transpose;

use masks::MaskTable;

/// In place of a mask's number: no mask, every pair is seen.
const FULL: u32 = u32::MAX;
/// In place of a mask's number: the mask is made when it is read.
const ON_DEMAND: u32 = u32::MAX - 1;

/// A run of neighbouring blocks of one kind. In a row its blocks are key blocks, in a column
/// ([`Transpose`]) they are query blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Run {
    /// The first block.
    pub start: u32,
    /// How many blocks; never 0.
    pub len: u32,
    mask: u32,
}

/// Whether the blocks of a run need a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunKind {
    /// Every pair of every block is seen.
    Full,
    /// In every block some pair is seen and some pair isn't: read its mask.
    Partial,
}

impl Run {
    /// One past the last block.
    pub fn end(&self) -> u32 {
        self.start + self.len
    }

    /// Full or Partial.
    pub fn kind(&self) -> RunKind {
        if self.mask == FULL { RunKind::Full } else { RunKind::Partial }
    }

    /// The number of the one stored mask that all blocks of the run share
    /// ([`Layout::stored_mask`]), if there is one.
    pub fn stored(&self) -> Option<u32> {
        (self.mask < ON_DEMAND).then_some(self.mask)
    }
}

/// A pattern compiled for given lengths and a block size.
///
/// ```
/// use longspan_pattern::{Layout, Pattern, RunKind, Shape};
///
/// let pattern: Pattern = "causal & (window(256, 0) | sinks(16))".parse()?;
/// let layout = Layout::compile(&pattern, &Shape::new(8_192, 8_192))?;
/// // Row 100 sees the sinks, the left edge of its window, its middle, and the diagonal.
/// let row: Vec<_> = layout.row(100).iter().map(|run| (run.start, run.len, run.kind())).collect();
/// assert_eq!(row, [
///     (0, 1, RunKind::Partial),
///     (96, 1, RunKind::Partial),
///     (97, 3, RunKind::Full),
///     (100, 1, RunKind::Partial),
/// ]);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
pub struct Layout {
    frame: Frame,
    /// What masks on demand are made from; nothing where all of them are stored.
    pattern: Option<Pattern>,
    /// The runs of row `r` are those from `starts[r]` to `starts[r + 1]`, rows counted from the
    /// first compiled one.
    starts: Vec<u32>,
    runs: Vec<Run>,
    table: MaskTable,
    questions: u64,
    work: u64,
    transpose: OnceLock<Result<Transpose>>,
    counts: OnceLock<Result<Counts>>,
    hash: OnceLock<Result<LayoutHash>>,
}

impl Layout {
    fn new(
        frame: Frame,
        pattern: Option<Pattern>,
        starts: Vec<u32>,
        runs: Vec<Run>,
        table: MaskTable,
        (questions, work): (u64, u64),
    ) -> Self {
        Layout {
            frame,
            pattern,
            starts,
            runs,
            table,
            questions,
            work,
            transpose: OnceLock::new(),
            counts: OnceLock::new(),
            hash: OnceLock::new(),
        }
    }

    /// Compiles `pattern` for `shape`.
    pub fn compile(pattern: &Pattern, shape: &Shape) -> Result<Self> {
        compile::compile(pattern, shape, &mut go_on)
    }

    /// Compiles `pattern` for `shape` and calls `progress` with the rows done and the rows in all,
    /// every few milliseconds of work and at least once; it may end the work
    /// ([`Error::Stopped`]). Every other call that takes a while has a form
    /// `…_with`, too, and what a hook has ended starts again in the next call.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// use longspan_pattern::{Error, Layout, Pattern, Shape};
    ///
    /// let shape = Shape::new(1 << 20, 1 << 20);
    /// let stopped = Layout::compile_with(&Pattern::causal(), &shape, |_, _| ControlFlow::Break(()));
    /// assert_eq!(stopped.unwrap_err(), Error::Stopped { row: 0, rows: 1 << 14 });
    /// ```
    pub fn compile_with(
        pattern: &Pattern,
        shape: &Shape,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        compile::compile(pattern, shape, &mut progress)
    }

    /// Queries at hand, also those of rows that weren't compiled.
    pub fn queries(&self) -> u64 {
        self.frame.queries.len()
    }

    /// Keys at hand.
    pub fn keys(&self) -> u64 {
        self.frame.keys.len()
    }

    /// The global position of each query.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// // Four queries that follow six keys already in a cache.
    /// let layout = Layout::compile(&Pattern::causal(), &Shape::new(4, 10))?;
    /// assert_eq!(layout.query_positions().get(0), Some(6));
    /// assert_eq!(layout.key_positions().get(0), Some(0));
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn query_positions(&self) -> &Positions {
        &self.frame.queries
    }

    /// The global position of each key.
    pub fn key_positions(&self) -> &Positions {
        &self.frame.keys
    }

    /// Tokens a block.
    pub fn block(&self) -> BlockSize {
        self.frame.block
    }

    /// The rows of query blocks that were compiled.
    pub fn rows(&self) -> Range<u32> {
        self.frame.rows.clone()
    }

    /// How many columns of key blocks there are.
    pub fn columns(&self) -> u32 {
        self.frame.columns
    }

    /// The runs of key blocks that a row of query blocks sees, ascending.
    ///
    /// # Panics
    ///
    /// If `row` isn't in [`rows`](Self::rows).
    pub fn row(&self, row: u32) -> &[Run] {
        assert!(self.frame.rows.contains(&row), "row {row} outside {:?}", self.frame.rows);
        let index = (row - self.frame.rows.start) as usize;
        &self.runs[self.starts[index] as usize..self.starts[index + 1] as usize]
    }

    /// How many runs all rows have.
    pub fn run_count(&self) -> usize {
        self.runs.len()
    }

    /// The local numbers of the queries in a row of blocks.
    pub fn row_tokens(&self, row: u32) -> Range<u64> {
        let tokens = self.frame.row_tokens(row);
        tokens.start as u64..tokens.end as u64
    }

    /// The local numbers of the keys in a column of blocks.
    pub fn column_tokens(&self, column: u32) -> Range<u64> {
        let tokens = self.frame.column_tokens(column);
        tokens.start as u64..tokens.end as u64
    }

    /// A reader of the masks of Partial blocks.
    pub fn masks(&self) -> Masks<'_> {
        self.masks_in(Vec::new())
    }

    /// The same, in memory that an earlier reader has given back ([`Masks::into_words`]): many
    /// short-lived readers then allocate once.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let layout = Layout::compile(&Pattern::causal(), &Shape::new(128, 128))?;
    /// let mut words = Vec::new();
    /// for row in layout.rows() {
    ///     let run = *layout.row(row).last().unwrap();
    ///     let mut masks = layout.masks_in(words);
    ///     assert_eq!(masks.get(row, run.start, &run)[0], 1);
    ///     words = masks.into_words();
    /// }
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn masks_in(&self, words: Vec<u64>) -> Masks<'_> {
        Masks::new(self, words)
    }

    /// How many masks are stored.
    pub fn stored_masks(&self) -> usize {
        self.table.len()
    }

    /// A stored mask by its number ([`Run::stored`]), [`BlockSize::words`] words a query.
    ///
    /// # Panics
    ///
    /// If there is no such mask.
    pub fn stored_mask(&self, number: u32) -> &[u64] {
        self.table.get(number)
    }

    /// Columns of runs, for the backward pass; made when first asked for.
    pub fn transpose(&self) -> Result<&Transpose> {
        self.transpose_with(go_on)
    }

    /// The same, with a hook that may end the work: see [`compile_with`](Self::compile_with).
    pub fn transpose_with(
        &self,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<&Transpose> {
        self.lazy(&self.transpose, progress, transpose::transpose)
    }

    /// How many blocks and pairs are active; counted when first asked for.
    pub fn counts(&self) -> Result<&Counts> {
        self.counts_with(go_on)
    }

    /// The same, with a hook that may end the work: see [`compile_with`](Self::compile_with).
    pub fn counts_with(
        &self,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<&Counts> {
        self.lazy(&self.counts, progress, count::count)
    }

    /// What `held` holds, made where nothing is there yet. What a hook has stopped isn't held.
    /// Threads that come at the same time each make it: none of them waits for another's hook.
    fn lazy<'a, T>(
        &'a self,
        held: &'a OnceLock<Result<T>>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
        make: fn(&Layout, Meter<'_>) -> Result<T>,
    ) -> Result<&'a T> {
        if held.get().is_none() {
            let made = make(self, self.meter(&mut progress));
            if let Err(Error::Stopped { row, rows }) = made {
                return Err(Error::Stopped { row, rows });
            }
            // Another thread may have been faster: its result is the same.
            let _ = held.set(made);
        }
        held.get().expect("set above").as_ref().map_err(Clone::clone)
    }

    /// A meter for one call on the layout.
    fn meter<'a>(&self, progress: &'a mut Progress<'a>) -> Meter<'a> {
        Meter::new(self.frame.max_work, self.frame.rows.len() as u64, progress)
    }

    /// The error of a halted meter.
    fn halted(&self, meter: &Meter<'_>, work: &'static str) -> Error {
        meter.error(work, |row| match &self.pattern {
            Some(pattern) => compile::costliest(pattern, &self.frame, row),
            None => "blocks chosen elsewhere".into(),
        })
    }

    /// The share of all pairs (of the compiled rows) that is seen; 0 where there are none.
    pub fn density(&self) -> Result<f64> {
        let rows = self.frame.rows.clone();
        let queries = if rows.is_empty() {
            0
        } else {
            self.row_tokens(rows.end - 1).end - self.row_tokens(rows.start).start
        };
        let pairs = u128::from(queries) * u128::from(self.keys());
        Ok(if pairs == 0 { 0.0 } else { self.counts()?.active_pairs as f64 / pairs as f64 })
    }

    /// A hash of what the layout lets through, the same on every machine and however the layout
    /// was made; worked out when first asked for.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let shape = Shape::new(8_192, 8_192);
    /// let causal = Layout::compile(&Pattern::causal(), &shape)?;
    /// let window = Layout::compile(&Pattern::window(8_191, 0)?, &shape)?;
    /// assert_eq!(causal.hash()?, window.hash()?);
    /// assert_eq!(causal.hash()?.to_string(), "d3afb5a4066797f1b057e50adbae9f79");
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn hash(&self) -> Result<LayoutHash> {
        self.hash_with(go_on)
    }

    /// The same, with a hook that may end the work: see [`compile_with`](Self::compile_with).
    pub fn hash_with(
        &self,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<LayoutHash> {
        self.lazy(&self.hash, progress, digest::digest).copied()
    }

    /// Bytes that the layout holds at present, the transpose included once it is made.
    pub fn bytes(&self) -> usize {
        let transpose = match self.transpose.get() {
            Some(Ok(transpose)) => transpose.bytes(),
            _ => 0,
        };
        self.starts.capacity() * size_of::<u32>()
            + self.runs.capacity() * size_of::<Run>()
            + self.table.bytes()
            + transpose
    }

    /// Questions that primitives answered while it was compiled: what compilation cost, whatever
    /// the machine.
    pub fn questions(&self) -> u64 {
        self.questions
    }

    /// Units of work that compilation took: see [`Shape::max_work`].
    pub fn work(&self) -> u64 {
        self.work
    }
}

impl std::fmt::Debug for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layout")
            .field("queries", &self.queries())
            .field("keys", &self.keys())
            .field("block", &self.block().get())
            .field("rows", &self.rows())
            .field("runs", &self.runs.len())
            .field("stored_masks", &self.table.len())
            .finish_non_exhaustive()
    }
}

/// Threads share layouts and patterns.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Layout>();
    shared::<Pattern>();
    shared::<crate::LayoutSet>();
    shared::<crate::LayoutCache>();
};
