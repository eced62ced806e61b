//! `longspan bench`, `select`, `ring`, `plan`, `verify` and `doctor`, run as a user runs them.

mod bench;
#[path = "../common/mod.rs"]
mod common;
mod doctor;
mod interrupt;
mod memory;
mod plan;
mod ring;
mod select;
mod verify;

use common::run;

#[test]
fn help_explains() {
    let cases: [(&str, &[&str]); 7] = [
        ("--help", &["inspect", "select", "bench", "ring", "plan", "verify", "doctor"]),
        (
            "bench",
            &["--tokens", "--kv-heads", "--pass", "LONGSPAN_THREADS", "bthd", "FMA peak", "bf16"],
        ),
        ("ring", &["--ranks", "--shards", "--timeout", "mpirun -n 4", "imbalance", "hidden"]),
        (
            "verify",
            &["--quick", "--isa", "--dtype", "--verbose", "at most 12,", "the exit code is 1"],
        ),
        ("doctor", &["--json"]),
        ("select", &["safetensors", "--mass", "--always", "--per-key-head", "kept", "--png"]),
        ("plan", &["--calibrate", "--machine", "h100", "--plot", "--shards", "published figures"]),
    ];
    for (command, words) in cases {
        let args: &[&str] = if command == "--help" { &["--help"] } else { &[command, "--help"] };
        let help = run(args).printed();
        for word in words {
            // Help is wrapped.
            let text = help.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(text.contains(word), "{word} is not explained by {command}");
        }
    }
}

/// Options that several subcommands have are spelled alike and have the same defaults; the former
/// spellings are refused.
#[test]
fn shared_options_are_spelled_alike() {
    let help = |command: &str| {
        let text = run(&[command, "--help"]).printed();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let tensors = [
        "--kv-heads <N> Heads of keys and values",
        "--head-dim <N> Elements per head and token [default: 64]",
        "--dtype <TYPE> Element type of the tensors: f32, bf16 or f16 [default: f32]",
        "--heads <N> Query heads [default: 8, or as many",
    ];
    let head_dim = &tensors[1..2];
    let block = [concat!(
        "--block <N> Tokens per block, 16 to 256 ",
        "[default: 64, more for strides above it in long sequences]"
    )];
    let cases: [(&str, &[&[&str]]); 4] = [
        ("inspect", &[head_dim, &block]),
        ("bench", &[&tensors, &block]),
        ("ring", &[&tensors]),
        ("plan", &[&tensors]),
    ];
    for (command, options) in cases {
        let text = help(command);
        assert!(text.contains("--tokens <N> Tokens of the sequence: 8192"), "{command}: {text}");
        assert!(text.contains("PATTERN] The pattern") || text.contains("<PATTERN> The pattern"));
        for option in options.iter().copied().flatten() {
            assert!(text.contains(option), "{command} has no {option:?}: {text}");
        }
    }
    for former in ["--pattern=causal", "--key-heads=2", "--dim=16", "--patience=3", "-pcausal"] {
        run(&["ring", "causal", "--ranks", "2", "--tokens", "64", former])
            .refused(&["unexpected argument"]);
    }
}
