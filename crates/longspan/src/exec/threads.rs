//! How many threads.

use std::num::NonZeroUsize;

use crate::error::{Error, Result};

/// How many threads work on a call. A number converts into it.
///
/// ```
/// use longspan::Threads;
///
/// assert_eq!(Threads::from(3).count()?, 3);
/// assert!(Threads::from(0).count().is_err());
/// assert!(Threads::Auto.count()? >= 1);
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Threads {
    /// As many as the call's [`Executor`](crate::Executor) has. The default pool has the value of
    /// the environment variable `LONGSPAN_THREADS`, else as many as this process may use: its CPU
    /// affinity and its container's quota count.
    #[default]
    Auto,
    /// This many, the calling thread included; at most 4,096, and at most as many as the executor
    /// has.
    Count(usize),
}

impl From<usize> for Threads {
    fn from(count: usize) -> Self {
        Threads::Count(count)
    }
}

/// The most threads of a call: more than the largest machines have CPUs. A larger number is a
/// mistake that would cost a stack and a workspace per thread.
const MAX_THREADS: usize = 4_096;

/// Says how many threads to use, where no option does.
pub(crate) const VARIABLE: &str = "LONGSPAN_THREADS";

impl Threads {
    /// How many that is on the default pool, here and now.
    pub fn count(self) -> Result<usize> {
        match self {
            Threads::Count(count) => check(count),
            Threads::Auto => {
                match std::env::var_os(VARIABLE).map(|text| text.to_string_lossy().into_owned()) {
                    Some(text) if !text.is_empty() => match text.trim().parse::<NonZeroUsize>() {
                        Ok(count) if count.get() <= MAX_THREADS => Ok(count.get()),
                        _ => Err(Error::Environment {
                            name: VARIABLE,
                            value: text,
                            expected: "a number of threads, 1 to 4096",
                        }),
                    },
                    _ => Ok(std::thread::available_parallelism().map_or(1, NonZeroUsize::get)),
                }
            }
        }
    }
}

/// A number of threads, if a call can have that many.
pub(super) fn check(threads: usize) -> Result<usize> {
    match threads {
        1..=MAX_THREADS => Ok(threads),
        _ => Err(Error::Threads { asked: threads, most: MAX_THREADS }),
    }
}
