//! From intervals of keys to ranges of blocks.
//!
//! ```text
//! intervals   ··[Partial)[      Full       )[Partial)···[ Unknown )··
//! blocks      |     |     |     |     |     |     |     |     |
//! ranges         [ Partial ][ Full        ][ Partial ]  [ Unknown    ]
//! ```
//!
//! A block inside one interval has that interval's coverage. A block that overlaps several, or a
//! gap, is Partial if one of them has an active pair and one a masked pair. Where that is not
//! decided, the block is Unknown.

use crate::arith::gcd;
use crate::coverage::interval::{Interval, KeyCoverage};
use crate::shape::Frame;

/// A range of blocks with one coverage. With `period > 0`, blocks `period` apart have the same
/// mask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRange {
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) coverage: KeyCoverage,
    pub(crate) period: u32,
}

/// Cuts the intervals of a row at block edges.
pub(super) fn cut(intervals: &[Interval], frame: &Frame, out: &mut Vec<BlockRange>) {
    let blocks = frame.divisor;
    let block = blocks.by;
    let total = frame.keys.len() as i64;
    let mut boundary = BoundaryBlock::default();
    for &Interval { start, end, coverage, period } in intervals {
        let first = blocks.floor(start);
        // A short last block counts as whole only if it needs no mask.
        let whole_end = if coverage == KeyCoverage::Full && end == total {
            i64::from(frame.columns)
        } else {
            blocks.floor(end)
        };
        let whole_start = first + i64::from(first * block < start);
        if whole_start > first {
            boundary.add(first, end.min(whole_start * block) - start, coverage, frame, out);
        }
        if whole_start < whole_end {
            boundary.flush(frame, out);
            let period = match period {
                0 | 1 => period,
                _ => (i64::from(period) / gcd(period.into(), block)) as u32,
            };
            let (start, end) = (whole_start as u32, whole_end as u32);
            out.push(BlockRange { start, end, coverage, period });
        }
        let rest = end - whole_start.max(whole_end) * block;
        if rest > 0 {
            boundary.add(whole_start.max(whole_end), rest, coverage, frame, out);
        }
    }
    boundary.flush(frame, out);
}

/// A block that overlaps an end of an interval.
#[derive(Default)]
struct BoundaryBlock {
    block: i64,
    covered: i64,
    active: bool,
    masked: bool,
    unknown: bool,
}

impl BoundaryBlock {
    fn add(
        &mut self,
        block: i64,
        tokens: i64,
        coverage: KeyCoverage,
        frame: &Frame,
        out: &mut Vec<BlockRange>,
    ) {
        if self.block != block {
            self.flush(frame, out);
            self.block = block;
        }
        self.covered += tokens;
        self.active |= coverage != KeyCoverage::Unknown;
        self.masked |= coverage == KeyCoverage::Partial;
        self.unknown |= coverage == KeyCoverage::Unknown;
    }

    #[inline]
    fn flush(&mut self, frame: &Frame, out: &mut Vec<BlockRange>) {
        if self.covered > 0 {
            self.finish(frame, out);
        }
    }

    #[cold]
    fn finish(&mut self, frame: &Frame, out: &mut Vec<BlockRange>) {
        let BoundaryBlock { block, covered, active, masked, unknown } = std::mem::take(self);
        let tokens = frame.column_tokens(block as u32);
        let masked = masked || covered < tokens.end - tokens.start;
        let coverage = match (active, masked, unknown) {
            (true, true, _) => KeyCoverage::Partial,
            (_, _, true) => KeyCoverage::Unknown,
            _ => KeyCoverage::Full,
        };
        let start = block as u32;
        out.push(BlockRange { start, end: start + 1, coverage, period: 0 });
    }
}
