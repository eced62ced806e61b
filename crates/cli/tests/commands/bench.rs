//! Consistency of `bench` reports, and validation of its arguments. Times are only compared with
//! zero.

use longspan::Isa;
use serde_json::{Value, json};

use crate::common::{Run, run, run_with};

fn bench(args: &[&str]) -> Run {
    run(&[&["bench"], args].concat())
}

fn number(object: &Value, name: &str) -> f64 {
    object[name].as_f64().unwrap_or_else(|| panic!("{name} is {}", object[name]))
}

#[test]
fn both_passes_in_numbers() {
    let args = "causal --tokens 300 --heads 4 --kv-heads 2 --head-dim 24 --value-dim 16 --batch 2 \
                --block 32 --order bthd --isa portable --threads 1 --repeat 2 --json";
    let objects = bench(&args.split_whitespace().collect::<Vec<_>>()).json_lines();
    let pairs = 300.0 * 301.0 / 2.0;
    let expected = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pattern": "causal",
        "tokens": 300,
        "queries": 300,
        "keys": 300,
        "batch": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 24,
        "value_dim": 16,
        "dtype": "f32",
        "block": 32,
        "order": "bthd",
        "density": pairs / 90_000.0,
        "isa": "portable",
        "threads": 1,
        "calls": 2,
        "matrix_peak_gflops": null,
        "matrix_peak_share": null,
        "read_share": null,
    });
    assert_eq!(objects.iter().map(|o| &o["pass"]).collect::<Vec<_>>(), ["forward", "backward"]);
    for (object, (flops, bytes)) in objects.iter().zip([
        // Two products over 24 and 16 dims; queries, keys, values and output.
        (2 * (24 + 16), 4 * 2 * 300 * (4 * 24 + 2 * 24 + 2 * 16 + 4 * 16)),
        // Five; the same, their gradients, and three elements for each query of 4 heads.
        (2 * (3 * 24 + 2 * 16), 4 * 2 * 300 * (2 * (4 * 24 + 2 * 24 + 2 * 16 + 4 * 16) + 3 * 4)),
    ]) {
        for (name, value) in expected.as_object().unwrap() {
            assert_eq!(&object[name], value, "{name}");
        }
        let (ms, gflops) = (number(object, "ms"), number(object, "gflops"));
        let work = 2.0 * 4.0 * pairs * f64::from(flops);
        assert!((gflops * ms * 1e6 / work - 1.0).abs() < 1e-9, "{gflops} GFLOP/s in {ms} ms");
        assert!(number(object, "median_ms") >= ms && number(object, "layout_ms") > 0.0);
        let (peak, share) = (number(object, "peak_gflops"), number(object, "peak_share"));
        assert!(peak > 0.0 && (gflops / peak - share).abs() < 1e-9);
        assert_eq!(object["tensor_bytes"], bytes);
    }
    assert!(number(&objects[1], "layout_ms") > number(&objects[0], "layout_ms"));
}

#[test]
fn half_types_take_half_the_bytes() {
    let sizes = ["--heads", "4", "--kv-heads", "2", "--head-dim", "24", "--value-dim", "16"];
    let args = [&["causal", "--tokens", "300", "--repeat", "1", "--json"], &sizes[..]].concat();
    for dtype in ["bf16", "F16"] {
        let objects = bench(&[&args[..], &["--dtype", dtype, "--isa", "portable"]].concat());
        let tensors = 300 * (4 * 24 + 2 * 24 + 2 * 16 + 4 * 16);
        // Three f32 per row: the log-sum-exp, its low part, and one more.
        let bytes = [2 * tensors, 2 * 2 * tensors + 4 * 3 * 4 * 300];
        for (object, bytes) in objects.json_lines().iter().zip(bytes) {
            assert_eq!(object["dtype"], dtype.to_lowercase());
            assert_eq!(object["tensor_bytes"], bytes);
            assert_eq!(object["matrix_peak_gflops"], json!(null));
        }
    }
}

#[test]
fn the_matrix_unit_has_its_own_peak() {
    if !Isa::Amx.is_available() {
        return;
    }
    let args = ["full", "--tokens", "256", "--repeat", "1", "--isa", "amx", "--pass", "forward"];
    let object = |dtype| bench(&[&args[..], &["--json", "--dtype", dtype]].concat()).json();
    let bf16 = object("bf16");
    let (peak, share) = (number(&bf16, "matrix_peak_gflops"), number(&bf16, "matrix_peak_share"));
    assert!(peak > number(&bf16, "peak_gflops"), "{bf16}");
    assert!((number(&bf16, "gflops") / peak - share).abs() < 1e-9);
    assert_eq!(object("f16")["matrix_peak_share"], json!(null));
    let text = bench(&[&args[..], &["--dtype", "bf16"]].concat()).printed();
    assert!(text.lines().any(|line| line.starts_with("forward reaches ")), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn memory_is_what_tensors_take_and_little_more() {
    let args = ["window(0, 0)", "--tokens", "64k", "--heads", "2", "--repeat", "1", "--json"];
    for object in bench(&args).json_lines() {
        // 64 MiB forward, 128 MiB backward: enough for scratch and the program itself to be small.
        let (peak, tensors) = (number(&object, "peak_bytes"), number(&object, "tensor_bytes"));
        let ratio = number(&object, "peak_to_tensors");
        assert!((peak / tensors - ratio).abs() < 1e-9);
        assert!((0.95..1.5).contains(&ratio), "{}: {ratio}", object["pass"]);
    }
}

#[test]
fn few_queries_are_compared_with_reading() {
    let of = |args: &[&str]| {
        let always = ["--heads", "4", "--kv-heads", "2", "--repeat", "1", "--json"];
        bench(&[args, &always].concat()).json_lines().remove(0)
    };
    // Two spellings of the same problem.
    for lengths in [["--tokens", "5000", "--queries", "3"], ["--tokens", "3", "--keys", "5000"]] {
        let object = of(&[&["causal", "--pass", "forward"], &lengths[..]].concat());
        assert_eq!((&object["queries"], &object["keys"]), (&json!(3), &json!(5_000)));
        // Keys and values, two heads of 64 elements each.
        let bytes = f64::from(2 * 2 * 5_000 * 64 * 4);
        let (rate, peak) = (number(&object, "read_gbps"), number(&object, "read_peak_gbps"));
        assert!((rate * number(&object, "ms") * 1e6 / bytes - 1.0).abs() < 1e-9);
        assert!((rate / peak - number(&object, "read_share")).abs() < 1e-9);
    }
    // Of bf16, half as much.
    let args = ["causal", "--tokens", "5000", "--queries", "3", "--pass", "forward"];
    let object = of(&[&args[..], &["--dtype", "bf16"]].concat());
    let bytes = number(&object, "read_gbps") * number(&object, "ms") * 1e6;
    assert!((bytes / f64::from(2 * 2 * 5_000 * 64 * 2) - 1.0).abs() < 1e-9, "{bytes}");
    // A window reads its own blocks only: keys 4,900 to 5,000 lie in those from 4,864 on.
    let window = ["window(99, 0)", "--tokens", "5000", "--queries", "1", "--pass", "forward"];
    let object = of(&window);
    let bytes = number(&object, "read_gbps") * number(&object, "ms") * 1e6;
    assert!((bytes / f64::from(2 * 2 * 136 * 64 * 4) - 1.0).abs() < 1e-9, "{bytes}");
}

#[test]
fn passes_and_heads() {
    let args = ["heads([causal, full, causal])", "--tokens", "100", "--repeat", "1", "--json"];
    let one = |pass: &str| bench(&[&args[..], &["--pass", pass]].concat()).json_lines();
    for pass in ["forward", "backward"] {
        let objects = one(pass);
        assert_eq!((objects.len(), &objects[0]["pass"]), (1, &json!(pass)));
        assert_eq!(objects[0]["heads"], 3);
        let density = (2.0 * 5_050.0 + 10_000.0) / 30_000.0;
        assert!((number(&objects[0], "density") - density).abs() < 1e-12);
    }
    // No tokens is not an error.
    let nothing = ["full", "--tokens", "0", "--repeat", "1", "--json"];
    assert!(bench(&nothing).json_lines().iter().all(|object| object["gflops"] == 0.0));
}

#[test]
fn the_environment_decides_where_no_option_does() {
    let args = ["bench", "full", "--tokens", "64", "--repeat", "1", "--pass", "forward", "--json"];
    let variables = [("LONGSPAN_ISA", "portable"), ("LONGSPAN_THREADS", "3")];
    let object = run_with(&variables, &args).json();
    assert_eq!((&object["isa"], &object["threads"]), (&json!("portable"), &json!(3)));
    let best = Isa::best().to_string();
    let options = ["--threads", "1", "--isa", &best];
    let object = run_with(&variables, &[&args[..], &options].concat()).json();
    // f32 on a machine with AMX runs AVX-512 kernels.
    let ran = if best == "amx" { "avx512" } else { &best };
    assert_eq!((&object["isa"], &object["threads"]), (&json!(ran), &json!(1)));

    run_with(&[("LONGSPAN_THREADS", "many")], &args)
        .refused(&["LONGSPAN_THREADS is \"many\", expected a number of threads, 1 to 4096"]);
    run(&[&args[..], &["--threads", "5000"]].concat())
        .refused(&["5000 threads asked for, expected 1 to 4096"]);
    run_with(&[("LONGSPAN_ISA", "sse9")], &args)
        .refused(&["LONGSPAN_ISA is \"sse9\", expected portable, neon, avx2, avx512 or amx"]);
}

#[test]
fn text_report() {
    let args = "full --tokens 1k --queries 2 --heads 2 --kv-heads 1 --head-dim 16 --repeat 1 \
                --isa portable --threads 1";
    let text = bench(&args.split_whitespace().collect::<Vec<_>>()).printed();
    let line = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name}: {text}")).trim()
    };
    assert_eq!(line("tokens "), "2 queries × 1,024 keys, 100 % of all pairs");
    let tensors = "f32, batch 1, 2 heads on 1 KV head, head dim 16, [batch, head, token, dim]";
    assert_eq!(line("tensors "), tensors);
    assert_eq!(line("computed with "), "portable, highest precision, 1 thread");
    let titles: Vec<&str> = line("pass ").split_whitespace().collect();
    assert_eq!(titles[..4], ["best", "ms", "median", "ms"]);
    for pass in ["forward  ", "backward  "] {
        assert_eq!(line(pass).split_whitespace().nth(2), Some("1"), "{text}");
    }
    assert!(line("forward reads").contains("GB/s"), "{text}");
}

#[test]
fn wrong_arguments_name_value_and_rule() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["windw(3, 0)", "-n", "64"], &["did you mean `window`?"]),
        (&["full"], &["--tokens <N>"]),
        (&["full", "-n", "1.5M"], &["'1.5M'", "expected a whole number such as"]),
        (&["full", "-n", "64", "--heads", "0"], &["'0'", "expected a number of heads, 1 to"]),
        (&["full", "-n", "64", "--kv-heads", "3"], &["8 query heads and 3 key heads", "multiple"]),
        (&["full", "-n", "64", "--head-dim", "300"], &["q has head dim 300, expected 1 to 256"]),
        (&["full", "-n", "64", "--value-dim", "0"], &["v has head dim 0, expected 1 to 256"]),
        (&["full", "-n", "64", "--block", "8"], &["block size is 8, expected 16 to 256"]),
        (&["full", "-n", "64", "--threads", "0"], &["'0'", "expected a whole number, at least 1"]),
        (&["full", "-n", "64", "--repeat", "0"], &["'0'", "expected a whole number, at least 1"]),
        (&["full", "-n", "64", "--batch=-1"], &["'-1'", "expected a whole number, at least 1"]),
        (&["full", "-n", "64", "--pass", "sideways"], &["'sideways'", "forward, backward, both"]),
        (&["full", "-n", "64", "--order", "dhtb"], &["'dhtb'", "bhtd, bthd"]),
        (
            &["full", "-n", "64", "--isa", "sse9"],
            &["\"sse9\"", "portable, neon, avx2, avx512 or amx"],
        ),
        (&["full", "-n", "64", "--dtype", "f64"], &["\"f64\"", "f32, bf16 or f16"]),
        (&["full", "-n", "64", "--queries", "1", "--keys", "2"], &["cannot be used with"]),
        (&["heads([full, causal])", "-n", "64", "--heads", "8"], &["2 patterns for 8 query heads"]),
        (&["documents([5])", "-n", "64"], &["lengths add up to 5, expected 64"]),
        (&["full", "-n", "900000000G"], &["can't be counted in 64 bits"]),
    ];
    for (args, parts) in cases {
        bench(args).refused(parts);
    }
    #[cfg(target_os = "linux")]
    bench(&["full", "-n", "1G", "--heads", "64"]).refused(&[
        "the tensors take",
        "of memory are free",
        "--pass forward",
    ]);
}
