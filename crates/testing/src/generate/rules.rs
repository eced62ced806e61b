//! Random rules: expression trees over every primitive, legal for the tokens they speak of.
//!
//! Lengths written in a rule must add up, so a rule is drawn within a [`Scope`] that knows to what.
//! Inside `packed` the scope is a sequence. Sequences of different lengths have no length that a
//! nested `documents` could add up to; where one is to be possible, all sequences that have both
//! queries and keys are alike, and what is left over sits in sequences with one side only:
//!
//! ```text
//! 11 queries, 7 keys, 3 sequences:   queries [3, 2, 3, 0, 3]
//!                                    keys    [2, 0, 2, 1, 2]
//! ```

use arbitrary::{Result, Unstructured};

use super::dice::{argument, chance, lengths, shuffle};
use crate::rule::{Level, Rule};

/// What a rule speaks of.
pub(super) struct Scope {
    /// Tokens of the longer side: the size by which arguments are chosen.
    pub(super) span: u64,
    /// Whether rules have fixed places and grids. Kernels see blocks and masks, which these make as others
    /// do: cases of attention are drawn without.
    pub(super) places: bool,
    /// What the lengths of documents add up to, if there can be any.
    pub(super) documents: Option<u64>,
    /// The queries and keys that packed lengths add up to, if there can be any.
    pub(super) packed: Option<(u64, u64)>,
}

/// A rule with at most `depth` operators above a primitive.
pub(super) fn tree(u: &mut Unstructured<'_>, scope: &Scope, depth: u32) -> Result<Rule> {
    if depth == 0 || !chance(u, 65)? {
        return primitive(u, scope);
    }
    match (u.int_in_range(0..=9)?, scope.packed) {
        (0..=3, _) => Ok(Rule::Or(operands(u, scope, depth - 1)?)),
        (4..=6, _) => Ok(Rule::And(operands(u, scope, depth - 1)?)),
        (7, _) => Ok(Rule::Not(Box::new(tree(u, scope, depth - 1)?))),
        (_, Some(tokens)) => packed(u, scope.places, tokens, depth - 1),
        (_, None) => primitive(u, scope),
    }
}

fn operands(u: &mut Unstructured<'_>, scope: &Scope, depth: u32) -> Result<Vec<Rule>> {
    let count = *u.choose(&[1, 2, 2, 2, 2, 2, 3, 3])?;
    (0..count).map(|_| tree(u, scope, depth)).collect()
}

fn primitive(u: &mut Unstructured<'_>, scope: &Scope) -> Result<Rule> {
    let span = scope.span;
    let last = if scope.places { 19 } else { 15 };
    let number = u.int_in_range(0..=last)?;
    Ok(match (number, scope.documents) {
        (0, _) => Rule::Full,
        (1..=2, _) => Rule::Causal,
        (3, _) => Rule::Window { left: reach(u, span)?, right: reach(u, span)? },
        (4, _) => Rule::SlidingWindow { width: 1 + reach(u, span)? },
        (5, _) => Rule::Sinks { n: argument(u, span)? },
        (6, _) => Rule::GlobalTokens { n: argument(u, span)? },
        (7, _) => {
            let segment = 1 + argument(u, span)?;
            let rate = 1 + argument(u, 8)?;
            Rule::Dilated { segment, rate, offset: u.int_in_range(0..=rate - 1)? }
        }
        (8, _) => Rule::Strided { stride: 1 + argument(u, 16)? },
        (9, _) => {
            let count = u.int_in_range(1..=3)?;
            Rule::Hierarchical((0..count).map(|_| level(u, span)).collect::<Result<_>>()?)
        }
        (10, _) => {
            let block = block(u, span)?;
            let count = u.int_in_range(0..=4)?;
            let blocks = span / block;
            let rates = (0..count).map(|_| Ok(1 + argument(u, blocks)?)).collect::<Result<_>>()?;
            Rule::BlocksDilated { block, rates }
        }
        (11, _) => Rule::Butterfly { block: block(u, span)? },
        (12, _) => random(u, span)?,
        (13, _) => explicit(u, span)?,
        (16, _) => {
            let (from, to) = places(u, span)?;
            Rule::Keys { from, to }
        }
        (17, _) => {
            let (from, to) = places(u, span)?;
            Rule::Queries { from, to }
        }
        (18..=19, _) => neighborhood(u, span)?,
        (_, Some(total)) => documents(u, total, span)?,
        (_, None) => Rule::Causal,
    })
}

/// Positions, of which there may be none.
fn places(u: &mut Unstructured<'_>, span: u64) -> Result<(u64, u64)> {
    let from = argument(u, span)?;
    Ok((from, from + argument(u, span)?))
}

/// A grid of about as many cells as there are tokens, or fewer, or more.
fn neighborhood(u: &mut Unstructured<'_>, span: u64) -> Result<Rule> {
    let axes = u.int_in_range(1..=4)?;
    let mut cells = match u.int_in_range(0..=3)? {
        0 => argument(u, span)?,
        _ => span,
    };
    let mut sizes = Vec::new();
    for axis in 1..=axes {
        let size = 1 + if axis == axes { cells } else { u.int_in_range(0..=cells.min(40))? };
        cells /= size;
        sizes.push(size);
    }
    shuffle(u, &mut sizes)?;
    let radii = sizes.iter().map(|&size| argument(u, size.min(9))).collect::<Result<_>>()?;
    Ok(Rule::Neighborhood { sizes, radii })
}

/// How far a window reaches: often nowhere, and sometimes farther than any position.
fn reach(u: &mut Unstructured<'_>, span: u64) -> Result<u64> {
    match u.int_in_range(0..=29)? {
        0..=4 => Ok(0),
        5..=28 => argument(u, span),
        _ => u.int_in_range(0..=1 << 61),
    }
}

fn level(u: &mut Unstructured<'_>, span: u64) -> Result<Level> {
    let window = argument(u, span)?;
    Ok(Level { window, stride: 1 + argument(u, 8)?, grain: 1 + argument(u, 8)? })
}

/// The block size of a primitive: what people use, or about a tenth of the tokens, or anything.
fn block(u: &mut Unstructured<'_>, span: u64) -> Result<u64> {
    match u.int_in_range(0..=9)? {
        0..=2 => Ok(*u.choose(&[16, 32, 64, 1])?),
        3..=7 => Ok(1 + u.int_in_range(0..=span / 8)?),
        _ => Ok(1 + argument(u, span)?),
    }
}

/// The draws of a row stay few, however many blocks there are: the oracle makes them one by one.
fn random(u: &mut Unstructured<'_>, span: u64) -> Result<Rule> {
    let block = block(u, span)?;
    let blocks = 1 + argument(u, 1 + span / block)?;
    let few = u.int_in_range(0..=12)?;
    let per_row = match u.int_in_range(0..=9)? {
        0..=5 => few,
        6..=7 => blocks.saturating_sub(few),
        8 => u.int_in_range(0..=blocks.min(64))?,
        _ => blocks + few,
    };
    Ok(Rule::Random { block, per_row, blocks, seed: u.arbitrary()? })
}

/// Up to a dozen rows, each with blocks named by the bits of a word; a lone far block now and then.
fn explicit(u: &mut Unstructured<'_>, span: u64) -> Result<Rule> {
    let block = 1 + u.int_in_range(span / 12..=span / 4)?;
    let count = u.int_in_range(0..=12)?;
    let mut rows = Vec::new();
    for _ in 0..count {
        let bits: u16 = u.arbitrary()?;
        let mut row: Vec<u64> = (0..16).filter(|bit| bits >> bit & 1 == 1).collect();
        if chance(u, 5)? {
            row.push(16 + argument(u, span)?);
        }
        rows.push(row);
    }
    Ok(Rule::Blocks { block, rows })
}

fn documents(u: &mut Unstructured<'_>, total: u64, span: u64) -> Result<Rule> {
    if total == 0 && chance(u, 50)? {
        return Ok(Rule::Documents(vec![]));
    }
    let most = *u.choose(&[6, 6, 12, 40])?;
    let parts = u.int_in_range(1..=most)?;
    Ok(Rule::Documents(lengths(u, parts, total, span)?))
}

fn packed(
    u: &mut Unstructured<'_>,
    places: bool,
    (queries, keys): (u64, u64),
    depth: u32,
) -> Result<Rule> {
    let count = u.int_in_range(1..=6)?;
    let (each_q, each_k) = (queries / count, keys / count);
    let span = each_q.max(each_k).max(1);
    let (sequences, scope): (Vec<_>, _) = if chance(u, 60)? {
        let mut sequences = vec![(each_q, each_k); count as usize];
        sequences.extend([(queries % count, 0), (0, keys % count)]);
        shuffle(u, &mut sequences)?;
        (sequences, Scope { span, places, documents: Some(each_k), packed: Some((each_q, each_k)) })
    } else {
        let each_k = lengths(u, count, keys, keys)?;
        let alike = queries == keys && chance(u, 50)?;
        let each_q = if alike { each_k.clone() } else { lengths(u, count, queries, queries)? };
        (
            each_q.into_iter().zip(each_k).collect(),
            Scope { span, places, documents: None, packed: None },
        )
    };
    let inner = Box::new(tree(u, &scope, depth)?);
    let (queries, keys) = sequences.into_iter().unzip();
    Ok(Rule::Packed { queries, keys, inner })
}
