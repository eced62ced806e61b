//! Ranks that are threads of one process have separate workers.

use std::collections::HashSet;
use std::sync::{Arc, Barrier, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use longspan::{Executor, Inputs, Pool, Step, Threads};
use longspan_ring::{Local, Options, Ring, Shards};
use longspan_testing::{AttentionCase, Rule};

use crate::common::*;

const RANKS: usize = 4;

/// Work for two threads on each of four ranks: 16 block rows of 4 heads each.
fn case() -> AttentionCase {
    AttentionCase { heads_q: 4, heads_kv: 4, ..AttentionCase::new("workers", Rule::Causal, 4_096) }
}

/// A concurrent forward pass on every rank; returns the result of `after` on each, while all rings
/// exist.
fn on_all_ranks<T: Send>(
    options: impl Fn(usize) -> Options + Sync,
    after: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let (case, numbers) = (case(), case().unmasked());
    let shards = Shards::contiguous(case.layout.tokens_k as usize, RANKS, 1).unwrap();
    let done = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        let ranks = Local::ranks(RANKS).into_iter().enumerate().map(|(rank, transport)| {
            let (case, numbers, shards, done) = (&case, &numbers, &shards, &done);
            let (options, after) = (&options, &after);
            scope.spawn(move || {
                let share = Share::of(numbers, &positions(shards, rank));
                let problem = problem(case, shards.clone());
                let mut ring = Ring::new(transport, problem, options(rank)).unwrap();
                ring.forward(Inputs::new(share.q.view(), share.k.view(), share.v.view())).unwrap();
                done.wait();
                let found = after(rank);
                done.wait();
                found
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn two_threads() -> Options {
    let threads = Threads::Count(2);
    Options { timeout: Duration::from_secs(60), threads, ..Options::default() }
}

/// Workers of Longspan's pools in this process. Waits for `expected`, since a new thread may not have
/// its name yet.
fn workers(expected: usize) -> usize {
    let mut count = 0;
    for _ in 0..1_000 {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let name = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
        };
        count = tasks.filter_map(name).filter(|name| name.starts_with("longspan-")).count();
        if count == expected {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    count
}

#[cfg(target_os = "linux")]
#[test]
fn four_ranks_of_two_threads_are_eight() {
    let counts = on_all_ranks(|_| two_threads(), |_| workers(RANKS));
    assert_eq!(counts, [RANKS; RANKS], "one worker beside each rank's own thread");
}

/// Records the threads that run steps, and makes them start together.
#[derive(Debug)]
struct Observed(Pool, Mutex<HashSet<ThreadId>>);

impl Executor for Observed {
    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn run(&self, threads: usize, step: &Step<'_>) {
        let seen: Mutex<HashSet<ThreadId>> = Mutex::default();
        self.0.run(threads, &|| {
            let own = std::thread::current().id();
            self.1.lock().unwrap().insert(own);
            seen.lock().unwrap().insert(own);
            while seen.lock().unwrap().len() < threads {
                std::thread::yield_now();
            }
            step()
        });
    }
}

#[test]
fn ranks_use_their_executors() {
    let executors: Vec<_> =
        (0..RANKS).map(|_| Arc::new(Observed(Pool::new(2).unwrap(), Mutex::default()))).collect();
    let options =
        |rank: usize| Options { executor: Some(executors[rank].clone()), ..two_threads() };
    let seen = on_all_ranks(options, |rank| executors[rank].1.lock().unwrap().clone());
    assert!(seen.iter().all(|threads| threads.len() == 2), "{seen:?}");
    let all: HashSet<_> = seen.iter().flatten().collect();
    assert_eq!(all.len(), 2 * RANKS, "no thread serves two ranks: {seen:?}");
}
