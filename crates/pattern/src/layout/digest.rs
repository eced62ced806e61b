//! A hash of the active pairs of a layout.
//!
//! Two layouts are equal if every block has the same mask in both, however blocks are grouped into
//! runs, whichever masks are stored, and whether the layout was compiled or imported. The hash is
//! a polynomial over all blocks,
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
//! of about 2^-100. The points are public: the hash is not cryptographic.

use twox_hash::XxHash3_128;

use super::Layout;
use super::contents::{Accumulator, BlockContent, BlockGroup, Contents};
use crate::error::Result;
use crate::meter::Meter;

/// A hash of the active pairs of a layout; prints as 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayoutHash(pub u128);

impl std::fmt::Display for LayoutHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Version of the hash; part of its input.
const VERSION: u64 = 1;

pub(super) fn digest(layout: &Layout, meter: Meter<'_>) -> Result<LayoutHash> {
    let mut digest = Digest { lanes: POINTS.map(Lane::new), full: XxHash3_128::oneshot(b"full") };
    Contents::new(layout, meter).add_rows("hashing", &mut digest)?;
    let lanes = &digest.lanes;
    let rows = layout.rows();
    let words = [
        VERSION,
        layout.queries() as u64,
        layout.keys() as u64,
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
    /// Content hash of a Full block.
    full: u128,
}

impl Digest {
    fn hash(&self, content: BlockContent) -> u128 {
        match content {
            BlockContent::Full => self.full,
            BlockContent::Mask(_, hash) => hash,
        }
    }
}

impl Accumulator for Digest {
    fn add(&mut self, _: u32, group: BlockGroup, content: BlockContent) {
        let content = self.hash(content);
        for lane in &mut self.lanes {
            lane.add(content, group.start, group.step, group.count);
        }
    }

    fn end_row(&mut self) {
        self.lanes.iter_mut().for_each(Lane::next_row);
    }

    fn slide(&mut self, columns: u32, enters: Option<BlockContent>, leaves: Option<BlockContent>) {
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
            lane.row_sum = plus(lane.row_sum, lane.window);
        }
    }
}

pub(super) fn hash_mask(words: &[u64]) -> u128 {
    let mut hasher = XxHash3_128::new();
    words.iter().for_each(|word| hasher.write(&word.to_le_bytes()));
    hasher.finish_128()
}

/// A Mersenne prime: reduction is a shift and an addition.
const PRIME: u64 = (1 << 61) - 1;

/// `(x, y)` per lane: digits of π and e, truncated to 61 bits.
const POINTS: [(u64, u64); 2] = [
    (0x043F_6A88_85A3_08D3, 0x1319_8A2E_0370_7344),
    (0x0B7E_1516_28AE_D2A6, 0x0BF7_1588_09CF_4F3C),
];

/// Bits of the column index per table of powers of `y`: 32 in all. Most layouts have fewer columns
/// than the first table has entries.
const BITS: [u32; 3] = [14, 9, 9];

struct Lane {
    x: u64,
    y: u64,
    /// `x` to the power of the current row.
    row: u64,
    sum: u64,
    /// The sum over the columns of the current row.
    row_sum: u64,
    /// The sum over the sliding window.
    window: u64,
    powers: [Vec<u64>; 3],
    /// The last step of a group, and `1 / (y^step − 1)`.
    inverse: (u32, u64),
}

impl Lane {
    fn new((x, y): (u64, u64)) -> Self {
        let mut base = y;
        let powers = BITS.map(|bits| {
            let mut table = vec![1];
            while table.len() < 1 << bits {
                table.push(times(table[table.len() - 1], base));
            }
            base = times(table[table.len() - 1], base);
            table
        });
        Lane { x, y, row: 1, sum: 0, row_sum: 0, window: 0, powers, inverse: (0, 0) }
    }

    fn next_row(&mut self) {
        let row_sum = std::mem::take(&mut self.row_sum);
        self.sum = plus(self.sum, times(self.row, row_sum));
        self.row = times(self.row, self.x);
    }

    /// Each lane takes half of the content hash, mapped to a nonzero value.
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
        self.row_sum = plus(self.row_sum, times(content, columns));
    }

    fn column(&self, column: u64) -> u64 {
        let digit = |shift: u32, bits: u32| (column >> shift) as usize & ((1 << bits) - 1);
        let [low, middle, high] = &self.powers;
        let power = low[digit(0, BITS[0])];
        if column >> BITS[0] == 0 {
            return power;
        }
        let power = times(power, middle[digit(BITS[0], BITS[1])]);
        times(power, high[digit(BITS[0] + BITS[1], BITS[2])])
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
