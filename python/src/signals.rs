//! A computation without the interpreter's lock, and Ctrl-C.
//!
//! Other Python threads run while the library computes. Python's signal handlers run only when the
//! main thread checks for them, so the hook between tiles does, every [`PAUSE`]. What a handler
//! raises (`KeyboardInterrupt`, mostly) ends the call.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// Short to a person who waits, long to kernels: taking the lock costs microseconds, or another
/// thread's turn of 5 ms.
const PAUSE: Duration = Duration::from_millis(50);

/// Checks for signals every [`PAUSE`].
pub(crate) struct Watch {
    next: Instant,
    raised: Option<PyErr>,
}

impl Watch {
    /// Whether to go on.
    pub(crate) fn look(&mut self) -> ControlFlow<()> {
        if Instant::now() < self.next {
            return ControlFlow::Continue(());
        }
        // Without an interpreter (it is shutting down) the result has no use.
        let checked = Python::try_attach(|py| py.check_signals());
        self.next = Instant::now() + PAUSE;
        match checked {
            Some(Ok(())) => ControlFlow::Continue(()),
            Some(Err(raised)) => {
                self.raised = Some(raised);
                ControlFlow::Break(())
            }
            None => ControlFlow::Break(()),
        }
    }
}

/// Runs `work` without the interpreter's lock. It has to [look](Watch::look) now and then, and to
/// end with an error when `look` returns `Break`.
pub(crate) fn released<T, E>(
    py: Python<'_>,
    work: impl FnOnce(&mut Watch) -> Result<T, E> + Send,
    raise: impl FnOnce(E) -> PyErr,
) -> PyResult<T>
where
    T: Send,
    E: Send,
{
    let mut watch = Watch { next: Instant::now() + PAUSE, raised: None };
    let result = py.detach(|| work(&mut watch));
    // Also where the work was done by then: an exception isn't lost.
    match watch.raised {
        Some(raised) => Err(raised),
        None => result.map_err(raise),
    }
}
