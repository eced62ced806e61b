//! `longspan ring` under the real `mpirun`, which `.ci/mpi` puts on the path.

#[path = "../common/mod.rs"]
mod common;
mod equal;
mod faults;
mod launch;
mod plan;
