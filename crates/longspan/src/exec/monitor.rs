//! Progress and cancellation of one call.
//!
//! Only the thread that made the call runs its hook. The other threads read a flag.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::exec::{Hook, Progress};

/// The hook of a call, how far the call has come, and whether it is to stop.
pub(crate) struct Monitor<'h> {
    thread: usize,
    hook: Mutex<Hook<'h>>,
    done: AtomicUsize,
    total: AtomicUsize,
    stopped: AtomicBool,
    /// Polls from inside tasks on the calling thread.
    polls: AtomicUsize,
}

/// What tells this thread from others that are alive: asked for several times per task.
fn this_thread() -> usize {
    thread_local!(static MARK: u8 = const { 0 });
    MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

/// Polls from inside a task per run of the hook: kernels poll per key tile, which takes from tens
/// of microseconds to 10 ms.
const POLLS_PER_HOOK: usize = 4;

// SAFETY: `Hook` is the one field that is not `Sync`. It is reached by `poll` alone, which returns
// before it where the current thread is not the one that made the monitor; that thread borrows the
// hook for as long as the monitor lives.
unsafe impl Sync for Monitor<'_> {}

impl<'h> Monitor<'h> {
    pub(crate) fn new(hook: Hook<'h>) -> Self {
        Monitor {
            thread: this_thread(),
            hook: Mutex::new(hook),
            done: AtomicUsize::new(0),
            total: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            polls: AtomicUsize::new(0),
        }
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress {
            done: self.done.load(Ordering::Relaxed),
            total: self.total.load(Ordering::Relaxed),
        }
    }

    /// Sets how far the call has come; before the first time it is 0 of 0.
    pub(crate) fn advance_to(&self, progress: Progress) {
        self.done.store(progress.done, Ordering::Relaxed);
        self.total.store(progress.total, Ordering::Relaxed);
    }

    /// Counts a task as done.
    pub(crate) fn finish_task(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the call: tasks that run return early, others are not started.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn is_calling_thread(&self) -> bool {
        this_thread() == self.thread
    }

    /// Runs the hook every few times, if this is its thread. Returns whether the call is to stop:
    /// the task then returns early, and since the call fails, what it has written does not matter.
    pub(crate) fn poll_in_task(&self) -> bool {
        if self.is_calling_thread() {
            let polls = self.polls.load(Ordering::Relaxed).wrapping_add(1);
            self.polls.store(polls, Ordering::Relaxed);
            if polls.is_multiple_of(POLLS_PER_HOOK) {
                return self.poll();
            }
        }
        self.is_stopped()
    }

    /// Runs the hook, if this is its thread. Returns whether the call is to stop.
    pub(crate) fn poll(&self) -> bool {
        if !self.is_stopped() && self.is_calling_thread() {
            let mut hook = self.hook.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(hook) = &mut hook.0
                && hook(self.progress()).is_break()
            {
                self.stop();
            }
        }
        self.is_stopped()
    }

    /// Polls, as a hook of `longspan_pattern`.
    pub(crate) fn flow(&self) -> ControlFlow<()> {
        if self.poll() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Polls; an error if the call is to stop.
    pub(crate) fn check(&self) -> Result<()> {
        if self.poll() { Err(self.stopped_error()) } else { Ok(()) }
    }

    pub(crate) fn stopped_error(&self) -> Error {
        let Progress { done, total } = self.progress();
        Error::Stopped { done, total }
    }
}
