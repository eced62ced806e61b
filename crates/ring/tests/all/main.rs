//! Rings whose ranks are threads, as one program: `common` is compiled and linked once.

mod bytes;
#[path = "../common/mod.rs"]
mod common;
mod dilated;
mod dropout;
mod equal;
mod faults;
mod planner;
mod same_bits;
mod sinks;
mod wire;
mod workers;
