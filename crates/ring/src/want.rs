//! What a rank wants of another, from the pattern and the shards alone.
//!
//! For the queries of one rank and the keys of another there are two ways: keys travel to the
//! queries, or queries travel to the keys and their partial softmaxes come back. The second is for
//! few queries that see many keys, a global token above all; its work moves to another rank, so it
//! is taken only where it saves most of the bytes.

use longspan::{Heads, Layout, Pattern, Shape};

use crate::error::Result;
use crate::problem::{Fold, Problem};
use crate::tokens::{self, Tokens, to_bits};

/// Queries travel where they take at most this part of the bytes that they save.
const WORTHWHILE: u64 = 4;

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
    /// What rank `asking` wants of rank `owner`, another one.
    pub(crate) fn of(
        problem: &Problem,
        pattern: &Pattern,
        asking: usize,
        owner: usize,
    ) -> Result<Self> {
        let shards = &problem.shards;
        let (queries, keys) = (shards.rank(asking), shards.rank(owner));
        let shape = Shape::new(shards.tokens(), shards.tokens())
            .query_map(queries.clone())
            .key_map(keys.clone());
        let layout = Layout::compile(pattern, &shape)?;
        if layout.run_count() == 0 {
            return Ok(Want::default());
        }
        let mut seen = layout.keys_seen(None);
        if problem.fold == Fold::Reproducible {
            // Whole tiles, which are words.
            let held = to_bits(&Tokens::range(0, keys.len())?, keys.len());
            let whole = |(seen, held): (&mut u64, &u64)| *seen = if *seen == 0 { 0 } else { *held };
            seen.iter_mut().zip(&held).for_each(whole);
            return Ok(Want { keys: tokens::of_bits(&seen), ..Want::default() });
        }
        let mut want = Want { keys: tokens::of_bits(&seen), ..Want::default() };
        let Some((heavy, light)) = heavy_queries(&layout) else { return Ok(want) };
        let rest = tokens::of_bits(&layout.keys_seen(Some(&light)));
        let guests = tokens::of_bits(&heavy);
        let saved = (want.keys.len() - rest.len()) * problem.key_bytes() as u64;
        if WORTHWHILE * guests.len() * problem.guest_bytes() as u64 <= saved {
            want = Want { keys: rest, guests, stay: Some(tokens::of_bits(&light)) };
        }
        Ok(want)
    }
}

/// The few queries that see the most keys, and all others that see any, a bit each; nothing where
/// there is no such difference.
fn heavy_queries(layout: &Layout) -> Option<(Vec<u64>, Vec<u64>)> {
    let blocks = |row| layout.row(row).iter().map(|run| u64::from(run.len)).sum::<u64>();
    let most = layout.rows().map(blocks).max()?;
    let rows = layout.rows().filter(|&row| 2 * blocks(row) >= most).count();
    // Masks of many rows would cost more than they could save.
    if rows > (layout.rows().len() / 8).max(4) {
        return None;
    }
    let counts = layout.keys_by_query();
    let most = *counts.iter().max()?;
    let mut bits = (vec![0_u64; counts.len().div_ceil(64)], vec![0_u64; counts.len().div_ceil(64)]);
    for (query, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let into = if 2 * count >= most { &mut bits.0 } else { &mut bits.1 };
        into[query / 64] |= 1 << (query % 64);
    }
    Some(bits)
}
