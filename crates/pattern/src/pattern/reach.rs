//! Which earlier keys later queries can attend to.

use super::{Expr, Pattern};

/// Keys before a position that queries from there on may attend to: those below `first`, and the last
/// `recent`. What is in neither can be forgotten.
///
/// ```
/// use longspan_pattern::Pattern;
///
/// let pattern: Pattern = "causal & (window(1024, 0) | sinks(4))".parse()?;
/// assert_eq!((pattern.reach().first, pattern.reach().recent), (4, 1_024));
/// assert_eq!(Pattern::causal().reach().recent, u64::MAX);
/// # Ok::<_, longspan_pattern::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// Positions from 0 on.
    pub first: u64,
    /// Positions just before; `u64::MAX` is all of them.
    pub recent: u64,
}

impl Reach {
    const NONE: Reach = Reach { first: 0, recent: 0 };
    const ALL: Reach = Reach { first: 0, recent: u64::MAX };

    fn recent(recent: u64) -> Self {
        Reach { first: 0, recent }
    }

    fn first(first: u64) -> Self {
        Reach { first, recent: 0 }
    }

    /// What either reaches.
    #[must_use]
    pub fn or(self, other: Reach) -> Self {
        Reach { first: self.first.max(other.first), recent: self.recent.max(other.recent) }
    }

    /// At least what both reach.
    fn and(self, other: Reach) -> Self {
        // Keys below `first` that are recent, too, are among either of them: the smaller set.
        let both = |first: u64, recent: u64| {
            if first <= recent { Reach::first(first) } else { Reach::recent(recent) }
        };
        Reach { first: self.first.min(other.first), recent: self.recent.min(other.recent) }
            .or(both(self.first, other.recent))
            .or(both(other.first, self.recent))
    }
}

impl Pattern {
    /// Which keys before a position queries from there on may attend to, at most: see [`Reach`].
    pub fn reach(&self) -> Reach {
        match &self.0 {
            Expr::Window { left, .. } => Reach::recent(*left),
            Expr::Sinks { tokens } | Expr::GlobalTokens { tokens } => Reach::first(*tokens),
            // While there is such a query to come, all keys so far are below `to`.
            Expr::Keys { to, .. } | Expr::Queries { to, .. } => Reach::first(*to),
            Expr::Neighborhood { sizes, radii } => {
                let mut cells = 1_u64;
                let mut recent = 0_u64;
                for (size, radius) in sizes.iter().zip(radii).rev() {
                    recent = recent.saturating_add(radius.saturating_mul(cells));
                    cells = cells.saturating_mul(*size);
                }
                Reach::recent(recent)
            }
            Expr::Dilated { segment, .. } => Reach::recent(*segment),
            Expr::Hierarchical(levels) => {
                Reach::recent(levels.iter().map(|level| level.window).max().unwrap_or(0))
            }
            Expr::BlocksDilated { block, rates } => {
                let blocks = rates.iter().max().map_or(1, |rate| rate.saturating_add(1));
                Reach::recent(blocks.saturating_mul(*block))
            }
            Expr::And(parts) => parts.iter().map(Pattern::reach).fold(Reach::ALL, Reach::and),
            Expr::Or(parts) => parts.iter().map(Pattern::reach).fold(Reach::NONE, Reach::or),
            _ => Reach::ALL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every key that a query from a position on attends to is reached.
    #[test]
    fn reaches_what_is_attended_to() {
        let mut bounded = 0;
        for text in [
            "causal",
            "window(5, 2)",
            "causal & (window(7, 0) | sinks(3))",
            "sinks(9) & window(4, 0)",
            "(window(3, 0) | sinks(12)) & (window(20, 0) | sinks(2))",
            "keys(4, 11) | queries(6, 9)",
            "global_tokens(6) & causal",
            "dilated(10, 3, 1) | window(2, 0)",
            "hierarchical([(2, 1, 1), (9, 4, 2)])",
            "neighborhood([5, 7], [1, 2])",
            "neighborhood([3, 4, 4], [1, 1, 1]) & causal",
            "blocks_dilated(4, [1, 3])",
            "blocks_dilated(4, [])",
            "!window(3, 0)",
            "strided(4) & window(9, 0)",
            "butterfly(2) | random(3, 2, 9, 1)",
            "documents([9, 12, 30]) & window(6, 0)",
        ] {
            let pattern: Pattern = text.parse().expect(text);
            let reach = pattern.reach();
            bounded += usize::from(reach.recent < 60);
            for from in 0..48_i64 {
                for (query, key) in
                    (from..60).flat_map(|query| (0..from).map(move |key| (query, key)))
                {
                    let reached = (key as u64) < reach.first || (from - key) as u64 <= reach.recent;
                    assert!(
                        reached || !pattern.allows(query, key),
                        "{text} {query} {key} from {from}"
                    );
                }
            }
        }
        assert_eq!(bounded, 14);
    }
}
