//! The reports of `verify`, and its coverage of cases. The unit tests of `src/verify.rs` show that
//! wrong results fail.

use longspan::Isa;
use serde_json::json;

use crate::common::run;

const DTYPES: [&str; 3] = ["f32", "bf16", "f16"];
const TENSORS: [&str; 5] = ["out", "lse", "dq", "dk", "dv"];

/// f32 products as three of bf16 are right by their own rule, on matrix units, and by that of f32 elsewhere.
#[test]
fn split_products_are_right() {
    let object =
        run(&["verify", "--quick", "--dtype", "f32", "--precision", "high", "--json"]).json();
    assert_eq!((&object["wrong"], &object["precision"]), (&json!(0), &json!("high")));
    let checks = object["checks"].as_array().unwrap();
    let worst = |isa: &str| {
        let own = checks.iter().filter(|check| check["isa"] == isa);
        own.map(|check| check["errors"]["out"].as_f64().unwrap()).fold(0.0, f64::max)
    };
    assert!(worst("portable") < 20.0);
    assert_eq!(worst("amx") > 50.0, Isa::Amx.is_available());
}

/// Every type on every instruction set of this CPU on the small cases: the kernels are right.
#[test]
fn kernels_are_right() {
    let object = run(&["verify", "--quick", "--json"]).json();
    let isas: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
    assert_eq!(object["isas"], json!(isas));
    assert_eq!(object["dtypes"], json!(DTYPES));
    assert_eq!(object["wrong"], 0);
    let checks = object["checks"].as_array().unwrap();
    let cases = object["cases"].as_u64().unwrap() as usize;
    assert_eq!(checks.len(), cases * isas.len() * DTYPES.len());
    for check in checks {
        assert_eq!(check["right"], true, "{check}");
        assert_eq!(check.get("complaints"), None);
        let digest = check["digest"].as_str().expect("a digest");
        assert!(digest.len() == 32 && u128::from_str_radix(digest, 16).is_ok(), "{check}");
        let error = |tensor: &&str| check["errors"][*tensor].as_f64().expect("an error");
        assert!(TENSORS.iter().map(error).all(|error| error >= 0.0), "{check}");
        let within = |tensor: &&str| match check["limits"][*tensor].as_f64() {
            Some(limit) => error(tensor) <= limit,
            None => error(tensor) == 0.0,
        };
        assert!(TENSORS.iter().all(within), "{check}");
    }
    // Errors of zero everywhere would mean that nothing is compared.
    let of = |dtype: &str, tensor: &str| {
        let checks = checks.iter().filter(|check| check["dtype"] == dtype);
        let errors = checks.filter_map(|check| check["errors"][tensor].as_f64());
        errors.fold(0.0, f64::max)
    };
    for dtype in DTYPES {
        assert!(TENSORS.iter().all(|tensor| of(dtype, tensor) > 0.1), "{checks:?}");
    }
    let named = |name: &str| checks.iter().filter(|check| check["case"] == name).count();
    for name in ["causal", "packed", "dims 65 and 1", "0 tokens", "padding", "softcap"] {
        assert_eq!(named(name), isas.len() * DTYPES.len(), "{name}");
    }
    let window = checks.iter().find(|check| check["case"] == "window").unwrap();
    let about = window["about"].as_str().unwrap();
    assert!(about.contains("window(30, 70) on 257 x 257, block 64"), "{about}");
}

#[test]
fn one_instruction_set_and_type() {
    let args = ["verify", "--quick", "--isa", "portable", "--dtype", "bf16"];
    let summary = run(&args).printed();
    assert_eq!(summary.lines().count(), 1, "{summary}");
    assert!(summary.contains("cases on portable, bf16: all right; worst"), "{summary}");

    let text = run(&[&args[..], &["--verbose"]].concat()).printed();
    let lines: Vec<&str> = text.lines().collect();
    let words = |line: &str| line.split_whitespace().map(str::to_string).collect::<Vec<_>>();
    let header = ["case", "isa", "dtype", "out", "lse", "dq", "dk", "dv", "of", "limit"];
    assert_eq!(words(lines[1]), header);
    let causal = lines.iter().find(|line| line.starts_with("causal ")).unwrap();
    let cells = words(causal);
    assert_eq!([&cells[1], &cells[2], &cells[10]], ["portable", "bf16", "right"]);
    assert!(cells[3..8].iter().all(|cell| cell.parse::<f64>().is_ok()), "{causal}");
    let last = lines.last().unwrap();
    assert_eq!(*last, summary.trim_end(), "{last}");
    assert!(!text.contains("WRONG"), "{text}");
}

/// Two runs of one build have the same digests.
#[test]
fn digests_compare_builds() {
    let args = ["verify", "--quick", "--isa", "portable", "--dtype", "f32", "--json"];
    let digests = |args: &[&str]| {
        let object = run(args).json();
        let checks = object["checks"].as_array().unwrap().clone();
        checks.into_iter().map(|check| check["digest"].clone()).collect::<Vec<_>>()
    };
    let portable = digests(&args);
    assert_eq!(portable, digests(&args));
    let distinct: std::collections::HashSet<String> =
        portable.iter().map(ToString::to_string).collect();
    assert!(2 * distinct.len() > portable.len(), "{distinct:?}");
}

#[test]
fn only_what_this_cpu_has() {
    let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    let message = format!("instruction set {foreign} asked for, this CPU has portable");
    run(&["verify", "--isa", foreign]).refused(&[&message]);
    run(&["verify", "--isa", "mmx"]).refused(&["\"mmx\"", "portable, neon, avx2, avx512 or amx"]);
    run(&["verify", "--dtype", "f8"]).refused(&["\"f8\"", "f32, bf16 or f16"]);
    run(&["verify", "causal"]).refused(&["unexpected argument 'causal'"]);
}
