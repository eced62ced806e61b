//! Progress and cancellation, and threads of the caller.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

use longspan::{Progress, Step};

use crate::status::{Result, invalid};

/// Called every few milliseconds of a call, on the thread that made it: to show progress, to stop.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Hook {
    /// Handed to `progress`.
    pub context: *mut c_void,
    /// Returns 0 to go on, and anything else to end the call with `LONGSPAN_STATUS_STOPPED`. `total` is 0 while the
    /// call still prepares its work.
    pub progress:
        Option<unsafe extern "C" fn(context: *mut c_void, done: u64, total: u64) -> c_int>,
}

impl Hook {
    /// What a call asks between two units of work: a hook of the caller, or nothing.
    ///
    /// # Safety
    ///
    /// The pointer is null, or a hook may be read there; its function may be called with its context
    /// until the returned function is dropped.
    pub(crate) unsafe fn read(
        pointer: *const Hook,
    ) -> Result<impl FnMut(u64, u64) -> ControlFlow<()>> {
        let hook = match pointer.is_null() {
            true => None,
            // SAFETY: this function demands it.
            false => Some(unsafe { *pointer }),
        };
        if hook.is_some_and(|hook| hook.progress.is_none()) {
            return Err(invalid("hook.progress is null, expected a function, or no hook"));
        }
        Ok(move |done, total| {
            let Some(Hook { context, progress: Some(progress) }) = hook else {
                return ControlFlow::Continue(());
            };
            // SAFETY: this function demands that it may be called with its context.
            match unsafe { progress(context, done, total) } {
                0 => ControlFlow::Continue(()),
                _ => ControlFlow::Break(()),
            }
        })
    }
}

/// A hook of `longspan` that asks a function of [`Hook::read`].
pub(crate) fn between(
    ask: &mut impl FnMut(u64, u64) -> ControlFlow<()>,
) -> impl FnMut(Progress) -> ControlFlow<()> {
    |progress| ask(progress.done as u64, progress.total as u64)
}

/// Threads that calls run on, in place of the library's own. It has to stay valid for as long as a handle that
/// was made with it; its functions are called from any thread that computes with such a handle, from several
/// at once.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Executor {
    /// Handed to `run`.
    pub context: *mut c_void,
    /// Threads of a call that leaves their number open, the calling thread included; at least 1.
    pub threads: usize,
    /// Calls `step(task)` again and again on the calling thread and, at the same time, on up to `threads - 1`
    /// others, on each until it has returned 0. Returns when no call of `step` is running.
    pub run: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            threads: usize,
            step: Option<unsafe extern "C" fn(task: *mut c_void) -> c_int>,
            task: *mut c_void,
        ),
    >,
}

// SAFETY: an executor's documentation demands of its context that any thread may use it.
unsafe impl Send for Executor {}
// SAFETY: as above, several at once.
unsafe impl Sync for Executor {}

/// A call's tasks, as the threads of a caller run them.
struct Tasks<'a> {
    step: &'a Step<'a>,
    /// What a task has panicked with: it can't pass the threads of the caller.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl longspan::Executor for Executor {
    fn threads(&self) -> usize {
        self.threads
    }

    fn run(&self, threads: usize, step: &Step<'_>) {
        let tasks = Tasks { step, panic: Mutex::new(None) };
        let task = (&raw const tasks).cast_mut().cast();
        if let Some(run) = self.run {
            // SAFETY: `tasks` lives until `run` returns, when no call of `step` is running any more.
            unsafe { run(self.context, threads, Some(run_step), task) };
        }
        // A caller that returned early leaves tasks: they are run here.
        while step().is_continue() {}
        if let Some(payload) = tasks.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(payload);
        }
    }
}

/// Runs one task, or finds that none is left.
///
/// # Safety
///
/// `task` is what [`Executor::run`](longspan::Executor::run) has handed out, before it returns.
unsafe extern "C" fn run_step(task: *mut c_void) -> c_int {
    // SAFETY: as this function demands.
    let tasks = unsafe { &*task.cast_const().cast::<Tasks<'_>>() };
    match catch_unwind(AssertUnwindSafe(|| (tasks.step)())) {
        Ok(ControlFlow::Continue(())) => 1,
        Ok(ControlFlow::Break(())) => 0,
        Err(payload) => {
            let mut first = tasks.panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(payload);
            0
        }
    }
}
