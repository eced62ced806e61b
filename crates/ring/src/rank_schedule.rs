//! The schedule of one rank as data, for engines that compute and send messages themselves: on devices
//! whose tensors [`Ring`](crate::Ring) would have to copy through the host.
//!
//! It is the schedule that a ring executes, with the layouts of each computation and without kernels.
//! An engine executes the steps in order, as the ring does:
//!
//! ```text
//! due = []
//! for step in steps:
//!     start sends and receives of step     results for a message are computed before they are sent
//!     compute due                          meanwhile
//!     wait for the messages
//!     due = step.work
//! compute due
//! ```

use std::ops::Range;
use std::time::Duration;

use longspan::{BlockSize, Components, Dims, Positions};

use crate::agreement;
use crate::communicator::Communicator;
use crate::error::Result;
use crate::layouts::{Computations, KeyChunk};
use crate::pass::DONE;
use crate::phase::{END, Phase};
use crate::problem::Problem;
use crate::schedule::{Schedule, Step};
use crate::sparsity::Band;
use crate::transport::Transport;

/// What one rank of a ring sends, receives and computes in both passes.
///
/// ```
/// use std::time::Duration;
///
/// use longspan::{BlockSize, Pattern};
/// use longspan_ring::{Leg, Local, Payload, Problem, RankSchedule, Shards};
///
/// let window: Pattern = "causal & window(20, 0)".parse()?;
/// let shards = Shards::contiguous(1_000, 2, 1)?;
/// std::thread::scope(|scope| {
///     for mut transport in Local::ranks(2) {
///         let problem = Problem::new(window.clone(), shards.clone()).dims(8, 8);
///         scope.spawn(move || {
///             let timeout = Duration::from_secs(10);
///             let block = BlockSize::new(128).unwrap();
///             let schedule = RankSchedule::new(&mut transport, problem, block, timeout).unwrap();
///             // Rank 1 needs 20 keys and values of rank 0, and returns their gradients.
///             let needed = 20 * (8 + 8) * 4;
///             assert_eq!(schedule.bytes_needed().0, [0, needed][schedule.rank()]);
///             let mut received = schedule.forward().iter().flat_map(|step| &step.receives);
///             if let Some(message) = received.next() {
///                 let part = message.parts[0];
///                 assert_eq!((part.payload, part.leg), (Payload::ReceivedKeys(0), Leg::Outbound));
///                 assert_eq!(schedule.received_keys().next().unwrap().tokens, 20);
///             }
///         });
///     }
/// });
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RankSchedule {
    rank: usize,
    problem: Problem,
    schedule: Schedule,
    computations: Computations,
}

/// Rows of this rank's tensors that are sent: some heads and tokens of every batch entry.
#[derive(Debug, Clone, Copy)]
pub struct SentRows<'a> {
    /// Key heads of keys, query heads of queries; ascending.
    pub heads: &'a [usize],
    /// Tokens, by index in the shard.
    pub tokens: &'a Positions,
}

/// Attention over keys and values of another rank. Their tensors have all tokens that were received,
/// and the key heads that were sent.
#[derive(Debug, Clone, Copy)]
pub struct ReceivedKeys<'a> {
    /// The key heads, ascending.
    pub key_heads: &'a [usize],
    /// Number of received tokens.
    pub tokens: usize,
    /// The local queries that attend to them, by index in the shard; all where `None`. The query
    /// tensor has only those tokens, and all heads.
    pub queries: Option<&'a Positions>,
    /// The calls.
    pub chunks: &'a [KeyChunk],
    /// Ranks that they are forwarded to.
    pub children: usize,
}

/// Attention of another rank's queries over all local keys. The query tensor has the tokens that were
/// received, and all heads; calls are over the heads that were sent.
#[derive(Debug, Clone, Copy)]
pub struct RemoteQueries<'a> {
    /// The query heads, ascending.
    pub heads: &'a [usize],
    /// Number of received tokens.
    pub tokens: usize,
    /// The calls.
    pub components: &'a Components,
}

impl RankSchedule {
    /// Checks that all ranks have equal problems, and makes this rank's schedule, with layouts of
    /// blocks of a size. A collective call; `timeout` is that of [`Options`](crate::Options).
    pub fn new<T: Transport>(
        transport: &mut T,
        problem: Problem,
        block: BlockSize,
        timeout: Duration,
    ) -> Result<Self> {
        let mut comm = Communicator::new(transport, Phase::Setup, 0, timeout);
        Self::agree(&mut comm, problem, block).map_err(|error| comm.abort(error, 0, []))
    }

    fn agree(comm: &mut Communicator<'_>, problem: Problem, block: BlockSize) -> Result<Self> {
        let schedule = agreement::schedule(comm, &problem)?;
        let rank = comm.rank();
        let computations = comm
            .compute(0, |poll| Computations::new(rank, &problem, &schedule, Some(block), poll))?;
        comm.allgather(END, DONE, "the end of setup")?;
        Ok(RankSchedule { rank, problem, schedule, computations })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Steps of the forward pass, in order.
    pub fn forward(&self) -> &[Step] {
        &self.schedule.forward
    }

    /// Steps of the backward pass, in order.
    pub fn backward(&self) -> &[Step] {
        &self.schedule.backward
    }

    /// Bytes that this rank receives in a forward and in a backward pass: see
    /// [`Ring::bytes_needed`](crate::Ring::bytes_needed).
    pub fn bytes_needed(&self) -> (u64, u64) {
        self.schedule.bytes_needed()
    }

    /// Ranges of local keys, by index in the shard, and the calls of all local queries over them.
    pub fn local_keys(&self) -> impl Iterator<Item = (Range<usize>, &[KeyChunk])> {
        let ranges = self.schedule.local_keys.iter().cloned();
        ranges.zip(self.computations.local_keys.iter().map(Vec::as_slice))
    }

    /// Keys and values that are sent.
    pub fn sent_keys(&self) -> impl Iterator<Item = SentRows<'_>> {
        let rows = self.schedule.sent_keys.iter();
        rows.map(|sent| SentRows { heads: &self.band(sent.band).key_heads, tokens: &sent.tokens })
    }

    /// Keys and values that are received.
    pub fn received_keys(&self) -> impl Iterator<Item = ReceivedKeys<'_>> {
        let keys = self.schedule.received_keys.iter().zip(&self.computations.received_keys);
        keys.map(|(keys, chunks)| ReceivedKeys {
            key_heads: &self.band(keys.band).key_heads,
            tokens: keys.positions.len(),
            queries: keys.queries.as_ref(),
            chunks,
            children: keys.children,
        })
    }

    /// Queries that are sent to the keys of another rank.
    pub fn sent_queries(&self) -> impl Iterator<Item = SentRows<'_>> {
        let rows = self.schedule.sent_queries.iter();
        rows.map(|sent| SentRows { heads: &self.band(sent.band).heads, tokens: &sent.queries })
    }

    /// Queries of other ranks.
    pub fn remote_queries(&self) -> impl Iterator<Item = RemoteQueries<'_>> {
        let queries = self.schedule.remote_queries.iter().zip(&self.computations.remote_queries);
        queries.map(|(queries, components)| RemoteQueries {
            heads: &self.band(queries.band).heads,
            tokens: queries.positions.len(),
            components,
        })
    }

    /// Whether a row is padding, whose log-sum-exp is −∞ whatever its sinks: per batch entry, then per
    /// token of the shard. `None` where there is no padding.
    pub fn excluded_rows(&self) -> Result<Option<Vec<bool>>> {
        let held = self.problem.shards.rank(self.rank);
        let dims = Dims { batch: self.problem.batch, tokens: held.len(), heads: 1, dim: 1 };
        let mut lse = vec![0.0; dims.batch * dims.tokens];
        self.problem.sparsity.exclude(held, dims, &mut lse, None)?;
        let excluded: Vec<_> = lse.iter().map(|lse| *lse < 0.0).collect();
        Ok(excluded.contains(&true).then_some(excluded))
    }

    fn band(&self, index: usize) -> &Band {
        &self.schedule.bands[index]
    }
}
