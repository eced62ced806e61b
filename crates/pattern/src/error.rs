//! Errors of patterns, their text, shapes and layouts. Imports nothing.
//!
//! Every message has the offending value and the expected one.

mod parse;

pub use parse::ParseError;

/// A result whose error is this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of a primitive is out of range.
    #[error("{primitive}: {argument} is {value}, expected {rule}")]
    Argument {
        /// The primitive, as in pattern text.
        primitive: &'static str,
        /// The name of the argument.
        argument: &'static str,
        /// The given value.
        value: u128,
        /// The legal values.
        rule: &'static str,
    },
    /// Two lists of a `packed` pattern differ in length.
    #[error(
        "packed: {queries} query lengths and {keys} key lengths, expected equal \
         numbers"
    )]
    PackedCounts {
        /// Number of query lengths.
        queries: usize,
        /// Number of key lengths.
        keys: usize,
    },
    /// A row of an explicit block mask is not ascending.
    #[error(
        "blocks: row {row} lists {first}..{end} out of order, expected ascending, disjoint, \
         non-empty ranges"
    )]
    BlockRow {
        /// The row of blocks.
        row: usize,
        /// First block of the offending range.
        first: u64,
        /// One past its last block.
        end: u64,
    },
    /// A list of patterns per head is empty.
    #[error("heads: no pattern, expected one per query head")]
    NoHeads,
    /// The number of patterns differs from the number of query heads.
    #[error("heads: {patterns} patterns for {heads} query heads, expected one per head")]
    HeadCount {
        /// Number of patterns.
        patterns: usize,
        /// Number of query heads.
        heads: usize,
    },
    /// Operators or `packed` are nested too deeply.
    #[error(
        "the pattern nests parentheses, negations and packed more than {limit} levels deep: join \
         terms of one operator in one chain, or state the rule with fewer negations"
    )]
    TooDeep {
        /// Maximum number of levels.
        limit: u8,
    },
    /// The text of a pattern does not parse.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// A block size is outside 16 to 256.
    #[error("block size is {value}, expected 16 to 256; the nearest legal size is {nearest}")]
    BlockSize {
        /// The given value.
        value: u64,
        /// The nearest legal size.
        nearest: u64,
    },
    /// A position exceeds the supported range.
    #[error("{what} reach position {value}, expected at most 2^60 from zero")]
    TooFar {
        /// Which axis.
        what: &'static str,
        /// The offending position.
        value: i128,
    },
    /// A progression has step 0.
    #[error("progression {index} of a position map has step 0, expected at least 1")]
    Step {
        /// Index of the progression.
        index: usize,
    },
    /// A position map exceeds the sequence.
    #[error("{what} map holds position {position}, expected all of it inside {first}..{end}")]
    Map {
        /// Which axis.
        what: &'static str,
        /// The offending position.
        position: i64,
        /// First position of the sequence.
        first: i64,
        /// One past its last position.
        end: i64,
    },
    /// A range of rows or of keys exceeds its axis.
    #[error("{what} are {start}..{end}, expected a range inside 0..{limit}")]
    Range {
        /// Which range.
        what: &'static str,
        /// Its start.
        start: u64,
        /// Its end.
        end: u64,
        /// The length of the axis.
        limit: u64,
    },
    /// The lengths of documents or sequences do not add up to the number of tokens.
    #[error("{primitive}: {argument} add up to {sum}, expected {tokens}, {rule}")]
    Sum {
        /// The primitive, as in pattern text.
        primitive: &'static str,
        /// The list of lengths.
        argument: &'static str,
        /// Its sum.
        sum: i64,
        /// The expected sum.
        tokens: i64,
        /// The source of the expected sum.
        rule: &'static str,
    },
    /// The query offset contradicts a `packed` pattern.
    #[error(
        "packed: the query offset is {offset}, expected {expected}: sequences are aligned one by \
         one, so omit the offset"
    )]
    PackedOffset {
        /// The given value.
        offset: i64,
        /// The offset that `packed` implies.
        expected: i64,
    },
    /// Parts of a pattern use different positions, and a score bias would have no meaning.
    #[error(
        "the pattern counts positions within sequences in one part and otherwise in another, so a \
         score bias has no distance to use: put everything inside of one `packed`, or intersect it"
    )]
    ScorePositions,
    /// The number of blocks along an axis exceeds 32 bits.
    #[error("{what} make {blocks} blocks, expected fewer than 2^32: use larger blocks or a shard")]
    TooManyBlocks {
        /// Which axis.
        what: &'static str,
        /// Number of blocks.
        blocks: u64,
    },
    /// The layout exceeds its memory limit.
    #[error(
        "the layout outgrew {limit} bytes at row {row} of {rows}: use larger blocks, fewer rows \
         (Shape::rows), or raise Shape::max_bytes"
    )]
    TooLarge {
        /// The limit in bytes.
        limit: u64,
        /// The row at which it was exceeded.
        row: u64,
        /// Number of rows.
        rows: u64,
    },
    /// The work on a layout exceeds its budget.
    #[error(
        "{work} takes more than {limit} units of work, reached at row {row} of {rows}, mostly for \
         `{expression}`: use fewer tokens or rows per call, larger blocks, or strides and periods \
         that divide the block size, or compile with a larger max_work"
    )]
    TooMuchWork {
        /// The operation: compiling, counting, hashing, comparing, transposing, drawing, reading
        /// masks.
        work: &'static str,
        /// The most expensive sub-expression, as pattern text, shortened if it is long.
        expression: String,
        /// The budget.
        limit: u64,
        /// The row at which it was exceeded.
        row: u64,
        /// Number of rows.
        rows: u64,
    },
    /// The progress hook returned `Break`.
    #[error("the work was stopped at row {row} of {rows}")]
    Stopped {
        /// The row at which it stopped.
        row: u64,
        /// Number of rows.
        rows: u64,
    },
    /// A given list of blocks is not well-formed.
    #[error("block layout: {0}")]
    Blocks(String),
    /// A mask has another number of pairs than queries × keys.
    #[error("mask: {len} pairs, expected {queries} queries × {keys} keys")]
    Mask {
        /// Pairs of the mask.
        len: usize,
        /// Number of queries.
        queries: usize,
        /// Number of keys.
        keys: usize,
    },
    /// No parameter gives a pattern the density that was asked for.
    #[error("density: {0}")]
    Density(String),
    /// Layouts of a set differ in tokens, blocks or rows.
    #[error("layout set: {0}")]
    Set(String),
}
