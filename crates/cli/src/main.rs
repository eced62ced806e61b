//! The `longspan` command: look at attention patterns, time them, check this machine.
//!
//! | module | what it has |
//! |---|---|
//! | `args` | what can be typed |
//! | `compile` | from a pattern's text to its layouts |
//! | `inspect`, `report`, `terminal`, `plot` | a pattern in numbers, and in pictures of characters or pixels |
//! | `bench`, `random` | time, share of what the machine can do, memory; numbers to compute with |
//! | `ring` | one sequence over many ranks: threads, or processes of MPI |
//! | `verify` | every kernel against the oracle |
//! | `plan` | what a ring of many ranks would take |
//! | `doctor`, `machine`, `choice` | what there is, what would be used, and why |
//! | `element` | from the name of an element type to the type |
//! | `memory` | what happens when memory runs out |
//! | `number`, `table` | what people read |
//! | `progress` | something to look at while work takes long |
//!
//! Exit codes: 0 done, 2 the input is at fault (its message on standard error), 1 anything else, running out
//! of memory included.

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
mod report;
mod ring;
mod table;
mod terminal;
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
        // Whoever read has seen enough.
        return ExitCode::SUCCESS;
    }
    if error.is::<ring::Told>() {
        return ExitCode::from(1);
    }
    // Nobody is left to tell if this fails too.
    let _ = writeln!(io::stderr(), "error: {error:#}");
    let input_is_at_fault = error.is::<longspan_pattern::Error>()
        || error.is::<longspan::Error>()
        || error.is::<longspan_ring::Error>()
        || error.is::<compile::BadInput>();
    ExitCode::from(if input_is_at_fault { 2 } else { 1 })
}
