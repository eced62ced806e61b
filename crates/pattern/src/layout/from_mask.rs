//! Layouts of boolean masks.

use std::ops::Range;

use super::Layout;
use crate::error::{Error, Result};
use crate::pattern::Pattern;
use crate::shape::Shape;

impl Pattern {
    /// The pairs that are true in a mask `[queries, keys]`, and where its first query and first key
    /// stand: the queries are the last positions.
    pub fn from_mask(mask: &[bool], queries: usize, keys: usize) -> Result<(Self, i64, i64)> {
        if queries.checked_mul(keys) != Some(mask.len()) {
            return Err(Error::Mask { len: mask.len(), queries, keys });
        }
        // Positions are at least 0, those of blocks, also where there are more queries than keys.
        let (first_query, first_key) = (keys.saturating_sub(queries), queries.saturating_sub(keys));
        let before = std::iter::repeat_n(Vec::new(), first_query);
        let rows = (0..queries).map(|query| ranges(&mask[query * keys..][..keys], first_key));
        let pattern = Pattern::blocks(1, before.chain(rows))?;
        Ok((pattern, first_query as i64, first_key as i64))
    }
}

/// Where a row is true.
fn ranges(row: &[bool], first: usize) -> Vec<Range<u64>> {
    let (mut ranges, mut at) = (Vec::new(), 0);
    while let Some(start) = row[at..].iter().position(|&active| active) {
        let start = at + start;
        let len = row[start..].iter().position(|&active| !active).unwrap_or(row.len() - start);
        at = start + len;
        ranges.push((first + start) as u64..(first + at) as u64);
    }
    ranges
}

impl Layout {
    /// The layout of the pairs that are true in a mask `[queries, keys]`, for a shape of as many,
    /// whose offsets it sets. The mask is read once; time and memory follow the ranges of its rows.
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Shape};
    ///
    /// let causal: Vec<bool> = (0..100 * 100).map(|pair| pair % 100 <= pair / 100).collect();
    /// let layout = Layout::from_mask(&causal, Shape::new(100, 100))?;
    /// assert!(layout.same_pairs(&Layout::compile(&Pattern::causal(), &Shape::new(100, 100))?)?);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn from_mask(mask: &[bool], shape: Shape) -> Result<Self> {
        let (queries, keys) = shape.tokens();
        let (pattern, query, key) = Pattern::from_mask(mask, queries, keys)?;
        Layout::compile(&pattern, &shape.query_offset(query).key_offset(key))
    }
}
