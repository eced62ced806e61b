//! What can be typed after `longspan ring`.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::{Args, ValueEnum};
use longspan::ElementType;

use super::{Map, at_least_one, heads, tokens};

const EXAMPLES: &str = "\
Every rank makes the numbers of its own tokens, which depend on their positions alone, and computes
forward and backward with the others; rank 0 prints the report. Ranks are processes of MPI where
this command was built with it (`--features mpi`) and --ranks isn't given, else threads.

`bytes needed` is what the pattern asks for: keys and values that a rank sees and doesn't hold, or
queries and what is made of them, and the gradients on their way back. `hidden` is the share of the
time of transfer during which ranks computed: 1 - (time waited) / (time that the same messages take
with nothing to compute). `imbalance` is the largest number of pairs that a rank computes ÷ the mean.

--check compares with one process on rank 0: every number, and how far they are from the truth by the
rule of `longspan verify`. Rank 0 then holds everything, so it is for small sizes. One process is one
rank where --fold is reproducible, whose bits the forward pass then has to have.

Examples:
  Four ranks on this machine
    mpirun -n 4 longspan ring --pattern \"causal & window(512, 0)\" --tokens 8192 --threads 1 --check

  The same without MPI
    longspan ring --ranks 4 --pattern \"causal & window(512, 0)\" --tokens 8192 --check

  Eight machines, one rank each, for a program
    mpirun -n 8 --map-by ppr:1:node longspan ring --pattern causal --tokens 1M --shards zigzag --json

`longspan inspect --help` explains patterns.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
#[command(after_help = "`--help` (instead of `-h`) says what is measured, and has examples.")]
pub(crate) struct Ring {
    /// The pattern, or @FILE to read it from a file
    #[arg(long, short = 'p')]
    pub(crate) pattern: String,

    /// Tokens of the whole sequence: 8192, 8_192, 64k (× 1,024), 1M (× 1,024²)
    #[arg(long, short = 'n', value_name = "N", value_parser = tokens)]
    pub(crate) tokens: u64,

    /// So many ranks, threads of this process
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) ranks: Option<NonZeroUsize>,

    /// Query heads [default: 8, or as many as heads([...]) has patterns]
    #[arg(long, value_name = "N", value_parser = heads)]
    pub(crate) heads: Option<usize>,

    /// Heads of keys and values; query heads are a multiple of it [default: as many]
    #[arg(long, value_name = "N", value_parser = heads)]
    pub(crate) key_heads: Option<usize>,

    /// Numbers that one head holds for a token
    #[arg(long, value_name = "N", default_value = "64", value_parser = at_least_one)]
    pub(crate) dim: NonZeroUsize,

    /// What tensors hold: f32, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value_t = ElementType::F32)]
    pub(crate) dtype: ElementType,

    /// Which tokens each rank holds
    #[arg(long, value_name = "MAP", default_value = "contiguous")]
    pub(crate) shards: Map,

    /// In which order keys are added up
    #[arg(long, value_name = "ORDER", default_value = "overlapped")]
    pub(crate) fold: FoldOrder,

    /// Threads of each rank [default: LONGSPAN_THREADS, or as many as this process may use, shared
    /// by its ranks]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<NonZeroUsize>,

    /// Seconds that a rank waits for messages while it has nothing to compute
    #[arg(long, value_name = "S", default_value = "60", value_parser = seconds)]
    pub(crate) patience: Duration,

    /// Forward and backward so often; the fastest counts
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    pub(crate) repeat: NonZeroUsize,

    /// Compare with one process
    #[arg(long)]
    pub(crate) check: bool,

    /// Print one JSON object and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

/// In which order keys are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FoldOrder {
    /// Others' keys as they come, own ones while nothing else can be worked on
    Overlapped,
    /// Ascending by tiles of 64: the forward pass has the same bits for any number of ranks
    Reproducible,
}

/// A day: a longer wait is a typing error.
const MOST_SECONDS: f64 = 86_400.0;

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= MOST_SECONDS => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!("expected seconds, above 0 and up to {MOST_SECONDS}")),
    }
}
