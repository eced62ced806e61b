//! Ranks that are processes of MPI.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyhow::Result;
use longspan_ring::{Mpi, Transport};

use super::job::Job;
use super::{Told, conclude, report, tell, work};
use crate::args::Ring;

/// How long a rank that has failed waits for others to say why, before its end makes the launcher
/// end them.
const FAREWELL: Duration = Duration::from_secs(1);

pub(super) fn run(args: &Ring) -> Result<()> {
    let mut mpi = Mpi::world(args.patience)?;
    let rank = mpi.rank();
    let done = Job::new(args, mpi.size(), NonZeroUsize::MIN)
        .and_then(|job| Ok((work(&mut mpi, &job)?, job)));
    let (found, job) = match done {
        Ok(done) => done,
        Err(error) => {
            tell(rank, &error);
            let start = Instant::now();
            if mpi.meet(FAREWELL).is_err() {
                // Who is gone doesn't come, which MPI may say at once; others are still to speak.
                std::thread::sleep(FAREWELL.saturating_sub(start.elapsed()));
            }
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
