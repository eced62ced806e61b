//! The cells of a picture: pairs, blocks, or bins of several blocks.
//!
//! | tokens along a side | a cell is | its shade shows |
//! |---|---|---|
//! | few enough for two pixels each | a pair | whether it is active, and the kind of its block |
//! | blocks get two pixels each | a block | Full, or the share of a Partial block's pairs |
//! | more | several blocks | the kind of most active ones, and how many are active |

use std::collections::HashMap;

use longspan_pattern::{Layout, Result, RunKind, Shade};

use super::axis::Axis;

/// A side that is shorter than the other by more than this is stretched to it.
const FLATTEST: f64 = 0.25;
/// Pixels between blocks where every pair is drawn.
const GAP: i32 = 2;
/// Few cells don't fill the page, but leave space for the labels.
const LARGEST_CELL: i32 = 64;
const SHORTEST: i32 = 240;
/// Up to this many Partial blocks their masks are read, which takes about a second.
pub(super) const MASKS: u128 = 200_000;

/// Limits of a picture's size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// Pixels along the longer side.
    pub(super) side: i32,
    /// Least pixels of a pair or a block. Cells of several blocks have twice that, so that a line of
    /// one cell is visible.
    pub(super) cell: i32,
}

/// The meaning of a cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Meaning {
    /// A pair of a query and a key.
    Pair,
    /// A block; Partial ones show their share of active pairs.
    Block(Partials),
    /// Blocks per cell, across and down.
    Blocks(f64, f64),
}

/// Whether the shade of a Partial block shows its share of active pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Partials {
    Shaded,
    Plain,
}

pub(super) struct Grid {
    pub(super) meaning: Meaning,
    pub(super) across: Axis,
    pub(super) down: Axis,
    /// Row by row.
    cells: Vec<Shade>,
}

/// Adjacent cells of one shade, in pixels from the grid's corner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Patch {
    pub(super) x: i32,
    pub(super) y: i32,
    pub(super) width: i32,
    pub(super) height: i32,
    pub(super) shade: Shade,
}

impl Grid {
    /// The cells of a layout that has at least one block.
    pub(super) fn new(layout: &Layout, room: Room, partials: Partials) -> Result<Self> {
        let (meaning, across, down) = sides(layout, room, partials);
        let mut grid = Grid {
            cells: vec![Shade::Empty; across.cells as usize * down.cells as usize],
            meaning,
            across,
            down,
        };
        match meaning {
            Meaning::Pair => grid.fill_pairs(layout),
            Meaning::Block(partials) => grid.fill_blocks(layout, partials),
            Meaning::Blocks(..) => grid.fill_bins(layout)?,
        }
        Ok(grid)
    }

    fn set(&mut self, x: u32, y: u32, shade: Shade) {
        self.cells[y as usize * self.across.cells as usize + x as usize] = shade;
    }

    pub(super) fn shade(&self, x: u32, y: u32) -> Shade {
        self.cells[y as usize * self.across.cells as usize + x as usize]
    }

    fn fill_pairs(&mut self, layout: &Layout) {
        let mut masks = layout.masks();
        let words = layout.block().words();
        for row in layout.rows() {
            for run in layout.row(row) {
                let seen = match run.kind() {
                    RunKind::Full => Shade::FULL,
                    RunKind::Partial => Shade::PARTIAL,
                };
                for column in run.start..run.end() {
                    let mask = masks.get(row, column, run);
                    let keys = layout.column_tokens(column);
                    for (query, bits) in layout.row_tokens(row).zip(mask.chunks_exact(words)) {
                        for (bit, key) in keys.clone().enumerate() {
                            let is_seen = bits[bit / 64] >> (bit % 64) & 1 == 1;
                            let y = (query - self.down.tokens.start) as u32;
                            self.set(key as u32, y, if is_seen { seen } else { Shade::Masked });
                        }
                    }
                }
            }
        }
    }

    fn fill_blocks(&mut self, layout: &Layout, partials: Partials) {
        let mut masks = layout.masks();
        for (y, row) in (0..).zip(layout.rows()) {
            let queries = layout.row_tokens(row);
            for run in layout.row(row) {
                for column in run.start..run.end() {
                    let shade = match (run.kind(), partials) {
                        (RunKind::Full, _) => Shade::FULL,
                        (RunKind::Partial, Partials::Plain) => Shade::PARTIAL,
                        (RunKind::Partial, Partials::Shaded) => {
                            let mask = masks.get(row, column, run);
                            let seen: u32 = mask.iter().map(|word| word.count_ones()).sum();
                            let keys = layout.column_tokens(column);
                            let all = queries.len() * keys.len();
                            Shade::Partial(Shade::level(f64::from(seen) / all as f64))
                        }
                    };
                    self.set(column, y, shade);
                }
            }
        }
    }

    fn fill_bins(&mut self, layout: &Layout) -> Result<()> {
        let picture = layout.picture(self.across.cells, self.down.cells)?;
        for (shade, cell) in self.cells.iter_mut().zip(&picture.cells) {
            *shade = Shade::of(*cell);
        }
        Ok(())
    }

    /// The cells for which `drawn` is true, adjacent equal cells merged.
    pub(super) fn patches(&self, drawn: impl Fn(Shade) -> bool) -> Vec<Patch> {
        let mut patches: Vec<Patch> = Vec::new();
        // Patches that end with the row above, by their place and shade.
        let mut above: HashMap<(u32, u32, Shade), usize> = HashMap::new();
        for y in 0..self.down.cells {
            let mut here = HashMap::new();
            let grows = y > 0 && self.down.touches(y - 1);
            let mut first = 0;
            while first < self.across.cells {
                let shade = self.shade(first, y);
                let mut last = first;
                while last + 1 < self.across.cells
                    && self.across.touches(last)
                    && self.shade(last + 1, y) == shade
                {
                    last += 1;
                }
                if drawn(shade) {
                    let key = (first, last, shade);
                    let index = match above.get(&key) {
                        Some(&index) if grows => {
                            patches[index].height += self.down.pixels;
                            index
                        }
                        _ => {
                            let x = self.across.start(first);
                            patches.push(Patch {
                                x,
                                y: self.down.start(y),
                                width: self.across.end(last) - x,
                                height: self.down.pixels,
                                shade,
                            });
                            patches.len() - 1
                        }
                    };
                    here.insert(key, index);
                }
                first = last + 1;
            }
            above = here;
        }
        patches
    }
}

/// The meaning of a cell, and both axes.
fn sides(layout: &Layout, room: Room, partials: Partials) -> (Meaning, Axis, Axis) {
    let block = layout.block().get();
    let rows = layout.rows();
    let queries = layout.row_tokens(rows.start).start..layout.row_tokens(rows.end - 1).end;
    let keys = 0..layout.keys();
    let axis = |tokens, blocks| Axis { cells: blocks, pixels: 1, gap: 0, blocks, block, tokens };
    let mut across = axis(keys, layout.columns());
    let mut down = axis(queries, rows.len() as u32);

    let length = |axis: &Axis| axis.tokens.len() as f64;
    let ratio = length(&down) / length(&across);
    let share = |ratio: f64| (f64::from(room.side) * ratio.clamp(FLATTEST, 1.0)) as i32;
    let (wide, high) = (share(1.0 / ratio), share(ratio));
    let stretched = !(FLATTEST..=1.0 / FLATTEST).contains(&ratio);

    let largest = |axis: &Axis| LARGEST_CELL.max(SHORTEST / axis.cells as i32);
    let most = f64::from(room.side / room.cell);
    let meaning = if length(&across) <= most && length(&down) <= most {
        for (axis, pixels) in [(&mut across, wide), (&mut down, high)] {
            axis.gap = GAP;
            axis.cells = axis.tokens.len() as u32;
            let gaps = (axis.blocks as i32 - 1) * GAP;
            axis.pixels = ((pixels - gaps) / axis.cells as i32).clamp(1, largest(axis));
        }
        Meaning::Pair
    } else {
        for (axis, pixels) in [(&mut across, wide), (&mut down, high)] {
            axis.cells = cells(axis.blocks, (pixels / room.cell) as u32);
            axis.pixels = (pixels / axis.cells as i32).min(largest(axis));
        }
        let per_cell = |axis: &Axis| f64::from(axis.blocks) / f64::from(axis.cells);
        match (per_cell(&across), per_cell(&down)) {
            (1.0, 1.0) => Meaning::Block(partials),
            (x, y) => Meaning::Blocks(x, y),
        }
    };
    if !stretched && !matches!(meaning, Meaning::Blocks(..)) {
        let pixels = across.pixels.min(down.pixels);
        (across.pixels, down.pixels) = (pixels, pixels);
    }
    (meaning, across, down)
}

/// As many cells as there are blocks if that is at most `most`. Else at most half of `most`: where
/// it can be such that all hold equally many blocks.
fn cells(blocks: u32, most: u32) -> u32 {
    if blocks <= most {
        return blocks;
    }
    let most = most / 2;
    (most / 2..=most).rev().find(|&cells| blocks.is_multiple_of(cells)).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use longspan_pattern::{BlockSize, Pattern, Shape};

    use super::*;

    const ROOM: Room = Room { side: 1_280, cell: 2 };

    fn grid(pattern: &str, queries: usize, keys: usize, block: u64) -> Result<Grid> {
        let pattern: Pattern = pattern.parse()?;
        let shape = Shape::new(queries, keys).block(BlockSize::new(block)?);
        Grid::new(&Layout::compile(&pattern, &shape)?, ROOM, Partials::Shaded)
    }

    #[test]
    fn few_tokens_show_every_pair() -> Result<()> {
        let grid = grid("causal & window(20, 0)", 96, 96, 16)?;
        assert_eq!(grid.meaning, Meaning::Pair);
        for query in 0..96u32 {
            for key in 0..96 {
                let seen = key <= query && key + 20 >= query;
                let (row, column) = (query / 16, key / 16);
                // The window reaches from 20 back, so only whole blocks below the diagonal and
                // not left of it could be Full; a window of 20 holds none of 16 × 16.
                let touched = column <= row && column * 16 + 15 + 20 >= row * 16;
                let expected = match (seen, touched) {
                    (true, _) => Shade::PARTIAL,
                    (false, true) => Shade::Masked,
                    (false, false) => Shade::Empty,
                };
                assert_eq!(grid.shade(key, query), expected, "query {query}, key {key}");
            }
        }
        Ok(())
    }

    #[test]
    fn blocks_show_their_share() -> Result<()> {
        let grid = grid("causal", 8_192, 8_192, 64)?;
        assert_eq!(grid.meaning, Meaning::Block(Partials::Shaded));
        assert_eq!((grid.across.cells, grid.across.pixels), (128, 10));
        assert_eq!(grid.shade(3, 4), Shade::FULL);
        assert_eq!(grid.shade(5, 4), Shade::Empty);
        // 65 of 128 pairs, so the fifth of eight levels.
        assert_eq!(grid.shade(4, 4), Shade::Partial(5));
        Ok(())
    }

    #[test]
    fn many_blocks_are_binned() -> Result<()> {
        let grid = grid("causal & window(1024, 0)", 1 << 20, 1 << 20, 64)?;
        assert_eq!(grid.meaning, Meaning::Blocks(64.0, 64.0));
        assert_eq!((grid.across.cells, grid.across.pixels), (256, 5));
        for y in 0..256 {
            let shades: Vec<_> = (0..256).filter(|&x| grid.shade(x, y) != Shade::Empty).collect();
            assert!(shades.contains(&y) && shades.len() <= 2, "row {y}: {shades:?}");
        }
        Ok(())
    }

    #[test]
    fn sides_of_different_length() -> Result<()> {
        let flat = grid("full", 1, 32_768, 64)?;
        assert_eq!((flat.across.cells, flat.down.cells), (512, 1));
        assert_eq!((flat.across.pixels, flat.down.pixels), (2, SHORTEST));
        let half = grid("full", 4_096, 8_192, 64)?;
        assert_eq!((half.across.pixels, half.down.pixels), (10, 10));
        Ok(())
    }

    #[test]
    fn patches_cover_each_cell_once() -> Result<()> {
        for (pattern, tokens, block) in [
            ("causal & (window(20, 0) | sinks(3))", 90, 16),
            ("butterfly(64) | window(100, 7)", 4_000, 32),
        ] {
            let grid = grid(pattern, tokens, tokens, block)?;
            let (width, height) = (grid.across.length() as usize, grid.down.length() as usize);
            let mut pixels = vec![None; width * height];
            for patch in grid.patches(|_| true) {
                for y in patch.y..patch.y + patch.height {
                    for x in patch.x..patch.x + patch.width {
                        let pixel = &mut pixels[y as usize * width + x as usize];
                        assert_eq!(*pixel, None, "{pattern}: pixel ({x}, {y}) twice");
                        *pixel = Some(patch.shade);
                    }
                }
            }
            for y in 0..grid.down.cells {
                for x in 0..grid.across.cells {
                    for (px, py) in [
                        (grid.across.start(x), grid.down.start(y)),
                        (grid.across.end(x) - 1, grid.down.end(y) - 1),
                    ] {
                        let pixel = pixels[py as usize * width + px as usize];
                        assert_eq!(pixel, Some(grid.shade(x, y)), "{pattern}: cell ({x}, {y})");
                    }
                }
            }
        }
        Ok(())
    }
}
