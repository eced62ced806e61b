//! The same bits, whatever the number of threads and however often.

use half::{bf16, f16};
use longspan::{Isa, Order};
use longspan_testing::{AttentionCase, Rule, Table, Transform, Values};

use crate::common::*;

const PLACEMENT: Placement = Placement::Contiguous(Order::Bshd);
const THREADS: [usize; 5] = [1, 2, 3, 8, 17];

/// Work that is shared out in different ways: many light rows, a few heavy ones, one row cut into
/// parts, heavy columns, several heads on one key head.
///
/// All of them are more than what a call runs on one thread for being small.
fn cases() -> Vec<AttentionCase> {
    let one_head = |name: &str, rule, tokens| AttentionCase {
        heads_q: 1,
        heads_kv: 1,
        ..AttentionCase::new(name, rule, tokens)
    };
    let window = Rule::And(vec![Rule::Causal, Rule::Window { left: 200, right: 0 }]);
    let mut decode = one_head("decode", Rule::Causal, 9001);
    decode.layout.tokens_q = 1;
    let mut few = AttentionCase { heads_q: 4, ..one_head("16 queries", Rule::Causal, 4001) };
    few.layout.tokens_q = 16;
    let cases = vec![
        one_head("window", window.clone(), 2100),
        one_head("global tokens", Rule::GlobalTokens { n: 3 }, 4200),
        AttentionCase { heads_q: 8, heads_kv: 2, ..decode.clone() },
        AttentionCase {
            heads_q: 3,
            heads_kv: 3,
            per_head: vec![Rule::Causal, Rule::GlobalTokens { n: 70 }, Rule::Sinks { n: 100 }],
            ..one_head("one pattern per head", Rule::Full, 700)
        },
        one_head("causal", Rule::Causal, 1100),
        one_head("strided", Rule::Strided { stride: 7 }, 800),
        AttentionCase { heads_q: 8, heads_kv: 2, batch: 2, ..one_head("grouped", window, 300) },
        decode,
        few,
        // Long enough for a row's share of all work to decide whether it is cut.
        AttentionCase { dim_k: 4, dim_v: 4, ..one_head("long", Rule::Causal, 4200) },
        AttentionCase {
            transform: Transform::alibi(vec![0.01]),
            lse_gradient: true,
            ..one_head("alibi", Rule::Causal, 1100)
        },
        AttentionCase {
            heads_q: 4,
            heads_kv: 2,
            transform: Transform {
                softcap: Some(5.0),
                slopes: vec![0.1; 4],
                table: Some(Table::normal(4, 300, 20, 9)),
                dropout: Some((0.2, 1)),
            },
            ..one_head("all additions", Rule::SlidingWindow { width: 500 }, 1300)
        },
        AttentionCase {
            heads_q: 3,
            sink_logits: Some(vec![1.0, 0.0, 4.0]),
            lse_gradient: true,
            ..one_head("sink logits", Rule::SlidingWindow { width: 300 }, 1100)
        },
    ];
    short(cases, AttentionCase::sizes).collect()
}

#[track_caller]
fn same(a: &Values<f32>, b: &Values<f32>, what: &str) {
    let pairs = [
        ("out", &a.out, &b.out),
        ("lse", &a.lse, &b.lse),
        ("dq", &a.dq, &b.dq),
        ("dk", &a.dk, &b.dk),
        ("dv", &a.dv, &b.dv),
        ("dsink_logits", &a.dsink_logits, &b.dsink_logits),
        ("dbias_table", &a.dbias_table, &b.dbias_table),
        ("dalibi_slopes", &a.dalibi_slopes, &b.dalibi_slopes),
    ];
    for (name, a, b) in pairs {
        let differing = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert_eq!(differing, 0, "{differing} of {} numbers of {name} differ: {what}", a.len());
        assert!(a.iter().all(|x| x.is_finite()), "{name}: {what}");
    }
}

fn check_threads<E: Number>(isas: &[Isa]) {
    for case in cases() {
        let tensors = TensorsOf::<E>::of(&case.unmasked(), PLACEMENT);
        for &isa in isas {
            let run = |threads| {
                let attention = attention(&case, isa, threads);
                Run { attention: &attention, tensors: &tensors, results: PLACEMENT }.both()
            };
            let one = run(1);
            for threads in THREADS {
                let what = format!("{threads} threads, {isa} {} {case}", E::TYPE);
                same(&one, &run(threads), &what);
            }
        }
    }
}

#[test]
fn any_number_of_threads() {
    check_threads::<f32>(&Isa::available());
}

/// Vectors and the matrix unit, where there is one. Work is shared out by the layout alone, and
/// plain Rust takes longest: f32 has it.
#[test]
fn any_number_of_threads_for_bf16() {
    let isas = Isa::available();
    check_threads::<bf16>(&isas[isas.len().saturating_sub(2)..]);
}

#[test]
fn any_number_of_threads_for_f16() {
    check_threads::<f16>(&[Isa::best()]);
}

fn check_repeats<E: Number>(times: usize) {
    for case in cases().into_iter().take(4) {
        let tensors = TensorsOf::<E>::of(&case.unmasked(), PLACEMENT);
        let runs: Vec<_> = THREADS.map(|threads| attention(&case, Isa::best(), threads)).into();
        let run = |n: usize| {
            let attention = &runs[n % runs.len()];
            Run { attention, tensors: &tensors, results: PLACEMENT }.both()
        };
        let first = run(0);
        for n in 1..=times {
            same(&first, &run(n), &format!("repeat {n}, {} {case}", E::TYPE));
        }
    }
}

#[test]
fn a_hundred_times() {
    check_repeats::<f32>(100);
}

#[test]
fn again_and_again_in_bf16() {
    check_repeats::<bf16>(25);
}

/// The order of the axes in memory changes nothing, nor do gaps.
fn check_orders<E: Number>() {
    for case in cases().into_iter().take(5) {
        let problem = case.unmasked();
        let attention = attention(&case, Isa::best(), 2);
        let run = |placement| {
            let tensors = TensorsOf::<E>::of(&problem, placement);
            Run { attention: &attention, tensors: &tensors, results: placement }.both()
        };
        let first = run(PLACEMENT);
        for order in [Order::Bshd, Order::Bhsd] {
            for placement in [Placement::Contiguous(order), Placement::Gaps(order)] {
                same(&first, &run(placement), &format!("{placement:?}, {} {case}", E::TYPE));
            }
        }
    }
}

#[test]
fn any_order_of_axes() {
    check_orders::<f32>();
    check_orders::<bf16>();
    check_orders::<f16>();
}
