//! `longspan ring`: attention over one sequence that many ranks hold, on real transports.
//!
//! ```text
//! every rank: numbers of own tokens → agree → forward, backward × repeat → the same messages alone
//! rank 0:     what all ranks found → (MPI ends) → check → report
//! ```
//!
//! Whatever fails, every rank that fails says so on standard error with its number.

mod agree;
mod check;
mod job;
#[cfg(feature = "mpi")]
mod mpi;
mod recorder;
mod report;

use std::fmt;
use std::io::{self, Write, stdout};
use std::num::NonZeroUsize;

use anyhow::{Context, Result};
use longspan_ring::Local;

use crate::args::Ring;
use crate::compile::BadInput;
use crate::element::with_element;
use crate::number::count;
use job::{Found, Job};

/// An error that its ranks have told already.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) ranks: usize,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed", count(self.ranks as u64, "rank"))
    }
}

impl std::error::Error for Told {}

/// `longspan ring`
pub(crate) fn run(args: &Ring) -> Result<()> {
    match (args.ranks, launched()) {
        (Some(_), Some(size)) if size > 1 => Err(BadInput(format!(
            "--ranks makes ranks of this process's threads, and a launcher has started {size} \
             processes: leave out one of them"
        ))
        .into()),
        (Some(ranks), _) => threads(args, ranks),
        (None, size) => processes(args, size),
    }
}

/// Ranks that are processes.
#[cfg(feature = "mpi")]
fn processes(args: &Ring, _: Option<usize>) -> Result<()> {
    mpi::run(args)
}

#[cfg(not(feature = "mpi"))]
fn processes(_: &Ring, launched: Option<usize>) -> Result<()> {
    let why = match launched {
        Some(_) => "started by a launcher, but ",
        None => "",
    };
    Err(BadInput(format!(
        "{why}this command was built without MPI: say how many threads are ranks with --ranks, or \
         build it with --features mpi"
    ))
    .into())
}

/// How many processes a launcher of MPI has started, if one has.
fn launched() -> Option<usize> {
    let size = |name: &str| std::env::var(name).ok()?.parse().ok();
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"].into_iter().find_map(size)
}

/// Ranks that are threads of this process.
fn threads(args: &Ring, ranks: NonZeroUsize) -> Result<()> {
    let job = Job::new(args, ranks.get(), ranks)?;
    let results: Vec<Result<Option<Found>>> = std::thread::scope(|scope| {
        let job = &job;
        let start = |mut rank: Local| scope.spawn(move || work(&mut rank, job));
        let ranks: Vec<_> = Local::ranks(ranks.get()).into_iter().map(start).collect();
        let joined = ranks.into_iter().map(|rank| rank.join());
        joined.map(|rank| rank.unwrap_or_else(|_| Err(anyhow::anyhow!("panicked")))).collect()
    });
    let mut found = None;
    let mut failed = 0;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(of_rank) => found = found.or(of_rank),
            Err(error) => {
                failed += 1;
                tell(rank, &error);
            }
        }
    }
    match found {
        Some(found) if failed == 0 => conclude(args, &job, found, report::Carrier::Threads),
        _ => Err(Told { ranks: failed }.into()),
    }
}

/// Both passes on one rank; rank 0 has what all found.
fn work(transport: &mut dyn longspan_ring::Transport, job: &Job) -> Result<Option<Found>> {
    with_element!(job.element, E => job::work::<E>(transport, job))
}

/// Says what has gone wrong on a rank.
fn tell(rank: usize, error: &anyhow::Error) {
    // Nobody is left to tell if this fails too.
    let _ = writeln!(io::stderr(), "error: rank {rank}: {error:#}");
}

/// What rank 0 does once nobody waits for it.
fn conclude(args: &Ring, job: &Job, found: Found, carrier: report::Carrier) -> Result<()> {
    let checked = match &found.results {
        Some(results) => Some(with_element!(job.element, E => check::check::<E>(job, results))?),
        None => None,
    };
    let report = report::Report::new(job, &found, checked.as_ref(), carrier);
    let mut out = stdout().lock();
    match args.json {
        true => report.json(&mut out)?,
        false => report.table(&mut out)?,
    }
    out.flush()?;
    let wrong = checked.map_or(Vec::new(), |checked| checked.wrong);
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(anyhow::anyhow!("{}", wrong.join("; "))).context("results are wrong"),
    }
}
