//! What can go wrong around a ring.

use crate::message::END;
use crate::transport::Failure;

/// What this crate's functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong around a ring. Whatever one rank meets, all ranks end with an error.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A pattern or its positions.
    #[error(transparent)]
    Pattern(#[from] longspan_pattern::Error),
    /// A call of this rank's own kernels.
    #[error(transparent)]
    Attention(#[from] longspan::Error),
    /// A ring of nobody.
    #[error("expected at least one rank, got none")]
    NoRanks,
    /// Edges that are multiples of nothing.
    #[error("the grain is 0, expected at least 1 token")]
    NoGrain,
    /// A map names a token that the sequence hasn't got.
    #[error("rank {rank} holds position {position} of a sequence of {tokens} tokens")]
    NoSuchToken {
        /// Whose map.
        rank: usize,
        /// Which position.
        position: i64,
        /// Tokens of all maps.
        tokens: u64,
    },
    /// Two maps, or one map twice, name a token.
    #[error("rank {rank} holds position {position}, which another rank or itself holds too")]
    TokenTwice {
        /// Whose map.
        rank: usize,
        /// Which position.
        position: i64,
    },
    /// Shards whose edges aren't where results that are the same for every number of ranks need them.
    #[error(
        "rank {rank} holds tokens {start} to {end}, expected stretches with edges at multiples of \
             {tile}: make shards with that grain"
    )]
    Edges {
        /// Whose map.
        rank: usize,
        /// The first of them.
        start: u64,
        /// One past the last.
        end: u64,
        /// What edges have to be multiples of.
        tile: u64,
    },
    /// A map for another number of ranks.
    #[error("the shards are for {shards} ranks, the transport has {ranks}")]
    Ranks {
        /// Ranks of the map.
        shards: usize,
        /// Ranks of the engine.
        ranks: usize,
    },
    /// A tensor that isn't what the ring was made for.
    #[error("{tensor} has {got} {axis}, expected {expected}, {why}")]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// Which of its axes.
        axis: &'static str,
        /// What it has.
        got: usize,
        /// What it should have.
        expected: usize,
        /// Where that comes from.
        why: &'static str,
    },
    /// Tensors of another type than the ring was made for.
    #[error("tensors of {got}, expected {expected}, as the ring was made for")]
    Elements {
        /// What they hold.
        got: longspan::ElementType,
        /// What they should hold.
        expected: longspan::ElementType,
    },
    /// A bound that no error can be within.
    #[error("numbers within {bound} of what they are, expected a finite number, at least 0")]
    Bound {
        /// What was given.
        bound: f32,
    },
    /// Numbers that have no 8-bit form.
    #[error(
        "{tensor} has numbers that aren't finite, which Wire::Int8 can't carry: use another one"
    )]
    NotFinite {
        /// Of which tensor.
        tensor: &'static str,
    },
    /// Ranks were started with different arguments.
    #[error(
        "ranks disagree about {what}: {} say what this rank ({rank}) says, {} don't",
        list(agree),
        list(differ)
    )]
    Disagree {
        /// About what.
        what: String,
        /// This rank.
        rank: usize,
        /// Ranks that say the same as this one.
        agree: Vec<usize>,
        /// Ranks that say something else.
        differ: Vec<usize>,
    },
    /// A message didn't come, or couldn't leave.
    #[error(
        "{failure}; this was {} of {doing}, waiting for {awaited}{}", at(*step), going_by(*blamed)
    )]
    Failed {
        /// What the engine says.
        failure: Box<Failure>,
        /// What all ranks are doing.
        doing: &'static str,
        /// Which step of it.
        step: u32,
        /// What was awaited.
        awaited: String,
        /// The rank that it is about, if others who gave up too say that it is another one.
        blamed: Option<usize>,
    },
    /// A message came that isn't what was awaited, or was damaged on its way.
    #[error(
        "a message from rank {from} {why}; this was {} of {doing}, waiting for {awaited}", at(*step)
    )]
    Message {
        /// Who sent it.
        from: usize,
        /// What is wrong with it.
        why: String,
        /// What all ranks are doing.
        doing: &'static str,
        /// Which step of it.
        step: u32,
        /// What was awaited.
        awaited: String,
    },
    /// Another rank has ended with an error and says so.
    #[error("rank {by} gave up at {} of {doing}{}", at(*step), because(*rank))]
    GivenUp {
        /// Who says so.
        by: usize,
        /// The rank that it blames.
        rank: Option<usize>,
        /// At which step.
        step: u32,
        /// What all ranks were doing.
        doing: &'static str,
    },
    /// Lists that ranks tell each other before they compute make no sense.
    #[error("another rank's list of tokens ends too early")]
    Lists,
    /// A ring that has failed isn't used again.
    #[error("this ring has failed before: make a new one, with a transport of its own")]
    Failing,
}

fn list(ranks: &[usize]) -> String {
    let some: Vec<_> = ranks.iter().take(8).map(ToString::to_string).collect();
    let more = if ranks.len() > 8 { ", …" } else { "" };
    format!("ranks {}{more}", some.join(", "))
}

/// Which step, in words.
fn at(step: u32) -> String {
    if step < END { format!("step {step}") } else { "the end".to_owned() }
}

fn going_by(blamed: Option<usize>) -> String {
    let about = |rank| format!("; going by what other ranks say, it is because of rank {rank}");
    blamed.map_or(String::new(), about)
}

fn because(rank: Option<usize>) -> String {
    rank.map_or(String::new(), |rank| format!(", because of rank {rank}"))
}

impl Error {
    /// Whether this rank's own work was ended by a hook, and so by what the hook found.
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
