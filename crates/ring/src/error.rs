//! The crate's error type. Any module above `transport` may return it.

use crate::phase::step_name;
use crate::transport::Failure;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of a ring. An error on one rank ends the call with an error on every rank.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A pattern or its positions.
    #[error(transparent)]
    Pattern(#[from] longspan_pattern::Error),
    /// A call of this rank's kernels.
    #[error(transparent)]
    Attention(#[from] longspan::Error),
    /// A ring without ranks.
    #[error("expected at least one rank, got none")]
    NoRanks,
    /// Dilated attention with options of its own.
    #[error(
        "the dilated attention has options (scale, score, dropout, sinks, threads or an offset), which a \
         ring does not use: set them on the problem, or on the ring's options"
    )]
    DilatedOptions,
    /// A sharding with a grain of 0 tokens.
    #[error("the grain is 0, expected at least 1 token")]
    NoGrain,
    /// A shard has a position outside of the sequence.
    #[error("rank {rank} holds position {position} of a sequence of {tokens} tokens")]
    NoSuchToken {
        /// The rank of the shard.
        rank: usize,
        /// The position.
        position: i64,
        /// Tokens of the sequence.
        tokens: usize,
    },
    /// A position occurs twice, in one shard or in two.
    #[error("rank {rank} holds position {position}, which another rank or itself holds too")]
    TokenTwice {
        /// The rank of the second occurrence.
        rank: usize,
        /// The position.
        position: i64,
    },
    /// Shards whose edges are not multiples of the tile that reproducible reductions need.
    #[error(
        "rank {rank} holds tokens {start} to {end}, expected ranges with edges at multiples of \
             {tile}: make shards with that grain"
    )]
    Edges {
        /// The rank of the shard.
        rank: usize,
        /// The first token of the range.
        start: usize,
        /// One past the last.
        end: usize,
        /// Edges must be multiples of this.
        tile: usize,
    },
    /// Shards for another number of ranks.
    #[error("the shards are for {shards} ranks, the transport has {ranks}")]
    Ranks {
        /// Ranks of the shards.
        shards: usize,
        /// Ranks of the transport.
        ranks: usize,
    },
    /// A tensor with another shape than the problem's.
    #[error("{tensor} has {got} {axis}, expected {expected}, {why}")]
    Shape {
        /// The tensor.
        tensor: &'static str,
        /// The axis.
        axis: &'static str,
        /// Its length.
        got: usize,
        /// The expected length.
        expected: usize,
        /// What defines the expected length.
        why: &'static str,
    },
    /// Tensors of another dtype than the problem's.
    #[error("tensors of {got}, expected {expected} as in the ring's problem")]
    Elements {
        /// Their dtype.
        got: longspan::ElementType,
        /// The problem's dtype.
        expected: longspan::ElementType,
    },
    /// An error bound of a wire format that is negative or not finite.
    #[error("the error bound is {bound}, expected a finite value of at least 0")]
    Bound {
        /// The bound.
        bound: f32,
    },
    /// Non-finite values, which have no 8-bit form.
    #[error(
        "{tensor} has values that are not finite, which Wire::Int8 cannot encode: use another format"
    )]
    NotFinite {
        /// The tensor.
        tensor: &'static str,
    },
    /// Ranks were called with different arguments.
    #[error("{}: call every rank with the same options", called_with(what, values))]
    Mismatch {
        /// The argument.
        what: String,
        /// Ranks per distinct value, fewest ranks first; long values are abbreviated.
        values: Vec<(Vec<usize>, String)>,
    },
    /// A message was not received or not sent.
    #[error(
        "{failure}; in {} of {phase}, waiting for {awaited}{}",
        step_name(*step),
        attributed_to(*suspect)
    )]
    Failed {
        /// The transport's failure.
        failure: Box<Failure>,
        /// The phase that all ranks execute.
        phase: &'static str,
        /// The step of it.
        step: u32,
        /// The awaited message.
        awaited: String,
        /// The rank that caused the failure, where reports of other ranks name another one than
        /// `failure`.
        suspect: Option<usize>,
    },
    /// A received message is damaged or not the expected one.
    #[error(
        "a message from rank {from} {why}; in {} of {phase}, waiting for {awaited}",
        step_name(*step)
    )]
    Message {
        /// The sending rank.
        from: usize,
        /// What is wrong with it.
        why: String,
        /// The phase that all ranks execute.
        phase: &'static str,
        /// The step of it.
        step: u32,
        /// The awaited message.
        awaited: String,
    },
    /// Another rank met an error and aborted.
    #[error("rank {by} aborted in {} of {phase}{}", step_name(*step), caused_by(*suspect))]
    Aborted {
        /// The rank that aborted.
        by: usize,
        /// The rank that caused it.
        suspect: Option<usize>,
        /// The step of the abort.
        step: u32,
        /// The phase that all ranks executed.
        phase: &'static str,
    },
    /// A setup message of another rank cannot be decoded.
    #[error("a token list or encoded block of another rank is truncated")]
    Malformed,
    /// A call of a ring after a failure.
    #[error("this ring has failed before: make a new one, with a transport of its own")]
    Failing,
}

/// "rank 1 was called with `scale` = 0.5, ranks 0, 2 with 0.125".
fn called_with(what: &str, values: &[(Vec<usize>, String)]) -> String {
    let group = |(index, (ranks, value)): (usize, &(Vec<usize>, String))| {
        let verb = if ranks.len() == 1 { "was" } else { "were" };
        match index {
            0 => format!("{} {verb} called with `{what}` = {value}", list(ranks)),
            _ => format!("{} with {value}", list(ranks)),
        }
    };
    values.iter().enumerate().map(group).collect::<Vec<_>>().join(", ")
}

fn list(ranks: &[usize]) -> String {
    if let [rank] = ranks {
        return format!("rank {rank}");
    }
    let some: Vec<_> = ranks.iter().take(8).map(ToString::to_string).collect();
    let more = if ranks.len() > 8 { ", …" } else { "" };
    format!("ranks {}{more}", some.join(", "))
}

fn attributed_to(suspect: Option<usize>) -> String {
    let reported = |rank| format!("; according to other ranks caused by rank {rank}");
    suspect.map_or(String::new(), reported)
}

fn caused_by(suspect: Option<usize>) -> String {
    suspect.map_or(String::new(), |rank| format!(", caused by rank {rank}"))
}

impl Error {
    /// Whether a hook stopped this rank's computation, so that the cause is the hook's.
    pub(crate) fn is_stopped(&self) -> bool {
        use longspan_pattern::Error::Stopped;
        match self {
            Error::Pattern(error) => matches!(error, Stopped { .. }),
            Error::Attention(longspan::Error::Pattern(error)) => matches!(error, Stopped { .. }),
            Error::Attention(error) => matches!(error, longspan::Error::Stopped { .. }),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mismatch_names_ranks_and_values() {
        let values = vec![(vec![1], "0.5".to_owned()), (vec![0, 2], "0.125".to_owned())];
        let error = Error::Mismatch { what: "scale".to_owned(), values };
        assert_eq!(
            error.to_string(),
            "rank 1 was called with `scale` = 0.5, ranks 0, 2 with 0.125: call every rank with the \
             same options"
        );
    }
}
