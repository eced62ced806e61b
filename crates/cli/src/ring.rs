//! `longspan ring`: attention over one sequence sharded across ranks, on real transports.
//!
//! ```text
//! every rank: tensors of own tokens → agree → forward, backward × repeat → the same messages alone
//! rank 0:     gather → (MPI_Finalize) → check → report
//! ```
//!
//! Every rank that fails reports its error, with its rank, on standard error.

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
use job::{Job, Outcome};

/// An error that its ranks have reported already.
#[derive(Debug)]
pub(crate) struct Reported {
    pub(crate) ranks: usize,
}

impl fmt::Display for Reported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed", count(self.ranks, "rank"))
    }
}

impl std::error::Error for Reported {}

/// `longspan ring`
pub(crate) fn run(args: &Ring) -> Result<()> {
    match (args.ranks, launched()) {
        (Some(_), Some(size)) if size > 1 => Err(BadInput(format!(
            "--ranks uses threads of this process as ranks, but a launcher has started {size} \
             processes: remove --ranks or the launcher"
        ))
        .into()),
        (Some(ranks), _) => threads(args, ranks),
        (None, size) => processes(args, size),
    }
}

/// Ranks as MPI processes.
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
        "{why}this command was built without MPI: pass --ranks to use threads as ranks, or \
         build it with --features mpi"
    ))
    .into())
}

/// Number of processes that an MPI launcher has started, if there is one.
fn launched() -> Option<usize> {
    let size = |name: &str| std::env::var(name).ok()?.parse().ok();
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"].into_iter().find_map(size)
}

/// Ranks as threads of this process.
fn threads(args: &Ring, ranks: NonZeroUsize) -> Result<()> {
    let job = Job::new(args, ranks.get(), ranks)?;
    let results: Vec<Result<Option<Outcome>>> = std::thread::scope(|scope| {
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
                print_error(rank, &error);
            }
        }
    }
    match found {
        Some(found) if failed == 0 => conclude(args, &job, found, report::Carrier::Threads),
        _ => Err(Reported { ranks: failed }.into()),
    }
}

/// Both passes on one rank; rank 0 returns the statistics of all.
fn work(transport: &mut dyn longspan_ring::Transport, job: &Job) -> Result<Option<Outcome>> {
    with_element!(job.element, E => job::work::<E>(transport, job))
}

/// Prints the error of a rank.
fn print_error(rank: usize, error: &anyhow::Error) {
    // An error of standard error can't be reported.
    let _ = writeln!(io::stderr(), "error: rank {rank}: {error:#}");
}

/// Checks and reports on rank 0, after the last message.
fn conclude(args: &Ring, job: &Job, found: Outcome, carrier: report::Carrier) -> Result<()> {
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
