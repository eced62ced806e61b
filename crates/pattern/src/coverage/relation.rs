//! Which key blocks a query block attends to, for the block primitives.

use std::ops::Range;

use crate::arith::{Divisor, splitmix64};
use crate::meter::Meter;
use crate::pattern::BlockRows;

/// A relation of block numbers, with a cache of its rows.
pub(crate) struct Relation {
    kind: Kind,
    /// A direct-mapped cache: row `r` at `r` modulo its length.
    rows: Vec<Row>,
    picked: Vec<u64>,
    /// One bit per block while a row is drawn.
    drawn: Vec<u64>,
    /// Scratch for queries that overlap several rows.
    pub(super) edges: Vec<(i64, i64)>,
}

struct Row {
    number: i64,
    /// Ascending, disjoint, not adjacent.
    ranges: Vec<(i64, i64)>,
}

/// Maximum number of cached rows: as many as one row of blocks can overlap, so that computing its
/// masks draws each row once.
const MAX_ROWS: usize = 256;

/// Approximate maximum of ranges in all cached rows: 4 MiB.
const MAX_RANGES: usize = 1 << 18;

enum Kind {
    Dilated(Vec<i64>),
    Butterfly,
    Random(Draws),
    Explicit(BlockRows),
}

/// Parameters of the draws per row of `random`.
struct Draws {
    /// Blocks drawn: the active ones, or the masked ones if those are fewer.
    count: u64,
    blocks: u64,
    seed: u64,
    masked: bool,
    /// Blocks that contain local keys; draws outside are discarded.
    view: Range<u64>,
}

impl Relation {
    fn new(kind: Kind) -> Self {
        let (rows, picked, drawn, edges) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Relation { kind, rows, picked, drawn, edges }
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

    /// Keys have the positions `view`, in blocks of `block`.
    pub(crate) fn random(
        per_row: u64,
        blocks: u64,
        seed: u64,
        block: u64,
        view: &Range<i64>,
    ) -> Self {
        let active = per_row.min(blocks);
        let masked = blocks - active < active;
        let count = active.min(blocks - active);
        let clipped = |position: i64| position.max(0) as u64;
        let view = clipped(view.start) / block..clipped(view.end).div_ceil(block).min(blocks);
        Relation::new(Kind::Random(Draws { count, blocks, seed, masked, view }))
    }

    pub(crate) fn explicit(rows: BlockRows) -> Self {
        Relation::new(Kind::Explicit(rows))
    }

    /// Estimated number of ranges per row.
    pub(crate) fn degree(&self) -> i64 {
        match &self.kind {
            Kind::Dilated(rates) => 1 + 2 * rates.len() as i64,
            Kind::Butterfly => 64,
            Kind::Random(draws) => {
                let view = draws.view.end.saturating_sub(draws.view.start);
                draws.count.min(view).max(1) as i64
            }
            Kind::Explicit(_) => 1 << 20,
        }
    }

    /// The ranges of key blocks that query block `row` (not negative) attends to, for queries that
    /// overlap only this one.
    pub(crate) fn row(&mut self, row: i64, meter: &mut Meter<'_>) -> &[(i64, i64)] {
        self.row_at(row, 0, meter)
    }

    /// The same for queries that overlap several.
    pub(crate) fn row_of_several(&mut self, row: i64, meter: &mut Meter<'_>) -> &[(i64, i64)] {
        let places = (MAX_RANGES / self.degree() as usize).clamp(1, MAX_ROWS);
        let place = row as usize % places;
        self.row_at(row, place, meter)
    }

    fn row_at(&mut self, row: i64, place: usize, meter: &mut Meter<'_>) -> &[(i64, i64)] {
        if let Kind::Explicit(rows) = &self.kind {
            return rows.row(row);
        }
        if self.rows.len() <= place {
            self.rows.resize_with(place + 1, || Row { number: -1, ranges: Vec::new() });
        }
        let held = &mut self.rows[place];
        if held.number != row {
            held.number = -1;
            held.ranges.clear();
            // The caller discards results of a halted meter.
            if !meter.halted() {
                held.number = row;
                self.picked.clear();
                let (picked, drawn) = (&mut self.picked, &mut self.drawn);
                match &self.kind {
                    Kind::Random(draws) => draws.row(row, picked, drawn, meter, &mut held.ranges),
                    kind => pick(kind, row, picked, meter, &mut held.ranges),
                }
            }
        }
        &held.ranges
    }
}

/// Appends the ranges of a row.
fn pick(
    kind: &Kind,
    row: i64,
    picked: &mut Vec<u64>,
    meter: &mut Meter<'_>,
    ranges: &mut Vec<(i64, i64)>,
) {
    match kind {
        Kind::Explicit(_) | Kind::Random(_) => {}
        Kind::Dilated(rates) => {
            picked.push(row as u64);
            for &rate in rates {
                picked
                    .extend([row - rate, row + rate].iter().filter_map(|&b| u64::try_from(b).ok()));
            }
            picked.sort_unstable();
            meter.spend(SORTED * picked.len() as u64);
            list(picked, ranges);
        }
        Kind::Butterfly => {
            picked.push(row as u64);
            picked.extend((0..62).map(|bit| row as u64 ^ 1 << bit));
            picked.sort_unstable();
            meter.spend(SORTED * picked.len() as u64);
            list(picked, ranges);
        }
    }
}

/// Units per block drawn and sorted.
const SORTED: u64 = 32;
/// Units per block drawn into bits.
const DRAWN: u64 = 3;

/// Maximum size of the bit set: 512 KiB, which fits into L2.
const MAX_BITS: u64 = 1 << 22;

/// Maximum number of words to clear per block drawn.
const WORDS_PER_DRAW: u64 = 4;

impl Draws {
    /// Appends the ranges of a row within the view.
    fn row(
        &self,
        row: i64,
        picked: &mut Vec<u64>,
        drawn: &mut Vec<u64>,
        meter: &mut Meter<'_>,
        ranges: &mut Vec<(i64, i64)>,
    ) {
        let (base, view) = (splitmix64(self.seed ^ row as u64), &self.view);
        if view.is_empty() {
            return;
        }
        if self.blocks <= MAX_BITS && self.blocks / 64 <= WORDS_PER_DRAW * self.count {
            let taken = draw_bits(self.count, self.blocks, base, drawn);
            // Set bits of the view are read one by one.
            let words = self.blocks / 64 + (view.end - view.start) / 16;
            meter.spend(DRAWN * (taken + words));
            for word in view.start / 64..view.end.div_ceil(64) {
                let mut bits = drawn[word as usize];
                while bits != 0 {
                    picked.push(word * 64 + u64::from(bits.trailing_zeros()));
                    bits &= bits - 1;
                }
            }
        } else {
            meter.spend(SORTED * self.count);
            draw(self.count, self.blocks, base, picked);
        }
        picked.retain(|block| view.contains(block));
        if self.masked {
            list_others(picked, view, ranges);
        } else {
            list(picked, ranges);
        }
    }
}

/// Draws `count` distinct numbers below `blocks` into bits; returns the number of candidates.
fn draw_bits(count: u64, blocks: u64, base: u64, drawn: &mut Vec<u64>) -> u64 {
    drawn.clear();
    drawn.resize(blocks.div_ceil(64) as usize, 0);
    let below = |hash: u64| below(hash, blocks);
    let (mut missing, mut t) = (count, 0);
    while missing > 0 {
        let block = below(splitmix64(base.wrapping_add(t)));
        let (word, bit) = (&mut drawn[block as usize / 64], 1 << (block % 64));
        missing -= u64::from(*word & bit == 0);
        *word |= bit;
        t += 1;
    }
    t
}

fn below(hash: u64, blocks: u64) -> u64 {
    if blocks.is_power_of_two() { hash & (blocks - 1) } else { hash % blocks }
}

/// The first position of a block, clamped to 2^62, which lies beyond every position and can have a
/// position subtracted without overflow.
#[inline]
pub(super) fn block_start(block: i64, size: Divisor) -> i64 {
    block.saturating_mul(size.by).min(1 << 62)
}

/// Draws `count` distinct numbers below `blocks`, in order: candidate `t` is a hash of `base + t`.
fn draw(count: u64, blocks: u64, base: u64, picked: &mut Vec<u64>) {
    let below = |hash: u64| below(hash, blocks);
    let mut t = 0u64;
    while (picked.len() as u64) < count {
        // Draw as many as are missing, then drop duplicates: the set equals that of drawing one
        // candidate at a time.
        let missing = count - picked.len() as u64;
        picked.extend((t..t + missing).map(|t| below(splitmix64(base.wrapping_add(t)))));
        t += missing;
        picked.sort_unstable();
        picked.dedup();
    }
}

/// Ranges of the picked blocks, adjacent ones joined.
fn list(picked: &[u64], ranges: &mut Vec<(i64, i64)>) {
    for &block in picked {
        let block = block as i64;
        match ranges.last_mut() {
            Some(last) if block <= last.1 => last.1 = last.1.max(block + 1),
            _ => ranges.push((block, block + 1)),
        }
    }
}

/// Ranges of the blocks in view that are not picked.
fn list_others(picked: &[u64], view: &Range<u64>, ranges: &mut Vec<(i64, i64)>) {
    let mut at = view.start;
    for end in picked.iter().copied().chain([view.end]) {
        if at < end {
            ranges.push((at as i64, end as i64));
        }
        at = end + 1;
    }
}
