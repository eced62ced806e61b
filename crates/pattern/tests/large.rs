//! Layouts too large to compare at every pair: counts against closed forms, and samples against the
//! oracle.

use longspan_pattern::{BlockSize, Layout, Pattern, Positions, Progression, RunKind, Shape};
use longspan_testing::{Level, Rule};

const SECOND: &str = "causal & (window(1024, 0) | sinks(64))";

fn layout(text: &str, shape: &Shape) -> Layout {
    Layout::compile(&text.parse().unwrap(), shape).unwrap()
}

fn pairs(text: &str, tokens: usize) -> u128 {
    layout(text, &Shape::new(tokens, tokens)).counts().unwrap().active_pairs
}

/// Number of keys that query `q` attends to in the second pattern.
fn second(q: u128) -> u128 {
    if q <= 1024 { q + 1 } else { 1025 + (q - 1024).min(64) }
}

#[test]
fn counts_of_million_rows_equal_closed_forms() {
    let n = 1u128 << 26;
    let tokens = 1 << 26;
    assert_eq!(pairs("full", tokens), n * n);
    assert_eq!(pairs("causal", tokens), n * (n + 1) / 2);
    assert_eq!(pairs("!causal", tokens), n * (n - 1) / 2);
    let expected = (0..2048).map(second).sum::<u128>() + (n - 2048) * (1025 + 64);
    assert_eq!(pairs(SECOND, tokens), expected);
    assert_eq!(pairs("global_tokens(100)", tokens), 2 * 100 * n - 100 * 100);
    assert_eq!(pairs("window(10, 20)", tokens), n * 31 - (10 * 11 / 2) - (20 * 21 / 2));
}

#[test]
fn counts_of_odd_lengths_equal_closed_forms() {
    let n = 1_000_003u128;
    let tokens = 1_000_003;
    // Number of `0..n` that are `≡ r`.
    let class = |r: u128, modulus: u128| n / modulus + u128::from(r < n % modulus);
    assert_eq!(pairs("strided(3)", tokens), (0..3).map(|r| class(r, 3).pow(2)).sum());
    assert_eq!(pairs("strided(77)", tokens), (0..77).map(|r| class(r, 77).pow(2)).sum());
    assert_eq!(
        pairs("strided(6) & strided(10)", tokens),
        (0..30).map(|r| class(r, 30).pow(2)).sum::<u128>()
    );
    // 488 whole segments of 2048 and one of 579.
    let of = |segment: u128| (segment - 1).div_ceil(3);
    assert_eq!(pairs("dilated(2048, 3, 1)", tokens), 488 * of(2048).pow(2) + of(579).pow(2));
    // Two disjoint levels: all keys near, the first 16 of every 128 far.
    let near = |q: u128| (q + 100).min(n - 1) - q.saturating_sub(100) + 1;
    let mut far = 0;
    for q in 0..n {
        let (low, high) = (q.saturating_sub(1000), (q + 1000).min(n - 1));
        let active_below = |k: u128| k / 128 * 16 + (k % 128).min(16);
        let between = |a: u128, b: u128| active_below(b + 1) - active_below(a);
        far += between(low, high) - between(q.saturating_sub(100), (q + 100).min(n - 1));
        far += near(q);
    }
    assert_eq!(pairs("hierarchical([(100, 1, 1), (1000, 8, 16)])", tokens), far);
}

#[test]
fn counts_of_block_primitives_equal_closed_forms() {
    let blocks = 1u128 << 14;
    let tokens = 1 << 20;
    let block = 64u128 * 64;
    assert_eq!(pairs("butterfly(64)", tokens), blocks * 15 * block);
    assert_eq!(pairs("random(64, 5, 16384, 3)", tokens), blocks * 5 * block);
    assert_eq!(pairs("random(64, 16380, 16384, 3)", tokens), blocks * 16380 * block);
    assert_eq!(pairs("random(32, 5, 32768, 3)", tokens), 2 * blocks * 5 * block / 4);
    assert_eq!(pairs("blocks_dilated(64, [1, 100])", tokens), {
        (blocks + 2 * (blocks - 1) + 2 * (blocks - 100)) * block
    });
    let lengths: Vec<u64> = (0..100_000).map(|i| i * i % 37).collect();
    let tokens = lengths.iter().sum::<u64>() as usize;
    let shape = Shape::new(tokens, tokens);
    let squares = lengths.iter().map(|&l| u128::from(l * l)).sum::<u128>();
    let documents = Pattern::documents(lengths.clone()).unwrap();
    assert_eq!(
        Layout::compile(&documents, &shape).unwrap().counts().unwrap().active_pairs,
        squares
    );
    let triangles = lengths.iter().map(|&l| u128::from(l * (l + 1) / 2)).sum::<u128>();
    let causal = Layout::compile(&(documents & Pattern::causal()), &shape).unwrap();
    assert_eq!(causal.counts().unwrap().active_pairs, triangles);
    let packed = Pattern::packed(lengths.clone(), lengths, Pattern::causal()).unwrap();
    let packed = Layout::compile(&packed, &shape).unwrap();
    assert_eq!(packed.counts().unwrap().active_pairs, triangles);
    assert_eq!(packed.hash().unwrap(), causal.hash().unwrap());
}

#[test]
fn a_rank_of_thousand_compiles_its_own_rows() {
    let giga = 1usize << 30;
    let own = giga / 1024;
    for rank in [0, 511, 1023] {
        let first = rank * own;
        let map = Positions::range(first as i64, own).unwrap();
        let shape = Shape::new(giga, giga).query_map(map);
        let causal = layout("causal", &shape);
        let (a, n) = (first as u128, own as u128);
        assert_eq!(causal.counts().unwrap().active_pairs, n * (2 * a + n + 1) / 2);
        let sparse = layout(SECOND, &shape);
        let expected: u128 = (a..a + n).map(second).sum();
        assert_eq!(sparse.counts().unwrap().active_pairs, expected);
        assert!(causal.bytes().max(sparse.bytes()) < 1 << 20);
        // Equal to the same rows of the whole sequence.
        let rows = first / 64..(first + own) / 64;
        let whole =
            layout(SECOND, &Shape::new(giga, giga).rows(rows.start as u64..rows.end as u64));
        for row in 0..own as u32 / 64 {
            assert_eq!(sparse.row(row), whole.row(row + rows.start as u32));
        }
    }
}

#[test]
fn a_striped_rank_of_thousand() {
    let giga = 1usize << 30;
    let map = Positions::new([Progression { start: 5, step: 1024, len: 1 << 20 }]).unwrap();
    let shape = Shape::new(giga, giga).query_map(map.clone()).key_map(map);
    // Local keys only, every 1024th: the window contains the query itself and the previous key.
    let own = layout("causal & window(1024, 0)", &shape);
    assert_eq!(own.counts().unwrap().active_pairs, 2 * (1 << 20) - 1);
}

/// Compares a layout with the oracle around every edge of some of its rows.
fn sample(rule: &Rule, shape: &Shape, first_query: i64, first_key: i64) {
    let layout = layout(&rule.to_string(), shape);
    let block = layout.block().get();
    let mut masks = layout.masks();
    let mut active = 0;
    for row in layout.rows() {
        let queries = layout.row_tokens(row);
        let mut columns = vec![0, layout.columns() / 3, layout.columns() - 1];
        for run in layout.row(row) {
            columns.extend([run.start.saturating_sub(1), run.start, run.end() - 1, run.end()]);
        }
        columns.sort_unstable();
        columns.dedup();
        columns.retain(|&column| column < layout.columns());
        // The ends of the row, and a sample in between.
        let step = (columns.len() / 12).max(1);
        for column in columns.into_iter().step_by(step) {
            let run = layout.row(row).iter().find(|r| (r.start..r.end()).contains(&column));
            let keys = layout.column_tokens(column);
            let bits = run.map(|run| masks.get(row, column, run).to_vec());
            for i in queries.clone() {
                for j in keys.clone() {
                    let (query, key) = (first_query + i as i64, first_key + j as i64);
                    let (i, j) = (i % block, j % block);
                    let words = layout.block().words();
                    let got =
                        bits.as_ref().is_some_and(|b| b[i * words + j / 64] >> (j % 64) & 1 == 1);
                    assert_eq!(got, rule.allows(query, key), "{rule} at ({query}, {key})");
                    active += u32::from(got);
                }
            }
            assert!(run.is_none_or(|run| run.kind() == RunKind::Full || bits.is_some()));
        }
    }
    assert!(active > 0, "{rule}: no active pair");
}

#[test]
fn positions_beyond_32_bits() {
    let tokens = 1usize << 39;
    let block = BlockSize::new(256).unwrap();
    let whole = Shape::new(tokens, tokens).block(block);
    let second = Rule::And(vec![
        Rule::Causal,
        Rule::Or(vec![Rule::Window { left: 5000, right: 0 }, Rule::Sinks { n: 300 }]),
    ]);
    let levels = [(700, 1, 1), (1 << 35, 1 << 20, 1000)];
    let levels = levels.map(|(window, stride, grain)| Level { window, stride, grain });
    let rules = [
        Rule::Causal,
        second.clone(),
        Rule::Not(Box::new(second)),
        Rule::Window { left: 1 << 38, right: 1 << 37 },
        Rule::Dilated { segment: (1 << 33) + 17, rate: 200, offset: 5 },
        Rule::Strided { stride: (1 << 31) + 11 },
        Rule::Hierarchical(levels.to_vec()),
        Rule::Documents(vec![1 << 38, 12_345, (1 << 38) - 12_345]),
        Rule::Packed {
            queries: vec![1 << 38, 12_345, (1 << 38) - 12_345],
            keys: vec![1 << 38, 12_345, (1 << 38) - 12_345],
            inner: Box::new(Rule::Window { left: 300, right: 1 << 36 }),
        },
        Rule::BlocksDilated { block: 1000, rates: vec![1, 1 << 27] },
        Rule::Butterfly { block: 1 << 14 },
        Rule::Random { block: 100, per_row: 3, blocks: 1 << 32, seed: 9 },
        Rule::Blocks { block: 1 << 37, rows: vec![vec![0], vec![0, 1], vec![2], vec![0, 3]] },
    ];
    for rule in rules {
        for rows in [0..2, (1 << 30) - 1..(1 << 30) + 1, (1 << 31) - 2..1 << 31] {
            sample(&rule, &whole.clone().rows(rows), 0, 0);
        }
    }
    // A rolling KV cache: few keys, at positions beyond 32 bits.
    let far = 1i64 << 50;
    let rolling = Shape::new(1000, 5000).key_offset(far).query_offset(far + 4000);
    sample(&Rule::Window { left: 900, right: 3 }, &rolling, far + 4000, far);
    sample(&Rule::Strided { stride: 7 }, &rolling, far + 4000, far);
}

#[test]
fn maps_with_maximum_steps() {
    let tokens = 1usize << 60;
    let steps = |start, step, len| Progression { start, step, len };
    let near = steps(100, 1, 200);
    let far = steps(7, 1 << 51, 300);
    let two = steps(0, (1 << 60) - 1, 2);
    let rules = [
        Rule::Causal,
        Rule::Window { left: 1 << 58, right: 50 },
        Rule::Strided { stride: 1 << 40 },
        Rule::Strided { stride: 3 },
        Rule::Dilated { segment: 1 << 59, rate: 2, offset: 1 },
        Rule::Hierarchical(vec![Level { window: 1 << 61, stride: 1 << 30, grain: 1 << 31 }]),
        Rule::BlocksDilated { block: 1 << 55, rates: vec![1, 2] },
        Rule::Butterfly { block: 1 << 50 },
        Rule::Not(Box::new(Rule::GlobalTokens { n: 150 })),
    ];
    for rule in &rules {
        for queries in [near, far, two] {
            for keys in [vec![near], vec![far, two], vec![two, near, far]] {
                let map = |map: &[Progression]| Positions::new(map.iter().copied()).unwrap();
                let shape = Shape::new(tokens, tokens).query_map(map(&[queries]));
                let shape = shape.key_map(map(&keys)).block(BlockSize::MIN);
                let layout = layout(&rule.to_string(), &shape);
                check_all(&layout, rule, &map(&[queries]), &map(&keys));
            }
        }
    }
}

/// Compares every pair of a small layout with the oracle.
fn check_all(layout: &Layout, rule: &Rule, queries: &Positions, keys: &Positions) {
    let mut active = vec![vec![false; keys.len()]; queries.len()];
    let mut masks = layout.masks();
    for row in layout.rows() {
        for run in layout.row(row) {
            for column in run.start..run.end() {
                let words = masks.get(row, column, run);
                for (i, query) in layout.row_tokens(row).enumerate() {
                    for (j, key) in layout.column_tokens(column).enumerate() {
                        active[query][key] = words[i] >> j & 1 == 1;
                    }
                }
            }
        }
    }
    for i in 0..queries.len() {
        for j in 0..keys.len() {
            let (query, key) = (queries.get(i).unwrap(), keys.get(j).unwrap());
            let active = active[i][j];
            assert_eq!(active, rule.allows(query, key), "{rule} at ({query}, {key})");
        }
    }
}

#[test]
fn sixteen_million_tokens_transpose() {
    let layout = layout("causal", &Shape::new(1 << 24, 1 << 24));
    let transpose = layout.transpose().unwrap();
    assert_eq!(transpose.run_count(), layout.run_count());
    for column in [0, 1, 1000, (1 << 18) - 1] {
        let runs = transpose.column(column);
        assert_eq!((runs[0].start, runs[0].len, runs[0].kind()), (column, 1, RunKind::Partial));
        match runs.get(1) {
            Some(run) => assert_eq!((run.start, run.end()), (column + 1, 1 << 18)),
            None => assert_eq!(column, (1 << 18) - 1),
        }
    }
}
