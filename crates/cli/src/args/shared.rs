//! Options that several subcommands share: the same spelling and the same defaults everywhere.

use std::path::PathBuf;

use clap::Args;
use longspan::{ElementType, Heads};

use super::{heads, tokens};

/// Query heads where neither `--heads` nor the pattern determines how many.
const HEADS: usize = 8;

// No doc comments on these structs: clap would make them the help of the subcommand.

#[derive(Debug, Args)]
pub(crate) struct Input {
    /// The pattern, or @FILE to read it from a file
    pub(crate) pattern: String,

    /// Tokens of the sequence: 8192, 8_192, 64k (× 1,024), 1M (× 1,024²), 1G (× 1,024³)
    #[arg(long, short = 'n', value_name = "N", value_parser = tokens)]
    pub(crate) tokens: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Block {
    /// Tokens per block, 16 to 256
    #[arg(long, short = 'b', value_name = "N", default_value = "64", value_parser = tokens)]
    pub(crate) block: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Pictures {
    /// Draw only this head, counted from 0
    #[arg(long, value_name = "H")]
    pub(crate) head: Option<usize>,

    /// Omit the picture
    #[arg(long)]
    pub(crate) no_picture: bool,

    /// Draw the layout into a PNG file
    #[arg(long, value_name = "FILE")]
    pub(crate) png: Option<PathBuf>,

    /// Draw the layout into an SVG file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct HeadDim {
    /// Elements per head and token
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) head_dim: u32,
}

#[derive(Debug, Args)]
pub(crate) struct Tensors {
    /// Query heads [default: 8, or as many as heads([...]) has patterns]
    #[arg(long, value_name = "N", value_parser = heads)]
    heads: Option<usize>,

    /// Heads of keys and values, a divisor of the query heads [default: as many]
    #[arg(long, value_name = "N", value_parser = heads)]
    kv_heads: Option<usize>,

    #[command(flatten)]
    head_dim: HeadDim,

    /// Element type of the tensors: f32, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value_t = ElementType::F32)]
    pub(crate) dtype: ElementType,
}

impl Tensors {
    /// Query heads, and heads of keys and values.
    pub(crate) fn heads(&self, patterns: &Heads) -> (usize, usize) {
        let heads = self.heads.or(patterns.count()).unwrap_or(HEADS);
        (heads, self.kv_heads.unwrap_or(heads))
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.head_dim.head_dim as usize
    }
}
