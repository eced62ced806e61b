//! One axis of a grid: coordinates of query and key that differ by at most a radius.
//!
//! A position has the coordinate `⌊position / stride⌋ mod size`. Consecutive queries have consecutive
//! coordinates, which start again at 0 after the last. Keys repeat with the period `stride · size`;
//! within one, the coordinates near some query and those near all queries are few ranges:
//!
//! ```text
//! coordinates of queries        ····████████··········      ██████··············████
//! near some query             ··████████████████······      ██████████······████████
//! near all queries            ······██████············      ········ (if at all) ···
//! ```

use super::interval::{Interval, KeyCoverage};
use super::ranges::{CoverageQuery, KeyRange, PositionRange};
use crate::arith::gcd;
use crate::meter::Meter;

#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    pub(super) stride: i64,
    pub(super) size: i64,
    pub(super) radius: i64,
}

/// Ranges of coordinates with their coverage, ascending.
type Ranges = [(i64, i64, KeyCoverage); 3];

impl Axis {
    fn period(&self) -> i64 {
        self.stride * self.size
    }

    /// Positions that the neighbors of one cell span, if those of the other axes are given.
    pub(super) fn breadth(&self) -> i64 {
        self.stride.saturating_mul(self.radius.min(self.size).saturating_mul(2))
    }

    fn coordinate(&self, position: i64) -> i64 {
        position.div_euclid(self.stride).rem_euclid(self.size)
    }

    /// The first and last coordinate near this one, the latter excluded.
    fn near(&self, coordinate: i64) -> (i64, i64) {
        ((coordinate - self.radius).max(0), (coordinate + self.radius + 1).min(self.size))
    }

    /// The coordinates of keys that `queries` attend to.
    fn ranges(&self, queries: PositionRange) -> Ranges {
        use KeyCoverage::{Full, Partial, Unknown};
        let turns = |position: i64| position.div_euclid(self.stride);
        let (first, last) = (turns(queries.start), turns(queries.last()));
        let (low, high) = (first.rem_euclid(self.size), last.rem_euclid(self.size));
        // A step beyond a cell leaves coordinates out.
        let edge = if queries.step <= self.stride { Partial } else { Unknown };
        if last - first < self.size && low <= high {
            let (any_start, all_end) = self.near(low);
            let (all_start, any_end) = self.near(high);
            if all_start < all_end {
                return [
                    (any_start, all_start, edge),
                    (all_start, all_end, Full),
                    (all_end, any_end, edge),
                ];
            }
            return [(any_start, any_end, edge), (0, 0, Full), (0, 0, Full)];
        }
        // Both ends of the axis, unless a step leaves them out.
        let all = self.near(0).1 - self.near(self.size - 1).0;
        let (left, right) = (self.near(high).1, self.near(low).0);
        if edge == Partial && all <= 0 && last - first < self.size && left < right {
            return [(0, left, Partial), (right, self.size, Partial), (0, 0, Full)];
        }
        if self.radius >= self.size - 1 {
            return [(0, self.size, Full), (0, 0, Full), (0, 0, Full)];
        }
        [(0, self.size, Unknown), (0, 0, Full), (0, 0, Full)]
    }

    pub(super) fn coverage(
        &self,
        CoverageQuery { queries, keys }: CoverageQuery,
        meter: &mut Meter<'_>,
        out: &mut Vec<Interval>,
    ) {
        let ranges = self.ranges(queries);
        let period = self.period();
        if ranges[0] == (0, self.size, KeyCoverage::Full) {
            return keys.emit_all(KeyCoverage::Full, 1, out);
        }
        let covered: i64 = ranges.iter().map(|range| (range.1 - range.0).max(0)).sum();
        let gap = (self.size - covered).saturating_mul(self.stride);
        if keys.step > 1 || gap < keys.block && self.periods(&keys) > 1 {
            // Gaps that are smaller than a block are not resolved.
            return keys.emit_all(KeyCoverage::Unknown, period / gcd(period, keys.step), out);
        }
        let mut start = keys.position(keys.low).div_euclid(period) * period;
        let end = keys.position(keys.high - 1);
        while start <= end && meter.has_room(out.len(), keys.max_intervals) {
            for (low, high, coverage) in ranges {
                if low < high {
                    let at = |coordinate| start + coordinate * self.stride;
                    keys.emit(at(low), at(high), coverage, 0, out);
                }
            }
            start += period;
        }
    }

    /// Periods that the keys are in.
    fn periods(&self, keys: &KeyRange) -> i64 {
        let at = |index| keys.position(index).div_euclid(self.period());
        at(keys.high - 1) - at(keys.low) + 1
    }

    pub(super) fn fill(&self, queries: PositionRange, keys: PositionRange, out: &mut [u64]) {
        let mut query = queries.start;
        // The last coordinate, and its bits.
        let mut before = (-1, 0);
        for word in out {
            let coordinate = self.coordinate(query);
            if coordinate != before.0 {
                before = (coordinate, self.bits(self.near(coordinate), keys));
            }
            *word = before.1;
            query += queries.step;
        }
    }

    /// The bits of the keys with these coordinates.
    fn bits(&self, (low, high): (i64, i64), keys: PositionRange) -> u64 {
        let (period, last) = (self.period(), keys.last());
        if (last - keys.start) / period > keys.len {
            return keys.bits_where(|key| (low..high).contains(&self.coordinate(key)));
        }
        let mut bits = 0;
        let mut start = keys.start.div_euclid(period) * period;
        while start <= last {
            bits |= keys.bits(start + low * self.stride, start + high * self.stride);
            start += period;
        }
        bits
    }

    /// What the bits depend on: where a cell begins and, unless one of the ranges goes around the end
    /// of the axis, the distance of the coordinates alone.
    pub(super) fn signature(&self, queries: PositionRange, keys: PositionRange) -> [i64; 4] {
        let period = self.period();
        let whole = |range: PositionRange| {
            range.start.div_euclid(period) == range.last().div_euclid(period)
        };
        if whole(queries) && whole(keys) {
            let [query, key] = [queries, keys].map(|range| range.start.rem_euclid(self.stride));
            let distance = self.coordinate(queries.start) - self.coordinate(keys.start);
            [0, query, key, distance]
        } else {
            [1, queries.start.rem_euclid(period), keys.start.rem_euclid(period), 0]
        }
    }
}
