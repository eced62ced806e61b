//! Waits with a timeout, and a watchdog for functions that have none.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use mpi_sys as ffi;

use super::status::check;
use crate::transport::Failure;

pub(super) enum Wait {
    Done,
    /// Not done after this time.
    TimedOut(Duration),
}

/// How long to spin, then to yield: messages within a machine take microseconds. Sleeping later gives
/// the core to other ranks, possibly the one that is waited for.
const SPIN: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_millis(2);
const SLEEP: Duration = Duration::from_micros(50);

/// Polls until done or the timeout has elapsed.
pub(super) fn wait_until(
    timeout: Duration,
    mut is_done: impl FnMut() -> Result<bool, Failure>,
) -> Result<Wait, Failure> {
    let start = Instant::now();
    loop {
        if is_done()? {
            return Ok(Wait::Done);
        }
        match start.elapsed() {
            waited if waited >= timeout => return Ok(Wait::TimedOut(waited)),
            waited if waited < SPIN => std::hint::spin_loop(),
            waited if waited < YIELD => std::thread::yield_now(),
            _ => std::thread::sleep(SLEEP),
        }
    }
}

/// Whether a request without receive buffer is complete.
pub(super) fn is_complete(request: &mut ffi::MPI_Request) -> Result<bool, Failure> {
    let mut flag = 0;
    // SAFETY: MPI accepts a request that it started, or the null that it writes on completion; the
    // callers, `barrier` and `duplicate`, pass what they have just started.
    check(unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) })?;
    Ok(flag != 0)
}

/// Aborts the process if an MPI function without timeout does not return.
pub(super) struct Watchdog {
    _returned: mpsc::Sender<()>,
}

impl Watchdog {
    pub(super) fn new(function: &'static str, timeout: Duration) -> Self {
        let (returned, watching) = mpsc::channel();
        std::thread::spawn(move || {
            if watching.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
                let seconds = timeout.as_secs_f64();
                eprintln!(
                    "error: {function} has not returned after {seconds:.1} s: a rank has stopped or \
                     is gone; aborting this process, since MPI has no other way to leave the call"
                );
                std::process::abort();
            }
        });
        Watchdog { _returned: returned }
    }
}
