//! What a call needs of the threads that it runs on.

use std::fmt::Debug;
use std::ops::ControlFlow;

/// One task of a call: claims it, runs it, and returns [`ControlFlow::Break`] when none is left.
pub type Step<'a> = dyn Fn() -> ControlFlow<()> + Sync + 'a;

/// Threads that calls run on: a [`Pool`](crate::Pool), a rayon pool (feature `rayon`), or any other
/// that can call a function on several threads at once.
///
/// Results do not depend on the executor: an executor that calls `step` on the calling thread only
/// is slow, not wrong.
///
/// ```
/// use std::ops::ControlFlow;
/// use std::sync::Arc;
/// use longspan::{Attention, Executor, Layout, Pattern, Shape, Step};
///
/// /// A scoped thread per participant and call.
/// #[derive(Debug)]
/// struct Scoped;
///
/// impl Executor for Scoped {
///     fn threads(&self) -> usize {
///         2
///     }
///
///     fn run(&self, threads: usize, step: &Step<'_>) {
///         let all = || while step().is_continue() {};
///         std::thread::scope(|scope| {
///             for _ in 1..threads {
///                 scope.spawn(all);
///             }
///             all();
///         });
///     }
/// }
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(1_000, 1_000))?;
/// let attention = Attention::new(layout).executor(Arc::new(Scoped));
/// # drop(attention);
/// # Ok::<_, longspan::Error>(())
/// ```
pub trait Executor: Debug + Send + Sync {
    /// Threads of a call that leaves their number open ([`Threads::Auto`](crate::Threads::Auto)),
    /// the calling thread included.
    fn threads(&self) -> usize;

    /// Calls `step` repeatedly on the calling thread and, at the same time, on up to `threads - 1`
    /// other threads, until it has returned [`ControlFlow::Break`] on each of them. Returns when no
    /// call of `step` is running. If `step` panics on any thread, `run` waits for the others, whose
    /// steps then break, and panics.
    ///
    /// The calling thread has to take part: progress hooks run there. While it waits for the
    /// others, it should call `step` again every few milliseconds, which then runs the hook and
    /// breaks; otherwise a call can't be stopped while the last tasks run.
    fn run(&self, threads: usize, step: &Step<'_>);

    /// Returns idle threads and their memory to the system; later calls start them again.
    fn trim(&self) {}
}

impl<E: Executor + ?Sized> Executor for &E {
    fn threads(&self) -> usize {
        (**self).threads()
    }

    fn run(&self, threads: usize, step: &Step<'_>) {
        (**self).run(threads, step);
    }

    fn trim(&self) {
        (**self).trim();
    }
}
