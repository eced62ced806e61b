//! Patterns per query head and batch entry. Above `pattern`; used by `text` and `set`.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::pattern::{Pattern, Reach};

/// One pattern for all query heads, one per head, or either of these per batch entry. A separate type,
/// so that it cannot be nested in a pattern.
///
/// ```
/// use longspan_pattern::{Heads, Pattern};
///
/// let heads: Heads = "heads([causal & window(256, 0), causal])".parse()?;
/// assert_eq!(heads.get(1, 2)?, &Pattern::causal());
/// let same: Heads = Pattern::causal().into();
/// assert_eq!(same.get(31, 32)?, &Pattern::causal());
/// // Two batch entries, of which the first has a global token at position 7.
/// let batch: Heads = "batch([causal | keys(7, 8), causal])".parse()?;
/// assert_eq!((batch.entries(), batch.entry(1)), (Some(2), &same));
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum Heads {
    /// Every head has this pattern.
    Same(Pattern),
    /// Head `h` has the `h`-th pattern; never empty, constructed by [`Heads::each`] only.
    #[non_exhaustive]
    Each(Vec<Pattern>),
    /// Batch entry `b` has the `b`-th; never empty and never nested, constructed by
    /// [`Heads::batch`] only.
    #[non_exhaustive]
    Batch(Vec<Heads>),
}

impl Heads {
    /// One pattern per query head.
    pub fn each(patterns: impl IntoIterator<Item = Pattern>) -> Result<Self> {
        let patterns: Vec<_> = patterns.into_iter().collect();
        patterns.iter().try_for_each(Pattern::check)?;
        if patterns.is_empty() { Err(Error::NoHeads) } else { Ok(Heads::Each(patterns)) }
    }

    /// What each batch entry has: a pattern, or one per query head.
    pub fn batch(entries: impl IntoIterator<Item = Heads>) -> Result<Self> {
        let entries: Vec<_> = entries.into_iter().collect();
        let fail = |message: &str| Err(Error::Set(message.into()));
        if entries.is_empty() {
            return fail("batch([]): expected a pattern per batch entry");
        }
        if entries.iter().any(|entry| entry.entries().is_some()) {
            return fail("batch([…]) inside of batch([…]), expected patterns or heads([…])");
        }
        let counts: Vec<_> = entries.iter().filter_map(Heads::count).collect();
        if let Some(&heads) = counts.iter().find(|&&count| count != counts[0]) {
            return Err(Error::HeadCount { patterns: counts[0], heads });
        }
        Ok(Heads::Batch(entries))
    }

    /// The number of heads, if there is one pattern per head.
    pub fn count(&self) -> Option<usize> {
        match self {
            Heads::Same(_) => None,
            Heads::Each(patterns) => Some(patterns.len()),
            Heads::Batch(entries) => entries.iter().find_map(Heads::count),
        }
    }

    /// The number of batch entries, if they differ.
    pub fn entries(&self) -> Option<usize> {
        match self {
            Heads::Batch(entries) => Some(entries.len()),
            _ => None,
        }
    }

    /// The patterns of a batch entry.
    ///
    /// # Panics
    ///
    /// If entries differ and there is no such entry.
    pub fn entry(&self, entry: usize) -> &Heads {
        match self {
            Heads::Batch(entries) => &entries[entry],
            same => same,
        }
    }

    /// The patterns over packed sequences: see [`Pattern::packed_cu_seqlens`].
    pub fn packed_cu_seqlens(&self, cu_seqlens_q: &[u64], cu_seqlens_k: &[u64]) -> Result<Self> {
        let pack =
            |one: &Pattern| Pattern::packed_cu_seqlens(cu_seqlens_q, cu_seqlens_k, one.clone());
        match self {
            Heads::Same(pattern) => Ok(pack(pattern)?.into()),
            Heads::Each(patterns) => {
                Heads::each(patterns.iter().map(pack).collect::<Result<Vec<_>>>()?)
            }
            Heads::Batch(_) => {
                let message =
                    "packed sequences are one batch entry, which has a pattern per batch entry";
                Err(Error::Set(message.into()))
            }
        }
    }

    /// What any of the patterns reaches: see [`Pattern::reach`].
    pub fn reach(&self) -> Reach {
        let union = |reaches: &mut dyn Iterator<Item = Reach>| reaches.reduce(Reach::or);
        match self {
            Heads::Same(pattern) => pattern.reach(),
            Heads::Each(patterns) => union(&mut patterns.iter().map(Pattern::reach)).expect("some"),
            Heads::Batch(entries) => union(&mut entries.iter().map(Heads::reach)).expect("some"),
        }
    }

    /// The pattern of head `head` of `heads`, where it is the same for all batch entries.
    pub fn get(&self, head: usize, heads: usize) -> Result<&Pattern> {
        match self {
            Heads::Same(pattern) => Ok(pattern),
            Heads::Each(patterns) if patterns.len() == heads && head < heads => Ok(&patterns[head]),
            Heads::Each(patterns) => Err(Error::HeadCount { patterns: patterns.len(), heads }),
            Heads::Batch(_) => {
                let message = "a pattern per batch entry, expected one for all of them: give that of an entry";
                Err(Error::Set(message.into()))
            }
        }
    }
}

impl From<Pattern> for Heads {
    fn from(pattern: Pattern) -> Self {
        Heads::Same(pattern)
    }
}
