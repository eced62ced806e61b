//! Load: active pairs of queries and keys, counted without a layout of the whole sequence. Sharding,
//! demand and planning use it.

use longspan::{
    BlockSize, HeadMap, Heads, Hook, Layout, Options, Pattern, Positions, Prediction, Progression,
    Shape,
};
use longspan_pattern::{BlockCoverage, PatternCoverage};

use crate::error::Result;
use crate::sparsity::Sparsity;
use crate::tokens;

/// Pairs of progressions up to which one coverage query each is faster than compiling a layout.
pub(crate) const MAX_COVERAGE_QUERIES: usize = 1 << 12;

/// Pairs of the blocks that work is counted in.
const BLOCK: u128 = 64 * 64;

/// Block rows per compiled layout.
const ROWS_PER_LAYOUT: usize = 1 << 14;

/// Distinct patterns of some heads of `count`, and the number of heads with each.
pub(crate) fn distinct(
    patterns: &Heads,
    heads: impl IntoIterator<Item = usize>,
    count: usize,
) -> Result<Vec<(Pattern, u64)>> {
    let mut distinct: Vec<(Pattern, u64)> = Vec::new();
    for head in heads {
        let pattern = patterns.get(head, count)?;
        match distinct.iter_mut().find(|(known, _)| known == pattern) {
            Some((_, times)) => *times += 1,
            None => distinct.push((pattern.clone(), 1)),
        }
    }
    Ok(distinct)
}

/// Active pairs of some queries with the whole sequence, over `heads` query heads. Of more than `rows`
/// blocks of queries only `rows`, evenly spaced, are counted and extrapolated.
pub(crate) fn active_pairs(
    sparsity: &Sparsity,
    heads: usize,
    tokens: usize,
    queries: &Positions,
    rows: usize,
) -> Result<u128> {
    match sparsity {
        Sparsity::Patterns(patterns) => {
            let mut sum = 0;
            for (pattern, times) in distinct(patterns, 0..heads, heads)? {
                let count = |some: Positions| -> Result<u128> {
                    let shape = Shape::new(tokens, tokens).query_map(some);
                    Ok(Layout::compile(&pattern, &shape)?.counts()?.active_pairs)
                };
                sum += u128::from(times) * sampled(queries, rows, count)?;
            }
            Ok(sum)
        }
        Sparsity::Dilated(dilated) => {
            let keys = Positions::range(0, tokens)?;
            let is_sampled = queries.len().div_ceil(BlockSize::default().get()) > rows;
            // Other offsets have hardly other loads, so a sample has those of two heads.
            let counted = if is_sampled { heads.min(2) } else { heads };
            let chosen: Vec<_> = (0..counted).map(|head| head * heads / counted).collect();
            let map = HeadMap::all(heads, heads).of_heads(&chosen);
            let pairs = sampled(queries, rows, |some| {
                Ok(dilated.work(tokens, &some, &keys, &map, Hook::none())?.pairs)
            })?;
            Ok(pairs * heads as u128 / counted.max(1) as u128)
        }
    }
}

/// Pairs of some queries, given those of fewer: see [`active_pairs`].
fn sampled(
    queries: &Positions,
    rows: usize,
    count: impl Fn(Positions) -> Result<u128>,
) -> Result<u128> {
    let block = BlockSize::default().get();
    let range = |start: usize, len: usize| Progression { start: start as i64, step: 1, len };
    let all = queries.len();
    if all.div_ceil(block) <= rows.max(1) {
        let mut pairs = 0;
        for start in (0..all).step_by(ROWS_PER_LAYOUT * block) {
            let some = range(start, (all - start).min(ROWS_PER_LAYOUT * block));
            pairs += count(tokens::positions_of(queries, &Positions::new([some])?))?;
        }
        return Ok(pairs);
    }
    let rows = rows.max(1) as u128;
    let bands = (0..rows).map(|row| {
        let middle = (2 * row + 1) * all as u128 / (2 * rows);
        // On a multiple of the block, where most rows have equal masks.
        range((middle as usize / block * block).min(all - block), block)
    });
    let sample = Positions::new(bands)?;
    let pairs = count(tokens::positions_of(queries, &sample))?;
    Ok(pairs * all as u128 / sample.len() as u128)
}

/// Work of a kernel call: of one batch entry, summed over query heads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Active pairs of queries and keys.
    pub pairs: u128,
    /// Those in full blocks.
    pub full_pairs: u128,
    /// Partial blocks of 64 × 64.
    pub partial_blocks: u128,
}

impl Work {
    pub(crate) fn add(&mut self, other: Work, times: u64) {
        let times = u128::from(times);
        self.pairs += other.pairs * times;
        self.full_pairs += other.full_pairs * times;
        self.partial_blocks += other.partial_blocks * times;
    }
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Work) {
        self.add(other, 1);
    }
}

/// Work of some queries over some keys of a sequence. Pairs of progressions with empty or full
/// coverage are counted without compiling a layout.
pub(crate) fn work(
    patterns: &mut [(Pattern, PatternCoverage, u64)],
    tokens: usize,
    queries: &Positions,
    keys: &Positions,
) -> Result<Work> {
    let shape = |queries: Positions, keys: Positions| {
        Shape::new(tokens, tokens).query_map(queries).key_map(keys)
    };
    let pieces = queries.progressions().count() * keys.progressions().count();
    let mut sum = Work::default();
    for (pattern, coverage, times) in patterns {
        if pieces > MAX_COVERAGE_QUERIES {
            let shape = shape(queries.clone(), keys.clone());
            sum.add(counted(&Layout::compile(pattern, &shape)?)?, *times);
            continue;
        }
        for band in queries.progressions() {
            for piece in keys.progressions() {
                match coverage.block_coverage(band, piece) {
                    BlockCoverage::Empty => {}
                    BlockCoverage::Full => {
                        let pairs = band.len as u128 * piece.len as u128;
                        sum.add(Work { pairs, full_pairs: pairs, partial_blocks: 0 }, *times);
                    }
                    BlockCoverage::Mixed => {
                        let shape = shape(Positions::new([band])?, Positions::new([piece])?);
                        sum.add(counted(&Layout::compile(pattern, &shape)?)?, *times);
                    }
                }
            }
        }
    }
    Ok(sum)
}

/// Work of a layout, as components where kernels compute those.
fn counted(layout: &Layout) -> Result<Work> {
    let counts = layout.counts()?;
    let pairs = counts.active_pairs;
    let (full, partial) = match layout.split()? {
        Some(split) if Prediction::of::<f32>(layout, &Options::default())?.split => {
            (split.tiles().full_pairs, split.tiles().partial_pairs)
        }
        _ => {
            let block = layout.block().get() as u128;
            (counts.full_blocks * block * block, counts.partial_blocks * block * block)
        }
    };
    Ok(Work { pairs, full_pairs: full.min(pairs), partial_blocks: partial.div_ceil(BLOCK) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_or_sampled() {
        let causal = Sparsity::from(Pattern::causal());
        let all = Positions::range(0, 100_000).unwrap();
        let exact = 100_000 * 100_001 / 2;
        assert_eq!(active_pairs(&causal, 1, 100_000, &all, usize::MAX).unwrap(), exact);
        let sampled = active_pairs(&causal, 1, 100_000, &all, 10).unwrap();
        assert!(sampled.abs_diff(exact) < exact / 100, "{sampled}");
    }

    #[test]
    fn work_is_that_of_the_layout() {
        for text in ["causal", "full", "causal & (window(300, 0) | sinks(9))", "strided(5)"] {
            let pattern: Pattern = text.parse().unwrap();
            let queries = Positions::new([
                Progression { start: 1_000, step: 1, len: 777 },
                Progression { start: 3_000, step: 2, len: 300 },
            ])
            .unwrap();
            let keys = Positions::new([
                Progression { start: 0, step: 1, len: 500 },
                Progression { start: 1_200, step: 1, len: 900 },
            ])
            .unwrap();
            let shape = Shape::new(4_000, 4_000).query_map(queries.clone()).key_map(keys.clone());
            let layout = Layout::compile(&pattern, &shape).unwrap();
            let mut patterns = [(pattern.clone(), PatternCoverage::new(&pattern), 3)];
            let work = work(&mut patterns, 4_000, &queries, &keys).unwrap();
            assert_eq!(work.pairs, 3 * layout.counts().unwrap().active_pairs, "{text}");
            assert!(work.full_pairs <= work.pairs);
        }
    }

    #[test]
    fn strided_work_is_that_of_its_components() {
        let pattern: Pattern = "strided(64)".parse().unwrap();
        let mut patterns = [(pattern.clone(), PatternCoverage::new(&pattern), 1)];
        let all = Positions::range(0, 8_192).unwrap();
        let pairs = 8_192 * 128;
        let work = work(&mut patterns, 8_192, &all, &all).unwrap();
        assert_eq!(work, Work { pairs, full_pairs: pairs, partial_blocks: 0 });
    }

    #[test]
    fn blocks_of_any_size_are_counted_in_those_of_64() {
        let (causal, shape) = (Pattern::causal(), Shape::new(256, 256));
        for block in [64, 128] {
            let block = BlockSize::new(block).unwrap();
            let layout = Layout::compile(&causal, &shape.clone().block(block)).unwrap();
            let blocks = layout.counts().unwrap().partial_blocks;
            let pairs = blocks * (block.get() * block.get()) as u128;
            assert_eq!(counted(&layout).unwrap().partial_blocks * BLOCK, pairs);
        }
    }
}
