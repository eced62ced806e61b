//! Key blocks that were chosen elsewhere.

use longspan_pattern::{Heads, LayoutSet, Padding, Shape};

use super::{Measured, Selection, Selector, check_options, density, keep, with_layouts};
use crate::arguments::Inputs;
use crate::check;
use crate::driver::masses::Chosen;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor};
use crate::options::Options;
use crate::tensor::View;

/// Key blocks that were chosen elsewhere, as counts and indices per row of query blocks: the form of
/// FlexAttention's `kv_num_blocks` and `kv_indices`, and of FlashInfer's block-sparse rows.
///
/// Edges inside blocks are those of the base pattern; listed blocks that it does not have are ignored.
///
/// ```
/// use longspan::{Dims, ListedBlocks, Order, Pattern, Selector, Tensor};
///
/// let dims = Dims { batch: 1, tokens: 192, heads: 2, dim: 8 };
/// let x = Tensor::filled(1.0_f32, dims, Order::Bhsd)?;
/// // Three rows of blocks, the same for both heads.
/// let listed = ListedBlocks::new(Pattern::causal(), (1, 1), vec![1, 2, 2], vec![0, 1, 0, 2, 0]);
/// let selection = listed.select(x.view(), x.view())?;
/// assert_eq!(selection.density(), 5.0 / 6.0);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ListedBlocks {
    base: Heads,
    /// Batch entries and heads that have lists of their own.
    lists: (usize, usize),
    counts: Vec<usize>,
    indices: Vec<u32>,
    options: Options,
}

impl ListedBlocks {
    /// `counts` has one number per batch entry, head and row of query blocks, `indices` as many key
    /// blocks one after the other, in any order within a row. `lists` are the batch entries and the
    /// heads that have lists of their own: all, or 1 where one list is for all.
    pub fn new(
        base: impl Into<Heads>,
        lists: (usize, usize),
        counts: Vec<usize>,
        indices: Vec<u32>,
    ) -> Self {
        let base = base.into();
        ListedBlocks { base, lists, counts, indices, options: Options::default() }
    }

    /// The same with room for `width` indices per row, of which the first of each row count:
    /// FlexAttention's `kv_indices`.
    pub fn padded(
        base: impl Into<Heads>,
        lists: (usize, usize),
        counts: Vec<usize>,
        indices: &[u32],
        width: usize,
    ) -> Result<Self> {
        let rows = counts.len();
        if rows.checked_mul(width) != Some(indices.len()) {
            let (what, len) = ("the list of block indices", indices.len());
            return Err(Error::Length { what, len, expected: rows.saturating_mul(width) });
        }
        if let Some(&count) = counts.iter().find(|&&count| count > width) {
            let (what, rule) = ("a count of key blocks", "at most the width of the lists");
            return Err(Error::Number { what, value: count as f32, rule });
        }
        let each = counts.iter().enumerate();
        let used = each.flat_map(|(row, &count)| &indices[row * width..row * width + count]);
        let used = used.copied().collect();
        Ok(ListedBlocks::new(base, lists, counts, used))
    }

    /// Scale, threads and instruction set with which kept mass is measured. Score additions and
    /// dropout are refused.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// The lists of each batch entry and head, ascending.
    fn chosen(&self, rows: usize, columns: u32) -> Result<Vec<Chosen>> {
        let (entries, heads) = self.lists;
        let expected = entries * heads * rows;
        if self.counts.len() != expected {
            let (what, len) = ("the list of counts per row of blocks", self.counts.len());
            return Err(Error::Length { what, len, expected });
        }
        let expected = self.counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
        let expected = expected.unwrap_or(usize::MAX);
        if self.indices.len() != expected {
            let (what, len) = ("the list of block indices", self.indices.len());
            return Err(Error::Length { what, len, expected });
        }
        if let Some(&index) = self.indices.iter().find(|&&index| index >= columns) {
            let (what, rule) = ("a block index", "less than the number of key blocks");
            return Err(Error::Number { what, value: index as f32, rule });
        }
        let mut first = 0;
        let mut lists = Vec::with_capacity(entries * heads);
        for counts in self.counts.chunks(rows.max(1)) {
            let mut chosen = Chosen::default();
            for &count in counts {
                let mut row = self.indices[first..first + count].to_vec();
                first += count;
                row.sort_unstable();
                if row.windows(2).any(|pair| pair[0] == pair[1]) {
                    let why = "a row lists a block once";
                    return Err(Error::Unexpected { what: "a block that is listed twice", why });
                }
                chosen.push(&row);
            }
            lists.push(chosen);
        }
        lists.resize_with(entries * heads, Chosen::default);
        Ok(lists)
    }
}

impl Selector for ListedBlocks {
    fn select_with<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        shape: &Shape,
        padding: &Padding,
        hook: Hook<'_>,
    ) -> Result<Selection> {
        check_options(&self.options)?;
        let sizes = check::tensors(&self.options, &Inputs::new(q, k, k))?;
        for (what, own, all) in [
            ("the batch entries of listed blocks", self.lists.0, sizes.batch),
            ("the heads of listed blocks", self.lists.1, sizes.heads),
        ] {
            if own != 1 && own != all {
                return Err(Error::Length { what, len: own, expected: all });
            }
        }
        let monitor = Monitor::new(hook);
        let flow = |_, _| monitor.flow();
        let base = LayoutSet::compile_with(&self.base, sizes.heads, shape, padding, None, flow)?;
        let layouts = match base.layouts().first() {
            None => base.clone(),
            Some(layout) => {
                let chosen = self.chosen(layout.rows().len(), layout.columns())?;
                let one_of = |entry: usize, head: usize| {
                    let (entries, heads) = self.lists;
                    &chosen[entry % entries * heads + head % heads]
                };
                let pairs = (0..sizes.batch).flat_map(|e| (0..sizes.heads).map(move |h| (e, h)));
                let listed = pairs.map(|(entry, head)| one_of(entry, head));
                with_layouts(&base, &keep(&base, listed, 0, sizes.heads)?, 0, sizes.heads)?
            }
        };
        let density = density(&layouts, &base);
        let measured =
            Measured { base: self.base.clone(), shape: shape.clone(), padding: padding.clone() };
        Ok(Selection { layouts, density, measured, options: self.options.clone() })
    }
}
