//! Whose fault it is, found out among ranks that give up together.
//!
//! A rank that has waited in vain knows for whom, and that one may be waiting itself:
//!
//! ```text
//! 0 waits for 1, 1 waits for 2, 2 has stopped:   0 blames 1, 1 blames 2
//! ```
//!
//! So each tells all others whom it blames and on what ground, and follows what they tell. Whoever
//! speaks lives, and is to blame only if it says so itself, or if somebody has seen it.

use std::collections::BTreeMap;

use crate::error::Error;
use crate::message::{GiveUp, Ground};
use crate::transport::Failure;

/// What ranks say that have given up, as one of them hears it.
pub(crate) struct Hearing {
    rank: usize,
    ranks: usize,
    /// Whom this rank blames; all it waited for, in order.
    suspects: Vec<usize>,
    ground: Ground,
    /// By who says so.
    told: BTreeMap<usize, GiveUp>,
}

impl Hearing {
    /// For a rank, of so many, that has met an error; `heard` if it was that another has given up.
    pub(crate) fn about(error: &Error, heard: Option<GiveUp>, rank: usize, ranks: usize) -> Self {
        let (suspects, ground) = match (error, heard) {
            (Error::GivenUp { .. }, Some(why)) => (vec![why.blamed.unwrap_or(why.by)], why.ground),
            (Error::Failed { failure, .. }, _) => {
                let waited = matches!(**failure, Failure::Late { .. } | Failure::Gone { .. });
                let ground = if waited { Ground::Waited } else { Ground::Seen };
                (failure.ranks().collect(), ground)
            }
            (Error::Message { from, .. }, _) => (vec![*from], Ground::Seen),
            _ => (vec![rank], Ground::Seen),
        };
        let told = heard.into_iter().map(|why| (why.by, why)).collect();
        Hearing { rank, ranks, suspects, ground, told }
    }

    /// Whom this rank blames before it has heard anybody, and on what ground.
    pub(crate) fn first_guess(&self) -> (Option<usize>, Ground) {
        (self.suspects.first().copied(), self.ground)
    }

    pub(crate) fn hear(&mut self, why: GiveUp) {
        self.told.insert(why.by, why);
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
        match self.ground {
            Ground::Seen => self.suspects.first().copied(),
            Ground::Waited => self.suspects.iter().find_map(|&suspect| self.end(suspect)),
        }
    }

    /// The one at the end of a chain of blame: silent, or seen. None if the chain leads to nobody
    /// but those who wait for each other.
    fn end(&self, mut rank: usize) -> Option<usize> {
        // It is no longer than there are ranks, unless it is a circle.
        for _ in 0..self.ranks {
            match self.told.get(&rank) {
                None => return Some(rank),
                Some(why) => match (why.ground, why.blamed.unwrap_or(rank)) {
                    (Ground::Seen, blamed) => return Some(blamed),
                    (Ground::Waited, blamed) if blamed == self.rank => return None,
                    (Ground::Waited, blamed) => rank = blamed,
                },
            }
        }
        None
    }

    /// The error, with what was heard.
    pub(crate) fn conclude(self, mut error: Error) -> Error {
        let culprit = self.culprit().filter(|culprit| Some(*culprit) != self.first_guess().0);
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

    fn late(from: &[usize]) -> Error {
        let (from, to, waited) = (from.to_vec(), Vec::new(), Duration::from_secs(1));
        Error::Failed {
            failure: Box::new(Failure::Late { from, to, waited }),
            doing: "agreeing",
            step: 0,
            awaited: "keys".to_owned(),
            blamed: None,
        }
    }

    /// What a rank says; it has seen itself fail.
    fn word(by: usize, blamed: usize) -> GiveUp {
        let ground = if by == blamed { Ground::Seen } else { Ground::Waited };
        GiveUp { by, blamed: Some(blamed), ground, doing: Doing::Agreeing, step: 0 }
    }

    /// Whom rank 0 of `ranks` blames in the end, having waited for some and heard others.
    fn blamed(ranks: usize, from: &[usize], told: &[(usize, usize)]) -> (Option<usize>, bool) {
        let mut hearing = Hearing::about(&late(from), None, 0, ranks);
        told.iter().for_each(|&(by, blamed)| hearing.hear(word(by, blamed)));
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

    /// Rank 2 has seen that rank 1 sent something wrong, and ended; rank 1 waits for it.
    #[test]
    fn what_was_seen_counts_more_than_who_was_waited_for() {
        let seen = GiveUp { ground: Ground::Seen, ..word(2, 1) };
        let heard = word(1, 2);
        let mut hearing = Hearing::about(&heard.into(), Some(heard), 0, 3);
        assert_eq!(hearing.first_guess(), (Some(2), Ground::Waited));
        hearing.hear(seen);
        let Error::GivenUp { rank, .. } = hearing.conclude(heard.into()) else { unreachable!() };
        assert_eq!(rank, Some(1));
        // Rank 1 itself hears that it was the one.
        let mut hearing = Hearing::about(&late(&[2]), None, 1, 3);
        hearing.hear(seen);
        let Error::Failed { blamed, .. } = hearing.conclude(late(&[2])) else { unreachable!() };
        assert_eq!(blamed, Some(1));
        // And who has heard of what was seen doesn't ask further.
        let mut hearing = Hearing::about(&seen.into(), Some(seen), 0, 3);
        hearing.hear(word(1, 2));
        let Error::GivenUp { rank, .. } = hearing.conclude(seen.into()) else { unreachable!() };
        assert_eq!(rank, Some(1));
    }
}
