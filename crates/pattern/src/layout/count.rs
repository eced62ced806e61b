//! Counts of active blocks and pairs, and FLOPs.

use super::Layout;
use super::contents::{Accumulator, BlockContent, BlockGroup, Contents};
use crate::error::Result;
use crate::meter::Meter;

/// Active blocks and pairs of a layout, counted in closed form per run.
///
/// ```
/// use longspan_pattern::{Layout, Pattern, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(128, 128))?;
/// let counts = layout.counts()?;
/// assert_eq!((counts.full_blocks, counts.partial_blocks, counts.active_pairs), (1, 2, 8_256));
/// assert_eq!(counts.forward_flops(64, 64), 8_256 * 4 * 64);
/// assert_eq!(counts.backward_flops(64, 64), 8_256 * 10 * 64);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks of which every pair is active.
    pub full_blocks: u128,
    /// Blocks of which some pairs are active and some masked.
    pub partial_blocks: u128,
    /// Pairs of query and key that are not masked.
    pub active_pairs: u128,
}

impl Counts {
    /// Blocks with an active pair.
    pub fn active_blocks(&self) -> u128 {
        self.full_blocks + self.partial_blocks
    }

    /// Floating-point operations of a forward pass of one head: two products, `Q Kᵀ` and `P V`.
    pub fn forward_flops(&self, key_dim: u32, value_dim: u32) -> u128 {
        self.active_pairs * 2 * (u128::from(key_dim) + u128::from(value_dim))
    }

    /// Floating-point operations of a backward pass of one head: five products, three over the
    /// key dim (recomputed scores, `dQ`, `dK`) and two over the value dim (`dP`, `dV`).
    pub fn backward_flops(&self, key_dim: u32, value_dim: u32) -> u128 {
        self.active_pairs * 2 * (3 * u128::from(key_dim) + 2 * u128::from(value_dim))
    }
}

pub(super) fn count(layout: &Layout, meter: Meter<'_>) -> Result<Counts> {
    let mut counter = Counter { layout, counts: Counts::default(), window: Counts::default() };
    Contents::new(layout, meter).add_rows("counting", &mut counter)?;
    Ok(counter.counts)
}

struct Counter<'a> {
    layout: &'a Layout,
    counts: Counts,
    window: Counts,
}

impl Counter<'_> {
    /// The counts of one whole block.
    fn block(&self, content: Option<BlockContent>) -> Counts {
        let block = self.layout.block().get() as u128;
        match content {
            None => Counts::default(),
            Some(BlockContent::Full) => {
                Counts { full_blocks: 1, partial_blocks: 0, active_pairs: block * block }
            }
            Some(BlockContent::Mask(pairs, _)) => {
                Counts { full_blocks: 0, partial_blocks: 1, active_pairs: pairs.into() }
            }
        }
    }
}

impl Accumulator for Counter<'_> {
    fn add(&mut self, row: u32, group: BlockGroup, content: BlockContent) {
        let Counter { layout, counts, .. } = self;
        let block = layout.block().get() as u128;
        // Keys missing from the last column.
        let missing = u128::from(layout.columns()) * block - layout.keys() as u128;
        let queries = layout.row_tokens(row).len() as u128;
        let blocks = u128::from(group.count);
        match content {
            BlockContent::Full => {
                let last = group.start + group.count == layout.columns();
                counts.full_blocks += blocks;
                counts.active_pairs += queries * (blocks * block - u128::from(last) * missing);
            }
            BlockContent::Mask(pairs, _) => {
                counts.partial_blocks += blocks;
                counts.active_pairs += blocks * u128::from(pairs);
            }
        }
    }

    fn end_row(&mut self) {}

    fn slide(&mut self, _: u32, enters: Option<BlockContent>, leaves: Option<BlockContent>) {
        let (enters, leaves) = (self.block(enters), self.block(leaves));
        let window = &mut self.window;
        window.full_blocks = window.full_blocks + enters.full_blocks - leaves.full_blocks;
        window.partial_blocks =
            window.partial_blocks + enters.partial_blocks - leaves.partial_blocks;
        window.active_pairs = window.active_pairs + enters.active_pairs - leaves.active_pairs;
    }

    fn add_window(&mut self) {
        self.counts.full_blocks += self.window.full_blocks;
        self.counts.partial_blocks += self.window.partial_blocks;
        self.counts.active_pairs += self.window.active_pairs;
    }
}
