//! Interface of a message engine, and its implementations. Imports `buffer` only.
//!
//! A transport has one operation, the *hop*: it starts nonblocking sends and receives, lets the
//! caller compute while they progress, and returns when all are complete. Collectives (agreement
//! during setup, synchronization at the end of a pass) are built from hops.

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

/// The endpoint of one rank in a message engine.
///
/// Messages between two ranks arrive in the order of their hops; a hop has at most one message per
/// ordered pair of ranks. There are no tags, and no order between different pairs.
pub trait Transport {
    /// This rank's index.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Starts all transfers of `hop`, calls `meanwhile` once, then waits until every transfer is
    /// complete, for at most [`Hop::timeout`].
    ///
    /// `meanwhile` computes. It periodically calls the function that it is passed: engines without
    /// asynchronous progress make progress there, and [`ControlFlow::Break`] reports that the hop has
    /// failed, so that the computation can stop.
    ///
    /// After a failure no buffer of the hop may be used. A transport that cannot guarantee that the
    /// engine has released a buffer takes it out of the hop and leaks it.
    ///
    /// A rank that aborts sends a shorter message than expected. A transport that detects this fails
    /// with [`Failure::Length`]; one that cannot fills the beginning of the buffer.
    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure>;

    /// Broadcasts `message` to all other ranks, and passes every abort message of another rank to
    /// `listener` as it arrives, until `listener` breaks or `timeout` has elapsed. Called once, after
    /// a failed hop: messages of hops may be pending, and must not be confused with these. The other
    /// ranks need not be listening.
    ///
    /// A transport without a channel separate from its hops returns at once. Ranks that time out
    /// together then cannot attribute the failure to a rank beyond those that they waited for.
    fn broadcast_abort(
        &mut self,
        message: &[u8],
        listener: &mut AbortListener<'_>,
        timeout: Duration,
    );
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

    fn broadcast_abort(
        &mut self,
        message: &[u8],
        listener: &mut AbortListener<'_>,
        timeout: Duration,
    ) {
        (**self).broadcast_abort(message, listener, timeout);
    }
}

/// Receives the rank and bytes of an abort message; breaks when no further one is needed.
pub type AbortListener<'a> = dyn FnMut(usize, &[u8]) -> ControlFlow<()> + 'a;

/// Makes progress on transfers; breaks when the computation should stop.
pub type Poll<'a> = dyn FnMut() -> ControlFlow<()> + 'a;

/// The computation that overlaps a hop.
pub type Meanwhile<'a> = dyn FnMut(&mut Poll<'_>) + 'a;

/// Transfers that progress concurrently.
#[derive(Debug)]
pub struct Hop<'a> {
    /// Messages to other ranks, at most one per rank.
    pub sends: &'a mut [Outgoing],
    /// Messages from other ranks, at most one per rank, with the lengths that are sent.
    pub receives: &'a mut [Incoming],
    /// How long to wait after the computation.
    pub timeout: Duration,
}

/// A message to another rank.
#[derive(Debug, Clone, Default)]
pub struct Outgoing {
    /// The receiving rank.
    pub to: usize,
    /// The contents.
    pub bytes: Buffer,
}

/// A message from another rank.
#[derive(Debug, Clone, Default)]
pub struct Incoming {
    /// The sending rank.
    pub from: usize,
    /// The receive buffer, with the expected length.
    pub bytes: Buffer,
}

/// Why a hop failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Failure {
    /// A rank is gone: its process ended, or its connection broke.
    Gone {
        /// The rank, where the engine knows it.
        rank: Option<usize>,
        /// The engine's message.
        message: String,
    },
    /// The timeout elapsed.
    Timeout {
        /// Ranks whose messages have not arrived.
        from: Vec<usize>,
        /// Ranks that have not received their messages.
        to: Vec<usize>,
        /// The time waited.
        waited: Duration,
    },
    /// A message had an unexpected length.
    Length {
        /// The sending rank.
        from: usize,
        /// Expected bytes.
        expected: usize,
        /// Received bytes.
        got: usize,
        /// The first of them, up to [`Failure::BEGINNING`].
        beginning: Vec<u8>,
    },
    /// A message exceeded the receive buffer; the engine does not report its length.
    Longer {
        /// The sending rank.
        from: usize,
        /// Expected bytes.
        expected: usize,
        /// The engine's message.
        message: String,
    },
    /// Any other error of the engine.
    Engine {
        /// The engine's message.
        message: String,
    },
}

impl Failure {
    /// Bytes that [`Failure::Length`] keeps of a message: those of a header.
    pub const BEGINNING: usize = 64;

    /// The first rank involved, if any.
    pub fn rank(&self) -> Option<usize> {
        self.ranks().next()
    }

    /// All ranks involved.
    pub fn ranks(&self) -> impl Iterator<Item = usize> {
        let (from, to, one): (&[usize], &[usize], _) = match self {
            Failure::Gone { rank, .. } => (&[], &[], *rank),
            Failure::Timeout { from, to, .. } => (from, to, None),
            Failure::Length { from, .. } | Failure::Longer { from, .. } => (&[], &[], Some(*from)),
            Failure::Engine { .. } => (&[], &[], None),
        };
        one.into_iter().chain(from.iter().chain(to).copied())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Gone { rank: Some(rank), message } => {
                write!(f, "rank {rank} is gone: {message}")
            }
            Failure::Gone { rank: None, message } => write!(f, "a rank is gone: {message}"),
            Failure::Timeout { from, to, waited } => {
                write!(f, "timed out after {:.1} s:", waited.as_secs_f64())?;
                if !from.is_empty() {
                    write!(f, " no message from ranks {from:?}")?;
                }
                if !to.is_empty() {
                    let and = if from.is_empty() { "" } else { " and" };
                    write!(f, "{and} messages to ranks {to:?} not received")?;
                }
                Ok(())
            }
            Failure::Length { from, expected, got, .. } => {
                write!(f, "rank {from} sent {got} bytes, expected {expected}")
            }
            Failure::Longer { from, expected, message } => {
                write!(f, "rank {from} sent more than the {expected} bytes expected: {message}")
            }
            Failure::Engine { message } => write!(f, "the message engine failed: {message}"),
        }
    }
}

impl std::error::Error for Failure {}
