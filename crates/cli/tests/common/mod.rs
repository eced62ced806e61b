//! The `longspan` command, run as a user runs it: shared by all tests.

// Each test crate uses a part of it.
#![allow(dead_code)]

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// `longspan` with these arguments, and its output as text.
pub(crate) fn run(args: &[&str]) -> Run {
    finish(&mut command(args))
}

/// The same with environment variables.
pub(crate) fn run_with(variables: &[(&str, &str)], args: &[&str]) -> Run {
    finish(command(args).envs(variables.iter().copied()))
}

/// Any command, and its output as text.
pub(crate) fn finish(command: &mut Command) -> Run {
    let Output { status, stdout, stderr } = command.output().expect("the command starts");
    let text = |bytes| String::from_utf8(bytes).expect("output is text");
    Run { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longspan"));
    command.args(args).stdin(Stdio::null());
    for variable in ["NO_COLOR", "COLUMNS", "TERM", "LONGSPAN_ISA", "LONGSPAN_THREADS"] {
        command.env_remove(variable);
    }
    command
}

pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// Its standard output, after success without standard error.
    pub(crate) fn printed(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        assert_eq!(self.stderr, "");
        self.stdout
    }

    /// The one JSON object that it printed.
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.printed()).expect("one JSON object")
    }

    /// The JSON objects that it printed, one per line.
    pub(crate) fn json_lines(self) -> Vec<Value> {
        let text = self.printed();
        text.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
    }

    /// Checks that it refused the input with a message that has all of `parts`, and printed
    /// nothing.
    pub(crate) fn refused(self, parts: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (Some(2), ""), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "no {part:?} in {}", self.stderr);
        }
    }
}

/// A file for one test to write.
pub(crate) fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}
