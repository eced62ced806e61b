//! Scratch that outlives a call.
//!
//! A call takes a [`Workspace`] from its [`Attention`](crate::Attention) and gives it back: lists
//! of work, partial states, and [`Scratch`] for each thread. Nothing in it shrinks, so the second
//! call of a shape allocates nothing. Calls that run at the same time have a workspace each.

use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use crate::error::Result;
use crate::exec::{Arena, worker_index};
use crate::kernel::Scratch;
use crate::tasks::{Plan, backward};
use crate::tensor::{allocate, size_of_list};

/// What calls share, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Workspaces {
    #[expect(clippy::vec_box, reason = "a workspace is moved in and out of every call")]
    spaces: Mutex<Vec<Box<Workspace>>>,
    rows: Mutex<Vec<Vec<f32>>>,
}

/// What one call works with.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    pub(crate) plan: Plan,
    pub(crate) backward: backward::Plan,
    /// Whose turn it is in each chain of the backward pass.
    pub(crate) counters: Vec<AtomicU32>,
    /// One per thread, and how many threads the call has.
    scratch: Vec<Mutex<Scratch>>,
    threads: usize,
    /// Partial results of parts of rows or columns.
    pub(crate) parts: Arena,
}

impl Workspace {
    /// Bytes that it holds, but for what tasks add when they meet it: masks that a layout does not
    /// store, values that are not finite.
    pub(crate) fn bytes(&mut self) -> usize {
        let Workspace { plan, backward, counters, scratch, threads: _, parts } = self;
        let of_threads = scratch
            .iter_mut()
            .map(|scratch| scratch.get_mut().unwrap_or_else(PoisonError::into_inner).bytes());
        let of_threads: usize = of_threads.sum();
        of_threads + plan.bytes() + backward.bytes() + size_of_list(counters) + parts.bytes()
    }

    /// Prepares the scratch of `threads` threads.
    pub(crate) fn grow_scratch(&mut self, threads: usize, grow: impl Fn(&mut Scratch)) {
        if self.scratch.len() < threads {
            self.scratch.resize_with(threads, Default::default);
        }
        for scratch in &mut self.scratch[..threads] {
            grow(scratch.get_mut().unwrap_or_else(PoisonError::into_inner));
        }
        self.threads = threads;
    }

    /// Scratch for this thread, while it runs a task.
    pub(crate) fn scratch(&self) -> MutexGuard<'_, Scratch> {
        // A worker mostly finds its own; no more threads than there is scratch for take part,
        // unless an executor has more than it was asked for.
        loop {
            for index in 0..self.threads {
                match self.scratch[(worker_index() + index) % self.threads].try_lock() {
                    Ok(scratch) => return scratch,
                    Err(TryLockError::Poisoned(scratch)) => return scratch.into_inner(),
                    Err(TryLockError::WouldBlock) => {}
                }
            }
            std::thread::yield_now();
        }
    }
}

/// Lists of rows that calls hold at once, mostly.
const LISTS: usize = 16;

impl Workspaces {
    /// Frees all of them.
    pub(crate) fn trim(&self) {
        *self.spaces.lock().unwrap_or_else(PoisonError::into_inner) = Vec::new();
        *self.rows.lock().unwrap_or_else(PoisonError::into_inner) = Vec::new();
    }

    pub(crate) fn take(&self) -> Box<Workspace> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    pub(crate) fn put(&self, space: Box<Workspace>) {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner).push(space);
    }

    /// An element for each of `len` rows, whatever it is at present.
    pub(crate) fn rows(&self, len: usize) -> Result<Vec<f32>> {
        let mut kept = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        // The smallest list that is long enough; where none is, one makes place for a longer one.
        let fits = kept.iter().enumerate().filter(|(_, rows)| rows.capacity() >= len);
        let fits = fits.min_by_key(|(_, rows)| rows.capacity()).map(|(index, _)| index);
        let rows = match fits {
            Some(index) => Some(kept.swap_remove(index)),
            None => kept.pop(),
        };
        drop(kept);
        let mut rows = rows.unwrap_or_default();
        if rows.capacity() < len {
            drop(rows);
            // Zeros that the system provides when they are first written, by the threads of the
            // call.
            return allocate::zeros(len);
        }
        rows.resize(len, 0.0);
        Ok(rows)
    }

    pub(crate) fn give_back(&self, rows: Vec<f32>) {
        let mut kept = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        // Those of all components of both passes, so that the list itself grows once.
        if kept.capacity() == 0 {
            kept.reserve(LISTS);
        }
        kept.push(rows);
    }
}
