//! The committed header is that of the sources.

use std::path::Path;

/// Written with `LONGSPAN_RECORD=1`, after a change of the interface that is meant.
#[test]
fn header_is_that_of_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in ["status", "tensor", "hook", "options", "layout", "attention", "cache"] {
        builder = builder.with_src(root.join("src").join(source).with_extension("rs"));
    }
    let mut generated = Vec::new();
    builder.generate().unwrap().write(&mut generated);
    // What Rust calls safety are conditions that C has everywhere.
    let generated = String::from_utf8(generated).unwrap();
    let generated = generated.replace("// # Safety\n//\n// ", "// Requires: ");
    let path = root.join("include/longspan.h");
    if std::env::var_os("LONGSPAN_RECORD").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "include/longspan.h is not what the sources make: LONGSPAN_RECORD=1 cargo test -p \
         longspan-capi --test header writes it, and .ci/abi says what changed"
    );
}
