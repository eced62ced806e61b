//! Score additions, sinks and dropout in every combination, and what is kept by dropout.
//!
//! `LONGSPAN_COMBINATIONS` sets how many random combinations (20,000 where left out).

use half::{bf16, f16};
use longspan::{
    Attention, Dims, Dropout, Inputs, Isa, Layout, Order, OutputGradient, Pattern, Shape, Tensor,
};
use longspan_testing::{AttentionCase, Transform, naive, truth};

use crate::common::*;

/// Small problems on every instruction set, in each of three types in turn. What is looked for is a
/// wrong formula, so a result may be four times further off than the rule of `right.rs` allows, which
/// some of so many would be by chance.
fn combinations(part: u64) {
    fn check_as<E: Number>(case: &AttentionCase) -> Option<String> {
        let problem = case.problem().rounded(E::PRECISION);
        let (truth, naive) = (truth(&problem, case.sample), naive(&problem, case.sample));
        let placement = Placement::Contiguous(Order::Bhsd);
        let tensors = TensorsOf::<E>::of(&problem, placement);
        Isa::available().into_iter().find_map(|isa| {
            let attention = attention(case, isa, 1);
            let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
            let measures = measures::<E>(isa, &problem, (&truth, &naive), &got, case.sample);
            let wrong = measures.into_iter().find(|measure| {
                !measure.error.is_finite() || measure.error > 4.0 * measure.limit()
            });
            wrong.map(|measure| format!("{isa} {} {measure}\n    {case}", E::TYPE))
        })
    }
    let cases = number("LONGSPAN_COMBINATIONS", 20_000);
    let wrong: Vec<String> = (0..cases)
        .filter(|seed| seed % 4 == part)
        .filter_map(|seed| {
            let case = AttentionCase::small(seed);
            match seed / 4 % 3 {
                0 => check_as::<f32>(&case),
                1 => check_as::<bf16>(&case),
                _ => check_as::<f16>(&case),
            }
        })
        .take(10)
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn combinations_first_quarter() {
    combinations(0);
}

#[test]
fn combinations_second_quarter() {
    combinations(1);
}

#[test]
fn combinations_third_quarter() {
    combinations(2);
}

#[test]
fn combinations_last_quarter() {
    combinations(3);
}

const TOKENS: usize = 256;
const HEADS: usize = 3;
const P: f64 = 0.3;

/// Which pairs are kept, `[batch][head][query][key]`, as outputs and as gradients of values tell:
/// all scores are equal, values and gradients of the output are unit vectors.
fn masks(isa: Isa, threads: usize, seed: u64, bf16_too: bool) -> Vec<Vec<bool>> {
    fn both<E: Number>(isa: Isa, threads: usize, seed: u64) -> [Vec<bool>; 2] {
        let dims = Dims { batch: 2, tokens: TOKENS, heads: HEADS, dim: TOKENS };
        let narrow = Dims { dim: 8, ..dims };
        let unit = |n: usize| f32::from(n % TOKENS == n / TOKENS % TOKENS);
        let units = (0..dims.elements().unwrap()).map(|n| E::from_f32(unit(n))).collect();
        let units = Tensor::new(units, dims, Order::Bhsd).unwrap();
        let q = Tensor::filled(E::from_f32(0.0), narrow, Order::Bhsd).unwrap();
        let layout = Layout::compile(&Pattern::full(), &Shape::new(256, 256)).unwrap();
        let attention = Attention::new(layout).isa(isa).threads(threads);
        let attention = attention.dropout(Dropout::new(P, seed).unwrap());
        let inputs = Inputs::new(q.view(), q.view(), units.view());
        let output = attention.forward(inputs).unwrap();
        let gradient = OutputGradient { dout: units.view(), dlse: None };
        let gradients = attention.backward(inputs, &output, gradient).unwrap();
        let kept = |x: &E| x.to_f32() > 0.0;
        let forward = output.out.as_slice().iter().map(kept).collect();
        // dV is `[key][query]`.
        let dv = gradients.dv.as_slice();
        let turned = |n: usize| {
            let (head, query, key) = (n / TOKENS / TOKENS, n / TOKENS % TOKENS, n % TOKENS);
            kept(&dv[(head * TOKENS + key) * TOKENS + query])
        };
        [forward, (0..dv.len()).map(turned).collect()]
    }
    let mut all = both::<f32>(isa, threads, seed).to_vec();
    if bf16_too {
        all.extend(both::<bf16>(isa, threads, seed));
    }
    all
}

/// The definition, pair by pair.
fn defined(seed: u64) -> Vec<bool> {
    let transform = Transform { dropout: Some((P, seed)), ..Transform::default() };
    let pair = |n: usize| {
        let (row, key) = (n / TOKENS, (n % TOKENS) as i64);
        let (head, query) = (row / TOKENS, (row % TOKENS) as i64);
        transform.kept(head / HEADS, HEADS, head % HEADS, query, key) > 0.0
    };
    (0..2 * HEADS * TOKENS * TOKENS).map(pair).collect()
}

#[test]
fn the_same_pairs_are_dropped_everywhere() {
    let expected = defined(7);
    for isa in Isa::available() {
        for threads in [1, 4] {
            for (n, mask) in masks(isa, threads, 7, true).iter().enumerate() {
                let differing = mask.iter().zip(&expected).filter(|(a, b)| a != b).count();
                assert_eq!(differing, 0, "{isa}, {threads} threads, pass {n}");
            }
        }
    }
}

/// χ² of the independence of two masks, one degree of freedom.
fn chi_square(a: &[bool], b: &[bool]) -> f64 {
    let mut counts = [[0.0; 2]; 2];
    for (&a, &b) in a.iter().zip(b) {
        counts[usize::from(a)][usize::from(b)] += 1.0;
    }
    let total = a.len() as f64;
    let row = |i: usize| counts[i][0] + counts[i][1];
    let column = |j: usize| counts[0][j] + counts[1][j];
    let term = |i: usize, j: usize| {
        let expected: f64 = row(i) * column(j) / total;
        (counts[i][j] - expected).powi(2) / expected
    };
    term(0, 0) + term(0, 1) + term(1, 0) + term(1, 1)
}

/// χ² has mean 1 and variance 2, so that the mean of `n` is within 4 standard errors of 1.
#[track_caller]
fn independent(values: impl Iterator<Item = f64>, what: &str) {
    let values: Vec<f64> = values.collect();
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    assert!((mean - 1.0).abs() < 4.0 * (2.0 / n).sqrt(), "{what}: {mean} of {n}");
}

#[test]
fn kept_pairs_are_as_many_as_promised_and_independent() {
    let [mask, _] = &masks(Isa::available()[0], 1, 3, false)[..] else { unreachable!() };
    let share = mask.iter().filter(|&&kept| kept).count() as f64 / mask.len() as f64;
    let error = (P * (1.0 - P) / mask.len() as f64).sqrt();
    assert!((share - (1.0 - P)).abs() < 4.0 * error, "{share}");

    let rows: Vec<&[bool]> = mask.chunks(TOKENS).collect();
    let apart = |distance: usize| rows.iter().zip(&rows[distance..]).map(|(a, b)| chi_square(a, b));
    independent(apart(1), "neighboring queries");
    independent(apart(64), "queries 64 apart");
    independent(apart(TOKENS), "neighboring heads");
    independent(apart(HEADS * TOKENS), "batch entries");
    independent(
        rows.iter().map(|row| chi_square(&row[1..], &row[..TOKENS - 1])),
        "neighboring keys",
    );
    for other in [2, 4, 3 ^ (1 << 40)] {
        let other = defined(other);
        independent(rows.iter().zip(other.chunks(TOKENS)).map(|(a, b)| chi_square(a, b)), "seeds");
    }
}
