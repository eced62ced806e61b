//! Times of tasks, and of their turns at gradients that several tasks add to.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A piece of a task.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Piece {
    /// Tasks of one set are claimed in their order; sets follow each other.
    pub set: usize,
    /// The task, among those of its set.
    pub task: usize,
    /// The chain whose turn it was, where tasks wait for each other: it began when the piece of the same
    /// chain before it had ended.
    pub chain: Option<usize>,
    /// How long it took, without waiting.
    pub seconds: f64,
}

static RECORDS: AtomicBool = AtomicBool::new(false);
static SETS: AtomicUsize = AtomicUsize::new(0);
static PIECES: Mutex<Vec<Piece>> = Mutex::new(Vec::new());

thread_local! {
    /// The task of this thread and when its piece began.
    static CURRENT: Cell<Option<(usize, usize, Instant)>> = const { Cell::new(None) };
}

/// Records pieces from now on, in all threads: those of calls on one thread are in their order.
pub fn record_pieces() {
    take_pieces();
    SETS.store(0, Ordering::SeqCst);
    RECORDS.store(true, Ordering::SeqCst);
}

/// Ends recording, and returns the pieces.
pub fn take_pieces() -> Vec<Piece> {
    RECORDS.store(false, Ordering::SeqCst);
    std::mem::take(&mut *PIECES.lock().unwrap_or_else(PoisonError::into_inner))
}

fn records() -> bool {
    cfg!(feature = "fault-injection") && RECORDS.load(Ordering::Relaxed)
}

/// Begins a set of tasks.
pub(crate) fn begin_tasks() {
    if records() {
        SETS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Begins a task of the current set; its last piece ends when the result is dropped.
pub(crate) fn task(task: usize) -> Task {
    if records() {
        CURRENT.set(Some((SETS.load(Ordering::Relaxed), task, Instant::now())));
    }
    Task
}

/// A task at work.
pub(crate) struct Task;

impl Drop for Task {
    fn drop(&mut self) {
        cut(None);
        CURRENT.set(None);
    }
}

/// Ends a piece of this thread's task, and begins the next one.
#[inline(always)]
pub(crate) fn cut(chain: Option<usize>) {
    if !records() {
        return;
    }
    if let Some((set, task, since)) = CURRENT.get() {
        let seconds = since.elapsed().as_secs_f64();
        let mut pieces = PIECES.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.push(Piece { set, task, chain, seconds });
        CURRENT.set(Some((set, task, Instant::now())));
    }
}
