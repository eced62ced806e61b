//! The `longspan` command: look at attention patterns.
//!
//! | module | what it has |
//! |---|---|
//! | `args` | what can be typed |
//! | `inspect` | from a pattern's text to its layouts |
//! | `report`, `number` | what is printed, for people and for programs |
//! | `terminal` | a small picture made of characters |
//! | `plot` | a good picture, as PNG or SVG |
//! | `progress` | something to look at while work takes long |
//!
//! Exit codes: 0 done, 2 the input is at fault (its message on standard error), 1 anything else.

#![forbid(unsafe_code)]

mod args;
mod inspect;
mod number;
mod plot;
mod progress;
mod report;
mod terminal;

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Inspect(args) => inspect::run(&args),
    };
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) {
        // Whoever read has seen enough.
        return ExitCode::SUCCESS;
    }
    // Nobody is left to tell if this fails too.
    let _ = writeln!(io::stderr(), "error: {error:#}");
    let input_is_at_fault =
        error.is::<longspan_pattern::Error>() || error.is::<inspect::BadInput>();
    ExitCode::from(if input_is_at_fault { 2 } else { 1 })
}
