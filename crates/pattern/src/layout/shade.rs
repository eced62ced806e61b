//! Colours of pictures, and what they stand for.
//!
//! Blue and orange differ in lightness too, so they stay apart for every kind of colour vision
//! and in print. A lighter shade stands for a smaller share, but never so light that a cell with
//! something in it could be taken for an empty one.

use super::Cell;

/// Red, green, blue.
type Rgb = [u8; 3];

const EMPTY: Rgb = [246, 247, 248];
const FULL: Rgb = [10, 76, 140];
const PARTIAL: Rgb = [240, 134, 20];

/// How far the lightest shade is from [`EMPTY`] towards the pure colour.
const LIGHTEST: f64 = 0.42;
/// How far a masked pair is.
const MASKED: f64 = 0.14;

/// What a cell of a picture shows.
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
    /// Nothing is seen, nothing is computed.
    Empty,
    /// A pair of a Partial block that isn't seen.
    Masked,
    /// Partial, from 1 to [`LEVELS`](Self::LEVELS).
    Partial(u8),
    /// Full, from 1 to [`LEVELS`](Self::LEVELS).
    Full(u8),
}

impl Shade {
    /// Steps from light to dark. Few, so that neighbours merge and a shade can be recognised.
    pub const LEVELS: u8 = 8;
    /// A Full block, or nothing but such.
    pub const FULL: Shade = Shade::Full(Self::LEVELS);
    /// A Partial block, or nothing but such.
    pub const PARTIAL: Shade = Shade::Partial(Self::LEVELS);

    /// What a cell of many blocks shows: the kind that most of them are, the darker the more of
    /// them are active.
    pub fn of(cell: Cell) -> Self {
        let active = cell.full + cell.partial;
        match Shade::level(active.into()) {
            _ if active == 0.0 => Shade::Empty,
            level if cell.full >= cell.partial => Shade::Full(level),
            level => Shade::Partial(level),
        }
    }

    /// The level of a share that isn't 0.
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

fn mix(colour: Rgb, strength: f64) -> Rgb {
    let part = |from: u8, to: u8| {
        (f64::from(from) + (f64::from(to) - f64::from(from)) * strength).round() as u8
    };
    std::array::from_fn(|part_of| part(EMPTY[part_of], colour[part_of]))
}
