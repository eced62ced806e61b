//! Sink logits around a ring: once per row, on the rank of its query. Results against the oracle are
//! in `equal.rs`, whose table has sinks.

use longspan::Inputs;
use longspan_ring::{Error, Local, Ring, Shards};
use longspan_testing::{AttentionCase, Rule};

use crate::common::*;

fn case(logits: Option<Vec<f32>>) -> AttentionCase {
    // Global tokens: their queries travel, and states return.
    let rule = Rule::Or(vec![Rule::SlidingWindow { width: 21 }, Rule::GlobalTokens { n: 3 }]);
    AttentionCase {
        heads_q: 4,
        heads_kv: 2,
        batch: 2,
        lse_gradient: true,
        sink_logits: logits,
        ..AttentionCase::new("sinks", rule, 700)
    }
}

fn shards(ranks: usize) -> Shards {
    Shards::contiguous(700, ranks, 1).unwrap()
}

/// Ranks 1 and 3 agree with each other in everything, up to the rounding of other sums, and differ
/// from attention without sinks.
#[test]
fn any_number_of_ranks_is_one() {
    let case = case(Some(vec![0.5, 2.0, -1.0, 4.0]));
    let numbers = case.problem();
    let run = |ranks| joined(&numbers, &shards(ranks), &around(&case, &numbers, &shards(ranks)));
    let (one, three) = (run(1), run(3));
    for (name, a, b) in [
        ("out", &one.out, &three.out),
        ("lse", &one.lse, &three.lse),
        ("dq", &one.dq, &three.dq),
        ("dk", &one.dk, &three.dk),
        ("dv", &one.dv, &three.dv),
    ] {
        for (a, b) in a.iter().zip(b) {
            assert!((a - b).abs() <= 1e-5 * (1.0 + a.abs()), "{name}: {a} and {b}");
        }
    }
    assert_eq!(one.dsink_logits.len(), 4);
    for (a, b) in one.dsink_logits.iter().zip(&three.dsink_logits) {
        assert!((a - b).abs() <= 1e-5 * (1.0 + a.abs()), "{a} and {b}");
        assert!(a.abs() > 1e-2, "{a} says nothing");
    }
}

/// Logits change between passes without a new ring, and without a message.
#[test]
fn logits_change_between_passes() {
    let (with, without) = (case(Some(vec![0.5, 2.0, -1.0, 4.0])), case(None));
    let numbers = without.problem();
    let [expected, plain] = [&with, &without].map(|case| around(case, &numbers, &shards(3)));
    std::thread::scope(|scope| {
        for (rank, transport) in Local::ranks(3).into_iter().enumerate() {
            let (numbers, with, without) = (&numbers, &with, &without);
            let (expected, plain) = (&expected[rank], &plain[rank]);
            scope.spawn(move || {
                let share = Share::of(numbers, &positions(&shards(3), rank));
                let mut ring =
                    Ring::new(transport, problem(without, shards(3)), options()).unwrap();
                for (logits, expected) in [
                    (None, plain),
                    (with.sink_logits.clone(), expected),
                    (with.sink_logits.clone(), expected),
                    (None, plain),
                ] {
                    ring.set_sink_logits(logits.clone().map(Into::into)).unwrap();
                    let inputs: Inputs<'_> = share.inputs();
                    let output = ring.forward(inputs).unwrap();
                    assert_eq!(
                        (output.out.as_slice(), &output.lse),
                        (&expected.out[..], &expected.lse)
                    );
                    let gradient = longspan::OutputGradient {
                        dout: share.dout.view(),
                        dlse: share.dlse.as_deref(),
                    };
                    let gradients = ring.backward(inputs, &output, gradient).unwrap();
                    assert_eq!(gradients.dq.as_slice(), expected.dq);
                    assert_eq!(gradients.dsink_logits.is_some(), logits.is_some());
                    assert_eq!(gradients.dsink_logits.unwrap_or_default(), expected.dsink_logits);
                }
                let refused = ring.set_sink_logits(Some([0.0; 3].into())).unwrap_err();
                assert!(refused.to_string().contains("sink_logits"), "{refused}");
            });
        }
    });
}

/// Ranks that are made with other logits do not start.
#[test]
fn ranks_with_other_logits() {
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let ranks = Local::ranks(2).into_iter().enumerate().map(|(rank, transport)| {
            let case = case(Some(vec![rank as f32; 4]));
            let problem = problem(&case, shards(2));
            scope.spawn(move || Ring::new(transport, problem, options()).unwrap_err())
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for error in errors {
        assert!(matches!(&error, Error::Mismatch { what, .. } if what == "sink_logits"), "{error}");
    }
    let wrong = problem(&case(Some(vec![f32::NAN; 4])), shards(1));
    let refused = Ring::new(Local::ranks(1).remove(0), wrong, options()).unwrap_err();
    assert!(refused.to_string().contains("sink logit"), "{refused}");
}
