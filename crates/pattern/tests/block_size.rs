//! The block of layouts that have none set.

#![expect(clippy::print_stdout, reason = "figures, with --no-capture")]

use std::time::Instant;

use longspan_pattern::{BlockSize, Heads, Layout, LayoutSet, Padding, Pattern, Positions, Shape};

const SPARSE_TRANSFORMER: &str = "causal & (window(64, 0) | strided(128))";

fn block(text: &str, shape: &Shape) -> usize {
    Layout::compile(&text.parse().unwrap(), shape).unwrap().block().get()
}

#[test]
fn long_strides_of_long_sequences_have_larger_blocks() {
    let long = Shape::new(1 << 20, 1 << 20);
    assert_eq!(block(SPARSE_TRANSFORMER, &long), 128);
    assert_eq!(block("strided(100) | window(8, 8)", &long), 128);
    assert_eq!(block("dilated(65536, 200)", &long), 256);
    assert_eq!(block("strided(5000)", &long), 256);
    // Strides within a block, short sequences, few queries, parts of a sequence, and what was asked for.
    assert_eq!(block("strided(64) | window(64, 64)", &long), 64);
    assert_eq!(block("window(128, 128)", &long), 64);
    assert_eq!(block(SPARSE_TRANSFORMER, &Shape::new(16_384, 16_384)), 64);
    assert_eq!(block("strided(128)", &Shape::new(16, 1 << 24)), 64);
    let part = Positions::range(0, 4_096).unwrap();
    assert_eq!(block("strided(128)", &long.clone().query_map(part)), 64);
    assert_eq!(block("strided(128)", &long.clone().rows(0..64)), 64);
    assert_eq!(block(SPARSE_TRANSFORMER, &long.clone().block(BlockSize::new(256).unwrap())), 256);
}

#[test]
fn pairs_are_the_same() {
    let (pattern, tokens) = (SPARSE_TRANSFORMER.parse::<Pattern>().unwrap(), 131_072 + 77);
    let shape = Shape::new(tokens, tokens);
    let large = Layout::compile(&pattern, &shape).unwrap();
    let small = Layout::compile(&pattern, &shape.block(BlockSize::default())).unwrap();
    assert_eq!((large.block().get(), small.block().get()), (128, 64));
    assert_eq!(large.counts().unwrap().active_pairs, small.counts().unwrap().active_pairs);
    // A run per row of blocks in place of one per stride.
    assert!(large.bytes() * 100 < small.bytes(), "{} and {}", large.bytes(), small.bytes());
}

#[test]
fn layouts_of_a_set_have_one() {
    let heads: Heads = format!("heads([causal, {SPARSE_TRANSFORMER}])").parse().unwrap();
    let shape = Shape::new(1 << 18, 1 << 18);
    let set = LayoutSet::compile(&heads, 2, &shape, &Padding::None(1), None).unwrap();
    assert_eq!([0, 1].map(|head| set.get(0, head).block().get()), [128, 128]);
}

/// The patterns of `benches/patterns` that have components: memory stays small, and time is that of rows.
#[test]
fn sixteen_million_tokens() {
    for text in [
        "strided(64)",
        "strided(64) | window(64, 64)",
        SPARSE_TRANSFORMER,
        "dilated(2048, 4)",
        "dilated(2048, 4) | window(64, 64)",
    ] {
        let mut bytes = [0; 2];
        for (bytes, tokens) in bytes.iter_mut().zip([1 << 20, 1 << 24]) {
            let start = Instant::now();
            let layout = Layout::compile(&text.parse().unwrap(), &Shape::new(tokens, tokens));
            let layout = layout.unwrap();
            assert!(layout.split().unwrap().is_some(), "{text}");
            *bytes = layout.bytes();
            println!("{text}, {tokens} tokens: {:?}, {bytes} bytes", start.elapsed());
        }
        assert!(bytes[1] < 32 * bytes[0], "{text}: {bytes:?}");
    }
}
