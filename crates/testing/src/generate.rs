//! Random cases, from a seed or from a fuzzer.
//!
//! A case is drawn in the order in which its parts depend on each other:
//!
//! ```text
//! lengths → offsets → rule → maps → row range, padding, budget
//! ```
//!
//! Everything drawn is legal: what a rule or a map has to respect is respected here, and checked by
//! the test below. Packed lengths fix the offset of the queries, so a case with offsets of its own
//! has no `packed`.

use arbitrary::{Arbitrary, Result, Unstructured};

use crate::case::{Case, Steps};

mod dice;
mod maps;
mod rules;
#[cfg(test)]
mod tests;

use dice::{chance, offset, range};
use maps::Plan;
use rules::Scope;

/// Operators above a primitive, at most.
const DEPTH: u32 = 4;

impl<'a> Arbitrary<'a> for Case {
    fn arbitrary(u: &mut Unstructured<'a>) -> Result<Case> {
        Case::drawn(u, true)
    }
}

impl Case {
    /// A case whose rule may have fixed places and grids, or not.
    pub(crate) fn drawn(u: &mut Unstructured<'_>, places: bool) -> Result<Case> {
        let tokens_k = tokens(u)?;
        let tokens_q = if chance(u, 40)? { tokens_k } else { tokens(u)? };
        let (query_offset, key_offset) = offsets(u, tokens_q, tokens_k)?;
        let last_key = key_offset.unwrap_or(0) + tokens_k as i64;
        let own_offsets = query_offset.is_some() || key_offset.is_some();
        let scope = Scope {
            span: tokens_q.max(tokens_k).max(1),
            places,
            documents: Some(last_key.max(0) as u64),
            packed: (!own_offsets).then_some((tokens_q, tokens_k)),
        };
        let rule = rules::tree(u, &scope, DEPTH)?;
        let block = block(u)?;
        let mut case = Case {
            rule,
            tokens_q,
            tokens_k,
            query_offset,
            key_offset,
            block,
            rows: None,
            query_map: None,
            key_map: None,
            key_padding: None,
            mask_bytes: mask_bytes(u)?,
        };
        (case.query_map, case.key_map) = maps(u, &case)?;
        if chance(u, 25)? {
            let rows = (case.query_positions().len() as u64).div_ceil(u64::from(block));
            case.rows = Some(range(u, rows)?);
        }
        if chance(u, 20)? {
            case.key_padding = Some(range(u, tokens_k)?);
        }
        Ok(case)
    }
}

/// A number of tokens: mostly under 130, some to 700, with a liking for the awkward.
fn tokens(u: &mut Unstructured<'_>) -> Result<u64> {
    match u.int_in_range(0..=19)? {
        0 => u.int_in_range(0..=1),
        1..=2 => u.int_in_range(2..=20),
        3..=4 => Ok(*u.choose(&[31, 61, 97, 113, 127, 131, 257, 509])?),
        5..=6 => Ok(*u.choose(&[16, 32, 48, 64, 128, 192, 256])?),
        7..=16 => u.int_in_range(20..=130),
        _ => u.int_in_range(130..=700),
    }
}

/// Both offsets, either or none. Given both, the queries stay near the keys.
fn offsets(
    u: &mut Unstructured<'_>,
    tokens_q: u64,
    tokens_k: u64,
) -> Result<(Option<i64>, Option<i64>)> {
    if !chance(u, 25)? {
        return Ok((None, None));
    }
    let aligned = tokens_k as i64 - tokens_q as i64;
    let (query, key) = (offset(u, tokens_q)?, offset(u, tokens_k)?);
    Ok(match u.int_in_range(0..=4)? {
        0 => (Some(query), None),
        1 => (None, Some(key)),
        2 => (Some(key + query), Some(key)),
        _ => (Some(key + aligned), Some(key)),
    })
}

fn block(u: &mut Unstructured<'_>) -> Result<u32> {
    match u.int_in_range(0..=9)? {
        0..=5 => Ok(*u.choose(&[16, 17, 32, 64])?),
        6..=7 => u.int_in_range(16..=40),
        _ => u.int_in_range(16..=256),
    }
}

fn mask_bytes(u: &mut Unstructured<'_>) -> Result<Option<u64>> {
    Ok(match u.int_in_range(0..=9)? {
        0..=4 => None,
        5..=6 => Some(0),
        7..=8 => Some(u.int_in_range(1..=8192)?),
        _ => Some(u.int_in_range(1 << 30..=1 << 40)?),
    })
}

type Map = Option<Vec<Steps>>;

/// Maps for the queries, the keys, both or none; both may follow one plan.
fn maps(u: &mut Unstructured<'_>, case: &Case) -> Result<(Map, Map)> {
    if !chance(u, 35)? {
        return Ok((None, None));
    }
    let plan_q = Plan::draw(u)?;
    let plan_k = if chance(u, 50)? { plan_q } else { Plan::draw(u)? };
    let sides = u.int_in_range(0..=3)?;
    let query_map = match sides {
        0 => None,
        _ => Some(plan_q.map(u, case.query_origin(), case.tokens_q)?),
    };
    let key_map = match sides {
        1 => None,
        _ => Some(plan_k.map(u, case.key_origin(), case.tokens_k)?),
    };
    Ok((query_map, key_map))
}
