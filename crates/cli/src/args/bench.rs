//! Arguments of `longspan bench`.

use std::num::NonZeroUsize;

use clap::{Args, ValueEnum};
use longspan::{Isa, Order, Precision};

use super::{Block, Input, Tensors, at_least_one, tokens};

const EXAMPLES: &str = "\
FLOPs count active pairs only: 4 per pair and dim forward, 10 backward. The FMA peak is the rate of
multiply-add instructions on registers with the same threads, measured between the calls; where AMX
computes the products (bf16 with amx), its peak on registers is measured too. The instruction set
reported is that of the kernels used for the dtype. Peak memory is the growth of this process, beside
the size of the tensors; gradients of bf16 and f16 are accumulated in f32, which takes twice their
memory in addition.

Examples:
  Both passes at 16,384 tokens
    longspan bench causal --tokens 16k

  A million tokens
    longspan bench \"causal & (window(1024, 0) | sinks(64))\" --tokens 1M --heads 4

  Decoding: one query against a million keys, four query heads per KV head
    longspan bench causal --tokens 1M --queries 1 --kv-heads 2 --pass forward

  bf16, and the same without the matrix unit
    longspan bench causal --tokens 16k --dtype bf16
    longspan bench causal --tokens 16k --dtype bf16 --isa avx512

  One instruction set, one thread, as JSON
    longspan bench full --tokens 4k --isa avx2 --threads 1 --json

`longspan inspect --help` explains patterns.";

#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
#[command(after_help = "`--help` (instead of `-h`) describes the measurements, with examples.")]
pub(crate) struct Bench {
    #[command(flatten)]
    pub(crate) input: Input,

    /// Number of queries, at the last positions where there are more keys [default: tokens]
    #[arg(long, value_name = "N", value_parser = tokens, conflicts_with = "keys")]
    pub(crate) queries: Option<usize>,

    /// Number of keys [default: tokens]
    #[arg(long, value_name = "N", value_parser = tokens)]
    pub(crate) keys: Option<usize>,

    #[command(flatten)]
    pub(crate) tensors: Tensors,

    /// Head dim of the values [default: head dim]
    #[arg(long, value_name = "N")]
    pub(crate) value_dim: Option<u32>,

    /// Number of sequences
    #[arg(long, value_name = "N", default_value = "1", value_parser = at_least_one)]
    pub(crate) batch: NonZeroUsize,

    /// Passes to time
    #[arg(long, value_name = "PASS", default_value = "both")]
    pub(crate) pass: Pass,

    /// Threads [default: LONGSPAN_THREADS, or as many as this process may use]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) threads: Option<NonZeroUsize>,

    /// portable, neon, avx2, avx512 or amx [default: LONGSPAN_ISA, or the fastest available]
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<Isa>,

    /// highest, high (f32 products as three of bf16 on matrix units) or widened (f32 products of bf16)
    #[arg(long, value_name = "PRECISION", default_value = "highest")]
    pub(crate) precision: Precision,

    #[command(flatten)]
    pub(crate) block: Block,

    /// Order of the tensors' axes in memory
    #[arg(long, value_name = "ORDER", default_value = "bhtd")]
    pub(crate) order: Axes,

    /// Calls per pass [default: 3 to 100 within two seconds; one if it takes ten]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) repeat: Option<NonZeroUsize>,

    /// Print JSON and nothing else: one object per pass and line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Passes to time.
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
            Axes::Bhtd => Order::Bhsd,
            Axes::Bthd => Order::Bshd,
        }
    }
}
