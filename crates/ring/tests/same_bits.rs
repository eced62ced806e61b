//! Bits that don't depend on who computes them.

use std::num::NonZeroUsize;

use longspan::Threads;
use longspan_ring::{Fold, Local, Options, Ring, Shards};
use longspan_testing::{AttentionCase, Rule};

mod common;

use common::*;

fn cases() -> Vec<AttentionCase> {
    let sinks = Rule::Or(vec![Rule::Window { left: 100, right: 0 }, Rule::Sinks { n: 4 }]);
    let rules = [
        ("causal", Rule::Causal),
        ("full", Rule::Full),
        ("sinks", Rule::And(vec![Rule::Causal, sinks])),
        ("dilated", Rule::Dilated { segment: 256, rate: 3, offset: 0 }),
        ("global", Rule::Or(vec![Rule::Window { left: 9, right: 9 }, Rule::GlobalTokens { n: 7 }])),
    ];
    let grouped = |(name, rule)| AttentionCase {
        heads_q: 4,
        heads_kv: 2,
        dim_k: 24,
        dim_v: 40,
        ..AttentionCase::new(name, rule, 1_100)
    };
    rules.into_iter().map(grouped).collect()
}

/// Output and log-sum-exp of all ranks, in the order of positions.
fn forward(
    case: &AttentionCase,
    shards: &Shards,
    fold: Fold,
    threads: usize,
) -> (Vec<u32>, Vec<u32>) {
    let numbers = case.unmasked();
    let threads = Threads::Count(NonZeroUsize::new(threads).unwrap());
    let parts: Vec<_> = std::thread::scope(|scope| {
        let spawn = |(rank, transport): (usize, Local)| {
            let share = Share::of(&numbers, &positions(shards, rank));
            let problem = problem(case, shards.clone()).fold(fold);
            scope.spawn(move || {
                let options = Options { threads, ..options() };
                let mut ring = Ring::new(transport, problem, options).unwrap();
                let inputs = share.inputs();
                let output = ring.forward(inputs.q, inputs.k, inputs.v).unwrap();
                (output.out.as_slice().to_vec(), output.lse)
            })
        };
        let ranks: Vec<_> =
            Local::ranks(shards.ranks()).into_iter().enumerate().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let sizes = numbers.sizes;
    let mut out = vec![f32::NAN; sizes.out()];
    let mut lse = vec![f32::NAN; sizes.rows()];
    for (rank, (part_out, part_lse)) in parts.iter().enumerate() {
        let chosen = positions(shards, rank);
        put(&mut out, sizes.tokens_k, sizes.dim_v, &chosen, part_out);
        put(&mut lse, sizes.tokens_k, 1, &chosen, part_lse);
    }
    let bits = |list: &[f32]| list.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    (bits(&out), bits(&lse))
}

#[test]
fn any_number_of_ranks_gives_the_same_bits_where_asked_for() {
    for case in cases() {
        let tokens = case.layout.tokens_k;
        let one = Shards::contiguous(tokens, 1, 64).unwrap();
        let expected = forward(&case, &one, Fold::Reproducible, 1);
        for ranks in 1..=8 {
            for shards in [
                Shards::contiguous(tokens, ranks, 64).unwrap(),
                Shards::zigzag(tokens, ranks, 64).unwrap(),
                Shards::striped(tokens, ranks, 64).unwrap(),
            ] {
                let got = forward(&case, &shards, Fold::Reproducible, 1 + ranks % 2);
                let differ =
                    |(a, b): (&Vec<u32>, &Vec<u32>)| a.iter().zip(b).position(|(a, b)| a != b);
                let first = (differ((&got.0, &expected.0)), differ((&got.1, &expected.1)));
                assert!(
                    got == expected,
                    "{}, {ranks} ranks, from {first:?} on, {shards:?}",
                    case.name
                );
            }
        }
    }
}

#[test]
fn edges_that_cut_tiles_are_refused() {
    let case = &cases()[0];
    let shards = Shards::contiguous(1_100, 3, 1).unwrap();
    std::thread::scope(|scope| {
        for transport in Local::ranks(3) {
            let problem = problem(case, shards.clone()).fold(Fold::Reproducible);
            scope.spawn(move || {
                let error = Ring::new(transport, problem, options()).unwrap_err();
                assert!(error.to_string().contains("multiples of 64"), "{error}");
            });
        }
    });
}

#[test]
fn threads_and_luck_change_nothing() {
    for case in cases() {
        let shards = Shards::zigzag(case.layout.tokens_k, 5, 1).unwrap();
        let expected = forward(&case, &shards, Fold::Overlapped, 1);
        for threads in [1, 2, 3] {
            assert!(
                forward(&case, &shards, Fold::Overlapped, threads) == expected,
                "{}",
                case.name
            );
        }
    }
}
