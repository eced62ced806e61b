//! Plans compared with real rings, and validation of arguments.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use longspan::{Dims, Gradients, Heads, Inputs, Order, Output, Tensor, Threads};
use longspan_ring::{Local, Options, Problem, Ring, Shards};
use serde_json::Value;

use crate::common::{Run, run, run_with, scratch};

fn plan(args: &str) -> Run {
    run(&[&["plan"], &words(args)[..]].concat())
}

/// Words, with `'` around those that have spaces.
fn words(text: &str) -> Vec<&str> {
    let parts = text.split('\'').enumerate();
    parts
        .flat_map(
            |(n, part)| if n % 2 == 1 { vec![part] } else { part.split_whitespace().collect() },
        )
        .collect()
}

fn number(object: &Value, name: &str) -> f64 {
    object[name].as_f64().unwrap_or_else(|| panic!("{name} is {}", object[name]))
}

/// Whether two values are the same but for the last digits of numbers, which reading may change.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            (a - b).abs() <= 1e-12 * a.abs()
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| same(a, b)))
        }
        _ => a == b,
    }
}

/// Bytes that each rank of a ring of threads needs, forward and backward.
fn needed(problem: &Problem) -> Vec<(u64, u64)> {
    std::thread::scope(|scope| {
        let ranks = Local::ranks(problem.shards().ranks()).into_iter().map(|transport| {
            let options = Options { threads: Threads::Auto, ..Options::default() };
            scope.spawn(|| Ring::new(transport, problem.clone(), options).unwrap().bytes_needed())
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The longest sequence that fits: it does, and one that is two percent longer doesn't.
#[test]
fn the_longest_sequence_of_a_memory() {
    for rest in ["causal --ranks 4", "causal --ranks 3 --branches 1k:1,4k:4 --heads 4"] {
        let rest = format!("{rest} --machine h100 --json");
        let object = plan(&format!("{rest} --memory 64M")).json();
        let (tokens, memory) = (number(&object, "tokens"), number(&object, "memory_bytes"));
        assert!(tokens > 1_000.0 && memory <= f64::from(64 << 20), "{rest}: {object}");
        let longer = (tokens * 1.02) as usize;
        let object = plan(&format!("{rest} --tokens {longer}")).json();
        assert!(number(&object, "memory_bytes") > f64::from(64 << 20), "{rest}: {object}");
    }
    plan("causal --ranks 4 --memory 9 --machine h100").refused(&["no sequence fits"]);
    plan("causal --ranks 4 --memory 1G --tokens 9 --machine h100").refused(&["--tokens"]);
}

#[test]
fn bytes_are_those_of_ring() {
    for pattern in
        ["causal", "causal & (window(100, 0) | sinks(5))", "window(64, 64) | global_tokens(4)"]
    {
        for map in ["balanced", "contiguous", "zigzag", "striped"] {
            let args = format!(
                "'{pattern}' --tokens 3000 --ranks 6 --heads 4 --kv-heads 2 --head-dim 16 --value-dim 8 \
                 --dtype bf16 --batch 2 --grain 32 --shards {map} --machine h100 --json"
            );
            let object = plan(&args).json();
            let heads: Heads = pattern.parse().unwrap();
            let shards = match map {
                "balanced" => Shards::balanced(heads.clone(), 3_000, 6, 32),
                "contiguous" => Shards::contiguous(3_000, 6, 32),
                "zigzag" => Shards::zigzag(3_000, 6, 32),
                _ => Shards::striped(3_000, 6, 32),
            };
            let problem = Problem::new(heads, shards.unwrap()).batch(2).heads(4, 2).dims(16, 8);
            let needed = needed(&problem.element(longspan::ElementType::Bf16));
            let (forward, backward): (Vec<u64>, Vec<u64>) = needed.into_iter().unzip();
            for (pass, bytes) in
                object["passes"].as_array().unwrap().iter().zip([forward, backward])
            {
                let (most, sum) = (bytes.iter().max().unwrap(), bytes.iter().sum::<u64>());
                assert_eq!(pass["bytes_received_most"], *most, "{pattern}, {map}");
                let mean = sum as f64 / 6.0;
                assert!(
                    (number(pass, "bytes_received") - mean).abs() <= 1e-9 * mean,
                    "{pattern}, {map}"
                );
            }
            assert_eq!(
                (object["simulated"].as_u64(), object["ranks"].as_u64()),
                (Some(6), Some(6))
            );
        }
    }
}

#[test]
fn numbers_add_up() {
    let object =
        plan("causal --tokens 64k --ranks 16 --heads 4 --machine a100 --network 100 --json").json();
    let passes = object["passes"].as_array().unwrap();
    assert_eq!(passes.len(), 2);
    let mut sum = 0.0;
    for pass in passes {
        let part = |name: &str| number(pass, name);
        let ms = part("ms");
        sum += ms;
        let parts = part("computing_ms") + part("waiting_ms") + part("handling_ms");
        assert!((ms - parts).abs() < 1e-9 * ms, "{pass}");
        assert!((0.0..=1.0).contains(&part("hidden_share")), "{pass}");
        assert!(part("hops") >= 15.0);
    }
    assert!((number(&object, "ms") - sum).abs() < 1e-9 * sum);
    assert!(number(&object, "imbalance") <= 1.05);
    let contiguous =
        plan("causal --tokens 64k --ranks 16 --machine a100 --shards contiguous --json").json();
    let imbalance = number(&contiguous, "imbalance");
    assert!((1.9..2.0).contains(&imbalance), "{imbalance}");
    assert_eq!(contiguous["limit"], "imbalance");
    assert!(contiguous["advice"][0].as_str().unwrap().contains("--shards balanced"));
}

#[test]
fn a_slower_link_hides_less() {
    let at = |gbits: &str| {
        let args = format!(
            "causal --tokens 1M --ranks 8 --machine h100 --per-node 1 --dtype bf16 --gbits {gbits} --json"
        );
        plan(&args).json()
    };
    let (slow, fast) = (at("1"), at("1000"));
    let hidden = |object: &Value| number(&object["passes"][0], "hidden_share");
    assert!(hidden(&slow) < 0.5 && hidden(&fast) > 0.9, "{slow}\n{fast}");
    assert!(number(&slow, "ms") > number(&fast, "ms"));
    assert_eq!(slow["limit"], "communication");
    assert_eq!(slow["passes"][0]["bytes_received_most"], fast["passes"][0]["bytes_received_most"]);
}

/// Own keys that are kept for later hops don't make ranks wait for each other, sinks that go by a
/// tree or not. They wait for at most 0.061 of a pass; when they did wait for each other, the pass with
/// sinks on 8 ranks took 1.4 times as long.
#[test]
fn ranks_stay_in_step() {
    for pattern in ["causal & (window(4096, 0) | sinks(64))", "causal & window(4096, 0)"] {
        for ranks in [8, 16] {
            let args = format!("'{pattern}' --tokens 1M --ranks {ranks} --machine h100 --json");
            for pass in plan(&args).json()["passes"].as_array().unwrap() {
                let share = number(pass, "waiting_ms") / number(pass, "ms");
                assert!(share < 0.1, "{pattern}, {ranks} ranks: {share} of {pass}");
            }
        }
    }
}

#[test]
fn thousands_of_ranks_are_sampled() {
    let args = "'causal & (window(4096, 0) | sinks(64))' --tokens 1G --ranks 4096 --machine h100 --dtype bf16";
    let object = plan(&format!("{args} --json")).json();
    assert_eq!((object["simulated"].as_u64(), object["ranks"].as_u64()), (Some(8), Some(4_096)));
    // A window of one neighbor and 64 sinks, bf16 keys and values of 8 heads.
    let bytes = object["passes"][0]["bytes_received_most"].as_u64().unwrap();
    assert_eq!(bytes, (4_096 + 64) * 8 * (64 + 64) * 2);
    let text = plan(args).printed();
    assert!(text.contains("8 of 4,096 ranks"), "{text}");
}

#[test]
fn exceeded_memory_is_reported() {
    let object =
        plan("'causal & window(100, 0)' --tokens 64M --ranks 8 --heads 64 --machine h100 --json")
            .json();
    assert_eq!(object["limit"], "memory");
    assert!(object["advice"][0].as_str().unwrap().contains("ranks, or bf16"), "{object}");
    assert!(number(&object, "memory_bytes") > 80e9);
}

#[test]
fn timeline_picture() {
    let svg = scratch("timeline.svg");
    let args = format!("causal --tokens 64k --ranks 12 --machine a100 --plot {}", svg.display());
    let text = plan(&args).printed();
    assert!(text.contains("timeline.svg"), "{text}");
    let text = std::fs::read_to_string(&svg).unwrap();
    let document = roxmltree::Document::parse(&text).unwrap();
    let has = |word: &str| {
        document.descendants().any(|node| node.text().is_some_and(|text| text.contains(word)))
    };
    for word in ["causal", "forward", "backward", "rank 0", "rank 11", "computing", "messages"] {
        assert!(has(word), "no {word:?}");
    }
    let bars = document.descendants().filter(|node| node.has_tag_name("rect")).count();
    assert!(bars > 8 * 2 * 2, "{bars}");
    let png = scratch("timeline.png");
    plan(&format!("causal --tokens 4k --ranks 2 --machine a100 --plot {}", png.display()))
        .printed();
    assert_eq!(std::fs::read(&png).unwrap()[..8], *b"\x89PNG\r\n\x1a\n");
}

/// Measured by micro-benchmarks, saved to a file, and read from there.
#[test]
fn this_machine_is_measured_and_saved() {
    let cache = scratch("calibrated");
    let environment = [("XDG_CACHE_HOME", cache.to_str().unwrap())];
    let args = ["plan", "--calibrate", "--threads", "1", "--head-dim", "16", "--json"];
    let machine = run_with(&environment, &args).json();
    assert_eq!(machine["name"], "this");
    assert_eq!(machine["kernels"].as_array().unwrap().len(), 3);
    let kept: Value = serde_json::from_str(
        &std::fs::read_to_string(cache.join("longspan/machine.json")).unwrap(),
    )
    .unwrap();
    assert!(same(&kept, &machine), "{kept}\n{machine}");
    let args = ["plan", "causal", "--tokens", "4k", "--ranks", "2", "--head-dim", "16", "--json"];
    let object = run_with(&environment, &args).json();
    assert!(same(&object["machine"], &machine), "{object}");
    assert!(number(&object, "ms") > 0.0);
    // The same from a file, and with another link.
    let file = cache.join("longspan/machine.json");
    let more = ["--machine", file.to_str().unwrap(), "--gbits", "1", "--latency-us", "50"];
    let slower = run(&[&args[..], &more].concat()).json();
    assert_eq!(slower["machine"]["far"]["bytes_per_second"], 125e6);
    assert!(number(&slower, "ms") >= number(&object, "ms"));
}

#[test]
fn invalid_arguments_are_errors() {
    let empty = scratch("not-calibrated");
    let environment = [("XDG_CACHE_HOME", empty.to_str().unwrap())];
    run_with(&environment, &["plan", "causal", "--tokens", "4k", "--ranks", "2"])
        .refused(&["hasn't been measured", "longspan plan --calibrate"]);
    let cases = [
        ("causal --tokens 4k --ranks 2 --machine v100", &["v100", "a100, h100, b200"][..]),
        (
            "causal --tokens 4k --ranks 2 --machine a100 --heads 6 --kv-heads 4",
            &["6 query heads on 4"],
        ),
        ("causal --tokens 4k --ranks 2 --machine a100 --plot x.gif", &[".svg or .png"]),
        ("causal --tokens 4k --ranks 2 --machine a100 --grain 0", &["the grain is 0"]),
        ("causal --tokens 4k --ranks 0 --machine a100", &["at least 1"]),
        ("causal --tokens 4k --ranks 2 --machine a100 --gbits 0", &["above 0"]),
        ("'documents([5])' --tokens 6 --ranks 2 --machine a100", &["add up", "5"]),
        ("causal --tokens 4k --machine a100", &["--ranks"]),
        ("causal --calibrate", &["cannot be used with"]),
        ("causal --tokens 4k --ranks 2 --machine a100 --threads 3", &["add --calibrate"]),
        ("causal --tokens 4k --ranks 2 --machine a100 --out x.json", &["add --calibrate"]),
        ("--calibrate --branches 64:1", &["remove --branches"]),
        ("--calibrate --wire int8", &["--wire"]),
    ];
    for (args, parts) in cases {
        plan(args).refused(parts);
    }
    let file = scratch("machine-with-a-hole.json");
    std::fs::write(&file, "{\"name\": \"x\"}").unwrap();
    let path = file.display().to_string();
    plan(&format!("causal --tokens 4k --ranks 2 --machine {path}"))
        .refused(&[&path, "missing field"]);
}

/// Milliseconds of both passes around a ring of threads, the fastest of several.
fn around(pattern: &str, tokens: usize, ranks: usize, heads: usize) -> f64 {
    let heads_of: Heads = pattern.parse().unwrap();
    let shards = Shards::balanced(heads_of.clone(), tokens, ranks, 64).unwrap();
    let problem = Problem::new(heads_of, shards.clone()).heads(heads, heads);
    std::thread::scope(|scope| {
        let ranks = Local::ranks(ranks).into_iter().enumerate().map(|(rank, transport)| {
            let (problem, held) = (problem.clone(), shards.rank(rank).len());
            scope.spawn(move || {
                let threads = Threads::Count(1);
                let options = Options { threads, ..Options::default() };
                let mut ring = Ring::new(transport, problem, options).unwrap();
                let dims = Dims { batch: 1, tokens: held, heads, dim: 64 };
                let numbers =
                    (0..held * heads * 64).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 504.0);
                let x = Tensor::new(numbers.collect(), dims, Order::Bhsd).unwrap();
                let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
                let mut output = Output::zeros(dims, Order::Bhsd).unwrap();
                let mut gradients = Gradients::zeros(&inputs).unwrap();
                let mut pass = || {
                    let start = Instant::now();
                    ring.forward_into(inputs, output.as_mut()).unwrap();
                    let (saved, gradient) = (&output, x.view());
                    ring.backward_into(inputs, saved, gradient, gradients.as_mut()).unwrap();
                    start.elapsed().as_secs_f64() * 1e3
                };
                (0..7).map(|_| pass()).fold(f64::INFINITY, f64::min)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).fold(0.0, f64::max)
    })
}

/// Micro-benchmarks alone predict what a ring of threads takes.
fn comes_true(pattern: &str, tokens: usize, heads: usize) {
    // One at a time: each needs the whole machine.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = scratch(&format!("predicting-{tokens}"));
    let environment = [("XDG_CACHE_HOME", cache.to_str().unwrap())];
    let (tokens_text, heads_text) = (tokens.to_string(), heads.to_string());
    let mut wrong = Vec::new();
    for ranks in [2, 3, 4] {
        let ranks_text = ranks.to_string();
        let args = ["plan", "--calibrate", "--threads", "1", "--per-node", &ranks_text];
        run_with(&environment, &args).printed();
        let args = ["plan", pattern, "--tokens", &tokens_text, "--ranks", &ranks_text];
        let args = [&args[..], &["--heads", &heads_text, "--json"]].concat();
        let predicted = number(&run_with(&environment, &args).json(), "ms");
        let took = around(pattern, tokens, ranks, heads);
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

/// `tests/mpi/plan.rs` has the same on a slow link.
#[test]
#[ignore = "measures time: run it on a quiet machine, with --release and --test-threads 1"]
fn plans_come_true_causal() {
    comes_true("causal", 16 << 10, 2);
}

#[test]
#[ignore = "measures time: run it on a quiet machine, with --release and --test-threads 1"]
fn plans_come_true_window() {
    comes_true("causal & (window(1000, 0) | sinks(64))", 64 << 10, 4);
}

#[test]
#[ignore = "measures time: run it on a quiet machine, with --release and --test-threads 1"]
fn plans_come_true_strided() {
    comes_true("window(500, 500) | strided(64)", 8 << 10, 4);
}
