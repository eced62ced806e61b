//! Layouts by batch entry and query head.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use crate::cache::LayoutCache;
use crate::error::{Error, Result};
use crate::heads::Heads;
use crate::layout::Layout;
use crate::meter::{Progress, go_on};
use crate::pattern::Pattern;
use crate::shape::Shape;

/// Which layout each batch entry and query head has; equal ones are held once.
///
/// Patterns that differ by head, padding that differs by batch entry, and layouts chosen from the
/// content all end here.
///
/// ```
/// use longspan_pattern::{Heads, LayoutSet, Padding, Shape};
///
/// let heads: Heads = "heads([causal, causal & window(64, 0), causal])".parse()?;
/// // Two batch entries: one whole, one with 100 padding tokens on the left.
/// let padding = Padding::Each(vec![0..1_000, 100..1_000]);
/// let set = LayoutSet::compile(&heads, 3, &Shape::new(1_000, 1_000), &padding, None)?;
/// assert_eq!(set.layouts().len(), 4);
/// assert!(std::ptr::eq(set.get(0, 0), set.get(0, 2)));
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LayoutSet {
    batch: usize,
    heads: usize,
    layouts: Vec<Arc<Layout>>,
    /// The layout of `(entry, head)` at `entry · heads + head`.
    choice: Vec<u32>,
}

/// Which key numbers of each batch entry hold tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Padding {
    /// All of them, in each of so many batch entries.
    None(usize),
    /// These, one range a batch entry.
    Each(Vec<Range<u64>>),
}

/// What decides a layout within a set.
type Asked<'a> = (&'a Pattern, &'a Option<Range<u64>>);

impl LayoutSet {
    /// Compiles the patterns of `heads` query heads for every batch entry, through `cache` if
    /// there is one.
    pub fn compile(
        patterns: &Heads,
        heads: usize,
        shape: &Shape,
        padding: &Padding,
        cache: Option<&LayoutCache>,
    ) -> Result<Self> {
        Self::compile_with(patterns, heads, shape, padding, cache, go_on)
    }

    /// The same, with a hook that may end the work; it is called with the rows of the layout at
    /// hand: see [`Layout::compile_with`].
    pub fn compile_with(
        patterns: &Heads,
        heads: usize,
        shape: &Shape,
        padding: &Padding,
        cache: Option<&LayoutCache>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        let ranges = match padding {
            Padding::None(batch) => vec![None; *batch],
            Padding::Each(ranges) => ranges.iter().cloned().map(Some).collect(),
        };
        if shape.is_padded() && matches!(padding, Padding::Each(_)) {
            let message =
                "the shape has valid keys and so has each batch entry, expected one of both";
            return Err(Error::Set(message.into()));
        }
        if let Some(patterns) = patterns.count()
            && patterns != heads
        {
            return Err(Error::HeadCount { patterns, heads });
        }
        let mut made: Vec<(Asked<'_>, Arc<Layout>)> = Vec::new();
        let mut each = Vec::with_capacity(ranges.len() * heads);
        for valid in &ranges {
            for head in 0..heads {
                let pattern = patterns.get(head, heads)?;
                let known = made.iter().find(|(key, _)| *key == (pattern, valid));
                if let Some((_, layout)) = known {
                    each.push(layout.clone());
                    continue;
                }
                let shape = match valid {
                    Some(valid) => shape.clone().valid_keys(valid.clone()),
                    None => shape.clone(),
                };
                let layout = match cache {
                    Some(cache) => cache.get_with(pattern, &shape, &mut progress)?,
                    None => Arc::new(Layout::compile_with(pattern, &shape, &mut progress)?),
                };
                made.push(((pattern, valid), layout.clone()));
                each.push(layout);
            }
        }
        LayoutSet::new_with(ranges.len(), heads, each, progress)
    }

    /// A set of given layouts, that of `(entry, head)` at `entry · heads + head`. All must cover
    /// the same tokens with the same blocks. Layouts that are too much work to compare
    /// ([`Layout::same_pairs`]) are held side by side.
    pub fn new(
        batch: usize,
        heads: usize,
        layouts: impl IntoIterator<Item = Arc<Layout>>,
    ) -> Result<Self> {
        Self::new_with(batch, heads, layouts, go_on)
    }

    /// The same, with a hook that may end the work: see [`Layout::compile_with`].
    pub fn new_with(
        batch: usize,
        heads: usize,
        layouts: impl IntoIterator<Item = Arc<Layout>>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        let mut blocks = Vec::new();
        let mut set = LayoutSet { batch, heads, layouts: Vec::new(), choice: Vec::new() };
        for layout in layouts {
            if let Some(first) = set.layouts.first() {
                same_tokens(first, &layout)?;
            }
            let held = set.layouts.iter().position(|held| Arc::ptr_eq(held, &layout));
            let place = match held {
                Some(place) => place,
                None => set.place(layout, &mut blocks, &mut progress)?,
            };
            set.choice.push(place as u32);
        }
        if set.choice.len() != batch * heads {
            return Err(Error::Set(format!(
                "{} layouts, expected one for each of {batch} batch entries × {heads} heads",
                set.choice.len()
            )));
        }
        Ok(set)
    }

    /// The place of a layout that is equal to this one, which is added where there is none.
    /// `blocks` has the digest of each layout's blocks.
    fn place(
        &mut self,
        layout: Arc<Layout>,
        blocks: &mut Vec<u64>,
        progress: &mut Progress<'_>,
    ) -> Result<usize> {
        let digest = layout.block_digest(progress)?;
        for place in (0..blocks.len()).filter(|&place| blocks[place] == digest) {
            match self.layouts[place].same_masks(&layout, progress) {
                Ok(true) => return Ok(place),
                Ok(false) | Err(Error::TooMuchWork { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        blocks.push(digest);
        self.layouts.push(layout);
        Ok(self.layouts.len() - 1)
    }

    /// Batch entries.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Query heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// The layout of a batch entry and a query head.
    ///
    /// # Panics
    ///
    /// If there is no such entry or head.
    pub fn get(&self, entry: usize, head: usize) -> &Layout {
        &self.layouts[self.index(entry, head)]
    }

    /// Which of the distinct [`layouts`](Self::layouts) a batch entry and a query head have.
    ///
    /// # Panics
    ///
    /// If there is no such entry or head.
    pub fn index(&self, entry: usize, head: usize) -> usize {
        assert!(entry < self.batch && head < self.heads, "no entry {entry}, head {head}");
        self.choice[entry * self.heads + head] as usize
    }

    /// The distinct layouts.
    pub fn layouts(&self) -> &[Arc<Layout>] {
        &self.layouts
    }

    /// Bytes that the distinct layouts hold.
    pub fn bytes(&self) -> usize {
        self.layouts.iter().map(|layout| layout.bytes()).sum()
    }
}

fn same_tokens(a: &Layout, b: &Layout) -> Result<()> {
    let describe = |l: &Layout| (l.queries(), l.keys(), l.block().get(), l.rows());
    let (a, b) = (describe(a), describe(b));
    if a == b {
        return Ok(());
    }
    Err(Error::Set(format!(
        "layouts of (queries, keys, block, rows) {a:?} and {b:?}, expected all the same"
    )))
}
