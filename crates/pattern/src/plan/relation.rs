//! Which key blocks a query block sees, for the primitives made of blocks.

use super::arith::Divisor;
use crate::pattern::BlockRows;

/// A relation of block numbers, and the rows it was last asked for.
pub(crate) struct Relation {
    kind: Kind,
    /// Row `r`, if it is held, at `r` modulo their number.
    rows: Vec<Row>,
    picked: Vec<u64>,
    /// Scratch for bands that touch several rows.
    pub(super) edges: Vec<(i64, i64)>,
}

struct Row {
    number: i64,
    /// Ascending, disjoint, never touching.
    ranges: Vec<(i64, i64)>,
}

/// Rows that are held, at most: as many as a band can touch, so that making the masks of a row of
/// blocks doesn't draw its rows anew for each.
const MOST_ROWS: usize = 256;

/// Ranges that all of them may have, about: 16 MiB.
const MOST_RANGES: usize = 1 << 20;

enum Kind {
    Dilated(Vec<i64>),
    Butterfly,
    Random { per_row: u64, blocks: u64, seed: u64 },
    Explicit(BlockRows),
}

impl Relation {
    fn new(kind: Kind) -> Self {
        Relation { kind, rows: Vec::new(), picked: Vec::new(), edges: Vec::new() }
    }

    pub(crate) fn dilated(rates: &[u64]) -> Self {
        let mut rates: Vec<_> = rates.iter().map(|&rate| rate as i64).collect();
        rates.sort_unstable();
        rates.dedup();
        Relation::new(Kind::Dilated(rates))
    }

    pub(crate) fn butterfly() -> Self {
        Relation::new(Kind::Butterfly)
    }

    pub(crate) fn random(per_row: u64, blocks: u64, seed: u64) -> Self {
        Relation::new(Kind::Random { per_row, blocks, seed })
    }

    pub(crate) fn explicit(rows: BlockRows) -> Self {
        Relation::new(Kind::Explicit(rows))
    }

    /// About how many ranges a row has.
    pub(crate) fn degree(&self) -> i64 {
        match &self.kind {
            Kind::Dilated(rates) => 1 + 2 * rates.len() as i64,
            Kind::Butterfly => 64,
            Kind::Random { per_row, blocks, .. } => {
                (*per_row).min(blocks.saturating_sub(*per_row)).max(1) as i64
            }
            Kind::Explicit(_) => 1 << 20,
        }
    }

    /// The ranges of key blocks that query block `row` (not negative) sees, for a band that touches
    /// only this one.
    pub(crate) fn row(&mut self, row: i64) -> &[(i64, i64)] {
        self.row_at(row, 0)
    }

    /// The same for a band that touches several.
    pub(crate) fn row_of_several(&mut self, row: i64) -> &[(i64, i64)] {
        let places = (MOST_RANGES / self.degree() as usize).clamp(1, MOST_ROWS);
        let place = row as usize % places;
        self.row_at(row, place)
    }

    fn row_at(&mut self, row: i64, place: usize) -> &[(i64, i64)] {
        if let Kind::Explicit(rows) = &self.kind {
            return rows.row(row);
        }
        if self.rows.len() <= place {
            self.rows.resize_with(place + 1, || Row { number: -1, ranges: Vec::new() });
        }
        let held = &mut self.rows[place];
        if held.number != row {
            held.number = row;
            held.ranges.clear();
            self.picked.clear();
            pick(&self.kind, row, &mut self.picked, &mut held.ranges);
        }
        &held.ranges
    }
}

/// Appends what a row sees to `ranges`.
fn pick(kind: &Kind, row: i64, picked: &mut Vec<u64>, ranges: &mut Vec<(i64, i64)>) {
    match kind {
        Kind::Explicit(_) => {}
        Kind::Dilated(rates) => {
            picked.push(row as u64);
            for &rate in rates {
                picked
                    .extend([row - rate, row + rate].iter().filter_map(|&b| u64::try_from(b).ok()));
            }
            picked.sort_unstable();
            list(picked, ranges);
        }
        Kind::Butterfly => {
            picked.push(row as u64);
            picked.extend((0..62).map(|bit| row as u64 ^ 1 << bit));
            picked.sort_unstable();
            list(picked, ranges);
        }
        &Kind::Random { per_row, blocks, seed } => {
            let seen = per_row.min(blocks);
            let left_out = blocks - seen;
            draw(seen.min(left_out), blocks, splitmix64(seed ^ row as u64), picked);
            if seen <= left_out {
                list(picked, ranges);
            } else {
                list_others(picked, blocks, ranges);
            }
        }
    }
}

/// The position where a block starts. Blocks past every position may as well start at 2^62, from
/// where a position can still be subtracted.
#[inline]
pub(super) fn edge(block: i64, size: Divisor) -> i64 {
    block.saturating_mul(size.by).min(1 << 62)
}

/// Draws `count` distinct numbers below `blocks`, in order: candidate `t` is a hash of `base + t`.
fn draw(count: u64, blocks: u64, base: u64, picked: &mut Vec<u64>) {
    let below =
        |hash: u64| if blocks.is_power_of_two() { hash & (blocks - 1) } else { hash % blocks };
    let mut t = 0u64;
    while (picked.len() as u64) < count {
        // Draw as many as are missing, then throw out what came twice: the set drawn is the same
        // as when each candidate is looked up before the next is made.
        let missing = count - picked.len() as u64;
        picked.extend((t..t + missing).map(|t| below(splitmix64(base.wrapping_add(t)))));
        t += missing;
        picked.sort_unstable();
        picked.dedup();
    }
}

/// Ranges of single blocks, neighbours joined.
fn list(picked: &[u64], ranges: &mut Vec<(i64, i64)>) {
    for &block in picked {
        let block = block as i64;
        match ranges.last_mut() {
            Some(last) if block <= last.1 => last.1 = last.1.max(block + 1),
            _ => ranges.push((block, block + 1)),
        }
    }
}

/// Ranges of what isn't picked.
fn list_others(picked: &[u64], blocks: u64, ranges: &mut Vec<(i64, i64)>) {
    let mut at = 0;
    for end in picked.iter().copied().chain([blocks]) {
        if at < end {
            ranges.push((at as i64, end as i64));
        }
        at = end + 1;
    }
}

fn splitmix64(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
