//! The algebra: primitives, `&`, `|`, `!`.
//!
//! A [`Pattern`] is a lazy predicate over global positions (query, key). It costs nothing until a
//! [`Layout`](crate::Layout) is compiled from it. Arguments are checked here, once; whatever a
//! `Pattern` holds is legal, so nothing behind it needs to check again.

use std::ops::{BitAnd, BitOr, Not, Range};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::plan::Plan;

mod block_rows;
mod lengths;

pub(crate) use block_rows::BlockRows;
pub(crate) use lengths::Lengths;

/// The largest argument of a primitive: a position and an argument then add up inside 64 bits.
pub(crate) const LARGEST: u64 = 1 << 61;

/// The most blocks that a row of `random` draws (or leaves out): a bound on what a short text can
/// make a compiler hold. BigBird draws three.
pub(crate) const MOST_DRAWS: u64 = 1 << 16;

/// Levels of parentheses, negations and `packed` inside each other, at most. Whatever goes through
/// a pattern (printing, comparing, compiling, dropping) calls itself twice per level, at most, and
/// so fits into the smallest stacks that threads have.
pub(crate) const DEEPEST: u8 = 64;

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
    /// Levels of parentheses, negations and `packed` that its text has.
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
    /// What an operator makes of patterns that would nest too deeply: sees nothing, and is refused
    /// wherever a pattern is used.
    TooDeep,
}

/// One level of [`Pattern::hierarchical`]: keys at most `window` away whose group of `grain`
/// tokens is every `stride`-th.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Level {
    /// Largest distance of query and key.
    pub window: u64,
    /// Every how many groups one is seen.
    pub stride: u64,
    /// Tokens a group.
    pub grain: u64,
}

impl Pattern {
    /// Everything.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// assert!(Pattern::full().allows(-3, 1 << 40));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn full() -> Self {
        Pattern(Expr::Full, 0)
    }

    /// `key ≤ query`.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// assert!(Pattern::causal().allows(5, 5) && !Pattern::causal().allows(5, 6));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn causal() -> Self {
        Pattern(Expr::Causal, 0)
    }

    /// `query − left ≤ key ≤ query + right`, both ends included.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let window = Pattern::window(2, 1)?;
    /// let seen: Vec<i64> = (0..10).filter(|&key| window.allows(5, key)).collect();
    /// assert_eq!(seen, [3, 4, 5, 6]);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn window(left: u64, right: u64) -> Result<Self> {
        let check = Check("window");
        check.size("left", left)?;
        check.size("right", right)?;
        Ok(Pattern(Expr::Window { left, right }, 0))
    }

    /// The last `width` positions up to and including the query's own: `window(width − 1, 0)`.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// assert_eq!(Pattern::sliding_window(256)?, Pattern::window(255, 0)?);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn sliding_window(width: u64) -> Result<Self> {
        Check("sliding_window").count("width", width)?;
        Pattern::window(width - 1, 0)
    }

    /// The first `tokens` keys, for everybody: `0 ≤ key < tokens`.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// assert!(Pattern::sinks(4)?.allows(1_000, 3) && !Pattern::sinks(4)?.allows(1_000, 4));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn sinks(tokens: u64) -> Result<Self> {
        Check("sinks").size("tokens", tokens)?;
        Ok(Pattern(Expr::Sinks { tokens }, 0))
    }

    /// The first `tokens` positions see all and are seen by all.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let global = Pattern::global_tokens(2)?;
    /// assert!(global.allows(1, 900) && global.allows(900, 1) && !global.allows(900, 901));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn global_tokens(tokens: u64) -> Result<Self> {
        Check("global_tokens").size("tokens", tokens)?;
        Ok(Pattern(Expr::GlobalTokens { tokens }, 0))
    }

    /// Query and key in the same segment of `segment` tokens, and both `≡ offset` mod `rate`
    /// counted from its start. Negative positions are in no segment.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let dilated = Pattern::dilated(8, 3, 1)?;
    /// let seen: Vec<i64> = (0..16).filter(|&key| dilated.allows(12, key)).collect();
    /// assert_eq!(seen, [9, 12, 15]);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn dilated(segment: u64, rate: u64, offset: u64) -> Result<Self> {
        let check = Check("dilated");
        check.count("segment", segment)?;
        check.count("rate", rate)?;
        if offset >= rate {
            return Err(check.error("offset", offset, "less than the rate"));
        }
        Ok(Pattern(Expr::Dilated { segment, rate, offset }, 0))
    }

    /// `(query − key) mod stride = 0`.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// assert!(Pattern::strided(3)?.allows(10, 1) && !Pattern::strided(3)?.allows(10, 2));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn strided(stride: u64) -> Result<Self> {
        Check("strided").count("stride", stride)?;
        Ok(Pattern(Expr::Strided { stride }, 0))
    }

    /// Fine near, coarse far: any level suffices (see [`Level`]).
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let near = Level { window: 2, stride: 1, grain: 1 };
    /// let far = Level { window: 8, stride: 4, grain: 2 };
    /// let pattern = Pattern::hierarchical([near, far])?;
    /// let seen: Vec<i64> = (0..20).filter(|&key| pattern.allows(12, key)).collect();
    /// assert_eq!(seen, [8, 9, 10, 11, 12, 13, 14, 16, 17]);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn hierarchical(levels: impl IntoIterator<Item = Level>) -> Result<Self> {
        let check = Check("hierarchical");
        let levels: Vec<_> = levels.into_iter().collect();
        check.some("levels", levels.len())?;
        for level in &levels {
            check.size("window", level.window)?;
            check.count("stride", level.stride)?;
            check.count("grain", level.grain)?;
        }
        Ok(Pattern(Expr::Hierarchical(levels), 0))
    }

    /// Query and key in the same document. The lengths (zero is legal) add up to the keys'
    /// tokens, which is checked when a layout is compiled. Positions go on counting across
    /// documents; [`packed`](Self::packed) starts anew in each.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let documents = Pattern::documents([3, 5])?;
    /// assert!(documents.allows(4, 3) && !documents.allows(4, 2));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn documents(lengths: impl IntoIterator<Item = u64>) -> Result<Self> {
        Ok(Pattern(Expr::Documents(Lengths::new("documents", "lengths", lengths)?), 0))
    }

    /// Many sequences in one call: query and key in the same sequence, and `inner` sees positions
    /// counted within it, queries aligned to its last keys. So packed equals unpacked.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// // Two sequences, of 3 and 5 tokens; the second one's first token is its own sink.
    /// let packed = Pattern::packed([3, 5], [3, 5], Pattern::sinks(1)?)?;
    /// assert!(packed.allows(6, 3) && !packed.allows(6, 0));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn packed(
        query_lengths: impl IntoIterator<Item = u64>,
        key_lengths: impl IntoIterator<Item = u64>,
        inner: Pattern,
    ) -> Result<Self> {
        let queries = Lengths::new("packed", "query lengths", query_lengths)?;
        let keys = Lengths::new("packed", "key lengths", key_lengths)?;
        if queries.count() != keys.count() {
            return Err(Error::PackedCounts { queries: queries.count(), keys: keys.count() });
        }
        inner.fits_each(&queries, &keys)?;
        let levels = inner.1 + 1;
        if levels > DEEPEST || inner.is_too_deep() {
            return Err(Error::TooDeep { limit: DEEPEST });
        }
        Ok(Pattern(Expr::Packed { queries, keys, inner: Box::new(inner) }, levels))
    }

    /// Block `i` sees itself and blocks `i ± r` for each rate.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let pattern = Pattern::blocks_dilated(16, [2])?;
    /// assert!(pattern.allows(16 * 5, 16 * 3 + 15) && !pattern.allows(16 * 5, 16 * 4));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn blocks_dilated(block: u64, rates: impl IntoIterator<Item = u64>) -> Result<Self> {
        let check = Check("blocks_dilated");
        check.count("block", block)?;
        let rates: Vec<_> = rates.into_iter().collect();
        for &rate in &rates {
            check.count("rate", rate)?;
        }
        Ok(Pattern(Expr::BlocksDilated { block, rates }, 0))
    }

    /// Block `i` sees itself and the blocks whose number differs from `i` in one bit.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let pattern = Pattern::butterfly(1)?;
    /// let seen: Vec<i64> = (0..16).filter(|&key| pattern.allows(5, key)).collect();
    /// assert_eq!(seen, [1, 4, 5, 7, 13]);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn butterfly(block: u64) -> Result<Self> {
        Check("butterfly").count("block", block)?;
        Ok(Pattern(Expr::Butterfly { block }, 0))
    }

    /// Query block `i` sees `min(per_row, blocks)` distinct key blocks of `0..blocks`, drawn from
    /// `seed` and `i` alone: the same on every machine. A row names at most 65,536 blocks, seen or
    /// left out.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let pattern = Pattern::random(1, 3, 100, 7)?;
    /// assert_eq!((0..1_000).filter(|&key| pattern.allows(5, key)).count(), 3);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn random(block: u64, per_row: u64, blocks: u64, seed: u64) -> Result<Self> {
        let check = Check("random");
        check.count("block", block)?;
        check.count("blocks", blocks)?;
        if per_row.min(blocks.saturating_sub(per_row)) > MOST_DRAWS {
            return Err(check.error("per_row", per_row, "65536 blocks a row to draw at most"));
        }
        Ok(Pattern(Expr::Random { block, per_row, blocks, seed }, 0))
    }

    /// An explicit mask of blocks: for each row of query blocks the ranges of key blocks that it
    /// sees, ascending. Query blocks past the last row see nothing.
    ///
    /// ```
    /// use longspan_pattern::Pattern;
    ///
    /// let chosen = Pattern::blocks(64, [vec![0..1], vec![0..2], vec![0..1, 2..3]])?;
    /// assert_eq!(chosen.to_string(), "blocks(64, [[0], [0..2], [0, 2]])");
    /// # Ok::<_, longspan_pattern::Error>(())
    /// ```
    pub fn blocks<Row>(block: u64, rows: impl IntoIterator<Item = Row>) -> Result<Self>
    where
        Row: IntoIterator<Item = Range<u64>>,
    {
        Check("blocks").count("block", block)?;
        Ok(Pattern(Expr::Blocks { block, rows: BlockRows::new(rows)? }, 0))
    }

    /// Whether the pattern can be used: one that operators have nested more than 64 levels deep
    /// can't be compiled, and its text doesn't parse. Chains of one operator are one level.
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
        if self.is_too_deep() { Err(Error::TooDeep { limit: DEEPEST }) } else { Ok(()) }
    }

    fn is_too_deep(&self) -> bool {
        matches!(self.0, Expr::TooDeep)
    }

    /// Whether the query at position `query` may attend to the key at position `key`.
    ///
    /// For looking at single positions; a layout answers for all of them.
    pub fn allows(&self, query: i64, key: i64) -> bool {
        Plan::new(self, None, key..key.saturating_add(1)).allows(query, key)
    }

    /// The patterns that it is made of and that speak of the same positions.
    pub(crate) fn parts(&self) -> &[Pattern] {
        match &self.0 {
            Expr::And(parts) | Expr::Or(parts) => parts,
            Expr::Not(inner) => std::slice::from_ref(inner),
            _ => &[],
        }
    }

    /// Bytes of the lists that the pattern holds, shared or not.
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

    /// Checks that inner documents and sequences fill each sequence they stand in.
    fn fits_each(&self, queries: &Lengths, keys: &Lengths) -> Result<()> {
        if !self.has_lengths() {
            return Ok(());
        }
        let mut last = None;
        for i in 0..queries.count() {
            let lengths = (queries.length(i), keys.length(i));
            if lengths.0 > 0 && lengths.1 > 0 && last != Some(lengths) {
                self.fits(lengths.0, lengths.1 - lengths.0, lengths.1)?;
                last = Some(lengths);
            }
        }
        Ok(())
    }

    fn has_lengths(&self) -> bool {
        match &self.0 {
            Expr::Documents(_) | Expr::Packed { .. } => true,
            Expr::And(parts) | Expr::Or(parts) => parts.iter().any(Pattern::has_lengths),
            Expr::Not(inner) => inner.has_lengths(),
            _ => false,
        }
    }

    /// Checks documents and sequences against the tokens they lie on.
    pub(crate) fn fits(&self, tokens_q: i64, query_offset: i64, key_end: i64) -> Result<()> {
        const KEYS: &str = "the position after the last key";
        const QUERIES: &str = "the number of queries";
        let sum = |primitive, argument, lengths: &Lengths, tokens, rule| {
            let sum = lengths.total();
            if sum == tokens {
                return Ok(());
            }
            Err(Error::Sum { primitive, argument, sum, tokens, rule })
        };
        match &self.0 {
            Expr::Documents(lengths) => sum("documents", "lengths", lengths, key_end, KEYS),
            Expr::Packed { queries, keys, .. } => {
                sum("packed", "query lengths", queries, tokens_q, QUERIES)?;
                sum("packed", "key lengths", keys, key_end, KEYS)?;
                let expected = keys.total() - queries.total();
                if query_offset != expected {
                    return Err(Error::PackedOffset { offset: query_offset, expected });
                }
                Ok(())
            }
            Expr::And(parts) | Expr::Or(parts) => {
                parts.iter().try_for_each(|part| part.fits(tokens_q, query_offset, key_end))
            }
            Expr::Not(inner) => inner.fits(tokens_q, query_offset, key_end),
            _ => Ok(()),
        }
    }
}

/// Conjunctions, disjunctions and negations can't fail, so one that would nest too deeply is a
/// pattern that every later use refuses: see [`Pattern::check`].
impl BitAnd for Pattern {
    type Output = Pattern;

    fn bitand(self, other: Pattern) -> Pattern {
        // A disjunction inside a conjunction needs parentheses.
        let levels = |part: &Pattern| part.1 + u8::from(matches!(part.0, Expr::Or(_)));
        let levels = levels(&self).max(levels(&other));
        combined(self, other, levels, Expr::And, |expr| match expr {
            Expr::And(parts) => Ok(parts),
            expr => Err(expr),
        })
    }
}

impl BitOr for Pattern {
    type Output = Pattern;

    fn bitor(self, other: Pattern) -> Pattern {
        let levels = self.1.max(other.1);
        combined(self, other, levels, Expr::Or, |expr| match expr {
            Expr::Or(parts) => Ok(parts),
            expr => Err(expr),
        })
    }
}

/// Two patterns in one list; lists of the same operator are joined, and the first one grows in
/// place, so that a chain of any length takes time that follows its length.
fn combined(
    first: Pattern,
    second: Pattern,
    levels: u8,
    list: fn(Vec<Pattern>) -> Expr,
    parts: fn(Expr) -> Result<Vec<Pattern>, Expr>,
) -> Pattern {
    if levels > DEEPEST || first.is_too_deep() || second.is_too_deep() {
        return Pattern(Expr::TooDeep, 0);
    }
    let Pattern(expr, own) = first;
    let mut all = parts(expr).unwrap_or_else(|expr| vec![Pattern(expr, own)]);
    let Pattern(expr, own) = second;
    match parts(expr) {
        Ok(more) => all.extend(more),
        Err(expr) => all.push(Pattern(expr, own)),
    }
    Pattern(list(all), levels)
}

impl Not for Pattern {
    type Output = Pattern;

    fn not(self) -> Pattern {
        let levels = self.1 + 1 + u8::from(matches!(self.0, Expr::And(_) | Expr::Or(_)));
        match self.0 {
            Expr::Not(inner) => *inner,
            Expr::TooDeep => self,
            _ if levels > DEEPEST => Pattern(Expr::TooDeep, 0),
            _ => Pattern(Expr::Not(Box::new(self)), levels),
        }
    }
}

/// The checks that primitives share, by the name of the primitive.
#[derive(Clone, Copy)]
pub(crate) struct Check(pub(crate) &'static str);

impl Check {
    fn error(self, argument: &'static str, value: u64, rule: &'static str) -> Error {
        Error::Argument { primitive: self.0, argument, value: value.into(), rule }
    }

    fn size(self, argument: &'static str, value: u64) -> Result<()> {
        if value > LARGEST { Err(self.error(argument, value, "at most 2^61")) } else { Ok(()) }
    }

    fn count(self, argument: &'static str, value: u64) -> Result<()> {
        if value == 0 || value > LARGEST {
            return Err(self.error(argument, value, "1 to 2^61"));
        }
        Ok(())
    }

    fn some(self, argument: &'static str, len: usize) -> Result<()> {
        if len == 0 { Err(self.error(argument, 0, "at least one")) } else { Ok(()) }
    }
}
