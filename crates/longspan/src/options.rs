//! What a call can be told beside who sees whom.

use std::sync::Arc;

use crate::isa::Isa;
use crate::precision::Precision;
use crate::score::Score;
use crate::threads::Threads;
use crate::workspace::Workspaces;

/// Everything of an attention but its layouts.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) scale: Option<f32>,
    pub(crate) score: Score,
    pub(crate) threads: Threads,
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
            isa: None,
            precision: Precision::Fastest,
            workspaces: Arc::default(),
        }
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
