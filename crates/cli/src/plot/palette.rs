//! Colours, and what they stand for.
//!
//! Blue and orange differ in lightness too, so they stay apart for every kind of colour vision
//! and in print. A lighter shade stands for a smaller share, but never so light that a cell with
//! something in it could be taken for an empty one.

use plotters_backend::{BackendColor, BackendStyle};

/// Red, green, blue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Colour(u8, u8, u8);

impl BackendStyle for Colour {
    fn color(&self) -> BackendColor {
        BackendColor { alpha: 1.0, rgb: (self.0, self.1, self.2) }
    }
}

/// Steps from light to dark. Few, so that neighbours merge and a shade can be recognised.
pub(super) const LEVELS: u8 = 8;

pub(super) const PAGE: Colour = Colour(255, 255, 255);
pub(super) const INK: Colour = Colour(32, 36, 40);
pub(super) const FAINT_INK: Colour = Colour(98, 104, 112);
/// The frame, ticks, and lines between blocks.
pub(super) const LINE: Colour = Colour(196, 201, 207);

const EMPTY: Colour = Colour(246, 247, 248);
const FULL: Colour = Colour(10, 76, 140);
const PARTIAL: Colour = Colour(240, 134, 20);

/// How far the lightest shade is from [`EMPTY`] towards the pure colour.
const LIGHTEST: f64 = 0.42;
/// How far a masked pair is.
const MASKED: f64 = 0.14;

/// What a cell shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Shade {
    /// Nothing is seen, nothing is computed.
    Empty,
    /// A pair of a Partial block that isn't seen.
    Masked,
    /// Partial, from 1 to [`LEVELS`].
    Partial(u8),
    /// Full, from 1 to [`LEVELS`].
    Full(u8),
}

impl Shade {
    pub(super) const FULL: Shade = Shade::Full(LEVELS);
    pub(super) const PARTIAL: Shade = Shade::Partial(LEVELS);

    pub(super) fn colour(self) -> Colour {
        let strength =
            |level: u8| LIGHTEST + (1.0 - LIGHTEST) * f64::from(level - 1) / f64::from(LEVELS - 1);
        match self {
            Shade::Empty => EMPTY,
            Shade::Masked => mix(PARTIAL, MASKED),
            Shade::Partial(level) => mix(PARTIAL, strength(level)),
            Shade::Full(level) => mix(FULL, strength(level)),
        }
    }
}

/// The level of a share that isn't 0.
pub(super) fn level(share: f64) -> u8 {
    ((share * f64::from(LEVELS)).ceil() as u8).clamp(1, LEVELS)
}

fn mix(colour: Colour, strength: f64) -> Colour {
    let part = |from: u8, to: u8| {
        (f64::from(from) + (f64::from(to) - f64::from(from)) * strength).round() as u8
    };
    Colour(part(EMPTY.0, colour.0), part(EMPTY.1, colour.1), part(EMPTY.2, colour.2))
}
