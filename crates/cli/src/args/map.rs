//! Shardings by name.

use clap::ValueEnum;
use longspan_ring::{Result, Shards, Sparsity};

/// How tokens are assigned to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Map {
    /// Chunks of equal work, by the pattern
    Balanced,
    /// One contiguous range per rank
    Contiguous,
    /// Two ranges per rank, one from each end
    Zigzag,
    /// Round-robin by grain
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

    /// The shards, with boundaries at multiples of `grain`.
    pub(crate) fn shards(
        self,
        sparsity: &Sparsity,
        tokens: usize,
        ranks: usize,
        grain: usize,
    ) -> Result<Shards> {
        match self {
            Map::Balanced => Shards::balanced(sparsity.clone(), tokens, ranks, grain),
            Map::Contiguous => Shards::contiguous(tokens, ranks, grain),
            Map::Zigzag => Shards::zigzag(tokens, ranks, grain),
            Map::Striped => Shards::striped(tokens, ranks, grain),
        }
    }
}
