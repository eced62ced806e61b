//! Every layout equals its predicate at every pair.
//!
//! Random cases from `longspan-testing`: an expression over all primitives, lengths, offsets, a
//! block size, rows, position maps, padding, a mask budget. The oracle there is written from the
//! meaning of the primitives alone and shares no code with this crate; the pattern reaches it only
//! as text. `LONGSPAN_CASES` is the number of cases (20,000 by default), `LONGSPAN_SEED` the first
//! seed.

use std::sync::atomic::{AtomicU64, Ordering};

use longspan_pattern::{BlockSize, Layout, Level, Pattern, Positions, Progression, RunKind, Shape};
use longspan_testing::{Case, Random};

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
    let [partial, split] = [AtomicU64::new(0), AtomicU64::new(0)];
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
                        Ok(Ok(had)) => {
                            partial.fetch_add(had.partial.into(), Ordering::Relaxed);
                            split.fetch_add(had.split.into(), Ordering::Relaxed);
                        }
                        Ok(Err(error)) => panic!("seed {seed}: {error}\n{case}"),
                        Err(_) => panic!("seed {seed}: panicked\n{case}"),
                    }
                }
            });
        }
    });
    // Guards against a generator whose cases are all empty or all full.
    let (partial, split) = (partial.into_inner(), split.into_inner());
    assert!(partial * 2 > cases, "only {partial} of {cases} cases had a Partial block");
    assert!(split * 20 > cases, "only {split} of {cases} cases had components");
}

/// A row compiled alone is never copied from the row above; compiled with the others it may be.
/// Both must be equal, at lengths where rows repeat and with edges anywhere along the keys.
#[test]
fn rows_alone_equal_rows_together() {
    let cases = number("LONGSPAN_CASES", 20_000) / 5;
    let first = number("LONGSPAN_SEED", 0);
    let mut compared = 0;
    for seed in first..first + cases {
        let mut dice = Random::new(seed);
        let tokens = dice.between(300, 6000);
        let block = BlockSize::new([16, 17, 32, 48][dice.below(4) as usize]).unwrap();
        let mut shape = Shape::new(tokens as usize, tokens as usize).block(block);
        if dice.below(4) == 0 {
            let ranks = dice.between(2, 9);
            let residues = (0..ranks).map(|start| Progression {
                start: start as i64,
                step: ranks as usize,
                len: (tokens - start).div_ceil(ranks) as usize,
            });
            let map = Positions::new(residues).unwrap();
            shape = shape.query_map(map.clone()).key_map(map);
        }
        if dice.below(4) == 0 {
            let end = dice.between(1, tokens);
            shape = shape.key_padding(dice.below(end) as usize..end as usize);
        }
        let pattern = broad(&mut dice, tokens, 2);
        let together = Layout::compile(&pattern, &shape).unwrap();
        let compared_in_full = dice.below(50);
        for row in together.rows() {
            let alone = shape.clone().rows(row.into()..u64::from(row) + 1);
            let alone = Layout::compile(&pattern, &alone).unwrap();
            let same = match u64::from(row) % 50 == compared_in_full {
                true => blocks(&together, row) == blocks(&alone, row),
                false => kinds(&together, row) == kinds(&alone, row),
            };
            assert!(same, "seed {seed}, row {row}: {pattern} for {shape:?}");
            compared += 1;
        }
    }
    assert!(compared > 20 * cases, "only {compared} rows of {cases} cases were compared");
}

/// The runs of a row, adjacent ones of one kind joined: which of their masks are stored depends on
/// the other rows.
fn kinds(layout: &Layout, row: u32) -> Vec<(u32, u32, RunKind)> {
    let mut kinds: Vec<(u32, u32, RunKind)> = Vec::new();
    for run in layout.row(row) {
        match kinds.last_mut() {
            Some(last) if last.1 == run.start && last.2 == run.kind() => last.1 = run.end(),
            _ => kinds.push((run.start, run.end(), run.kind())),
        }
    }
    kinds
}

/// A pattern with arguments up to the length.
fn broad(dice: &mut Random, tokens: u64, depth: u32) -> Pattern {
    if depth > 0 && dice.below(4) > 0 {
        let (a, b) = (broad(dice, tokens, depth - 1), broad(dice, tokens, depth - 1));
        return match dice.below(4) {
            0 => a | b,
            1 => a & !b,
            _ => a & b,
        };
    }
    let lengths = |dice: &mut Random| {
        let (mut left, mut lengths) = (tokens, Vec::new());
        while left > 0 {
            let length = dice.between(1, tokens / 2 + 2).min(left);
            lengths.push(length);
            left -= length;
        }
        lengths
    };
    let pattern = match dice.below(14) {
        0 => Ok(Pattern::causal()),
        1 => Pattern::window(dice.below(tokens), 0),
        2 => Pattern::window(dice.below(tokens), dice.below(tokens)),
        3 => Pattern::sinks(dice.below(tokens)),
        4 => Pattern::global_tokens(dice.below(tokens)),
        5 => Pattern::dilated(dice.between(1, tokens), 1 << dice.below(6), 0),
        6 => Pattern::strided(dice.between(1, tokens)),
        7 => Pattern::strided(1 << dice.below(7)),
        8 => Pattern::documents(lengths(dice)),
        11 => {
            let from = dice.below(tokens);
            Pattern::keys(from, from + dice.below(tokens))
        }
        12 => {
            let from = dice.below(tokens);
            Pattern::queries(from, from + dice.below(tokens))
        }
        13 => {
            let width = dice.between(1, 300);
            let size = [dice.between(1, tokens / width + 2), width];
            Pattern::neighborhood(size, [dice.below(9), dice.below(width)])
        }
        9 if depth > 0 => {
            let lengths = lengths(dice);
            Pattern::packed(
                lengths.clone(),
                lengths,
                Pattern::window(dice.below(tokens), 0).unwrap(),
            )
        }
        9 => Pattern::blocks_dilated(dice.between(1, tokens / 4), [dice.between(1, 4)]),
        _ => Pattern::hierarchical([
            Level { window: dice.below(100), stride: 1, grain: 1 },
            Level {
                window: dice.below(tokens),
                stride: dice.between(1, 9),
                grain: dice.between(1, 99),
            },
        ]),
    };
    pattern.unwrap()
}

/// The blocks of a row with their masks, `None` for Full ones.
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
