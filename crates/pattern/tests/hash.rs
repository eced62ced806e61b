//! The content hash: stable across versions and machines, and a function of content alone.

use longspan_pattern::{BlockSize, Layout, Pattern, Shape};

fn compile(text: &str, shape: &Shape) -> Layout {
    Layout::compile(&text.parse().unwrap(), shape).unwrap()
}

/// These values may change only together with the version inside the hash.
#[test]
fn known_hashes() {
    let table = [
        ("full", 1, "7ad4d4900458486c54dc166927521cb5"),
        ("causal", 8192, "d3afb5a4066797f1b057e50adbae9f79"),
        ("causal & (window(256, 0) | sinks(16))", 8192, "666207f1287bcd8287e824ae78c75b56"),
        ("hierarchical([(64, 1, 1), (512, 4, 16)])", 5000, "4973c95cc4a26bad61b06b1006db6f04"),
        ("strided(3) | random(16, 3, 40, 7)", 1237, "f8b052b54acbde9ce649066d8d255c65"),
        ("!full", 100, "d9f4e59086c633c485152007c0baa0a5"),
    ];
    let hash =
        |text, tokens| compile(text, &Shape::new(tokens, tokens)).hash().unwrap().to_string();
    let got = table.map(|(text, tokens, _)| (text, tokens, hash(text, tokens)));
    let expected = table.map(|(text, tokens, hash)| (text, tokens, hash.to_owned()));
    assert_eq!(got, expected);
}

#[test]
fn the_hash_is_of_content_alone() {
    let shape = Shape::new(3000, 3000);
    let causal = compile("causal", &shape);
    for same in ["window(5000, 0)", "causal & full", "!!causal", "!(!causal)", "causal | sinks(0)"]
    {
        assert_eq!(compile(same, &shape).same_pairs(&causal), Ok(true), "{same}");
    }
    let budgets =
        [0, 1000, 1 << 20].map(|bytes| compile("causal", &shape.clone().mask_bytes(bytes)));
    assert!(budgets.iter().all(|layout| layout.same_pairs(&causal) == Ok(true)));
    assert!(budgets[0].stored_masks() == 0 && budgets[2].stored_masks() > 0);
    // An offset common to queries and keys does not change the active pairs.
    let moved = shape.clone().query_offset(1 << 40).key_offset(1 << 40);
    assert_eq!(compile("causal", &moved).same_pairs(&causal), Ok(true));

    let others = [
        compile("causal", &shape.clone().block(BlockSize::new(32).unwrap())),
        compile("causal", &shape.clone().rows(0..40)),
        compile("causal", &shape.clone().query_offset(1)),
        compile("causal", &shape.clone().key_padding(0..2999)),
        compile("causal", &Shape::new(2999, 3000)),
        compile("window(5000, 1)", &shape),
        Layout::compile(&Pattern::full(), &shape).unwrap(),
    ];
    assert!(others.iter().all(|other| other.same_pairs(&causal) == Ok(false)));
}
