//! Sharding: which tokens of a sequence each rank holds. The start of the pipeline.
//!
//! A shard is a position map of the layout compiler: patterns refer to global positions, so windows,
//! dilation and documents are independent of the sharding.

mod balanced;

use longspan::{Positions, Progression};

use crate::error::{Error, Result};

/// The tokens of every rank: each token of the sequence belongs to exactly one rank.
///
/// ```
/// use longspan_ring::Shards;
///
/// let shards = Shards::zigzag(1_000, 4, 1)?;
/// // The first and the last eighth.
/// assert_eq!(shards.rank(0).get(0), Some(0));
/// assert_eq!(shards.rank(0).get(249), Some(999));
/// # Ok::<_, longspan_ring::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shards {
    tokens: usize,
    held: Vec<Positions>,
}

impl Shards {
    /// One contiguous range per rank, in order, of equal lengths up to `grain`; edges are multiples of
    /// `grain`.
    pub fn contiguous(tokens: usize, ranks: usize, grain: usize) -> Result<Self> {
        Shards::of_chunks(tokens, ranks, grain, ranks, |rank| vec![rank])
    }

    /// Two contiguous ranges per rank, one from the front and one from the back, which balances causal
    /// work; edges are multiples of `grain`.
    pub fn zigzag(tokens: usize, ranks: usize, grain: usize) -> Result<Self> {
        let chunks = 2 * ranks;
        Shards::of_chunks(tokens, ranks, grain, chunks, |rank| vec![rank, chunks - 1 - rank])
    }

    /// Round-robin by `grain` tokens.
    pub fn striped(tokens: usize, ranks: usize, grain: usize) -> Result<Self> {
        check(ranks, grain)?;
        let stripes = tokens.div_ceil(grain);
        let held = (0..ranks).map(|rank| {
            if grain == 1 {
                let len = tokens.saturating_sub(rank).div_ceil(ranks);
                return Positions::new([Progression { start: rank as i64, step: ranks, len }]);
            }
            Positions::new((rank..stripes).step_by(ranks).map(|stripe| {
                let start = stripe * grain;
                Progression { start: start as i64, step: 1, len: grain.min(tokens - start) }
            }))
        });
        Ok(Shards { tokens, held: held.collect::<Result<_, _>>()? })
    }

    /// The sequence in `chunks` contiguous ranges; `of` returns the indices of a rank's chunks.
    pub(crate) fn of_chunks(
        tokens: usize,
        ranks: usize,
        grain: usize,
        chunks: usize,
        of: impl Fn(usize) -> Vec<usize>,
    ) -> Result<Self> {
        check(ranks, grain)?;
        let range = |chunk: usize| {
            let start = edge(tokens, grain, chunks, chunk);
            let end = edge(tokens, grain, chunks, chunk + 1);
            Progression { start: start as i64, step: 1, len: end - start }
        };
        let held = (0..ranks).map(|rank| Positions::new(of(rank).into_iter().map(range)));
        Ok(Shards { tokens, held: held.collect::<Result<_, _>>()? })
    }

    /// Shards from position maps: every position from 0 on must occur in exactly one.
    ///
    /// ```
    /// use longspan::Positions;
    /// use longspan_ring::Shards;
    ///
    /// let twice = [Positions::range(0, 10)?, Positions::range(5, 10)?];
    /// assert!(Shards::new(twice).unwrap_err().to_string().contains("position 5"));
    /// # Ok::<_, longspan_ring::Error>(())
    /// ```
    pub fn new(held: impl IntoIterator<Item = Positions>) -> Result<Self> {
        let held: Vec<_> = held.into_iter().collect();
        check(held.len(), 1)?;
        let tokens: usize = held.iter().map(Positions::len).sum();
        let mut taken = vec![0_u64; tokens.div_ceil(64)];
        for (rank, positions) in held.iter().enumerate() {
            for progression in positions.progressions() {
                for index in 0..progression.len {
                    let position = progression.start + (index * progression.step) as i64;
                    let token = usize::try_from(position).ok().filter(|&token| token < tokens);
                    let (word, bit) = match token {
                        Some(token) => (token / 64, 1 << (token % 64)),
                        None => return Err(Error::NoSuchToken { rank, position, tokens }),
                    };
                    if taken[word] & bit != 0 {
                        return Err(Error::TokenTwice { rank, position });
                    }
                    taken[word] |= bit;
                }
            }
        }
        Ok(Shards { tokens, held })
    }

    /// Checks that every contiguous range starts and ends at a multiple of `tile`, or with the sequence.
    pub(crate) fn check_edges(&self, tile: usize) -> Result<()> {
        for (rank, held) in self.held.iter().enumerate() {
            for Progression { start, step, len } in held.progressions() {
                let (start, end) = (start as usize, start as usize + len);
                let end_fits = end % tile == 0 || end == self.tokens;
                if step != 1 || start % tile != 0 || !end_fits {
                    return Err(Error::Edges { rank, start, end, tile });
                }
            }
        }
        Ok(())
    }

    /// Tokens of the whole sequence.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.held.len()
    }

    /// The positions of a rank's tokens, in the order of its tensors.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn rank(&self, rank: usize) -> &Positions {
        &self.held[rank]
    }
}

/// The first token of a chunk.
fn edge(tokens: usize, grain: usize, chunks: usize, chunk: usize) -> usize {
    let grains = tokens.div_ceil(grain) as u128 * chunk as u128 / chunks as u128;
    (grains as usize).saturating_mul(grain).min(tokens)
}

fn check(ranks: usize, grain: usize) -> Result<()> {
    if ranks == 0 {
        return Err(Error::NoRanks);
    }
    if grain == 0 { Err(Error::NoGrain) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_has_one_rank() {
        for tokens in [0, 1, 2, 63, 64, 65, 1_000, 1_031] {
            for ranks in [1, 2, 3, 7, 8] {
                for grain in [1, 16, 64] {
                    for shards in [
                        Shards::contiguous(tokens, ranks, grain).unwrap(),
                        Shards::zigzag(tokens, ranks, grain).unwrap(),
                        Shards::striped(tokens, ranks, grain).unwrap(),
                    ] {
                        assert_eq!((shards.tokens(), shards.ranks()), (tokens, ranks));
                        let again = Shards::new((0..ranks).map(|rank| shards.rank(rank).clone()));
                        assert_eq!(again.unwrap(), shards);
                    }
                }
            }
        }
    }

    #[test]
    fn shards_are_even() {
        let shards = Shards::contiguous(1_003, 4, 1).unwrap();
        let lens: Vec<_> = (0..4).map(|rank| shards.rank(rank).len()).collect();
        assert_eq!(lens, [250, 251, 251, 251]);
    }
}
