//! The masks of Partial blocks, stored or made on demand, read alike.
//!
//! A mask is one row of bit-words for each query of the block, in order; bit `j` of word `w` is
//! key `64 w + j` of the block. Rows and bits past the last token are 0. On a little-endian
//! machine the same bytes are rows of 32-bit words, which is what a GPU reads.

use rustc_hash::FxHashMap;

use super::walk::Walker;
use super::{Layout, Run, RunKind};
use crate::meter::Meter;

/// Distinct masks, one after the other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MaskTable {
    /// Words a mask.
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

    pub(crate) fn bytes(&self) -> usize {
        self.words.capacity() * 8
    }

    /// Bytes of one mask.
    pub(crate) fn mask_bytes(&self) -> usize {
        self.size * 8
    }

    /// The same masks without the spare room.
    pub(crate) fn shrink(&mut self) {
        self.words.shrink_to_fit();
    }
}

pub(crate) fn ones(words: &[u64]) -> u32 {
    words.iter().map(|word| word.count_ones()).sum()
}

/// Gives equal masks the same number.
#[derive(Default)]
pub(crate) struct Interner {
    /// By hash, the masks that have it.
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

/// Reads the masks of a layout's Partial blocks. Each thread has its own: it holds the scratch
/// that masks are made in.
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
    maker: Option<Walker<'a>>,
    words: Vec<u64>,
}

impl<'a> Masks<'a> {
    pub(crate) fn new(layout: &'a Layout, words: Vec<u64>) -> Self {
        Masks { layout, maker: None, words }
    }

    /// The memory that masks were made in, for [`Layout::masks_in`].
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

    /// The same, with its work counted.
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
            return self.layout.table.get(id);
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
            let maker = match &mut self.maker {
                Some(maker) => maker,
                None => {
                    let pattern = self.layout.pattern.as_ref().expect("foreign masks are stored");
                    self.maker.insert(Walker::new(pattern, frame))
                }
            };
            maker.mask(row, column, meter, &mut self.words);
        }
        &self.words
    }
}
