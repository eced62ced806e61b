//! Patterns per query head. Above `pattern`; used by `text` and `set`.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::pattern::Pattern;

/// One pattern for all query heads, or one per head. A separate type, so that it cannot be nested
/// in a pattern.
///
/// ```
/// use longspan_pattern::{Heads, Pattern};
///
/// let heads: Heads = "heads([causal & window(256, 0), causal])".parse()?;
/// assert_eq!(heads.get(1, 2)?, &Pattern::causal());
/// let same: Heads = Pattern::causal().into();
/// assert_eq!(same.get(31, 32)?, &Pattern::causal());
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
}

impl Heads {
    /// One pattern per query head.
    pub fn each(patterns: impl IntoIterator<Item = Pattern>) -> Result<Self> {
        let patterns: Vec<_> = patterns.into_iter().collect();
        patterns.iter().try_for_each(Pattern::check)?;
        if patterns.is_empty() { Err(Error::NoHeads) } else { Ok(Heads::Each(patterns)) }
    }

    /// The number of heads, if there is one pattern per head.
    pub fn count(&self) -> Option<usize> {
        match self {
            Heads::Same(_) => None,
            Heads::Each(patterns) => Some(patterns.len()),
        }
    }

    /// The pattern of head `head` of `heads`.
    pub fn get(&self, head: usize, heads: usize) -> Result<&Pattern> {
        match self {
            Heads::Same(pattern) => Ok(pattern),
            Heads::Each(patterns) if patterns.len() == heads && head < heads => Ok(&patterns[head]),
            Heads::Each(patterns) => Err(Error::HeadCount { patterns: patterns.len(), heads }),
        }
    }
}

impl From<Pattern> for Heads {
    fn from(pattern: Pattern) -> Self {
        Heads::Same(pattern)
    }
}
