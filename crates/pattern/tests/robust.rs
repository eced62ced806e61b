//! A short adversarial text causes neither a panic nor a large allocation.

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use longspan_pattern::{BlockSize, Heads, Layout, Pattern, Shape};
use longspan_testing::Random;

/// The system allocator, recording the largest request.
struct Recording;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Recording {
    unsafe fn alloc(&self, memory: Memory) -> *mut u8 {
        LARGEST.fetch_max(memory.size(), Ordering::Relaxed);
        // SAFETY: `System` has the requirements of `GlobalAlloc`.
        unsafe { System.alloc(memory) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, memory: Memory) {
        // SAFETY: the pointer came from `alloc` above, hence from the system allocator.
        unsafe { System.dealloc(pointer, memory) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, memory: Memory, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as for `dealloc`.
        unsafe { System.realloc(pointer, memory, size) }
    }
}

#[global_allocator]
static RECORDING: Recording = Recording;

#[test]
fn short_texts_allocate_little() {
    let deep =
        |open: &str, close: &str| format!("{}causal{}", open.repeat(2000), close.repeat(2000));
    let many = "1,".repeat(4000);
    let texts = [
        deep("(", ")"),
        deep("!", ""),
        deep("packed([1],[1],", ")"),
        deep("!(full&", ")"),
        "full|causal&".repeat(500) + "full",
        "[".repeat(4000),
        "9".repeat(4000),
        "(".repeat(4000),
        format!("documents([{many}])"),
        format!("blocks(1, [[{many}]])"),
        format!("blocks(1, [{}])", "[],".repeat(3000)),
        format!("hierarchical([{}])", "(1,1,1),".repeat(1000)),
        format!("blocks_dilated(1, [{many}])"),
        "random(1, 65536, 18446744073709551615, 0)".into(),
        "random(64, 65536, 2305843009213693952, 0)".into(),
        "random(64, 2305843009213628416, 2305843009213693952, 0)".into(),
        "random(1, 1000, 2305843009213693952, 0)".into(),
        "random(1, 1000000000, 1000001000, 0)".into(),
        "strided(17)".into(),
        "strided(300)".into(),
        "!strided(70000) & !strided(70001)".into(),
        "strided(4099) & strided(4111) | strided(4127)".into(),
        "hierarchical([(2305843009213693952, 2, 64)])".into(),
        "hierarchical([(2305843009213693952, 1000, 1)]) & !dilated(1, 1)".into(),
        "dilated(2305843009213693952, 257)".into(),
        "dilated(1, 1) | blocks_dilated(1, [1, 2, 3, 2305843009213693952])".into(),
        "butterfly(1) & !window(0, 0)".into(),
        "window(2305843009213693952, 2305843009213693952)".into(),
        "packed([1152921504606846976], [1152921504606846976], strided(9))".into(),
        "documents([1152921504606846976])".into(),
        "\u{0}\u{1f600}~~~".into(),
        "causal & \u{301}\u{301}\u{301}".into(),
    ];
    const MAX_BYTES: u64 = 1 << 20;
    // `Shape::max_bytes` excludes tables of constant size and stored masks.
    const MAX_REQUEST: usize = 16 << 20;
    for text in &texts {
        assert!(text.len() < 40_000);
        LARGEST.store(0, Ordering::Relaxed);
        let heads = text.parse::<Heads>();
        let parsed = LARGEST.load(Ordering::Relaxed);
        assert!(parsed <= 64 * text.len().max(1024), "{text:.60}: {parsed} bytes to parse");
        let Ok(Heads::Same(pattern)) = heads else { continue };
        for (tokens, rows, block) in [
            (4096, 0..1, 256),
            (4096, 0..16, 16),
            (1 << 39, (1 << 31) - 2..1 << 31, 256),
            (1 << 60, 0..0, 16),
        ] {
            let shape = Shape::new(tokens, tokens)
                .block(BlockSize::new(block).unwrap())
                .rows(rows)
                .max_bytes(MAX_BYTES);
            LARGEST.store(0, Ordering::Relaxed);
            if let Ok(layout) = Layout::compile(&pattern, &shape) {
                let _ = layout.counts();
                let _ = layout.hash();
                let _ = layout.picture(8, 8);
            }
            let largest = LARGEST.load(Ordering::Relaxed);
            assert!(largest <= MAX_REQUEST, "{text:.60} for {tokens}: {largest} bytes at once");
        }
    }
}

#[test]
fn any_text_parses_or_is_an_error() {
    // A small version of the fuzz targets.
    let words = [
        "causal",
        "full",
        "window",
        "(",
        ")",
        "[",
        "]",
        ",",
        "&",
        "|",
        "!",
        "~",
        "1",
        "0",
        "64",
        "packed",
        "documents",
        "blocks",
        "..",
        " ",
        "é",
        "heads",
        "random",
        "_",
        "\n",
    ];
    let mut random = Random::new(1);
    let mut parsed = 0;
    for _ in 0..20_000 {
        let mut text = String::new();
        for _ in 0..4 {
            text.push_str(words[random.below(words.len() as u64) as usize]);
        }
        match text.parse::<Pattern>() {
            Ok(pattern) => {
                parsed += 1;
                assert_eq!(pattern.to_string().parse(), Ok(pattern));
            }
            Err(error) => assert!(error.to_string().contains('^')),
        }
    }
    assert!(parsed > 0);
}
