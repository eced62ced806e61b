//! Ranks as MPI processes.
//!
//! ```text
//! hop:  Irecv …, Isend …          every segment of every message
//!       meanwhile(poll = Test …)  MPI makes progress only in its calls
//!       Test … until all are complete, or the timeout has elapsed
//! ```
//!
//! No blocking function of MPI is called, except `MPI_Init_thread` and `MPI_Finalize`, which have no
//! nonblocking form: a watchdog ends the process if they exceed the timeout. MPI itself would wait for
//! a stopped rank forever.
//!
//! The functions are those of `mpi-sys`, rsmpi's bindings of the C interface. rsmpi's own functions
//! discard return codes; its requests, like `ferrompi`'s, are waited for at the end of their scope,
//! without a timeout.

#![allow(unsafe_code, reason = "the C interface of MPI")]

mod requests;
mod status;
mod wait;

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr;
use std::time::Duration;

use mpi_sys as ffi;

use self::requests::Requests;
use self::status::{check, engine};
use self::wait::{Wait, Watchdog, is_complete, wait_until};
use super::{AbortListener, Failure, Hop, Incoming, Meanwhile, Outgoing, Transport};
use crate::buffer::Buffer;

/// Tags of hops and of aborts. The communicator is a duplicate, so no others are in use.
const HOP_TAG: c_int = 0;
const ABORT_TAG: c_int = 1;

/// A rank of MPI.
///
/// It is bound to the thread that made it, since MPI may require that.
///
/// ```no_run
/// use std::time::Duration;
/// use longspan::Pattern;
/// use longspan_ring::{Mpi, Options, Problem, Ring, Shards, Transport};
///
/// let timeout = Duration::from_secs(60);
/// let mut mpi = Mpi::world(timeout)?;
/// let shards = Shards::contiguous(100_000, mpi.size(), 1)?;
/// let problem = Problem::new("causal & window(512, 0)".parse::<Pattern>()?, shards);
/// let ring = Ring::new(&mut mpi, problem, Options { timeout, ..Options::default() })?;
/// // … passes …
/// drop(ring);
/// mpi.close(timeout)?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Mpi {
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    initialized_by: InitializedBy,
    failed: bool,
    not_send: PhantomData<*const ()>,
}

/// Who initialized MPI, and finalizes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InitializedBy {
    This,
    Caller,
}

impl Mpi {
    /// All processes of the launch. Initializes MPI if it is not; then MPI's errors are returned, and
    /// [`close`](Self::close) finalizes it.
    ///
    /// Aborts the process if the initialization exceeds `timeout`.
    pub fn world(timeout: Duration) -> Result<Self, Failure> {
        let (mut initialized, mut finalized) = (0, 0);
        // SAFETY: MPI allows both at any time, before its initialization and after its finalization.
        unsafe {
            check(ffi::MPI_Initialized(&mut initialized))?;
            check(ffi::MPI_Finalized(&mut finalized))?;
        }
        if finalized != 0 {
            return Err(engine(
                "MPI is finalized in this process, and cannot be initialized again",
            ));
        }
        let mut initialized_by = InitializedBy::Caller;
        if initialized == 0 {
            initialized_by = InitializedBy::This;
            let watchdog = Watchdog::new("MPI_Init_thread", timeout);
            let mut level = 0;
            // SAFETY: `MPI_Initialized` has reported that MPI is not initialized; it accepts null for
            // absent arguments, and both communicators exist afterwards.
            unsafe {
                let required = ffi::RSMPI_THREAD_SERIALIZED;
                let (argc, argv) = (ptr::null_mut(), ptr::null_mut());
                check(ffi::MPI_Init_thread(argc, argv, required, &mut level))?;
                // Errors without communicator go to the second.
                for comm in [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] {
                    check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
                }
            }
            drop(watchdog);
        }
        // SAFETY: MPI is initialized, by the caller or just now, and its world is never freed.
        unsafe { Mpi::over(ffi::RSMPI_COMM_WORLD, initialized_by, timeout) }
    }

    /// The processes of a communicator, which is duplicated: a collective call. The communicator's
    /// error handler applies to this call.
    ///
    /// # Safety
    ///
    /// MPI must be initialized, and `comm` be an intracommunicator until this returns.
    pub unsafe fn from_raw(comm: ffi::MPI_Comm, timeout: Duration) -> Result<Self, Failure> {
        // SAFETY: `over` has the condition of this function.
        unsafe { Mpi::over(comm, InitializedBy::Caller, timeout) }
    }

    /// # Safety
    ///
    /// That of [`from_raw`](Self::from_raw).
    unsafe fn over(
        comm: ffi::MPI_Comm,
        initialized_by: InitializedBy,
        timeout: Duration,
    ) -> Result<Self, Failure> {
        let (mut level, mut main) = (0, 0);
        // SAFETY: this function requires that MPI is initialized.
        unsafe {
            check(ffi::MPI_Query_thread(&mut level))?;
            check(ffi::MPI_Is_thread_main(&mut main))?;
        }
        // SAFETY: a constant of the library, which nothing writes.
        if main == 0 && level < unsafe { ffi::RSMPI_THREAD_SERIALIZED } {
            return Err(engine(
                "MPI was initialized for its main thread only, and this is another thread: initialize \
                 it with MPI_THREAD_SERIALIZED, or run the ring on the main thread",
            ));
        }
        // SAFETY: `duplicate` has the condition of this function.
        let comm = unsafe { duplicate(comm, timeout)? };
        let (mut rank, mut size) = (0, 0);
        // SAFETY: `duplicate` has made the communicator just now.
        unsafe {
            check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
            check(ffi::MPI_Comm_rank(comm, &mut rank))?;
            check(ffi::MPI_Comm_size(comm, &mut size))?;
        }
        let (rank, size) = (rank as usize, size as usize);
        Ok(Mpi { comm, rank, size, initialized_by, failed: false, not_send: PhantomData })
    }

    /// Frees the communicator, and finalizes MPI where [`world`](Self::world) initialized it, after
    /// every rank has called this; after a failure neither. Required after `world`: MPI's launcher
    /// treats a process that ends without it as crashed.
    ///
    /// Aborts the process if the finalization exceeds `timeout`.
    pub fn close(mut self, timeout: Duration) -> Result<(), Failure> {
        if self.failed {
            return Err(engine(FAILED));
        }
        self.barrier(timeout)?;
        let watchdog = Watchdog::new("MPI_Finalize", timeout);
        // SAFETY: no request of the communicator is open: `Requests` that end without failure have
        // completed theirs, and `failed` was checked above. `duplicate` made it, and `self`, its only
        // owner, ends here.
        unsafe {
            check(ffi::MPI_Comm_free(&mut self.comm))?;
            if self.initialized_by == InitializedBy::This {
                check(ffi::MPI_Finalize())?;
            }
        }
        drop(watchdog);
        Ok(())
    }

    /// Waits until every rank has called this or [`close`](Self::close). After a failure it is for a
    /// rank that has reported its error and is about to exit: launchers then kill all other ranks,
    /// possibly before their reports.
    pub fn barrier(&mut self, timeout: Duration) -> Result<(), Failure> {
        // SAFETY: a constant of the library, which nothing writes.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: `over` has made the communicator, which lives until `close`; a barrier has no
        // buffers.
        check(unsafe { ffi::MPI_Ibarrier(self.comm, &mut request) })?;
        let waited = wait_until(timeout, || is_complete(&mut request));
        let met = waited.and_then(|waited| match waited {
            Wait::Done => Ok(()),
            Wait::TimedOut(waited) => Err(engine(format!(
                "timed out after {:.1} s: not every rank has reached the barrier",
                waited.as_secs_f64()
            ))),
        });
        self.failed |= met.is_err();
        met
    }
}

const FAILED: &str = "a hop has failed before, and its messages may still be in flight";

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure> {
        let Hop { sends, receives, timeout } = hop;
        if self.failed && !receives.is_empty() {
            // They could match messages of the abandoned receives.
            return Err(engine(FAILED));
        }
        let mut requests = Requests::new(sends, receives, HOP_TAG);
        let hopped = requests.start(self.comm).and_then(|()| {
            let mut failure = None;
            meanwhile(&mut || {
                if failure.is_none() {
                    failure = requests.advance().err();
                }
                if failure.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            failure.map_or_else(|| requests.wait(timeout), Err)
        });
        self.failed |= hopped.is_err();
        hopped
    }

    /// Each message has its own requests: a failed send to or receive from one rank does not affect
    /// the others.
    fn broadcast_abort(
        &mut self,
        message: &[u8],
        listener: &mut AbortListener<'_>,
        timeout: Duration,
    ) {
        let others = (0..self.size).filter(|&other| other != self.rank);
        let (mut sends, mut receives): (Vec<_>, Vec<_>) = others
            .map(|rank| {
                let (to, from) = (Buffer::from(message), Buffer::zeroed(message.len()));
                ([Outgoing { to: rank, bytes: to }], [Incoming { from: rank, bytes: from }])
            })
            .unzip();
        let incoming =
            receives.iter_mut().map(|message| Requests::new(&mut [], message, ABORT_TAG));
        let mut incoming: Vec<_> =
            incoming.filter_map(|requests| requests.started(self.comm)).collect();
        let outgoing = sends.iter_mut().map(|message| Requests::new(message, &mut [], ABORT_TAG));
        let mut outgoing: Vec<_> =
            outgoing.filter_map(|requests| requests.started(self.comm)).collect();
        let (mut enough, mut lost) = (false, incoming.len() + outgoing.len() < 2 * (self.size - 1));
        // The buffers of open requests are leaked, as after any failure.
        let _ = wait_until(timeout, || {
            outgoing.retain_mut(|requests| {
                let advanced = requests.advance();
                lost |= advanced.is_err();
                advanced.is_ok() && !requests.is_complete()
            });
            incoming.retain_mut(|requests| match requests.advance() {
                Ok(()) if requests.is_complete() => {
                    let Incoming { from, bytes } = &requests.receives[0];
                    enough |= listener(*from, bytes).is_break();
                    false
                }
                Ok(()) => true,
                Err(_) => {
                    lost = true;
                    false
                }
            });
            Ok((enough || incoming.is_empty()) && outgoing.is_empty())
        });
        self.failed |= lost || !incoming.is_empty() || !outgoing.is_empty();
    }
}

/// A duplicate of a communicator, with messages of its own.
///
/// # Safety
///
/// That of [`Mpi::from_raw`].
unsafe fn duplicate(comm: ffi::MPI_Comm, timeout: Duration) -> Result<ffi::MPI_Comm, Failure> {
    // MPI writes it when all ranks have called this, possibly after our timeout.
    // SAFETY: a constant of the library, which nothing writes.
    let own = Box::into_raw(Box::new(unsafe { ffi::RSMPI_COMM_NULL }));
    // SAFETY: a constant of the library, which nothing writes.
    let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
    // SAFETY: this function requires a communicator of MPI, which is initialized; the box is freed
    // below, once the request is complete, or never.
    check(unsafe { ffi::MPI_Comm_idup(comm, own, &mut request) })?;
    match wait_until(timeout, || is_complete(&mut request))? {
        // SAFETY: `own` came from a box above, and MPI does not write it after completion.
        Wait::Done => Ok(*unsafe { Box::from_raw(own) }),
        Wait::TimedOut(waited) => Err(engine(format!(
            "timed out after {:.1} s: not every rank has called the duplication of the communicator",
            waited.as_secs_f64()
        ))),
    }
}
