//! Ranks as threads: comparison with one process, bytes, validation of arguments. MPI processes are
//! in `tests/mpi`.

use serde_json::{Value, json};

use crate::common::{Run, run, run_with};

fn ring(args: &str, pattern: &str) -> Run {
    let args: Vec<_> = args.split_whitespace().collect();
    run(&[&["ring", pattern], &args[..]].concat())
}

fn number(object: &Value, name: &str) -> f64 {
    object[name].as_f64().unwrap_or_else(|| panic!("{name} is {}", object[name]))
}

#[test]
fn results_agree_with_one_process() {
    let cases = [
        ("causal & window(90, 0)", "--ranks 3 --tokens 700 --heads 4 --kv-heads 2 --head-dim 16"),
        ("causal", "--ranks 4 --tokens 501 --shards zigzag --heads 1 --head-dim 24 --dtype f16"),
        ("window(9, 9) | global_tokens(3)", "--ranks 5 --tokens 900 --shards striped --heads 2"),
        ("heads([causal, strided(7)])", "--ranks 2 --tokens 300 --dtype bf16 --repeat 2"),
        ("full", "--ranks 1 --tokens 90 --heads 1"),
        ("causal", "--ranks 3 --tokens 487 --branches 64:1,128:2,256:4 --heads 4 --kv-heads 2"),
        (
            "full",
            "--ranks 4 --tokens 401 --branches 50:3,70:4 --also window(9,9) --overlap union --heads 3",
        ),
        // Fewer tokens than ranks.
        ("causal", "--ranks 7 --tokens 5 --heads 1 --head-dim 8"),
    ];
    for (pattern, args) in cases {
        let object = ring(&format!("{args} --threads 1 --check --json"), pattern).json();
        assert!(number(&object, "error_of_limit") <= 1.0, "{pattern}: {object}");
        assert_eq!(object["bytes_received"], object["bytes_needed"], "{pattern}");
        assert!(number(&object, "imbalance") >= 1.0 && number(&object, "ms") > 0.0, "{object}");
        let hidden = &object["hidden_share"];
        assert!(hidden.is_null() || (0.0..=1.0).contains(&hidden.as_f64().unwrap()), "{object}");
    }
}

#[test]
fn numbers_of_window() {
    let args = "--ranks 4 --tokens 1200 --heads 2 --kv-heads 1 --head-dim 16 --threads 1 --json";
    let object = ring(args, "causal & window(100, 0)").json();
    let expected = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pattern": "causal & window(100, 0)",
        "tokens": 1200,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "dtype": "f32",
        "threads": 1,
        "carrier": "threads",
        "shards": "contiguous",
        "ranks": 4,
        // Three ranks: 100 keys and values in both passes, and their gradients back.
        "bytes_received": 3 * 3 * 100 * 2 * 16 * 4,
        "bytes_needed": 3 * 3 * 100 * 2 * 16 * 4,
        "max_error": null,
        "bits_equal": null,
        "error_of_limit": null,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&object[name], value, "{name}");
    }
    // The first rank has 100 · 101 / 2 pairs less than the others.
    let (full, less) = (300.0 * 101.0, 100.0 * 101.0 / 2.0);
    let imbalance = full / (full - less / 4.0);
    assert!((number(&object, "imbalance") - imbalance).abs() < 1e-9, "{object}");
}

/// In the reproducible order the bits equal those of one rank.
#[test]
fn reproducible_bits() {
    let args = "--ranks 3 --tokens 500 --heads 2 --head-dim 16 --threads 1 --shards zigzag";
    let object = ring(&format!("{args} --fold reproducible --check --json"), "causal").json();
    assert_eq!((&object["bits_equal"], &object["fold"]), (&true.into(), &"reproducible".into()));
}

/// Half of the bytes of f32 keys as bf16; gradients are exact.
#[test]
fn wire_formats() {
    let bytes = |wire: &str| {
        let args = "--ranks 2 --tokens 400 --heads 2 --head-dim 16 --threads 1 --json";
        let object = ring(&format!("{args} --wire {wire}"), "causal").json();
        // The length of keys within an error depends on their values.
        let (received, needed) =
            (number(&object, "bytes_received"), number(&object, "bytes_needed"));
        assert!(received <= needed, "{wire}: {received} of {needed}");
        received
    };
    let (exact, bf16) = (bytes("exact"), bytes("bf16"));
    // Keys travel in both passes, gradients of as many bytes in one.
    assert_eq!(bf16 * 3.0, exact * 2.0);
    assert!(bytes("int8") < bf16 && bytes("10") < bf16);
}

/// One process is a ring of one: the same bits.
#[test]
fn one_rank_has_the_bits_of_one_process() {
    let args = "--ranks 1 --tokens 300 --heads 2 --head-dim 16 --threads 1 --check --json";
    let object = ring(args, "causal").json();
    assert_eq!(object["bits_equal"], true, "{object}");
    assert_eq!(object["max_error"].as_f64().map(|error| error < 1e-5), Some(true), "{object}");
}

#[test]
fn text_report() {
    let args = "--ranks 3 --tokens 600 --heads 2 --head-dim 16 --threads 1 --shards zigzag --check";
    let text = ring(args, "causal").printed();
    for part in [
        "3 ranks, threads of one process",
        "zigzag",
        "bytes received",
        "ms forward",
        "imbalance",
        "check          right: ",
        "waited ms",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
}

#[test]
fn invalid_arguments_are_errors() {
    ring("--ranks 2 --tokens 100 --heads 4 --kv-heads 3", "causal").refused(&["multiple", "3"]);
    ring("--ranks 2 --tokens 9000 --check", "causal").refused(&["9000", "at most 8192"]);
    ring("--ranks 0 --tokens 100", "causal").refused(&["--ranks"]);
    ring("--ranks 2 --tokens 100 --timeout 0", "causal").refused(&["expected seconds"]);
    ring("--ranks 2 --tokens 100", "causl").refused(&["did you mean"]);
    ring("--ranks 2 --tokens 100 --heads 3", "heads([causal, full])").refused(&["3"]);
    ring("--ranks 2 --tokens 100 --branches 64", "causal").refused(&["such as 2048:1"]);
    ring("--ranks 2 --tokens 100 --branches 64:0", "causal").refused(&["rate"]);
    ring("--ranks 2 --tokens 100 --also full", "causal").refused(&["--branches"]);
    let per_head = "heads([causal, full])";
    ring("--ranks 2 --tokens 100 --branches 64:1", per_head).refused(&["expected one for all"]);
    ring("--ranks 2 --tokens 100 --wire int9", "causal").refused(&["exact, bf16, int8"]);
    ring("--ranks 2 --tokens 100 --wire int8 --check", "causal").refused(&["--wire exact"]);
    let under_mpirun = [("OMPI_COMM_WORLD_SIZE", "4")];
    let args = ["ring", "--ranks", "2", "causal", "--tokens", "100"];
    run_with(&under_mpirun, &args).refused(&["a launcher has started 4 processes"]);
}

/// Every rank reports its error, with its rank.
#[test]
fn errors_of_all_ranks() {
    let run = ring("--ranks 3 --tokens 100", "documents([50, 51])");
    assert_eq!((run.code, run.stdout.as_str()), (Some(1), ""), "{}", run.stderr);
    for rank in 0..3 {
        assert!(run.stderr.contains(&format!("error: rank {rank}: ")), "{}", run.stderr);
    }
}
