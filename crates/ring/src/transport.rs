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
    ///
    /// A rank that has given up sends less than is awaited from it. An engine that notices fails
    /// with [`Failure::Length`]; one that can't fills the beginning of the buffer.
    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure>;

    /// Tells every other rank the same few bytes, and `hear` what others tell, each as it comes,
    /// until `hear` breaks or `patience` is over. This is called once, by ranks for which a hop has
    /// failed: messages of hops may be left behind, and what is told here must not be taken for one
    /// of them. Nobody may be there to listen.
    ///
    /// An engine that has no way beside its hops returns at once; ranks that time out together then
    /// blame each other for one that nobody hears of.
    fn farewell(&mut self, told: &[u8], hear: &mut Hear<'_>, patience: Duration);
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

    fn farewell(&mut self, told: &[u8], hear: &mut Hear<'_>, patience: Duration) {
        (**self).farewell(told, hear, patience);
    }
}

/// What a rank says, and whether that is enough.
pub type Hear<'a> = dyn FnMut(usize, &[u8]) -> ControlFlow<()> + 'a;

/// Moves messages on, and tells whether computing on is in vain.
pub type Poll<'a> = dyn FnMut() -> ControlFlow<()> + 'a;

/// What is computed while messages travel.
pub type Meanwhile<'a> = dyn FnMut(&mut Poll<'_>) + 'a;

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
        /// The first of them, up to [`Failure::BEGINNING`].
        beginning: Vec<u8>,
    },
    /// A message was longer than there is room for, by how much the engine doesn't know.
    Longer {
        /// Who sent it.
        from: usize,
        /// Bytes that were expected.
        expected: usize,
        /// What the engine says.
        message: String,
    },
    /// The engine failed in another way.
    Engine {
        /// What it says.
        message: String,
    },
}

impl Failure {
    /// As many bytes of a message with another length are looked at.
    pub const BEGINNING: usize = crate::message::HEADER;

    /// The rank that it is about, where there is one; the first of several.
    pub fn rank(&self) -> Option<usize> {
        self.ranks().next()
    }

    /// All ranks that it is about.
    pub fn ranks(&self) -> impl Iterator<Item = usize> {
        let (from, to, one): (&[usize], &[usize], _) = match self {
            Failure::Gone { rank, .. } => (&[], &[], *rank),
            Failure::Late { from, to, .. } => (from, to, None),
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
