//! Executors that tell which threads took part.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use longspan::{Executor, Step};

/// A thread that doesn't come within this time isn't there.
const LATE: Duration = Duration::from_secs(20);

/// Another executor, observed: no thread runs a task before as many as were asked for have come, so
/// that all workers take part however short the work is.
#[derive(Debug)]
pub(crate) struct Observed<P> {
    pub(crate) inner: P,
    /// Threads of each call of `run` on several threads: asked for, and seen.
    pub(crate) calls: Mutex<Vec<(usize, usize)>>,
}

impl<P> Observed<P> {
    pub(crate) fn new(inner: P) -> Self {
        Observed { inner, calls: Mutex::default() }
    }

    /// What was seen since the last time.
    pub(crate) fn take(&self) -> Vec<(usize, usize)> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

impl<P: Executor> Executor for Observed<P> {
    fn threads(&self) -> usize {
        self.inner.threads()
    }

    fn run(&self, threads: usize, step: &Step<'_>) {
        let seen: Mutex<HashSet<ThreadId>> = Mutex::default();
        let start = Instant::now();
        self.inner.run(threads, &|| {
            seen.lock().unwrap().insert(std::thread::current().id());
            while seen.lock().unwrap().len() < threads && start.elapsed() < LATE {
                std::thread::yield_now();
            }
            step()
        });
        self.calls.lock().unwrap().push((threads, seen.into_inner().unwrap().len()));
    }

    fn trim(&self) {
        self.inner.trim();
    }
}

/// An executor that runs at most one step, on the calling thread.
#[derive(Debug)]
pub(crate) struct CallerOnly;

impl Executor for CallerOnly {
    fn threads(&self) -> usize {
        5
    }

    fn run(&self, _: usize, step: &Step<'_>) {
        let _: ControlFlow<()> = step();
    }
}
