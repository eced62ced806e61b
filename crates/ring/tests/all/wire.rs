//! Compressed keys and values.

use longspan::{Attention, Layout, Pattern, Shape};
use longspan_ring::{Error, Local, Ring, Shards, Wire};
use longspan_testing::{AttentionCase, Rule, largest_difference};

use crate::common::*;

fn case() -> AttentionCase {
    let sinks = Rule::Or(vec![Rule::Window { left: 300, right: 0 }, Rule::Sinks { n: 4 }]);
    let rule = Rule::And(vec![Rule::Causal, sinks]);
    AttentionCase { heads_q: 4, ..AttentionCase::new("wire", rule, 1_200) }
}

/// Bound of the difference between one process and a ring in f32: each has an error of up to 16 units
/// of 2⁻²⁴ of the largest value (scores below 8, summed in pieces of 16), and no value exceeds 5.
const EXACT: f64 = 2.0 * 16.0 * 5.0 / (1 << 24) as f64;

/// Largest difference to the outputs of one process, and bytes received by all ranks.
fn run(wire: Wire) -> (f64, u64) {
    let case = case();
    let numbers = case.unmasked();
    let shards = Shards::contiguous(1_200, 6, 1).unwrap();
    let pattern: Pattern = case.pattern_text().parse().unwrap();
    let layout = Layout::compile(&pattern, &Shape::new(1_200, 1_200)).unwrap();
    let whole = Share::of(&numbers, &(0..1_200).collect::<Vec<_>>());
    let inputs = whole.inputs();
    let expected = Attention::new(layout).forward(inputs).unwrap();

    let results: Vec<_> = std::thread::scope(|scope| {
        let spawn = |(rank, transport): (usize, Local)| {
            let share = Share::of(&numbers, &positions(&shards, rank));
            let problem = problem(&case, shards.clone()).wire(wire);
            scope.spawn(move || both(transport, problem, &share).unwrap())
        };
        let ranks: Vec<_> = Local::ranks(6).into_iter().enumerate().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let got = joined(&numbers, &shards, &results);
    let off = largest_difference(&got.out, expected.out.as_slice());
    (off, results.iter().map(|result| result.tally.received).sum())
}

#[test]
fn errors_grow_as_bytes_shrink() {
    let (exact_off, exact) = run(Wire::Exact);
    let (half_off, half) = run(Wire::Bf16);
    let (byte_off, byte) = run(Wire::Int8);
    assert!(exact_off <= EXACT, "{exact_off}");
    // Values of unit scale: 2⁻⁹ of a value, 1/254 of the largest of 2,048; a few times both.
    assert!((1e-4..2e-2).contains(&half_off), "{half_off}");
    assert!((1e-3..1e-1).contains(&byte_off), "{byte_off}");
    assert!(byte < half && half < exact);
    // Gradients are sent as f32, so of keys sent twice and gradients sent once a third remains.
    assert!(3 * half <= 2 * exact && 2 * byte <= exact + exact / 64, "{exact} {half} {byte}");
}

#[test]
fn a_bound_is_kept_with_few_bytes() {
    let (_, exact) = run(Wire::Exact);
    let mut before = u64::MAX;
    for bound in [0.0, 1e-3, 1e-2, 1e-1] {
        let (off, bytes) = run(Wire::within(bound).unwrap());
        // Keys with errors up to the bound move a score by up to bound · Σ|q| / √d, a few times it.
        assert!(off <= EXACT + 8.0 * f64::from(bound), "{bound}: {off}");
        assert!(bytes <= before, "{bound}");
        before = bytes;
    }
    assert!(2 * before <= exact + exact / 32);
}

#[test]
fn values_without_8_bit_form_are_rejected_on_all_ranks() {
    let case = case();
    let mut numbers = case.unmasked();
    numbers.k[700 * 32] = f32::INFINITY;
    let shards = Shards::contiguous(1_200, 3, 1).unwrap();
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let spawn = |(rank, transport): (usize, Local)| {
            let share = Share::of(&numbers, &positions(&shards, rank));
            let problem = problem(&case, shards.clone()).wire(Wire::Int8);
            scope.spawn(move || {
                let mut ring = Ring::new(transport, problem, options()).unwrap();
                let inputs = share.inputs();
                ring.forward(inputs).unwrap_err()
            })
        };
        let ranks: Vec<_> = Local::ranks(3).into_iter().enumerate().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(errors[1], Error::NotFinite { tensor: "k" });
    for rank in [0, 2] {
        assert!(
            matches!(errors[rank], Error::Aborted { suspect: Some(1), .. }),
            "{}",
            errors[rank]
        );
    }
}
