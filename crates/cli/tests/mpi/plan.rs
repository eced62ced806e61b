//! Plans of rings on a link of 1 Gbit/s, by micro-benchmarks of the kernels alone: each rank is a
//! process on a host of its own, which is a network namespace.

use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::common::{finish, run_with, scratch};

const NAMESPACES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/ring/namespaces");

fn number(object: &Value, name: &str) -> f64 {
    object[name].as_f64().unwrap_or_else(|| panic!("{name} is {}", object[name]))
}

/// Milliseconds of both passes, the fastest of several.
fn around(pattern: &str, tokens: &str, ranks: &str, heads: &str) -> f64 {
    let mut command = Command::new(NAMESPACES);
    command.args([ranks, "1gbit", env!("CARGO_BIN_EXE_longspan"), "ring", pattern]);
    command.args(["--tokens", tokens, "--heads", heads, "--shards", "balanced", "--threads", "1"]);
    command.args(["--repeat", "7", "--json"]).stdin(Stdio::null());
    let run = finish(&mut command);
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let object: Value = serde_json::from_str(&run.stdout).expect("one JSON object, of rank 0");
    number(&object, "ms")
}

fn comes_true(pattern: &str, tokens: u64, heads: usize) {
    // One at a time: each needs the whole machine.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = scratch(&format!("predicting-link-{tokens}"));
    let environment = [("XDG_CACHE_HOME", cache.to_str().unwrap())];
    let (tokens, heads) = (tokens.to_string(), heads.to_string());
    let mut wrong = Vec::new();
    for ranks in ["2", "3", "4"] {
        let args = ["plan", "--calibrate", "--threads", "1", "--per-node", ranks];
        run_with(&environment, &args).printed();
        let args = ["plan", pattern, "--tokens", &tokens, "--ranks", ranks, "--heads", &heads];
        // What headers of Ethernet and TCP leave of 1 Gbit/s: 1,448 of 1,538 bytes.
        let link = ["--per-node", "1", "--gbits", "0.94", "--latency-us", "50", "--json"];
        let predicted = number(&run_with(&environment, &[&args[..], &link].concat()).json(), "ms");
        let took = around(pattern, &tokens, ranks, &heads);
        let share = predicted / took;
        let line = format!(
            "{pattern}, {ranks} ranks: {predicted:.1} ms predicted, {took:.1} ms taken, {share:.2}"
        );
        eprintln!("{line}");
        if !(0.8..=1.2).contains(&share) {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
#[ignore = "measures time: run it as root on a quiet machine, with --release and --test-threads 1"]
fn plans_come_true_causal() {
    comes_true("causal", 16 << 10, 2);
}

#[test]
#[ignore = "measures time: run it as root on a quiet machine, with --release and --test-threads 1"]
fn plans_come_true_window() {
    comes_true("causal & (window(1000, 0) | sinks(64))", 64 << 10, 4);
}

#[test]
#[ignore = "measures time: run it as root on a quiet machine, with --release and --test-threads 1"]
fn plans_come_true_strided() {
    comes_true("window(500, 500) | strided(64)", 8 << 10, 4);
}
