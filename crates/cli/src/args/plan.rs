//! What can be typed after `longspan plan`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use longspan::ElementType;

use super::{Map, at_least_one, heads, tokens};

const EXAMPLES: &str = "\
The schedule is the one that a ring would follow, worked out by this process for the ranks that are
simulated: all of them up to 64, else a few with the one that has most to do. Times are a model: what
is computed divided by the machine's rate, messages by the link's bandwidth, a hop as long as the
longer of the two.

Machines:
  this            as measured by `longspan plan --calibrate`
  a100 h100 b200  nodes of 8 GPUs, published figures; no GPU kernel of ours has been run on them
  FILE            a description that --calibrate wrote, or one like it

Examples:
  Measure this machine, once
    longspan plan --calibrate

  Measure it for four ranks of one thread that share it
    longspan plan --calibrate --threads 1 --per-node 4

  A million tokens over four processes on a 1 Gbit/s link
    longspan plan causal --tokens 1M --ranks 4 --gbits 1 --latency-us 50

  A hundred million tokens over 64 H100 nodes, with a picture of what ranks do when
    longspan plan \"causal & (window(4096, 0) | sinks(64))\" --tokens 100M --ranks 512 \\
        --heads 32 --kv-heads 8 --head-dim 128 --dtype bf16 --machine h100 --plot timeline.svg

  The same numbers for a program
    longspan plan causal --tokens 10M --ranks 64 --machine h100 --json

`longspan inspect --help` explains patterns.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
#[command(after_help = "`--help` (instead of `-h`) says what is modelled, and has examples.")]
pub(crate) struct Plan {
    /// The pattern, or @FILE to read it from a file
    #[arg(required_unless_present = "calibrate", conflicts_with = "calibrate")]
    pub(crate) pattern: Option<String>,

    /// How many tokens the sequence has: 8192, 64k (× 1,024), 1M (× 1,024²), 1G (× 1,024³)
    #[arg(long, short = 'n', value_name = "N", value_parser = tokens)]
    #[arg(required_unless_present = "calibrate", conflicts_with = "calibrate")]
    pub(crate) tokens: Option<u64>,

    /// How many ranks hold it
    #[arg(long, short = 'r', value_name = "N", value_parser = at_least_one)]
    #[arg(required_unless_present = "calibrate", conflicts_with = "calibrate")]
    pub(crate) ranks: Option<NonZeroUsize>,

    /// Query heads [default: 8, or as many as heads([...]) has patterns]
    #[arg(long, value_name = "N", value_parser = heads, conflicts_with = "calibrate")]
    pub(crate) heads: Option<usize>,

    /// Heads of keys and values; query heads are a multiple of it [default: as many]
    #[arg(long, value_name = "N", value_parser = heads, conflicts_with = "calibrate")]
    pub(crate) kv_heads: Option<usize>,

    /// Numbers that one head holds for a token
    #[arg(long, value_name = "N", default_value = "64", value_parser = at_least_one)]
    pub(crate) head_dim: NonZeroUsize,

    /// The same for values [default: head dim]
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "calibrate")]
    pub(crate) value_dim: Option<NonZeroUsize>,

    /// What tensors hold: f32, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value_t = ElementType::F32)]
    #[arg(conflicts_with = "calibrate")]
    pub(crate) dtype: ElementType,

    /// Sequences
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    #[arg(conflicts_with = "calibrate")]
    pub(crate) batch: NonZeroUsize,

    /// Which tokens each rank holds
    #[arg(long, value_name = "MAP", default_value = "balanced", conflicts_with = "calibrate")]
    pub(crate) shards: Map,

    /// Edges of shards are multiples of this many tokens
    #[arg(long, value_name = "N", default_value = "64", value_parser = tokens)]
    #[arg(conflicts_with = "calibrate")]
    pub(crate) grain: u64,

    /// this, a100, h100, b200, or a FILE
    #[arg(long, value_name = "MACHINE", default_value = "this", conflicts_with = "calibrate")]
    pub(crate) machine: String,

    /// The network between nodes, for each rank [default: 400 where the machine names none]
    #[arg(long, value_name = "GBIT/S", conflicts_with = "calibrate")]
    pub(crate) network: Option<Network>,

    /// Another bandwidth between nodes, Gbit/s for each rank and direction
    #[arg(long, value_name = "X", value_parser = positive, conflicts_with = "calibrate")]
    pub(crate) gbits: Option<f64>,

    /// Another latency between nodes, in microseconds
    #[arg(long, value_name = "X", value_parser = positive, conflicts_with = "calibrate")]
    pub(crate) latency_us: Option<f64>,

    /// Ranks a node, which don't use the network among themselves [default: the machine's]; with
    /// --calibrate so many that compute at once [default: 1]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) per_node: Option<NonZeroUsize>,

    /// Ranks to simulate [default: all up to 64, else 8]
    #[arg(long, value_name = "N", value_parser = at_least_one, conflicts_with = "calibrate")]
    pub(crate) sample: Option<NonZeroUsize>,

    /// Print one JSON object and nothing else
    #[arg(long)]
    pub(crate) json: bool,

    /// Draw what a few ranks do when, into a .svg or .png file
    #[arg(long, value_name = "FILE", conflicts_with = "calibrate")]
    pub(crate) plot: Option<PathBuf>,

    /// Measure this machine, and keep what was found for `--machine this`
    #[arg(long)]
    pub(crate) calibrate: bool,

    /// Threads of a rank to measure with [default: LONGSPAN_THREADS, or all that there are]
    #[arg(long, value_name = "N", value_parser = at_least_one, requires = "calibrate")]
    pub(crate) threads: Option<NonZeroUsize>,

    /// Where to write what was measured [default: machine.json in the user's cache of longspan]
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
