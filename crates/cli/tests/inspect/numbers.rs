//! Reports: JSON, the summary, the picture of characters.

use serde_json::{Value, json};

use crate::{inspect, scratch};

const N: u64 = 8_192;
const BLOCK: u64 = 64;
const ROWS: u64 = N / BLOCK;

#[test]
fn causal_in_numbers() {
    let object = inspect(&["causal", "--tokens", "8192", "--block", "64", "--json"]).json();
    let pairs = N * (N + 1) / 2;
    let expected = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pattern": "causal",
        "tokens": N,
        "queries": N,
        "block": BLOCK,
        "query_offset": 0,
        "key_offset": 0,
        "head_dim": 64,
        "first_row": 0,
        "rows": ROWS,
        "columns": ROWS,
        // One run of Full blocks and the diagonal, but for the first row.
        "runs": 2 * ROWS - 1,
        "active_blocks": ROWS * (ROWS + 1) / 2,
        "full_blocks": ROWS * (ROWS - 1) / 2,
        "partial_blocks": ROWS,
        "active_pairs": pairs,
        "density": pairs as f64 / (N * N) as f64,
        // Two products forward and five backward, two FLOPs per pair and dim each.
        "forward_flops": pairs * 2 * 2 * 64,
        "backward_flops": pairs * 5 * 2 * 64,
        "stored_masks": 1,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&object[name], value, "{name}");
    }
    let whole = |name: &str| object[name].as_u64().unwrap_or_else(|| panic!("{name}"));
    // A run is twelve bytes and a mask 64 words.
    assert!(whole("layout_bytes") >= (2 * ROWS - 1) * 12 + 512, "{}", object["layout_bytes"]);
    assert!(whole("coverage_queries") > 0);
    assert!(object["compile_ms"].as_f64().unwrap() > 0.0);
    let hash = object["hash"].as_str().unwrap();
    assert!(hash.len() == 32 && hash.bytes().all(|b| b.is_ascii_hexdigit()), "{hash}");
}

#[test]
fn spellings_of_lengths() {
    let hash = |args: &[&str]| {
        let args = [&["causal & window(99, 3)", "--json"], args].concat();
        inspect(&args).json()["hash"].clone()
    };
    let plain = hash(&["--tokens", "8192"]);
    assert_eq!(hash(&["--tokens", "8_192"]), plain);
    assert_eq!(hash(&["-n", "8k", "--queries", "8K", "-b", "64"]), plain);
    assert_eq!(hash(&["--tokens", "8k", "--query-offset", "0"]), plain);
    assert_ne!(hash(&["--tokens", "8k", "--query-offset", "-64"]), plain);
    // The queries stay the last positions, and the pattern looks at distances alone.
    assert_eq!(hash(&["--tokens", "8k", "--key-offset", "-64"]), plain);
    assert_ne!(hash(&["--tokens", "8k", "--key-offset", "-64", "--query-offset", "0"]), plain);
    assert_ne!(hash(&["--tokens", "8k", "--block", "32"]), plain);
}

#[test]
fn queries_padding_and_rows() {
    let pairs = |args: &[&str]| {
        let object = inspect(&[args, &["--json"]].concat()).json();
        (object["active_pairs"].clone(), object["query_offset"].clone())
    };
    // The last query of 32,768 sees itself and 1,024 before it.
    let decode = ["causal & window(1024, 0)", "--tokens", "32k", "--queries", "1"];
    assert_eq!(pairs(&decode), (json!(1_025), json!(32_767)));
    // Query i sees keys 100..=i.
    let padded = ["causal", "--tokens", "1000", "--key-padding", "100.."];
    assert_eq!(pairs(&padded), (json!(900 * 901 / 2), json!(0)));
    // Rows 2 and 3 of blocks of 16: queries 32..64.
    let rows = ["causal", "--tokens", "1000", "--block", "16", "--rows", "2..4"];
    assert_eq!(pairs(&rows), (json!((33..=64).sum::<u64>()), json!(0)));
}

#[test]
fn pairs_past_64_bits() {
    let args = ["full", "--tokens", "512G", "--queries", "64M", "--block", "256", "--json"];
    let text = inspect(&args).printed();
    assert!(text.contains(&format!("\"active_pairs\": {},", 1u128 << 65)), "{text}");
    assert!(text.contains(&format!("\"forward_flops\": {},", 1u128 << 73)), "{text}");
}

#[test]
fn patterns_from_files() {
    let lengths: Vec<u64> = (0..20_000).map(|i| i * 7 % 100).collect();
    let tokens: u64 = lengths.iter().sum();
    let list: Vec<String> = lengths.iter().map(u64::to_string).collect();
    let path = scratch("documents.txt");
    std::fs::write(&path, format!("causal\n& documents([{}])\n", list.join(", "))).unwrap();
    let (path, tokens) = (format!("@{}", path.display()), tokens.to_string());
    let object = inspect(&[&path, "--tokens", &tokens, "--json"]).json();
    let pairs: u64 = lengths.iter().map(|n| n * (n + 1) / 2).sum();
    assert_eq!(object["active_pairs"], pairs);
    let pattern = object["pattern"].as_str().unwrap();
    assert!(pattern.starts_with("causal & documents([0, 7, 14, 21"), "{pattern}");
    assert!(pattern.ends_with('…') && pattern.chars().count() == 2_000, "{pattern}");
}

#[test]
fn heads_in_numbers() {
    let pattern = "heads([causal, causal & window(128, 0), causal & full])";
    let object = inspect(&[pattern, "--tokens", "1000", "--json"]).json();
    let causal = 1_000 * 1_001 / 2;
    // Query i sees min(i, 128) + 1 keys.
    let window = (0..1_000u64).map(|i| i.min(128) + 1).sum::<u64>();
    let heads = object["heads"].as_array().unwrap();
    let of = |name: &str| heads.iter().map(|head| head[name].clone()).collect::<Vec<Value>>();
    assert_eq!(of("head"), [0, 1, 2]);
    assert_eq!(of("active_pairs"), [causal, window, causal]);
    assert_eq!(of("layout"), [0, 1, 0]);
    assert_eq!(of("pattern"), ["causal", "causal & window(128, 0)", "causal & full"]);
    assert_eq!(heads[0]["hash"], heads[2]["hash"]);
    assert_ne!(heads[0]["hash"], heads[1]["hash"]);

    // Work is summed over heads, storage over layouts.
    let sum = |name: &str, of: &[usize]| {
        of.iter().map(|&head| heads[head][name].as_u64().unwrap()).sum::<u64>()
    };
    for name in ["active_blocks", "full_blocks", "partial_blocks", "active_pairs", "forward_flops"]
    {
        assert_eq!(object[name], sum(name, &[0, 1, 2]), "{name}");
    }
    for name in ["runs", "layout_bytes", "stored_masks"] {
        assert_eq!(object[name], sum(name, &[0, 1]), "{name}");
    }
    let density = (2 * causal + window) as f64 / 3e6;
    assert!((object["density"].as_f64().unwrap() - density).abs() < 1e-12);
    assert_eq!((&object["layouts"], &object["hash"]), (&json!(2), &Value::Null));

    // The same pattern for four heads is one layout.
    let same = inspect(&["causal", "--tokens", "1000", "--heads", "4", "--json"]).json();
    assert_eq!((&same["layouts"], &same["active_pairs"]), (&json!(1), &json!(4 * causal)));
    assert_eq!(same["hash"], heads[0]["hash"]);
}

#[test]
fn heads_as_text() {
    let pattern = "heads([causal, causal & window(128, 0), causal])";
    let text = inspect(&[pattern, "--tokens", "1024"]).printed();
    let lines: Vec<&str> = text.lines().collect();
    let row = |head: &str| {
        let found = lines.iter().find(|line| line.trim_start().starts_with(head));
        found
            .unwrap_or_else(|| panic!("no line for {head}: {text}"))
            .split_whitespace()
            .collect::<Vec<_>>()
    };
    assert_eq!(row("head ")[..3], ["head", "layout", "runs"]);
    assert_eq!(row("1 ")[..5], ["1", "1", "45", "45", "123,840"]);
    assert_eq!(row("2 ")[1], "0");
    assert!(lines.contains(&"heads 0, 2 share layout 0"), "{text}");
    let titles = lines.iter().find(|line| line.ends_with("head 1")).expect("titles of pictures");
    assert!(titles.starts_with("heads 0, 2  "), "{titles}");
    // Two pictures side by side: two frames on one line.
    assert!(lines.iter().any(|line| line.matches('┌').count() == 2), "{text}");
}

#[test]
fn summary_and_picture() {
    let args = ["causal & (window(40, 0) | sinks(4))", "--tokens", "96", "--block", "16"];
    let text = inspect(&args).printed();
    let (summary, picture) = text.split_once("\n\n").unwrap();
    let line = |name: &str| {
        let line = summary.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name}: {summary}")).trim()
    };
    assert_eq!(line("pattern "), "causal & (window(40, 0) | sinks(4))");
    assert_eq!(line("tokens "), "96 queries × 96 keys");
    assert_eq!(line("blocks "), "16 × 16 tokens, 6 rows × 6 columns");
    assert_eq!(line("active blocks "), "20 = 5 Full + 15 Partial, 55.6 % of all");
    assert_eq!(line("active pairs "), "3,330");
    assert_eq!(line("density "), "36.1 %, 2.77 times fewer pairs than dense");
    assert_eq!(line("work "), "852 kFLOP forward, 2.13 MFLOP backward per head, head dim 64");
    assert_eq!(line("hash ").len(), 32);

    let expected = "
          0                key position                 96
       0 ┌────────────────────────────────────────────────┐
         │▒▒▒▒▒▒▒▒                                        │
         │▒▒▒▒▒▒▒▒                                        │
         │▒▒▒▒▒▒▒▒                                        │
         │▒▒▒▒▒▒▒▒                                        │
         │████████▒▒▒▒▒▒▒▒                                │
         │████████▒▒▒▒▒▒▒▒                                │
         │████████▒▒▒▒▒▒▒▒                                │
         │████████▒▒▒▒▒▒▒▒                                │
         │▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒                        │
         │▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒                        │
         │▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒                        │
   query │▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒                        │
position │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒                │
         │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒                │
         │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒                │
         │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒                │
         │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒        │
         │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒        │
         │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒        │
         │▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒        │
         │▒▒▒▒▒▒▒▒        ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒│
         │▒▒▒▒▒▒▒▒        ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒│
         │▒▒▒▒▒▒▒▒        ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒│
         │▒▒▒▒▒▒▒▒        ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒████████▒▒▒▒▒▒▒▒│
      96 └────────────────────────────────────────────────┘
          █ Full, ▒ Partial
";
    assert_eq!(format!("\n{picture}"), expected);
    assert!(!text.contains('\u{1b}'), "colors without a terminal");

    let bare = inspect(&[&args[..], &["--no-picture"]].concat()).printed();
    assert_eq!(bare.lines().count(), summary.lines().count());
}

#[test]
fn pictures_follow_the_width_of_the_terminal() {
    let width = |columns: &str, args: &[&str]| {
        let args = [&["inspect", "causal", "--tokens", "4096", "--block", "16"], args].concat();
        let text = crate::common::run_with(&[("COLUMNS", columns)], &args).printed();
        let frame = text.lines().find(|line| line.contains('┌')).expect("a picture").to_string();
        (frame.chars().count(), frame.matches('┌').count())
    };
    let (default, _) = width("", &[]);
    assert_eq!(width("80", &[]).0, default);
    assert!(width("160", &[]).0 > default && width("160", &[]).0 <= 160);
    assert!(width("40", &[]).0 < default && width("40", &[]).0 <= 40);
    let heads = ["--heads", "1"];
    assert_eq!(width("40", &heads).1, 1);
    let several = |columns: &str| {
        let args = ["inspect", "heads([full, causal, window(99, 99)])", "--tokens", "640"];
        let text = crate::common::run_with(&[("COLUMNS", columns)], &args).printed();
        text.lines().map(|line| line.matches('┌').count()).max()
    };
    assert_eq!([several("100"), several("50"), several("20")], [Some(3), Some(2), Some(1)]);
}

/// Kernels compute whole blocks: patterns whose blocks hold few active pairs get a warning.
#[test]
fn sparse_blocks_get_warning() {
    let warnings = |args: &[&str]| {
        let run = inspect(&[args, &["--json"]].concat());
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let object: Value = serde_json::from_str(&run.stdout).expect("one JSON object");
        let warnings = object["warnings"].as_array().unwrap().clone();
        assert_eq!(run.stderr.lines().count(), warnings.len(), "{}", run.stderr);
        warnings.iter().map(|text| text.as_str().unwrap().to_string()).collect::<Vec<_>>()
    };
    // One key in 64, and the same with blocks that can't be smaller.
    let sparse = "hierarchical([(2048, 64, 1)])";
    let found = warnings(&[sparse, "--tokens", "2048"]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("most blocks hold few active pairs (mean 1.56 %)"), "{found:?}");
    assert!(found[0].contains("64 times the active pairs, in about"), "{found:?}");
    assert!(found[0].contains("of dense attention; consider a smaller --block"), "{found:?}");
    let smallest = ["hierarchical([(2048, 16, 1)])", "--tokens", "2048", "--block", "16"];
    let smallest = warnings(&smallest);
    assert!(smallest.len() == 1 && !smallest[0].contains("--block"), "{smallest:?}");
    // Per layout, with its heads.
    let found = warnings(&[&format!("heads([causal, {sparse}, {sparse}])"), "--tokens", "2048"]);
    assert!(found.len() == 1 && found[0].starts_with("heads 1, 2: most"), "{found:?}");
    // One pair in eight; Full blocks; no pairs at all; one key in 64 by residues.
    for pattern in ["strided(8)", "causal", "!full", "strided(64)"] {
        assert!(warnings(&[pattern, "--tokens", "2048"]).is_empty(), "{pattern}");
    }
    assert!(warnings(&["causal", "--tokens", "2048", "--queries", "1"]).is_empty());
    let run = inspect(&[sparse, "--tokens", "2048", "--no-picture"]);
    assert!(run.stderr.starts_with("warning: most blocks hold few"), "{}", run.stderr);
}

/// Terms that are dense in an order of residues are computed in it.
#[test]
fn components_are_reported() {
    let json = |pattern: &str| -> Value {
        let run = inspect(&[pattern, "--tokens", "4096", "--json"]);
        serde_json::from_str(&run.stdout).expect("one JSON object")
    };
    let object = json("strided(64) | window(64, 64)");
    let components = object["components"].as_array().unwrap();
    let of = |name: &str| components.iter().map(|c| c[name].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(
        (of("modulus"), of("views"), of("queries")),
        (vec![1, 64], vec![1, 64], vec![4096, 64])
    );
    assert!(object["predicted_time"].as_f64().unwrap() < 0.2, "{object}");
    assert!(object["computed_pairs"].as_u64() < Some(2 * object["active_pairs"].as_u64().unwrap()));
    let dilated = &json("dilated(2048, 4)")["components"][0];
    assert_eq!((&dilated["segment"], &dilated["views"]), (&Value::from(2048), &Value::from(2)));
    let plain = json("causal");
    assert_eq!(plain["components"].as_array().unwrap().len(), 1);
    assert!((plain["predicted_time"].as_f64().unwrap() - 0.5).abs() < 0.05);
    let run = inspect(&["strided(64)", "--tokens", "4096", "--no-picture"]);
    let line = "computed in    residues modulo 64 (64 views of 64 × 64 tokens)";
    assert!(run.stdout.contains(line), "{}", run.stdout);
}
