//! Masks of Partial blocks, stored or computed on demand.
//!
//! A mask is one row of 64-bit words per query of the block, in order; bit `j` of word `w` is
//! key `64 w + j` of the block. Rows and bits past the last token are 0. On a little-endian
//! machine the same bytes are rows of 32-bit words, as GPU kernels read them.

use rustc_hash::FxHashMap;

use super::evaluate::Evaluator;
use super::{Layout, Run, RunKind};
use crate::meter::Meter;

/// Distinct masks, contiguous.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MaskTable {
    /// Words per mask.
    size: usize,
    words: Vec<u64>,
}

impl MaskTable {
    pub(crate) fn new(size: usize) -> Self {
        MaskTable { size, words: Vec::new() }
    }

    pub(crate) fn get(&self, id: u32) -> &[u64] {
        &self.words[id as usize * self.size..][..self.size]
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len() / self.size
    }

    pub(crate) fn push(&mut self, words: &[u64]) -> u32 {
        debug_assert_eq!(words.len(), self.size);
        self.words.extend_from_slice(words);
        self.len() as u32 - 1
    }

    /// All masks, contiguous.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    pub(crate) fn bytes(&self) -> usize {
        self.words.capacity() * 8
    }

    /// Bytes of one mask.
    pub(crate) fn mask_bytes(&self) -> usize {
        self.size * 8
    }

    /// Releases spare capacity.
    pub(crate) fn shrink(&mut self) {
        self.words.shrink_to_fit();
    }
}

pub(crate) fn ones(words: &[u64]) -> u32 {
    words.iter().map(|word| word.count_ones()).sum()
}

/// Deduplicates masks.
#[derive(Default)]
pub(crate) struct Interner {
    /// Masks by hash.
    by_hash: FxHashMap<u64, Vec<u32>>,
}

impl Interner {
    pub(crate) fn intern(&mut self, table: &mut MaskTable, words: &[u64]) -> u32 {
        let hash = rustc_hash::FxBuildHasher;
        let hash = std::hash::BuildHasher::hash_one(&hash, words);
        let same = self.by_hash.entry(hash).or_default();
        match same.iter().find(|&&id| table.get(id) == words) {
            Some(&id) => id,
            None => {
                same.push(table.push(words));
                same[same.len() - 1]
            }
        }
    }
}

/// Reads the masks of a layout's Partial blocks. Owns scratch memory; use one per thread.
///
/// ```
/// use longspan_pattern::{Layout, Pattern, RunKind, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(128, 128))?;
/// let mut masks = layout.masks();
/// let diagonal = layout.row(1)[1];
/// assert_eq!(diagonal.kind(), RunKind::Partial);
/// assert_eq!(masks.get(1, diagonal.start, &diagonal)[0..2], [0b1, 0b11]);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
pub struct Masks<'a> {
    layout: &'a Layout,
    evaluator: Option<Evaluator<'a>>,
    words: Vec<u64>,
}

impl<'a> Masks<'a> {
    pub(crate) fn new(layout: &'a Layout, words: Vec<u64>) -> Self {
        Masks { layout, evaluator: None, words }
    }

    /// The scratch memory, for [`Layout::masks_in`].
    pub fn into_words(self) -> Vec<u64> {
        self.words
    }

    /// The mask of the block in row `row` and column `column`, which `run` covers: a run of
    /// [`Layout::row`] or of [`Transpose::column`](super::Transpose::column). A Full block has every
    /// bit of its tokens set.
    ///
    /// # Panics
    ///
    /// If the block lies outside the layout.
    pub fn get(&mut self, row: u32, column: u32, run: &Run) -> &[u64] {
        self.get_with(row, column, run, &mut Meter::unlimited())
    }

    /// The same, charged to `meter`.
    pub(crate) fn get_with(
        &mut self,
        row: u32,
        column: u32,
        run: &Run,
        meter: &mut Meter<'_>,
    ) -> &[u64] {
        let frame = &self.layout.frame;
        assert!(self.layout.rows().contains(&row) && column < frame.columns, "block outside");
        if let Some(id) = run.stored() {
            return self.layout.content.table.get(id);
        }
        let per_row = frame.block.words();
        self.words.resize(per_row * frame.block.get(), 0);
        if run.kind() == RunKind::Full {
            let rows = frame.row_tokens(row);
            let keys = frame.column_tokens(column);
            let keys = (keys.end - keys.start) as usize;
            self.words.fill(0);
            for row in self.words.chunks_exact_mut(per_row).take((rows.end - rows.start) as usize) {
                for (word, bits) in row.iter_mut().enumerate() {
                    *bits = match keys.saturating_sub(word * 64) {
                        0 => 0,
                        left => u64::MAX >> (64 - left.min(64)),
                    };
                }
            }
        } else {
            let evaluator = match &mut self.evaluator {
                Some(evaluator) => evaluator,
                None => {
                    let pattern = self.layout.pattern.as_ref().expect("imported masks are stored");
                    self.evaluator.insert(Evaluator::new(pattern, frame))
                }
            };
            evaluator.mask(row, column, meter, &mut self.words);
        }
        &self.words
    }
}
