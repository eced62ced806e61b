//! An index over many progressions of keys.

use crate::coverage::interval::Interval;
use crate::coverage::{KeyRange, LoweredPattern, PositionRange};
use crate::meter::{INTERVAL, Meter};
use crate::positions::Positions;

/// Finds the progressions of keys that a range of queries attends to.
pub(super) struct KeyIndex {
    /// First position, last position and number of each progression, sorted.
    token_ranges: Vec<(i64, i64, u32)>,
    /// Running maximum of the last positions.
    reach: Vec<i64>,
    active: Vec<Interval>,
    chosen: Vec<u32>,
}

/// Up to this many progressions, all are queried: selecting them would take more queries.
const MAX_UNINDEXED: usize = 4;

impl KeyIndex {
    pub(super) fn new(keys: &Positions) -> Option<Self> {
        if keys.token_ranges().len() <= MAX_UNINDEXED {
            return None;
        }
        let mut token_ranges: Vec<_> =
            (0..).zip(keys.token_ranges()).map(|(i, p)| (p.start, p.last(), i)).collect();
        token_ranges.sort_unstable();
        let mut max_last = i64::MIN;
        let reach = token_ranges
            .iter()
            .map(|token_range| {
                max_last = max_last.max(token_range.1);
                max_last
            })
            .collect();
        Some(KeyIndex { token_ranges, reach, active: Vec::new(), chosen: Vec::new() })
    }

    /// The numbers of the progressions to query, ascending: those that overlap the intervals of a
    /// query over all positions.
    pub(super) fn choose(
        &mut self,
        lowered: &mut LoweredPattern,
        queries: PositionRange,
        (block, max_intervals): (i64, usize),
        meter: &mut Meter<'_>,
    ) -> &[u32] {
        let KeyIndex { token_ranges, reach, active, chosen } = self;
        let start = token_ranges[0].0;
        let end = reach[reach.len() - 1] + 1;
        active.clear();
        let keys = KeyRange { start, step: 1, low: 0, high: end - start, block, max_intervals };
        lowered.coverage(queries, keys, meter, active);
        meter.spend(INTERVAL * active.len() as u64);
        chosen.clear();
        let mut active = active.iter().peekable();
        while let Some(interval) = active.next() {
            let (low, mut high) = (interval.start + start, interval.end + start);
            while let Some(next) = active.next_if(|next| next.start + start - high < block) {
                high = next.end + start;
            }
            let from = reach.partition_point(|&last| last < low);
            let to = token_ranges.partition_point(|token_range| token_range.0 < high);
            let near = token_ranges[from..to.max(from)].iter();
            meter.spend(INTERVAL * near.len() as u64);
            chosen.extend(
                near.filter(|token_range| token_range.1 >= low).map(|token_range| token_range.2),
            );
        }
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }
}
