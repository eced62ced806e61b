//! Arguments of `longspan ring`.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{Branches, Input, Map, Tensors, WireFormat, at_least_one};

const EXAMPLES: &str = "\
Every rank generates the elements of its own tokens, which depend on their positions alone, and runs
the forward and backward passes with the other ranks; rank 0 prints the report. Ranks are MPI processes
where this command was built with MPI (`--features mpi`) and --ranks isn't given, else threads.

`bytes needed` is the demand of the pattern: remote keys and values, or remote queries and their
results, and the gradients on their way back. `hidden` is the share of the transfer time that overlaps
with computing: 1 - (time waited) / (time of the same messages with nothing to compute). `imbalance` is
the largest number of pairs per rank ÷ the mean.

--check compares every element with one process on rank 0, and their errors with the limits of
`longspan verify`. Rank 0 then holds everything, so it is for small sizes. With --fold reproducible the
one process is a ring of one rank, and the forward pass must have the same bits.

Examples:
  Four ranks on this machine
    mpirun -n 4 longspan ring \"causal & window(512, 0)\" --tokens 8192 --threads 1 --check

  The same without MPI
    longspan ring \"causal & window(512, 0)\" --ranks 4 --tokens 8192 --check

  LongNet's branches, causal, with a window besides
    longspan ring causal --branches 2k:1,8k:4 --also \"window(256, 0)\" --ranks 4 --tokens 8192

  Eight machines, one rank each, as JSON
    mpirun -n 8 --map-by ppr:1:node longspan ring causal --tokens 1M --shards zigzag --json

`longspan inspect --help` explains patterns.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
#[command(after_help = "`--help` (instead of `-h`) describes the measurements, with examples.")]
pub(crate) struct Ring {
    #[command(flatten)]
    pub(crate) input: Input,

    #[command(flatten)]
    pub(crate) branches: Branches,

    /// Number of ranks, as threads of this process
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) ranks: Option<NonZeroUsize>,

    #[command(flatten)]
    pub(crate) tensors: Tensors,

    /// Sharding of the tokens
    #[arg(long, value_name = "MAP", default_value = "contiguous")]
    pub(crate) shards: Map,

    /// Order in which keys are accumulated
    #[arg(long, value_name = "ORDER", default_value = "overlapped")]
    pub(crate) fold: FoldOrder,

    #[command(flatten)]
    pub(crate) wire: WireFormat,

    /// Threads per rank [default: LONGSPAN_THREADS, or as many as this process may use, divided by
    /// its ranks]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<NonZeroUsize>,

    /// Seconds that a rank with nothing left to compute waits for messages
    #[arg(long, value_name = "S", default_value = "60", value_parser = seconds)]
    pub(crate) timeout: Duration,

    /// Runs of forward and backward; the fastest is reported
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    pub(crate) repeat: NonZeroUsize,

    /// Compare with one process
    #[arg(long)]
    pub(crate) check: bool,

    /// Print one JSON object and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// Order in which keys are accumulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FoldOrder {
    /// Remote keys as they arrive, local keys while none have
    Overlapped,
    /// Ascending by tiles of 64: the forward pass has the same bits for any number of ranks
    Reproducible,
}

/// A day.
const MOST_SECONDS: f64 = 86_400.0;

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= MOST_SECONDS => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!("expected seconds, above 0 and up to {MOST_SECONDS}")),
    }
}
