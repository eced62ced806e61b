//! What can be wrong with a pattern, its text, or the shape it is compiled for.
//!
//! Every message names the value it was given and the rule it breaks.

use crate::text::ParseError;

/// A result whose error is this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of a primitive is outside what it may be.
    #[error("{primitive}: {argument} is {value}, expected {rule}")]
    Argument {
        /// The primitive, as the text form spells it.
        primitive: &'static str,
        /// The name of the argument.
        argument: &'static str,
        /// What was given.
        value: u128,
        /// What is legal.
        rule: &'static str,
    },
    /// Two lists of a `packed` pattern differ in length.
    #[error(
        "packed: {queries} query lengths and {keys} key lengths, expected as many of one as of \
         the other"
    )]
    PackedCounts {
        /// How many query lengths were given.
        queries: usize,
        /// How many key lengths were given.
        keys: usize,
    },
    /// A row of an explicit block mask is not ascending.
    #[error(
        "blocks: row {row} lists {first}..{end} out of order, expected ascending, disjoint, non-empty ranges"
    )]
    BlockRow {
        /// The row of blocks.
        row: usize,
        /// First block of the range at fault.
        first: u64,
        /// One past its last block.
        end: u64,
    },
    /// A list of patterns, one a head, is empty.
    #[error("heads: no pattern, expected one a query head")]
    NoHeads,
    /// The patterns are not one a query head.
    #[error("heads: {patterns} patterns for {heads} query heads, expected one a head")]
    HeadCount {
        /// How many patterns there are.
        patterns: usize,
        /// How many query heads there are.
        heads: usize,
    },
    /// Operators or `packed` have nested a pattern too deeply.
    #[error(
        "the pattern nests parentheses, negations and packed more than {limit} levels deep: join \
         terms of one operator in one chain, or state the rule with fewer negations"
    )]
    TooDeep {
        /// The most levels.
        limit: u8,
    },
    /// The text of a pattern doesn't parse.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// A block size is outside 16 to 256.
    #[error("block size is {value}, expected 16 to 256; the nearest legal size is {nearest}")]
    BlockSize {
        /// What was given.
        value: u64,
        /// The legal size nearest to it.
        nearest: u64,
    },
    /// Positions lie too far out.
    #[error("{what} reach position {value}, expected at most 2^60 from zero")]
    TooFar {
        /// Which axis.
        what: &'static str,
        /// The position at fault.
        value: i128,
    },
    /// A progression has step 0.
    #[error("progression {index} of a position map has step 0, expected at least 1")]
    Step {
        /// Which progression of the map.
        index: usize,
    },
    /// A position map leaves the sequence.
    #[error("{what} map holds position {position}, expected all of it inside {first}..{end}")]
    Map {
        /// Which axis.
        what: &'static str,
        /// The position at fault.
        position: i64,
        /// First position of the sequence.
        first: i64,
        /// One past its last position.
        end: i64,
    },
    /// A range of rows or of valid keys leaves its axis.
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
    /// The lengths of documents or sequences don't add up to the tokens they lie on.
    #[error("{primitive}: {argument} add up to {sum}, expected {tokens}, {rule}")]
    Sum {
        /// The primitive, as the text form spells it.
        primitive: &'static str,
        /// The list that was added up.
        argument: &'static str,
        /// What it adds up to.
        sum: i64,
        /// What it should add up to.
        tokens: i64,
        /// Where that number comes from.
        rule: &'static str,
    },
    /// A `packed` pattern counts positions itself; the query offset contradicts it.
    #[error(
        "packed: the query offset is {offset}, expected {expected}: sequences are aligned one by \
         one, so leave the offset out"
    )]
    PackedOffset {
        /// What was given.
        offset: i64,
        /// What `packed` stands on.
        expected: i64,
    },
    /// More blocks along one axis than an index holds.
    #[error("{what} make {blocks} blocks, expected fewer than 2^32: use larger blocks or a shard")]
    TooManyBlocks {
        /// Which axis.
        what: &'static str,
        /// How many there would be.
        blocks: u64,
    },
    /// The layout would outgrow its bound.
    #[error(
        "the layout outgrew {limit} bytes at row {row} of {rows}: use larger blocks, fewer rows \
         (Shape::rows), or raise Shape::max_bytes"
    )]
    TooLarge {
        /// The bound.
        limit: u64,
        /// Where it was passed.
        row: u64,
        /// How many rows there are.
        rows: u64,
    },
    /// The work on a layout would outgrow its budget.
    #[error(
        "{work} takes more than {limit} units of work, reached at row {row} of {rows}, mostly for \
         `{expression}`: use fewer tokens or rows per call, larger blocks, or strides and periods \
         that divide the block size, or compile with a larger max_work"
    )]
    TooMuchWork {
        /// What took so long: compiling, counting, hashing, transposing, drawing, reading masks.
        work: &'static str,
        /// The most expensive sub-expression, as pattern text, shortened if it is long.
        expression: String,
        /// The budget.
        limit: u64,
        /// Where it was used up.
        row: u64,
        /// How many rows there are.
        rows: u64,
    },
    /// The progress hook asked to stop.
    #[error("the work was stopped at row {row} of {rows}")]
    Stopped {
        /// Where it stopped.
        row: u64,
        /// How many rows there are.
        rows: u64,
    },
    /// A layout made elsewhere is not well-formed.
    #[error("block layout: {0}")]
    Blocks(String),
    /// Layouts of a set differ in what they cover.
    #[error("layout set: {0}")]
    Set(String),
}
