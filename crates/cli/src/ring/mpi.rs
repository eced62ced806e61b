//! Ranks that are processes of MPI.

use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::Result;
use longspan_ring::{Mpi, Transport};

use super::job::Job;
use super::{Told, conclude, report, tell, work};
use crate::args::Ring;

/// How long a rank that has failed waits for others to say why, before its end makes the launcher
/// end them.
const FAREWELL: Duration = Duration::from_millis(500);

pub(super) fn run(args: &Ring) -> Result<()> {
    let mut mpi = Mpi::world(args.patience)?;
    let rank = mpi.rank();
    let done = Job::new(args, mpi.size(), NonZeroUsize::MIN)
        .and_then(|job| Ok((work(&mut mpi, &job)?, job)));
    let (found, job) = match done {
        Ok(done) => done,
        Err(error) => {
            tell(rank, &error);
            // Who is gone or has stopped doesn't come; that has been told.
            let _ = mpi.meet(FAREWELL);
            return Err(Told { ranks: 1 }.into());
        }
    };
    if let Err(failure) = mpi.close(args.patience) {
        tell(rank, &failure.into());
        return Err(Told { ranks: 1 }.into());
    }
    match found {
        Some(found) => conclude(args, &job, found, report::Carrier::Mpi),
        None => Ok(()),
    }
}
