//! How many threads, and the pool they live in.
//!
//! Workers wait on a condition variable and share one job at a time: a closure that each of them
//! runs until there is nothing left to claim. The caller is one of them. A worker that wakes up
//! after the caller found nothing left to do isn't waited for; a caller that finds the pool busy
//! works alone. Neither changes a bit of any result, since nothing is split by threads.
//!
//! A child of `fork` has none of its parent's threads: the pool remembers the process it was made
//! in, and a new one is made where that is another.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// How many threads work on a call.
///
/// ```
/// use std::num::NonZeroUsize;
/// use longspan::Threads;
///
/// assert_eq!(Threads::Count(NonZeroUsize::new(3).unwrap()).count()?, 3);
/// assert!(Threads::Auto.count()? >= 1);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Threads {
    /// What the environment variable `LONGSPAN_THREADS` says, else as many as this process may
    /// use: its CPU affinity and its container's quota count.
    #[default]
    Auto,
    /// This many, the caller's own included; at most 4,096.
    Count(NonZeroUsize),
}

/// The most threads of a call: more than the largest machines have CPUs. Beyond it a number is a
/// slip, and would be taken at its word: a stack and a scratch for each.
const MOST: usize = 4_096;

/// Says how many threads to use, where no option does.
pub(crate) const VARIABLE: &str = "LONGSPAN_THREADS";

impl Threads {
    /// How many that is, here and now.
    pub fn count(self) -> Result<usize> {
        match self {
            Threads::Count(count) if count.get() > MOST => {
                Err(Error::Threads { asked: count.get(), most: MOST })
            }
            Threads::Count(count) => Ok(count.get()),
            Threads::Auto => {
                match std::env::var_os(VARIABLE).map(|text| text.to_string_lossy().into_owned()) {
                    Some(text) if !text.is_empty() => match text.trim().parse::<NonZeroUsize>() {
                        Ok(count) if count.get() <= MOST => Ok(count.get()),
                        _ => Err(Error::Environment {
                            name: VARIABLE,
                            value: text,
                            expected: "a number of threads, 1 to 4096",
                        }),
                    },
                    _ => Ok(std::thread::available_parallelism().map_or(1, NonZeroUsize::get)),
                }
            }
        }
    }
}

type Job<'a> = dyn Fn() + Sync + 'a;

/// Runs `job` on up to `threads` threads at once, the caller being the first; returns when all of
/// them have come back. A panic of any of them is passed on.
pub(crate) fn run(threads: usize, job: &Job<'_>) {
    if threads <= 1 {
        return job();
    }
    Pool::get().run(threads - 1, job);
}

struct Pool {
    process: u32,
    /// Held by the caller whose job it is.
    turn: Mutex<()>,
    board: Mutex<Board>,
    /// There is a job to join.
    posted: Condvar,
    /// A worker has come back.
    returned: Condvar,
}

/// What workers and caller tell each other.
struct Board {
    job: Option<Posted>,
    /// How many more may join it.
    places: usize,
    /// How many are at it.
    working: usize,
    /// Whether one of them panicked.
    panicked: bool,
    workers: usize,
}

#[derive(Clone, Copy)]
struct Posted(*const Job<'static>);

// SAFETY: the job is `Sync`, and its caller waits for everyone who joined.
unsafe impl Send for Posted {}

impl Pool {
    /// The pool of this process.
    fn get() -> &'static Pool {
        static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());
        let process = std::process::id();
        let pool = POOL.load(Ordering::Acquire);
        // SAFETY: pools are never freed.
        if let Some(pool) = unsafe { pool.as_ref() }
            && pool.process == process
        {
            return pool;
        }
        let new = Box::into_raw(Box::new(Pool {
            process,
            turn: Mutex::new(()),
            board: Mutex::new(Board {
                job: None,
                places: 0,
                working: 0,
                panicked: false,
                workers: 0,
            }),
            posted: Condvar::new(),
            returned: Condvar::new(),
        }));
        // Two threads may both come here; one pool is then never used.
        let seen = POOL.compare_exchange(pool, new, Ordering::AcqRel, Ordering::Acquire);
        // SAFETY: both are pools, and pools are never freed.
        unsafe { &*seen.err().unwrap_or(new) }
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&'static self, helpers: usize, job: &Job<'_>) {
        let Ok(_turn) = self.turn.try_lock() else { return job() };
        {
            let mut board = self.board();
            while board.workers < helpers {
                let name = format!("longspan-{}", board.workers + 1);
                let worker = std::thread::Builder::new().name(name).spawn(move || self.work());
                if worker.is_err() {
                    break;
                }
                board.workers += 1;
            }
            // SAFETY: only the lifetime is lost; `run` doesn't return while a worker is at it.
            let posted = unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
            board.job = Some(Posted(posted));
            board.places = helpers;
            board.panicked = false;
        }
        self.posted.notify_all();
        // Should the caller's part panic, this still waits for the others.
        let _finish = Finish(self);
        job();
    }

    /// What a worker does for ever.
    fn work(&self) {
        let mut board = self.board();
        loop {
            let Some(Posted(job)) = board.job.filter(|_| board.places > 0) else {
                board = self.posted.wait(board).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            board.places -= 1;
            board.working += 1;
            drop(board);
            // SAFETY: the caller waits until `working` is 0 before the job goes away.
            let job = unsafe { &*job };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            board = self.board();
            board.working -= 1;
            board.panicked |= outcome.is_err();
            if board.working == 0 {
                self.returned.notify_all();
            }
        }
    }
}

/// Closes a job: nobody may join it any more, and all who did are waited for.
struct Finish<'a>(&'a Pool);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let mut board = self.0.board();
        board.job = None;
        while board.working > 0 {
            board = self.0.returned.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
        let panicked = board.panicked;
        drop(board);
        if panicked && !std::thread::panicking() {
            panic!("a worker of Longspan's pool panicked; its message is above");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn everything_is_done_once() {
        for threads in [1, 2, 3, 17] {
            let next = AtomicUsize::new(0);
            let counts: Vec<AtomicUsize> = (0..1_000).map(|_| AtomicUsize::new(0)).collect();
            run(threads, &|| {
                while let Some(count) = counts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads}");
        }
    }

    #[test]
    fn a_panic_is_passed_on_and_the_pool_lives() {
        let seen = AtomicUsize::new(0);
        let outcome = std::panic::catch_unwind(|| {
            run(4, &|| {
                seen.fetch_add(1, Ordering::Relaxed);
                panic!("on purpose");
            });
        });
        assert!(outcome.is_err());
        everything_is_done_once();
    }
}
