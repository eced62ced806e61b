//! Attention over one sequence that is sharded over ranks: context parallel, on CPUs.
//!
//! # Crate layout
//!
//! A pipeline; each module imports only those below it in this table.
//!
//! | module | contents |
//! |---|---|
//! | `ring` | public API: setup and passes of one rank |
//! | `rank_schedule` | the schedule of one rank as data, for engines of one's own |
//! | `planner` | communication plan of any rank, computed without messages |
//! | `pass` | the hop loop, forward and backward |
//! | `agreement`, `layouts`, `arguments` | setup between ranks; layouts per hop; validation |
//! | `schedule` | which messages a rank sends and receives, in which step |
//! | `send_plan` | how keys reach the ranks that need them: directly or by a broadcast tree |
//! | `demand` | which remote keys a rank needs |
//! | `problem`, `options` | what all ranks compute; options of one rank |
//! | `shards`, `load` | which tokens each rank holds; how much there is to compute |
//! | `sparsity` | what queries attend to; bands of key heads that share a demand |
//! | `communicator`, `attribution`, `message` | collectives; failure attribution; headers and checksums |
//! | `wire`, `bytes`, `tokens` | encodings of keys and values, and of token lists; sets of tokens |
//! | `error`, `transport`, `phase`, `buffer` | errors; the transport interface and its implementations |

#![deny(unsafe_code)]

mod agreement;
mod arguments;
mod attribution;
mod buffer;
mod bytes;
mod communicator;
mod demand;
mod error;
mod layouts;
mod load;
mod message;
mod options;
mod pass;
mod phase;
mod planner;
mod problem;
mod rank_schedule;
mod ring;
mod schedule;
mod send_plan;
mod shards;
mod sparsity;
mod tokens;
mod transport;
mod wire;

pub use buffer::Buffer;
pub use error::{Error, Result};
pub use layouts::KeyChunk;
pub use load::Work;
pub use options::Options;
pub use pass::Tally;
pub use planner::{CommunicationPlan, CommunicationPlanner, PlannedHop};
pub use problem::{Problem, Reduction};
pub use rank_schedule::{RankSchedule, ReceivedKeys, RemoteQueries, SentRows};
pub use ring::Ring;
pub use schedule::{Leg, Message, Part, Payload, Step};
pub use shards::Shards;
pub use sparsity::Sparsity;
#[cfg(feature = "mpi")]
pub use transport::Mpi;
pub use transport::{
    AbortListener, Failure, Hop, Incoming, Local, Meanwhile, Outgoing, Poll, Transport,
};
pub use wire::Wire;
