//! Constructors of the primitives. Arguments are validated here, once.

use std::ops::Range;

use super::{
    BlockRows, Expr, Lengths, Level, MAX_ARGUMENT, MAX_AXES, MAX_DEPTH, MAX_DRAWS, Pattern,
};
use crate::error::{Error, Result};

impl Pattern {
    /// All pairs.
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
    /// let active: Vec<i64> = (0..10).filter(|&key| window.allows(5, key)).collect();
    /// assert_eq!(active, [3, 4, 5, 6]);
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

    /// The first `tokens` keys, for all queries: `0 ≤ key < tokens`.
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

    /// The first `tokens` positions attend to all and are attended to by all.
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

    /// Keys at some positions, for all queries: `from ≤ key < to`.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// // A global token at position 500: it attends to all and is attended to by all.
    /// let global = Pattern::keys(500, 501)? | Pattern::queries(500, 501)?;
    /// assert!(global.allows(3, 500) && global.allows(500, 3) && !global.allows(3, 499));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn keys(from: u64, to: u64) -> Result<Self> {
        Check("keys").range(from, to)?;
        Ok(Pattern(Expr::Keys { from, to }, 0))
    }

    /// All keys, for queries at some positions: `from ≤ query < to`.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// assert!(Pattern::queries(2, 4)?.allows(3, 900) && !Pattern::queries(2, 4)?.allows(4, 900));
    /// # Ok::<_, Error>(())
    /// ```
    pub fn queries(from: u64, to: u64) -> Result<Self> {
        Check("queries").range(from, to)?;
        Ok(Pattern(Expr::Queries { from, to }, 0))
    }

    /// Neighbors in a grid of one to four axes, whose cells are the positions from 0 on, the last
    /// axis fastest: on every axis the coordinates of query and key differ by at most its radius.
    /// Neighborhoods are clipped at the borders (NATTEN shifts them inward instead). Negative
    /// positions and those past the grid are in no cell.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// // Three rows of five cells; the query is in the middle of the first.
    /// let pattern = Pattern::neighborhood([3, 5], [1, 1])?;
    /// let active: Vec<i64> = (-9..20).filter(|&key| pattern.allows(2, key)).collect();
    /// assert_eq!(active, [1, 2, 3, 6, 7, 8]);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn neighborhood(
        sizes: impl IntoIterator<Item = u64>,
        radii: impl IntoIterator<Item = u64>,
    ) -> Result<Self> {
        let check = Check("neighborhood");
        let (sizes, radii): (Vec<_>, Vec<_>) =
            (sizes.into_iter().collect(), radii.into_iter().collect());
        check.some("sizes", sizes.len())?;
        if sizes.len() > MAX_AXES {
            return Err(check.error("sizes", sizes.len() as u64, "at most four axes"));
        }
        if radii.len() != sizes.len() {
            return Err(check.error("radii", radii.len() as u64, "one per axis"));
        }
        let mut cells = 1_u64;
        for (&size, &radius) in sizes.iter().zip(&radii) {
            check.count("size", size)?;
            check.size("radius", radius)?;
            cells = cells.saturating_mul(size);
        }
        check.size("sizes", cells)?;
        Ok(Pattern(Expr::Neighborhood { sizes, radii }, 0))
    }

    /// Query and key in the same segment of `segment` tokens, and both `≡ offset` mod `rate`
    /// counted from its start. Negative positions are in no segment.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let dilated = Pattern::dilated(8, 3, 1)?;
    /// let active: Vec<i64> = (0..16).filter(|&key| dilated.allows(12, key)).collect();
    /// assert_eq!(active, [9, 12, 15]);
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

    /// The union of levels, fine near the query and coarse far from it (see [`Level`]).
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let near = Level { window: 2, stride: 1, grain: 1 };
    /// let far = Level { window: 8, stride: 4, grain: 2 };
    /// let pattern = Pattern::hierarchical([near, far])?;
    /// let active: Vec<i64> = (0..20).filter(|&key| pattern.allows(12, key)).collect();
    /// assert_eq!(active, [8, 9, 10, 11, 12, 13, 14, 16, 17]);
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

    /// Query and key in the same document. The lengths (zero is legal) add up to the number of keys,
    /// which is checked when a layout is compiled. Positions continue across documents; those of
    /// [`packed`](Self::packed) restart at 0 in each.
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

    /// Variable-length sequences in one call: query and key in the same sequence, and `inner` over
    /// positions that restart at 0 in each, queries aligned to its last keys. The result equals
    /// that of separate calls.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// // Two sequences, of 3 and 5 tokens; the sink of the second is its own first token.
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
        if levels > MAX_DEPTH || inner.is_too_deep() {
            return Err(Error::TooDeep { limit: MAX_DEPTH });
        }
        Ok(Pattern(Expr::Packed { queries, keys, inner: Box::new(inner) }, levels))
    }

    /// [`packed`](Self::packed) by the positions at which sequences begin, and the end: flash-attn's
    /// `cu_seqlens_q` and `cu_seqlens_k`, ascending from 0.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let packed = Pattern::packed_cu_seqlens(&[0, 3, 8], &[0, 3, 8], Pattern::causal())?;
    /// assert_eq!(packed, Pattern::packed([3, 5], [3, 5], Pattern::causal())?);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn packed_cu_seqlens(
        cu_seqlens_q: &[u64],
        cu_seqlens_k: &[u64],
        inner: Pattern,
    ) -> Result<Self> {
        let lengths = |argument, ends: &[u64]| {
            let fail = |value| Err(Check("packed").error(argument, value, "ascending from 0 on"));
            match ends.first() {
                Some(0) => {}
                other => return fail(other.copied().unwrap_or(0)),
            }
            match ends.windows(2).find(|ends| ends[0] > ends[1]) {
                Some(ends) => fail(ends[1]),
                None => Ok(ends.windows(2).map(|ends| ends[1] - ends[0]).collect::<Vec<_>>()),
            }
        };
        let queries = lengths("cu_seqlens_q", cu_seqlens_q)?;
        Self::packed(queries, lengths("cu_seqlens_k", cu_seqlens_k)?, inner)
    }

    /// Block `i` attends to itself and to blocks `i ± r` for each rate.
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

    /// Block `i` attends to itself and the blocks whose number differs from `i` in one bit.
    ///
    /// ```
    /// # use longspan_pattern::*;
    /// let pattern = Pattern::butterfly(1)?;
    /// let active: Vec<i64> = (0..16).filter(|&key| pattern.allows(5, key)).collect();
    /// assert_eq!(active, [1, 4, 5, 7, 13]);
    /// # Ok::<_, Error>(())
    /// ```
    pub fn butterfly(block: u64) -> Result<Self> {
        Check("butterfly").count("block", block)?;
        Ok(Pattern(Expr::Butterfly { block }, 0))
    }

    /// Query block `i` attends to `min(per_row, blocks)` distinct key blocks of `0..blocks`, a
    /// function of `seed` and `i`. A row draws or excludes at most 65,536 blocks.
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
        if per_row.min(blocks.saturating_sub(per_row)) > MAX_DRAWS {
            return Err(check.error("per_row", per_row, "at most 65536 blocks per row to draw"));
        }
        Ok(Pattern(Expr::Random { block, per_row, blocks, seed }, 0))
    }

    /// An explicit block mask: for each row of query blocks the active ranges of key blocks,
    /// ascending. Query blocks past the last row attend to nothing.
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
}

/// Argument checks, with the name of the primitive.
#[derive(Clone, Copy)]
struct Check(&'static str);

impl Check {
    fn error(self, argument: &'static str, value: u64, rule: &'static str) -> Error {
        Error::Argument { primitive: self.0, argument, value: value.into(), rule }
    }

    fn size(self, argument: &'static str, value: u64) -> Result<()> {
        if value > MAX_ARGUMENT { Err(self.error(argument, value, "at most 2^61")) } else { Ok(()) }
    }

    fn count(self, argument: &'static str, value: u64) -> Result<()> {
        if value == 0 || value > MAX_ARGUMENT {
            return Err(self.error(argument, value, "1 to 2^61"));
        }
        Ok(())
    }

    fn range(self, from: u64, to: u64) -> Result<()> {
        self.size("to", to)?;
        if from > to { Err(self.error("from", from, "at most `to`")) } else { Ok(()) }
    }

    fn some(self, argument: &'static str, len: usize) -> Result<()> {
        if len == 0 { Err(self.error(argument, 0, "at least one")) } else { Ok(()) }
    }
}
