//! MPI processes agree with one process.

use serde_json::Value;

use crate::common::finish;
use crate::launch::{Launcher, mpirun};

fn check(ranks: usize, args: &[&str]) -> Value {
    let mut command = mpirun(Launcher::EndsAll);
    command.args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_longspan"), "ring"]);
    command.args(args).args(["--check", "--json", "--timeout", "30"]);
    let run = finish(&mut command);
    assert_eq!(run.code, Some(0), "{ranks} ranks, {args:?}: {}", run.stderr);
    let object: Value = serde_json::from_str(&run.stdout).expect("one JSON object, of rank 0");
    assert_eq!((&object["ranks"], &object["carrier"]), (&ranks.into(), &"mpi".into()));
    let of_limit = object["error_of_limit"].as_f64().unwrap();
    assert!(of_limit > 0.0 && of_limit <= 1.0, "{ranks} ranks, {args:?}: {object}");
    assert!(object["max_error"].as_f64().unwrap() < 1e-1, "{ranks} ranks, {args:?}: {object}");
    assert_eq!(object["bytes_received"], object["bytes_needed"], "{ranks} ranks, {args:?}");
    object
}

/// Every kind of transfer: neighbors, all ranks, broadcast trees for sinks, remote queries, gaps;
/// patterns per head, dtypes.
const CASES: [(&str, &str, &str); 8] = [
    ("causal & window(100, 0)", "contiguous", "--tokens 1031 --heads 2 --head-dim 16"),
    ("causal", "zigzag", "--tokens 1000 --heads 4 --kv-heads 2 --head-dim 24"),
    ("causal & (window(64, 0) | sinks(8))", "striped", "--tokens 777 --heads 2 --head-dim 16"),
    ("window(40, 40) | global_tokens(4)", "contiguous", "--tokens 1501 --heads 2 --head-dim 32"),
    ("causal & (window(128, 0) | sinks(4))", "balanced", "--tokens 1100 --heads 2 --head-dim 16"),
    ("dilated(256, 4, 1)", "striped", "--tokens 1024 --heads 1 --head-dim 8"),
    ("heads([causal, documents([300, 1, 400])])", "zigzag", "--tokens 701 --head-dim 16"),
    ("causal & window(200, 0)", "contiguous", "--tokens 900 --heads 2 --head-dim 32 --dtype bf16"),
];

/// Dilated branches: those of the paper, rates that don't divide segments, segments shorter and longer
/// than a shard, GQA, documents, a window besides, both overlap rules, dtypes.
const DILATED: [(&str, &str, &str); 10] = [
    ("full", "contiguous", "--branches 64:1,128:2,256:4 --tokens 512 --heads 4"),
    ("causal", "zigzag", "--branches 64:1,128:2,256:4 --tokens 487 --heads 4 --kv-heads 2"),
    ("causal", "striped", "--branches 64:1,128:2,256:4 --overlap union --tokens 487 --heads 4"),
    ("causal", "balanced", "--branches 50:3,70:4,31:1 --tokens 331 --heads 5"),
    (
        "full",
        "contiguous",
        "--branches 50:3,70:4,31:1 --overlap union --tokens 331 --heads 5 --kv-heads 1",
    ),
    ("full", "striped", "--branches 7:7,5:9 --tokens 61 --heads 4 --kv-heads 2"),
    (
        "causal & documents([100, 57, 3, 140])",
        "zigzag",
        "--branches 64:1,256:4 --tokens 300 --heads 4",
    ),
    (
        "causal",
        "contiguous",
        "--branches 128:4,512:16 --also window(30,0) --tokens 401 --heads 8 --kv-heads 2",
    ),
    (
        "causal",
        "balanced",
        "--branches 128:4,512:16 --also window(30,0) --overlap union --tokens 401 --dtype bf16",
    ),
    ("full", "zigzag", "--branches 1000:8 --tokens 300 --heads 8 --kv-heads 2 --dtype bf16"),
];

#[test]
fn dilated_branches() {
    for ranks in 1..=4 {
        for (pattern, shards, rest) in DILATED {
            let mut args = vec![pattern, "--shards", shards, "--head-dim", "16"];
            args.extend(rest.split_whitespace());
            check(ranks, &args);
        }
    }
}

#[test]
fn dilated_branches_have_the_same_bits_for_any_number_of_ranks() {
    for ranks in 1..=4 {
        let args = "--branches 64:1,128:2,256:4 --tokens 700 --heads 4 --fold reproducible";
        let mut all = vec!["causal"];
        all.extend(args.split_whitespace());
        assert_eq!(check(ranks, &all)["bits_equal"], true, "{ranks} ranks");
    }
}

fn cases(ranks: usize) {
    for (pattern, shards, rest) in CASES {
        let mut args = vec![pattern, "--shards", shards];
        args.extend(rest.split_whitespace());
        check(ranks, &args);
    }
}

#[test]
fn two_ranks() {
    cases(2);
}

#[test]
fn three_ranks() {
    cases(3);
}

#[test]
fn four_ranks() {
    cases(4);
}

/// A window that reaches one neighbor needs messages from that neighbor only.
#[test]
fn bytes_are_those_of_the_window() {
    let mut args = vec!["causal & window(100, 0)"];
    args.extend("--tokens 1200 --heads 2 --head-dim 16".split_whitespace());
    for ranks in [2, 3, 4] {
        let object = check(ranks, &args);
        // Each rank but the first: 100 keys and values in both passes, and their gradients back.
        let each = 100 * 2 * 16 * 2 * 4;
        let expected = (ranks as u64 - 1) * 3 * each;
        assert_eq!(object["bytes_received"], expected, "{ranks} ranks");
    }
}

/// In the reproducible order the forward pass has the same bits as one rank.
#[test]
fn same_bits_for_any_number_of_ranks() {
    let mut args = vec!["causal & (window(300, 0) | sinks(8))"];
    args.extend("--tokens 1001 --heads 2 --head-dim 32 --fold reproducible".split_whitespace());
    for (ranks, shards) in [(2, "zigzag"), (3, "contiguous"), (4, "striped")] {
        let args = [&args[..], &["--shards", shards]].concat();
        assert_eq!(check(ranks, &args)["bits_equal"], true, "{ranks} ranks, {shards}");
    }
}

/// One process that `mpirun` hasn't started is a rank too.
#[test]
fn alone() {
    let mut command = crate::common::command(&["ring", "causal", "--tokens", "300"]);
    command.args(["--heads", "1", "--check", "--json"]);
    let object = finish(&mut command).json();
    assert_eq!((&object["ranks"], &object["carrier"]), (&1.into(), &"mpi".into()));
    assert_eq!((&object["bytes_needed"], &object["hidden_share"]), (&0.into(), &Value::Null));
}

#[test]
fn threads_beside_processes_are_refused() {
    let mut command = mpirun(Launcher::EndsAll);
    command.args(["-n", "2", env!("CARGO_BIN_EXE_longspan"), "ring"]);
    command.args(["--ranks", "2", "causal", "--tokens", "100"]);
    let run = finish(&mut command);
    assert_ne!(run.code, Some(0));
    assert!(run.stderr.contains("a launcher has started 2 processes"), "{}", run.stderr);
}
