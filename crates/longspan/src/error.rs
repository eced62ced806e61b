//! What can be wrong with a call.
//!
//! Every message names the value it was given and the rule it breaks.

use crate::dims::{Dims, Strides};

/// A result whose error is this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can be wrong.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A token that a tensor hasn't got.
    #[error("token {token} of {tokens}, expected one from 0 on and below")]
    Token {
        /// Which one.
        token: usize,
        /// How many there are.
        tokens: usize,
    },
    /// A tensor's elements or bytes can't be counted.
    #[error("a tensor of {dims:?}: its elements or their offsets can't be counted in 64 bits")]
    Overflow {
        /// Its axes.
        dims: Dims,
    },
    /// More batch entries and heads than tasks can number.
    #[error("a tensor of {dims:?}: batch entries × heads, expected at most 2^28")]
    TooManyHeads {
        /// Its axes.
        dims: Dims,
    },
    /// Memory that the system hasn't got.
    #[error(
        "out of memory: an allocation of {bytes} bytes failed; use fewer tokens, heads or batch \
         entries, or a smaller element type"
    )]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// A slice has another length than its axes say.
    #[error("{what} has {len} elements, expected {expected}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// What it has.
        len: usize,
        /// What its axes multiply to.
        expected: usize,
    },
    /// A strided view reaches outside its slice.
    #[error(
        "a view that starts at element {first} and reaches from {low} to +{high} leaves its slice \
         of {len} elements"
    )]
    Outside {
        /// Index of the first element.
        first: usize,
        /// Lowest offset from it.
        low: isize,
        /// Highest offset from it.
        high: isize,
        /// Elements of the slice.
        len: usize,
    },
    /// A pointer is null or not on a multiple of its element's alignment.
    #[error("a tensor at address {address:#x}: expected a non-null multiple of {align}")]
    Misaligned {
        /// Where it points.
        address: usize,
        /// What it must be a multiple of.
        align: usize,
    },
    /// Two elements of a tensor to write share memory, or may.
    #[error(
        "a tensor to write of {dims:?} with {strides:?}: elements overlap; every stride has to \
         step over all that lies within it"
    )]
    SelfOverlap {
        /// Its axes.
        dims: Dims,
        /// Their strides.
        strides: Strides,
    },
    /// A tensor to write shares memory with another argument.
    #[error("{first} and {second} overlap: what is written must not share memory with anything")]
    Overlap {
        /// The one that is written.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// An axis of a tensor doesn't fit the others.
    #[error("{tensor} has {axis} {got}, expected {expected} ({why})")]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// Which axis.
        axis: &'static str,
        /// What it has.
        got: usize,
        /// What it should have.
        expected: usize,
        /// Where that comes from.
        why: &'static str,
    },
    /// Query heads aren't a multiple of key heads.
    #[error("{query} query heads and {key} key heads: expected a multiple of the key heads")]
    Heads {
        /// Heads of the queries.
        query: usize,
        /// Heads of keys and values.
        key: usize,
    },
    /// A head has more numbers than Longspan is made for.
    #[error("{tensor} has head dim {dim}, expected 1 to {most}")]
    HeadDim {
        /// Which tensor.
        tensor: &'static str,
        /// What it has.
        dim: usize,
        /// The largest legal one.
        most: usize,
    },
    /// A number is outside what it may be.
    #[error("{what} is {value}, expected {rule}")]
    Number {
        /// Which number.
        what: &'static str,
        /// What was given.
        value: f32,
        /// What is legal.
        rule: &'static str,
    },
    /// An argument that has no meaning in this call.
    #[error("{what} is given, expected none: {why}")]
    Unexpected {
        /// Which argument.
        what: &'static str,
        /// The reason, and what to do.
        why: &'static str,
    },
    /// A row of attention weights that there isn't.
    #[error("attention weights of {axis} {index}, expected an index below {len}")]
    WeightRow {
        /// Which axis.
        axis: &'static str,
        /// The index along it.
        index: usize,
        /// What it has.
        len: usize,
    },
    /// Attention weights that take more memory than they may.
    #[error(
        "attention weights of {} batch entries × {} heads × {} queries over {} keys take {bytes} bytes, \
         the limit is {limit}: choose fewer queries, heads or batch entries, or raise max_bytes",
        .dims.batch, .dims.heads, .dims.tokens, .dims.dim
    )]
    TooManyWeights {
        /// Batch entries, rows as tokens, heads, and keys as the head dim.
        dims: Dims,
        /// What they take.
        bytes: usize,
        /// What they may take.
        limit: usize,
    },
    /// A cache without tokens, whose keys and values were asked for.
    #[error("the cache is empty: append keys and values first")]
    EmptyCache,
    /// Keys and values of another element type than those of a cache.
    #[error("elements of {got}, expected {holds} as those that the cache has already")]
    CacheElement {
        /// What the cache has.
        holds: String,
        /// What was given.
        got: String,
    },
    /// Valid keys of a batch entry that are not keys.
    #[error(
        "padding of batch entry {entry}: valid keys {valid:?}, expected an ascending range within {keys} \
         keys"
    )]
    Padding {
        /// Which entry.
        entry: usize,
        /// Its valid keys.
        valid: std::ops::Range<usize>,
        /// How many there are.
        keys: usize,
    },
    /// Dilated attention without a branch.
    #[error("no branches: dilated attention needs at least one segment length and rate")]
    NoBranches,
    /// This CPU doesn't have the instruction set that was asked for.
    #[error("instruction set {asked} asked for, this CPU has {}", .has.join(", "))]
    Isa {
        /// What was asked for.
        asked: &'static str,
        /// What there is.
        has: Vec<&'static str>,
    },
    /// There is no element type of that name.
    #[error("element type {name:?}: expected f32, bf16 or f16")]
    ElementName {
        /// What was given.
        name: String,
    },
    /// There is no precision of that name.
    #[error(
        "precision {name:?}: expected highest (products at the precision of the tensors), high (f32 \
         products as three of bf16 where the CPU has a matrix unit) or widened (f32 products of bf16, too)"
    )]
    PrecisionName {
        /// What was given.
        name: String,
    },
    /// There is no instruction set of that name.
    #[error("instruction set {name:?}: expected portable, neon, avx2, avx512 or amx")]
    IsaName {
        /// What was given.
        name: String,
    },
    /// More threads than any machine could use.
    #[error("{asked} threads asked for, expected 1 to {most}")]
    Threads {
        /// What was asked for.
        asked: usize,
        /// The largest legal number.
        most: usize,
    },
    /// A CPU that this process may not use was to be pinned to.
    #[error("CPU {cpu} can't be pinned to, {}", cpus(.allowed))]
    Cpu {
        /// Its number.
        cpu: usize,
        /// Those that can.
        allowed: Vec<usize>,
    },
    /// An empty list of CPUs to pin to.
    #[error("no CPUs to pin to: name at least one, or leave workers unpinned")]
    NoCpus,
    /// An environment variable says something that it can't mean.
    #[error("environment variable {name} is {value:?}, expected {expected}")]
    Environment {
        /// Its name.
        name: &'static str,
        /// What it holds.
        value: String,
        /// What it may hold.
        expected: &'static str,
    },
    /// The hook ended the call. What was written so far is not to be used.
    #[error("stopped by the hook after {done} of {total} units of work")]
    Stopped {
        /// Units of work that were done.
        done: usize,
        /// Units there are.
        total: usize,
    },
    /// A pattern or layout is at fault.
    #[error(transparent)]
    Pattern(#[from] longspan_pattern::Error),
}

fn cpus(allowed: &[usize]) -> String {
    match allowed {
        [] => "this system has no affinity masks: leave workers unpinned".to_owned(),
        _ => {
            let cpus: Vec<String> = allowed.iter().map(usize::to_string).collect();
            format!("expected one of {}", cpus.join(", "))
        }
    }
}

/// So that conversions that cannot fail may stand where others can.
impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}
