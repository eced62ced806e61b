//! Progress and cancellation as callers see them.

use std::ops::ControlFlow;

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Units of work that were done.
    pub done: usize,
    /// Units there are; 0 while the call is still preparing them.
    pub total: usize,
}

/// Called between tiles, on the thread that made the call: to poll a message engine, to show
/// progress, to stop.
///
/// ```
/// use std::ops::ControlFlow;
/// use longspan::Hook;
///
/// let mut polls = 0;
/// let mut poll = |_| {
///     polls += 1;
///     ControlFlow::Continue(())
/// };
/// let hook = Hook::new(&mut poll);
/// # drop(hook);
/// let nothing = Hook::none();
/// ```
pub struct Hook<'a>(pub(super) Option<&'a mut dyn FnMut(Progress) -> ControlFlow<()>>);

impl<'a> Hook<'a> {
    /// Calls `between` every few tiles. [`ControlFlow::Break`] ends the call with
    /// [`Error::Stopped`](crate::Error::Stopped).
    pub fn new(between: &'a mut dyn FnMut(Progress) -> ControlFlow<()>) -> Self {
        Hook(Some(between))
    }

    /// Calls nothing.
    pub fn none() -> Self {
        Hook(None)
    }

    /// The same, for one call of several.
    pub fn reborrow(&mut self) -> Hook<'_> {
        Hook(self.0.as_mut().map(|between| &mut **between as _))
    }
}

impl std::fmt::Debug for Hook<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hook({})", if self.0.is_some() { "_" } else { "none" })
    }
}
