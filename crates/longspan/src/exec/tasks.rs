//! Tasks that threads claim one after the other.
//!
//! ```text
//! every participating thread:
//!     while tasks are left and the call is not stopped:
//!         claim the next task, run it
//!         poll the monitor                             the hook, on the calling thread
//! while it waits for the others, the calling thread polls the monitor too
//! ```
//!
//! A panic in a task stops the call: threads that wait for that task's turn give up, and the panic
//! reaches the caller.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{Executor, Monitor, Pool};
use crate::error::Result;
use crate::exec::Progress;
use crate::exec::fault::{self, begin_tasks};

/// Threads of a call: an executor and how many of its threads take part, the caller included.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workers<'a> {
    pub(crate) executor: &'a dyn Executor,
    pub(crate) threads: usize,
}

impl Workers<'_> {
    /// The calling thread alone.
    pub(crate) fn caller() -> Workers<'static> {
        Workers { executor: Pool::global(), threads: 1 }
    }

    /// At most so many threads.
    pub(crate) fn at_most(self, threads: usize) -> Self {
        Workers { threads: self.threads.min(threads).max(1), ..self }
    }
}

/// Tasks `0..total` of a call.
pub(crate) struct Tasks<'a, 'h> {
    monitor: &'a Monitor<'h>,
    total: usize,
    /// Whether finished tasks are the progress of the call.
    counted: bool,
    next: AtomicUsize,
    finished: AtomicUsize,
    panicked: AtomicBool,
}

impl<'a, 'h> Tasks<'a, 'h> {
    /// The tasks that make up the progress of the call.
    pub(crate) fn counted(total: usize, monitor: &'a Monitor<'h>) -> Self {
        monitor.advance_to(Progress { done: 0, total });
        Tasks { counted: true, ..Tasks::uncounted(total, monitor) }
    }

    /// Tasks before or after those, such as clearing a tensor.
    pub(crate) fn uncounted(total: usize, monitor: &'a Monitor<'h>) -> Self {
        let zero = || AtomicUsize::new(0);
        Tasks {
            monitor,
            total,
            counted: false,
            next: zero(),
            finished: zero(),
            panicked: AtomicBool::new(false),
        }
    }

    /// Runs `work(task)` for every task.
    pub(crate) fn run(&self, workers: Workers<'_>, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        begin_tasks();
        let step = || self.step(work);
        let Workers { executor, threads } = workers.at_most(self.total);
        if threads > 1 {
            executor.run(threads, &step);
            assert!(
                !self.panicked.load(Ordering::Relaxed),
                "a task panicked on another thread and the executor did not propagate it"
            );
        }
        // All of them on one thread; after an executor, what it left over.
        while step().is_continue() {}
        if self.monitor.is_stopped() && self.finished.load(Ordering::Relaxed) < self.total {
            return Err(self.monitor.stopped_error());
        }
        if self.counted {
            self.monitor.poll();
        }
        Ok(())
    }

    fn step(&self, work: &(dyn Fn(usize) + Sync)) -> ControlFlow<()> {
        if self.monitor.is_stopped() {
            return ControlFlow::Break(());
        }
        let unwinding = StopOnUnwind(self);
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        if task >= self.total {
            // The calling thread waits for the others, and may still be told to stop them.
            if self.finished.load(Ordering::Relaxed) < self.total {
                self.monitor.poll();
            }
            std::mem::forget(unwinding);
            return ControlFlow::Break(());
        }
        let timed = fault::task(task);
        work(task);
        drop(timed);
        if self.monitor.is_stopped() {
            std::mem::forget(unwinding);
            return ControlFlow::Break(());
        }
        self.finished.fetch_add(1, Ordering::Relaxed);
        if self.counted {
            self.monitor.finish_task();
        }
        self.monitor.poll();
        std::mem::forget(unwinding);
        ControlFlow::Continue(())
    }
}

/// Stops the call if a task unwinds.
struct StopOnUnwind<'t, 'a, 'h>(&'t Tasks<'a, 'h>);

impl Drop for StopOnUnwind<'_, '_, '_> {
    fn drop(&mut self) {
        self.0.panicked.store(true, Ordering::Relaxed);
        self.0.monitor.stop();
    }
}
