//! `longspan select` on files as safetensors writes them.

use std::path::PathBuf;

use half::bf16;
use longspan_testing::Random;
use safetensors::tensor::{Dtype, TensorView, serialize};

use crate::common::run;

/// A file of queries and keys, `[2, heads, tokens, dim]`.
fn file(name: &str, dtype: Dtype, key_dtype: Dtype) -> PathBuf {
    let tokens = 1_500;
    let mut random = Random::new(3);
    let mut numbers = |heads: usize, dtype: Dtype| -> Vec<u8> {
        let mut number = || 4.0 * (random.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0);
        let count = 2 * heads * tokens * 16;
        let numbers = (0..count).map(|_| number());
        match dtype {
            Dtype::BF16 => numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => numbers.flat_map(f32::to_le_bytes).collect(),
        }
    };
    let (q, k) = (numbers(4, dtype), numbers(2, key_dtype));
    let view = |data, heads, dtype| TensorView::new(dtype, vec![2, heads, tokens, 16], data);
    let tensors = [("q", view(&q, 4, dtype).unwrap()), ("keys", view(&k, 2, key_dtype).unwrap())];
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, serialize(tensors, None).unwrap()).unwrap();
    path
}

#[test]
fn density_kept_mass_and_pictures() {
    for (name, dtype) in [("select-f32", Dtype::F32), ("select-bf16", Dtype::BF16)] {
        let path = file(&format!("{name}.safetensors"), dtype, dtype);
        let path = path.to_str().unwrap();
        let options = [path, "--key", "keys", "--mass", "0.6", "--always", "sinks(1)"];
        let text = run(&[&["select"], &options[..]].concat()).printed();
        for word in ["density", "kept mass", "95 % interval", "head 0", "keys across"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let text = run(&[&["select"], &options[..], &["--json"]].concat()).printed();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let number = |name: &str| json[name].as_f64().unwrap();
        assert!((0.05..0.95).contains(&number("density")), "{json}");
        assert!((0.3..=1.0).contains(&number("kept_mass")), "{json}");
        assert_eq!(json["density_by_head"].as_array().unwrap().len(), 4);
        assert_eq!(json["queries"], serde_json::json!([2, 4, 1_500, 16]));
        // Everything: nothing is dropped.
        let all = ["select", path, "--key", "keys", "--mass", "1", "--json", "--per-key-head"];
        let json: serde_json::Value = serde_json::from_str(&run(&all).printed()).unwrap();
        assert_eq!(json["density"].as_f64(), Some(1.0));
        assert!(json["kept_mass"].as_f64().unwrap() > 0.999_999, "{json}");
        // Pictures of all heads of the second entry alone.
        let picture = path.replace(".safetensors", ".png");
        let entry = ["--entry", "1", "--png", &picture];
        let text = run(&[&["select"], &options[..], &entry].concat()).printed();
        assert_eq!(text.matches('┌').count(), 4, "{text}");
        let picture = path.replace(".safetensors", ".svg");
        run(&[&["select"], &options[..], &["--head", "3", "--svg", &picture]].concat()).printed();
        let svg = std::fs::read_to_string(&picture).unwrap();
        assert!(svg.contains("<svg") && svg.contains("blocks of causal"));
    }
}

#[test]
fn what_is_wrong_is_named() {
    let path = file("select-mixed.safetensors", Dtype::F32, Dtype::BF16);
    let path = path.to_str().unwrap();
    let refused = |options: &[&str], words: &str| {
        run(&[&["select"], options].concat()).refused(&[words]);
    };
    refused(&["missing.safetensors"], "can't read missing.safetensors");
    refused(&[path], "has no tensor k, but");
    refused(&[path, "--key", "keys"], "expected the same element type");
    refused(&[path, "--key", "q", "--head", "4"], "--head is 4, expected less than 4");
    refused(&[path, "--key", "q", "--entry", "2"], "--entry is 2, expected less than 2");
    refused(&[path, "--key", "q", "--mass", "2"], "the mass of a selector");
    refused(&[path, "--key", "q", "--always", "near"], "near");
    refused(&[concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")], "is no safetensors file");
}
