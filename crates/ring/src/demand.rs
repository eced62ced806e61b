//! Demand: which keys a rank needs of another, from sparsity and shards alone. `agreement` and
//! `planner` compute it per pair of ranks.
//!
//! It is counted per key head: the union over its query heads, with dilated attention also over its
//! branches. Key heads with equal demand are a [`Band`]; a key travels once for all of them.
//!
//! For the queries of one rank and the keys of another there are two transfers: keys are sent to the
//! queries, or queries are sent to the keys and their partial softmaxes are returned. The second is
//! for few queries that attend to many keys, above all global tokens. It moves work to another rank,
//! so it is used only where it saves most of the bytes.

use longspan::{BlockSize, Dilated, HeadMap, Hook, Layout, Pattern, Positions, Progression, Shape};
use longspan_pattern::{BlockCoverage, PatternCoverage};

use crate::error::Result;
use crate::load::MAX_COVERAGE_QUERIES;
use crate::problem::{Problem, Reduction};
use crate::sparsity::{Band, Sparsity};
use crate::tokens::{self, Tokens, to_bits};
use crate::transport::Poll;

/// Queries are sent where the bytes that this saves are at least this multiple of their own.
const MIN_SAVING: usize = 4;

/// Upper bounds of the rows of heavy queries: this fraction of all rows, or this many.
const HEAVY_FRACTION: usize = 8;
const HEAVY_ROWS: usize = 4;

/// The demand of one rank for the keys of another, of one band.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Keys that are sent, by index in the owner's shard.
    pub(crate) keys: Tokens,
    /// Queries that are sent instead, by index in the demanding rank's shard.
    pub(crate) remote_queries: Tokens,
    /// The queries that attend to the sent keys, where some queries are remote.
    pub(crate) local_queries: Option<Tokens>,
}

/// Demands of pairs of ranks, band by band.
#[derive(Debug)]
pub(crate) struct Demands<'a> {
    problem: &'a Problem,
    pub(crate) bands: Vec<Band>,
    /// The union over the query heads of each band; none for dilated attention.
    patterns: Vec<Option<(Pattern, PatternCoverage)>>,
}

impl<'a> Demands<'a> {
    pub(crate) fn new(problem: &'a Problem) -> Result<Self> {
        problem.sparsity.check(problem.batch, problem.shards.tokens())?;
        let bands = problem.bands()?;
        let union = |band: &Band| -> Result<Option<(Pattern, PatternCoverage)>> {
            if matches!(problem.sparsity, Sparsity::Dilated(_)) {
                return Ok(None);
            }
            let mut distinct: Vec<Pattern> = Vec::new();
            for &head in &band.heads {
                let pattern = problem.sparsity.head_pattern(head, problem.heads)?;
                if !distinct.contains(&pattern) {
                    distinct.push(pattern);
                }
            }
            let all = distinct.into_iter().reduce(|all, pattern| all | pattern);
            let all = all.unwrap_or(Pattern::full());
            let coverage = PatternCoverage::new(&all);
            Ok(Some((all, coverage)))
        };
        let patterns = bands.iter().map(union).collect::<Result<_>>()?;
        Ok(Demands { problem, bands, patterns })
    }

    /// Demand of `rank` for keys of `owner` of each band; none of a rank for its own.
    pub(crate) fn of(
        &mut self,
        rank: usize,
        owner: usize,
        poll: &mut Poll<'_>,
    ) -> Result<Vec<Demand>> {
        (0..self.bands.len()).map(|band| self.of_band(band, rank, owner, poll)).collect()
    }

    pub(crate) fn of_band(
        &mut self,
        band: usize,
        rank: usize,
        owner: usize,
        poll: &mut Poll<'_>,
    ) -> Result<Demand> {
        if rank == owner {
            return Ok(Demand::default());
        }
        let (problem, shards) = (self.problem, &self.problem.shards);
        let (queries, keys) = (shards.rank(rank), shards.rank(owner));
        if let Sparsity::Dilated(dilated) = &problem.sparsity {
            return from_branches(problem, dilated, &self.bands[band], (queries, keys), poll);
        }
        let (pattern, coverage) = self.patterns[band].as_mut().expect("of every band");
        let covered = match problem.reduction {
            Reduction::Overlapped => from_coverage(coverage, queries, keys),
            Reduction::Reproducible => None,
        };
        match covered {
            Some(keys) => Ok(Demand { keys, ..Demand::default() }),
            None => from_layout(problem, &self.bands[band], pattern, (queries, keys), poll),
        }
    }
}

/// Demand of dilated attention. Key heads of a band need the same keys, so one of them tells. Queries
/// are never sent.
fn from_branches(
    problem: &Problem,
    dilated: &Dilated,
    band: &Band,
    (queries, keys): (&Positions, &Positions),
    poll: &mut Poll<'_>,
) -> Result<Demand> {
    let one = HeadMap::of_key_heads(problem.heads, problem.key_heads, [band.key_heads[0]]);
    let (tokens, mut poll) = (problem.shards.tokens(), |_| poll());
    let mut seen = dilated.keys_seen(tokens, queries, keys, &one, Hook::new(&mut poll))?;
    if problem.reduction == Reduction::Reproducible {
        whole_tiles(&mut seen, keys.len())?;
    }
    Ok(Demand { keys: tokens::of_bits(&seen), ..Demand::default() })
}

/// Sets all bits of a tile of which one is set; a tile is one word.
fn whole_tiles(seen: &mut [u64], keys: usize) -> Result<()> {
    let held = to_bits(&Tokens::range(0, keys)?, keys);
    let whole = |(seen, held): (&mut u64, &u64)| *seen = if *seen == 0 { 0 } else { *held };
    seen.iter_mut().zip(&held).for_each(whole);
    Ok(())
}

/// Demand from the layout of the two shards.
fn from_layout(
    problem: &Problem,
    band: &Band,
    pattern: &Pattern,
    (queries, keys): (&Positions, &Positions),
    poll: &mut Poll<'_>,
) -> Result<Demand> {
    let tokens = problem.shards.tokens();
    let shape = Shape::new(tokens, tokens).query_map(queries.clone()).key_map(keys.clone());
    let layout = Layout::compile_with(pattern, &shape, |_, _| poll())?;
    if layout.run_count() == 0 {
        return Ok(Demand::default());
    }
    let mut seen = layout.keys_seen_with(None, |_, _| poll())?;
    if problem.reduction == Reduction::Reproducible {
        whole_tiles(&mut seen, keys.len())?;
        return Ok(Demand { keys: tokens::of_bits(&seen), ..Demand::default() });
    }
    let mut demand = Demand { keys: tokens::of_bits(&seen), ..Demand::default() };
    let Some((heavy, light)) = heavy_queries(&layout, poll)? else { return Ok(demand) };
    let rest = tokens::of_bits(&layout.keys_seen_with(Some(&light), |_, _| poll())?);
    let remote_queries = tokens::of_bits(&heavy);
    let saved = (demand.keys.len() - rest.len()) * problem.key_bytes(band);
    if MIN_SAVING * remote_queries.len() * problem.remote_query_bytes(band) <= saved {
        demand =
            Demand { keys: rest, remote_queries, local_queries: Some(tokens::of_bits(&light)) };
    }
    Ok(demand)
}

/// Rows of `rows` that heavy queries may lie in, at most.
fn max_heavy_rows(rows: usize) -> usize {
    (rows / HEAVY_FRACTION).max(HEAVY_ROWS)
}

/// The keys to send, where coverage queries of whole progressions decide: each progression of keys is
/// attended to by all queries of a progression or by none, and too many queries attend to half of the
/// keys for any to be sent. Equal to the result of [`from_layout`], in a thousandth of the time.
fn from_coverage(
    coverage: &mut PatternCoverage,
    queries: &Positions,
    keys: &Positions,
) -> Option<Tokens> {
    let block = BlockSize::default().get();
    let pieces = |positions: &Positions| positions.progressions().count();
    if pieces(queries) * pieces(keys) > MAX_COVERAGE_QUERIES {
        return None;
    }
    let mut needed = Vec::new();
    // Upper bound of the key blocks per query.
    let mut most = 0;
    // Keys with full coverage, per progression of queries.
    let mut covered = vec![0; pieces(queries)];
    let mut index = 0;
    for piece in keys.progressions() {
        let (mut full, mut mixed) = (false, false);
        for (band, covered) in queries.progressions().zip(&mut covered) {
            match coverage.block_coverage(band, piece) {
                BlockCoverage::Empty => {}
                BlockCoverage::Mixed => mixed = true,
                BlockCoverage::Full => {
                    full = true;
                    *covered += piece.len;
                }
            }
        }
        if full {
            needed.push(Progression { start: index as i64, step: 1, len: piece.len });
            most += piece.len / block + 2;
        } else if mixed {
            return None;
        }
        index += piece.len;
    }
    let needed = Positions::new(needed).ok()?;
    if needed.is_empty() {
        return Some(needed);
    }
    let most = most.min(keys.len().div_ceil(block));
    let heavy = queries.progressions().zip(covered).filter(|(_, keys)| 2 * (keys / block) >= most);
    // Block rows inside of a progression.
    let rows: usize = heavy.map(|(band, _)| (band.len / block).saturating_sub(1)).sum();
    (rows > max_heavy_rows(queries.len().div_ceil(block))).then_some(needed)
}

/// Bits of the few queries with the most keys, and of all others with any; none where there are no
/// such few.
fn heavy_queries(layout: &Layout, poll: &mut Poll<'_>) -> Result<Option<(Vec<u64>, Vec<u64>)>> {
    let blocks = |row| layout.row(row).iter().map(|run| u64::from(run.len)).sum::<u64>();
    let Some(most) = layout.rows().map(blocks).max() else { return Ok(None) };
    let rows = layout.rows().filter(|&row| 2 * blocks(row) >= most).count();
    // Overlap many rows would cost more than it could save.
    if rows > max_heavy_rows(layout.rows().len()) {
        return Ok(None);
    }
    let counts = layout.keys_by_query_with(|_, _| poll())?;
    let Some(&most) = counts.iter().max() else { return Ok(None) };
    let mut bits = (vec![0_u64; counts.len().div_ceil(64)], vec![0_u64; counts.len().div_ceil(64)]);
    for (query, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let into = if 2 * count >= most { &mut bits.0 } else { &mut bits.1 };
        into[query / 64] |= 1 << (query % 64);
    }
    Ok(Some(bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shards::Shards;
    use crate::sparsity::go_on;

    /// Coverage queries give the demand of the layout, and decide often.
    #[test]
    fn coverage_agrees_with_layout() {
        let mut decided = 0;
        for (text, tokens) in [
            ("causal", 16_000),
            ("full", 9_000),
            ("causal & (window(700, 0) | sinks(30))", 16_000),
            ("window(300, 300) | global_tokens(9)", 16_000),
            ("documents([5000, 3000, 1, 7999])", 16_000),
            ("strided(3000)", 12_000),
            ("dilated(4096, 4, 1)", 12_288),
        ] {
            let pattern: Pattern = text.parse().unwrap();
            let mut coverage = PatternCoverage::new(&pattern);
            for shards in [
                Shards::contiguous(tokens, 8, 1).unwrap(),
                Shards::zigzag(tokens, 8, 64).unwrap(),
                Shards::striped(tokens, 8, 500).unwrap(),
            ] {
                let problem = Problem::new(pattern.clone(), shards.clone());
                let band = &problem.bands().unwrap()[0];
                for (rank, owner) in (0..8).flat_map(|a| (0..8).map(move |b| (a, b))) {
                    let (queries, held) = (shards.rank(rank), shards.rank(owner));
                    let Some(keys) = from_coverage(&mut coverage, queries, held) else { continue };
                    decided += 1;
                    let tokens = (queries, held);
                    let expected =
                        from_layout(&problem, band, &pattern, tokens, &mut go_on).unwrap();
                    let covered = Demand { keys, ..Demand::default() };
                    assert_eq!(covered, expected, "{text}: {rank} of {owner}");
                }
            }
        }
        assert!(decided > 300, "{decided}");
    }
}
