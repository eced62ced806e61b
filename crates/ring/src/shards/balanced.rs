//! Balanced sharding: all ranks have about equal work.
//!
//! ```text
//! weight of a chunk of rows = its active pairs
//! contiguous sharding, if it is balanced
//! else, for zigzag and for 4, 8, 16, … chunks per rank
//!     start from contiguous chunks
//!     while the heaviest rank exceeds the limit
//!         swap a chunk of it with one of the lightest rank: the two whose
//!         difference is nearest to half of the difference of the ranks
//! of the balanced shardings, the one that moves the fewest keys
//! ```
//!
//! Swaps keep the number of chunks per rank, so memory stays balanced too. Everything is
//! deterministic integer arithmetic: every rank computes the same shards by itself.

use std::collections::BTreeSet;
use std::ops::Range;

use longspan::{Pattern, Positions, Progression};
use longspan_pattern::PatternCoverage;

use super::{Shards, check, edge};
use crate::error::Result;
use crate::load::active_pairs;
use crate::sparsity::Sparsity;

/// Upper limit of a rank's load, relative to the mean.
const LIMIT: (u128, u128) = (105, 100);
/// Target of the swaps: tighter, since weights of long sequences are sampled.
const TARGET: (u128, u128) = (103, 100);

/// Chunks per rank that are tried together; the second group if none of the first is balanced.
const CHUNKS: [&[usize]; 2] = [&[4, 8, 16], &[32, 64]];

/// Block rows that are counted for all chunks: exact up to 64 M tokens.
const ROWS: usize = 1 << 20;
/// Offsets of dilated attention that are counted.
const MAX_OFFSETS: u64 = 8;

/// Block rows that are counted per chunk, at least.
const MIN_ROWS: usize = 8;

/// A sharding that may be chosen.
struct Candidate {
    shards: Shards,
    /// The largest load.
    largest: u128,
    /// Keys that ranks receive from others.
    moved: usize,
}

impl Shards {
    /// Several contiguous chunks per rank, such that no rank's load exceeds 1.05 times the mean and few
    /// bytes are moved; contiguous shards where these are balanced. Edges are multiples of `grain`,
    /// and ranks hold the same number of tokens up to one chunk.
    ///
    /// The load is the active pairs of a rank's own queries; queries that are sent to the keys (global
    /// tokens) are computed elsewhere. With too few tokens, or a query that exceeds a rank's share,
    /// shards are as balanced as swaps make them. The result depends on the arguments only.
    ///
    /// ```
    /// use longspan::Pattern;
    /// use longspan_ring::Shards;
    ///
    /// let shards = Shards::balanced(Pattern::causal(), 8_192, 4, 64)?;
    /// let pairs = |rank: usize| -> i64 {
    ///     let held = shards.rank(rank);
    ///     (0..held.len()).map(|token| held.get(token).unwrap() + 1).sum()
    /// };
    /// let mean = 8_192 * 8_193 / 2 / 4;
    /// assert!((0..4).all(|rank| 100 * pairs(rank) <= 105 * mean));
    /// # Ok::<_, longspan_ring::Error>(())
    /// ```
    pub fn balanced(
        sparsity: impl Into<Sparsity>,
        tokens: usize,
        ranks: usize,
        grain: usize,
    ) -> Result<Self> {
        check(ranks, grain)?;
        let sparsity = sparsity.into();
        let mut best: Option<Candidate> = None;
        for (attempt, chunks_per_rank) in CHUNKS.into_iter().enumerate() {
            let fits = |many: &usize| many * ranks <= tokens.div_ceil(grain);
            let finest = match chunks_per_rank.iter().rfind(|many| fits(many)) {
                Some(&many) => many,
                // With fewer tokens than chunks the first group is tried all the same.
                None if attempt == 0 => chunks_per_rank[0],
                None => break,
            };
            let weigher = Weigher::new(&sparsity, tokens, grain, finest * ranks)?;
            let total: u128 = weigher.weights.iter().sum();
            if attempt == 0 {
                let contiguous = Shards::contiguous(tokens, ranks, grain)?;
                let loads = weigher.merged(ranks);
                let largest = loads.iter().copied().max().unwrap_or(0);
                if is_balanced(largest, total, ranks, LIMIT) {
                    return Ok(contiguous);
                }
                let moved = weigher.moved(&contiguous);
                best = Some(Candidate { shards: contiguous, largest, moved });
            }
            let mut consider = |candidate: Candidate| {
                let even = |largest| is_balanced(largest, total, ranks, LIMIT);
                let better = best.as_ref().is_none_or(|best| {
                    match (even(candidate.largest), even(best.largest)) {
                        (true, true) => candidate.moved < best.moved,
                        (false, false) => candidate.largest < best.largest,
                        (candidate, _) => candidate,
                    }
                });
                if better {
                    best = Some(candidate);
                }
            };
            if attempt == 0 {
                let weights = weigher.merged(2 * ranks);
                let load = |rank: usize| weights[rank] + weights[2 * ranks - 1 - rank];
                let largest = (0..ranks).map(load).max().unwrap_or(0);
                let shards = Shards::zigzag(tokens, ranks, grain)?;
                consider(Candidate { moved: weigher.moved(&shards), largest, shards });
            }
            for &many in chunks_per_rank.iter().filter(|&&many| many <= finest) {
                let weights = weigher.merged(many * ranks);
                let lengths = weigher.lengths(many * ranks);
                let assigned = swap_chunks(&weights, &lengths, ranks);
                let load =
                    |chunks: &Vec<usize>| chunks.iter().map(|&chunk| weights[chunk]).sum::<u128>();
                let largest = assigned.iter().map(load).max().unwrap_or(0);
                let of = |rank: usize| assigned[rank].clone();
                let shards = Shards::of_chunks(tokens, ranks, grain, many * ranks, of)?;
                consider(Candidate { moved: weigher.moved(&shards), largest, shards });
            }
            if best.as_ref().is_some_and(|best| is_balanced(best.largest, total, ranks, LIMIT)) {
                break;
            }
        }
        Ok(best.expect("contiguous shards at least").shards)
    }
}

/// Whether the largest load is within a multiple of the mean.
fn is_balanced(largest: u128, total: u128, ranks: usize, limit: (u128, u128)) -> bool {
    largest * ranks as u128 * limit.1 <= total * limit.0
}

/// Loads of chunks, and the keys that they need.
struct Weigher {
    patterns: Vec<Pattern>,
    tokens: usize,
    grain: usize,
    /// Active pairs of each of the smallest chunks.
    weights: Vec<u128>,
}

impl Weigher {
    fn new(sparsity: &Sparsity, tokens: usize, grain: usize, chunks: usize) -> Result<Self> {
        let heads = match sparsity {
            Sparsity::Patterns(patterns) => patterns.count().unwrap_or(1),
            // Further heads have other offsets, but hardly other loads.
            Sparsity::Dilated(dilated) => {
                let rates = dilated.branches().iter().map(|branch| branch.rate());
                rates.max().unwrap_or(1).min(MAX_OFFSETS) as usize
            }
        };
        let mut patterns = Vec::new();
        for head in 0..heads {
            let pattern = sparsity.head_pattern(head, heads)?;
            if !patterns.contains(&pattern) {
                patterns.push(pattern);
            }
        }
        let rows = (ROWS / chunks).max(MIN_ROWS);
        let mut weights = Vec::with_capacity(chunks);
        for chunk in 0..chunks {
            let Range { start, end } = chunk_range(tokens, grain, chunks, chunk);
            let queries = Positions::range(start as i64, end - start)?;
            weights.push(active_pairs(sparsity, heads, tokens, &queries, rows)?);
        }
        Ok(Weigher { patterns, tokens, grain, weights })
    }

    /// Weights of fewer, larger chunks; `chunks` divides the number of the smallest.
    fn merged(&self, chunks: usize) -> Vec<u128> {
        self.weights.chunks(self.weights.len() / chunks).map(|some| some.iter().sum()).collect()
    }

    fn lengths(&self, chunks: usize) -> Vec<usize> {
        let length = |chunk| chunk_range(self.tokens, self.grain, chunks, chunk);
        (0..chunks).map(length).map(|range| range.len()).collect()
    }

    /// Keys that ranks receive from others, at the granularity of chunks.
    fn moved(&self, shards: &Shards) -> usize {
        let mut coverages: Vec<_> = self.patterns.iter().map(PatternCoverage::new).collect();
        let all = Progression { start: 0, step: 1, len: self.tokens };
        let needed = (0..shards.ranks()).map(|rank| {
            let held = shards.rank(rank);
            let mut ranges: Vec<Range<usize>> = Vec::new();
            for piece in held.progressions() {
                ranges.push(piece.start as usize..piece.start as usize + piece.len);
                for coverage in &mut coverages {
                    ranges.extend(coverage.key_ranges(piece, all));
                }
            }
            ranges.sort_unstable_by_key(|range| range.start);
            let (mut covered, mut end) = (0, 0);
            for range in ranges {
                covered += range.end.saturating_sub(range.start.max(end));
                end = end.max(range.end);
            }
            covered - held.len()
        });
        needed.sum()
    }
}

fn chunk_range(tokens: usize, grain: usize, chunks: usize, chunk: usize) -> Range<usize> {
    edge(tokens, grain, chunks, chunk)..edge(tokens, grain, chunks, chunk + 1)
}

/// Assigns chunks to ranks, the same number per rank; returns the ascending chunks of each.
fn swap_chunks(weights: &[u128], lengths: &[usize], ranks: usize) -> Vec<Vec<usize>> {
    let many = weights.len() / ranks;
    let mut assigned: Vec<Vec<usize>> =
        (0..ranks).map(|rank| (rank * many..(rank + 1) * many).collect()).collect();
    let load = |chunks: &[usize]| chunks.iter().map(|&chunk| weights[chunk]).sum::<u128>();
    let held = |chunks: &[usize]| chunks.iter().map(|&chunk| lengths[chunk]).sum::<usize>();
    let total: u128 = weights.iter().sum();
    let tokens = lengths.iter().sum::<usize>() as i128;
    let longest = lengths.iter().copied().max().unwrap_or(0) as i128;
    // At most half a chunk from the mean.
    let fair = |held: i128| 2 * (held * ranks as i128 - tokens).abs() <= longest * ranks as i128;
    let mut by_load: BTreeSet<(u128, usize)> =
        (0..ranks).map(|rank| (load(&assigned[rank]), rank)).collect();

    // Each swap brings two ranks closer; this bound is never reached.
    for _ in 0..16 * weights.len() {
        let (&(most, heavy), &(least, light)) = match (by_load.last(), by_load.first()) {
            (Some(heavy), Some(light)) => (heavy, light),
            _ => break,
        };
        if is_balanced(most, total, ranks, TARGET) {
            break;
        }
        let (held_heavy, held_light) =
            (held(&assigned[heavy]) as i128, held(&assigned[light]) as i128);
        let mut nearest: Option<(u128, usize, usize)> = None;
        for (i, &a) in assigned[heavy].iter().enumerate() {
            for (j, &b) in assigned[light].iter().enumerate() {
                let Some(gain) = weights[a].checked_sub(weights[b]) else { continue };
                let longer = lengths[a] as i128 - lengths[b] as i128;
                let stays = longer == 0 || fair(held_heavy - longer) && fair(held_light + longer);
                if gain == 0 || gain >= most - least || !stays {
                    continue;
                }
                let off = (2 * gain).abs_diff(most - least);
                if nearest.is_none_or(|(best, ..)| off < best) {
                    nearest = Some((off, i, j));
                }
            }
        }
        let Some((_, i, j)) = nearest else { break };
        let (a, b) = (assigned[heavy][i], assigned[light][j]);
        (assigned[heavy][i], assigned[light][j]) = (b, a);
        let gain = weights[a] - weights[b];
        by_load.pop_last();
        by_load.pop_first();
        by_load.insert((most - gain, heavy));
        by_load.insert((least + gain, light));
    }
    assigned.iter_mut().for_each(|chunks| chunks.sort_unstable());
    assigned
}

#[cfg(test)]
mod tests {
    use longspan::Heads;
    use longspan_testing::Random;

    use super::*;

    /// Largest ÷ mean load, counted exactly, and the keys that are moved.
    fn measure(pattern: &Pattern, shards: &Shards) -> (f64, usize) {
        let loads: Vec<_> = (0..shards.ranks())
            .map(|rank| {
                let (tokens, held) = (shards.tokens(), shards.rank(rank));
                active_pairs(&pattern.clone().into(), 1, tokens, held, usize::MAX).unwrap()
            })
            .collect();
        let mean = loads.iter().sum::<u128>() as f64 / loads.len() as f64;
        let largest = loads.into_iter().max().unwrap() as f64;
        let (patterns, tokens) = (vec![pattern.clone()], shards.tokens());
        let weigher = Weigher { patterns, tokens, grain: 1, weights: Vec::new() };
        (if mean > 0.0 { largest / mean } else { 1.0 }, weigher.moved(shards))
    }

    /// Lengths from a hundred to sixty thousand, most of them short.
    fn mixed(tokens: usize) -> Pattern {
        let mut lengths = Vec::new();
        let (mut random, mut left) = (Random::new(1), tokens as u64);
        while left > 0 {
            let length = (100 << random.below(10)) + random.below(100);
            lengths.push(length.min(left));
            left -= length.min(left);
        }
        Pattern::causal() & Pattern::documents(lengths).unwrap()
    }

    #[test]
    fn no_load_exceeds_the_mean_by_over_5_percent() {
        let tokens = 1 << 20;
        let window = || "causal & (window(4095, 0) | sinks(64))".parse::<Pattern>().unwrap();
        for (name, pattern) in
            [("causal", Pattern::causal()), ("documents", mixed(tokens)), ("window", window())]
        {
            for ranks in [8, 13, 64, 256, 1_024] {
                let shards = Shards::balanced(pattern.clone(), tokens, ranks, 16).unwrap();
                let contiguous = Shards::contiguous(tokens, ranks, 16).unwrap();
                let (ratio, moved) = measure(&pattern, &shards);
                let (before, least) = measure(&pattern, &contiguous);
                let pieces = shards.rank(ranks / 2).progressions().count();
                eprintln!(
                    "{name}, {ranks} ranks: {ratio:.3} (contiguous {before:.3}), {:.2} × its keys, \
                     {pieces} pieces",
                    moved as f64 / least as f64
                );
                assert!(ratio <= 1.05, "{name}, {ranks} ranks: {ratio}");
                if name == "window" {
                    assert!(2 * moved <= 3 * least, "{ranks} ranks: {moved} keys, {least}");
                }
                let again = Shards::new((0..ranks).map(|rank| shards.rank(rank).clone()));
                assert_eq!(again.unwrap(), shards);
            }
        }
    }

    #[test]
    fn ranks_hold_equal_tokens_up_to_one_chunk() {
        for (tokens, ranks, grain) in [(100_003, 7, 1), (65_536, 16, 64), (5_000, 12, 16)] {
            let shards = Shards::balanced(mixed(tokens), tokens, ranks, grain).unwrap();
            let held = |rank: usize| shards.rank(rank).len();
            let most = (0..ranks).map(held).max().unwrap();
            let least = (0..ranks).map(held).min().unwrap();
            // Chunks are a quarter of a rank's tokens, or less.
            let chunk = tokens.div_ceil(4 * ranks) + grain;
            assert!(most - least <= chunk, "{tokens} over {ranks}: {least} to {most}");
        }
    }

    #[test]
    fn any_length_and_any_number_of_ranks() {
        for tokens in [0, 1, 2, 63, 64, 65, 1_000] {
            for ranks in [1, 2, 3, 7, 8, 100] {
                for grain in [1, 16, 64] {
                    let shards = Shards::balanced(Pattern::causal(), tokens, ranks, grain).unwrap();
                    assert_eq!((shards.tokens(), shards.ranks()), (tokens, ranks));
                    let again = Shards::new((0..ranks).map(|rank| shards.rank(rank).clone()));
                    assert_eq!(again.unwrap(), shards);
                }
            }
        }
    }

    #[test]
    fn balanced_patterns_keep_contiguous_shards() {
        let window = Pattern::window(100, 0).unwrap();
        let shards = Shards::balanced(window, 1 << 16, 8, 1).unwrap();
        assert_eq!(shards, Shards::contiguous(1 << 16, 8, 1).unwrap());
    }

    #[test]
    fn loads_are_summed_over_heads() {
        let heads: Heads = "heads([causal, !causal])".parse().unwrap();
        let shards = Shards::balanced(heads, 1 << 16, 8, 1).unwrap();
        assert_eq!(shards, Shards::contiguous(1 << 16, 8, 1).unwrap());
        let heads: Heads = "heads([causal, causal & window(9, 0)])".parse().unwrap();
        let shards = Shards::balanced(heads, 1 << 16, 8, 1).unwrap();
        assert!(measure(&Pattern::causal(), &shards).0 < 1.06);
    }
}
