//! What can be typed after `longspan bench`.

use std::num::NonZeroUsize;

use clap::{Args, ValueEnum};
use longspan::{ElementType, Isa, Order};

use super::{at_least_one, heads, tokens};

const EXAMPLES: &str = "\
FLOPs count the pairs that the pattern lets through: 4 a pair and dim forward, 10 backward. The FMA
peak is what multiply-add instructions on registers alone reach, with the same threads, measured
between the calls; where AMX multiplies (bf16 with amx) its peak on registers is too. Peak memory is
by how much this process grew, beside what the tensors take; gradients of bf16 and f16 are summed in
f32, which takes twice their memory on top.

Examples:
  Both passes at 16,384 tokens
    longspan bench causal --tokens 16k

  A million tokens
    longspan bench \"causal & (window(1024, 0) | sinks(64))\" --tokens 1M --heads 4

  Decoding: one query against a million keys, four query heads on each key head
    longspan bench causal --tokens 1M --queries 1 --kv-heads 2 --pass forward

  bf16, and the same without the matrix unit
    longspan bench causal --tokens 16k --dtype bf16
    longspan bench causal --tokens 16k --dtype bf16 --isa avx512

  One instruction set, one thread, for a program
    longspan bench full --tokens 4k --isa avx2 --threads 1 --json

`longspan inspect --help` explains patterns.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
#[command(after_help = "`--help` (instead of `-h`) says what is measured, and has examples.")]
pub(crate) struct Bench {
    /// The pattern, or @FILE to read it from a file
    pub(crate) pattern: String,

    /// How many queries and how many keys: 8192, 8_192, 64k (× 1,024), 1M (× 1,024²)
    #[arg(long, short = 'n', value_name = "N", value_parser = tokens)]
    pub(crate) tokens: u64,

    /// Another number of queries: with fewer than keys, they are the last positions
    #[arg(long, value_name = "N", value_parser = tokens, conflicts_with = "keys")]
    pub(crate) queries: Option<u64>,

    /// Another number of keys
    #[arg(long, value_name = "N", value_parser = tokens)]
    pub(crate) keys: Option<u64>,

    /// Query heads [default: 8, or as many as heads([...]) has patterns]
    #[arg(long, value_name = "N", value_parser = heads)]
    pub(crate) heads: Option<usize>,

    /// Heads of keys and values; query heads are a multiple of it [default: as many]
    #[arg(long, value_name = "N", value_parser = heads)]
    pub(crate) kv_heads: Option<usize>,

    /// Numbers that one head holds for a token
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) head_dim: u32,

    /// The same for values [default: head dim]
    #[arg(long, value_name = "N")]
    pub(crate) value_dim: Option<u32>,

    /// What tensors hold: f32, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value_t = ElementType::F32)]
    pub(crate) dtype: ElementType,

    /// Sequences
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    pub(crate) batch: NonZeroUsize,

    /// What to time
    #[arg(long, value_name = "PASS", default_value = "both")]
    pub(crate) pass: Pass,

    /// Threads [default: LONGSPAN_THREADS, or as many as this process may use]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<NonZeroUsize>,

    /// portable, neon, avx2, avx512 or amx [default: LONGSPAN_ISA, or the fastest there is]
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<Isa>,

    /// Tokens a block, 16 to 256
    #[arg(long, short = 'b', value_name = "N", default_value = "64", value_parser = tokens)]
    pub(crate) block: u64,

    /// Order of the tensors' axes in memory
    #[arg(long, value_name = "ORDER", default_value = "bhtd")]
    pub(crate) order: Axes,

    /// Calls a pass [default: two seconds of them, 3 to 100; one that takes ten is enough]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) repeat: Option<NonZeroUsize>,

    /// Print JSON and nothing else: one object a pass, a line each
    #[arg(long)]
    pub(crate) json: bool,
}

/// What to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Pass {
    Forward,
    Backward,
    Both,
}

/// The order of axes in memory, outermost first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Axes {
    /// [batch, head, token, dim], as PyTorch's SDPA
    Bhtd,
    /// [batch, token, head, dim], as flash-attn and candle
    Bthd,
}

impl From<Axes> for Order {
    fn from(axes: Axes) -> Order {
        match axes {
            Axes::Bhtd => Order::BatchHeadTokenDim,
            Axes::Bthd => Order::BatchTokenHeadDim,
        }
    }
}
