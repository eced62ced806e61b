//! If a rank fails, all others end with an error that names it, in time. Faults at every hop are in
//! the ring's own `tests/mpi_faults`.

use std::time::{Duration, Instant, SystemTime};

use crate::common::finish;
use crate::launch::{End, Job, Launcher, mpirun};

const TIMEOUT: Duration = Duration::from_secs(3);
/// Time for reporting beyond that.
const SLACK: Duration = Duration::from_secs(2);

/// Passes without an end.
const ENDLESS: [&str; 12] = [
    "causal & (window(300, 0) | sinks(4))",
    "--tokens",
    "3000",
    "--heads",
    "2",
    "--head-dim",
    "32",
    "--repeat",
    "100000000",
    "--timeout",
    "3",
    "--json",
];

/// Every survivor reports an error, and at least one names the failed rank: others may wait
/// for a rank that waits for it.
fn say_so(end: &End, launcher: Launcher, victim: usize) {
    let survivors = || (0..end.said.len()).filter(|&rank| rank != victim);
    for rank in survivors() {
        let said = &end.said[rank];
        let speaks = said.contains(&format!("error: rank {rank}: "));
        let ended = launcher == Launcher::EndsAll && said.is_empty();
        assert!(speaks || ended, "rank {rank} said {said:?}");
    }
    let blames = |said: &str| {
        let why = said.split_once("error: rank ").and_then(|(_, rest)| rest.split_once(": "));
        let named = [format!("rank {victim}"), format!("ranks [{victim}]")];
        why.is_some_and(|(_, why)| named.iter().any(|name| why.contains(name)))
    };
    assert!(survivors().any(|rank| blames(&end.said[rank])), "{:?}", end.said);
}

/// Lets passes run, then sends a signal to a rank, anywhere in a pass; returns how all ended.
fn strike(name: &str, launcher: Launcher, ranks: usize, victim: usize, signal: &str) -> End {
    let survivors: Vec<_> = (0..ranks).filter(|&rank| rank != victim).collect();
    let job = Job::start(name, launcher, ranks, &ENDLESS);
    (0..ranks).for_each(|rank| drop(job.pid(rank)));
    // `MPI_Init` takes some hundred milliseconds, and has no deadline of its own.
    std::thread::sleep(Duration::from_millis(1_800));
    job.signal(victim, signal);
    let (struck, start) = (SystemTime::now(), Instant::now());
    let end = job.end(&survivors);
    if launcher != Launcher::LetsSpeak {
        assert!(!end.status.success(), "{name}: the launcher says that all is well");
    }
    assert!(start.elapsed() < TIMEOUT + SLACK + Duration::from_secs(5), "{name}");
    for &rank in &survivors {
        if !end.said[rank].is_empty() {
            let took = end.when[rank].duration_since(struck).unwrap_or_default();
            assert!(took < TIMEOUT + SLACK, "{name}: rank {rank} spoke after {took:?}");
        }
    }
    end
}

/// The launcher terminates all ranks, possibly before they report.
#[test]
fn killed() {
    let end = strike("killed", Launcher::EndsAll, 3, 1, "KILL");
    assert!(end.status.code() != Some(124), "only the time limit ended it");
}

#[test]
fn killed_and_others_live() {
    for (ranks, victim) in [(3, 1), (4, 0)] {
        let name = format!("killed-{ranks}-{victim}");
        say_so(
            &strike(&name, Launcher::LetsLive, ranks, victim, "KILL"),
            Launcher::LetsLive,
            victim,
        );
    }
}

/// Only the timeout of the other ranks detects it.
#[test]
fn stopped() {
    for launcher in [Launcher::EndsAll, Launcher::LetsSpeak] {
        let end = strike(&format!("stopped-{launcher:?}"), launcher, 3, 2, "STOP");
        say_so(&end, launcher, 2);
    }
}

/// A pause that is shorter than the timeout changes nothing.
#[test]
fn late_but_not_too_late() {
    let mut args = ENDLESS.to_vec();
    args[8] = "300";
    let job = Job::start("late", Launcher::EndsAll, 3, &args);
    let pid_is_there = job.pid(1);
    assert!(!pid_is_there.is_empty());
    std::thread::sleep(Duration::from_millis(1_200));
    job.signal(1, "STOP");
    std::thread::sleep(TIMEOUT / 3);
    job.signal(1, "CONT");
    let end = job.end(&[0, 1, 2]);
    assert!(end.status.success(), "{:?}", end.said);
    assert!(end.said.iter().all(String::is_empty), "{:?}", end.said);
}

/// A process that doesn't call MPI_Init: the others would wait inside MPI forever.
#[test]
fn one_that_never_comes() {
    let exe = env!("CARGO_BIN_EXE_longspan");
    let come = format!("exec {exe} ring causal --tokens 100 --heads 1 --timeout 3");
    let script = format!("if [ $OMPI_COMM_WORLD_RANK = 1 ]; then sleep 60; else {come}; fi");
    let start = Instant::now();
    let run = finish(mpirun(Launcher::EndsAll).args(["-n", "3", "sh", "-c", &script]));
    assert!(run.code != Some(0) && run.stdout.is_empty(), "{}", run.stdout);
    assert!(start.elapsed() < TIMEOUT + SLACK + Duration::from_secs(3));
    assert!(run.stderr.contains("MPI_Init_thread has not returned after 3.0 s"), "{}", run.stderr);
}

/// The errors of three ranks of which two have the same options and the third has others.
fn disagreement(two: &[&str], third: &[&str]) -> String {
    let ring = [env!("CARGO_BIN_EXE_longspan"), "ring", "--timeout", "3", "--tokens", "1000"];
    let mut command = mpirun(Launcher::EndsAll);
    command.args(["-n", "2"]).args(ring).args(two);
    command.args([":", "-n", "1"]).args(ring).args(third);
    let start = Instant::now();
    let run = finish(&mut command);
    assert!(run.code != Some(0) && run.stdout.is_empty(), "{}", run.stdout);
    assert!(start.elapsed() < TIMEOUT + SLACK + Duration::from_secs(3));
    for rank in 0..3 {
        assert!(run.stderr.contains(&format!("error: rank {rank}: ")), "{}", run.stderr);
    }
    run.stderr
}

/// One rank has another pattern: all report it.
#[test]
fn another_pattern_on_one_rank() {
    let said = disagreement(&["causal & window(99, 0)"], &["causal & window(98, 0)"]);
    assert!(said.contains("rank 2 was called with `pattern` = "), "{said}");
}

/// Options that determine which messages follow: no rank reports a corrupt message.
#[test]
fn another_repeat_or_check_on_one_rank() {
    let pattern = ["causal & window(99, 0)"];
    for (option, two, third) in [
        ("--repeat: rank 0 has 2, rank 2 has 3", &["--repeat", "2"][..], &["--repeat", "3"][..]),
        ("--check: rank 0 has 0, rank 2 has 1", &[][..], &["--check"][..]),
    ] {
        let said = disagreement(&[&pattern[..], two].concat(), &[&pattern[..], third].concat());
        assert_eq!(said.matches(&format!("ranks disagree about {option}")).count(), 3, "{said}");
        assert!(said.contains("start every rank with the same --"), "{said}");
    }
}
