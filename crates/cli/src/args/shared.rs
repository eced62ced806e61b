//! Options that several subcommands share: the same spelling and the same defaults everywhere.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use longspan::{BlockSize, Dilated, ElementType, Heads, Overlap, Shape};
use longspan_ring::{Sparsity, Wire};

use super::{heads, tokens};
use crate::compile::{self, BadInput};

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
pub(crate) struct Branches {
    /// Dilated branches (LongNet), each a segment and a rate, such as 2k:1,8k:4; the pattern is then
    /// what all of them are cut with
    #[arg(long, value_name = "W:R,...", value_delimiter = ',', value_parser = branch)]
    branches: Vec<(u64, u64)>,

    /// A pattern besides the branches, as one more of them
    #[arg(long, value_name = "PATTERN", requires = "branches")]
    also: Option<String>,

    /// How branches that have the same key combine [default: weighted]
    #[arg(long, value_name = "RULE", requires = "branches")]
    overlap: Option<OverlapRule>,
}

/// How branches that have the same key combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OverlapRule {
    /// Once per branch, as the paper has it
    Weighted,
    /// Once
    Union,
}

impl Branches {
    pub(crate) fn are_given(&self) -> bool {
        !self.branches.is_empty()
    }

    /// What queries attend to: a pattern, or the branches that it cuts.
    pub(crate) fn sparsity(&self, patterns: Heads) -> anyhow::Result<Sparsity> {
        if self.branches.is_empty() {
            return Ok(patterns.into());
        }
        let one = |patterns: Heads, what: &str| match patterns {
            Heads::Same(pattern) => Ok(pattern),
            _ => Err(BadInput(format!("{what} has a pattern per head, expected one for all"))),
        };
        let overlap = match self.overlap {
            None | Some(OverlapRule::Weighted) => Overlap::Weighted,
            Some(OverlapRule::Union) => Overlap::Union,
        };
        let mut dilated = Dilated::new(self.branches.iter().copied())?
            .within(one(patterns, "what branches are cut with")?)
            .overlap(overlap);
        if let Some(also) = &self.also {
            dilated = dilated.also(one(compile::patterns(also)?, "--also")?);
        }
        Ok(dilated.into())
    }
}

fn branch(text: &str) -> Result<(u64, u64), String> {
    let rule = || "expected a segment and a rate, such as 2048:1".to_string();
    let (segment, rate) = text.split_once(':').ok_or_else(rule)?;
    let number = |text| tokens(text).map(|number| number as u64);
    Ok((number(segment)?, number(rate)?))
}

#[derive(Debug, Args)]
pub(crate) struct WireFormat {
    /// Wire format of keys and values: exact, bf16, int8, or the largest error allowed, such as 1e-3
    #[arg(long, value_name = "FORMAT", default_value = "exact", value_parser = wire)]
    pub(crate) wire: Wire,
}

fn wire(text: &str) -> Result<Wire, String> {
    match text {
        "exact" => Ok(Wire::Exact),
        "bf16" => Ok(Wire::Bf16),
        "int8" => Ok(Wire::Int8),
        bound => match bound.parse::<f32>().map(Wire::within) {
            Ok(Ok(wire)) => Ok(wire),
            _ => Err("expected exact, bf16, int8 or an error of at least 0".into()),
        },
    }
}

#[derive(Debug, Args)]
pub(crate) struct Block {
    /// Tokens per block, 16 to 256 [default: 64, more for strides above it in long sequences]
    #[arg(long, short = 'b', value_name = "N", value_parser = tokens)]
    pub(crate) block: Option<usize>,
}

impl Block {
    /// The shape with this block, if one is given.
    pub(crate) fn of(&self, shape: Shape) -> longspan_pattern::Result<Shape> {
        let Some(block) = self.block else { return Ok(shape) };
        Ok(shape.block(BlockSize::new(block as u64)?))
    }
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
