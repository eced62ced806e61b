//! Any text parses or is refused; what parses prints as itself and compiles or is refused, without
//! a panic and within its bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use longspan_pattern::{Heads, Layout, Pattern, Shape};

fuzz_target!(|text: &str| {
    let heads = match text.parse::<Heads>() {
        Ok(heads) => heads,
        Err(error) => {
            assert!(error.to_string().lines().count() == 3, "{error}");
            return;
        }
    };
    let printed = heads.to_string();
    assert_eq!(printed.parse::<Heads>().as_ref(), Ok(&heads), "{printed}");
    let Heads::Same(pattern) = heads else { return };
    assert_eq!(text.parse::<Pattern>().as_ref(), Ok(&pattern));
    // A shape that any sum of lengths may or may not fit, near and far out.
    let shapes = [
        Shape::new(100, 130).rows(0..1),
        Shape::new(1 << 30, 1 << 30).rows((1 << 24) - 1..1 << 24).max_bytes(1 << 16),
        Shape::new(70, 70).key_offset(-(1 << 60)).query_offset(1 << 59),
    ];
    for shape in shapes {
        if let Ok(layout) = Layout::compile(&pattern, &shape) {
            if let Ok(counts) = layout.counts() {
                assert!(counts.active_pairs <= layout.keys() as u128 * 100 * 64);
            }
        }
    }
});
