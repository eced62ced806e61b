//! What a ring needs of a message engine.
//!
//! One verb: a *hop*. It starts some sends and receives, lets the caller compute while they travel,
//! and returns when all of them are done. Everything else (agreement at the start, the end of a
//! pass) is made of hops.

mod local;
#[cfg(feature = "mpi")]
mod mpi;

use std::fmt;
use std::ops::ControlFlow;
use std::time::Duration;

pub use self::local::Local;
#[cfg(feature = "mpi")]
pub use self::mpi::Mpi;

use crate::buffer::Buffer;

/// A message engine, seen from one rank.
///
/// Between two ranks messages arrive in the order of their hops; within a hop there is at most one
/// from one rank to another. There are no tags, and no order between different pairs.
pub trait Transport {
    /// The number of this rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn size(&self) -> usize;

    /// Starts all of `hop`, calls `meanwhile` once, then waits until everything has arrived and
    /// left, at most for [`Hop::patience`].
    ///
    /// `meanwhile` computes. It is given a function to call every now and then: engines that only
    /// move while they are called move there, and [`ControlFlow::Break`] says that something has
    /// failed already, so that computing on is in vain.
    ///
    /// After a failure nothing of the hop may be used. An engine that can't be sure to have let go
    /// of a buffer takes it out of the hop and never frees it.
    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure>;
}

impl<T: Transport + ?Sized> Transport for &mut T {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn size(&self) -> usize {
        (**self).size()
    }

    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure> {
        (**self).hop(hop, meanwhile)
    }
}

/// What is computed while messages travel.
pub type Meanwhile<'a> = dyn FnMut(&mut dyn FnMut() -> ControlFlow<()>) + 'a;

/// Messages that travel at the same time.
#[derive(Debug)]
pub struct Hop<'a> {
    /// To other ranks, each once.
    pub sends: &'a mut [Outgoing],
    /// From other ranks, each once; as long as what is sent.
    pub receives: &'a mut [Incoming],
    /// How long to wait for them once there is nothing left to compute.
    pub patience: Duration,
}

/// A message to another rank.
#[derive(Debug, Clone, Default)]
pub struct Outgoing {
    /// Which one.
    pub to: usize,
    /// What it says.
    pub bytes: Buffer,
}

/// A message from another rank.
#[derive(Debug, Clone, Default)]
pub struct Incoming {
    /// Which one.
    pub from: usize,
    /// Where it goes; as long as it has to be.
    pub bytes: Buffer,
}

/// Why a hop came to nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// A rank has gone: its process ended, or its link broke.
    Gone {
        /// Which one, where the engine knows.
        rank: Option<usize>,
        /// What the engine says.
        message: String,
    },
    /// The time was over.
    Late {
        /// Ranks whose messages haven't arrived.
        from: Vec<usize>,
        /// Ranks that haven't taken theirs.
        to: Vec<usize>,
        /// How long was waited.
        waited: Duration,
    },
    /// A message had another length.
    Length {
        /// Who sent it.
        from: usize,
        /// Bytes that were expected.
        expected: usize,
        /// Bytes that came.
        got: usize,
    },
    /// The engine failed in another way.
    Engine {
        /// What it says.
        message: String,
    },
}

impl Failure {
    /// The rank that it is about, where there is one.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Failure::Gone { rank, .. } => *rank,
            Failure::Late { from, to, .. } => from.first().or(to.first()).copied(),
            Failure::Length { from, .. } => Some(*from),
            Failure::Engine { .. } => None,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Gone { rank: Some(rank), message } => {
                write!(f, "rank {rank} is gone: {message}")
            }
            Failure::Gone { rank: None, message } => write!(f, "a rank is gone: {message}"),
            Failure::Late { from, to, waited } => {
                write!(f, "after {:.1} s", waited.as_secs_f64())?;
                if !from.is_empty() {
                    write!(f, " nothing has come from ranks {from:?}")?;
                }
                if !to.is_empty() {
                    let and = if from.is_empty() { "" } else { " and" };
                    write!(f, "{and} ranks {to:?} haven't taken what was sent")?;
                }
                Ok(())
            }
            Failure::Length { from, expected, got } => {
                write!(f, "rank {from} sent {got} bytes, expected {expected}")
            }
            Failure::Engine { message } => write!(f, "the message engine failed: {message}"),
        }
    }
}

impl std::error::Error for Failure {}
