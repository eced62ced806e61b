//! Every layout equals its predicate at every single position.
//!
//! Random cases from `longspan-testing`: an expression over all primitives, lengths, offsets, a
//! block size, rows, position maps, padding, a mask budget. The oracle there is written from the
//! meaning of the primitives alone and shares no code with this crate; the pattern reaches it only
//! as text. `LONGSPAN_CASES` sets how many cases (20,000 where left out), `LONGSPAN_SEED` the
//! first seed.

use std::sync::atomic::{AtomicU64, Ordering};

use longspan_pattern::{BlockSize, Layout, Pattern, Positions, Progression, RunKind, Shape};
use longspan_testing::Case;

mod common;

use common::check;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")),
        Err(_) => default,
    }
}

#[test]
fn layouts_equal_their_predicate_everywhere() {
    let cases = number("LONGSPAN_CASES", 20_000);
    let first = number("LONGSPAN_SEED", 0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let next = AtomicU64::new(0);
    let in_between = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let case = next.fetch_add(1, Ordering::Relaxed);
                    if case >= cases {
                        return;
                    }
                    let seed = first + case;
                    let case = Case::from_seed(seed);
                    let checked = std::panic::catch_unwind(|| check(&case));
                    match checked {
                        Ok(Ok(active)) => {
                            in_between.fetch_add(active.into(), Ordering::Relaxed);
                        }
                        Ok(Err(error)) => panic!("seed {seed}: {error}\n{case}"),
                        Err(_) => panic!("seed {seed}: panicked\n{case}"),
                    }
                }
            });
        }
    });
    // The generator must not have drifted into cases that are all empty or all full.
    let in_between = in_between.into_inner();
    assert!(in_between * 2 > cases, "only {in_between} of {cases} cases had a Partial block");
}

/// A row compiled alone can't be a copy of the one above; compiled with the others it may be. Both
/// must be the same, at lengths where rows do repeat.
#[test]
fn rows_alone_equal_rows_together() {
    let cases = number("LONGSPAN_CASES", 20_000) / 10;
    let first = number("LONGSPAN_SEED", 0);
    let mut compared = 0;
    for seed in first..first + cases {
        let case = Case::from_seed(seed);
        let text = case.rule.to_string();
        let tokens = 3000 + seed * 7919 % 20_000;
        let block = BlockSize::new([16, 17, 48, 64][seed as usize % 4]).unwrap();
        // Lengths of documents have to add up to other tokens here: give it ones that do.
        let mut pattern: Pattern = if text.contains("documents") || text.contains("packed") {
            Pattern::window(seed * 31 % 2000, seed * 17 % 300).unwrap()
        } else {
            text.parse().unwrap()
        };
        if seed % 3 == 0 {
            let lengths = (0..).map(|i| 1 + (seed + i) * 37 % 5000).scan(tokens, |left, length| {
                let length = length.min(*left);
                *left -= length;
                (length > 0).then_some(length)
            });
            let lengths: Vec<u64> = lengths.collect();
            pattern = Pattern::packed(lengths.clone(), lengths, pattern).unwrap();
        }
        let mut shape = Shape::new(tokens, tokens).block(block).max_bytes(32 << 20);
        if seed % 5 == 0 {
            let ranks = 2 + seed % 7;
            let residues = (0..ranks).map(|start| Progression {
                start: start as i64,
                step: ranks,
                len: (tokens - start).div_ceil(ranks),
            });
            let map = Positions::new(residues).unwrap();
            shape = shape.query_map(map.clone()).key_map(map);
        }
        let Ok(together) = Layout::compile(&pattern, &shape) else { continue };
        for turn in 0..6 {
            let row = (seed * 271 + turn * 104_729) % together.rows().len() as u64;
            let alone = Layout::compile(&pattern, &shape.clone().rows(row..row + 1)).unwrap();
            let row = row as u32;
            assert_eq!(
                blocks(&together, row),
                blocks(&alone, row),
                "seed {seed}: {pattern}, {row}"
            );
            compared += 1;
        }
    }
    assert!(compared >= 5 * cases, "only {compared} rows of {cases} cases were compared");
}

/// The blocks of a row with their masks, nothing for Full ones.
fn blocks(layout: &Layout, row: u32) -> Vec<(u32, Option<Vec<u64>>)> {
    let mut masks = layout.masks();
    let mut blocks = Vec::new();
    for run in layout.row(row) {
        for column in run.start..run.end() {
            let partial = run.kind() == RunKind::Partial;
            blocks.push((column, partial.then(|| masks.get(row, column, run).to_vec())));
        }
    }
    blocks
}
