//! Faults of ranks that are processes of MPI: `mpirun` starts this program again, as ranks to one of
//! which something happens at some hop, and it reads what they report.
//!
//! ```text
//! no variable          a few of every kind
//! LONGSPAN_FAULTS=150  so many, at random
//! LONGSPAN_SEED=7      other ones
//! LONGSPAN_HOSTS=…     set by benches/ring/hosts: links between hosts can be cut too
//! ```
//!
//! Whatever leaves all processes alive is tried many times a launch, each time on a communicator of
//! its own. Deadlines are those of the ranks; a machine that stood still meanwhile is found by the
//! clock of this program, and the launch counts for nothing.

#[path = "../common/mod.rs"]
mod common;
mod fault;
mod launch;
mod rank;

use std::collections::BTreeMap;
use std::time::Duration;

use fault::{Fault, Kind};
use launch::{Launch, Launcher, Report};

/// How long ranks wait for each other.
const PATIENCE: Duration = Duration::from_secs(3);
/// What reporting may take beyond that.
const SLACK: Duration = Duration::from_secs(2);
/// For what isn't looked at: starting, meeting again.
const LONG: Duration = Duration::from_secs(60);
/// Faults of one launch that all processes survive.
const AT_ONCE: usize = 12;

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
        faults.into_iter().partition(|fault| fault.kind.ends_a_process());
    for ranks in [3, 4] {
        let these: Vec<_> = harmless.iter().filter(|fault| fault.ranks == ranks).collect();
        for some in these.chunks(AT_ONCE) {
            let some: Vec<_> = some.iter().map(|fault| **fault).collect();
            run(&some, Launcher::LetsLive, &mut counts);
        }
    }
    for (number, fault) in deadly.into_iter().enumerate() {
        let launcher = match fault.kind {
            Kind::Cut => Launcher::Hosts,
            _ if number % 2 == 0 => Launcher::LetsLive,
            _ => Launcher::EndsAll,
        };
        run(&[fault], launcher, &mut counts);
    }
    let total: usize = counts.values().sum();
    let counts: Vec<_> = counts.iter().map(|(kind, count)| format!("{kind:?} {count}")).collect();
    eprintln!("{total} faults, all noticed in time by all ranks that lived: {}", counts.join(", "));
}

/// One launch, judged.
fn run(faults: &[Fault], launcher: Launcher, counts: &mut BTreeMap<Kind, usize>) {
    for _ in 0..5 {
        let launch = Launch::new(faults, launcher);
        let ended = launch.watch();
        if let Some(gap) = ended.stood_still {
            eprintln!("this machine stood still for {gap:.1?}: {faults:?} again");
            continue;
        }
        for (number, fault) in faults.iter().enumerate() {
            let reports = &ended.reports[number];
            if let Err(wrong) = judge(fault, launcher, ended.struck[number], reports, &ended) {
                panic!("{fault:?}, {launcher:?}: {wrong}\n{reports:#?}\n{}", ended.said);
            }
            *counts.entry(fault.kind).or_default() += 1;
            let others = reports.iter().flatten().filter(|report| report.rank != fault.victim);
            let longest = others.filter_map(|report| Some(report.at - ended.struck[number]?));
            let longest = longest.fold(0.0, f64::max);
            eprintln!("{fault:?}, {launcher:?}: {longest:.2} s");
        }
        return;
    }
    panic!("this machine doesn't run for long enough to try {faults:?}");
}

/// What is wrong with how ranks ended.
fn judge(
    fault: &Fault,
    launcher: Launcher,
    struck: Option<f64>,
    reports: &[Option<Report>],
    ended: &launch::Ended,
) -> Result<(), String> {
    let struck = struck.ok_or("nothing has happened")?;
    let most = (PATIENCE + SLACK).as_secs_f64();
    if launcher == Launcher::EndsAll {
        let took = ended.at - struck;
        if ended.succeeded || took > most {
            return Err(format!("the job ended after {took} s, well: {}", ended.succeeded));
        }
    }
    for (rank, report) in reports.iter().enumerate() {
        let Some(report) = report else {
            let may = fault.kind == Kind::Kill && rank == fault.victim;
            if may || launcher == Launcher::EndsAll {
                continue;
            }
            return Err(format!("rank {rank} says nothing"));
        };
        if report.is_wrong {
            return Err(format!("rank {rank} has wrong numbers"));
        }
        if fault.kind == Kind::Pause {
            match &report.error {
                None => continue,
                Some(_) => return Err(format!("rank {rank} didn't wait")),
            }
        }
        let Some(error) = &report.error else { return Err(format!("rank {rank} saw nothing")) };
        let victim = rank == fault.victim;
        // One that was late or stopped for long reports when it is back.
        let may_be_late = victim && matches!(fault.kind, Kind::Stop | Kind::Delay);
        if !may_be_late && report.at - struck > most {
            return Err(format!("rank {rank} spoke after {} s", report.at - struck));
        }
        if !victim && !blames(error, fault.victim) {
            return Err(format!("rank {rank} doesn't say who it was"));
        }
    }
    Ok(())
}

/// Whether an error is about that rank.
fn blames(error: &str, rank: usize) -> bool {
    match error.rsplit_once("because of rank ") {
        Some((_, named)) => named == rank.to_string(),
        None => ["rank # ", "ranks [#]", "ranks # don't"]
            .iter()
            .any(|form| error.contains(&form.replace('#', &rank.to_string()))),
    }
}
