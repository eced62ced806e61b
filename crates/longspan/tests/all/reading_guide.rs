//! Files and names that `docs/reading-guide.md` leads to exist.

use std::path::Path;

#[test]
fn files_and_names_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let Ok(guide) = std::fs::read_to_string(root.join("../../docs/reading-guide.md")) else {
        // The published crate has no guide beside it.
        assert!(!root.join("../../docs").exists(), "docs/reading-guide.md is missing");
        return;
    };
    let mut steps = 0;
    for line in guide.lines().filter(|line| line.contains(".rs` | `")) {
        let quoted: Vec<&str> = line.split('`').skip(1).step_by(2).take(2).collect();
        let [file, name] = quoted[..] else { panic!("{line}") };
        let source = std::fs::read_to_string(root.join("src").join(file))
            .unwrap_or_else(|error| panic!("{file}: {error}"));
        let kinds = ["fn", "struct", "enum", "trait", "const"];
        let is_defined = |kind: &&str| {
            source.match_indices(&format!("{kind} {name}")).any(|(at, found)| {
                let next = source[at + found.len()..].chars().next();
                next.is_some_and(|next| !next.is_alphanumeric() && next != '_')
            })
        };
        assert!(kinds.iter().any(is_defined), "{file} defines no `{name}`");
        steps += usize::from(line.starts_with("| 1") || line.as_bytes()[2].is_ascii_digit());
    }
    assert_eq!(steps, 10, "ten steps");
}
