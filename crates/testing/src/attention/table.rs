//! The cases that every kernel has to get right, by name.
//!
//! Not the product of all axes, which would take days: each kind of pattern once, each value of
//! every other axis at least once, and together what is known to be awkward together (lengths one
//! below and above a block, dims that no vector divides, several heads on one key head, queries
//! before the first key). [`AttentionCase::from_seed`] covers the pairs.

use super::{AttentionCase, Axes, Sample, Table, Transform};
use crate::case::Steps;
use crate::rule::{Level, Rule};

/// The table.
pub fn attention_cases() -> Vec<AttentionCase> {
    let axes = [patterns(), heads(), few(), dims(), lengths(), batches(), blocks_and_maps()];
    [axes.concat(), scattered_blocks(), transforms(), sinks()].concat()
}

/// Rows of many Full blocks that don't touch, more than a key tile has keys, and the short last
/// one: blocks that are packed side by side.
fn scattered_blocks() -> Vec<AttentionCase> {
    let case = |name: &str, block: u64, dims: (usize, usize), transform: Transform| {
        let kept = |row: u64| (0..24).filter(|column| (column * 5 + row * 3) % 7 < 4).collect();
        let rows = (0..24).map(kept).collect();
        let chosen = Rule::Blocks { block, rows };
        let tail = Rule::Keys { from: 20 * block, to: 24 * block };
        let rule = Rule::And(vec![Rule::Causal, Rule::Or(vec![chosen, tail])]);
        let mut case = AttentionCase {
            heads_q: 4,
            heads_kv: 2,
            dim_k: dims.0,
            dim_v: dims.1,
            transform,
            ..AttentionCase::new(name, rule, 24 * block - 13)
        };
        case.layout.block = block as u32;
        case
    };
    let slopes = vec![0.5, 0.01, 0.03, 0.2];
    let dropped = Transform { dropout: Some((0.3, 7)), ..Transform::alibi(slopes) };
    vec![
        case("scattered blocks", 64, (37, 20), Transform::default()),
        case("scattered blocks, additions", 32, (64, 64), dropped.clone()),
        case("scattered small blocks", 16, (16, 24), dropped),
    ]
}

fn local() -> Rule {
    let near = Rule::Or(vec![Rule::Window { left: 40, right: 0 }, Rule::Sinks { n: 4 }]);
    Rule::And(vec![Rule::Causal, near])
}

fn patterns() -> Vec<AttentionCase> {
    let fine = Level { window: 20, stride: 1, grain: 1 };
    let coarse = Level { window: 200, stride: 4, grain: 8 };
    let not = |rule| Rule::Not(Box::new(rule));
    let rules = [
        ("full", Rule::Full),
        ("causal", Rule::Causal),
        ("window", Rule::Window { left: 30, right: 70 }),
        ("only itself", Rule::Window { left: 0, right: 0 }),
        ("sliding_window", Rule::SlidingWindow { width: 65 }),
        ("sinks", Rule::Sinks { n: 5 }),
        ("global_tokens", Rule::GlobalTokens { n: 3 }),
        ("dilated", Rule::Dilated { segment: 90, rate: 3, offset: 1 }),
        ("strided", Rule::Strided { stride: 7 }),
        ("hierarchical", Rule::Hierarchical(vec![fine, coarse])),
        ("documents", Rule::Documents(vec![50, 0, 1, 130, 76])),
        ("blocks_dilated", Rule::BlocksDilated { block: 16, rates: vec![2, 5] }),
        ("butterfly", Rule::Butterfly { block: 16 }),
        ("random", Rule::Random { block: 16, per_row: 3, blocks: 17, seed: 5 }),
        ("blocks", Rule::Blocks { block: 64, rows: vec![vec![0, 3], vec![], vec![1, 2], vec![4]] }),
        ("nothing", not(Rule::Full)),
        ("anything but", not(Rule::Or(vec![Rule::Causal, Rule::Strided { stride: 3 }]))),
        ("local", local()),
        (
            "packed",
            Rule::Packed {
                queries: vec![100, 57, 0, 100],
                keys: vec![100, 57, 0, 100],
                inner: Box::new(Rule::Causal),
            },
        ),
        (
            "many at once",
            Rule::And(vec![
                Rule::Or(vec![Rule::SlidingWindow { width: 33 }, Rule::GlobalTokens { n: 2 }]),
                Rule::Or(vec![Rule::Causal, Rule::Sinks { n: 9 }]),
                not(Rule::Strided { stride: 5 }),
            ]),
        ),
    ];
    let mut cases: Vec<_> =
        rules.into_iter().map(|(name, rule)| AttentionCase::new(name, rule, 257)).collect();
    for case in cases.iter_mut().skip(1).step_by(2) {
        case.axes = Axes::HeadToken;
    }
    cases
}

fn heads() -> Vec<AttentionCase> {
    let grouped = |name: &str, rule, heads_q, heads_kv| AttentionCase {
        heads_q,
        heads_kv,
        dim_k: 16,
        dim_v: 24,
        ..AttentionCase::new(name, rule, 130)
    };
    vec![
        grouped("one head", Rule::Causal, 1, 1),
        grouped("three to one", Rule::Causal, 6, 2),
        grouped("eight to one", local(), 8, 1),
        grouped("eight to one, twice", Rule::Full, 16, 2),
        AttentionCase {
            per_head: vec![
                Rule::Causal,
                local(),
                Rule::Not(Box::new(Rule::Full)),
                Rule::Strided { stride: 3 },
                Rule::Causal,
                Rule::Full,
            ],
            ..grouped("one pattern per head", Rule::Causal, 6, 2)
        },
    ]
}

/// A few queries over a long cache, as in decoding: every number of them that a kernel may treat in
/// its own way, masks that start and end anywhere, blocks of every size.
fn few() -> Vec<AttentionCase> {
    let scattered = || {
        Rule::And(vec![
            Rule::Causal,
            Rule::Or(vec![
                Rule::Window { left: 333, right: 0 },
                Rule::Strided { stride: 3 },
                Rule::Sinks { n: 7 },
            ]),
        ])
    };
    let case = |name: &str, rule, queries, (heads_q, heads_kv), (dim_k, dim_v), block| {
        let mut case = AttentionCase {
            heads_q,
            heads_kv,
            dim_k,
            dim_v,
            ..AttentionCase::new(name, rule, 1_201)
        };
        (case.layout.tokens_q, case.layout.block) = (queries, block);
        case
    };
    vec![
        case("one query", Rule::Causal, 1, (4, 1), (64, 64), 64),
        case("one query, odd dims", scattered(), 1, (6, 2), (19, 7), 64),
        case("two queries, small blocks", scattered(), 2, (3, 3), (33, 48), 16),
        case("three queries, large blocks", scattered(), 3, (5, 1), (32, 16), 256),
        case("sixteen queries", scattered(), 16, (2, 2), (8, 64), 64),
        case("seventeen rows", scattered(), 17, (2, 2), (16, 16), 32),
        AttentionCase {
            transform: Transform::alibi(vec![0.01, 0.2, 0.3, 0.04]),
            ..case("few with ALiBi", scattered(), 4, (4, 2), (24, 24), 128)
        },
        AttentionCase {
            transform: Transform::softcap(2.0),
            padding: vec![0..900, 300..1_201],
            batch: 2,
            ..case("few with softcap", scattered(), 5, (3, 1), (40, 40), 64)
        },
        AttentionCase {
            per_head: vec![Rule::Causal, scattered(), Rule::Causal, scattered()],
            ..case("few, one pattern per head", Rule::Causal, 3, (4, 2), (16, 32), 64)
        },
    ]
}

fn dims() -> Vec<AttentionCase> {
    let pairs = [
        (1, 1),
        (7, 7),
        (8, 8),
        (16, 16),
        (33, 33),
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (192, 192),
        (256, 256),
        (192, 128),
        (1, 65),
        (65, 1),
        (256, 8),
        (31, 17),
    ];
    let rules = [Rule::Causal, Rule::Full, local()];
    let case = |(n, (dim_k, dim_v)): (usize, (usize, usize))| AttentionCase {
        // Heads of one number each have as many values as keys: more of them, for a mean.
        heads_q: if dim_v < 8 { 8 } else { 2 },
        heads_kv: if dim_v < 8 { 8 } else { 2 },
        dim_k,
        dim_v,
        axes: if n.is_multiple_of(2) { Axes::HeadToken } else { Axes::TokenHead },
        ..AttentionCase::new(format!("dims {dim_k} and {dim_v}"), rules[n % 3].clone(), 127)
    };
    pairs.into_iter().enumerate().map(case).collect()
}

fn lengths() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    for (n, tokens) in [0, 1, 2, 3, 63, 64, 65, 127, 128, 251, 521].into_iter().enumerate() {
        let rule = if n.is_multiple_of(2) { Rule::Causal } else { Rule::Full };
        let axes = if n % 3 == 0 { Axes::HeadToken } else { Axes::TokenHead };
        let name = format!("{tokens} tokens");
        cases.push(AttentionCase { axes, ..AttentionCase::new(name, rule, tokens) });
    }
    let pairs =
        [(1, 257), (257, 1), (2, 65), (65, 2), (0, 5), (5, 0), (63, 521), (521, 63), (16, 1031)];
    for (queries, keys) in pairs {
        let mut case = AttentionCase::new(format!("{queries} x {keys}"), Rule::Causal, keys);
        case.layout.tokens_q = queries;
        cases.push(case);
    }
    let long = |tokens: u64, rule, every| AttentionCase {
        heads_q: 1,
        heads_kv: 1,
        sample: Sample::one_in(every),
        ..AttentionCase::new(format!("{tokens} tokens, {rule}"), rule, tokens)
    };
    cases.push(long(1021, Rule::Causal, 16));
    cases.push(long(2039, Rule::Full, 32));
    cases.push(long(2503, local(), 16));
    cases.push(long(4093, Rule::SlidingWindow { width: 200 }, 16));
    cases.push(long(4093, Rule::GlobalTokens { n: 2 }, 64));
    cases.push(AttentionCase {
        name: "4093 tokens, dense".into(),
        dim_k: 16,
        dim_v: 16,
        ..long(4093, Rule::Full, 32)
    });
    cases
}

fn batches() -> Vec<AttentionCase> {
    let batch = |batch, axes| AttentionCase {
        batch,
        axes,
        heads_q: 3,
        heads_kv: 1,
        dim_k: 20,
        dim_v: 12,
        ..AttentionCase::new(format!("batch {batch}"), Rule::Causal, 70)
    };
    vec![
        batch(0, Axes::TokenHead),
        batch(3, Axes::TokenHead),
        batch(3, Axes::HeadToken),
        AttentionCase {
            name: "padding".into(),
            padding: vec![0..70, 13..70, 0..41, 30..30],
            ..batch(4, Axes::HeadToken)
        },
        AttentionCase {
            name: "padding and one pattern per head".into(),
            padding: vec![5..70, 0..66],
            per_head: vec![Rule::Full, local(), Rule::Causal],
            ..batch(2, Axes::TokenHead)
        },
    ]
}

fn blocks_and_maps() -> Vec<AttentionCase> {
    let mut cases = Vec::new();
    for block in [16, 32, 64, 128, 256, 17, 100] {
        for rule in [Rule::Causal, local(), Rule::Strided { stride: 3 }] {
            let mut case = AttentionCase::new(format!("block {block}, {rule}"), rule, 300);
            case.layout.block = block as u32;
            (case.heads_q, case.heads_kv) = (2, 1);
            cases.push(case);
        }
    }
    let steps = |start, step, len| Steps { start, step, len };
    let mut zigzag = AttentionCase::new("zigzag shard", local(), 400);
    zigzag.layout.query_map = Some(vec![steps(50, 1, 50), steps(300, 1, 50)]);
    let mut striped = AttentionCase::new("striped shards", Rule::Causal, 401);
    striped.layout.query_map = Some(vec![steps(1, 4, 100)]);
    striped.layout.key_map = Some(vec![steps(3, 4, 100)]);
    let mut residues = AttentionCase::new("by residue", Rule::Strided { stride: 3 }, 300);
    let by_residue = Some((0..3).map(|r| steps(r, 3, 100)).collect::<Vec<_>>());
    residues.layout.query_map = by_residue.clone();
    residues.layout.key_map = by_residue;
    let mut cache = AttentionCase::new("rolling cache", local(), 96);
    cache.layout.tokens_q = 5;
    cache.layout.query_offset = Some(1091);
    cache.layout.key_offset = Some(1000);
    let mut unstored = AttentionCase::new(
        "masks made on demand",
        Rule::Dilated { segment: 150, rate: 4, offset: 2 },
        300,
    );
    unstored.layout.mask_bytes = Some(0);
    cases.extend([zigzag, striped, residues, cache, unstored]);
    cases
}

fn transforms() -> Vec<AttentionCase> {
    let slopes = |heads: usize| (0..heads).map(|h| 0.5_f32.powi(h as i32 + 1)).collect();
    let with = |name: &str, transform| AttentionCase {
        transform,
        heads_q: 4,
        heads_kv: 2,
        lse_gradient: true,
        ..AttentionCase::new(name, local(), 150)
    };
    let mut sharded = with("alibi in a shard", Transform::alibi(slopes(4)));
    sharded.layout.query_map = Some(vec![Steps { start: 2, step: 3, len: 40 }]);
    sharded.layout.key_map =
        Some(vec![Steps { start: 100, step: 1, len: 30 }, Steps { start: 7, step: 1, len: 31 }]);
    let mut decode = with("alibi, decoding", Transform::alibi(slopes(4)));
    decode.layout.tokens_q = 1;
    let packed = |name: &str, queries: &[u64], keys: &[u64], inner: Rule, transform| {
        let inner = Box::new(inner);
        let rule = Rule::Packed { queries: queries.into(), keys: keys.into(), inner };
        let mut case = with(name, transform);
        case.layout.rule = rule;
        case.layout.tokens_q = queries.iter().sum();
        case.layout.tokens_k = keys.iter().sum();
        case
    };
    let dropout = |p| Transform { dropout: Some((p, 0x5EED)), ..Transform::default() };
    let table = |left, right| Transform {
        table: Some(Table::normal(4, left, right, 11)),
        ..Transform::default()
    };
    let all = || Transform {
        softcap: Some(3.0),
        slopes: slopes(4),
        dropout: Some((0.3, 7)),
        ..table(20, 5)
    };
    let mut few = with("all additions, decoding", all());
    few.layout.tokens_q = 3;
    let mut striped = with("dropout in a shard", dropout(0.2));
    striped.layout.query_map = Some(vec![Steps { start: 2, step: 3, len: 40 }]);
    vec![
        packed(
            "alibi in sequences",
            &[10, 10, 0, 90],
            &[10, 50, 7, 90],
            Rule::Full,
            Transform::alibi(slopes(4)),
        ),
        packed(
            "alibi in sequences, decoding",
            &[1; 9],
            &[40; 9],
            Rule::Causal,
            Transform::alibi(slopes(4)),
        ),
        packed("all additions in sequences", &[70, 33], &[80, 33], local(), all()),
        with("a table", table(40, 30)),
        with("a table of one distance", table(0, 0)),
        with("a table of all distances", table(200, 200)),
        AttentionCase { heads_kv: 4, ..with("a table, causal", table(100, 0)) },
        with("dropout", dropout(0.1)),
        with("much dropout", dropout(0.9)),
        with("all additions", all()),
        few,
        striped,
        with("dlse", Transform::default()),
        AttentionCase { scale: Some(0.3), ..with("a scale of its own", Transform::default()) },
        AttentionCase { scale: Some(-0.2), ..with("a negative scale", Transform::default()) },
        AttentionCase { scale: Some(0.0), ..with("scale zero", Transform::default()) },
        with("softcap", Transform::softcap(30.0)),
        with("a low softcap", Transform::softcap(0.5)),
        with("alibi", Transform::alibi(slopes(4))),
        sharded,
        decode,
    ]
}

/// Sink logits: rows with few keys, many and none, heads without one, rows that are split, and
/// logits far above and below all scores.
fn sinks() -> Vec<AttentionCase> {
    let with = |name: &str, rule, logits: &[f32]| AttentionCase {
        sink_logits: Some(logits.to_vec()),
        heads_q: logits.len(),
        heads_kv: logits.len().div_ceil(2),
        lse_gradient: true,
        ..AttentionCase::new(name, rule, 150)
    };
    let four = [0.5, -1.0, 3.0, 0.0];
    let none = f32::NEG_INFINITY;
    let packed = Rule::Packed {
        queries: vec![40, 0, 67, 43],
        keys: vec![30, 10, 90, 20],
        inner: Box::new(Rule::Causal),
    };
    let mut decode = with("sink logits, decoding", Rule::Causal, &four);
    (decode.layout.tokens_q, decode.layout.tokens_k) = (1, 1_201);
    // Too little to be split: the decode kernel finishes these rows itself.
    let mut few = with("sink logits, few queries", local(), &four);
    (few.layout.tokens_q, few.layout.tokens_k) = (3, 200);
    let mut split = with("sink logits of split rows", Rule::GlobalTokens { n: 2 }, &[2.0, 8.0]);
    (split.layout.tokens_q, split.layout.tokens_k) = (4_093, 4_093);
    split.sample = Sample::one_in(64);
    let mut more_queries = with("sink logits, more queries than keys", Rule::Causal, &four);
    more_queries.layout.tokens_q = 201;
    vec![
        with("sink logits", local(), &four),
        with("sink logits of packed sequences", packed, &four),
        with("sink logits alone", Rule::Not(Box::new(Rule::Full)), &[0.5, none]),
        with("heads without sink logits", Rule::Causal, &[none, 1.0, none, -2.0]),
        with("large sink logits", local(), &[30.0, -40.0, 12.0, -90.0]),
        AttentionCase {
            batch: 3,
            padding: vec![0..150, 13..77, 30..30],
            dim_k: 19,
            dim_v: 33,
            axes: Axes::HeadToken,
            ..with(
                "sink logits, padding, odd dims",
                Rule::Causal,
                &[1.0, 0.25, -0.5, 2.0, 0.0, 1.5],
            )
        },
        AttentionCase {
            transform: Transform::softcap(2.0),
            scale: Some(0.4),
            ..with("sink logits and softcap", local(), &four)
        },
        AttentionCase {
            transform: Transform::alibi(vec![0.5, 0.25, 0.125, 0.0625]),
            ..with("sink logits and ALiBi", Rule::Causal, &four)
        },
        AttentionCase {
            per_head: vec![Rule::Causal, local(), Rule::Not(Box::new(Rule::Full)), Rule::Full],
            lse_gradient: false,
            ..with("sink logits, one pattern per head", Rule::Causal, &four)
        },
        decode,
        few,
        split,
        more_queries,
    ]
}
