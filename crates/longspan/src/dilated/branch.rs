//! Branches, and how those that see the same key combine.

use longspan_pattern::Pattern;

use crate::error::{Error, Result};

/// A segment length `w` and a dilation rate `r`.
///
/// ```
/// use longspan::Branch;
///
/// let branch = Branch::new(4_096, 2)?;
/// assert_eq!((branch.segment(), branch.rate()), (4_096, 2));
/// assert!(Branch::new(4_096, 0).is_err());
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Branch {
    segment: u64,
    rate: u64,
}

impl Branch {
    /// Segments of `segment` tokens, of which every `rate`-th is seen; at least 1 each.
    pub fn new(segment: u64, rate: u64) -> Result<Self> {
        Pattern::dilated(segment, rate, 0)?;
        Ok(Branch { segment, rate })
    }

    /// Tokens per segment.
    pub fn segment(&self) -> u64 {
        self.segment
    }

    /// From one seen token to the next.
    pub fn rate(&self) -> u64 {
        self.rate
    }
}

impl TryFrom<(u64, u64)> for Branch {
    type Error = Error;

    fn try_from((segment, rate): (u64, u64)) -> Result<Self> {
        Branch::new(segment, rate)
    }
}

/// How branches that see the same key combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overlap {
    /// Once per branch. This is the paper: its weights are the branches' softmax denominators, and
    /// such a key is in each of them.
    #[default]
    Weighted,
    /// Once: attention over the union of the branches' sets, which is what
    /// `dilated(w₁, r₁, o₁) | dilated(w₂, r₂, o₂) | …` says as a [`Pattern`].
    Union,
}
