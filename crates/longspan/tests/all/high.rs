//! f32 at `high` precision against the `f64` oracle: on matrix units three bf16 products per product, by
//! the rule that [`Measure`](longspan_testing::Measure) derives for them; everywhere else the bits of
//! `highest`.

use half::{bf16, f16};
use longspan::{Attention, Dilated, Element, ElementType, Isa, Order, Pattern, Precision, Shape};
use longspan_testing::{AttentionCase, Measure, Rule, Sample, attention_cases, naive, truth};

use crate::common::*;

fn high(attention: Attention) -> Attention {
    attention.precision(Precision::High)
}

fn half(number: usize) -> impl Iterator<Item = AttentionCase> {
    let pairs = |case: &AttentionCase| case.sizes().tokens_q * case.sizes().tokens_k;
    let short = attention_cases().into_iter().filter(move |case| pairs(case) <= 1 << 20);
    short.skip(number).step_by(2)
}

#[test]
fn even_table() {
    check_all_with::<f32>(half(0), high);
}

#[test]
fn odd_table() {
    check_all_with::<f32>(half(1), high);
}

#[test]
fn random() {
    let (first, cases) = (number("LONGSPAN_SEED", 3000), number("LONGSPAN_CASES", 400) / 8);
    check_all_with::<f32>((first..first + cases.max(1)).map(AttentionCase::from_seed), high);
}

#[test]
fn any_strides() {
    check_strides_with::<f32>(high);
}

/// Head dims that don't fill blocks of the matrix unit, and tokens likewise.
#[test]
fn odd_sizes() {
    let dims = [1, 15, 16, 17, 31, 33, 65, 80, 96, 127, 256];
    let cases = dims.into_iter().zip([1, 31, 33, 63, 65, 97, 127, 129, 200, 257, 300]).map(
        |(dim, tokens)| AttentionCase {
            dim_k: dim,
            dim_v: dims[(dim + tokens) % dims.len()],
            heads_q: 2,
            heads_kv: 1,
            ..AttentionCase::new("odd", Rule::Causal, tokens as u64)
        },
    );
    check_all_with::<f32>(cases, high);
}

/// What is multiplied is what is said, and other types and instruction sets compute as they do at
/// `highest`, bit by bit.
#[test]
fn nothing_else_changes() {
    fn check<E: Number>() {
        let case = AttentionCase::new("same", Rule::Causal, 150);
        let problem = case.problem().rounded(E::PRECISION);
        let placement = Placement::Contiguous(Order::Bhsd);
        let tensors = TensorsOf::<E>::of(&problem, placement);
        for isa in Isa::available() {
            let own = attention(&case, isa, 2);
            let other = high(own.clone());
            let types = other.compute_types::<E>().unwrap();
            let is_split = isa == Isa::Amx && E::TYPE == ElementType::F32;
            assert_eq!(types.products, if is_split { 3 } else { 1 }, "{isa} {}", E::TYPE);
            assert_eq!(types == own.compute_types::<E>().unwrap(), !is_split);
            let [own, other] = [own, other].map(|attention| {
                Run { attention: &attention, tensors: &tensors, results: placement }.both()
            });
            for (own, other) in [(own.out, other.out), (own.dq, other.dq), (own.dk, other.dk)] {
                assert_eq!(bits(&own) == bits(&other), !is_split, "{isa} {}", E::TYPE);
            }
        }
    }
    check::<f32>();
    check::<bf16>();
    check::<f16>();
}

/// Several threads give the bits of one, and branches of LongNet take the precision as well.
#[test]
fn threads_and_branches() {
    let case =
        AttentionCase { heads_q: 3, heads_kv: 3, ..AttentionCase::new("long", Rule::Causal, 400) };
    let problem = case.problem();
    let placement = Placement::Contiguous(Order::Bshd);
    let tensors = Tensors::of(&problem, placement);
    let dilated = |threads| {
        let dilated = Dilated::new([(64, 1), (256, 2)]).unwrap().threads(threads);
        dilated.precision(Precision::High)
    };
    let engines: [[Box<dyn Engine<f32>>; 2]; 2] = [
        [1, 3].map(|threads| Box::new(high(attention(&case, Isa::best(), threads))) as _),
        [1, 3].map(|threads| Box::new(dilated(threads)) as _),
    ];
    for [one, three] in engines {
        let [one, three] = [one, three].map(|attention| {
            Run { attention: &*attention, tensors: &tensors, results: placement }.both()
        });
        for (one, three) in
            [(one.out, three.out), (one.dq, three.dq), (one.dk, three.dk), (one.dv, three.dv)]
        {
            assert_eq!(bits(&one), bits(&three));
        }
    }
}

/// Numbers near the largest one stay finite, infinite ones and NaN reach the results that they belong
/// to, and those alone.
#[test]
fn large_and_infinite_values() {
    let case =
        AttentionCase { dim_k: 32, dim_v: 32, ..AttentionCase::new("large", Rule::Causal, 130) };
    let mut problem = case.problem();
    let dim = 32;
    let value = |token: usize| token * dim;
    problem.v[value(40)] = f32::INFINITY;
    problem.v[value(50) + 1] = f32::NAN;
    // The largest that is the sum of two bf16 numbers.
    problem.v[value(60) + 2] = f32::from_bits(f32::MAX.to_bits() & !0x00ff);
    let placement = Placement::Contiguous(Order::Bhsd);
    let tensors = Tensors::of(&problem, placement);
    for isa in Isa::available() {
        let attention = high(attention(&case, isa, 1));
        let out = Run { attention: &attention, tensors: &tensors, results: placement }.both().out;
        for token in 0..130 {
            let row = &out[token * dim..][..dim];
            assert_eq!(row[0] == f32::INFINITY, token >= 40, "{isa}, token {token}: {}", row[0]);
            assert_eq!(row[1].is_nan(), token >= 50, "{isa}, token {token}: {}", row[1]);
            assert!(row[2..].iter().all(|x| x.is_finite()), "{isa}, token {token}");
        }
    }
}

/// Errors are far above those of f32 products and far below those of TF32, where there is a matrix unit.
#[test]
fn errors_are_those_of_two_parts() {
    let case =
        AttentionCase { dim_k: 64, dim_v: 64, ..AttentionCase::new("error", Rule::Full, 512) };
    let problem = case.problem();
    let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    let placement = Placement::Contiguous(Order::Bhsd);
    let tensors = Tensors::of(&problem, placement);
    if !Isa::Amx.is_available() {
        return;
    }
    let attention = high(attention(&case, Isa::Amx, 1));
    let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
    for measure in Measure::all(&problem, &truth, &naive, &got, Sample::ALL) {
        if measure.tensor != "lse" {
            // TF32 would have 62 times as much.
            assert!((50.0..1_000.0).contains(&measure.ratio()), "{measure}");
        }
    }
}

#[test]
fn names() {
    for precision in Precision::ALL {
        assert_eq!(precision.to_string().parse::<Precision>().unwrap(), precision);
    }
    let error = "medium".parse::<Precision>().unwrap_err().to_string();
    assert!(error.starts_with("precision \"medium\": expected highest ("), "{error}");
    let layout = longspan::Layout::compile(&Pattern::causal(), &Shape::new(9, 9)).unwrap();
    assert_eq!(Attention::new(layout).compute_types::<f32>().unwrap().multiplied, f32::TYPE);
}
