//! What every primitive means, read literally.
//!
//! [`Rule::allows`] answers for one query position and one key position. Positions are global and
//! may be negative; a negative position is in no segment, document or block, and neither is one
//! past the last document, sequence or explicit row. Where no such thing is involved (`strided`,
//! `hierarchical`, windows) a position is a plain integer and division floors.
//!
//! Arguments are `u64` and positions `i64`, so their sums and differences are taken in `i128`: no
//! window or stride is too large to be right. Only lengths must add up to less than 2⁶³.
//!
//! A `packed` query is found through bottom-right alignment. With `Lq` queries and `Lk` keys over
//! all sequences, the query at position `p` is packed query number `p − (Lk − Lq)` and the key at
//! position `k` is packed key number `k`. Within a sequence of `q` queries and `k` keys the same
//! alignment holds again: its query number `n` stands at position `n + (k − q)`.

use crate::splitmix::Draw;

#[cfg(test)]
mod tests;
mod text;

/// An attention pattern: which query positions may see which key positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Everything.
    Full,
    /// `key ≤ query`.
    Causal,
    /// `query − left ≤ key ≤ query + right`.
    Window {
        /// How far back.
        left: u64,
        /// How far ahead.
        right: u64,
    },
    /// The last `width` keys, the query's own position included: `window(width − 1, 0)`.
    SlidingWindow {
        /// Keys seen; none of them where it is 0.
        width: u64,
    },
    /// `0 ≤ key < n`.
    Sinks {
        /// Number of sinks.
        n: u64,
    },
    /// `0 ≤ key < n` or `0 ≤ query < n`.
    GlobalTokens {
        /// Number of global tokens.
        n: u64,
    },
    /// `from ≤ key < to`.
    Keys {
        /// The first key.
        from: u64,
        /// The key after the last.
        to: u64,
    },
    /// `from ≤ query < to`.
    Queries {
        /// The first query.
        from: u64,
        /// The query after the last.
        to: u64,
    },
    /// Cells of a grid, the last axis fastest, that differ by at most a radius on every axis.
    Neighborhood {
        /// Cells per axis.
        sizes: Vec<u64>,
        /// How far on each axis.
        radii: Vec<u64>,
    },
    /// Same segment, and both `≡ offset` mod `rate` counted from its start.
    Dilated {
        /// Tokens per segment.
        segment: u64,
        /// Every how many tokens one takes part.
        rate: u64,
        /// Which residue takes part; less than the rate.
        offset: u64,
    },
    /// `(query − key) mod stride = 0`.
    Strided {
        /// The stride.
        stride: u64,
    },
    /// Any of the levels.
    Hierarchical(Vec<Level>),
    /// Same document; the lengths of the documents, in order.
    Documents(Vec<u64>),
    /// Same sequence, and `inner` holds for the positions counted within it.
    Packed {
        /// Queries of each sequence.
        queries: Vec<u64>,
        /// Keys of each sequence.
        keys: Vec<u64>,
        /// What holds within a sequence.
        inner: Box<Rule>,
    },
    /// Block `i` sees itself and blocks `i ± r` for each rate `r`.
    BlocksDilated {
        /// Tokens per block.
        block: u64,
        /// The distances in blocks.
        rates: Vec<u64>,
    },
    /// Block `i` sees itself and the blocks whose index differs from `i` in one bit.
    Butterfly {
        /// Tokens per block.
        block: u64,
    },
    /// Query block `i` sees `min(per_row, blocks)` key blocks out of `0..blocks`, drawn by seed.
    Random {
        /// Tokens per block.
        block: u64,
        /// Key blocks that a query block sees.
        per_row: u64,
        /// Key blocks to draw from.
        blocks: u64,
        /// The seed.
        seed: u64,
    },
    /// An explicit block mask.
    Blocks {
        /// Tokens per block.
        block: u64,
        /// For each query block the key blocks it sees, in ascending order.
        rows: Vec<Vec<u64>>,
    },
    /// All of the rules.
    And(Vec<Rule>),
    /// Any of the rules.
    Or(Vec<Rule>),
    /// The complement, over all positions.
    Not(Box<Rule>),
}

/// One level of [`Rule::Hierarchical`]: `|query − key| ≤ window` and `⌊key / grain⌋ mod stride = 0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    /// How far the level reaches, both ways.
    pub window: u64,
    /// Every how many grains one is seen.
    pub stride: u64,
    /// Keys per grain.
    pub grain: u64,
}

/// The sequences whose positions scores have distances in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequences<'a> {
    /// All tokens are one.
    None,
    /// Queries and keys of each.
    Packed(&'a [u64], &'a [u64]),
}

impl Sequences<'_> {
    /// The position of a query within its sequence; 0 outside of all.
    pub fn query(self, position: i64) -> i64 {
        let Sequences::Packed(queries, keys) = self else { return position };
        let total = |lengths: &[u64]| lengths.iter().sum::<u64>() as i64;
        let mut number = position - (total(keys) - total(queries));
        for (&q, &k) in queries.iter().zip(keys) {
            if (0..q as i64).contains(&number) {
                return number + (k as i64 - q as i64);
            }
            number -= q as i64;
        }
        0
    }

    /// The position of a key within its sequence; 0 outside of all.
    pub fn key(self, position: i64) -> i64 {
        let Sequences::Packed(_, keys) = self else { return position };
        let mut number = position;
        for &k in keys {
            if (0..k as i64).contains(&number) {
                return number;
            }
            number -= k as i64;
        }
        0
    }
}

impl Rule {
    /// The sequences that all pairs lie in, so that they have distances; `None` where some may lie in
    /// sequences and others not, or in others.
    pub fn sequences(&self) -> Option<Sequences<'_>> {
        match self {
            Rule::Packed { queries, keys, inner } => {
                let plain = inner.sequences() == Some(Sequences::None);
                plain.then_some(Sequences::Packed(queries, keys))
            }
            Rule::And(rules) => {
                let mut packed = Sequences::None;
                for rule in rules {
                    match rule.sequences()? {
                        Sequences::None => {}
                        other if packed == Sequences::None || packed == other => packed = other,
                        _ => return None,
                    }
                }
                Some(packed)
            }
            Rule::Or(rules) => {
                let mut all = rules.iter().map(Rule::sequences);
                let first = all.next().unwrap_or(Some(Sequences::None))?;
                all.all(|other| other == Some(first)).then_some(first)
            }
            Rule::Not(rule) => (rule.sequences()? == Sequences::None).then_some(Sequences::None),
            _ => Some(Sequences::None),
        }
    }

    /// Whether the query at one global position may see the key at another.
    pub fn allows(&self, query: i64, key: i64) -> bool {
        let (q, k) = (i128::from(query), i128::from(key));
        match self {
            Rule::Full => true,
            Rule::Causal => k <= q,
            Rule::Window { left, right } => {
                q - i128::from(*left) <= k && k <= q + i128::from(*right)
            }
            Rule::SlidingWindow { width } => q - i128::from(*width) < k && k <= q,
            Rule::Sinks { n } => (0..i128::from(*n)).contains(&k),
            Rule::GlobalTokens { n } => {
                (0..i128::from(*n)).contains(&k) || (0..i128::from(*n)).contains(&q)
            }
            Rule::Keys { from, to } => (i128::from(*from)..i128::from(*to)).contains(&k),
            Rule::Queries { from, to } => (i128::from(*from)..i128::from(*to)).contains(&q),
            Rule::Neighborhood { sizes, radii } => both(query, key, |p| cell(sizes, p))
                .is_some_and(|(q, k)| {
                    let mut axes = q.iter().zip(&k).zip(radii);
                    axes.all(|((q, k), radius)| q.abs_diff(*k) <= *radius)
                }),
            Rule::Dilated { segment, rate, offset } => both(query, key, |p| split(p, *segment))
                .is_some_and(|((sq, q), (sk, k))| {
                    sq == sk && q % rate == offset % rate && k % rate == offset % rate
                }),
            Rule::Strided { stride } => (q - k).rem_euclid(i128::from(*stride)) == 0,
            Rule::Hierarchical(levels) => levels.iter().any(|level| {
                let grain = k.div_euclid(i128::from(level.grain));
                (q - k).abs() <= i128::from(level.window)
                    && grain.rem_euclid(i128::from(level.stride)) == 0
            }),
            Rule::Documents(lengths) => {
                both(query, key, |p| find(lengths, p)).is_some_and(|((dq, _), (dk, _))| dq == dk)
            }
            Rule::Packed { queries, keys, inner } => {
                let number = query - (sum(keys) - sum(queries));
                match (find(queries, number), find(keys, key)) {
                    (Some((sq, q)), Some((sk, k))) if sq == sk => {
                        inner.allows(q + (keys[sk] as i64 - queries[sq] as i64), k)
                    }
                    _ => false,
                }
            }
            Rule::BlocksDilated { block, rates } => blocks(query, key, *block)
                .is_some_and(|(i, j)| i == j || rates.contains(&i.abs_diff(j))),
            Rule::Butterfly { block } => {
                blocks(query, key, *block).is_some_and(|(i, j)| (i ^ j).count_ones() <= 1)
            }
            Rule::Random { block, per_row, blocks: n, seed } => {
                blocks(query, key, *block).is_some_and(|(i, j)| drawn(i, j, *per_row, *n, *seed))
            }
            Rule::Blocks { block, rows } => blocks(query, key, *block)
                .is_some_and(|(i, j)| rows.get(i as usize).is_some_and(|row| row.contains(&j))),
            Rule::And(rules) => rules.iter().all(|rule| rule.allows(query, key)),
            Rule::Or(rules) => rules.iter().any(|rule| rule.allows(query, key)),
            Rule::Not(rule) => !rule.allows(query, key),
        }
    }
}

/// The same question asked about the query and the key, if both have an answer.
fn both<T>(query: i64, key: i64, ask: impl Fn(i64) -> Option<T>) -> Option<(T, T)> {
    Some((ask(query)?, ask(key)?))
}

/// Which piece of `size` tokens a position is in, and where in it.
fn split(position: i64, size: u64) -> Option<(u64, u64)> {
    let position = u64::try_from(position).ok()?;
    Some((position / size, position % size))
}

/// The coordinates of a position in a grid.
fn cell(sizes: &[u64], position: i64) -> Option<Vec<u64>> {
    let mut rest = u64::try_from(position).ok()?;
    let mut coordinates = vec![0; sizes.len()];
    for (coordinate, size) in coordinates.iter_mut().zip(sizes).rev() {
        (rest, *coordinate) = (rest / size, rest % size);
    }
    (rest == 0).then_some(coordinates)
}

/// The block of the query and the block of the key.
fn blocks(query: i64, key: i64, block: u64) -> Option<(u64, u64)> {
    both(query, key, |position| split(position, block).map(|(index, _)| index))
}

/// Which of consecutive sequences a position is in, and where in it.
fn find(lengths: &[u64], position: i64) -> Option<(usize, i64)> {
    let mut start = 0;
    for (sequence, &length) in lengths.iter().enumerate() {
        let end = start + length as i64;
        if (start..end).contains(&position) {
            return Some((sequence, position - start));
        }
        start = end;
    }
    None
}

fn sum(lengths: &[u64]) -> i64 {
    lengths.iter().sum::<u64>() as i64
}

/// Whether query block `row` sees `block`. Over half, the draws name the blocks left out.
fn drawn(row: u64, block: u64, per_row: u64, blocks: u64, seed: u64) -> bool {
    let per_row = per_row.min(blocks);
    let over_half = per_row > blocks - per_row;
    let count = if over_half { blocks - per_row } else { per_row };
    block < blocks && Draw { count, blocks, seed, row }.contains(block) != over_half
}
