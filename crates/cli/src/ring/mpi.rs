//! Ranks as MPI processes.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use anyhow::Result;
use longspan_ring::{Mpi, Transport};

use super::job::Job;
use super::{Reported, conclude, print_error, report, work};
use crate::args::Ring;

/// How long a rank that has failed waits for the reports of others, before its exit makes the
/// launcher terminate them.
const ABORT_GRACE: Duration = Duration::from_secs(1);

pub(super) fn run(args: &Ring) -> Result<()> {
    let mut mpi = Mpi::world(args.timeout)?;
    let rank = mpi.rank();
    let done = Job::new(args, mpi.size(), NonZeroUsize::MIN)
        .and_then(|job| Ok((work(&mut mpi, &job)?, job)));
    let (found, job) = match done {
        Ok(done) => done,
        Err(error) => {
            print_error(rank, &error);
            let start = Instant::now();
            if mpi.barrier(ABORT_GRACE).is_err() {
                // MPI may report a failed rank at once; other ranks still have to report.
                std::thread::sleep(ABORT_GRACE.saturating_sub(start.elapsed()));
            }
            return Err(Reported { ranks: 1 }.into());
        }
    };
    if let Err(failure) = mpi.close(args.timeout) {
        print_error(rank, &failure.into());
        return Err(Reported { ranks: 1 }.into());
    }
    match found {
        Some(found) => conclude(args, &job, found, report::Carrier::Mpi),
        None => Ok(()),
    }
}
