//! The `longspan` command: inspect attention patterns, benchmark and verify them, diagnose this machine.
//!
//! Modules, lowest layer first; each imports only those above it in this table:
//!
//! | modules | purpose |
//! |---|---|
//! | `number`, `table`, `tty`, `progress`, `memory`, `random` | formatting, terminal, progress bar, allocator, test data |
//! | `args`, `element`, `choice`, `machine`, `compile` | options, dtype dispatch, ISA and threads, the host, patterns to layouts |
//! | `plot` | scenes of rectangles and text, as PNG or SVG |
//! | `inspect`, `select`, `bench`, `ring`, `verify`, `plan`, `doctor` | one module per subcommand |
//!
//! Exit codes: 0 success, 2 invalid input (message on standard error), 1 any other failure, including
//! out of memory.

#![deny(unsafe_code)]

mod args;
mod bench;
mod choice;
mod compile;
mod doctor;
mod element;
mod inspect;
mod machine;
#[allow(unsafe_code, reason = "an allocator can't be written without")]
mod memory;
mod number;
mod plan;
mod plot;
mod progress;
mod random;
mod ring;
mod select;
mod table;
#[allow(unsafe_code, reason = "the size of a terminal needs a system call")]
mod tty;
mod verify;

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

#[global_allocator]
static ALLOCATOR: memory::Reporting = memory::Reporting;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Inspect(args) => inspect::run(&args),
        Command::Select(args) => select::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Ring(args) => ring::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Plan(args) => plan::run(&args),
    };
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) {
        // The reader has closed the pipe.
        return ExitCode::SUCCESS;
    }
    if error.is::<ring::Reported>() {
        return ExitCode::from(1);
    }
    // An error of standard error can't be reported.
    let _ = writeln!(io::stderr(), "error: {error:#}");
    let input_is_at_fault = error.is::<longspan_pattern::Error>()
        || error.is::<longspan::Error>()
        || error.is::<longspan_ring::Error>()
        || error.is::<compile::BadInput>();
    ExitCode::from(if input_is_at_fault { 2 } else { 1 })
}
