//! The pattern expression: primitives, `&`, `|`, `!`. Imports only `error`.
//!
//! A [`Pattern`] is a lazy predicate over global positions (query, key). It costs nothing until a
//! [`Layout`](crate::Layout) is compiled from it. The constructors validate all arguments, so that
//! higher layers need not.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

mod block_rows;
mod fit;
mod lengths;
mod operators;
mod primitives;
mod reach;
mod sequences;
mod terms;

pub(crate) use block_rows::BlockRows;
pub(crate) use lengths::Lengths;
pub use reach::Reach;
pub(crate) use sequences::{Positioning, Sequences};
pub(crate) use terms::{Residues, Term};

/// Maximum argument of a primitive: the sum of a position and an argument fits into 64 bits.
pub(crate) const MAX_ARGUMENT: u64 = 1 << 61;

/// Maximum number of blocks that a row of `random` draws or excludes: bounds the memory that a
/// short text can demand. BigBird draws three.
pub(crate) const MAX_DRAWS: u64 = 1 << 16;

/// Maximum nesting of parentheses, negations and `packed`. Traversals (printing, comparing,
/// compiling, dropping) recurse at most twice per level and so fit into the smallest thread
/// stacks.
pub(crate) const MAX_DEPTH: u8 = 64;

/// Maximum number of axes of a grid.
pub(crate) const MAX_AXES: usize = 4;

/// Which query may attend to which key, by global position.
///
/// ```
/// use longspan_pattern::Pattern;
///
/// let pattern = Pattern::causal() & (Pattern::window(256, 0)? | Pattern::sinks(16)?);
/// assert_eq!(pattern, "causal & (window(256, 0) | sinks(16))".parse()?);
/// assert!(pattern.allows(1_000, 3));
/// assert!(!pattern.allows(1_000, 700));
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern(
    pub(crate) Expr,
    /// Nesting of parentheses, negations and `packed` in its text.
    u8,
);

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) enum Expr {
    Full,
    Causal,
    Window {
        left: u64,
        right: u64,
    },
    Sinks {
        tokens: u64,
    },
    GlobalTokens {
        tokens: u64,
    },
    Keys {
        from: u64,
        to: u64,
    },
    Queries {
        from: u64,
        to: u64,
    },
    /// As many radii as sizes.
    Neighborhood {
        sizes: Vec<u64>,
        radii: Vec<u64>,
    },
    Dilated {
        segment: u64,
        rate: u64,
        offset: u64,
    },
    Strided {
        stride: u64,
    },
    Hierarchical(Vec<Level>),
    Documents(Lengths),
    Packed {
        queries: Lengths,
        keys: Lengths,
        inner: Box<Pattern>,
    },
    BlocksDilated {
        block: u64,
        rates: Vec<u64>,
    },
    Butterfly {
        block: u64,
    },
    Random {
        block: u64,
        per_row: u64,
        blocks: u64,
        seed: u64,
    },
    Blocks {
        block: u64,
        rows: BlockRows,
    },
    /// Two or more, none of them an `And`.
    And(Vec<Pattern>),
    /// Two or more, none of them an `Or`.
    Or(Vec<Pattern>),
    /// Never of a `Not`.
    Not(Box<Pattern>),
    /// Result of an operator that would exceed the nesting limit: allows nothing, and every use is
    /// an error.
    TooDeep,
}

/// One level of [`Pattern::hierarchical`]: keys at most `window` away whose group of `grain`
/// tokens is every `stride`-th.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Level {
    /// Maximum distance of query and key.
    pub window: u64,
    /// One group in `stride` is active.
    pub stride: u64,
    /// Tokens per group.
    pub grain: u64,
}

impl Pattern {
    /// Whether the pattern is usable: one nested more than 64 levels deep by operators cannot be
    /// compiled, and its text does not parse. A chain of one operator is one level.
    ///
    /// ```
    /// use longspan_pattern::{Error, Pattern};
    ///
    /// let mut pattern = Pattern::causal();
    /// for _ in 0..100 {
    ///     pattern = !(pattern & Pattern::sinks(1)?);
    /// }
    /// assert_eq!(pattern.check(), Err(Error::TooDeep { limit: 64 }));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.is_too_deep() { Err(Error::TooDeep { limit: MAX_DEPTH }) } else { Ok(()) }
    }

    fn is_too_deep(&self) -> bool {
        matches!(self.0, Expr::TooDeep)
    }

    /// The operands, if they have the same positions.
    pub(crate) fn parts(&self) -> &[Pattern] {
        match &self.0 {
            Expr::And(parts) | Expr::Or(parts) => parts,
            Expr::Not(inner) => std::slice::from_ref(inner),
            _ => &[],
        }
    }

    /// Memory in bytes, including shared lists.
    pub(crate) fn bytes(&self) -> usize {
        let own = match &self.0 {
            Expr::Documents(lengths) => lengths.bytes(),
            Expr::Packed { queries, keys, inner } => queries.bytes() + keys.bytes() + inner.bytes(),
            Expr::Blocks { rows, .. } => rows.bytes(),
            Expr::And(parts) | Expr::Or(parts) => parts.iter().map(Pattern::bytes).sum(),
            Expr::Not(inner) => inner.bytes(),
            _ => 0,
        };
        own + size_of::<Self>()
    }
}
