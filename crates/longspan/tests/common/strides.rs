//! Strides of every kind against the oracle.

use longspan::{Attention, Isa};
use longspan_testing::{AttentionCase, Rule, Sample, naive, truth};

use super::buffer::{Number, Placement};
use super::run::{Run, TensorsOf, attention, check_with, measures};

/// Strides of every kind: gaps, backwards, spread out, the head dim outermost.
pub(crate) fn check_strides<E: Number>() {
    check_strides_with::<E>(|attention| attention);
}

/// The same with further options.
pub(crate) fn check_strides_with<E: Number>(options: fn(Attention) -> Attention) {
    let local = Rule::And(vec![Rule::Causal, Rule::Window { left: 50, right: 0 }]);
    let grouped = AttentionCase {
        batch: 2,
        heads_q: 4,
        heads_kv: 2,
        dim_k: 19,
        dim_v: 33,
        lse_gradient: true,
        ..AttentionCase::new("strided", local, 97)
    };
    let wide = AttentionCase { dim_k: 64, dim_v: 64, ..AttentionCase::new("wide", Rule::Full, 65) };
    let mut decode = AttentionCase::new("decode", Rule::Causal, 300);
    (decode.layout.tokens_q, decode.heads_kv, decode.heads_q) = (1, 1, 4);
    let mut wrong = Vec::new();
    for case in [grouped, wide, decode] {
        for placement in Placement::ALL {
            wrong.extend(check_with::<E>(&case, Some(placement), options));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Every tensor laid out in its own way, results in yet another.
pub(crate) fn check_mixed_strides<E: Number>() {
    let case = AttentionCase {
        batch: 2,
        heads_q: 6,
        heads_kv: 2,
        dim_k: 24,
        dim_v: 16,
        ..AttentionCase::new("mixed", Rule::Causal, 83)
    };
    let problem = case.problem().rounded(E::PRECISION);
    let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    for isa in Isa::available() {
        let attention = attention(&case, isa, 2);
        for turn in 0..Placement::ALL.len() {
            let pick = |n: usize| Placement::ALL[(turn + 3 * n) % Placement::ALL.len()];
            let tensors = TensorsOf::<E>::mixed(&problem, [pick(0), pick(1), pick(2), pick(3)]);
            let got = Run { attention: &attention, tensors: &tensors, results: pick(4) }.both();
            for measure in measures::<E>(isa, &problem, (&truth, &naive), &got, Sample::ALL) {
                assert!(measure.holds(), "{isa} {}, turn {turn}, {measure}", E::TYPE);
            }
        }
    }
}
