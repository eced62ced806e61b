//! `splitmix64`, and what is made of it: the blocks a `random` row draws, seeded bytes and numbers.
//!
//! All use the same stream: element `t` of the stream of `x` is `splitmix64(splitmix64(x) + t)`,
//! so any element is found without the ones before it, and alike on every machine.

use std::cell::RefCell;
use std::collections::HashMap;

/// One step of Vigna's generator, as a hash of its state.
pub(crate) fn splitmix64(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

pub(crate) fn element(x: u64, t: u64) -> u64 {
    splitmix64(splitmix64(x).wrapping_add(t))
}

/// `len` bytes that depend on the seed alone: food for the case generator.
pub fn seeded_bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..).flat_map(|t| element(seed, t).to_le_bytes()).take(len).collect()
}

/// Random numbers that depend on the seed alone.
///
/// ```
/// let mut random = longspan_testing::Random::new(3);
/// assert!((0..100).all(|_| random.below(6) < 6));
/// ```
pub struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    /// The start of the stream of a seed.
    pub fn new(seed: u64) -> Self {
        Random { seed, drawn: 0 }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.drawn += 1;
        element(self.seed, self.drawn - 1)
    }

    /// A number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }

    /// A number from `low` on and below `high`, which must be larger.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }
}

/// What a row of `random` draws: `count` distinct blocks out of `0..blocks`, for query block `row`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Draw {
    pub(crate) count: u64,
    pub(crate) blocks: u64,
    pub(crate) seed: u64,
    pub(crate) row: u64,
}

/// Rows remembered before all are forgotten: more than the longest generated case has.
const REMEMBERED: usize = 4096;

thread_local! {
    static DRAWN: RefCell<HashMap<Draw, Vec<u64>>> = RefCell::default();
}

impl Draw {
    /// Whether `block` is among the drawn ones. A row is asked about once for each of its keys, so
    /// its blocks are drawn once and remembered.
    pub(crate) fn contains(self, block: u64) -> bool {
        DRAWN.with_borrow_mut(|drawn| {
            if drawn.len() > REMEMBERED {
                drawn.clear();
            }
            drawn.entry(self).or_insert_with(|| self.blocks()).contains(&block)
        })
    }

    fn blocks(self) -> Vec<u64> {
        let mut blocks = Vec::new();
        let mut t = 0;
        while (blocks.len() as u64) < self.count {
            let candidate = element(self.seed ^ self.row, t) % self.blocks;
            if !blocks.contains(&candidate) {
                blocks.push(candidate);
            }
            t += 1;
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_gives_the_published_stream_of_seed_zero() {
        assert_eq!(splitmix64(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(splitmix64(0x9E37_79B9_7F4A_7C15), 0x6E78_9E6A_A1B9_65F4);
    }

    #[test]
    fn seeded_bytes_are_prefix_of_one_stream() {
        let bytes = seeded_bytes(3, 100);
        assert_eq!(bytes.len(), 100);
        assert_eq!(bytes[..13], seeded_bytes(3, 13));
        assert_ne!(bytes, seeded_bytes(4, 100));
    }

    #[test]
    fn random_numbers_are_the_stream_of_their_seed() {
        let mut random = Random::new(3);
        let words: Vec<u8> = (0..4).flat_map(|_| random.bits().to_le_bytes()).collect();
        assert_eq!(words, seeded_bytes(3, 32));
        assert!((0..100).all(|_| random.below(3) < 3 && (5..7).contains(&random.between(5, 7))));
    }
}
