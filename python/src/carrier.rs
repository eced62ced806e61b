//! Messages of a ring, through an object of Python's that owns a process group.
//!
//! ```text
//! hop ─▶ post.start(sends, receives)      with the interpreter's lock, microseconds
//!     ─▶ kernels                          without it; every 50 ms: signals, post.failed()
//!     ─▶ post.wait(timeout)              Python waits, and lets go of the lock meanwhile
//!
//! broadcast_abort ─▶ post.tell(bytes), post.heard(timeout) …, post.told(timeout)
//! ```
//!
//! Python is given the addresses of buffers, and makes tensors of them that share their memory.
//! After a failure the engine may still read or write there, so a hop that fails (by a panic too)
//! leaks its buffers.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use longspan_ring::{AbortListener, Failure, Hop, Meanwhile, Transport};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors;

/// As often as computations ask for signals.
const PAUSE: Duration = Duration::from_millis(50);

/// An exception that ended a hop: the caller's, not the ranks'.
#[derive(Clone, Default)]
pub(crate) struct Raised(Arc<Mutex<Option<PyErr>>>);

impl Raised {
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Keeps it for the caller; ranks are told that this one failed. The first is the cause.
    fn keep(&self, error: PyErr) -> Failure {
        let message = error.to_string();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        Failure::Engine { message }
    }
}

/// A rank of a process group that `post` has.
pub(crate) struct Carrier {
    post: Py<PyAny>,
    rank: usize,
    size: usize,
    raised: Raised,
}

impl Carrier {
    /// `post` has `rank`, `size`, `start`, `failed` and `wait`, and `tell`, `heard` and `told`.
    pub(crate) fn new(post: &Bound<'_, PyAny>) -> PyResult<Self> {
        let rank = post.getattr("rank")?.extract()?;
        let size = post.getattr("size")?.extract()?;
        Ok(Carrier { post: post.clone().unbind(), rank, size, raised: Raised::default() })
    }

    pub(crate) fn raised(&self) -> Raised {
        self.raised.clone()
    }

    fn call<T>(&self, work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, Failure> {
        match Python::try_attach(|py| work(self.post.bind(py))) {
            Some(Ok(value)) => Ok(value),
            Some(Err(error)) => Err(self.raised.keep(error)),
            None => Err(Failure::Engine { message: "the interpreter is shutting down".to_owned() }),
        }
    }

    /// Whether computing on is in vain.
    fn has_failed(&self) -> Result<bool, Failure> {
        self.call(|post| {
            post.py().check_signals()?;
            post.call_method0("failed")?.extract()
        })
    }

    /// Waits until everything has arrived and left.
    fn wait(&self, timeout: Duration) -> Result<(), Failure> {
        let failure = self.call(|post| {
            let ended = post.call_method1("wait", (timeout.as_secs_f64(),))?;
            if ended.is_none() { Ok(None) } else { failure(&ended).map(Some) }
        })?;
        failure.map_or(Ok(()), Err)
    }
}

impl Transport for Carrier {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn hop(&mut self, hop: Hop<'_>, meanwhile: &mut Meanwhile<'_>) -> Result<(), Failure> {
        let timeout = hop.timeout;
        let mut lent = Lent { hop, returned: false };
        let (sends, receives) = lent.places();
        let alone = sends.is_empty() && receives.is_empty();
        if !alone {
            self.call(|post| post.call_method1("start", (sends, receives)).map(drop))?;
        }
        let mut next = Instant::now() + PAUSE;
        let mut stopped = Ok(());
        meanwhile(&mut || {
            if Instant::now() < next {
                return ControlFlow::Continue(());
            }
            next = Instant::now() + PAUSE;
            match self.has_failed() {
                Ok(false) => ControlFlow::Continue(()),
                // What has failed is what there is to wait for.
                Ok(true) => ControlFlow::Break(()),
                Err(failure) => {
                    stopped = Err(failure);
                    ControlFlow::Break(())
                }
            }
        });
        stopped?;
        if !alone {
            self.wait(timeout)?;
        }
        lent.returned = true;
        Ok(())
    }

    fn broadcast_abort(&mut self, told: &[u8], hear: &mut AbortListener<'_>, timeout: Duration) {
        let start = Instant::now();
        let left = || timeout.saturating_sub(start.elapsed()).as_secs_f64();
        // What goes wrong here is nothing to what has gone wrong before.
        let _ = self.call(|post| {
            post.call_method1("tell", (PyBytes::new(post.py(), told),))?;
            loop {
                let heard = post.call_method1("heard", (left(),))?;
                let Some((rank, said)) = heard.extract::<Option<(usize, Vec<u8>)>>()? else {
                    return Ok(());
                };
                if hear(rank, &said).is_break() {
                    post.call_method1("told", (left(),))?;
                    return Ok(());
                }
            }
        });
    }
}

/// Where Python finds a message: the rank, the address, the bytes.
type Place = (usize, usize, usize);

/// Buffers that the engine may be using.
struct Lent<'a> {
    hop: Hop<'a>,
    returned: bool,
}

impl Lent<'_> {
    fn places(&mut self) -> (Vec<Place>, Vec<Place>) {
        let place =
            |rank, bytes: &mut [u8]| (rank, bytes.as_mut_ptr().expose_provenance(), bytes.len());
        let sends = self.hop.sends.iter_mut().map(|send| place(send.to, &mut send.bytes));
        let receives = self.hop.receives.iter_mut();
        let receives = receives.map(|receive| place(receive.from, &mut receive.bytes));
        (sends.collect(), receives.collect())
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if self.returned {
            return;
        }
        let sends = self.hop.sends.iter_mut().map(|send| &mut send.bytes);
        let receives = self.hop.receives.iter_mut().map(|receive| &mut receive.bytes);
        sends.chain(receives).for_each(|bytes| std::mem::forget(std::mem::take(bytes)));
    }
}

/// What `wait` returned.
fn failure(ended: &Bound<'_, PyAny>) -> PyResult<Failure> {
    let kind: String = ended.get_item(0)?.extract()?;
    match &*kind {
        "gone" => {
            let (_, rank, message): (String, usize, String) = ended.extract()?;
            Ok(Failure::Gone { rank: Some(rank), message })
        }
        "late" => {
            let (_, from, to, waited): (String, Vec<usize>, Vec<usize>, f64) = ended.extract()?;
            Ok(Failure::Timeout { from, to, waited: Duration::from_secs_f64(waited) })
        }
        other => Err(errors::value(format!("wait() returned {other:?}, expected gone or late"))),
    }
}
