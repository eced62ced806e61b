//! Colors of pictures.
//!
//! Blue and orange also differ in lightness, so they stay distinct with color blindness and in
//! print. A lighter shade is a smaller fraction; the lightest is still distinct from empty.

use super::Cell;

/// Red, green, blue.
type Rgb = [u8; 3];

const EMPTY: Rgb = [246, 247, 248];
const FULL: Rgb = [10, 76, 140];
const PARTIAL: Rgb = [240, 134, 20];

/// How far the lightest shade is from [`EMPTY`] towards the pure color.
const LIGHTEST: f64 = 0.42;
/// The same for a masked pair.
const MASKED: f64 = 0.14;

/// Color class of a cell.
///
/// ```
/// use longspan_pattern::{Cell, Shade};
///
/// assert_eq!(Shade::of(Cell { full: 1.0, partial: 0.0 }), Shade::FULL);
/// assert_eq!(Shade::of(Cell::default()), Shade::Empty);
/// assert_eq!(Shade::FULL.rgb(), [10, 76, 140]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shade {
    /// No active pair: nothing is computed.
    Empty,
    /// A masked pair of a Partial block.
    Masked,
    /// Partial, from 1 to [`LEVELS`](Self::LEVELS).
    Partial(u8),
    /// Full, from 1 to [`LEVELS`](Self::LEVELS).
    Full(u8),
}

impl Shade {
    /// Steps from light to dark; few, so that adjacent cells merge and shades are recognizable.
    pub const LEVELS: u8 = 8;
    /// Full blocks only.
    pub const FULL: Shade = Shade::Full(Self::LEVELS);
    /// Partial blocks only.
    pub const PARTIAL: Shade = Shade::Partial(Self::LEVELS);

    /// The shade of a cell: the kind of most of its active blocks, darker with their fraction.
    pub fn of(cell: Cell) -> Self {
        let active = cell.full + cell.partial;
        match Shade::level(active.into()) {
            _ if active == 0.0 => Shade::Empty,
            level if cell.full >= cell.partial => Shade::Full(level),
            level => Shade::Partial(level),
        }
    }

    /// The level of a nonzero fraction.
    pub fn level(share: f64) -> u8 {
        ((share * f64::from(Self::LEVELS)).ceil() as u8).clamp(1, Self::LEVELS)
    }

    /// Red, green, blue.
    pub fn rgb(self) -> [u8; 3] {
        let strength = |level: u8| {
            let level = level.clamp(1, Self::LEVELS);
            LIGHTEST + (1.0 - LIGHTEST) * f64::from(level - 1) / f64::from(Self::LEVELS - 1)
        };
        match self {
            Shade::Empty => EMPTY,
            Shade::Masked => mix(PARTIAL, MASKED),
            Shade::Partial(level) => mix(PARTIAL, strength(level)),
            Shade::Full(level) => mix(FULL, strength(level)),
        }
    }
}

fn mix(color: Rgb, strength: f64) -> Rgb {
    let part = |from: u8, to: u8| {
        (f64::from(from) + (f64::from(to) - f64::from(from)) * strength).round() as u8
    };
    std::array::from_fn(|channel| part(EMPTY[channel], color[channel]))
}
