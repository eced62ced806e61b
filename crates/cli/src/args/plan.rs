//! Arguments of `longspan plan`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Branches, Map, Tensors, WireFormat, at_least_one, tokens};

const EXAMPLES: &str = "\
The schedule is the one that a ring follows, derived by this process for the simulated ranks: all of
them up to 64, else a sample that includes the one with the most work. Times are a model: FLOPs divided
by the machine's rate; a latency per message, and message bytes divided by the link's bandwidth; a hop as
long as the longer of the two.

Machines:
  this            as measured by `longspan plan --calibrate`
  a100 h100 b200  nodes of 8 GPUs, published figures; Longspan has no measurements on them
  FILE            a description that --calibrate wrote, or one like it

Examples:
  Measure this machine, once
    longspan plan --calibrate

  Measure it for four ranks of one thread that share it
    longspan plan --calibrate --threads 1 --per-node 4

  A million tokens over four processes on a 1 Gbit/s link
    longspan plan causal --tokens 1M --ranks 4 --gbits 1 --latency-us 50

  A hundred million tokens over 64 H100 nodes, with a timeline of the ranks
    longspan plan \"causal & (window(4096, 0) | sinks(64))\" --tokens 100M --ranks 512 \\
        --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --machine h100 --plot timeline.svg

  LongNet's branches over 1,024 ranks
    longspan plan causal --branches 2k:1,8k:4,32k:16,128k:64 --tokens 256M --ranks 1024 --network 100

  The longest sequence for eight ranks of 80 GiB
    longspan plan causal --memory 80G --ranks 8 --machine h100

  As JSON
    longspan plan causal --tokens 10M --ranks 64 --machine h100 --json

`longspan inspect --help` explains patterns.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
#[command(after_help = "`--help` (instead of `-h`) describes the model, with examples.")]
pub(crate) struct Plan {
    /// The pattern, or @FILE to read it from a file
    #[arg(required_unless_present = "calibrate", conflicts_with = "calibrate")]
    pub(crate) pattern: Option<String>,

    /// Tokens of the sequence: 8192, 8_192, 64k (× 1,024), 1M (× 1,024²), 1G (× 1,024³)
    #[arg(long, short = 'n', value_name = "N", value_parser = tokens)]
    #[arg(required_unless_present_any = ["calibrate", "memory"], conflicts_with = "calibrate")]
    pub(crate) tokens: Option<usize>,

    /// Memory per rank, such as 80G, in place of --tokens: plans the longest sequence that fits, to
    /// one percent
    #[arg(long, value_name = "BYTES", value_parser = tokens, conflicts_with_all = ["tokens", "calibrate"])]
    pub(crate) memory: Option<usize>,

    /// Number of ranks
    #[arg(long, short = 'r', value_name = "N", value_parser = at_least_one)]
    #[arg(required_unless_present = "calibrate", conflicts_with = "calibrate")]
    pub(crate) ranks: Option<NonZeroUsize>,

    #[command(flatten)]
    pub(crate) branches: Branches,

    #[command(flatten)]
    pub(crate) tensors: Tensors,

    #[command(flatten)]
    pub(crate) wire: WireFormat,

    /// Head dim of the values [default: head dim]
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "calibrate")]
    pub(crate) value_dim: Option<NonZeroUsize>,

    /// Number of sequences
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    #[arg(conflicts_with = "calibrate")]
    pub(crate) batch: NonZeroUsize,

    /// Sharding of the tokens
    #[arg(long, value_name = "MAP", default_value = "balanced", conflicts_with = "calibrate")]
    pub(crate) shards: Map,

    /// Edges of shards are multiples of this many tokens
    #[arg(long, value_name = "N", default_value = "64", value_parser = tokens)]
    #[arg(conflicts_with = "calibrate")]
    pub(crate) grain: usize,

    /// this, a100, h100, b200, or a FILE
    #[arg(long, value_name = "MACHINE", default_value = "this", conflicts_with = "calibrate")]
    pub(crate) machine: String,

    /// Network between nodes, per rank [default: 400 where the machine has none]
    #[arg(long, value_name = "GBIT/S", conflicts_with = "calibrate")]
    pub(crate) network: Option<Network>,

    /// Bandwidth between nodes, Gbit/s per rank and direction
    #[arg(long, value_name = "X", value_parser = positive, conflicts_with = "calibrate")]
    pub(crate) gbits: Option<f64>,

    /// Latency between nodes, in microseconds
    #[arg(long, value_name = "X", value_parser = positive, conflicts_with = "calibrate")]
    pub(crate) latency_us: Option<f64>,

    /// Ranks per node, which don't use the network among themselves [default: the machine's]; with
    /// --calibrate the number of ranks that compute concurrently [default: 1]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) per_node: Option<NonZeroUsize>,

    /// Ranks to simulate [default: all up to 64, else 8]
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "calibrate")]
    pub(crate) sample: Option<NonZeroUsize>,

    /// Print one JSON object and nothing else
    #[arg(long)]
    pub(crate) json: bool,

    /// Draw the timeline of some ranks into a .svg or .png file
    #[arg(long, value_name = "FILE", conflicts_with = "calibrate")]
    pub(crate) plot: Option<PathBuf>,

    /// Measure this machine, and store the result for `--machine this`
    #[arg(long, conflicts_with_all = ["heads", "kv_heads", "dtype"])]
    pub(crate) calibrate: bool,

    /// Threads per rank to measure with [default: LONGSPAN_THREADS, or all]
    #[arg(long, value_name = "N", value_parser = at_least_one, requires = "calibrate")]
    pub(crate) threads: Option<NonZeroUsize>,

    /// File to write the measurements to [default: machine.json in the user's cache of longspan]
    #[arg(long, value_name = "FILE", requires = "calibrate")]
    pub(crate) out: Option<PathBuf>,
}

/// A network with published figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Network {
    /// 10 Gbit/s
    #[value(name = "10")]
    Ten,
    /// 100 Gbit/s
    #[value(name = "100")]
    Hundred,
    /// 400 Gbit/s
    #[value(name = "400")]
    FourHundred,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a number above 0".into()),
    }
}
