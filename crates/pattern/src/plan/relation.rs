//! Which key blocks a query block sees, for the primitives made of blocks.

use std::ops::Range;

use super::arith::Divisor;
use crate::meter::Meter;
use crate::pattern::BlockRows;

/// A relation of block numbers, and the rows it was last asked for.
pub(crate) struct Relation {
    kind: Kind,
    /// Row `r`, if it is held, at `r` modulo their number.
    rows: Vec<Row>,
    picked: Vec<u64>,
    /// A bit for each block, while a row is drawn.
    drawn: Vec<u64>,
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
    Random(Draws),
    Explicit(BlockRows),
}

/// What each row of `random` draws.
struct Draws {
    /// Blocks that are drawn: those that are seen, or those that aren't where they are fewer.
    count: u64,
    blocks: u64,
    seed: u64,
    left_out: bool,
    /// The blocks that keys at hand lie in: others are drawn and forgotten.
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

    /// Keys lie at the positions `view`, in blocks of `block`.
    pub(crate) fn random(
        per_row: u64,
        blocks: u64,
        seed: u64,
        block: u64,
        view: &Range<i64>,
    ) -> Self {
        let seen = per_row.min(blocks);
        let left_out = blocks - seen < seen;
        let count = seen.min(blocks - seen);
        let clipped = |position: i64| position.max(0) as u64;
        let view = clipped(view.start) / block..clipped(view.end).div_ceil(block).min(blocks);
        Relation::new(Kind::Random(Draws { count, blocks, seed, left_out, view }))
    }

    pub(crate) fn explicit(rows: BlockRows) -> Self {
        Relation::new(Kind::Explicit(rows))
    }

    /// About how many ranges a row has.
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

    /// The ranges of key blocks that query block `row` (not negative) sees, for a band that touches
    /// only this one.
    pub(crate) fn row(&mut self, row: i64, meter: &mut Meter<'_>) -> &[(i64, i64)] {
        self.row_at(row, 0, meter)
    }

    /// The same for a band that touches several.
    pub(crate) fn row_of_several(&mut self, row: i64, meter: &mut Meter<'_>) -> &[(i64, i64)] {
        let places = (MOST_RANGES / self.degree() as usize).clamp(1, MOST_ROWS);
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
            // What a halted meter belongs to is thrown away.
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

/// Appends what a row sees to `ranges`.
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

/// Units of a block that is drawn and sorted, or drawn into bits.
const SORTED: u64 = 32;
const DRAWN: u64 = 3;

/// Bits that rows are drawn into, at most: 512 KiB, which a core's second cache holds.
const MOST_BITS: u64 = 1 << 22;

/// Words of bits that may be cleared for each block that is drawn.
const WORDS_PER_DRAW: u64 = 4;

impl Draws {
    /// Appends what a row sees of the blocks in view.
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
        if self.blocks <= MOST_BITS && self.blocks / 64 <= WORDS_PER_DRAW * self.count {
            let taken = draw_bits(self.count, self.blocks, base, drawn);
            // Bits of the view are read one by one where they are set.
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
        if self.left_out {
            list_others(picked, view, ranges);
        } else {
            list(picked, ranges);
        }
    }
}

/// Draws `count` distinct numbers below `blocks` into bits; tells how many candidates that took.
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

/// The position where a block starts. Blocks past every position may as well start at 2^62, from
/// where a position can still be subtracted.
#[inline]
pub(super) fn edge(block: i64, size: Divisor) -> i64 {
    block.saturating_mul(size.by).min(1 << 62)
}

/// Draws `count` distinct numbers below `blocks`, in order: candidate `t` is a hash of `base + t`.
fn draw(count: u64, blocks: u64, base: u64, picked: &mut Vec<u64>) {
    let below = |hash: u64| below(hash, blocks);
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

/// Ranges of what isn't picked of the blocks in view.
fn list_others(picked: &[u64], view: &Range<u64>, ranges: &mut Vec<(i64, i64)>) {
    let mut at = view.start;
    for end in picked.iter().copied().chain([view.end]) {
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
