//! Global positions of local tokens. Used by `shape`, `coverage` and `layout`.
//!
//! Patterns are predicates over global positions. A call has *some* tokens, in *some* order: all
//! of them, a shard, every fourth, two chunks of a zigzag. [`Positions`] is their map, a short list
//! of [`Progression`]s; the token with local index `i` has the `i`-th position of their
//! concatenation. No other module depends on the kind of sharding.

use std::ops::Range;

use crate::error::{Error, Result};

/// Maximum magnitude of a position: the sum of a position and an argument of a primitive then fits
/// into 64 bits.
pub(crate) const MAX_POSITION: i64 = 1 << 60;

/// The positions `start, start + step, …`, `len` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Progression {
    /// The first position.
    pub start: i64,
    /// Difference of consecutive positions; at least 1.
    pub step: usize,
    /// Number of positions.
    pub len: usize,
}

impl Progression {
    /// The last position, without overflow for any input.
    pub(crate) fn last(&self) -> i128 {
        let reach = (self.step as i128).saturating_mul(self.len as i128 - 1);
        reach.saturating_add(self.start.into())
    }
}

/// Global positions of local tokens, as a list of progressions.
///
/// ```
/// use longspan_pattern::{Positions, Progression};
///
/// // Rank 1 of 4 in a striped ring: positions 1, 5, 9, …
/// let striped = Positions::new([Progression { start: 1, step: 4, len: 250 }])?;
/// assert_eq!(striped.len(), 250);
/// assert_eq!(striped.get(2), Some(9));
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Positions {
    token_ranges: Vec<TokenRange>,
    len: usize,
}

/// Local tokens `local..local + len`, whose positions form a progression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TokenRange {
    pub(crate) local: i64,
    pub(crate) start: i64,
    pub(crate) step: i64,
    pub(crate) len: i64,
}

impl TokenRange {
    pub(crate) fn last(&self) -> i64 {
        self.start + self.step * (self.len - 1)
    }
}

impl Positions {
    /// Positions from progressions, in the order of the local tokens. Empty progressions are dropped
    /// and adjacent ones that continue each other are joined, so equal maps compare equal.
    pub fn new(progressions: impl IntoIterator<Item = Progression>) -> Result<Self> {
        let mut positions = Positions::default();
        for (index, progression) in progressions.into_iter().enumerate() {
            if progression.step == 0 {
                return Err(Error::Step { index });
            }
            if progression.len > 0 {
                positions.push(progression)?;
            }
        }
        Ok(positions)
    }

    /// The positions `start..start + len`.
    pub fn range(start: i64, len: usize) -> Result<Self> {
        Positions::new([Progression { start, step: 1, len }])
    }

    /// The cells of a grid in the order of its tiles: all cells of a tile before those of the next, in
    /// both the last axis fastest. Positions are those of [`Pattern::neighborhood`]: from 0 on, the last
    /// axis fastest. Tiles at the far borders are clipped.
    ///
    /// In this order a block of 64 tokens is a square of 8 × 8 cells or a cube of 4 × 4 × 4, whose
    /// neighborhoods are few blocks:
    ///
    /// ```
    /// use longspan_pattern::{Layout, Pattern, Positions, Shape};
    ///
    /// let pattern = Pattern::neighborhood([64, 64], [6, 6])?;
    /// let rows = Layout::compile(&pattern, &Shape::new(4_096, 4_096))?;
    /// let order = Positions::tiles(&[64, 64], &[8, 8])?;
    /// let shape = Shape::new(4_096, 4_096).query_map(order.clone()).key_map(order);
    /// let tiles = Layout::compile(&pattern, &shape)?;
    /// assert_eq!(rows.counts()?.active_pairs, tiles.counts()?.active_pairs);
    /// assert_eq!(rows.counts()?.active_blocks(), 790);
    /// assert_eq!(tiles.counts()?.active_blocks(), 484);
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    ///
    /// [`Pattern::neighborhood`]: crate::Pattern::neighborhood
    pub fn tiles(sizes: &[usize], tile: &[usize]) -> Result<Self> {
        let error = |argument, value, rule| {
            Err(Error::Argument { primitive: "tiles", argument, value, rule })
        };
        let Some((last, _)) = sizes.split_last().filter(|_| tile.len() == sizes.len()) else {
            return error("tile", tile.len() as u128, "one size per axis of the grid, and axes");
        };
        if sizes.iter().chain(tile).any(|&size| size == 0) {
            return error("size", 0, "1 or more");
        }
        let cells = sizes.iter().try_fold(1_usize, |cells, &size| cells.checked_mul(size));
        if cells.is_none_or(|cells| cells > MAX_POSITION as usize) {
            return Err(Error::TooFar { what: "cells of a grid", value: i128::MAX });
        }
        let axis = sizes.len() - 1;
        let mut positions = Positions::default();
        let mut origin = vec![0; sizes.len()];
        loop {
            let end = |axis: usize| (origin[axis] + tile[axis]).min(sizes[axis]);
            let mut cell = origin.clone();
            loop {
                let start = cell.iter().zip(sizes).fold(0, |start, (at, size)| start * size + at);
                let len = tile[axis].min(last - origin[axis]);
                positions.push(Progression { start: start as i64, step: 1, len })?;
                if !advance(&mut cell[..axis], |axis| (origin[axis]..end(axis), 1)) {
                    break;
                }
            }
            if !advance(&mut origin, |axis| (0..sizes[axis], tile[axis])) {
                return Ok(positions);
            }
        }
    }

    fn push(&mut self, next: Progression) -> Result<()> {
        for value in [i128::from(next.start), next.last()] {
            if value.unsigned_abs() > MAX_POSITION as u128 {
                return Err(Error::TooFar { what: "positions", value });
            }
        }
        let len = self.len + next.len;
        if len as u64 > MAX_POSITION as u64 {
            return Err(Error::TooFar { what: "positions", value: len as i128 });
        }
        // The step of a single token is arbitrary.
        let step = if next.len == 1 { 1 } else { next.step as i64 };
        let joined = self.token_ranges.last_mut().is_some_and(|last| {
            let gap = next.start - last.last();
            let step_fits = (last.len == 1 || last.step == gap) && (next.len == 1 || step == gap);
            let joins = gap > 0 && step_fits && (gap == 1 || last.len > 1 || next.len > 1);
            if joins {
                last.step = gap;
                last.len += next.len as i64;
            }
            joins
        });
        if !joined {
            let (local, len) = (self.len as i64, next.len as i64);
            self.token_ranges.push(TokenRange { local, start: next.start, step, len });
        }
        self.len = len;
        Ok(())
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The position of the token with local index `index`.
    pub fn get(&self, index: usize) -> Option<i64> {
        if index >= self.len {
            return None;
        }
        let token_range = &self.token_ranges[self.token_range_of(index as i64)];
        Some(token_range.start + token_range.step * (index as i64 - token_range.local))
    }

    /// The progressions, adjacent ones joined.
    pub fn progressions(&self) -> impl Iterator<Item = Progression> + '_ {
        self.token_ranges.iter().map(|p| Progression {
            start: p.start,
            step: p.step as usize,
            len: p.len as usize,
        })
    }

    pub(crate) fn token_ranges(&self) -> &[TokenRange] {
        &self.token_ranges
    }

    /// The index of the range that contains the local token `index`.
    pub(crate) fn token_range_of(&self, index: i64) -> usize {
        self.token_ranges.partition_point(|p| p.local <= index) - 1
    }

    /// Smallest and largest position.
    pub(crate) fn extremes(&self) -> Option<(i64, i64)> {
        let first = self.token_ranges.iter().map(|p| p.start).min()?;
        let last = self.token_ranges.iter().map(TokenRange::last).max()?;
        Some((first, last))
    }
}

/// Counts up, the last axis fastest; false after the last.
fn advance(at: &mut [usize], bounds: impl Fn(usize) -> (Range<usize>, usize)) -> bool {
    for axis in (0..at.len()).rev() {
        let (range, step) = bounds(axis);
        at[axis] += step;
        if at[axis] < range.end {
            return true;
        }
        at[axis] = range.start;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_every_cell_once() {
        let all = |sizes: &[usize], tile: &[usize]| {
            let order = Positions::tiles(sizes, tile).unwrap();
            (0..order.len()).map(|index| order.get(index).unwrap()).collect::<Vec<_>>()
        };
        // Three rows of five cells, in tiles of two by three.
        let expected = [0, 1, 2, 5, 6, 7, 3, 4, 8, 9, 10, 11, 12, 13, 14];
        assert_eq!(all(&[3, 5], &[2, 3]), expected);
        assert_eq!(all(&[7], &[3]), (0..7).collect::<Vec<_>>());
        for (sizes, tile) in [(vec![5, 6, 7], vec![4, 4, 4]), (vec![3, 1, 2, 9], vec![2, 2, 1, 4])]
        {
            let mut cells = all(&sizes, &tile);
            assert_ne!(cells, (0..cells.len() as i64).collect::<Vec<_>>());
            cells.sort_unstable();
            assert_eq!(cells, (0..sizes.iter().product::<usize>() as i64).collect::<Vec<_>>());
        }
        for (sizes, tile) in [(vec![], vec![]), (vec![3], vec![]), (vec![0, 3], vec![1, 1])] {
            assert!(Positions::tiles(&sizes, &tile).is_err(), "{sizes:?} {tile:?}");
        }
        assert!(Positions::tiles(&[usize::MAX, 2], &[1, 1]).is_err());
    }

    fn steps(start: i64, step: usize, len: usize) -> Progression {
        Progression { start, step, len }
    }

    #[test]
    fn continuing_progressions_are_joined() {
        let split = Positions::new([steps(0, 1, 3), steps(3, 1, 0), steps(3, 1, 4)]).unwrap();
        assert_eq!(split, Positions::range(0, 7).unwrap());
        let striped = Positions::new([steps(1, 4, 2), steps(9, 7, 1), steps(13, 4, 2)]).unwrap();
        assert_eq!(striped, Positions::new([steps(1, 4, 5)]).unwrap());
        let apart = Positions::new([steps(0, 1, 3), steps(4, 1, 3)]).unwrap();
        assert_eq!(apart.progressions().count(), 2);
        assert_eq!((0..6).map(|i| apart.get(i).unwrap()).collect::<Vec<_>>(), [0, 1, 2, 4, 5, 6]);
        let repeated = Positions::new([steps(5, 1, 1), steps(5, 1, 1), steps(2, 1, 1)]).unwrap();
        assert_eq!((0..3).map(|i| repeated.get(i).unwrap()).collect::<Vec<_>>(), [5, 5, 2]);
    }

    #[test]
    fn invalid_positions_are_errors() {
        assert_eq!(Positions::new([steps(0, 0, 1)]), Err(Error::Step { index: 0 }));
        assert!(Positions::range(MAX_POSITION, 2).is_err());
        assert!(Positions::new([steps(0, usize::MAX, usize::MAX)]).is_err());
        assert!(Positions::range(-MAX_POSITION, 1).is_ok());
    }
}
