//! A pattern compiled to blocks: rows of runs. Used by `cache` and `set`.
//!
//! For each row of query blocks a [`Layout`] lists the active key blocks as sorted [`Run`]s of Full
//! or Partial blocks. Its size is proportional to the number of runs: `causal` has two per row and
//! a window three or four, at any length. A layout is exact: every stored block has an active
//! pair, and every Partial block a masked one.
//!
//! ```text
//! compile.rs      pattern → runs                 evaluate.rs      coverage per row and block
//! diagonal.rs     Toeplitz patterns              block_ranges.rs  intervals → ranges of blocks
//! blocks.rs       given blocks → runs            key_index.rs     many progressions of keys
//! transpose.rs    columns of runs                pool.rs          which masks are stored
//! active_keys.rs  active keys, per query         masks.rs         masks of Partial blocks
//! count.rs        blocks, pairs, FLOPs           contents.rs      groups of equal blocks
//! digest.rs       content hash                   compare.rs       equality of layouts
//! picture.rs      down-sampled pictures          shade.rs         their colors
//! limits.rs       shares of the memory limit     score_positions.rs  positions of score biases
//! keep.rs         some blocks of a layout        run.rs           adjacent blocks of one kind
//! components.rs   strided terms in orders of residues
//! source.rs       pattern and padding, for other kernels
//! tiles.rs        boolean masks → blocks, and blocks → pattern
//! ```

use std::ops::{ControlFlow, Range};
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};
use crate::meter::{Meter, Progress, ignore_progress};
use crate::pattern::{Pattern, Positioning};
use crate::positions::Positions;
use crate::shape::{BlockSize, Frame, Shape};

mod active_keys;
mod block_ranges;
mod blocks;
mod compare;
mod compile;
mod components;
mod contents;
mod count;
mod diagonal;
mod digest;
mod evaluate;
mod keep;
mod key_index;
mod limits;
mod masks;
mod picture;
mod pool;
mod run;
mod score_positions;
mod shade;
mod source;
mod tiles;
mod transpose;

pub use blocks::{BlockMasks, Blocks};
pub use components::{Component, PositionOrder, Split, TileCounts, TokenSteps};
pub use count::Counts;
pub use digest::LayoutHash;
pub use masks::Masks;
pub use picture::{Cell, Picture};
pub use run::{Run, RunKind};
pub use score_positions::ScorePositions;
pub use shade::Shade;
pub use tiles::Tiles;
pub use transpose::Transpose;

use masks::MaskTable;
use run::{FULL, ON_DEMAND};

/// A pattern compiled for given lengths and a block size.
///
/// ```
/// use longspan_pattern::{Layout, Pattern, RunKind, Shape};
///
/// let pattern: Pattern = "causal & (window(256, 0) | sinks(16))".parse()?;
/// let layout = Layout::compile(&pattern, &Shape::new(8_192, 8_192))?;
/// // Row 100: the sinks, the left edge of the window, its middle, and the diagonal.
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
    /// Source of on-demand masks; `None` if all masks are stored.
    pattern: Option<Arc<Pattern>>,
    /// Whether it has all blocks of the pattern.
    whole: bool,
    positioning: Positioning,
    content: Arc<Content>,
    split: OnceLock<Result<Option<Split>>>,
}

/// The blocks of a layout, which do not depend on where its tokens are; layouts of the same blocks
/// at other positions share them.
struct Content {
    /// The runs of row `r` are `starts[r]..starts[r + 1]`, rows relative to the first compiled one.
    starts: Vec<u32>,
    runs: Vec<Run>,
    /// Shared with layouts that keep some of the blocks.
    table: Arc<MaskTable>,
    coverage_queries: u64,
    work: u64,
    transpose: OnceLock<Result<Transpose>>,
    counts: OnceLock<Result<Counts>>,
    hash: OnceLock<Result<LayoutHash>>,
}

impl Layout {
    fn new(
        frame: Frame,
        pattern: Option<Arc<Pattern>>,
        starts: Vec<u32>,
        runs: Vec<Run>,
        table: impl Into<Arc<MaskTable>>,
        (coverage_queries, work): (u64, u64),
    ) -> Self {
        Layout {
            frame,
            positioning: pattern
                .as_ref()
                .map_or(Positioning::Global, |pattern| pattern.positioning()),
            whole: pattern.is_some(),
            pattern,
            content: Arc::new(Content {
                starts,
                runs,
                table: table.into(),
                coverage_queries,
                work,
                transpose: OnceLock::new(),
                counts: OnceLock::new(),
                hash: OnceLock::new(),
            }),
            split: OnceLock::new(),
        }
    }

    /// Compiles `pattern` for `shape`.
    pub fn compile(pattern: &Pattern, shape: &Shape) -> Result<Self> {
        Self::compile_with(pattern, shape, ignore_progress)
    }

    /// Compiles `pattern` for `shape` and calls `progress` with the completed and the total number
    /// of rows, every few milliseconds of work and at least once. `ControlFlow::Break` ends the
    /// call with [`Error::Stopped`]; the next call restarts it. All long-running calls have a
    /// form `…_with`.
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
        pattern.check()?;
        let frame = shape.clone().block_for([pattern]).resolve()?;
        pattern.fits(frame.tokens_q, frame.query_offset, frame.key_end)?;
        compile::compile(&Arc::new(pattern.clone()), frame, &mut progress)
    }

    /// Number of local queries, including those of rows that were not compiled.
    pub fn queries(&self) -> usize {
        self.frame.queries.len()
    }

    /// Number of local keys.
    pub fn keys(&self) -> usize {
        self.frame.keys.len()
    }

    /// The global position of each query.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// // Four queries after six cached keys.
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

    /// Tokens per block.
    pub fn block(&self) -> BlockSize {
        self.frame.block
    }

    /// The compiled rows of query blocks.
    pub fn rows(&self) -> Range<u32> {
        self.frame.rows.clone()
    }

    /// Number of columns of key blocks.
    pub fn columns(&self) -> u32 {
        self.frame.columns
    }

    /// The runs of key blocks that a row of query blocks attends to, ascending.
    ///
    /// # Panics
    ///
    /// If `row` isn't in [`rows`](Self::rows).
    pub fn row(&self, row: u32) -> &[Run] {
        assert!(self.frame.rows.contains(&row), "row {row} outside {:?}", self.frame.rows);
        let index = (row - self.frame.rows.start) as usize;
        &self.content.runs
            [self.content.starts[index] as usize..self.content.starts[index + 1] as usize]
    }

    /// Number of runs in all rows.
    pub fn run_count(&self) -> usize {
        self.content.runs.len()
    }

    /// Local indices of the queries in a row of blocks.
    pub fn row_tokens(&self, row: u32) -> Range<usize> {
        let tokens = self.frame.row_tokens(row);
        tokens.start as usize..tokens.end as usize
    }

    /// Local indices of the keys in a column of blocks.
    pub fn column_tokens(&self, column: u32) -> Range<usize> {
        let tokens = self.frame.column_tokens(column);
        tokens.start as usize..tokens.end as usize
    }

    /// A reader of the masks of Partial blocks.
    pub fn masks(&self) -> Masks<'_> {
        self.masks_in(Vec::new())
    }

    /// The same, reusing the memory of an earlier reader ([`Masks::into_words`]), so that many
    /// short-lived readers allocate once.
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

    /// Number of stored masks.
    pub fn stored_masks(&self) -> usize {
        self.content.table.len()
    }

    /// A stored mask by its number ([`Run::stored`]), [`BlockSize::words`] words per query.
    ///
    /// # Panics
    ///
    /// If there is no such mask.
    pub fn stored_mask(&self, number: u32) -> &[u64] {
        self.content.table.get(number)
    }

    /// Columns of runs, for the backward pass; computed on first use.
    pub fn transpose(&self) -> Result<&Transpose> {
        self.transpose_with(ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn transpose_with(
        &self,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<&Transpose> {
        self.lazy(&self.content.transpose, progress, |progress| {
            transpose::transpose(self, self.meter(progress))
        })
    }

    /// The layout as components over disjoint pairs, where its pattern has terms that are dense in an
    /// order of residues (`strided`, `dilated`); computed on first use. `None` for other patterns,
    /// for layouts that have not all rows and blocks of their pattern, and where components would
    /// exceed the limits of the shape.
    ///
    /// ```
    /// use longspan_pattern::{Layout, PositionOrder, Pattern, RunKind, Shape};
    ///
    /// let pattern: Pattern = "causal & (window(64, 0) | strided(128))".parse()?;
    /// let layout = Layout::compile(&pattern, &Shape::new(16_384, 16_384))?;
    /// let components = layout.split()?.unwrap().components();
    /// assert_eq!(components[0].order(), PositionOrder::Natural);
    /// assert_eq!(components[1].order(), PositionOrder::Residues { modulus: 128, segment: None });
    /// let layouts = components[1].layouts();
    /// assert_eq!((layouts.len(), layouts[0].queries()), (128, 128));
    /// assert_eq!(layouts[0].row(1)[0].kind(), RunKind::Full);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn split(&self) -> Result<Option<&Split>> {
        self.split_with(ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn split_with(
        &self,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Option<&Split>> {
        Ok(self.lazy(&self.split, progress, |progress| components::split(self, progress))?.as_ref())
    }

    /// Active blocks and pairs; computed on first use.
    pub fn counts(&self) -> Result<&Counts> {
        self.counts_with(ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn counts_with(
        &self,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<&Counts> {
        self.lazy(&self.content.counts, progress, |progress| {
            count::count(self, self.meter(progress))
        })
    }

    /// The value in `cell`, computed on first use. Stopped computations are not stored. Concurrent
    /// threads each compute it: no thread waits for another's hook.
    fn lazy<'a, T>(
        &'a self,
        cell: &'a OnceLock<Result<T>>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
        compute: impl FnOnce(&mut Progress<'_>) -> Result<T>,
    ) -> Result<&'a T> {
        if cell.get().is_none() {
            let result = compute(&mut progress);
            if let Err(Error::Stopped { row, rows }) = result {
                return Err(Error::Stopped { row, rows });
            }
            // Another thread may have stored the same result.
            let _ = cell.set(result);
        }
        cell.get().expect("set above").as_ref().map_err(Clone::clone)
    }

    /// A work budget for one call.
    fn meter<'a>(&self, progress: &'a mut Progress<'a>) -> Meter<'a> {
        Meter::new(self.frame.max_work, self.frame.rows.len() as u64, progress)
    }

    /// The error of a halted meter.
    fn halted(&self, meter: &Meter<'_>, work: &'static str) -> Error {
        meter.error(work, |row| match &self.pattern {
            Some(pattern) => compile::costliest(pattern, &self.frame, row),
            None => "given blocks".into(),
        })
    }

    /// The fraction of active pairs in the compiled rows; 0 if there are no pairs.
    pub fn density(&self) -> Result<f64> {
        let rows = self.frame.rows.clone();
        let queries = if rows.is_empty() {
            0
        } else {
            self.row_tokens(rows.end - 1).end - self.row_tokens(rows.start).start
        };
        let pairs = queries as u128 * self.keys() as u128;
        Ok(if pairs == 0 { 0.0 } else { self.counts()?.active_pairs as f64 / pairs as f64 })
    }

    /// A hash of the active pairs, the same on every machine and for every source of the layout;
    /// computed on first use.
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
        self.hash_with(ignore_progress)
    }

    /// The same with a progress hook: see [`compile_with`](Self::compile_with).
    pub fn hash_with(
        &self,
        progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<LayoutHash> {
        self.lazy(&self.content.hash, progress, |progress| {
            digest::digest(self, self.meter(progress))
        })
        .copied()
    }

    /// Memory of the layout in bytes, including transpose and components once computed.
    pub fn bytes(&self) -> usize {
        let transpose = match self.content.transpose.get() {
            Some(Ok(transpose)) => transpose.bytes(),
            _ => 0,
        };
        let split = match self.split.get() {
            Some(Ok(Some(split))) => split.bytes(),
            _ => 0,
        };
        split
            + self.content.starts.capacity() * size_of::<u32>()
            + self.content.runs.capacity() * size_of::<Run>()
            + self.content.table.bytes()
            + transpose
    }

    /// Coverage queries during compilation: its cost, independent of the machine.
    pub fn coverage_queries(&self) -> u64 {
        self.content.coverage_queries
    }

    /// Units of work of the compilation: see [`Shape::max_work`].
    pub fn work(&self) -> u64 {
        self.content.work
    }
}

impl std::fmt::Debug for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layout")
            .field("queries", &self.queries())
            .field("keys", &self.keys())
            .field("block", &self.block().get())
            .field("rows", &self.rows())
            .field("runs", &self.content.runs.len())
            .field("stored_masks", &self.content.table.len())
            .finish_non_exhaustive()
    }
}
