//! Which position may attend to which, compiled to blocks.
//!
//! A [`Pattern`] is a predicate over global positions, built from primitives with `&`, `|`, `!`
//! or read from text. A [`Layout`] is that pattern compiled for given lengths: rows of runs of
//! key blocks, each Full or Partial, in time and memory that follow the number of runs.
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
//! | module | what it has |
//! |---|---|
//! | `pattern`, `heads`, `text` | the algebra, patterns by head, the text form |
//! | `positions`, `shape` | what a layout is compiled for: lengths, offsets, shards, padding |
//! | `plan` | a pattern made ready to be asked: stretches of keys, bits, signatures |
//! | `meter` | counted work: budgets and progress hooks |
//! | `sight` | who can see whom, told at a glance |
//! | `layout` | rows of runs: compilation, masks, transpose, counts, hash, pictures |
//! | `set`, `cache` | layouts by batch entry and head; layouts kept for the next call |

#![forbid(unsafe_code)]

mod cache;
mod error;
mod heads;
mod layout;
mod meter;
mod pattern;
mod plan;
mod positions;
mod set;
mod shape;
mod sight;
mod text;

pub use cache::{CacheStats, LayoutCache};
pub use error::{Error, Result};
pub use heads::Heads;
pub use layout::{
    BlockMasks, Blocks, Cell, Counts, Layout, LayoutHash, Masks, Picture, Run, RunKind, Shade,
    Transpose,
};
pub use pattern::{Level, Pattern};
pub use positions::{Positions, Progression};
pub use set::{LayoutSet, Padding};
pub use shape::{BlockSize, Shape};
pub use sight::{Glance, Sight};
pub use text::ParseError;
