//! `longspan bench`, `ring`, `plan`, `verify` and `doctor`, run as a user runs them.

mod bench;
#[path = "../common/mod.rs"]
mod common;
mod doctor;
mod interrupt;
mod memory;
mod plan;
mod ring;
mod verify;

use common::run;

#[test]
fn help_explains() {
    let cases: [(&str, &[&str]); 6] = [
        ("--help", &["inspect", "bench", "ring", "plan", "verify", "doctor"]),
        (
            "bench",
            &["--tokens", "--kv-heads", "--pass", "LONGSPAN_THREADS", "bthd", "FMA peak", "bf16"],
        ),
        ("ring", &["--ranks", "--shards", "--patience", "mpirun -n 4", "imbalance", "hidden"]),
        ("verify", &["--quick", "--isa", "--dtype", "at most 12,", "the exit code is 1"]),
        ("doctor", &["--json"]),
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
