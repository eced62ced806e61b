//! Whose fault it is, found out among ranks that give up together.
//!
//! A rank that has waited in vain knows for whom, and that one may be waiting itself:
//!
//! ```text
//! 0 waits for 1, 1 waits for 2, 2 has stopped:   0 blames 1, 1 blames 2
//! ```
//!
//! So each tells all others whom it blames, and follows what they tell. Whoever speaks lives, and is
//! to blame only if it says so itself.

use std::collections::BTreeMap;

use crate::error::Error;
use crate::message::GiveUp;

/// What ranks say that have given up, as one of them hears it.
pub(crate) struct Hearing {
    rank: usize,
    ranks: usize,
    /// Whom this rank has waited for, or heard blamed; in order.
    suspects: Vec<usize>,
    /// Whom others blame, by who says so.
    told: BTreeMap<usize, Option<usize>>,
}

impl Hearing {
    /// For a rank, of so many, that has met an error.
    pub(crate) fn about(error: &Error, rank: usize, ranks: usize) -> Self {
        let suspects = match error {
            Error::Failed { failure, .. } => failure.ranks().collect(),
            Error::Message { from, .. } => vec![*from],
            Error::GivenUp { rank, by, .. } => vec![rank.unwrap_or(*by)],
            _ => vec![rank],
        };
        Hearing { rank, ranks, suspects, told: BTreeMap::new() }
    }

    /// Whom this rank blames before it has heard anybody.
    pub(crate) fn first_guess(&self) -> Option<usize> {
        self.suspects.first().copied()
    }

    pub(crate) fn hear(&mut self, why: GiveUp) {
        self.told.insert(why.by, why.blamed);
    }

    /// Whether nobody is left who could say something new: all have spoken, or all but one whom
    /// they blame.
    pub(crate) fn is_over(&self) -> bool {
        let silent = self.ranks.saturating_sub(1 + self.told.len());
        let agreed = |culprit| {
            let others = || self.told.keys().map(|&other| self.end(other));
            !self.told.contains_key(&culprit) && others().all(|end| end == Some(culprit))
        };
        silent == 0 || silent == 1 && self.culprit().is_some_and(agreed)
    }

    fn culprit(&self) -> Option<usize> {
        self.suspects.iter().find_map(|&suspect| self.end(suspect))
    }

    /// The one at the end of a chain of blame: silent, or to blame by its own word. None if the chain
    /// leads back to this rank.
    fn end(&self, mut rank: usize) -> Option<usize> {
        // It is no longer than there are ranks, unless it is a circle.
        for _ in 0..self.ranks {
            match self.told.get(&rank) {
                Some(Some(next)) if *next == self.rank => return None,
                Some(Some(next)) if *next != rank => rank = *next,
                _ => return Some(rank),
            }
        }
        None
    }

    /// The error, with what was heard.
    pub(crate) fn conclude(self, mut error: Error) -> Error {
        let culprit = self.culprit().filter(|culprit| Some(*culprit) != self.first_guess());
        match (&mut error, culprit) {
            (Error::Failed { blamed, .. }, Some(_)) => *blamed = culprit,
            (Error::GivenUp { rank, .. }, Some(_)) => *rank = culprit,
            _ => {}
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::message::Doing;
    use crate::transport::Failure;

    fn late(from: &[usize]) -> Error {
        let (from, to, waited) = (from.to_vec(), Vec::new(), Duration::from_secs(1));
        Error::Failed {
            failure: Failure::Late { from, to, waited },
            doing: "agreeing",
            step: 0,
            awaited: "keys".to_owned(),
            blamed: None,
        }
    }

    /// Whom rank 0 of `ranks` blames in the end, having waited for some and heard others.
    fn blamed(ranks: usize, from: &[usize], told: &[(usize, usize)]) -> (Option<usize>, bool) {
        let mut hearing = Hearing::about(&late(from), 0, ranks);
        for &(by, blamed) in told {
            hearing.hear(GiveUp { by, blamed: Some(blamed), doing: Doing::Agreeing, step: 0 });
        }
        let over = hearing.is_over();
        let Error::Failed { blamed, .. } = hearing.conclude(late(from)) else { unreachable!() };
        (blamed, over)
    }

    #[test]
    fn chains_are_followed_to_who_is_silent() {
        assert_eq!(blamed(3, &[1], &[]), (None, false));
        assert_eq!(blamed(3, &[1], &[(1, 2)]), (Some(2), true));
        assert_eq!(blamed(5, &[1], &[(1, 3), (3, 4)]), (Some(4), false));
        assert_eq!(blamed(5, &[1], &[(1, 3), (3, 4), (2, 4)]), (Some(4), true));
        // Nobody else blames it, so it may still speak.
        assert_eq!(blamed(4, &[1], &[(2, 3), (3, 3)]), (None, false));
        assert_eq!(blamed(4, &[1], &[(2, 3), (3, 3), (1, 3)]), (Some(3), true));
        // What others blame who aren't waited for is another matter.
        assert_eq!(blamed(4, &[1], &[(2, 3)]), (None, false));
    }

    #[test]
    fn of_many_that_are_waited_for_those_that_speak_are_not_to_blame() {
        assert_eq!(blamed(3, &[1, 2], &[(1, 2)]), (Some(2), true));
        // Rank 1 waits for this one, which waits for rank 2.
        assert_eq!(blamed(3, &[1, 2], &[(1, 0)]), (Some(2), false));
        assert_eq!(blamed(3, &[1, 2], &[(2, 1)]), (None, true));
    }

    #[test]
    fn who_blames_itself_is_believed() {
        assert_eq!(blamed(4, &[1], &[(1, 2), (2, 2)]), (Some(2), false));
        assert_eq!(blamed(4, &[1], &[(1, 2), (2, 2), (3, 2)]), (Some(2), true));
    }

    #[test]
    fn circles_end() {
        assert_eq!(blamed(4, &[1], &[(1, 2), (2, 1)]), (None, false));
        assert_eq!(blamed(3, &[1], &[(1, 0)]), (None, false));
    }
}
