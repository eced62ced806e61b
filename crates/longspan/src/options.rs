//! What a call can be told beside who sees whom.

use std::sync::Arc;

use crate::error::Result;
use crate::exec::{Executor, Pool, Threads, Workers, Workspaces};
use crate::isa::Isa;
use crate::precision::Precision;
use crate::score::Score;

/// Everything of an attention but its layouts.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) scale: Option<f32>,
    pub(crate) score: Score,
    pub(crate) threads: Threads,
    /// The default pool if `None`.
    pub(crate) executor: Option<Arc<dyn Executor>>,
    pub(crate) isa: Option<Isa>,
    pub(crate) precision: Precision,
    pub(crate) workspaces: Arc<Workspaces>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            scale: None,
            score: Score::Plain,
            threads: Threads::Auto,
            executor: None,
            isa: None,
            precision: Precision::Fastest,
            workspaces: Arc::default(),
        }
    }
}

impl Options {
    fn executor(&self) -> &dyn Executor {
        self.executor.as_deref().unwrap_or(Pool::global())
    }

    /// The threads that calls run on.
    pub(crate) fn workers(&self) -> Result<Workers<'_>> {
        let threads = match (&self.executor, self.threads) {
            (Some(executor), Threads::Auto) => executor.threads().max(1),
            (_, threads) => threads.count()?,
        };
        Ok(Workers { executor: self.executor(), threads })
    }

    /// Frees workspaces, and ends idle threads.
    pub(crate) fn trim(&self) {
        self.workspaces.trim();
        self.executor().trim();
    }
}

/// The setters of a type that has `options`.
macro_rules! setters {
    () => {
        /// What scores are multiplied by; `1/√dim` where it isn't set.
        #[must_use]
        pub fn scale(mut self, scale: f32) -> Self {
            self.options.scale = Some(scale);
            self
        }

        /// What is done to scores before the softmax.
        #[must_use]
        pub fn score(mut self, score: $crate::Score) -> Self {
            self.options.score = score;
            self
        }

        /// How many threads work on a call. Results don't depend on it.
        #[must_use]
        pub fn threads(mut self, threads: $crate::Threads) -> Self {
            self.options.threads = threads;
            self
        }

        /// The threads that calls run on, in place of those of the default
        /// [`Pool`]($crate::Pool::global). Results don't depend on them.
        #[must_use]
        pub fn executor(mut self, executor: std::sync::Arc<dyn $crate::Executor>) -> Self {
            self.options.executor = Some(executor);
            self
        }

        /// Returns to the system what calls keep for the next one: their workspaces, and the idle
        /// threads of the executor. The next call allocates and starts them again.
        pub fn trim(&self) {
            self.options.trim();
        }

        /// The instruction set to use, in place of the fastest one. Calls fail where the CPU hasn't
        /// got it.
        #[must_use]
        pub fn isa(mut self, isa: $crate::Isa) -> Self {
            self.options.isa = Some(isa);
            self
        }

        /// What products are made of, where there is a choice.
        #[must_use]
        pub fn precision(mut self, precision: $crate::Precision) -> Self {
            self.options.precision = precision;
            self
        }

        /// What is stored, multiplied and accumulated in calls on tensors of `E`, on this CPU.
        pub fn numbers<E: $crate::Element>(&self) -> $crate::Result<$crate::Numbers> {
            Ok(self.options.precision.numbers(E::TYPE, $crate::Isa::choose(self.options.isa)?))
        }
    };
}

pub(crate) use setters;
