//! Scratch that outlives a call.
//!
//! A call takes a [`Workspace`] from its [`Attention`](crate::Attention) and gives it back: lists
//! of work, partial states, and [`Scratch`] for each thread. Nothing in it shrinks, so the second call of
//! a shape allocates nothing. Calls that run at the same time have a workspace each.

use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, PoisonError};

use crate::kernel::forward::Lists;
use crate::plan::{Plan, backward};

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
    /// One a thread.
    pub(crate) scratch: Vec<Mutex<Scratch>>,
    /// Partial results of parts of rows or columns.
    pub(crate) parts: Arena,
}

impl Workspaces {
    pub(crate) fn take(&self) -> Box<Workspace> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default()
    }

    pub(crate) fn put(&self, space: Box<Workspace>) {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner).push(space);
    }

    /// A number for each of `len` rows.
    pub(crate) fn rows(&self, len: usize) -> Vec<f32> {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows = rows.pop().unwrap_or_default();
        rows.resize(len, 0.0);
        rows
    }

    pub(crate) fn give_back(&self, rows: Vec<f32>) {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).push(rows);
    }
}

/// What one thread works with.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) numbers: Arena,
    pub(crate) lists: Lists,
    /// Clean copies of numbers that aren't finite, in the rare case.
    pub(crate) clean: Arena,
    /// What masks are made in.
    pub(crate) mask: Vec<u64>,
}

/// A cache line of numbers; vectors of scratch never straddle two.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read and written through pointers")] [f32; 16]);

/// Numbers without meaning, aligned to cache lines.
#[derive(Debug, Default)]
pub(crate) struct Arena(Vec<Line>);

impl Arena {
    /// Room for `len` numbers, whatever they are at present.
    pub(crate) fn room(&mut self, len: usize) -> *mut f32 {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([f32::NAN; 16]));
        }
        self.0.as_mut_ptr().cast()
    }
}
