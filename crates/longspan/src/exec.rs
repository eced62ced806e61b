//! Execution: worker threads, tasks claimed by them, progress and cancellation, scratch memory.
//!
//! ```text
//! Workers ── executor ──▶ Pool (default), a rayon pool, or one that the caller supplies
//!    │
//!    └─ for_each(tasks) ── every participating thread: claim a task, run it, poll the Monitor
//! ```
//!
//! Nothing is split by threads: tasks are a function of layouts and shapes, and each is claimed by
//! one thread. So which thread runs which task changes no bit of any result.

mod arena;
mod executor;
#[cfg_attr(
    not(feature = "fault-injection"),
    allow(dead_code, unreachable_pub, reason = "armed by tests alone")
)]
pub mod fault;
mod hook;
mod monitor;
mod pin;
mod pool;
#[cfg(feature = "rayon")]
mod rayon;
mod tasks;
mod threads;

pub(crate) use self::arena::Arena;
pub use self::executor::{Executor, Step};
pub use self::hook::{Hook, Progress};
pub(crate) use self::monitor::Monitor;
pub use self::pool::Pool;
pub(crate) use self::pool::worker_index;
pub(crate) use self::tasks::{Tasks, Workers};
pub use self::threads::Threads;
