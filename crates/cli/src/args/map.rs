//! Which tokens each rank holds, by name.

use clap::ValueEnum;
use longspan::Heads;
use longspan_ring::{Result, Shards};

/// Which tokens each rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Map {
    /// Chunks dealt out by what they compute
    Balanced,
    /// One stretch a rank
    Contiguous,
    /// A stretch from the front and one from the back
    Zigzag,
    /// Every so many-th grain
    Striped,
}

impl Map {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Map::Balanced => "balanced",
            Map::Contiguous => "contiguous",
            Map::Zigzag => "zigzag",
            Map::Striped => "striped",
        }
    }

    /// The shards that it names, with edges at multiples of `grain`.
    pub(crate) fn shards(
        self,
        pattern: &Heads,
        tokens: u64,
        ranks: usize,
        grain: u64,
    ) -> Result<Shards> {
        match self {
            Map::Balanced => Shards::balanced(pattern.clone(), tokens, ranks, grain),
            Map::Contiguous => Shards::contiguous(tokens, ranks, grain),
            Map::Zigzag => Shards::zigzag(tokens, ranks, grain),
            Map::Striped => Shards::striped(tokens, ranks, grain),
        }
    }
}
