//! What dilated attention needs and computes, without the layouts of its components.

use std::cell::RefCell;

use longspan_pattern::{
    BlockCoverage, Layout, Pattern, PatternCoverage, Positions, Progression, Shape,
};

use super::Dilated;
use crate::components::HeadMap;
use crate::error::Result;
use crate::exec::{Hook, Monitor};

/// Work of some queries over some keys, over all heads of a [`HeadMap`] and one batch entry; with padding
/// it is the mean over them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DilatedWork {
    /// Active pairs; one that several branches have counts as often unless it is once in all.
    pub pairs: u128,
    /// Those in full blocks.
    pub full_pairs: u128,
    /// Blocks of 64 × 64 with masks.
    pub partial_blocks: u128,
}

/// Coverages of patterns that occur.
#[derive(Default)]
struct Coverages(Vec<(Pattern, PatternCoverage)>);

impl Coverages {
    fn of(&mut self, pattern: &Pattern) -> &mut PatternCoverage {
        let known = self.0.iter().position(|(known, _)| known == pattern);
        let index = known.unwrap_or_else(|| {
            self.0.push((pattern.clone(), PatternCoverage::new(pattern)));
            self.0.len() - 1
        });
        &mut self.0[index].1
    }
}

impl Dilated {
    /// Which keys any query of these heads attends to, as the components of the same arguments
    /// would tell, of any batch entry: bit `j % 64` of word `j / 64` is key `j`. Where a pattern covers
    /// queries and keys of a segment or leaves them out as a whole, no layout is compiled.
    pub fn keys_seen(
        &self,
        tokens: usize,
        queries: &Positions,
        keys: &Positions,
        heads: &HeadMap,
        hook: Hook<'_>,
    ) -> Result<Vec<u64>> {
        let (monitor, compiled) = (Monitor::new(hook), RefCell::default());
        let mut seen = vec![0_u64; keys.len().div_ceil(64)];
        let mut coverages = Coverages::default();
        // What earlier branches have is needed all the same.
        let weighted = self.clone().overlap(super::Overlap::Weighted);
        for sequence in &self.sequences_of(tokens, queries, keys)? {
            let (maker, shape) =
                (weighted.maker(sequence, heads, &monitor, &compiled), &sequence.shape);
            maker.each_segment(|pattern, _, (queries, keys), indices| {
                let mut set = |index: usize| {
                    let token = indices.first + index * indices.step;
                    seen[token / 64] |= 1 << (token % 64);
                };
                match coverages.of(pattern).block_coverage(queries, keys) {
                    BlockCoverage::Empty => {}
                    BlockCoverage::Full => (0..indices.count).for_each(set),
                    BlockCoverage::Mixed => {
                        let layout = compile(pattern, shape, queries, keys, &monitor)?;
                        let bits = layout.keys_seen_with(None, |_, _| monitor.flow())?;
                        let is_set = |key: &usize| bits[key / 64] >> (key % 64) & 1 == 1;
                        (0..indices.count).filter(is_set).for_each(&mut set);
                    }
                }
                Ok(())
            })?;
        }
        Ok(seen)
    }

    /// The work of some queries over some keys, counted likewise.
    pub fn work(
        &self,
        tokens: usize,
        queries: &Positions,
        keys: &Positions,
        heads: &HeadMap,
        hook: Hook<'_>,
    ) -> Result<DilatedWork> {
        let (monitor, compiled) = (Monitor::new(hook), RefCell::default());
        let mut sum = DilatedWork::default();
        let mut coverages = Coverages::default();
        for sequence in &self.sequences_of(tokens, queries, keys)? {
            let (maker, shape) =
                (self.maker(sequence, heads, &monitor, &compiled), &sequence.shape);
            maker.each_segment(|pattern, heads, (queries, keys), _| {
                let heads = heads as u128;
                match coverages.of(pattern).block_coverage(queries, keys) {
                    BlockCoverage::Empty => {}
                    BlockCoverage::Full => {
                        let pairs = heads * queries.len as u128 * keys.len as u128;
                        sum.pairs += pairs;
                        sum.full_pairs += pairs;
                    }
                    BlockCoverage::Mixed => {
                        let layout = compile(pattern, shape, queries, keys, &monitor)?;
                        let counts = layout.counts_with(|_, _| monitor.flow())?;
                        let block = layout.block().get() as u128;
                        let full = (counts.full_blocks * block * block).min(counts.active_pairs);
                        sum.pairs += heads * counts.active_pairs;
                        sum.full_pairs += heads * full;
                        sum.partial_blocks += heads * counts.partial_blocks;
                    }
                }
                Ok(())
            })?;
        }
        let entries = self.sequences.batch().unwrap_or(1).max(1) as u128;
        for part in [&mut sum.pairs, &mut sum.full_pairs, &mut sum.partial_blocks] {
            *part = part.div_ceil(entries);
        }
        Ok(sum)
    }
}

fn compile(
    pattern: &Pattern,
    shape: &Shape,
    queries: Progression,
    keys: Progression,
    monitor: &Monitor<'_>,
) -> Result<Layout> {
    let shape =
        shape.clone().query_map(Positions::new([queries])?).key_map(Positions::new([keys])?);
    Ok(Layout::compile_with(pattern, &shape, |_, _| monitor.flow())?)
}
