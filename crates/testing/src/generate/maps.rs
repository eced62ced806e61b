//! Random maps from local to global positions: the ways in which a sequence is cut among ranks,
//! and some that no sharding uses.
//!
//! A [`Plan`] is drawn apart from what it is applied to, so that queries and keys can follow the
//! same one. Residues are those of global positions; two sides striped by the same plan then hold
//! the same residue at the same place whatever their offsets.

use arbitrary::{Result, Unstructured};

use super::dice::{argument, lengths, shuffle};
use crate::case::Steps;

/// How the tokens are cut.
#[derive(Clone, Copy)]
pub(super) enum Plan {
    /// Contiguous slices in any order, some missing.
    Slices,
    /// All tokens, ordered by their residue.
    Striped { ranks: u64 },
    /// The tokens of one residue.
    Residue { ranks: u64, residue: u64 },
    /// Slice `rank` from the front and slice `rank` from the back, of `2 · ranks`.
    Zigzag { ranks: u64, rank: u64 },
    /// Progressions at random, overlaps included.
    Scattered,
}

impl Plan {
    pub(super) fn draw(u: &mut Unstructured<'_>) -> Result<Plan> {
        let ranks = u.int_in_range(1..=8)?;
        let rank = u.int_in_range(0..=ranks - 1)?;
        Ok(match u.int_in_range(0..=4)? {
            0 => Plan::Slices,
            1 => Plan::Striped { ranks },
            2 => Plan::Residue { ranks, residue: rank },
            3 => Plan::Zigzag { ranks, rank },
            _ => Plan::Scattered,
        })
    }

    /// The map over the positions `origin..origin + tokens`.
    pub(super) fn map(
        self,
        u: &mut Unstructured<'_>,
        origin: i64,
        tokens: u64,
    ) -> Result<Vec<Steps>> {
        match self {
            Plan::Slices => slices(u, origin, tokens),
            Plan::Striped { ranks } => {
                Ok((0..ranks).map(|residue| residues(origin, tokens, ranks, residue)).collect())
            }
            Plan::Residue { ranks, residue } => Ok(vec![residues(origin, tokens, ranks, residue)]),
            Plan::Zigzag { ranks, rank } => {
                let edge = |slice| tokens * slice / (2 * ranks);
                let slice = |n| contiguous(origin + edge(n) as i64, edge(n + 1) - edge(n));
                Ok(vec![slice(rank), slice(2 * ranks - 1 - rank)])
            }
            Plan::Scattered if tokens == 0 => Ok(vec![]),
            Plan::Scattered => {
                let count = u.int_in_range(0..=8)?;
                (0..count).map(|_| scattered(u, origin, tokens)).collect()
            }
        }
    }
}

fn contiguous(start: i64, len: u64) -> Steps {
    Steps { start, step: 1, len }
}

fn slices(u: &mut Unstructured<'_>, origin: i64, tokens: u64) -> Result<Vec<Steps>> {
    let parts = u.int_in_range(1..=8)?;
    let mut start = origin;
    let mut slices = Vec::new();
    for len in lengths(u, parts, tokens, tokens)? {
        slices.push(contiguous(start, len));
        start += len as i64;
    }
    shuffle(u, &mut slices)?;
    slices.truncate(slices.len() - u.int_in_range(0..=slices.len() / 2)?);
    Ok(slices)
}

fn residues(origin: i64, tokens: u64, ranks: u64, residue: u64) -> Steps {
    let first = (residue as i64 - origin).rem_euclid(ranks as i64) as u64;
    let len = tokens.saturating_sub(first).div_ceil(ranks);
    Steps { start: origin + first as i64, step: ranks, len }
}

fn scattered(u: &mut Unstructured<'_>, origin: i64, tokens: u64) -> Result<Steps> {
    let first = u.int_in_range(0..=tokens - 1)?;
    let step = 1 + argument(u, 20)?;
    let len = u.int_in_range(0..=(tokens - first).div_ceil(step))?;
    Ok(Steps { start: origin + first as i64, step, len })
}
