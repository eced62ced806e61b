//! A hash of what a layout lets through.
//!
//! Two layouts are equal when every block has the same mask in both. How the blocks are grouped
//! into runs, which masks are stored, and whether a pattern or a foreign list made them must not
//! matter. So the hash is a polynomial over all blocks,
//!
//! ```text
//! Σ  content(r, c) · x^r · y^c      (mod 2^61 − 1)
//! ```
//!
//! at two fixed points `(x, y)`, where `content` is a hash of the block's mask. A run of equal
//! blocks is a geometric series, so it costs as much as one block:
//! `Σ_i y^(s + t i) = y^s (y^(t n) − 1) / (y^t − 1)`.
//!
//! The two sums are hashed once more, with the lengths. Layouts that differ collide with a chance
//! of about 2^-100; the points are public, so this is no defence against someone who tries.

use twox_hash::XxHash3_128;

use super::Layout;
use super::parts::{Comb, Content, Fold, Parts};
use crate::error::Result;
use crate::meter::Meter;

/// A hash of what a layout lets through; prints as 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayoutHash(pub u128);

impl std::fmt::Display for LayoutHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Changes whenever the meaning of the hash does.
const VERSION: u64 = 1;

pub(super) fn digest(layout: &Layout, meter: Meter<'_>) -> Result<LayoutHash> {
    let mut digest = Digest { lanes: POINTS.map(Lane::new), full: XxHash3_128::oneshot(b"full") };
    Parts::new(layout, meter).add_rows("hashing", &mut digest)?;
    let lanes = &digest.lanes;
    let rows = layout.rows();
    let words = [
        VERSION,
        layout.queries(),
        layout.keys(),
        layout.block().get() as u64,
        rows.start.into(),
        rows.end.into(),
        lanes[0].sum,
        lanes[1].sum,
    ];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Ok(LayoutHash(XxHash3_128::oneshot(&bytes)))
}

struct Digest {
    lanes: [Lane; 2],
    /// The content's hash of a Full block.
    full: u128,
}

impl Digest {
    fn hash(&self, content: Content) -> u128 {
        match content {
            Content::Full => self.full,
            Content::Mask(_, hash) => hash,
        }
    }
}

impl Fold for Digest {
    fn add(&mut self, _: u32, comb: Comb, content: Content) {
        let content = self.hash(content);
        for lane in &mut self.lanes {
            lane.add(content, comb.start, comb.step, comb.count);
        }
    }

    fn end_row(&mut self) {
        self.lanes.iter_mut().for_each(Lane::next_row);
    }

    fn slide(&mut self, columns: u32, enters: Option<Content>, leaves: Option<Content>) {
        let (enters, leaves) = (enters.map(|c| self.hash(c)), leaves.map(|c| self.hash(c)));
        for lane in &mut self.lanes {
            let value = |content: Option<u128>| content.map_or(0, |hash| lane.value(hash));
            let (enters, leaves) = (value(enters), value(leaves));
            let last = lane.column(u64::from(columns) - 1);
            let rest = minus(lane.window, times(leaves, last));
            lane.window = plus(enters, times(lane.y, rest));
        }
    }

    fn add_window(&mut self) {
        for lane in &mut self.lanes {
            lane.sum = plus(lane.sum, times(lane.row, lane.window));
        }
    }
}

pub(super) fn hash_mask(words: &[u64]) -> u128 {
    let mut hasher = XxHash3_128::new();
    words.iter().for_each(|word| hasher.write(&word.to_le_bytes()));
    hasher.finish_128()
}

/// A Mersenne prime: remainders are an addition and a shift.
const PRIME: u64 = (1 << 61) - 1;

/// `(x, y)` of each lane: digits of π and e, cut to 61 bits.
const POINTS: [(u64, u64); 2] = [
    (0x043F_6A88_85A3_08D3, 0x1319_8A2E_0370_7344),
    (0x0B7E_1516_28AE_D2A6, 0x0BF7_1588_09CF_4F3C),
];

/// Powers of `y` come from three tables of this many bits each, which cover 32-bit columns.
const BITS: u32 = 11;

struct Lane {
    x: u64,
    y: u64,
    /// `x` to the power of the row at hand.
    row: u64,
    sum: u64,
    /// The sum over the columns of one row, while rows are moved along.
    window: u64,
    powers: [Vec<u64>; 3],
    /// The last step of a comb, and `1 / (y^step − 1)`.
    inverse: (u32, u64),
}

impl Lane {
    fn new((x, y): (u64, u64)) -> Self {
        let mut base = y;
        let powers = [(); 3].map(|()| {
            let mut table = vec![1];
            while table.len() < 1 << BITS {
                table.push(times(table[table.len() - 1], base));
            }
            base = times(table[table.len() - 1], base);
            table
        });
        Lane { x, y, row: 1, sum: 0, window: 0, powers, inverse: (0, 0) }
    }

    fn next_row(&mut self) {
        self.row = times(self.row, self.x);
    }

    /// Each lane takes half of the content's hash; never 0, or a block would go unnoticed.
    fn value(&self, content: u128) -> u64 {
        let half = if self.x == POINTS[0].0 { content as u64 } else { (content >> 64) as u64 };
        half % (PRIME - 1) + 1
    }

    fn add(&mut self, content: u128, start: u32, step: u32, count: u32) {
        let content = self.value(content);
        let first = self.column(start.into());
        let columns = if count == 1 {
            first
        } else {
            if self.inverse.0 != step {
                let ratio = power(self.y, step.into());
                self.inverse = (step, power(minus(ratio, 1), PRIME - 2));
            }
            let end = self.column(u64::from(start) + u64::from(step) * u64::from(count));
            times(minus(end, first), self.inverse.1)
        };
        self.sum = plus(self.sum, times(times(content, self.row), columns));
    }

    fn column(&self, column: u64) -> u64 {
        let digit = |i: u32| (column >> (BITS * i)) as usize & ((1 << BITS) - 1);
        let [low, middle, high] = &self.powers;
        let power = times(low[digit(0)], middle[digit(1)]);
        if digit(2) == 0 { power } else { times(power, high[digit(2)]) }
    }
}

fn plus(a: u64, b: u64) -> u64 {
    let sum = a + b;
    if sum >= PRIME { sum - PRIME } else { sum }
}

fn minus(a: u64, b: u64) -> u64 {
    if a >= b { a - b } else { a + PRIME - b }
}

fn times(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    plus(product as u64 & PRIME, (product >> 61) as u64)
}

fn power(mut base: u64, mut exponent: u64) -> u64 {
    let mut result = 1;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = times(result, base);
        }
        base = times(base, base);
        exponent >>= 1;
    }
    result
}
