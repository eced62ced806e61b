//! What a rank wants of another, from the pattern and the shards alone.
//!
//! For the queries of one rank and the keys of another there are two ways: keys travel to the
//! queries, or queries travel to the keys and their partial softmaxes come back. The second is for
//! few queries that see many keys, a global token above all; its work moves to another rank, so it
//! is taken only where it saves most of the bytes.

use longspan::{BlockSize, Heads, Layout, Pattern, Positions, Progression, Shape};
use longspan_pattern::{Glance, Sight};

use crate::error::Result;
use crate::problem::{Fold, Problem};
use crate::tokens::{self, Tokens, to_bits};
use crate::transport::Poll;

/// Queries travel where they take at most this part of the bytes that they save.
const WORTHWHILE: u64 = 4;

/// Rows of queries are few up to this part of all rows, or up to this many.
const FEW_PART: u64 = 8;
const FEW_ROWS: u64 = 4;

/// Pairs of progressions up to which a glance at each is quicker than one layout.
pub(crate) const FEW_GLANCES: usize = 1 << 12;

/// What a rank wants of another.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Want {
    /// Keys that travel, by their owner's numbers.
    pub(crate) keys: Tokens,
    /// Queries that travel, by their own rank's numbers.
    pub(crate) guests: Tokens,
    /// Where some queries travel, those that see travelling keys.
    pub(crate) stay: Option<Tokens>,
}

/// One pattern that sees whatever a head sees.
pub(crate) fn any_head(heads: &Heads, count: usize) -> Result<Pattern> {
    let mut distinct: Vec<&Pattern> = Vec::new();
    for head in 0..count.max(1) {
        let pattern = heads.get(head, count.max(1))?;
        if !distinct.contains(&pattern) {
            distinct.push(pattern);
        }
    }
    let (first, rest) = distinct.split_first().expect("at least one head");
    Ok(rest.iter().fold((*first).clone(), |all, pattern| all | (*pattern).clone()))
}

impl Want {
    /// What rank `asking` wants of rank `owner`, another one. `sight` is of the same `pattern`.
    pub(crate) fn of(
        problem: &Problem,
        pattern: &Pattern,
        sight: &mut Sight,
        asking: usize,
        owner: usize,
        poll: &mut Poll<'_>,
    ) -> Result<Self> {
        let shards = &problem.shards;
        let glanced = match problem.fold {
            Fold::Overlapped => at_a_glance(sight, shards.rank(asking), shards.rank(owner)),
            Fold::Reproducible => None,
        };
        match glanced {
            Some(keys) => Ok(Want { keys, ..Want::default() }),
            None => look(problem, pattern, asking, owner, poll),
        }
    }
}

/// What a rank wants of another, from the layout of their tokens.
fn look(
    problem: &Problem,
    pattern: &Pattern,
    asking: usize,
    owner: usize,
    poll: &mut Poll<'_>,
) -> Result<Want> {
    let shards = &problem.shards;
    let shape = Shape::new(shards.tokens(), shards.tokens())
        .query_map(shards.rank(asking).clone())
        .key_map(shards.rank(owner).clone());
    let layout = Layout::compile_with(pattern, &shape, |_, _| poll())?;
    if layout.run_count() == 0 {
        return Ok(Want::default());
    }
    let mut seen = layout.keys_seen_with(None, |_, _| poll())?;
    if problem.fold == Fold::Reproducible {
        // Whole tiles, which are words.
        let keys = shards.rank(owner).len();
        let held = to_bits(&Tokens::range(0, keys)?, keys);
        let whole = |(seen, held): (&mut u64, &u64)| *seen = if *seen == 0 { 0 } else { *held };
        seen.iter_mut().zip(&held).for_each(whole);
        return Ok(Want { keys: tokens::of_bits(&seen), ..Want::default() });
    }
    let mut want = Want { keys: tokens::of_bits(&seen), ..Want::default() };
    let Some((heavy, light)) = heavy_queries(&layout, poll)? else { return Ok(want) };
    let rest = tokens::of_bits(&layout.keys_seen_with(Some(&light), |_, _| poll())?);
    let guests = tokens::of_bits(&heavy);
    let saved = (want.keys.len() - rest.len()) * problem.key_bytes() as u64;
    if WORTHWHILE * guests.len() * problem.guest_bytes() as u64 <= saved {
        want = Want { keys: rest, guests, stay: Some(tokens::of_bits(&light)) };
    }
    Ok(want)
}

/// Rows that the few heaviest queries may lie in, of so many.
fn most_heavy(rows: u64) -> u64 {
    (rows / FEW_PART).max(FEW_ROWS)
}

/// The keys that travel, where whole progressions tell: each is seen by all queries of a
/// progression, or by none of any, and too many queries see half of them or more for any to travel.
/// The same as [`Want::of`] finds by looking, for a thousandth of the time.
fn at_a_glance(sight: &mut Sight, queries: &Positions, keys: &Positions) -> Option<Tokens> {
    let block = BlockSize::default().get() as u64;
    let pieces = |positions: &Positions| positions.progressions().count();
    if pieces(queries) * pieces(keys) > FEW_GLANCES {
        return None;
    }
    let mut wanted = Vec::new();
    // Key blocks that any query can see, at most.
    let mut most = 0;
    // Keys that all queries of each progression see.
    let mut by_all = vec![0; pieces(queries)];
    let mut number = 0;
    for piece in keys.progressions() {
        let (mut seen, mut perhaps) = (false, false);
        for (band, by_all) in queries.progressions().zip(&mut by_all) {
            match sight.glance(band, piece) {
                Glance::Nothing => {}
                Glance::Perhaps => perhaps = true,
                Glance::Everything => {
                    seen = true;
                    *by_all += piece.len;
                }
            }
        }
        if seen {
            wanted.push(Progression { start: number as i64, step: 1, len: piece.len });
            most += piece.len / block + 2;
        } else if perhaps {
            return None;
        }
        number += piece.len;
    }
    let wanted = Positions::new(wanted).ok()?;
    if wanted.is_empty() {
        return Some(wanted);
    }
    let most = most.min(keys.len().div_ceil(block));
    let heavy = queries.progressions().zip(by_all).filter(|(_, keys)| 2 * (keys / block) >= most);
    // Whole rows inside a progression.
    let rows: u64 = heavy.map(|(band, _)| (band.len / block).saturating_sub(1)).sum();
    (rows > most_heavy(queries.len().div_ceil(block))).then_some(wanted)
}

/// The few queries that see the most keys, and all others that see any, a bit each; nothing where
/// there is no such difference.
fn heavy_queries(layout: &Layout, poll: &mut Poll<'_>) -> Result<Option<(Vec<u64>, Vec<u64>)>> {
    let blocks = |row| layout.row(row).iter().map(|run| u64::from(run.len)).sum::<u64>();
    let Some(most) = layout.rows().map(blocks).max() else { return Ok(None) };
    let rows = layout.rows().filter(|&row| 2 * blocks(row) >= most).count();
    // Masks of many rows would cost more than they could save.
    if rows as u64 > most_heavy(layout.rows().len() as u64) {
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
    use std::ops::ControlFlow;

    use super::*;
    use crate::shards::Shards;

    /// What is told at a glance is what looking finds, and it is told often enough to matter.
    #[test]
    fn a_glance_sees_what_looking_finds() {
        let mut told = 0;
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
            let mut sight = Sight::new(&pattern);
            for shards in [
                Shards::contiguous(tokens, 8, 1).unwrap(),
                Shards::zigzag(tokens, 8, 64).unwrap(),
                Shards::striped(tokens, 8, 500).unwrap(),
            ] {
                let problem = Problem::new(pattern.clone(), shards.clone());
                for (asking, owner) in (0..8).flat_map(|a| (0..8).map(move |b| (a, b))) {
                    let (queries, keys) = (shards.rank(asking), shards.rank(owner));
                    let Some(glanced) = at_a_glance(&mut sight, queries, keys) else { continue };
                    told += 1;
                    let looked =
                        look(&problem, &pattern, asking, owner, &mut || ControlFlow::Continue(()))
                            .unwrap();
                    let expected = Want { keys: glanced, ..Want::default() };
                    assert_eq!(looked, expected, "{text}: {asking} of {owner}");
                }
            }
        }
        assert!(told > 300, "{told}");
    }
}
