//! Where numbers stop being ordinary: rows that see nothing, NaN and infinity, logits of 1e30,
//! scratch and memory between elements, tensors of more than 2³¹ elements. In f32, bf16 and f16.

use longspan::{Isa, Order};
use longspan_testing::{
    AttentionCase, Level, Problem, Rule, Sample, Transform, Values, naive, truth,
};

use crate::common::*;

const PLACEMENT: Placement = Placement::Contiguous(Order::Bshd);

fn both<E: Number>(case: &AttentionCase, problem: &Problem, isa: Isa) -> Values<f32> {
    let tensors = TensorsOf::<E>::of(problem, PLACEMENT);
    Run { attention: &attention(case, isa, 2), tensors: &tensors, results: PLACEMENT }.both()
}

/// The same where the backward pass gets no more than the log-sum-exp in f32.
fn without_rest<E: Number>(case: &AttentionCase, problem: &Problem, isa: Isa) -> Values<f32> {
    let (attention, tensors) = (attention(case, isa, 2), TensorsOf::<E>::of(problem, PLACEMENT));
    let run = Run { attention: &attention, tensors: &tensors, results: PLACEMENT };
    run.both_with(Rest::Left)
}

fn local(left: u64, sinks: u64) -> Rule {
    let near = Rule::Or(vec![Rule::Window { left, right: 0 }, Rule::Sinks { n: sinks }]);
    Rule::And(vec![Rule::Causal, near])
}

/// Cases with keys that no query attends to, keys that some do, and masks of every granularity.
fn masked_cases() -> Vec<AttentionCase> {
    let case = |name: &str, rule, tokens| AttentionCase {
        heads_q: 4,
        heads_kv: 2,
        dim_k: 20,
        dim_v: 17,
        ..AttentionCase::new(name, rule, tokens)
    };
    let every_third = Level { window: 40, stride: 3, grain: 1 };
    let mut small_blocks = case("small blocks", local(30, 2), 150);
    small_blocks.layout.block = 16;
    let mut large_blocks = case("large blocks", Rule::Strided { stride: 5 }, 150);
    large_blocks.layout.block = 256;
    let mut decode = case("decode", Rule::Strided { stride: 3 }, 333);
    decode.layout.tokens_q = 1;
    vec![
        case("window", local(20, 1), 150),
        case("dilated", Rule::Dilated { segment: 70, rate: 4, offset: 1 }, 150),
        case("hierarchical", Rule::Hierarchical(vec![every_third]), 131),
        small_blocks,
        large_blocks,
        decode,
        AttentionCase {
            batch: 2,
            padding: vec![10..100, 0..77],
            per_head: vec![Rule::Causal, local(9, 0), Rule::Full, Rule::Causal],
            ..case("padding", Rule::Full, 101)
        },
        AttentionCase {
            transform: Transform::alibi(vec![0.1, 0.2, 0.3, 0.4]),
            ..case("alibi", local(20, 1), 100)
        },
        AttentionCase { transform: Transform::softcap(3.0), ..case("softcap", local(20, 1), 100) },
    ]
}

fn rows_without_keys_are_nothing<E: Number>() {
    let mut cases = masked_cases();
    cases.push(AttentionCase::new("nothing", Rule::Not(Box::new(Rule::Full)), 100));
    let mut early = AttentionCase::new("queries before the keys", Rule::Causal, 70);
    early.layout.tokens_q = 200;
    cases.push(early);
    let mut no_keys = AttentionCase::new("no keys", Rule::Full, 0);
    no_keys.layout.tokens_q = 65;
    cases.push(no_keys);
    let (mut empty_rows, mut unseen_keys) = (0, 0);
    for case in &cases {
        // Numbers of a row that sees nothing don't matter, whatever they are.
        let mut problem = case.problem();
        let sizes = problem.sizes;
        let mut seen_keys = vec![false; sizes.batch * sizes.heads_kv * sizes.tokens_k];
        let mut empty = Vec::new();
        for row in 0..sizes.rows() {
            let (entry, head, query) = split(row, sizes.heads_q, sizes.tokens_q);
            let keys = problem.seen.keys(entry, head, query);
            let first = (entry * sizes.heads_kv + sizes.key_head(head)) * sizes.tokens_k;
            keys.iter().for_each(|&key| seen_keys[first + key as usize] = true);
            if keys.is_empty() {
                empty.push(row);
                problem.q[row * sizes.dim_k] = f32::NAN;
                problem.dout[row * sizes.dim_v] = f32::INFINITY;
            }
        }
        for isa in Isa::available() {
            let got = both::<E>(case, &problem, isa);
            let zeros = |numbers: &[f32], row: usize, dim: usize| {
                numbers[row * dim..][..dim].iter().all(|&x| x == 0.0)
            };
            for &row in &empty {
                assert_eq!(got.lse[row], f32::NEG_INFINITY, "{isa} {case}");
                assert!(zeros(&got.out, row, sizes.dim_v), "{isa} out, row {row}, {case}");
                assert!(zeros(&got.dq, row, sizes.dim_k), "{isa} dq, row {row}, {case}");
            }
            for key in (0..seen_keys.len()).filter(|&key| !seen_keys[key]) {
                assert!(zeros(&got.dk, key, sizes.dim_k), "{isa} dk, key {key}, {case}");
                assert!(zeros(&got.dv, key, sizes.dim_v), "{isa} dv, key {key}, {case}");
                unseen_keys += 1;
            }
            let Values { out, dq, dk, dv, .. } = &got;
            for (name, numbers) in [("out", out), ("dq", dq), ("dk", dk), ("dv", dv)] {
                let odd = numbers.iter().position(|x| !x.is_finite());
                assert_eq!(odd, None, "{isa} {name} isn't finite, {case}");
            }
        }
        empty_rows += empty.len();
    }
    assert!(empty_rows > 500 && unseen_keys > 100, "{empty_rows} rows, {unseen_keys} keys");
}

/// Batch entry, head and token of a row.
fn split(row: usize, heads: usize, tokens: usize) -> (usize, usize, usize) {
    (row / (heads * tokens), row / tokens % heads, row % tokens)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Where {
    Q,
    K,
    V,
    Dout,
}

/// Which rows of the results a bad number may reach.
struct Reach {
    out: Vec<bool>,
    lse: Vec<bool>,
    dq: Vec<bool>,
    dk: Vec<bool>,
    dv: Vec<bool>,
}

impl Reach {
    /// A bad number in token `n` of all tokens of a tensor.
    fn of(problem: &Problem, tensor: Where, n: usize) -> Reach {
        let sizes = &problem.sizes;
        let rows: Vec<bool> = (0..sizes.rows())
            .map(|row| {
                let (entry, head, query) = split(row, sizes.heads_q, sizes.tokens_q);
                let (of, key_head, key) = split(n, sizes.heads_kv, sizes.tokens_k.max(1));
                match tensor {
                    Where::Q | Where::Dout => row == n,
                    Where::K | Where::V => {
                        (entry, sizes.key_head(head)) == (of, key_head)
                            && problem.seen.sees(entry, head, query, key)
                    }
                }
            })
            .collect();
        let mut keys = vec![false; sizes.batch * sizes.heads_kv * sizes.tokens_k];
        for row in (0..rows.len()).filter(|&row| rows[row]) {
            let (entry, head, query) = split(row, sizes.heads_q, sizes.tokens_q);
            let first = (entry * sizes.heads_kv + sizes.key_head(head)) * sizes.tokens_k;
            for &key in problem.seen.keys(entry, head, query) {
                keys[first + key as usize] = true;
            }
        }
        let (no_rows, no_keys) = (vec![false; rows.len()], vec![false; keys.len()]);
        match tensor {
            Where::Q | Where::K => {
                Reach { out: rows.clone(), lse: rows.clone(), dq: rows, dk: keys.clone(), dv: keys }
            }
            Where::V => Reach { out: rows.clone(), lse: no_rows, dq: rows, dk: keys, dv: no_keys },
            Where::Dout => {
                Reach { out: no_rows.clone(), lse: no_rows, dq: rows, dk: keys.clone(), dv: keys }
            }
        }
    }

    /// Everything else must have the bits it had.
    fn check(&self, clean: &Values<f32>, dirty: &Values<f32>, what: &str) {
        let tensors = [
            ("out", &self.out, &clean.out, &dirty.out),
            ("lse", &self.lse, &clean.lse, &dirty.lse),
            ("dq", &self.dq, &clean.dq, &dirty.dq),
            ("dk", &self.dk, &clean.dk, &dirty.dk),
            ("dv", &self.dv, &clean.dv, &dirty.dv),
        ];
        for (name, reached, clean, dirty) in tensors {
            let dim = if reached.is_empty() { 1 } else { clean.len() / reached.len() };
            for (row, _) in reached.iter().enumerate().filter(|(_, reached)| !**reached) {
                let (clean, dirty) = (&clean[row * dim..][..dim], &dirty[row * dim..][..dim]);
                assert_eq!(bits(clean), bits(dirty), "{name}, row {row} has changed: {what}");
            }
        }
    }
}

/// A bad number reaches the rows that attend to it and no other, to the bit.
fn check_spread<E: Number>(tensor: Where) {
    for case in masked_cases() {
        let problem = case.problem();
        let sizes = problem.sizes;
        let (tokens, dim) = match tensor {
            Where::Q => (sizes.rows(), sizes.dim_k),
            Where::K => (sizes.k() / sizes.dim_k, sizes.dim_k),
            Where::V => (sizes.v() / sizes.dim_v, sizes.dim_v),
            Where::Dout => (sizes.rows(), sizes.dim_v),
        };
        for isa in Isa::available() {
            let clean = both::<E>(&case, &problem, isa);
            for (turn, share) in [0, 7, 31, 50, 64, 77, 99].into_iter().enumerate() {
                let n = (tokens - 1) * share / 99;
                let most = E::MOST.to_f32();
                let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, most][turn % 4];
                let place = n * dim + turn * 5 % dim;
                let mut dirty = problem.clone();
                match tensor {
                    Where::Q => dirty.q[place] = bad,
                    Where::K => dirty.k[place] = bad,
                    Where::V => dirty.v[place] = bad,
                    Where::Dout => dirty.dout[place] = bad,
                }
                let reach = Reach::of(&problem, tensor, n);
                let got = both::<E>(&case, &dirty, isa);
                let what = format!("{bad} in token {n} of {tensor:?}, {isa} {case}");
                reach.check(&clean, &got, &what);
                if !bad.is_nan() {
                    continue;
                }
                // Those who do see it mustn't hide it.
                for row in (0..sizes.rows()).filter(|&row| reach.dq[row]) {
                    let (entry, head, query) = split(row, sizes.heads_q, sizes.tokens_q);
                    if problem.seen.keys(entry, head, query).is_empty() {
                        continue;
                    }
                    let shown = match tensor {
                        Where::Q | Where::K => got.lse[row].is_nan(),
                        Where::V => got.out[row * sizes.dim_v + place % dim].is_nan(),
                        Where::Dout => got.dq[row * sizes.dim_k].is_nan(),
                    };
                    assert!(shown, "row {row} hides it: {what}");
                }
            }
        }
    }
}

fn a_bad_key_reaches_only_those_who_see_it<E: Number>() {
    check_spread::<E>(Where::K);
}

fn a_bad_value_reaches_only_those_who_see_it<E: Number>() {
    check_spread::<E>(Where::V);
}

fn a_bad_query_reaches_only_what_it_sees<E: Number>() {
    check_spread::<E>(Where::Q);
}

fn a_bad_gradient_reaches_only_what_its_row_sees<E: Number>() {
    check_spread::<E>(Where::Dout);
}

/// All keys and values that no query attends to are bad at once.
fn inactive_keys_may_hold_anything<E: Number>() {
    for case in masked_cases() {
        let problem = case.problem();
        let sizes = problem.sizes;
        let mut dirty = problem.clone();
        let mut unseen = 0;
        for n in 0..sizes.k() / sizes.dim_k {
            if Reach::of(&problem, Where::K, n).lse.contains(&true) {
                continue;
            }
            unseen += 1;
            dirty.k[n * sizes.dim_k..][..sizes.dim_k].fill(f32::NAN);
            dirty.v[n * sizes.dim_v..][..sizes.dim_v].fill(f32::NEG_INFINITY);
        }
        for isa in Isa::available() {
            let (clean, got) = (both::<E>(&case, &problem, isa), both::<E>(&case, &dirty, isa));
            assert_eq!(clean, got, "{unseen} unseen keys, {isa} {case}");
        }
    }
}

/// What a call leaves in scratch doesn't show in the next.
fn scratch_never_leaks<E: Number>() {
    for case in masked_cases() {
        let problem = case.problem();
        let mut bad = problem.clone();
        for numbers in [&mut bad.q, &mut bad.k, &mut bad.v, &mut bad.dout] {
            numbers.fill(f32::NAN);
        }
        let tensors = TensorsOf::<E>::of(&problem, PLACEMENT);
        let bad = TensorsOf::<E>::of(&bad, PLACEMENT);
        for isa in Isa::available() {
            let fresh = both::<E>(&case, &problem, isa);
            let used = attention(&case, isa, 2);
            Run { attention: &used, tensors: &bad, results: PLACEMENT }.both();
            let again = Run { attention: &used, tensors: &tensors, results: PLACEMENT }.both();
            assert_eq!(fresh, again, "{isa} {case}");
        }
    }
}

/// Scores of ±`E::MOST²` and of 1e30 at most: the softmax is all on one key, or even over equal
/// ones. Gradients are right too, and where the rest of the log-sum-exp is missing at least finite.
fn large_logits<E: Number>() {
    // Numbers of f16 end at 65,504, its logits at 6e4: gradients of larger ones can't be written.
    let (size, logits) = if E::MOST.to_f32() > 1e30 { (5e14, 9e29) } else { (1.1e2, 6e4) };
    let case = AttentionCase {
        heads_q: 4,
        scale: Some(1.0),
        dim_k: 16,
        ..AttentionCase::new("large logits", local(70, 3), 150)
    };
    let apart = {
        let mut problem = case.problem();
        problem.q.iter_mut().chain(&mut problem.k).for_each(|x| *x *= size);
        problem.unit_scale = false;
        problem.rounded(E::PRECISION)
    };
    let equal = |sign: f32| {
        let mut problem = apart.clone();
        problem.q.fill(size / 2.0);
        problem.k.fill(sign * size / 2.0);
        problem.rounded(E::PRECISION)
    };
    for (name, problem) in [("apart", &apart), ("+", &equal(1.0)), ("-", &equal(-1.0))] {
        let (truth, naive) = (truth(problem, Sample::ALL), naive(problem, Sample::ALL));
        let most = truth.values.lse.iter().fold(0.0_f64, |most, lse| most.max(lse.abs()));
        assert!(most > logits * 0.8, "{most}");
        let sizes = problem.sizes;
        for isa in Isa::available() {
            let got = both::<E>(&case, problem, isa);
            for measure in measures::<E>(isa, problem, (&truth, &naive), &got, Sample::ALL) {
                assert!(measure.holds(), "{name}, {isa} {}, {measure}", E::TYPE);
            }
            let got = without_rest::<E>(&case, problem, isa);
            for (name, gradient) in [("dq", &got.dq), ("dk", &got.dk), ("dv", &got.dv)] {
                assert!(gradient.iter().all(|x| x.is_finite()), "{isa}, {name} isn't finite");
            }
            // Each probability is at most 1, so the gradient of a value is at most the sum of the
            // output's gradients over the rows that see it.
            let mut most = vec![0.0_f64; sizes.v()];
            for row in 0..sizes.rows() {
                let (entry, head, query) = split(row, sizes.heads_q, sizes.tokens_q);
                let first = (entry * sizes.heads_kv + sizes.key_head(head)) * sizes.tokens_k;
                for &key in problem.seen.keys(entry, head, query) {
                    for d in 0..sizes.dim_v {
                        let place = (first + key as usize) * sizes.dim_v + d;
                        most[place] += f64::from(problem.dout[row * sizes.dim_v + d].abs());
                    }
                }
            }
            for (n, (dv, most)) in got.dv.iter().zip(&most).enumerate() {
                assert!(
                    f64::from(dv.abs()) <= most * (1.0001 + E::PRECISION.unit()),
                    "{name}, {isa}, dv[{n}] = {dv}"
                );
            }
        }
    }
}

/// A module of all these tests for each type.
macro_rules! edges {
    ($module:ident, $type:ty) => {
        mod $module {
            edges!(
                $type:
                rows_without_keys_are_nothing
                a_bad_key_reaches_only_those_who_see_it
                a_bad_value_reaches_only_those_who_see_it
                a_bad_query_reaches_only_what_it_sees
                a_bad_gradient_reaches_only_what_its_row_sees
                inactive_keys_may_hold_anything
                scratch_never_leaks
                large_logits
            );
        }
    };
    ($type:ty: $($test:ident)*) => {
        $(#[test]
        fn $test() {
            super::$test::<$type>();
        })*
    };
}

edges!(of_f32, f32);
edges!(of_bf16, half::bf16);
edges!(of_f16, half::f16);

/// Where the log-sum-exp is large and its rest isn't at hand, its last bit is what gradients are
/// off by, and no more.
#[test]
fn gradients_of_large_logits_keep_the_documented_bound() {
    for scale in [1.0, 4.0, 16.0] {
        let case = AttentionCase {
            scale: Some(scale),
            dim_k: 16,
            ..AttentionCase::new("large", Rule::Causal, 130)
        };
        let problem = case.problem();
        let truth = truth(&problem, Sample::ALL);
        let most = truth.values.lse.iter().fold(0.0_f64, |most, lse| most.max(lse.abs()));
        assert!(most > 8.0 * f64::from(scale), "{most}");
        let rms = |numbers: &mut dyn Iterator<Item = f64>| {
            let squares: Vec<f64> = numbers.map(|x| x * x).collect();
            (squares.iter().sum::<f64>() / squares.len() as f64).sqrt()
        };
        for isa in Isa::available() {
            let got = without_rest::<f32>(&case, &problem, isa);
            let gradients = [
                ("dq", &got.dq, &truth.values.dq, &truth.gross.dq),
                ("dk", &got.dk, &truth.values.dk, &truth.gross.dk),
                ("dv", &got.dv, &truth.values.dv, &truth.gross.dv),
            ];
            for (name, got, truth, gross) in gradients {
                let error = rms(&mut got.iter().zip(truth).map(|(&x, t)| f64::from(x) - t));
                // Half an ulp of the log-sum-exp is up to u · |lse|; a score of that size, summed
                // up in f32, is off by as much again.
                let unit = 1.0 / f64::from(1 << 24);
                let bound = unit * (4.0 + 2.0 * most) * rms(&mut gross.iter().copied());
                assert!(error <= bound, "{isa}, scale {scale}, {name}: {error:e} over {bound:e}");
            }
        }
    }
}
