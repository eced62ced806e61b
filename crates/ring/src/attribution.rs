//! Failure attribution: which rank caused a failure that several ranks report. `communicator` uses it.
//!
//! A rank that timed out knows which rank it waited for, and that rank may have been waiting itself:
//!
//! ```text
//! 0 waits for 1, 1 waits for 2, 2 has stopped:   0 suspects 1, 1 suspects 2
//! ```
//!
//! So each aborting rank broadcasts its suspect and the cause, and follows the chain of reports. A
//! rank that reports is alive. It caused the failure only if it reports itself, or if another rank
//! observed its error.

use std::collections::BTreeMap;

use crate::error::Error;
use crate::message::{Abort, FailureCause};
use crate::transport::Failure;

/// One rank's error and the aborts that other ranks report.
pub(crate) struct Attribution {
    rank: usize,
    ranks: usize,
    /// All ranks that this rank suspects, in order.
    suspects: Vec<usize>,
    cause: FailureCause,
    /// By reporting rank.
    reports: BTreeMap<usize, Abort>,
}

impl Attribution {
    /// For the error of `rank`; `received` if it was the abort of another rank.
    pub(crate) fn new(error: &Error, received: Option<Abort>, rank: usize, ranks: usize) -> Self {
        let (suspects, cause) = match (error, received) {
            (Error::Aborted { .. }, Some(abort)) => {
                (vec![abort.suspect.unwrap_or(abort.by)], abort.cause)
            }
            (Error::Failed { failure, .. }, _) => {
                let waited = matches!(**failure, Failure::Timeout { .. } | Failure::Gone { .. });
                let cause = if waited { FailureCause::Timeout } else { FailureCause::Observed };
                (failure.ranks().collect(), cause)
            }
            (Error::Message { from, .. }, _) => (vec![*from], FailureCause::Observed),
            _ => (vec![rank], FailureCause::Observed),
        };
        let reports = received.into_iter().map(|abort| (abort.by, abort)).collect();
        Attribution { rank, ranks, suspects, cause, reports }
    }

    /// Suspect and cause from this rank's own error.
    pub(crate) fn own_report(&self) -> (Option<usize>, FailureCause) {
        (self.suspects.first().copied(), self.cause)
    }

    pub(crate) fn add_report(&mut self, abort: Abort) {
        self.reports.insert(abort.by, abort);
    }

    /// Whether no further report can change the result: all ranks have reported, or all except the
    /// one that they suspect.
    pub(crate) fn is_settled(&self) -> bool {
        let missing = self.ranks.saturating_sub(1 + self.reports.len());
        let unanimous = |suspect| {
            let others = || self.reports.keys().map(|&other| self.chain_end(other));
            !self.reports.contains_key(&suspect) && others().all(|end| end == Some(suspect))
        };
        missing == 0 || missing == 1 && self.suspect().is_some_and(unanimous)
    }

    fn suspect(&self) -> Option<usize> {
        match self.cause {
            FailureCause::Observed => self.suspects.first().copied(),
            FailureCause::Timeout => {
                self.suspects.iter().find_map(|&suspect| self.chain_end(suspect))
            }
        }
    }

    /// The end of a chain of suspects: a rank without report, or one whose error was observed. None
    /// if the chain is a cycle of ranks that wait for each other.
    fn chain_end(&self, mut rank: usize) -> Option<usize> {
        // A chain without cycle has at most as many links as there are ranks.
        for _ in 0..self.ranks {
            match self.reports.get(&rank) {
                None => return Some(rank),
                Some(abort) => match (abort.cause, abort.suspect.unwrap_or(rank)) {
                    (FailureCause::Observed, suspect) => return Some(suspect),
                    (FailureCause::Timeout, suspect) if suspect == self.rank => return None,
                    (FailureCause::Timeout, suspect) => rank = suspect,
                },
            }
        }
        None
    }

    /// The error, with the suspect that the reports lead to.
    pub(crate) fn apply(self, mut error: Error) -> Error {
        let found = self.suspect().filter(|suspect| Some(*suspect) != self.own_report().0);
        if let (Error::Failed { suspect, .. } | Error::Aborted { suspect, .. }, Some(_)) =
            (&mut error, found)
        {
            *suspect = found;
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::phase::Phase;

    fn late(from: &[usize]) -> Error {
        let (from, to, waited) = (from.to_vec(), Vec::new(), Duration::from_secs(1));
        Error::Failed {
            failure: Box::new(Failure::Timeout { from, to, waited }),
            phase: "setup",
            step: 0,
            awaited: "keys".to_owned(),
            suspect: None,
        }
    }

    /// The report of a rank; it has observed its own failure.
    fn report(by: usize, suspect: usize) -> Abort {
        let cause = if by == suspect { FailureCause::Observed } else { FailureCause::Timeout };
        Abort { by, suspect: Some(suspect), cause, phase: Phase::Setup, step: 0 }
    }

    /// The suspect of rank 0 of `ranks` after timeouts and reports, and whether it is settled.
    fn attribute(
        ranks: usize,
        from: &[usize],
        reports: &[(usize, usize)],
    ) -> (Option<usize>, bool) {
        let mut attribution = Attribution::new(&late(from), None, 0, ranks);
        reports.iter().for_each(|&(by, suspect)| attribution.add_report(report(by, suspect)));
        let settled = attribution.is_settled();
        let Error::Failed { suspect, .. } = attribution.apply(late(from)) else { unreachable!() };
        (suspect, settled)
    }

    #[test]
    fn chains_end_at_the_rank_without_report() {
        assert_eq!(attribute(3, &[1], &[]), (None, false));
        assert_eq!(attribute(3, &[1], &[(1, 2)]), (Some(2), true));
        assert_eq!(attribute(5, &[1], &[(1, 3), (3, 4)]), (Some(4), false));
        assert_eq!(attribute(5, &[1], &[(1, 3), (3, 4), (2, 4)]), (Some(4), true));
        // No other rank suspects rank 1, so its report may follow.
        assert_eq!(attribute(4, &[1], &[(2, 3), (3, 3)]), (None, false));
        assert_eq!(attribute(4, &[1], &[(2, 3), (3, 3), (1, 3)]), (Some(3), true));
        // Reports of ranks outside of the chain do not count.
        assert_eq!(attribute(4, &[1], &[(2, 3)]), (None, false));
    }

    #[test]
    fn of_several_suspects_those_that_report_are_cleared() {
        assert_eq!(attribute(3, &[1, 2], &[(1, 2)]), (Some(2), true));
        // Rank 1 waits for rank 0, which waits for rank 2.
        assert_eq!(attribute(3, &[1, 2], &[(1, 0)]), (Some(2), false));
        assert_eq!(attribute(3, &[1, 2], &[(2, 1)]), (None, true));
    }

    #[test]
    fn a_rank_that_reports_itself_is_the_suspect() {
        assert_eq!(attribute(4, &[1], &[(1, 2), (2, 2)]), (Some(2), false));
        assert_eq!(attribute(4, &[1], &[(1, 2), (2, 2), (3, 2)]), (Some(2), true));
    }

    #[test]
    fn cycles_end() {
        assert_eq!(attribute(4, &[1], &[(1, 2), (2, 1)]), (None, false));
        assert_eq!(attribute(3, &[1], &[(1, 0)]), (None, false));
    }

    /// Rank 2 has observed a wrong message of rank 1 and ended; rank 1 waits for rank 2.
    #[test]
    fn observed_errors_outrank_timeouts() {
        let observed = Abort { cause: FailureCause::Observed, ..report(2, 1) };
        let received = report(1, 2);
        let mut attribution = Attribution::new(&received.into(), Some(received), 0, 3);
        assert_eq!(attribution.own_report(), (Some(2), FailureCause::Timeout));
        attribution.add_report(observed);
        let Error::Aborted { suspect, .. } = attribution.apply(received.into()) else {
            unreachable!()
        };
        assert_eq!(suspect, Some(1));
        // Rank 1 learns that it was the cause.
        let mut attribution = Attribution::new(&late(&[2]), None, 1, 3);
        attribution.add_report(observed);
        let Error::Failed { suspect, .. } = attribution.apply(late(&[2])) else { unreachable!() };
        assert_eq!(suspect, Some(1));
        // An observed error ends the search.
        let mut attribution = Attribution::new(&observed.into(), Some(observed), 0, 3);
        attribution.add_report(report(1, 2));
        let Error::Aborted { suspect, .. } = attribution.apply(observed.into()) else {
            unreachable!()
        };
        assert_eq!(suspect, Some(1));
    }
}
