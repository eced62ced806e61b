//! Arguments of the `longspan` command.
//!
//! Token counts may have underscores and a binary suffix: `64k` is 65,536 and `1M` is 1,048,576.
//! Rules of the library (a block size, a range of rows) are checked there.

mod bench;
mod map;
mod plan;
mod ring;
mod select;
mod shared;

use std::num::NonZeroUsize;
use std::ops::Range;

use clap::{Args, Parser, Subcommand};
use longspan::{ElementType, Isa, Precision};

pub(crate) use bench::{Bench, Pass};
pub(crate) use map::Map;
pub(crate) use plan::{Network, Plan};
pub(crate) use ring::{FoldOrder, Ring};
pub(crate) use select::Select;
pub(crate) use shared::{Block, Branches, HeadDim, Input, Pictures, Tensors, WireFormat};

/// Attention for sequences too long for attention.
#[derive(Debug, Parser)]
#[command(name = "longspan", version, arg_required_else_help = true)]
#[command(after_help = "\
Example:
  longspan inspect \"causal & (window(256, 0) | sinks(16))\" --tokens 8192

`longspan inspect --help` explains patterns and has more examples.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print statistics of a pattern at a given length, and draw it.
    Inspect(Inspect),
    /// Choose key blocks from recorded queries and keys, and measure what is dropped.
    Select(Select),
    /// Benchmark attention over a pattern, also as a share of this machine's peak.
    Bench(Bench),
    /// Run attention over a sequence sharded across ranks: MPI processes or threads.
    Ring(Ring),
    /// Compare every kernel that this CPU can run with an f64 reference.
    Verify(Verify),
    /// Report what this machine has, what Longspan would use, and why.
    Doctor(Doctor),
    /// Predict what attention over many ranks takes: memory, messages, time.
    Plan(Plan),
}

const VERIFY: &str = "\
Every case of a table is computed forward and backward, with tensors of f32, bf16 and f16, on every
instruction set of this CPU, and compared with an f64 reference. The error of a result is its root
mean square error, as a multiple of the error of rounding exact results to the tensors' dtype; the
log-sum-exp is always f32.

In f32 it is at most 12, with a margin for means over few rows, and at most that of the naive formulas
in f32. In bf16 and f16 sums are accumulated in f32 and rounded once, so the limit is little more than
1: a margin for errors of f32, for the rounded output that the backward pass reads, and with AMX for
operands that are rounded to bf16.

The summary has one line per kernel (instruction set and dtype); --verbose prints one line per check,
in which `of limit` is the largest error as a share of its limit. Failing checks (above 100 %) are
always listed, and the exit code is 1. In the JSON object the `digest` of a check is a 128-bit hash of
the bits of out, lse, dq, dk and dv: equal digests of two builds mean equal bits.";

#[derive(Debug, Args)]
#[command(after_long_help = VERIFY)]
pub(crate) struct Verify {
    /// Only the small cases
    #[arg(long)]
    pub(crate) quick: bool,

    /// Print a table with one line per check, not only the summary per kernel
    #[arg(long, short = 'v')]
    pub(crate) verbose: bool,

    /// Only this instruction set: portable, neon, avx2, avx512 or amx
    #[arg(long, value_name = "ISA")]
    pub(crate) isa: Option<Isa>,

    /// Only this element type: f32, bf16 or f16
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<ElementType>,

    /// highest, high (f32 products as three of bf16 on matrix units) or widened (f32 products of bf16)
    #[arg(long, value_name = "PRECISION", default_value = "highest")]
    pub(crate) precision: Precision,

    /// Print one JSON object and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Print one JSON object and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

const PATTERNS: &str = "\
Patterns:
  full                                every key
  causal                              key <= query
  window(left, right)                 query - left <= key <= query + right
  sliding_window(w)                   window(w - 1, 0)
  sinks(n)                            the first n keys
  global_tokens(n)                    the first n keys, and the first n queries
  keys(from, to), queries(from, to)   some keys, some queries; `to` excluded
  neighborhood([size, ...], [radius, ...])
                                      near on every axis of a grid, the last axis fastest
  dilated(segment, rate, offset)      every rate-th token inside each segment
  strided(stride)                     keys at a multiple of stride from the query
  hierarchical([(window, stride, grain), ...])
                                      fine near, coarse far
  documents([length, ...])            query and key in the same document
  packed([q length, ...], [k length, ...], pattern)
                                      many sequences in one call
  blocks_dilated(block, [rate, ...])  blocks i and i ± rate
  butterfly(block)                    blocks whose index differs in one bit
  random(block, per_row, blocks, seed)
                                      per_row random blocks per row, out of blocks
  blocks(block, [[column, first..end, ...], ...])
                                      an explicit mask of blocks, row by row
  a & b,  a | b,  !a,  (a)            and, or, not
  heads([a, b, ...])                  one pattern per query head, outermost only
  batch([a, b, ...])                  one pattern or heads([...]) per batch entry, outermost only

Examples:
  A pattern at 8,192 tokens, as numbers and as a small picture
    longspan inspect \"causal & (window(256, 0) | sinks(16))\" --tokens 8192 --block 64

  The same as JSON
    longspan inspect causal --tokens 64k --json

  A picture of a million tokens
    longspan inspect \"causal & (window(4096, 0) | sinks(64))\" --tokens 1M --png million.png

  Packed documents, their lengths in a file
    longspan inspect @documents.txt --tokens 16M

  One pattern per head: a table, and one small picture per layout
    longspan inspect \"heads([causal, causal & window(128, 0)])\" --tokens 4k --svg heads.svg

  Decoding: one query against 32,768 keys
    longspan inspect \"causal & window(1024, 0)\" --tokens 32k --queries 1

  A key cache of 4,096 slots whose first key has position 100,000
    longspan inspect \"causal & window(2048, 0)\" --tokens 4096 --queries 1 \\
        --key-offset 100000 --query-offset 104095

  Padding: only keys 100 to 999 hold tokens
    longspan inspect causal --tokens 1000 --key-padding 100..1000

  The first 16 rows of blocks of a billion tokens
    longspan inspect causal --tokens 1G --rows 0..16

A warning on standard error (`warnings` in the JSON object) reports layouts of which more than half of
the active blocks are Partial and less than 1/8 of the pairs of active blocks are active: kernels
compute whole blocks, so most of their work is masked.

The picture follows the width of the terminal (or COLUMNS). Colors are omitted where standard output is
no terminal, NO_COLOR is set or TERM is dumb.";

#[derive(Debug, Args)]
#[command(after_long_help = PATTERNS)]
#[command(after_help = "`--help` (instead of `-h`) lists the patterns, with examples.")]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) input: Input,

    /// Number of queries, the last of the tokens [default: all]
    #[arg(long, value_name = "N", value_parser = tokens)]
    pub(crate) queries: Option<usize>,

    #[command(flatten)]
    pub(crate) block: Block,

    /// Query i has position i + N [default: key offset + tokens - queries]
    #[arg(long, value_name = "N", value_parser = offset, allow_hyphen_values = true)]
    pub(crate) query_offset: Option<i64>,

    /// Key j has position j + N
    #[arg(
        long,
        value_name = "N",
        value_parser = offset,
        allow_hyphen_values = true,
        default_value = "0"
    )]
    pub(crate) key_offset: i64,

    /// Only these rows of query blocks: 0..16, or 16.. for all from the 17th on
    #[arg(long, value_name = "A..B", value_parser = span)]
    pub(crate) rows: Option<Span>,

    /// Only these keys hold tokens, the rest is padding
    #[arg(long, value_name = "A..B", value_parser = span)]
    pub(crate) key_padding: Option<Span>,

    /// Limit of the work of compilation, and of each of counting, hashing and drawing, in units of
    /// about a nanosecond
    #[arg(long, value_name = "N", default_value_t = longspan_pattern::Shape::MAX_WORK)]
    pub(crate) max_work: u64,

    #[command(flatten)]
    pub(crate) head_dim: HeadDim,

    /// Report every query head [default N: as many as heads([...]) has patterns]
    #[arg(long, value_name = "N", num_args = 0..=1, value_parser = heads)]
    pub(crate) heads: Option<Option<usize>>,

    /// Print one JSON object and nothing else
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) pictures: Pictures,
}

/// A range whose end may be open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Span {
    start: usize,
    end: Option<usize>,
}

impl Span {
    /// The range on an axis of `limit`.
    pub(crate) fn within(&self, limit: usize) -> Range<usize> {
        self.start..self.end.unwrap_or(limit)
    }
}

/// More query heads than any model has.
const MOST_HEADS: usize = 4_096;

fn heads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(heads) if (1..=MOST_HEADS).contains(&heads) => Ok(heads),
        _ => Err(format!("expected a number of heads, 1 to {MOST_HEADS}")),
    }
}

fn at_least_one(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "expected a whole number, at least 1".into())
}

fn tokens(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let plain: String = digits.chars().filter(|&c| c != '_').collect();
    if plain.is_empty() || !plain.bytes().all(|b| b.is_ascii_digit()) {
        return Err("expected a whole number such as 8192, 8_192, 64k or 1M".into());
    }
    let number = plain.parse::<usize>().ok().and_then(|number| number.checked_mul(1 << shift));
    number.ok_or_else(|| "expected less than 2^64".into())
}

fn offset(text: &str) -> Result<i64, String> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text),
    };
    let number = tokens(digits)?;
    let number = i64::try_from(number).map_err(|_| "expected less than 2^63".to_string())?;
    Ok(if negative { -number } else { number })
}

fn span(text: &str) -> Result<Span, String> {
    let Some((start, end)) = text.split_once("..") else {
        return Err("expected a range such as 0..16, ..16 or 16..".into());
    };
    let start = if start.is_empty() { 0 } else { tokens(start)? };
    let end = if end.is_empty() { None } else { Some(tokens(end)?) };
    Ok(Span { start, end })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn token_counts() {
        let cases =
            [("0", 0), ("8_192", 8_192), ("64k", 65_536), ("16M", 1 << 24), ("1g", 1 << 30)];
        for (text, number) in cases {
            assert_eq!(tokens(text), Ok(number), "{text}");
        }
        for text in
            ["", "k", "_", "-1", "+1", "1.5M", "1kk", "99999999999999999999", "17179869184G"]
        {
            assert!(tokens(text).is_err(), "{text}");
        }
    }

    #[test]
    fn offsets_and_ranges() {
        assert_eq!(offset("-64k"), Ok(-65_536));
        assert_eq!(offset("7"), Ok(7));
        assert!(offset("--7").is_err());
        assert_eq!(span("4..1k"), Ok(Span { start: 4, end: Some(1_024) }));
        assert_eq!(span("4..").map(|s| s.within(9)), Ok(4..9));
        assert_eq!(span("..").map(|s| s.within(9)), Ok(0..9));
        assert!(span("4").is_err());
    }
}
