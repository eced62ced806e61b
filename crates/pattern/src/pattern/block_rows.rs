//! An explicit block mask: rows of ranges of blocks.

use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::pattern::MAX_ARGUMENT;

/// The ranges of key blocks per row of query blocks, adjacent ones joined. Clones share memory.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct BlockRows(Arc<Inner>);

#[derive(PartialEq, Eq, Hash)]
struct Inner {
    starts: Vec<usize>,
    ranges: Vec<(i64, i64)>,
}

impl BlockRows {
    pub(crate) fn new<Row>(rows: impl IntoIterator<Item = Row>) -> Result<Self>
    where
        Row: IntoIterator<Item = Range<u64>>,
    {
        let mut inner = Inner { starts: vec![0], ranges: Vec::new() };
        for (row, ranges) in rows.into_iter().enumerate() {
            let first = inner.ranges.len();
            for Range { start, end } in ranges {
                let joined = inner.ranges.len() > first;
                let before = if joined { inner.ranges[inner.ranges.len() - 1].1 } else { 0 };
                if start >= end || (start as i64) < before || end > MAX_ARGUMENT {
                    return Err(Error::BlockRow { row, first: start, end });
                }
                let (start, end) = (start as i64, end as i64);
                match inner.ranges.last_mut() {
                    Some(last) if joined && last.1 == start => last.1 = end,
                    _ => inner.ranges.push((start, end)),
                }
            }
            inner.starts.push(inner.ranges.len());
        }
        Ok(BlockRows(Arc::new(inner)))
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&self.0.starts[..]) + size_of_val(&self.0.ranges[..])
    }

    pub(crate) fn len(&self) -> usize {
        self.0.starts.len() - 1
    }

    /// The ranges of a row; empty past the last row.
    pub(crate) fn row(&self, row: i64) -> &[(i64, i64)] {
        match usize::try_from(row) {
            Ok(row) if row < self.len() => {
                &self.0.ranges[self.0.starts[row]..self.0.starts[row + 1]]
            }
            _ => &[],
        }
    }
}

impl Hash for BlockRows {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}
