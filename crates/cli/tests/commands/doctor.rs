//! The reports, warnings and errors of `doctor`.

use longspan::{Isa, Threads};
use serde_json::{Value, json};

use crate::common::{run, run_with};

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

#[test]
fn hardware_and_choices_are_reported() {
    let object = run(&["doctor", "--json"]).json();
    assert_eq!(object["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(object["architecture"], std::env::consts::ARCH);
    assert_eq!(object["isa"], Isa::best().to_string());
    assert_eq!(object["isa_why"], "the fastest that this CPU has");
    let sets = object["instruction_sets"].as_array().unwrap();
    let names: Vec<&str> = sets.iter().map(|set| set["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["portable", "neon", "avx2", "avx512", "amx"]);
    for (set, name) in sets.iter().zip(names) {
        let available = name.parse::<Isa>().unwrap().is_available();
        assert_eq!(set["available"], available, "{name}");
        assert_eq!(set["missing"].is_null(), available, "{name}");
        for (dtype, most) in [("f32", 1e-5), ("bf16", 2e-2), ("f16", 2e-3)] {
            let difference = set["differences"][dtype].as_f64();
            assert_eq!(difference.is_some_and(|x| x < most), available, "{set}");
        }
        assert_eq!(set["peak_gflops"].as_f64().is_some_and(|x| x > 0.0), available, "{set}");
    }
    let kernels = object["kernels"].as_array().unwrap();
    let isas: Vec<&str> = kernels.iter().map(|kernel| kernel["isa"].as_str().unwrap()).collect();
    let dtypes: Vec<&str> =
        kernels.iter().map(|kernel| kernel["dtype"].as_str().unwrap()).collect();
    assert_eq!(dtypes, ["f32", "bf16", "f16"]);
    if Isa::Amx.is_available() {
        assert_eq!(
            (isas, &object["matrix_unit"]),
            (vec!["avx512", "amx", "avx512"], &json!("amx"))
        );
        assert!(object["matrix_peak_gflops"].as_f64() > object["peak_gflops"].as_f64());
    } else {
        assert_eq!(isas, [Isa::best().to_string().as_str(); 3]);
        assert_eq!(object["matrix_peak_gflops"], json!(null));
    }
    for problems in ["environment_problems", "kernel_problems"] {
        assert_eq!(object[problems], json!([]), "{problems}");
    }
    let warnings = texts(&object["warnings"]);
    let unoptimized = warnings.iter().any(|warning| warning.contains("without optimization"));
    assert_eq!(unoptimized, cfg!(debug_assertions), "{warnings:?}");
    assert_eq!(object["optimized"], !cfg!(debug_assertions));
    if Threads::Auto.count().is_ok() && std::env::var_os("LONGSPAN_THREADS").is_none() {
        assert_eq!(object["threads"], Threads::Auto.count().unwrap());
    }
}

#[cfg(target_os = "linux")]
#[test]
fn linux_reports_more() {
    let object = run(&["doctor", "--json"]).json();
    for name in ["cpus", "cores", "allowed_cpus", "memory_bytes", "free_memory_bytes"] {
        assert!(object[name].as_u64().is_some_and(|number| number > 0), "{name}: {object}");
    }
    assert!(object["memory_bytes"].as_u64() >= object["free_memory_bytes"].as_u64());
    assert!(object["affinity"].as_str().is_some_and(|list| !list.is_empty()));
    let allowed = object["allowed_cpus"].as_u64();
    assert!(object["threads"].as_u64() <= allowed, "{object}");
}

/// More threads than any machine of today has CPUs: none of them is ever started.
#[test]
fn the_environment_is_used_and_named() {
    let variables = [("LONGSPAN_ISA", "Portable"), ("LONGSPAN_THREADS", "1025")];
    let object = run_with(&variables, &["doctor", "--json"]).json();
    assert_eq!((&object["isa"], &object["threads"]), (&json!("portable"), &json!(1_025)));
    assert_eq!(object["isa_why"], "set by LONGSPAN_ISA");
    assert_eq!(object["threads_why"], "set by LONGSPAN_THREADS");
    let warnings = texts(&object["warnings"]).join("\n");
    if cfg!(target_os = "linux") {
        assert!(warnings.contains("1,025 threads on"), "{warnings}");
    }
    if Isa::best() != Isa::Portable {
        assert!(warnings.contains("LONGSPAN_ISA selects portable"), "{warnings}");
    }
}

#[test]
fn an_invalid_environment_is_an_error() {
    let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    let cases = [
        ("LONGSPAN_ISA", "sse9", "\"sse9\", expected portable, neon, avx2, avx512 or amx"),
        ("LONGSPAN_ISA", foreign, "this CPU has portable"),
        ("LONGSPAN_THREADS", "0", "\"0\", expected a number of threads, 1 to 4096"),
        ("LONGSPAN_THREADS", "two", "\"two\", expected a number of threads, 1 to 4096"),
    ];
    for (name, value, rule) in cases {
        let run = run_with(&[(name, value)], &["doctor"]);
        assert_eq!(run.code, Some(2), "{}", run.stdout);
        for text in [&run.stdout, &run.stderr] {
            assert!(text.contains(name) && text.contains(rule), "{text}");
            assert!(text.contains(&format!("`unset {name}`")), "{text}");
        }
        // Everything else is still reported.
        assert!(run.stdout.contains("would use      ") && run.stdout.contains("FMA peak"));

        let run = run_with(&[(name, value)], &["doctor", "--json"]);
        assert_eq!(run.code, Some(2));
        let object: Value = serde_json::from_str(&run.stdout).expect("one JSON object");
        assert_eq!(texts(&object["environment_problems"]).len(), 1);
        let chosen = if name == "LONGSPAN_ISA" { "isa" } else { "threads" };
        assert_eq!(object[chosen], Value::Null);
    }
}

#[test]
fn text_report() {
    let text = run(&["doctor"]).printed();
    for name in [
        "longspan ",
        "CPU ",
        "affinity ",
        "quota ",
        "memory ",
        "matrix unit ",
        "would use ",
        "FMA peak ",
    ] {
        assert!(text.lines().any(|line| line.starts_with(name)), "no {name}: {text}");
    }
    let table = text.lines().skip_while(|line| !line.starts_with("self-check"));
    let line = table.skip(1).find(|line| line.starts_with(&format!("{} ", Isa::best())));
    assert!(line.is_some_and(|line| line.ends_with("used")), "{text}");
}
