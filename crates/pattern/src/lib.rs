//! Attention patterns, compiled to block-sparse layouts.
//!
//! A [`Pattern`] is a predicate over global positions, built from primitives with `&`, `|`, `!`
//! or parsed from text. A [`Layout`] is that pattern compiled for given lengths: rows of runs of
//! key blocks, each Full or Partial. Time and memory are proportional to the number of runs.
//!
//! ```
//! use longspan_pattern::{Layout, Pattern, Shape};
//!
//! let pattern: Pattern = "causal & (window(1024, 0) | sinks(64))".parse()?;
//! let layout = Layout::compile(&pattern, &Shape::new(1 << 20, 1 << 20))?;
//! let counts = layout.counts()?;
//! println!("{} blocks, {:.3} % of all pairs", counts.active_blocks(), 100.0 * layout.density()?);
//! # assert_eq!(layout.rows().len(), 1 << 14);
//! # Ok::<_, longspan_pattern::Error>(())
//! ```
//!
//! # Crate layout
//!
//! Lowest layer first; a module imports only modules above it in this table.
//!
//! | module | contents |
//! |---|---|
//! | `error`, `arith`, `svg` | errors; gcd, congruences, division; SVG files of pictures |
//! | `positions`, `meter` | global positions of local tokens; the work budget and progress hooks |
//! | `residues` | tokens of one residue, as views with a step |
//! | `pattern`, `heads`, `text` | the expression, one per query head, parser and printer |
//! | `shape` | what a layout is compiled for: lengths, offsets, position maps, padding |
//! | `coverage` | coverage queries over a pattern: intervals of keys, mask bits, signatures |
//! | `layout` | rows of runs: compilation, masks, transpose, counts, hash, pictures |
//! | `cache`, `set` | layouts reused across calls; layouts per batch entry and query head |
//! | `density` | patterns scaled to a density |

#![forbid(unsafe_code)]

mod arith;
mod cache;
mod coverage;
mod density;
mod error;
mod heads;
mod layout;
mod meter;
mod pattern;
mod positions;
pub mod residues;
mod set;
mod shape;
#[doc(hidden)]
pub mod svg;
mod text;

#[doc(hidden)]
pub use arith::splitmix64;
pub use cache::{CacheStats, LayoutCache};
pub use coverage::{BlockCoverage, PatternCoverage};
pub use density::{scale_to_density, scale_to_density_with};
pub use error::{Error, ParseError, Result};
pub use heads::Heads;
pub use layout::{
    BlockMasks, Blocks, Cell, Component, Counts, Layout, LayoutHash, Masks, Picture, PositionOrder,
    Run, RunKind, ScorePositions, Shade, Split, TileCounts, Tiles, TokenSteps, Transpose,
};
pub use pattern::{Level, Pattern, Reach};
pub use positions::{Positions, Progression};
pub use set::{LayoutSet, Padding};
pub use shape::{BlockSize, Shape};

/// Threads share these types.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Layout>();
    shared::<Pattern>();
    shared::<LayoutSet>();
    shared::<LayoutCache>();
};
