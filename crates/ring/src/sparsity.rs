//! What queries attend to, and the bands of key heads that share a demand. `problem` holds it; every
//! module behind it reads bands.

use std::fmt;
use std::ops::ControlFlow;

use longspan::{BlockSize, Components, Dilated, Dims, HeadMap, Heads, Hook, Pattern, Positions};

use crate::error::{Error, Result};
use crate::transport::Poll;

/// What queries attend to: a pattern, a pattern per head, or [`Dilated`] branches.
///
/// ```
/// use longspan::{Dilated, Pattern};
/// use longspan_ring::{Problem, Shards};
///
/// let shards = Shards::contiguous(10_000, 4, 1)?;
/// let dilated = Dilated::new([(512, 1), (2_048, 4), (8_192, 16)])?.within(Pattern::causal());
/// let problem = Problem::new(dilated, shards).heads(8, 2);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub enum Sparsity {
    /// A pattern, or one per head.
    Patterns(Heads),
    /// Branches with the paper's weights, or their union. Its options must be the default: those of
    /// a ring are the problem's and the rank's.
    Dilated(Box<Dilated>),
}

impl From<Heads> for Sparsity {
    fn from(patterns: Heads) -> Self {
        Sparsity::Patterns(patterns)
    }
}

impl From<Pattern> for Sparsity {
    fn from(pattern: Pattern) -> Self {
        Sparsity::Patterns(pattern.into())
    }
}

impl From<Dilated> for Sparsity {
    fn from(dilated: Dilated) -> Self {
        Sparsity::Dilated(Box::new(dilated))
    }
}

impl fmt::Display for Sparsity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sparsity::Patterns(heads) => heads.fmt(f),
            Sparsity::Dilated(dilated) => dilated.fmt(f),
        }
    }
}

impl PartialEq for Sparsity {
    /// By what is printed, which is all that counts.
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

/// Key heads that need the same keys of other ranks, and their query heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Band {
    /// Ascending.
    pub(crate) key_heads: Vec<usize>,
    pub(crate) heads: Vec<usize>,
}

impl Sparsity {
    /// Bands of `heads` query heads on `key_heads` key heads, in order of their first key head.
    pub(crate) fn bands(&self, heads: usize, key_heads: usize) -> Result<Vec<Band>> {
        if key_heads == 0 || !heads.is_multiple_of(key_heads) {
            return Err(longspan::Error::Heads { query: heads, key: key_heads }.into());
        }
        let group = heads / key_heads;
        let mut bands: Vec<(Vec<Pattern>, Band)> = Vec::new();
        for key_head in 0..key_heads {
            let own = key_head * group..(key_head + 1) * group;
            let mut patterns: Vec<Pattern> = Vec::new();
            for head in own.clone() {
                let pattern = self.head_pattern(head, heads)?;
                if !patterns.contains(&pattern) {
                    patterns.push(pattern);
                }
            }
            let same = |known: &&mut (Vec<Pattern>, Band)| {
                known.0.len() == patterns.len() && patterns.iter().all(|one| known.0.contains(one))
            };
            match bands.iter_mut().find(same) {
                Some((_, band)) => {
                    band.key_heads.push(key_head);
                    band.heads.extend(own);
                }
                None => {
                    let band = Band { key_heads: vec![key_head], heads: own.collect() };
                    bands.push((patterns, band));
                }
            }
        }
        Ok(bands.into_iter().map(|(_, band)| band).collect())
    }

    /// The pairs of a query head as a pattern.
    pub(crate) fn head_pattern(&self, head: usize, heads: usize) -> Result<Pattern> {
        Ok(match self {
            Sparsity::Patterns(patterns) => patterns.get(head, heads)?.clone(),
            Sparsity::Dilated(dilated) => dilated.head_pattern(head)?,
        })
    }

    /// The kernel calls of some queries over some keys of a sequence of `tokens` tokens; `block` is that
    /// of their layouts, where it isn't the kernels' own.
    pub(crate) fn components(
        &self,
        tokens: usize,
        (queries, keys): (&Positions, &Positions),
        heads: &HeadMap,
        batch: usize,
        block: Option<BlockSize>,
        poll: &mut Poll<'_>,
    ) -> Result<Components> {
        Ok(match self {
            Sparsity::Patterns(patterns) => Components::of_patterns(
                patterns,
                tokens,
                (queries, keys),
                heads,
                batch,
                block,
                poll,
            )?,
            Sparsity::Dilated(dilated) => {
                let mut poll = |_| poll();
                let hook = Hook::new(&mut poll);
                match block {
                    None => dilated.components(tokens, queries, keys, heads, hook)?,
                    Some(block) => {
                        let dilated = dilated.clone().block(block);
                        dilated.components(tokens, queries, keys, heads, hook)?
                    }
                }
            }
        })
    }

    /// Refuses options of dilated attention, which a ring would not use, and padding or packed
    /// sequences of another batch or length.
    pub(crate) fn check(&self, batch: usize, tokens: usize) -> Result<()> {
        match self {
            Sparsity::Dilated(dilated) if dilated.has_options() => Err(Error::DilatedOptions),
            Sparsity::Dilated(dilated) => Ok(dilated.check_lengths(batch, tokens)?),
            Sparsity::Patterns(_) => Ok(()),
        }
    }

    /// Sets log-sum-exps of padding to −∞: see [`Dilated::exclude`].
    pub(crate) fn exclude(
        &self,
        queries: &Positions,
        dims: Dims,
        lse: &mut [f32],
        lse_lo: Option<&mut [f32]>,
    ) -> Result<()> {
        match self {
            Sparsity::Dilated(dilated) => Ok(dilated.exclude(queries, dims, lse, lse_lo)?),
            Sparsity::Patterns(_) => Ok(()),
        }
    }
}

impl Band {
    /// The query heads of this band over keys of this band alone.
    pub(crate) fn map(&self, heads: usize, key_heads: usize) -> HeadMap {
        HeadMap::of_key_heads(heads, key_heads, self.key_heads.iter().copied())
    }
}

/// Never stops.
pub(crate) fn go_on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_heads(sparsity: &Sparsity, heads: usize, key_heads: usize) -> Vec<Vec<usize>> {
        let bands = sparsity.bands(heads, key_heads).unwrap();
        bands.into_iter().map(|band| band.key_heads).collect()
    }

    #[test]
    fn key_heads_of_equal_patterns_are_one_band() {
        let dilated = |rate| Sparsity::from(Dilated::new([(64, 1), (1_024, rate)]).unwrap());
        assert_eq!(key_heads(&Pattern::causal().into(), 8, 2), [[0, 1]]);
        assert_eq!(key_heads(&dilated(1), 4, 4), [[0, 1, 2, 3]]);
        assert_eq!(key_heads(&dilated(2), 4, 4), [[0, 2], [1, 3]]);
        assert_eq!(key_heads(&dilated(8), 8, 2), [[0], [1]]);
        // Four heads of each key head have all offsets of rate 4.
        assert_eq!(key_heads(&dilated(4), 8, 2), [[0, 1]]);
        let heads: Heads = "heads([causal, full, causal, full])".parse().unwrap();
        assert_eq!(key_heads(&heads.clone().into(), 4, 4), [[0, 2], [1, 3]]);
        assert_eq!(key_heads(&heads.into(), 4, 2), [[0, 1]]);
        assert!(Sparsity::from(Pattern::full()).bands(3, 2).is_err());
    }
}
