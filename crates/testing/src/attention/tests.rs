//! The oracle against hand-made numbers and against finite differences of itself.

use super::evaluate::{Numbers, evaluate};
use super::*;
use crate::rule::Rule;

fn sizes(tokens_q: usize, tokens_k: usize, dim: usize) -> Sizes {
    Sizes { batch: 1, tokens_q, tokens_k, heads_q: 1, heads_kv: 1, dim_k: dim, dim_v: dim }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-12
}

#[test]
fn two_keys_by_hand() {
    // Scores ln 3 and 0: weights 3/4 and 1/4, of values 8 and 4. An output gradient of 2 makes
    // dP = (16, 8), delta = 14, dS = 3/4 · 2 = 3/2 and −3/2.
    let ln3 = 3.0_f64.ln();
    let problem = Problem {
        scale: ln3,
        q: vec![1.0],
        k: vec![1.0, 0.0],
        v: vec![8.0, 4.0],
        dout: vec![2.0],
        ..Problem::normal(sizes(1, 2, 1), 0)
    };
    let Values { out, lse, dq, dk, dv, .. } = truth(&problem, Sample::ALL).values;
    assert!(close(out[0], 7.0) && close(lse[0], 4.0_f64.ln()));
    assert!(close(dq[0], ln3 * 1.5));
    assert!(close(dk[0], ln3 * 1.5) && close(dk[1], ln3 * -1.5));
    assert!(close(dv[0], 1.5) && close(dv[1], 0.5));

    // With a gradient of 4 through the log-sum-exp, dS grows by 4 · (3/4, 1/4).
    let problem = Problem { dlse: Some(vec![4.0]), ..problem };
    let Values { dk, dv, .. } = truth(&problem, Sample::ALL).values;
    assert!(close(dk[0], ln3 * 4.5) && close(dk[1], ln3 * -0.5));
    assert!(close(dv[0], 1.5) && close(dv[1], 0.5));
}

#[test]
fn sinks_by_hand() {
    // Keys as above, of scores ln 3 and 0, and a sink ln 4 of value 0: weights 3/8, 1/8 and 1/2. An
    // output gradient of 2 makes dP = (16, 8, 0), delta = 7.
    let ln3 = 3.0_f64.ln();
    let problem = Problem {
        scale: ln3,
        q: vec![1.0],
        k: vec![1.0, 0.0],
        v: vec![8.0, 4.0],
        dout: vec![2.0],
        sink_logits: Some(vec![4.0_f32.ln()]),
        ..Problem::normal(sizes(1, 2, 1), 0)
    };
    // The logit is an f32.
    let near = |a: f64, b: f64| (a - b).abs() < 1e-6;
    let values = truth(&problem, Sample::ALL).values;
    assert!(near(values.out[0], 3.5) && near(values.lse[0], 8.0_f64.ln()));
    assert!(near(values.dk[0], ln3 * 3.375) && near(values.dk[1], ln3 / 8.0));
    assert!(near(values.dsink_logits[0], -3.5));
    // A gradient of 4 through the log-sum-exp adds half of it.
    let problem = Problem { dlse: Some(vec![4.0]), ..problem };
    assert!(near(truth(&problem, Sample::ALL).values.dsink_logits[0], -1.5));
    // Without keys the sink is the row.
    let problem = Problem { seen: Seen::shared(1, 2, |_, _| false), ..problem };
    let values = truth(&problem, Sample::ALL).values;
    assert_eq!((values.out[0], values.lse[0]), (0.0, f64::from(4.0_f32.ln())));
    assert_eq!((values.dq[0], values.dsink_logits[0]), (0.0, 4.0));
    // A logit of −∞ is no sink.
    let without = Problem { sink_logits: None, ..problem.clone() };
    let nothing = Problem { sink_logits: Some(vec![f32::NEG_INFINITY]), ..problem };
    let [nothing, without] = [nothing, without].map(|problem| truth(&problem, Sample::ALL).values);
    assert_eq!((nothing.lse, nothing.dsink_logits), (without.lse, vec![0.0]));
}

#[test]
fn transforms_by_hand() {
    let one_key = |transform| {
        let problem = Problem {
            scale: 1.0,
            transform,
            query_positions: vec![9],
            key_positions: vec![2],
            q: vec![3.0],
            k: vec![2.0],
            dlse: Some(vec![1.0]),
            ..Problem::normal(sizes(1, 1, 1), 0)
        };
        truth(&problem, Sample::ALL).values
    };
    // The log-sum-exp of one key is its score, and dq is the slope of that times the key.
    let capped = one_key(Transform::softcap(4.0));
    assert!(close(capped.lse[0], 4.0 * 1.5_f64.tanh()));
    assert!(close(capped.dq[0], 2.0 * (1.0 - 1.5_f64.tanh().powi(2))));
    let biased = one_key(Transform::alibi(vec![0.5]));
    assert!(close(biased.lse[0], 6.0 - 3.5) && close(biased.dq[0], 2.0));
}

#[test]
fn query_heads_share_key_heads() {
    // Six query heads on two key heads; key head 0 has value 1, key head 1 has value 2.
    let sizes =
        Sizes { batch: 2, tokens_q: 1, tokens_k: 1, heads_q: 6, heads_kv: 2, dim_k: 1, dim_v: 1 };
    let problem =
        Problem { v: vec![1.0, 2.0, 3.0, 4.0], dout: vec![1.0; 12], ..Problem::normal(sizes, 0) };
    let values = truth(&problem, Sample::ALL).values;
    assert_eq!(values.out, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0]);
    assert_eq!(values.dv, [3.0; 4]);
}

#[test]
fn a_row_without_keys_is_nothing() {
    let problem = Problem {
        seen: Seen::shared(3, 3, |i, j| i != 1 && j != 2),
        ..Problem::normal(sizes(3, 3, 2), 5)
    };
    let Values { out, lse, dq, dk, dv, .. } = truth(&problem, Sample::ALL).values;
    assert_eq!((&out[2..4], lse[1], &dq[2..4]), (&[0.0; 2][..], f64::NEG_INFINITY, &[0.0; 2][..]));
    assert!(out[0] != 0.0 && out[5] != 0.0 && lse[0].is_finite() && dq[0] != 0.0);
    assert_eq!((&dk[4..], &dv[4..]), (&[0.0; 2][..], &[0.0; 2][..]));
    assert!(dk[0] != 0.0 && dv[0] != 0.0);
}

/// Differences of `L = Σ out · dout + Σ lse · dlse`, element by element.
fn check_gradient(problem: &Problem) {
    let loss = |x: &Numbers<f64>| {
        let values = evaluate(problem, x, Sample::ALL).values;
        let out: f64 = values.out.iter().zip(&x.dout).map(|(a, b)| a * b).sum();
        let lse = values.lse.iter().zip(&x.dlse);
        out + lse.filter(|(lse, _)| lse.is_finite()).map(|(a, b)| a * b).sum::<f64>()
    };
    let mut x = Numbers::<f64>::of(problem);
    let exact = evaluate(problem, &x, Sample::ALL).values;
    // The error of a central difference is step² / 6 times a third derivative of order 1.
    let step = 1e-5;
    type Pick = fn(&mut Numbers<f64>) -> &mut Vec<f64>;
    let tensors: [(Pick, &[f64]); 6] = [
        (|x| &mut x.q, &exact.dq),
        (|x| &mut x.k, &exact.dk),
        (|x| &mut x.v, &exact.dv),
        (|x| &mut x.sink_logits, &exact.dsink_logits),
        (|x| &mut x.table, &exact.dbias_table),
        (|x| &mut x.slopes, &exact.dalibi_slopes),
    ];
    for (pick, gradient) in tensors.into_iter().filter(|(_, gradient)| !gradient.is_empty()) {
        assert!(gradient.iter().any(|g| g.abs() > 1e-3));
        for (n, exact) in gradient.iter().enumerate() {
            let kept = pick(&mut x)[n];
            pick(&mut x)[n] = kept + step;
            let above = loss(&x);
            pick(&mut x)[n] = kept - step;
            let below = loss(&x);
            pick(&mut x)[n] = kept;
            let difference = (above - below) / (2.0 * step);
            assert!((difference - exact).abs() < 1e-8, "{n}: {difference} against {exact}");
        }
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let sizes =
        Sizes { batch: 2, tokens_q: 5, tokens_k: 7, heads_q: 4, heads_kv: 2, dim_k: 3, dim_v: 2 };
    let transforms = [
        Transform::default(),
        Transform::softcap(1.5),
        Transform::alibi(vec![0.5, 0.25, 1.0, -0.1]),
        Transform {
            softcap: Some(2.0),
            slopes: vec![0.5, 0.25, 1.0, -0.1],
            table: Some(Table::normal(4, 2, 1, 3)),
            dropout: Some((0.4, 5)),
        },
    ];
    for (n, transform) in transforms.into_iter().enumerate() {
        let logits = || Some(vec![0.5, -1.0, 2.0, 0.0]);
        for (dlse, sink_logits) in [
            (None, None),
            (Some(normals(40, sizes.rows())), None),
            (None, logits()),
            (Some(normals(40, sizes.rows())), logits()),
        ] {
            let problem = Problem {
                transform: transform.clone(),
                dlse,
                sink_logits,
                seen: Seen::each(
                    (2, 4),
                    (5, 7),
                    |entry, head| entry * 2 + head % 2,
                    |which, i, j| match which {
                        0 => true,
                        1 => j <= i + 2,
                        2 => (i + j).is_multiple_of(3),
                        _ => i != 3 && j != 4,
                    },
                ),
                ..Problem::normal(sizes, n as u64)
            };
            check_gradient(&problem);
        }
    }
}

#[test]
fn a_sample_is_part_of_the_whole() {
    let case = AttentionCase {
        per_head: vec![Rule::Causal, Rule::SlidingWindow { width: 3 }],
        padding: vec![0..40, 7..33],
        batch: 2,
        heads_kv: 1,
        ..AttentionCase::new("", Rule::Full, 40)
    };
    let problem = case.problem();
    let sample = Sample::one_in(5);
    let chosen: Vec<usize> = (0..40).filter(|&token| sample.has(token, 40)).collect();
    assert!(chosen.len() > 4 && chosen.len() < 20);
    let (all, some) = (truth(&problem, Sample::ALL), truth(&problem, sample));
    let pairs = [
        (&all.values.dq, &some.values.dq, 32),
        (&all.gross.dq, &some.gross.dq, 32),
        (&all.values.lse, &some.values.lse, 1),
        (&all.values.dk, &some.values.dk, 32),
        (&all.gross.dv, &some.gross.dv, 32),
    ];
    for (all, some, dim) in pairs {
        for row in (0..all.len() / dim).filter(|row| chosen.contains(&(row % 40))) {
            assert_eq!(all[row * dim..][..dim], some[row * dim..][..dim]);
        }
    }
}

#[test]
fn naive_is_near_the_truth_and_best_is_nearer() {
    let case = AttentionCase::new("", Rule::Causal, 300);
    let problem = case.problem();
    let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    let rounded = |numbers: &[f64]| numbers.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let t = &truth.values;
    let best = Values {
        out: rounded(&t.out),
        lse: rounded(&t.lse),
        dq: rounded(&t.dq),
        dk: rounded(&t.dk),
        dv: rounded(&t.dv),
        ..Values::default()
    };
    for measure in Measure::all(&problem, &truth, &naive, &naive, Sample::ALL) {
        assert!(measure.ratio() > 1.0 && measure.ratio() < 40.0, "{measure}");
    }
    for measure in Measure::all(&problem, &truth, &naive, &best, Sample::ALL) {
        // Nothing cancels here on the whole: the floor is below what rounding costs.
        assert!(measure.ratio() > 0.5 && measure.ratio() <= 1.0, "{measure}");
        assert!(measure.holds(), "{measure}");
    }
}

/// Every result of the truth rounded.
fn rounded(values: &Values<f64>, precision: Precision) -> Values<f32> {
    let round = |numbers: &[f64]| numbers.iter().map(|&x| precision.round(x)).collect();
    Values {
        out: round(&values.out),
        lse: values.lse.iter().map(|&x| x as f32).collect(),
        dq: round(&values.dq),
        dk: round(&values.dk),
        dv: round(&values.dv),
        dsink_logits: values.dsink_logits.iter().map(|&x| x as f32).collect(),
        ..Values::default()
    }
}

#[test]
fn narrow_results_may_be_rounded_and_no_more() {
    for precision in Precision::HALF {
        let problem = AttentionCase::new("", Rule::Causal, 300).problem().rounded(precision);
        let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
        let best = rounded(&truth.values, precision);
        let all = |got: &Values<f32>| Measure::all(&problem, &truth, &naive, got, Sample::ALL);
        for measure in all(&best) {
            assert!(measure.holds() && measure.ratio() <= 1.0, "{precision} {measure}");
        }
        // One more error of half a unit in the last place is too much for anybody.
        let mut wrong = truth.values.clone();
        let Values { out, dq, dk, dv, .. } = &mut wrong;
        for (n, x) in [out, dq, dk, dv].into_iter().flatten().enumerate() {
            *x += *x * precision.unit() * if n.is_multiple_of(3) { 1.0 } else { -1.0 };
        }
        for measure in all(&rounded(&wrong, precision)) {
            let holds = measure.on_matrix_unit().holds();
            assert_eq!(holds, measure.tensor == "lse", "{precision} {measure}");
        }
    }
}

/// What operands rounded to bf16 cost is what the noise says: tried on sums in f64.
#[test]
fn noise_is_what_rounded_operands_cost() {
    let case = AttentionCase { dim_k: 8, dim_v: 16, ..AttentionCase::new("", Rule::Causal, 200) };
    let problem = case.problem().rounded(Precision::Bf16);
    let truth = truth(&problem, Sample::ALL);
    let noise = truth.noise.as_ref().unwrap();
    let (tokens, dim) = (200, 16);
    let (mut errors, mut expected) = (0.0, 0.0);
    for row in 0..2 * tokens {
        let (head, query) = (row / tokens, row % tokens);
        for d in 0..dim {
            let out: f64 = (0..=query)
                .map(|key| {
                    let at = head * tokens + key;
                    let pairs = problem.q[row * 8..][..8].iter().zip(&problem.k[at * 8..][..8]);
                    let z: f64 = pairs.map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                    let p = (z * problem.scale - truth.values.lse[row]).exp();
                    f64::from(Precision::Bf16.round(p)) * f64::from(problem.v[at * dim + d])
                })
                .sum();
            errors += (out - truth.values.out[row * dim + d]).powi(2);
            expected += (noise.operands.out[row * dim + d] * Precision::Bf16.noise()).powi(2);
        }
    }
    let ratio = (errors / expected).sqrt();
    assert!((ratio - 1.0).abs() < 0.1, "{ratio}");
}

#[test]
fn what_is_wrong_does_not_hold() {
    let problem = AttentionCase::new("", Rule::Causal, 65).problem();
    let truth = truth(&problem, Sample::ALL);
    let naive = naive(&problem, Sample::ALL);
    let verdicts = |got: &Values<f32>| {
        Measure::all(&problem, &truth, &naive, got, Sample::ALL)
            .iter()
            .map(Measure::holds)
            .collect::<Vec<_>>()
    };
    assert!(verdicts(&naive).iter().filter(|holds| **holds).count() >= 4);
    // One element of thousands that is off by a thousandth, is NaN or is missing.
    for wrong in [|x: f32| x + 1e-3, |_| f32::NAN, |_| f32::INFINITY, |_| 0.0] {
        for tensor in 0..5 {
            let mut got = naive.clone();
            let Values { out, lse, dq, dk, dv, .. } = &mut got;
            let number = &mut [out, lse, dq, dk, dv][tensor][37];
            *number = wrong(*number);
            assert!(!verdicts(&got)[tensor], "tensor {tensor}");
        }
    }
}

/// A limit that follows the naive formulas is infinite where those return NaN.
#[test]
fn naive_formulas_that_fail_excuse_nothing() {
    let mut problem = AttentionCase::new("", Rule::Causal, 65).problem();
    problem.unit_scale = false;
    let (truth, mut naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    naive.out[7] = f32::NAN;
    let mut got = naive.clone();
    for spoiled in [f32::NAN, f32::INFINITY] {
        got.out[7] = spoiled;
        let out = Measure::all(&problem, &truth, &naive, &got, Sample::ALL)[0];
        assert!(!out.holds() && out.of_limit() == f64::INFINITY, "{out}");
    }
    got.out[7] = truth.values.out[7] as f32;
    assert!(Measure::all(&problem, &truth, &naive, &got, Sample::ALL)[0].holds());
}

#[test]
fn the_table_names_each_case_once_and_covers_every_primitive() {
    let cases = attention_cases();
    let mut names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    // Batches are in the table in both orders, under one name.
    assert!(names.len() >= cases.len() - 1);
    let text: String = cases.iter().map(|case| case.pattern_text()).collect();
    for primitive in [
        "full",
        "causal",
        "window(",
        "sliding_window(",
        "sinks(",
        "global_tokens(",
        "dilated(",
        "strided(",
        "hierarchical(",
        "documents(",
        "packed(",
        "blocks_dilated(",
        "butterfly(",
        "random(",
        "blocks(",
        "heads(",
        "!",
    ] {
        assert!(text.contains(primitive), "{primitive}");
    }
    for case in cases {
        assert_eq!(case.heads_q % case.heads_kv, 0, "{case}");
        assert!(case.per_head.is_empty() || case.per_head.len() == case.heads_q, "{case}");
        assert!(case.padding.is_empty() || case.padding.len() == case.batch, "{case}");
    }
}

#[test]
fn random_cases_are_legal_and_small() {
    for seed in 0..500 {
        let case = AttentionCase::from_seed(seed);
        assert_eq!(case.heads_q % case.heads_kv, 0, "{case}");
        assert!(case.padding.is_empty() || case.padding.len() == case.batch, "{case}");
        let sizes = case.sizes();
        let work = sizes.rows() * sizes.tokens_k * (sizes.dim_k + sizes.dim_v);
        assert!(work <= 128_000_000, "{case}: {work}");
        assert_eq!(case, AttentionCase::from_seed(seed));
    }
}
