//! Results that are bitwise independent of ranks and threads.

use longspan::{Dims, Gradients, Order, Output, Tensor, Threads};
use longspan_ring::{Local, Options, Reduction, Ring, Shards};
use longspan_testing::{AttentionCase, Case, Rule};

use crate::common::*;

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
    reduction: Reduction,
    threads: usize,
) -> (Vec<u32>, Vec<u32>) {
    let numbers = case.unmasked();
    let threads = Threads::Count(threads);
    let parts: Vec<_> = std::thread::scope(|scope| {
        let spawn = |(rank, transport): (usize, Local)| {
            let share = Share::of(&numbers, &positions(shards, rank));
            let problem = problem(case, shards.clone()).reduction(reduction);
            scope.spawn(move || {
                let options = Options { threads, ..options() };
                let mut ring = Ring::new(transport, problem, options).unwrap();
                let inputs = share.inputs();
                let output = ring.forward(inputs).unwrap();
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
fn reproducible_bits_for_any_number_of_ranks() {
    for case in cases() {
        let tokens = case.layout.tokens_k as usize;
        let one = Shards::contiguous(tokens, 1, 64).unwrap();
        let expected = forward(&case, &one, Reduction::Reproducible, 1);
        for ranks in 1..=8 {
            for shards in [
                Shards::contiguous(tokens, ranks, 64).unwrap(),
                Shards::zigzag(tokens, ranks, 64).unwrap(),
                Shards::striped(tokens, ranks, 64).unwrap(),
            ] {
                let got = forward(&case, &shards, Reduction::Reproducible, 1 + ranks % 2);
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
fn shard_edges_inside_of_tiles_are_rejected() {
    let case = &cases()[0];
    let shards = Shards::contiguous(1_100, 3, 1).unwrap();
    std::thread::scope(|scope| {
        for transport in Local::ranks(3) {
            let problem = problem(case, shards.clone()).reduction(Reduction::Reproducible);
            scope.spawn(move || {
                let error = Ring::new(transport, problem, options()).unwrap_err();
                assert!(error.to_string().contains("multiples of 64"), "{error}");
            });
        }
    });
}

/// Calls of fewer than 64 blocks of 64 × 64 at 64 + 64 dims use one thread. Each of five ranks has 440
/// of these queries, seven block rows per head: the narrowest pattern, a window of 19 keys, has two
/// blocks per row over local keys, 112 with all heads.
#[test]
fn bits_are_independent_of_threads_and_timing() {
    for case in cases() {
        let layout = Case { tokens_q: 2_200, tokens_k: 2_200, ..case.layout };
        let case = AttentionCase { layout, heads_q: 8, dim_k: 64, dim_v: 64, ..case };
        let shards = Shards::zigzag(case.layout.tokens_k as usize, 5, 1).unwrap();
        let expected = forward(&case, &shards, Reduction::Overlapped, 1);
        for threads in [1, 2, 3] {
            assert!(
                forward(&case, &shards, Reduction::Overlapped, threads) == expected,
                "{}",
                case.name
            );
        }
    }
}

/// Uninitialized memory in another order of axes, written twice: the same bits as in memory that the
/// ring allocates.
#[test]
fn results_are_written_to_caller_memory() {
    let case = AttentionCase { batch: 2, ..cases().remove(2) };
    let numbers = case.unmasked();
    let shards = Shards::zigzag(1_100, 3, 1).unwrap();
    std::thread::scope(|scope| {
        for (rank, transport) in Local::ranks(3).into_iter().enumerate() {
            let share = Share::of(&numbers, &positions(&shards, rank));
            let problem = problem(&case, shards.clone());
            scope.spawn(move || {
                let mut ring = Ring::new(transport, problem, options()).unwrap();
                let (inputs, dout) = (share.inputs(), share.dout.view());
                let output = ring.forward(inputs).unwrap();
                let gradients = ring.backward(inputs, &output, dout).unwrap();
                let other = |dims| Tensor::filled(f32::NAN, dims, Order::Bshd).unwrap();
                let mut given = Output {
                    out: other(dout.dims()),
                    lse: vec![f32::NAN; output.lse.len()],
                    lse_lo: vec![f32::NAN; output.lse.len()],
                };
                let mut written = Gradients {
                    dq: other(inputs.q.dims()),
                    dk: other(inputs.k.dims()),
                    dv: other(inputs.v.dims()),
                    dsink_logits: None,
                    dbias_table: None,
                    dalibi_slopes: None,
                };
                for _ in 0..2 {
                    ring.forward_into(inputs, given.as_mut()).unwrap();
                    let (saved, gradient) = (&given, dout);
                    ring.backward_into(inputs, saved, gradient, written.as_mut()).unwrap();
                    assert_eq!((&given.lse, &given.lse_lo), (&output.lse, &output.lse_lo));
                    for (a, b) in [
                        (&given.out, &output.out),
                        (&written.dq, &gradients.dq),
                        (&written.dk, &gradients.dk),
                        (&written.dv, &gradients.dv),
                    ] {
                        assert_eq!(rows(a), rows(b));
                    }
                }
            });
        }
    });
}

/// Bits by batch entry, head and token, independent of strides.
fn rows(tensor: &Tensor<f32>) -> Vec<u32> {
    let (view, mut row) = (tensor.view(), vec![0.0; tensor.view().dims().dim]);
    let Dims { batch, tokens, heads, .. } = view.dims();
    let mut all = Vec::new();
    for index in 0..batch * heads * tokens {
        view.copy_row(index / tokens / heads, index % tokens, index / tokens % heads, &mut row);
        all.extend(row.iter().map(|x| x.to_bits()));
    }
    all
}
