use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use longspan::Isa;

use super::{Block, Pictures, at_least_one, tokens};

const SELECT: &str = "\
FILE is a safetensors file with queries and keys of f32, bf16 or f16 and the axes
[batch, heads, tokens, dim] or [heads, tokens, dim]; key heads divide query heads. In Python:

    safetensors.torch.save_file({\"q\": q.contiguous(), \"k\": k.contiguous()}, \"qk.safetensors\")

For every row of query blocks, the key blocks of the base pattern with the largest estimated attention
mass are kept until their sum reaches --mass, or the next has less than --block-mass. What attention over
them keeps of the true mass is measured on sampled queries, by attention over the whole base pattern.

Examples:
  How much of causal attention is enough for 95 % of its mass
    longspan select qk.safetensors

  Sinks and the neighborhood always, at most 64 blocks per row, a picture of head 3
    longspan select qk.safetensors --always \"window(64, 0) | sinks(1)\" --max-blocks 64 \\
        --head 3 --png head3.png";

#[derive(Debug, Args)]
#[command(after_long_help = SELECT)]
pub(crate) struct Select {
    /// A safetensors file with queries and keys
    pub(crate) file: PathBuf,

    /// The name of the queries in the file
    #[arg(long, value_name = "NAME", default_value = "q")]
    pub(crate) query: String,

    /// The name of the keys in the file
    #[arg(long, value_name = "NAME", default_value = "k")]
    pub(crate) key: String,

    /// The pattern whose blocks are chosen from, or @FILE to read it from a file
    #[arg(long, value_name = "PATTERN", default_value = "causal")]
    pub(crate) base: String,

    /// Blocks with a pair of this pattern are always kept
    #[arg(long, value_name = "PATTERN")]
    pub(crate) always: Option<String>,

    /// The share of a row's estimated mass to keep, above 0 and up to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.95)]
    pub(crate) mass: f32,

    /// The least share of a row's estimated mass that a block is kept for
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) block_mass: f32,

    /// The least number of blocks per row
    #[arg(long, value_name = "N", default_value = "1", value_parser = tokens)]
    pub(crate) min_blocks: usize,

    /// The largest number of blocks per row [default: no limit]
    #[arg(long, value_name = "N", value_parser = tokens)]
    pub(crate) max_blocks: Option<usize>,

    /// One choice for all query heads that share keys
    #[arg(long)]
    pub(crate) per_key_head: bool,

    #[command(flatten)]
    pub(crate) block: Block,

    /// The factor of scores [default: 1 / sqrt(dim)]
    #[arg(long, value_name = "X")]
    pub(crate) scale: Option<f32>,

    /// Threads [default: LONGSPAN_THREADS, or as many as this process may use]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<NonZeroUsize>,

    /// Instruction set [default: LONGSPAN_ISA, or the fastest]
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<Isa>,

    /// The batch entry to draw, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) entry: usize,

    /// Print one JSON object and nothing else
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) pictures: Pictures,
}
