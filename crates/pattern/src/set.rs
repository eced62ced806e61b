//! Layouts per batch entry and query head. The top layer.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use crate::cache::LayoutCache;
use crate::error::{Error, Result};
use crate::heads::Heads;
use crate::layout::Layout;
use crate::meter::{Progress, ignore_progress};
use crate::pattern::Pattern;
use crate::shape::Shape;

/// One layout per batch entry and query head; equal ones are stored once.
///
/// Covers patterns per head, patterns and padding per batch entry, and content-dependent layouts.
///
/// ```
/// use longspan_pattern::{Heads, LayoutSet, Padding, Shape};
///
/// let heads: Heads = "heads([causal, causal & window(64, 0), causal])".parse()?;
/// // Two batch entries: one without padding, one with 100 padding tokens on the left.
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

/// Which keys of each batch entry are tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Padding {
    /// All keys, for this number of batch entries.
    None(usize),
    /// One range of keys per batch entry.
    Each(Vec<Range<usize>>),
}

/// What distinguishes layouts within one call.
type LayoutKey<'a> = (&'a Pattern, &'a Option<Range<usize>>);

impl LayoutSet {
    /// Compiles the patterns of `heads` query heads for every batch entry, through `cache` if
    /// given.
    pub fn compile(
        patterns: &Heads,
        heads: usize,
        shape: &Shape,
        padding: &Padding,
        cache: Option<&LayoutCache>,
    ) -> Result<Self> {
        Self::compile_with(patterns, heads, shape, padding, cache, ignore_progress)
    }

    /// The same with a progress hook, called with the rows of the current layout: see
    /// [`Layout::compile_with`].
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
                "the shape has key_padding and so has each batch entry, expected only one of them";
            return Err(Error::Set(message.into()));
        }
        if let Some(entries) = patterns.entries()
            && entries != ranges.len()
        {
            return Err(Error::Set(format!(
                "patterns of {entries} batch entries, expected those of {}",
                ranges.len()
            )));
        }
        if let Some(patterns) = patterns.count()
            && patterns != heads
        {
            return Err(Error::HeadCount { patterns, heads });
        }
        let mut of_each = Vec::with_capacity(ranges.len() * heads);
        for entry in 0..ranges.len() {
            for head in 0..heads {
                of_each.push(patterns.entry(entry).get(head, heads)?);
            }
        }
        let shape = &shape.clone().block_for(of_each.iter().copied());
        let mut compiled: Vec<(LayoutKey<'_>, Arc<Layout>)> = Vec::new();
        let mut each = Vec::with_capacity(ranges.len() * heads);
        for (entry, valid) in ranges.iter().enumerate() {
            for head in 0..heads {
                let pattern = of_each[entry * heads + head];
                let known = compiled.iter().find(|(key, _)| *key == (pattern, valid));
                if let Some((_, layout)) = known {
                    each.push(layout.clone());
                    continue;
                }
                let shape = match valid {
                    Some(valid) => shape.clone().key_padding(valid.clone()),
                    None => shape.clone(),
                };
                let layout = match cache {
                    Some(cache) => cache.get_with(pattern, &shape, &mut progress)?,
                    None => Arc::new(Layout::compile_with(pattern, &shape, &mut progress)?),
                };
                compiled.push(((pattern, valid), layout.clone()));
                each.push(layout);
            }
        }
        LayoutSet::new_with(ranges.len(), heads, each, progress)
    }

    /// A set of given layouts, that of `(entry, head)` at `entry · heads + head`. All must have the
    /// same tokens and blocks. Equal ones, of the same pairs at the same positions, are stored once; layouts
    /// whose comparison ([`Layout::same_pairs`]) exceeds its work limit are stored separately.
    pub fn new(
        batch: usize,
        heads: usize,
        layouts: impl IntoIterator<Item = Arc<Layout>>,
    ) -> Result<Self> {
        Self::new_with(batch, heads, layouts, ignore_progress)
    }

    /// The same with a progress hook: see [`Layout::compile_with`].
    pub fn new_with(
        batch: usize,
        heads: usize,
        layouts: impl IntoIterator<Item = Arc<Layout>>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        let mut digests = Vec::new();
        let mut set = LayoutSet { batch, heads, layouts: Vec::new(), choice: Vec::new() };
        for layout in layouts {
            if let Some(first) = set.layouts.first() {
                same_tokens(first, &layout)?;
            }
            let stored = set.layouts.iter().position(|stored| Arc::ptr_eq(stored, &layout));
            let index = match stored {
                Some(index) => index,
                None => set.intern(layout, &mut digests, &mut progress)?,
            };
            set.choice.push(index as u32);
        }
        if set.choice.len() != batch * heads {
            return Err(Error::Set(format!(
                "{} layouts, expected one for each of {batch} batch entries × {heads} heads",
                set.choice.len()
            )));
        }
        Ok(set)
    }

    /// A set of one layout per batch entry, for all of `heads` query heads. Layouts are not compared.
    pub fn per_entry(heads: usize, layouts: Vec<Arc<Layout>>) -> Result<Self> {
        if let Some((first, others)) = layouts.split_first() {
            others.iter().try_for_each(|layout| same_tokens(first, layout))?;
        }
        let batch = layouts.len();
        let choice =
            (0..batch as u32).flat_map(|entry| std::iter::repeat_n(entry, heads)).collect();
        Ok(LayoutSet { batch, heads, layouts, choice })
    }

    /// The same set with another layout in the place of each distinct one.
    pub fn map(&self, new: impl FnMut(&Arc<Layout>) -> Result<Arc<Layout>>) -> Result<Self> {
        let layouts: Vec<_> = self.layouts.iter().map(new).collect::<Result<_>>()?;
        if let Some((first, others)) = layouts.split_first() {
            others.iter().try_for_each(|layout| same_tokens(first, layout))?;
        }
        Ok(LayoutSet { layouts, ..self.clone() })
    }

    /// The index of a layout equal to this one, which is added if there is none. `digests` has the
    /// block digest of each layout.
    fn intern(
        &mut self,
        layout: Arc<Layout>,
        digests: &mut Vec<u64>,
        progress: &mut Progress<'_>,
    ) -> Result<usize> {
        let digest = layout.block_digest(progress)?;
        let alike = |index: &usize| {
            digests[*index] == digest && self.layouts[*index].same_positions(&layout)
        };
        for index in (0..digests.len()).filter(alike) {
            match self.layouts[index].same_masks(&layout, progress) {
                Ok(true) => return Ok(index),
                Ok(false) | Err(Error::TooMuchWork { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        digests.push(digest);
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

    /// Memory of the distinct layouts in bytes.
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
