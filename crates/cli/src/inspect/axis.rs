//! One side of a picture: cells, pixels and tokens along it.

use std::ops::Range;

use crate::number::{short, thousands};

/// Tokens from which ticks are labeled `64k` instead of `65,536`.
const LONG: usize = 65_536;
/// Characters of a label that may be closer to its neighbor than others.
const LONGEST_END: usize = 7;
/// Labels per axis.
const MOST_LABELS: i32 = 10;

/// One side of a picture. A cell is a whole number of pixels, so that edges are sharp.
#[derive(Debug, Clone)]
pub(super) struct Axis {
    pub(super) cells: u32,
    /// Pixels per cell.
    pub(super) pixels: i32,
    /// Pixels left free between blocks where a cell is a token.
    pub(super) gap: i32,
    /// Number of blocks, and tokens per block.
    pub(super) blocks: u32,
    pub(super) block: usize,
    /// The tokens along it.
    pub(super) tokens: Range<usize>,
}

impl Axis {
    /// Whether a cell is a token.
    fn is_tokens(&self) -> bool {
        self.cells as usize == self.tokens.len() && self.gap > 0
    }

    /// The first pixel of a cell.
    pub(super) fn start(&self, cell: u32) -> i32 {
        let gaps = if self.is_tokens() { cell / self.block as u32 } else { 0 };
        cell as i32 * self.pixels + gaps as i32 * self.gap
    }

    /// One past the last pixel of a cell.
    pub(super) fn end(&self, cell: u32) -> i32 {
        self.start(cell) + self.pixels
    }

    /// Total pixels.
    pub(super) fn length(&self) -> i32 {
        self.end(self.cells - 1)
    }

    /// Whether two neighboring cells touch.
    pub(super) fn touches(&self, cell: u32) -> bool {
        self.end(cell) == self.start(cell + 1)
    }

    /// Where cells that touch their left neighbor start.
    pub(super) fn seams(&self) -> Vec<i32> {
        let touching = (1..self.cells).filter(|&cell| self.touches(cell - 1));
        touching.map(|cell| self.start(cell)).collect()
    }

    /// Where the free pixels between blocks begin.
    pub(super) fn gaps(&self) -> Vec<i32> {
        let apart = (1..self.cells).filter(|&cell| !self.touches(cell - 1));
        apart.map(|cell| self.end(cell - 1)).collect()
    }

    /// Where a token begins, in pixels.
    pub(super) fn place(&self, token: usize) -> i32 {
        let token = token - self.tokens.start;
        if self.is_tokens() {
            return self.start(token as u32).min(self.length());
        }
        // A last block of fewer tokens is drawn as large as the others.
        let index = token / self.block;
        let first = index * self.block;
        let tokens = self.block.min(self.tokens.len() - first).max(1);
        let blocks = index as f64 + (token - first) as f64 / tokens as f64;
        (blocks * f64::from(self.length()) / f64::from(self.blocks)).round() as i32
    }

    /// Tokens with labels, about `apart` pixels or more from each other.
    pub(super) fn ticks(&self, apart: i32) -> Vec<(usize, String)> {
        let Range { start, end } = self.tokens;
        let most = (self.length() / apart).clamp(1, MOST_LABELS);
        let step = step(end - start, most as usize);
        let label = |token: usize| if end >= LONG { short(token) } else { thousands(token) };
        let mut ticks: Vec<_> =
            (start.div_ceil(step)..=end / step).map(|i| (i * step, label(i * step))).collect();
        // The ends have labels too where there is room.
        let room = |a: usize, b: usize| self.place(b) - self.place(a) >= (apart * 3 / 4).max(1);
        let fits = |token: usize| label(token).len() <= LONGEST_END;
        if ticks.first().is_none_or(|(first, _)| room(start, *first) && fits(start)) {
            ticks.insert(0, (start, label(start)));
        }
        if ticks.last().is_some_and(|(last, _)| room(*last, end)) && fits(end) {
            ticks.push((end, label(end)));
        }
        ticks
    }
}

/// The distance between ticks: a power of two where the length is a multiple of it, or so long
/// that labels need suffixes; a round number otherwise.
fn step(length: usize, most: usize) -> usize {
    let fits = |step: &usize| length.div_ceil(*step) <= most;
    let binary = (0..63).map(|shift| 1 << shift).find(fits).unwrap_or(1 << 62);
    let round = (0..18).flat_map(|zeros| [1, 2, 5].map(|digit| digit * 10usize.pow(zeros)));
    let round = round.into_iter().find(fits).unwrap_or(binary);
    if length.is_multiple_of(binary) || length >= LONG { binary } else { round }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(tokens: Range<usize>, block: usize) -> Axis {
        let blocks = tokens.len().div_ceil(block) as u32;
        Axis { cells: blocks, pixels: 10, gap: 0, blocks, block, tokens }
    }

    fn labels(axis: &Axis, most: i32) -> Vec<String> {
        axis.ticks(axis.length() / most).into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(&blocks(0..8_192, 64), 4), ["0", "2,048", "4,096", "6,144", "8,192"]);
        assert_eq!(labels(&blocks(0..1 << 20, 64), 4), ["0", "256k", "512k", "768k", "1M"]);
        assert_eq!(labels(&blocks(0..1_000, 64), 5), ["0", "200", "400", "600", "800", "1,000"]);
        assert_eq!(labels(&blocks(0..1_777, 64), 4), ["0", "500", "1,000", "1,500"]);
        assert_eq!(labels(&blocks(0..1_900, 64), 4), ["0", "500", "1,000", "1,500", "1,900"]);
        assert_eq!(labels(&blocks(0..1, 64), 8), ["0", "1"]);
        let long = blocks(0..16_495_446, 64);
        assert_eq!(labels(&long, 4), ["0", "4M", "8M", "12M"]);
        assert_eq!(labels(&blocks(0..100_000, 64), 4), ["0", "32k", "64k", "96k"]);
        assert_eq!(labels(&blocks(0..124_000, 64), 4), ["0", "32k", "64k", "96k", "124,000"]);
        assert_eq!(labels(&blocks(640..1_664, 64), 4), ["768", "1,024", "1,280", "1,536"]);
        assert_eq!(labels(&blocks(600..1_664, 64), 2), ["600", "1,000", "1,664"]);
    }

    #[test]
    fn tokens_have_places() {
        let axis = blocks(640..1_664, 64);
        assert_eq!((axis.place(640), axis.place(1_152), axis.place(1_664)), (0, 80, 160));
        // 36 tokens in the last block, drawn as large as the 64 before.
        let ragged = blocks(0..100, 64);
        assert_eq!((ragged.place(64), ragged.place(82), ragged.place(100)), (10, 15, 20));
        let tokens = Axis { cells: 40, pixels: 8, gap: 2, blocks: 3, block: 16, tokens: 0..40 };
        assert_eq!((tokens.start(15), tokens.end(15), tokens.start(16)), (120, 128, 130));
        assert!(tokens.touches(14) && !tokens.touches(15));
        assert_eq!((tokens.gaps(), tokens.seams().len()), (vec![128, 258], 37));
        assert_eq!((tokens.place(32), tokens.length(), tokens.place(40)), (260, 324, 324));
    }
}
