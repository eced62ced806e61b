//! How masses of blocks are estimated.

use longspan_pattern::BlockSize;

use crate::error::{Error, Result};
use crate::kernel::masses::{Sampling, Terms};
use crate::simd::LANES;

/// How the attention mass of a key block is estimated: by a softmax over summaries of keys, for some
/// queries of each row of blocks.
///
/// The cost relative to attention over all blocks is about half the share of products that are left,
/// `queries · groups / block²`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Estimator {
    /// Clusters of similar keys, by mean and variance.
    Clusters {
        /// Sampled queries per block, a power of two up to 64.
        queries: usize,
        /// Clusters per block of keys.
        clusters: usize,
    },
    /// Means of neighboring keys.
    Means {
        /// Sampled queries per block, a power of two up to 64.
        queries: usize,
        /// Means per block of keys, a power of two.
        means: usize,
    },
    /// Sums of products along antidiagonals of squares of pairs (XAttention, whose stride is
    /// `block / sums`).
    Antidiagonals {
        /// Squares per side of a block, a power of two.
        sums: usize,
    },
}

impl Default for Estimator {
    fn default() -> Self {
        Estimator::Clusters { queries: 8, clusters: 10 }
    }
}

impl Estimator {
    /// Validated for blocks of this size.
    pub(super) fn sampling(self, block: BlockSize) -> Result<Sampling> {
        let block = block.get();
        let (terms, queries, groups) = match self {
            Estimator::Clusters { queries, clusters } => (Terms::Clusters, queries, clusters),
            Estimator::Means { queries, means } => (Terms::Means, queries, means),
            Estimator::Antidiagonals { sums } => (Terms::Antidiagonals, sums, sums),
        };
        let fail =
            |what, value: usize, rule| Err(Error::Number { what, value: value as f32, rule });
        if queries > LANES || queries == 0 || !block.is_multiple_of(queries) {
            let rule = "a divisor of the block size, up to 64 per block";
            return fail("the number of sampled queries", queries, rule);
        }
        let fits = groups > 0 && groups <= block;
        if !fits || terms != Terms::Clusters && !block.is_multiple_of(groups) {
            let rule = "a divisor of the block size; clusters any number up to it";
            return fail("the number of groups of keys per block", groups, rule);
        }
        Ok(Sampling { terms, queries: block, step: block / queries, keys: block, groups })
    }
}
