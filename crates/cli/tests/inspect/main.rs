//! `longspan inspect`, and behavior of all subcommands.

#[path = "../common/mod.rs"]
mod common;
mod numbers;
mod pictures;

use std::process::Stdio;

use common::{Run, command, run, scratch};

/// `longspan inspect` with these arguments, and its output as text.
fn inspect(args: &[&str]) -> Run {
    run(&[&["inspect"], args].concat())
}

#[test]
fn version_and_help() {
    assert_eq!(run(&["--version"]).printed(), format!("longspan {}\n", env!("CARGO_PKG_VERSION")));
    let help = run(&["inspect", "--help"]).printed();
    for option in
        ["--tokens", "--queries", "--png", "--heads", "--key-padding", "sinks(n)", "@documents.txt"]
    {
        assert!(help.contains(option), "{option} is not explained");
    }
}

#[test]
fn bad_input_is_explained() {
    let caret = "\
error: expected a pattern, found `windw`; did you mean `window`?
  causal & windw(256, 0)
           ^^^^^
";
    let run = inspect(&["causal & windw(256, 0)", "--tokens", "8192"]);
    assert_eq!((run.code, run.stdout.as_str(), run.stderr.as_str()), (Some(2), "", caret));

    let missing = scratch("missing.txt");
    let missing = format!("@{}", missing.display());
    let cases: &[(&[&str], &str)] = &[
        (&["causal", "--tokens", "64", "--block", "8"], "block size is 8, expected 16 to 256"),
        (&["causal", "--tokens", "1.5M"], "invalid value '1.5M' for '--tokens <N>'"),
        (&["causal"], "--tokens <N>"),
        (&["causal", "--tokens", "64", "--rows", "3"], "expected a range such as 0..16"),
        (
            &["causal", "--tokens", "1k", "--rows", "3..99"],
            "rows are 3..99, expected a range inside 0..16",
        ),
        (
            &["causal", "--tokens", "1k", "--key-padding", "9..2k"],
            "the keys of key_padding are 9..2048, expected a range inside 0..1024",
        ),
        (&["documents([5, 6])", "--tokens", "12"], "lengths add up to 11, expected 12"),
        (
            &["heads([causal, full])", "--tokens", "64", "--heads", "3"],
            "2 patterns for 3 query heads",
        ),
        (&["causal", "--tokens", "64", "--heads"], "--heads has no number"),
        (&["causal", "--tokens", "64", "--head", "1"], "--head is 1, expected less than 1"),
        (&["causal", "--tokens", "0", "--png", "unwritten.png"], "nothing to draw: 0 rows"),
        (&[&missing, "--tokens", "64"], "can't read the pattern from"),
    ];
    for (args, message) in cases {
        let run = inspect(args);
        assert_eq!((run.code, run.stdout.as_str()), (Some(2), ""), "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(message), "{args:?}: {}", run.stderr);
    }
}

#[test]
fn other_failures_have_another_exit_code() {
    let nowhere = scratch("no such directory").join("picture.png");
    let run = inspect(&["causal", "--tokens", "64", "--png", &nowhere.to_string_lossy()]);
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""));
    assert!(run.stderr.contains("can't write"), "{}", run.stderr);
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    // Three thousand heads print more than a pipe holds, so writing fails once the pipe is
    // closed.
    let mut child = command(&["inspect", "causal", "--tokens", "64", "--heads", "3000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the command ends");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}
