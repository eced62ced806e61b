//! Options of one rank. `layouts` and `ring` read them.

use std::sync::Arc;
use std::time::Duration;

use longspan::{Executor, Isa, Precision, Threads};

use crate::problem::Problem;

/// Options of one rank; they may differ between ranks.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long a rank waits for messages while it has nothing to compute. It must exceed the longest
    /// uninterrupted computation of any other rank. The pass fails after it.
    pub timeout: Duration,
    /// Threads of this rank's kernels.
    pub threads: Threads,
    /// The executor of these threads. Default: a pool per rank, so that ranks that are threads of one
    /// process do not share workers.
    pub executor: Option<Arc<dyn Executor>>,
    /// See [`longspan::Attention::isa`].
    pub isa: Option<Isa>,
    /// See [`longspan::Attention::precision`].
    pub precision: Precision,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            timeout: Duration::from_secs(60),
            threads: Threads::Auto,
            executor: None,
            isa: None,
            precision: Precision::Highest,
        }
    }
}

impl Options {
    /// Options of the kernels of this rank.
    pub(crate) fn kernels(&self, problem: &Problem) -> longspan::Options {
        let mut kernels = longspan::Options::default()
            .score(problem.score.clone())
            .threads(self.threads)
            .precision(self.precision);
        if let Some(executor) = &self.executor {
            kernels = kernels.executor(executor.clone());
        }
        if let Some(scale) = problem.scale {
            kernels = kernels.scale(scale);
        }
        if let Some(dropout) = problem.dropout {
            kernels = kernels.dropout(dropout);
        }
        if let Some(isa) = self.isa {
            kernels = kernels.isa(isa);
        }
        kernels
    }
}
