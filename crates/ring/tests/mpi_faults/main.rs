//! Faults of MPI processes: `mpirun` starts this program again as ranks, one of which has a fault at
//! some hop, and it reads their reports.
//!
//! ```text
//! no variable          a few of every kind
//! LONGSPAN_FAULTS=150  150 random ones
//! LONGSPAN_SEED=7      other random ones
//! LONGSPAN_HOSTS=…     set by benches/ring/hosts: links between hosts can be cut too
//! ```
//!
//! Faults that all processes survive are tried many times per launch, each with its own communicator.
//! Deadlines are those of the ranks; a launch during which this machine stalled, by the clock of this
//! program, is repeated.

#[path = "../common/mod.rs"]
mod common;
mod fault;
mod launch;
mod rank;

use std::collections::BTreeMap;
use std::time::Duration;

use fault::{Fault, Kind};
use launch::{Launch, Launcher, Report};

/// The timeout of ranks.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Additional time for reports.
const SLACK: Duration = Duration::from_secs(2);
/// The timeout of untested operations: start, barrier.
const LONG: Duration = Duration::from_secs(60);
/// Faults per launch that all processes survive.
const PER_LAUNCH: usize = 12;

fn main() {
    if let Ok(faults) = std::env::var(launch::FAULTS) {
        return rank::main(&faults);
    }
    let variable = |name| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let hosts = std::env::var("LONGSPAN_HOSTS").ok();
    let seed = variable("LONGSPAN_SEED").unwrap_or(0) as u64;
    let faults = match variable("LONGSPAN_FAULTS") {
        Some(count) => fault::random(count, seed, hosts.is_some()),
        None => fault::few(hosts.is_some()),
    };
    let mut counts = BTreeMap::new();
    let (deadly, harmless): (Vec<_>, Vec<_>) =
        faults.into_iter().partition(|fault| fault.kind.ends_process());
    for ranks in [3, 4] {
        let these: Vec<_> = harmless.iter().filter(|fault| fault.ranks == ranks).collect();
        for some in these.chunks(PER_LAUNCH) {
            let some: Vec<_> = some.iter().map(|fault| **fault).collect();
            run(&some, Launcher::Survives, &mut counts);
        }
    }
    for (number, fault) in deadly.into_iter().enumerate() {
        let launcher = match fault.kind {
            Kind::Cut => Launcher::Hosts,
            _ if number % 2 == 0 => Launcher::Survives,
            _ => Launcher::EndsAll,
        };
        run(&[fault], launcher, &mut counts);
    }
    let total: usize = counts.values().sum();
    let counts: Vec<_> = counts.iter().map(|(kind, count)| format!("{kind:?} {count}")).collect();
    eprintln!("{total} faults, reported in time by all surviving ranks: {}", counts.join(", "));
}

/// Runs and checks one launch.
fn run(faults: &[Fault], launcher: Launcher, counts: &mut BTreeMap<Kind, usize>) {
    for _ in 0..5 {
        let launch = Launch::new(faults, launcher);
        let ended = launch.watch();
        if let Some(gap) = ended.stalled {
            eprintln!("this machine stalled for {gap:.1?}: repeating {faults:?}");
            continue;
        }
        for (index, fault) in faults.iter().enumerate() {
            let reports = &ended.reports[index];
            if let Err(wrong) = judge(fault, launcher, ended.injected[index], reports, &ended) {
                panic!("{fault:?}, {launcher:?}: {wrong}\n{reports:#?}\n{}", ended.output);
            }
            *counts.entry(fault.kind).or_default() += 1;
            let others = reports.iter().flatten().filter(|report| report.rank != fault.victim);
            let longest = others.filter_map(|report| Some(report.at - ended.injected[index]?));
            let longest = longest.fold(0.0, f64::max);
            eprintln!("{fault:?}, {launcher:?}: {longest:.2} s");
        }
        return;
    }
    panic!("this machine stalls too often to try {faults:?}");
}

/// The first wrong result of a launch.
fn judge(
    fault: &Fault,
    launcher: Launcher,
    injected: Option<f64>,
    reports: &[Option<Report>],
    ended: &launch::Ended,
) -> Result<(), String> {
    let injected = injected.ok_or("the fault was not injected")?;
    let most = (TIMEOUT + SLACK).as_secs_f64();
    if launcher == Launcher::EndsAll {
        let took = ended.at - injected;
        if ended.succeeded || took > most {
            return Err(format!("the job ended after {took} s, successfully: {}", ended.succeeded));
        }
    }
    for (rank, report) in reports.iter().enumerate() {
        let Some(report) = report else {
            let may = fault.kind == Kind::Kill && rank == fault.victim;
            if may || launcher == Launcher::EndsAll {
                continue;
            }
            return Err(format!("rank {rank} has not reported"));
        };
        if report.is_wrong {
            return Err(format!("rank {rank} has wrong results"));
        }
        if fault.kind == Kind::Pause {
            match &report.error {
                None => continue,
                Some(_) => return Err(format!("rank {rank} did not wait")),
            }
        }
        let Some(error) = &report.error else { return Err(format!("rank {rank} has no error")) };
        let victim = rank == fault.victim;
        // A late or stopped rank reports when it continues.
        let may_be_late = victim && matches!(fault.kind, Kind::Stop | Kind::Delay);
        if !may_be_late && report.at - injected > most {
            return Err(format!("rank {rank} reported after {} s", report.at - injected));
        }
        if !victim && !names(error, fault.victim) {
            return Err(format!("rank {rank} does not name the victim"));
        }
    }
    Ok(())
}

/// Whether an error names that rank as the cause.
fn names(error: &str, rank: usize) -> bool {
    match error.rsplit_once("caused by rank ") {
        Some((_, named)) => named == rank.to_string(),
        None => ["rank # ", "ranks [#]"]
            .iter()
            .any(|form| error.contains(&form.replace('#', &rank.to_string()))),
    }
}
