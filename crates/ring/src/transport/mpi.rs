//! Ranks that are processes of MPI.
//!
//! ```text
//! hop:  Irecv …, Isend …          every piece of every message
//!       meanwhile(poll = Test …)  MPI moves only while it is called
//!       Test … until all are done, or the time is over
//! ```
//!
//! Nothing here calls a function of MPI that waits for another rank, but for `MPI_Init` and
//! `MPI_Finalize`, which have no other form: those are watched, and end the process if they take
//! too long. A rank that has stopped answers nobody, and MPI by itself would wait for it for ever.
//!
//! The functions are those of `mpi-sys`, rsmpi's description of the C interface. rsmpi's own
//! functions drop the codes that MPI returns; a request there, as one of `ferrompi`, is waited for
//! when its scope ends, which is the one thing that must not happen here.

#![allow(unsafe_code, reason = "the C interface of MPI")]

use std::ffi::{c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::ptr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use mpi_sys as ffi;

use super::{Failure, Hear, Hop, Incoming, Meanwhile, Outgoing, Transport};
use crate::buffer::Buffer;

/// Counts of MPI's functions are C's `int`. Longer messages go in pieces of this many bytes, which
/// arrive in order because they have the same ends and tag.
const PIECE: usize = 1 << 30;

/// The communicator is ours alone, so all messages of hops have one tag, and what is told when they
/// have failed another.
const TAG: c_int = 0;
const FAREWELL: c_int = 1;

/// A rank of MPI.
///
/// It stays in the thread that made it, because MPI may ask for that.
///
/// ```no_run
/// use std::time::Duration;
/// use longspan::Pattern;
/// use longspan_ring::{Mpi, Options, Problem, Ring, Shards, Transport};
///
/// let patience = Duration::from_secs(60);
/// let mut mpi = Mpi::world(patience)?;
/// let shards = Shards::contiguous(100_000, mpi.size(), 1)?;
/// let problem = Problem::new("causal & window(512, 0)".parse::<Pattern>()?, shards);
/// let ring = Ring::new(&mut mpi, problem, Options { patience, ..Options::default() })?;
/// // … passes …
/// drop(ring);
/// mpi.close(patience)?;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Mpi {
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
    begun: Begun,
    failed: bool,
    here: PhantomData<*const ()>,
}

/// Who has begun MPI, and so ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begun {
    Here,
    Elsewhere,
}

impl Mpi {
    /// All processes that were started together. Begins MPI if nobody has; then errors of it are
    /// returned, and [`close`](Self::close) ends it.
    ///
    /// Ends the process if MPI doesn't begin within `patience`.
    pub fn world(patience: Duration) -> Result<Self, Failure> {
        let (mut initialized, mut finalized) = (0, 0);
        // SAFETY: MPI allows both at any time, before it begins and after it has ended.
        unsafe {
            check(ffi::MPI_Initialized(&mut initialized))?;
            check(ffi::MPI_Finalized(&mut finalized))?;
        }
        if finalized != 0 {
            return Err(engine("MPI has ended in this process, and can't begin again"));
        }
        let mut begun = Begun::Elsewhere;
        if initialized == 0 {
            begun = Begun::Here;
            let watch = Watch::over("MPI_Init_thread", patience);
            let mut level = 0;
            // SAFETY: `MPI_Initialized` has said that MPI hasn't begun; it takes null for arguments
            // that it isn't given, and both communicators exist once it has.
            unsafe {
                let wanted = ffi::RSMPI_THREAD_SERIALIZED;
                check(ffi::MPI_Init_thread(ptr::null_mut(), ptr::null_mut(), wanted, &mut level))?;
                // The second is what some errors go to that belong to no communicator.
                for comm in [ffi::RSMPI_COMM_WORLD, ffi::RSMPI_COMM_SELF] {
                    check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
                }
            }
            drop(watch);
        }
        // SAFETY: MPI runs, by `MPI_Initialized` or since just now, and its world is never freed.
        unsafe { Mpi::over(ffi::RSMPI_COMM_WORLD, begun, patience) }
    }

    /// The processes of a communicator, of which it makes a duplicate of its own: every one of them
    /// has to call this. What the communicator does with errors holds for that call.
    ///
    /// # Safety
    ///
    /// MPI must run, and `comm` be one of its intracommunicators until this returns.
    pub unsafe fn from_raw(comm: ffi::MPI_Comm, patience: Duration) -> Result<Self, Failure> {
        // SAFETY: `over` has the condition of this function.
        unsafe { Mpi::over(comm, Begun::Elsewhere, patience) }
    }

    /// # Safety
    ///
    /// That of [`from_raw`](Self::from_raw).
    unsafe fn over(comm: ffi::MPI_Comm, begun: Begun, patience: Duration) -> Result<Self, Failure> {
        let (mut level, mut main) = (0, 0);
        // SAFETY: this function demands that MPI runs.
        unsafe {
            check(ffi::MPI_Query_thread(&mut level))?;
            check(ffi::MPI_Is_thread_main(&mut main))?;
        }
        // SAFETY: a constant of the library, which nothing writes.
        if main == 0 && level < unsafe { ffi::RSMPI_THREAD_SERIALIZED } {
            return Err(engine(
                "MPI was begun for its main thread alone, and this is another one: begin it with \
                 MPI_THREAD_SERIALIZED, or run the ring there",
            ));
        }
        // SAFETY: `duplicate` has the condition of this function.
        let comm = unsafe { duplicate(comm, patience)? };
        let (mut rank, mut size) = (0, 0);
        // SAFETY: `duplicate` has made the communicator just now.
        unsafe {
            check(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
            check(ffi::MPI_Comm_rank(comm, &mut rank))?;
            check(ffi::MPI_Comm_size(comm, &mut size))?;
        }
        let (rank, size) = (rank as usize, size as usize);
        Ok(Mpi { comm, rank, size, begun, failed: false, here: PhantomData })
    }

    /// Lets go of the communicator, and ends MPI where [`world`](Self::world) has begun it, once
    /// every rank has come here; after a failure it does neither. Who has made it with `world`
    /// calls this, since MPI's launcher takes a process that ends without for one that has crashed.
    ///
    /// Ends the process if MPI doesn't end within `patience`.
    pub fn close(mut self, patience: Duration) -> Result<(), Failure> {
        if self.failed {
            return Err(engine(FAILED));
        }
        self.meet(patience)?;
        let watch = Watch::over("MPI_Finalize", patience);
        // SAFETY: no request of the communicator is open: a flight that ends without failure has
        // closed its own, and `failed` was asked above. `duplicate` made it, and `self`, its only
        // holder, ends here.
        unsafe {
            check(ffi::MPI_Comm_free(&mut self.comm))?;
            if self.begun == Begun::Here {
                check(ffi::MPI_Finalize())?;
            }
        }
        drop(watch);
        Ok(())
    }

    /// Waits until every rank has come here or into [`close`](Self::close). After a failure it is
    /// for a rank that has said what is wrong and is about to end its process: launchers then end
    /// all others, with what they still had to say.
    pub fn meet(&mut self, patience: Duration) -> Result<(), Failure> {
        // SAFETY: a constant of the library, which nothing writes.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: `over` has made the communicator, which lives until `close`; a barrier has no
        // buffers.
        check(unsafe { ffi::MPI_Ibarrier(self.comm, &mut request) })?;
        let met = wait_until(patience, || done(&mut request)).and_then(|waited| match waited {
            Waited::Done => Ok(()),
            Waited::InVain(waited) => Err(engine(format!(
                "after {:.1} s not every rank has come to the end",
                waited.as_secs_f64()
            ))),
        });
        self.failed |= met.is_err();
        met
    }
}

const FAILED: &str = "a hop has failed before, and its messages may still be on their way";

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure> {
        let Hop { sends, receives, patience } = hop;
        if self.failed && !receives.is_empty() {
            // They would find what was meant for receives that were left behind.
            return Err(engine(FAILED));
        }
        let mut flight = Flight::of(sends, receives, TAG);
        let flown = flight.start(self.comm).and_then(|()| {
            let mut failure = None;
            meanwhile(&mut || {
                if failure.is_none() {
                    failure = flight.advance().err();
                }
                if failure.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            failure.map_or_else(|| flight.land(patience), Err)
        });
        self.failed |= flown.is_err();
        flown
    }

    /// Each message is a flight of its own: what can't be sent to one, or received from one who is
    /// gone, is nothing to the others.
    fn farewell(&mut self, told: &[u8], hear: &mut Hear<'_>, patience: Duration) {
        let others = (0..self.size).filter(|&other| other != self.rank);
        let (mut sends, mut receives): (Vec<_>, Vec<_>) = others
            .map(|rank| {
                let (to, from) = (Buffer::from(told), Buffer::zeroed(told.len()));
                ([Outgoing { to: rank, bytes: to }], [Incoming { from: rank, bytes: from }])
            })
            .unzip();
        let coming = receives.iter_mut().map(|receives| Flight::of(&mut [], receives, FAREWELL));
        let mut coming: Vec<_> = coming.filter_map(|flight| flight.started(self.comm)).collect();
        let leaving = sends.iter_mut().map(|sends| Flight::of(sends, &mut [], FAREWELL));
        let mut leaving: Vec<_> = leaving.filter_map(|flight| flight.started(self.comm)).collect();
        let (mut enough, mut lost) = (false, coming.len() + leaving.len() < 2 * (self.size - 1));
        // Whatever is still open then stays MPI's, as after any failure.
        let _ = wait_until(patience, || {
            leaving.retain_mut(|flight| {
                let advanced = flight.advance();
                lost |= advanced.is_err();
                advanced.is_ok() && !flight.open.is_empty()
            });
            coming.retain_mut(|flight| match flight.advance() {
                Ok(()) if flight.open.is_empty() => {
                    let Incoming { from, bytes } = &flight.receives[0];
                    enough |= hear(*from, bytes).is_break();
                    false
                }
                Ok(()) => true,
                Err(_) => {
                    lost = true;
                    false
                }
            });
            Ok((enough || coming.is_empty()) && leaving.is_empty())
        });
        self.failed |= lost || !coming.is_empty() || !leaving.is_empty();
    }
}

/// Messages that travel at the same time.
struct Flight<'h> {
    sends: &'h mut [Outgoing],
    receives: &'h mut [Incoming],
    /// What MPI hasn't let go of.
    open: Vec<Piece>,
    tag: c_int,
}

/// A piece of a message on its way.
struct Piece {
    request: ffi::MPI_Request,
    end: End,
    /// Where it lies in the message, and how long it is.
    at: usize,
    len: usize,
}

/// Which message of a hop.
#[derive(Clone, Copy)]
enum End {
    Send(usize),
    Receive(usize),
}

impl<'h> Flight<'h> {
    fn of(sends: &'h mut [Outgoing], receives: &'h mut [Incoming], tag: c_int) -> Self {
        Flight { sends, receives, open: Vec::new(), tag }
    }

    /// Itself, if MPI takes it.
    fn started(mut self, comm: ffi::MPI_Comm) -> Option<Self> {
        self.start(comm).is_ok().then_some(self)
    }

    fn start(&mut self, comm: ffi::MPI_Comm) -> Result<(), Failure> {
        let tag = self.tag;
        // A receive that is there before its message saves MPI a copy.
        for index in 0..self.receives.len() {
            let len = self.receives[index].bytes.len();
            let from = self.receives[index].from;
            let first = self.receives[index].bytes.as_mut_ptr();
            for (at, len) in pieces(len) {
                self.post(End::Receive(index), (at, len), |request| {
                    // SAFETY: bytes `at..at + len` are those of the buffer. It is not touched, moved
                    // or freed while the piece is open: the hop is borrowed until the flight ends,
                    // and what is open then is taken out of it for good.
                    unsafe {
                        let (first, kind) = (first.add(at).cast::<c_void>(), ffi::RSMPI_UINT8_T);
                        ffi::MPI_Irecv(first, int(len), kind, int(from), tag, comm, request)
                    }
                })?;
            }
        }
        for index in 0..self.sends.len() {
            let len = self.sends[index].bytes.len();
            let to = self.sends[index].to;
            let first = self.sends[index].bytes.as_mut_ptr();
            for (at, len) in pieces(len) {
                self.post(End::Send(index), (at, len), |request| {
                    // SAFETY: as of the receives above.
                    unsafe {
                        let (first, kind) = (first.add(at).cast::<c_void>(), ffi::RSMPI_UINT8_T);
                        ffi::MPI_Isend(first, int(len), kind, int(to), tag, comm, request)
                    }
                })?;
            }
        }
        Ok(())
    }

    fn post(
        &mut self,
        end: End,
        (at, len): (usize, usize),
        start: impl FnOnce(&mut ffi::MPI_Request) -> c_int,
    ) -> Result<(), Failure> {
        // SAFETY: a constant of the library, which nothing writes.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let code = start(&mut request);
        let piece = Piece { request, end, at, len };
        let started = self.judge(&piece, code);
        // One that couldn't be started may be known to MPI all the same.
        self.open.push(piece);
        started
    }

    /// Lets MPI move, and looks what has arrived and left.
    fn advance(&mut self) -> Result<(), Failure> {
        let mut index = 0;
        while index < self.open.len() {
            match self.test(index)? {
                true => drop(self.open.swap_remove(index)),
                false => index += 1,
            }
        }
        Ok(())
    }

    /// Whether a piece has arrived or left.
    fn test(&mut self, index: usize) -> Result<bool, Failure> {
        let piece = &mut self.open[index];
        let mut flag = 0;
        // SAFETY: a status is a C structure of integers, for which zeros are valid.
        let mut status = unsafe { std::mem::zeroed::<ffi::MPI_Status>() };
        // SAFETY: `post` has started the request, and it isn't done: `advance` removes those that
        // are.
        let code = unsafe { ffi::MPI_Test(&mut piece.request, &mut flag, &mut status) };
        let piece = &self.open[index];
        self.judge(piece, code)?;
        let End::Receive(receive) = piece.end else { return Ok(flag != 0) };
        if flag == 0 {
            return Ok(false);
        }
        let mut count = 0;
        // SAFETY: `MPI_Test` has written the status: the flag says that the receive is done.
        check(unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) })?;
        if count as usize == piece.len {
            return Ok(true);
        }
        let receive = &self.receives[receive];
        let (from, expected, got) = (receive.from, receive.bytes.len(), piece.at + count as usize);
        let beginning = receive.bytes[..got.min(Failure::BEGINNING)].to_vec();
        Err(Failure::Length { from, expected, got, beginning })
    }

    /// What a code says about a piece.
    fn judge(&self, piece: &Piece, code: c_int) -> Result<(), Failure> {
        let Err(error) = code_to_result(code) else { return Ok(()) };
        let peer = match piece.end {
            End::Send(send) => self.sends[send].to,
            End::Receive(receive) => self.receives[receive].from,
        };
        if error.class != ffi::MPI_ERR_TRUNCATE as c_int {
            return Err(Failure::Gone { rank: Some(peer), message: error.message });
        }
        let (expected, message) = (piece.at + piece.len, error.message);
        Err(Failure::Longer { from: peer, expected, message })
    }

    /// Waits for the rest.
    fn land(&mut self, patience: Duration) -> Result<(), Failure> {
        let waited = wait_until(patience, || {
            self.advance()?;
            Ok(self.open.is_empty())
        })?;
        let Waited::InVain(waited) = waited else { return Ok(()) };
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for piece in &self.open {
            match piece.end {
                End::Send(send) => to.push(self.sends[send].to),
                End::Receive(receive) => from.push(self.receives[receive].from),
            }
        }
        for ranks in [&mut from, &mut to] {
            ranks.sort_unstable();
            ranks.dedup();
        }
        Err(Failure::Late { from, to, waited })
    }
}

/// What MPI may still read or write is never freed, also when computing has panicked.
impl Drop for Flight<'_> {
    fn drop(&mut self) {
        for piece in &self.open {
            let bytes = match piece.end {
                End::Send(send) => &mut self.sends[send].bytes,
                End::Receive(receive) => &mut self.receives[receive].bytes,
            };
            std::mem::forget(std::mem::take(bytes));
        }
    }
}

/// Where each piece of a message begins, and its length; one of nothing is a message too.
fn pieces(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len.div_ceil(PIECE).max(1)).map(move |n| (n * PIECE, PIECE.min(len - n * PIECE)))
}

/// A count or rank that MPI can take.
fn int(number: usize) -> c_int {
    c_int::try_from(number).expect("pieces are below 2 GiB, and ranks were MPI's")
}

/// A copy of a communicator, whose messages are ours alone.
///
/// # Safety
///
/// That of [`Mpi::from_raw`].
unsafe fn duplicate(comm: ffi::MPI_Comm, patience: Duration) -> Result<ffi::MPI_Comm, Failure> {
    // MPI writes it when all ranks have come, which may be after we have given up.
    // SAFETY: a constant of the library, which nothing writes.
    let own = Box::into_raw(Box::new(unsafe { ffi::RSMPI_COMM_NULL }));
    // SAFETY: a constant of the library, which nothing writes.
    let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
    // SAFETY: this function demands a communicator of MPI, which runs; the box is freed below, once
    // the request is done, or never.
    check(unsafe { ffi::MPI_Comm_idup(comm, own, &mut request) })?;
    match wait_until(patience, || done(&mut request))? {
        // SAFETY: `own` came from a box above, and MPI doesn't write it once the request is done.
        Waited::Done => Ok(*unsafe { Box::from_raw(own) }),
        Waited::InVain(waited) => Err(engine(format!(
            "after {:.1} s not every rank has come to duplicate the communicator",
            waited.as_secs_f64()
        ))),
    }
}

/// Whether a request that receives nothing is done.
fn done(request: &mut ffi::MPI_Request) -> Result<bool, Failure> {
    let mut flag = 0;
    // SAFETY: MPI takes a request that it started, or the null that it writes once that is done;
    // callers of this function, `meet` and `duplicate`, pass what they have just started.
    check(unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) })?;
    Ok(flag != 0)
}

enum Waited {
    Done,
    /// So long, and it isn't done.
    InVain(Duration),
}

/// How long to ask without a pause, and then without sleeping: what travels on this machine takes
/// microseconds. Later every pause gives the core to others, who may be the ones waited for.
const HASTE: Duration = Duration::from_micros(20);
const YIELD: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(50);

/// Asks until it is done.
fn wait_until(
    patience: Duration,
    mut ask: impl FnMut() -> Result<bool, Failure>,
) -> Result<Waited, Failure> {
    let start = Instant::now();
    loop {
        if ask()? {
            return Ok(Waited::Done);
        }
        match start.elapsed() {
            waited if waited >= patience => return Ok(Waited::InVain(waited)),
            waited if waited < HASTE => std::hint::spin_loop(),
            waited if waited < YIELD => std::thread::yield_now(),
            _ => std::thread::sleep(NAP),
        }
    }
}

/// Ends the process if a function of MPI that takes no deadline doesn't return.
struct Watch {
    _returned: mpsc::Sender<()>,
}

impl Watch {
    fn over(function: &'static str, patience: Duration) -> Self {
        let (returned, watching) = mpsc::channel();
        std::thread::spawn(move || {
            if watching.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                let seconds = patience.as_secs_f64();
                eprintln!(
                    "error: {function} hasn't returned after {seconds:.1} s: a rank has stopped or \
                     is gone, and MPI can't be left in another way than by ending this process"
                );
                std::process::abort();
            }
        });
        Watch { _returned: returned }
    }
}

fn engine(message: impl Into<String>) -> Failure {
    Failure::Engine { message: message.into() }
}

/// What MPI says about an error.
struct CodeError {
    class: c_int,
    message: String,
}

fn code_to_result(code: c_int) -> Result<(), CodeError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let (mut class, mut len) = (0, 0);
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    // SAFETY: MPI takes any code that its functions return, as this one was; the text has as many
    // bytes as MPI may write.
    unsafe {
        ffi::MPI_Error_class(code, &mut class);
        ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len);
    }
    let text = &text[..(len.max(0) as usize).min(text.len())];
    Err(CodeError { class, message: String::from_utf8_lossy(text).into_owned() })
}

fn check(code: c_int) -> Result<(), Failure> {
    code_to_result(code).map_err(|error| engine(error.message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_whole_message() {
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 5 * PIECE + 7] {
            let mut end = 0;
            for (at, len) in pieces(len) {
                assert_eq!(at, end);
                assert!(c_int::try_from(len).is_ok());
                end = at + len;
            }
            assert_eq!(end, len);
        }
        assert_eq!(pieces(0).count(), 1);
    }
}
