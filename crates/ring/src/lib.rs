//! Attention over one sequence that many ranks hold.
//!
//! # Crate layout
//!
//! | module | what it has |
//! |---|---|
//! | `shards` | which tokens each rank holds |
//! | `problem`, `ring` | what all ranks compute; what a caller writes |
//! | `want`, `deal`, `schedule` | who needs what of whom; how it gets there; in which step |
//! | `load`, `outline` | how much there is to compute; what any rank would do, without messages |
//! | `pass`, `wire` | the one loop, forward and backward; how keys and values travel |
//! | `transport` | what a ring needs of a message engine, and the engines |
//! | `link`, `message`, `blame` | hops with headers; headers and checksums; whose fault it is |
//! | `tokens`, `bytes`, `buffer`, `error` | some of a rank's tokens; lists and messages as bytes; what can go wrong |

#![deny(unsafe_code)]

mod blame;
mod buffer;
mod bytes;
mod deal;
mod error;
mod link;
mod load;
mod message;
mod outline;
mod pass;
mod problem;
mod ring;
mod schedule;
mod shards;
mod tokens;
mod transport;
mod want;
mod wire;

pub use buffer::Buffer;
pub use error::{Error, Result};
pub use load::Work;
pub use outline::{Outline, Outlines, Stage};
pub use pass::Tally;
pub use problem::{Fold, Problem};
pub use ring::{Options, Ring};
pub use shards::Shards;
#[cfg(feature = "mpi")]
pub use transport::Mpi;
pub use transport::{Failure, Hear, Hop, Incoming, Local, Meanwhile, Outgoing, Poll, Transport};
pub use wire::Wire;
