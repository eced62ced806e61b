//! Out of memory is an error with a remedy, in every subcommand that allocates much.

use std::process::{Command, Stdio};

use crate::common::{Run, finish};

/// The command with a limit of the address space in KiB.
fn limited(kib: u64, args: &[&str]) -> Run {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -v {kib}; exec \"$@\""), "sh"]);
    command.arg(env!("CARGO_BIN_EXE_longspan")).args(args);
    // One thread: each takes address space of its own.
    command.env("LONGSPAN_THREADS", "1").env_remove("LONGSPAN_ISA").stdin(Stdio::null());
    finish(&mut command)
}

fn runs_out(kib: u64, args: &[&str]) {
    let run = limited(kib, args);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{args:?}: {}", run.stderr);
    let lines: Vec<&str> = run.stderr.lines().collect();
    let [line] = lines[..] else { panic!("{args:?}: {}", run.stderr) };
    let bytes = line.strip_prefix("error: out of memory: an allocation of ");
    let bytes =
        bytes.and_then(|rest| rest.split_once(" bytes failed: lower --tokens")).expect(line);
    assert!(bytes.0.parse::<u64>().is_ok_and(|bytes| bytes > 0), "{line}");
}

/// Four tensors of 128 MiB.
#[test]
fn bench() {
    let args = ["bench", "window(1, 1)", "--tokens", "32k", "--heads", "16", "--pass", "forward"];
    runs_out(256 << 10, &args);
}

/// Eight blocks in each of a million rows, none of them beside another: 12 bytes each.
#[test]
fn inspect() {
    let args = ["inspect", "random(16, 8, 1048576, 7)", "--tokens", "16m", "--block", "16"];
    runs_out(80 << 10, &args);
}

/// Tensors of 2 GiB for each of two ranks.
#[test]
fn ring() {
    let args = ["ring", "--ranks", "2", "causal", "--tokens", "1m", "--heads", "16"];
    runs_out(1 << 20, &args);
}

/// With enough memory there is no error.
#[test]
fn enough() {
    let run = limited(4 << 20, &["bench", "full", "--tokens", "64", "--heads", "1"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
}
