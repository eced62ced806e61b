//! Worker threads that calls share.
//!
//! A call posts a job, a [`Step`] that claims and runs one task, and is the first to run it.
//! Workers join the job that has the fewest of them and repeat its step until it breaks:
//!
//! ```text
//! caller:  post the job; repeat the step; close the job; wait until no worker runs its step, and call
//!          the step every few milliseconds meanwhile
//! worker:  join a job; repeat its step; leave it when the step breaks, or between two steps when
//!          another job has no worker, or two fewer
//! ```
//!
//! A worker that wakes up after the job was closed is not waited for. A panic in a step closes the
//! job and is rethrown by the caller; the worker lives on. No lock is held while a step runs, so a
//! panic leaves none poisoned, and steps may post jobs of their own.
//!
//! A child of `fork` has none of its parent's threads, and the parent's locks may be held for ever
//! there: a pool remembers the process that its workers belong to, and starts from new ones in
//! another.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{Executor, Step, Threads, pin, threads};
use crate::error::Result;

/// A pool of worker threads, the default [`Executor`].
///
/// Calls use [`Pool::global`] unless they are given another. A rank, a server thread or a NUMA node
/// that needs threads of its own has its own pool. Calls that run at the same time share the
/// workers of their pool. Workers are started by the first call that wants them, and ended by
/// [`trim`](Pool::trim) or when the pool is dropped.
///
/// ```
/// use std::sync::Arc;
/// use longspan::{Attention, Layout, Pattern, Pool, Shape};
///
/// let pool = Arc::new(Pool::new(4)?);
/// let layout = |tokens| Layout::compile(&Pattern::causal(), &Shape::new(tokens, tokens));
/// let prefill = Attention::new(layout(4_096)?).executor(pool.clone());
/// let another = Attention::new(layout(1_000)?).executor(pool);
/// # drop((prefill, another));
/// # Ok::<_, longspan::Error>(())
/// ```
pub struct Pool {
    /// The workers of the process that used the pool last; null before the first use. Boxed, so that tools
    /// that look for leaks find them from here.
    shared: AtomicPtr<Arc<Shared>>,
    /// Threads of a call at most, the calling thread included; `None` grows with what calls ask
    /// for.
    threads: Option<usize>,
    /// Worker `i`, counted from 1, runs on CPU `cpus[i % cpus.len()]`; anywhere if empty.
    cpus: Vec<usize>,
}

/// How long a caller waits for workers before it runs its step again, which polls.
const WAIT: Duration = Duration::from_millis(20);

static GLOBAL: Pool =
    Pool { shared: AtomicPtr::new(std::ptr::null_mut()), threads: None, cpus: Vec::new() };

impl Pool {
    /// A pool for calls on up to `threads` threads, 1 to 4,096: the calling thread and `threads -
    /// 1` workers.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = Some(threads::check(threads)?);
        Ok(Pool { shared: AtomicPtr::default(), threads, cpus: Vec::new() })
    }

    /// Pins each worker to one of these CPUs, in turn from the second on; the first is left to the
    /// calling thread, which is not pinned. Linux only. Refuses CPUs that this process may not use.
    ///
    /// ```
    /// # #[cfg(target_os = "linux")] {
    /// use longspan::{Error, Pool};
    ///
    /// let error = Pool::new(2)?.pin([100_000]).unwrap_err();
    /// assert!(matches!(error, Error::Cpu { cpu: 100_000, .. }));
    /// # }
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn pin(mut self, cpus: impl IntoIterator<Item = usize>) -> Result<Self> {
        self.trim();
        self.cpus = cpus.into_iter().collect();
        pin::check(&self.cpus)?;
        Ok(self)
    }

    /// The pool of calls that are given no other. It has as many workers as the largest call so far
    /// has asked for.
    pub fn global() -> &'static Pool {
        &GLOBAL
    }

    /// Ends all workers: idle ones now, busy ones after their job. The next call starts new ones.
    /// [`Attention::trim`](crate::Attention::trim) frees the workspaces of calls too.
    pub fn trim(&self) {
        // Workers of another process are not here to be ended.
        if let Some(shared) = self.existing().filter(|shared| shared.is_of_this_process()) {
            drop(shared.retire());
        }
    }

    /// [Ends all workers](Self::trim), and waits until they have ended: before their code is unloaded, or
    /// threads are counted. Not from a hook of a call.
    ///
    /// ```
    /// let pool = longspan::Pool::new(4)?;
    /// # drop(&pool);
    /// pool.join();
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn join(&self) {
        if let Some(shared) = self.existing().filter(|shared| shared.is_of_this_process()) {
            for worker in shared.retire() {
                // A worker's panics are those of the call whose task it ran.
                let _ = worker.join();
            }
        }
    }

    fn existing(&self) -> Option<&Shared> {
        // SAFETY: the pointer is null or comes from `Box::into_raw`, and the pool owns the box until it
        // is dropped.
        unsafe { self.shared.load(Ordering::Acquire).as_ref() }.map(|shared| &**shared)
    }

    fn shared(&self) -> Arc<Shared> {
        let old = self.shared.load(Ordering::Acquire);
        let shared = match self.existing().filter(|shared| shared.is_of_this_process()) {
            Some(_) => old,
            None => {
                let new = Box::into_raw(Box::<Arc<Shared>>::default());
                // What a parent process left is not freed: its locks may be held.
                match self.shared.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(_) => new,
                    Err(other) => {
                        // SAFETY: `new` came from `Box::into_raw` and was given to nothing.
                        drop(unsafe { Box::from_raw(new) });
                        other
                    }
                }
            }
        };
        // SAFETY: `shared` came from `Box::into_raw` here or in an earlier call, and the pool owns the
        // box while `self` is borrowed.
        unsafe { (*shared).clone() }
    }
}

impl Executor for Pool {
    fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| Threads::Auto.count().unwrap_or(1))
    }

    fn run(&self, threads: usize, step: &Step<'_>) {
        let helpers = self.threads.map_or(threads, |most| most.min(threads)).saturating_sub(1);
        if helpers == 0 {
            while step().is_continue() {}
            return;
        }
        let shared = self.shared();
        let id = shared.post(helpers, step, &self.cpus);
        let mut panic = catch_unwind(AssertUnwindSafe(|| while step().is_continue() {})).err();
        let others = shared.close(id, || {
            if panic.is_none() {
                panic = catch_unwind(AssertUnwindSafe(|| while step().is_continue() {})).err();
            }
        });
        if let Some(panic) = panic.or(others) {
            resume_unwind(panic);
        }
    }

    fn trim(&self) {
        Pool::trim(self);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.trim();
        let shared = *self.shared.get_mut();
        if self.existing().is_some_and(Shared::is_of_this_process) {
            // SAFETY: the pool's own box, which nothing uses any more.
            drop(unsafe { Box::from_raw(shared) });
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Pool { threads, cpus, .. } = self;
        f.debug_struct("Pool").field("threads", threads).field("cpus", cpus).finish_non_exhaustive()
    }
}

/// What the workers of one process and their callers share.
struct Shared {
    process: u32,
    state: Mutex<State>,
    /// A job was posted, or workers are to end.
    posted: Condvar,
    /// The last worker has left a job.
    left: Condvar,
    /// A job has no worker, or two fewer than another, and no worker is idle.
    uneven: AtomicBool,
}

#[derive(Default)]
struct State {
    jobs: Vec<Job>,
    /// Workers started since the last `retire`, and those of them that wait.
    workers: usize,
    idle: usize,
    handles: Vec<JoinHandle<()>>,
    /// How often workers were told to end.
    generation: u64,
    /// Counts jobs and joins, to number the former and order the latter.
    clock: u64,
}

struct Job {
    id: u64,
    step: *const Step<'static>,
    /// Workers that may still join it, and those that run its step.
    free: usize,
    running: usize,
    /// When a worker joined it last.
    joined: u64,
    panic: Option<Box<dyn Any + Send>>,
}

// SAFETY: the step is `Sync`, so that workers may call it, and `Shared::close` keeps the caller
// from returning while one does.
unsafe impl Send for Job {}

impl Default for Shared {
    fn default() -> Self {
        Shared {
            process: std::process::id(),
            state: Mutex::default(),
            posted: Condvar::new(),
            left: Condvar::new(),
            uneven: AtomicBool::new(false),
        }
    }
}

impl Shared {
    fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whether a worker should change its job.
    fn balance(&self, state: &State) {
        self.uneven.store(state.is_uneven(), Ordering::Relaxed);
    }

    /// Lets up to `helpers` workers join a job; returns its number.
    fn post(self: &Arc<Self>, helpers: usize, step: &Step<'_>, cpus: &[usize]) -> u64 {
        // SAFETY: only the lifetime changes; `close` returns after the last use.
        let step = unsafe { std::mem::transmute::<*const Step<'_>, *const Step<'static>>(step) };
        let mut state = self.lock();
        while state.workers < helpers {
            let index = state.workers + 1;
            let cpu = (!cpus.is_empty()).then(|| cpus[index % cpus.len()]);
            let (shared, generation) = (self.clone(), state.generation);
            let worker = std::thread::Builder::new().name(format!("longspan-{index}"));
            let worker = worker.spawn(move || {
                INDEX.set(index);
                cpu.inspect(|&cpu| pin::current_thread(cpu));
                shared.work(generation);
            });
            // The system may have no more threads: fewer do the same work.
            let Ok(worker) = worker else { break };
            state.handles.push(worker);
            state.workers += 1;
        }
        state.clock += 1;
        let id = state.clock;
        state.jobs.push(Job { id, step, free: helpers, running: 0, joined: 0, panic: None });
        self.balance(&state);
        drop(state);
        self.posted.notify_all();
        id
    }

    /// Keeps further workers from joining a job, and waits for those that did; calls `waiting`
    /// every [`WAIT`]. Returns the panic of one of them.
    fn close(&self, id: u64, mut waiting: impl FnMut()) -> Option<Box<dyn Any + Send>> {
        let mut state = self.lock();
        state.job(id).free = 0;
        while state.job(id).running > 0 {
            let waited = self.left.wait_timeout(state, WAIT);
            let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            if timeout.timed_out() {
                drop(state);
                waiting();
                state = self.lock();
            }
        }
        let position = state.jobs.iter().position(|job| job.id == id).expect("posted");
        let job = state.jobs.swap_remove(position);
        self.balance(&state);
        job.panic
    }

    /// Tells all workers to end.
    fn retire(&self) -> Vec<JoinHandle<()>> {
        let mut state = self.lock();
        state.generation += 1;
        (state.workers, state.idle) = (0, 0);
        let handles = std::mem::take(&mut state.handles);
        drop(state);
        self.posted.notify_all();
        handles
    }

    /// The life of a worker.
    fn work(&self, generation: u64) {
        let mut state = self.lock();
        loop {
            if state.generation != generation {
                return;
            }
            let Some((id, step)) = state.join() else {
                state.idle += 1;
                state = self.posted.wait(state).unwrap_or_else(PoisonError::into_inner);
                if state.generation == generation {
                    state.idle -= 1;
                }
                continue;
            };
            self.balance(&state);
            drop(state);
            // SAFETY: `join` counted this worker as running, so that `close` and with it the
            // caller, whose step this is, wait for it.
            let step = unsafe { &*step };
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                loop {
                    if step().is_break() {
                        return false;
                    }
                    if self.uneven.load(Ordering::Relaxed) {
                        return true;
                    }
                }
            }));
            state = self.lock();
            let job = state.job(id);
            job.running -= 1;
            match outcome {
                // One more may join it in place of this one, unless the job was closed meanwhile:
                // then that does no harm, since nothing is left to claim.
                Ok(true) => job.free += 1,
                Ok(false) => job.free = 0,
                Err(panic) => {
                    job.free = 0;
                    job.panic.get_or_insert(panic);
                }
            }
            if job.running == 0 {
                self.left.notify_all();
            }
            self.balance(&state);
        }
    }
}

impl State {
    /// A job by its number.
    fn job(&mut self, id: u64) -> &mut Job {
        self.jobs.iter_mut().find(|job| job.id == id).expect("its caller has not closed it")
    }

    /// Joins the job that has the fewest workers, of several the one that was joined least
    /// recently.
    fn join(&mut self) -> Option<(u64, *const Step<'static>)> {
        self.clock += 1;
        let open = self.jobs.iter_mut().filter(|job| job.free > 0);
        let job = open.min_by_key(|job| (job.running, job.joined))?;
        job.free -= 1;
        job.running += 1;
        job.joined = self.clock;
        Some((job.id, job.step))
    }

    fn is_uneven(&self) -> bool {
        let open = self.jobs.iter().filter(|job| job.free > 0).map(|job| job.running).min();
        let most = self.jobs.iter().map(|job| job.running).max();
        match (open, most) {
            (Some(0), Some(most)) => self.idle == 0 && most > 0,
            (Some(fewest), Some(most)) => self.idle == 0 && most > fewest + 1,
            _ => false,
        }
    }
}

thread_local! {
    /// The number of a worker in its pool; 0 for other threads.
    static INDEX: Cell<usize> = const { Cell::new(0) };
}

/// The number of this worker in its pool; 0 for other threads.
pub(crate) fn worker_index() -> usize {
    INDEX.get()
}

#[cfg(test)]
mod tests;
