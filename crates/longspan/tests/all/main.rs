//! Tests through the public API, as one program: `common` is compiled and linked once. Beside it are programs
//! that look at the whole process: its allocator, its threads, its memory, its faults.

mod additions;
mod cache;
#[path = "../common/mod.rs"]
mod common;
mod deterministic;
mod dilated;
mod edges;
mod errors;
mod executor;
mod guard;
mod half;
mod high;
mod hook;
mod lengths;
#[cfg(feature = "rayon")]
mod rayon;
mod reading_guide;
mod right;
mod select;
mod sinks;
mod split;
mod state;
mod weights;
