//! Layouts as components: `strided` and `dilated` terms computed in orders of residues, or not, against
//! the `f64` oracle by the rules of `right.rs`.

use half::{bf16, f16};
use longspan::{
    Attention, Dims, Hook, Inputs, Isa, Layout, Layouts, Order, PositionOrder, Shape, State, Tensor,
};
use longspan_testing::{AttentionCase, Axes, Rule, Table, Transform};

use crate::common::*;

fn strided(stride: u64) -> Rule {
    Rule::Strided { stride }
}

fn dilated(segment: u64, rate: u64, offset: u64) -> Rule {
    Rule::Dilated { segment, rate, offset }
}

fn window(left: u64, right: u64) -> Rule {
    Rule::Window { left, right }
}

fn or(rules: &[Rule]) -> Rule {
    Rule::Or(rules.to_vec())
}

fn and(rules: &[Rule]) -> Rule {
    Rule::And(rules.to_vec())
}

/// Every kind of term, of tokens and of options.
fn table() -> Vec<AttentionCase> {
    let new = AttentionCase::new;
    let both = or(&[strided(5), window(9, 3)]);
    let sparse = and(&[Rule::Causal, or(&[window(8, 0), strided(16), Rule::Sinks { n: 2 }])]);
    let lengths = |lengths: &[u64]| lengths.to_vec();
    let packed = |inner: Rule, queries: &[u64], keys: &[u64]| Rule::Packed {
        queries: lengths(queries),
        keys: lengths(keys),
        inner: Box::new(inner),
    };
    let mut sq = new("fewer queries", both.clone(), 211);
    sq.layout.tokens_q = 37;
    let mut decode = new("one query", strided(7), 503);
    decode.layout.tokens_q = 1;
    let mut few = new("few queries", sparse.clone(), 503);
    few.layout.tokens_q = 5;
    let mut more = new("more queries than keys", both.clone(), 90);
    more.layout.tokens_q = 140;
    let mut offsets = new("offsets", or(&[strided(6), dilated(32, 4, 1)]), 130);
    (offsets.layout.query_offset, offsets.layout.key_offset) = (Some(45), Some(-17));
    let mut packed_case = new(
        "packed with a table",
        packed(
            or(&[and(&[Rule::Causal, strided(3)]), window(2, 0)]),
            &[40, 0, 71, 30],
            &[40, 5, 90, 30],
        ),
        165,
    );
    packed_case.layout.tokens_q = 141;
    packed_case.transform = Transform {
        table: Some(Table {
            values: (0..2 * 13).map(|n| n as f32 * 0.1 - 1.0).collect(),
            left: 9,
            right: 3,
        }),
        ..Transform::default()
    };
    let head = |offset| and(&[Rule::Causal, or(&[window(7, 0), dilated(64, 4, offset)])]);
    vec![
        new("strided", strided(8), 150),
        new("prime stride and length", strided(13), 157),
        new("stride above the length", strided(500), 157),
        AttentionCase {
            batch: 3,
            heads_q: 6,
            axes: Axes::HeadToken,
            ..new("union, grouped heads", both.clone(), 157)
        },
        AttentionCase { lse_gradient: true, ..new("Sparse Transformer", sparse.clone(), 301) },
        new("dilated, long segments", dilated(600, 2, 1), 1_300),
        new("dilated, uneven segments", or(&[dilated(101, 3, 2), window(4, 4)]), 333),
        new(
            "dilated, short segments",
            or(&[dilated(48, 4, 0), dilated(48, 4, 3), window(4, 4)]),
            333,
        ),
        new("two orders", or(&[strided(9), dilated(120, 5, 2)]), 247),
        new("an intersection of orders", and(&[strided(4), strided(6)]), 247),
        new("documents", and(&[Rule::Documents(lengths(&[60, 0, 100, 71])), strided(4)]), 231),
        sq,
        decode,
        few,
        more,
        offsets,
        packed_case,
        AttentionCase {
            per_head: (0..4).map(head).collect(),
            heads_q: 4,
            batch: 2,
            ..new("per head", Rule::Full, 190)
        },
        AttentionCase {
            per_head: vec![strided(4), Rule::Causal, strided(4), both.clone()],
            heads_q: 4,
            heads_kv: 1,
            sink_logits: Some(vec![0.5, -1.0, 2.0, 0.0]),
            ..new("some heads", Rule::Full, 190)
        },
        AttentionCase {
            padding: vec![0..170, 40..190, 0..0],
            batch: 3,
            sink_logits: Some(vec![0.25, -0.5]),
            ..new("padding", sparse.clone(), 190)
        },
        AttentionCase {
            transform: Transform {
                softcap: Some(5.0),
                slopes: vec![0.05, 0.01],
                dropout: Some((0.25, 77)),
                ..Transform::default()
            },
            batch: 2,
            ..new("additions and dropout", both.clone(), 190)
        },
        AttentionCase { dim_k: 1, dim_v: 3, ..new("small dims", both, 100) },
        AttentionCase { dim_k: 129, dim_v: 65, ..new("large dims", sparse, 100) },
    ]
}

/// Whether any layout of a case has components.
fn has_components(case: &AttentionCase) -> bool {
    let split = |layout: &Layout| layout.split().unwrap().is_some();
    match layouts(case) {
        Layouts::One(layout) => split(&layout),
        Layouts::Each(set) => set.layouts().iter().any(|layout| split(layout)),
    }
}

#[test]
fn components_on_and_off() {
    let mut wrong = Vec::new();
    for case in table() {
        assert!(has_components(&case), "{case}");
        for split in [true, false] {
            wrong.extend(check_with::<f32>(&case, None, |attention| attention.split(split)));
        }
        wrong.extend(check_with::<bf16>(&case, None, |attention| attention.split(true)));
        wrong.extend(check_with::<f16>(&case, None, |attention| attention.split(true)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Random cases with components: any expression, maps of positions, strided tensors.
#[test]
fn random_components() {
    let (first, cases) = (number("LONGSPAN_SEED", 0), number("LONGSPAN_CASES", 400));
    let split = |attention: Attention| attention.split(true);
    let (mut count, mut wrong) = (0, Vec::new());
    for seed in first..first + cases {
        let case = AttentionCase::from_seed(seed);
        if has_components(&case) {
            count += 1;
            wrong.extend(check_with::<f32>(&case, None, split));
        }
    }
    assert!(count * 20 > cases, "only {count} of {cases} cases had components");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The same bits for any number of threads, and one component in natural order has the bits of its
/// layout.
#[test]
fn bits_do_not_depend_on_threads() {
    let placement = Placement::Contiguous(Order::Bhsd);
    for case in table() {
        let tensors = TensorsOf::<bf16>::of(&case.unmasked().rounded(bf16::PRECISION), placement);
        let run = |threads, split: Option<bool>| {
            let attention = attention(&case, Isa::best(), threads).split(split);
            let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
            let all = [got.out, got.lse, got.dq, got.dk, got.dv, got.dbias_table, got.dsink_logits];
            bits(&all.concat())
        };
        let one = run(1, Some(true));
        assert!([2, 3, 5].into_iter().all(|threads| run(threads, Some(true)) == one), "{case}");
    }
    let plain = AttentionCase::new("nothing to split", and(&[Rule::Causal, window(30, 0)]), 200);
    assert!(!has_components(&plain));
    let tensors = Tensors::of(&plain.unmasked(), placement);
    let run = |split: bool| {
        let attention = attention(&plain, Isa::best(), 1).split(split);
        bits(&Run { attention: &attention, tensors: &tensors, results: placement }.both().out)
    };
    assert_eq!(run(true), run(false));
}

/// A state that keys are added to in two halves.
#[test]
fn states_are_continued_by_components() {
    let dims = |tokens| Dims { batch: 1, tokens, heads: 2, dim: 8 };
    let make = |tokens: usize, shift: usize| {
        let data = (0..tokens * 16).map(|i| ((i + shift) as f32 * 0.7).sin()).collect();
        Tensor::<f32>::new(data, dims(tokens), Order::Bshd).unwrap()
    };
    let pattern = "strided(8) | window(3, 3)".parse().unwrap();
    let (q, k, v) = (make(200, 0), make(200, 5), make(200, 11));
    let mut state = State::empty(dims(200)).unwrap();
    for half in 0..2 {
        let shape = Shape::new(200, 100).query_offset(0).key_offset(100 * half as i64);
        let attention = Attention::new(Layout::compile(&pattern, &shape).unwrap()).split(true);
        let part = |x: &Tensor<f32>| {
            let data = x.as_slice()[half * 1_600..][..1_600].to_vec();
            Tensor::new(data, dims(100), Order::Bshd).unwrap()
        };
        let (k, v) = (part(&k), part(&v));
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        attention.extend(inputs, &mut state, Hook::none()).unwrap();
    }
    let joined = state.finish(Order::Bshd).unwrap();
    let whole = Attention::new(compile("strided(8) | window(3, 3)", 200, 200)).split(false);
    let whole = whole.forward(Inputs::new(q.view(), k.view(), v.view())).unwrap();
    let differ = |a: &f32, b: &f32| (a - b).abs() > 1e-6;
    let pairs = || joined.out.as_slice().iter().zip(whole.out.as_slice());
    assert!(!pairs().any(|(a, b)| differ(a, b)));
}

/// What the cost model chooses for the patterns that components are for, and those that they are not.
#[test]
fn components_where_they_pay() {
    let orders = |pattern: &str, tokens: usize| {
        let layout = compile(pattern, tokens, tokens);
        let split = layout.split().unwrap();
        split.map(|split| split.components().iter().map(|c| c.order()).collect::<Vec<_>>())
    };
    let residues = |modulus, segment| PositionOrder::Residues { modulus, segment };
    let natural = PositionOrder::Natural;
    assert_eq!(orders("window(5, 5)", 1_000), None);
    assert_eq!(orders("strided(64)", 4_096), Some(vec![residues(64, None)]));
    assert_eq!(orders("dilated(2048, 4)", 4_096), Some(vec![residues(4, Some(2_048))]));
    let both = orders("strided(64) | window(9, 9)", 4_000);
    assert_eq!(both, Some(vec![natural, residues(64, None), residues(64, None)]));
}
