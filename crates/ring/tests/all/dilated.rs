//! Dilated attention over a ring: results against the paper's equations in `f64`, bits, bytes and
//! plans, for many shardings and numbers of ranks.

use std::collections::BTreeSet;

use half::bf16;
use longspan::{Dilated, Dims, Element, Inputs, Isa, OutputGradient, Tensor, View};
use longspan_ring::{
    CommunicationPlanner, Error, Local, Options, PlannedHop, Problem, Reduction, Ring, Shards,
};
use longspan_testing::{
    Measure, Precision, Problem as Numbers, Rule, Sample, Sizes, Values, assert_close, naive, truth,
};

use crate::common::branches::*;
use crate::common::*;

/// Both passes of all ranks in `E`, as f32 in the order of the sequence.
fn run<E: Element + bytemuck::Pod>(
    case: &Case,
    numbers: &Numbers,
    shards: &Shards,
    options: &Options,
) -> Values<f32> {
    let parts: Vec<_> = std::thread::scope(|scope| {
        let spawn = |(rank, transport)| {
            let share = Share::of(numbers, &positions(shards, rank));
            let problem = case.ring(shards, numbers).element(E::TYPE);
            let options = options.clone();
            scope.spawn(move || both_as::<E>(transport, problem, &share, options).unwrap())
        };
        let ranks: Vec<_> =
            Local::ranks(shards.ranks()).into_iter().enumerate().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    joined(numbers, shards, &parts)
}

fn both_as<E: Element + bytemuck::Pod>(
    transport: Local,
    problem: Problem,
    share: &Share,
    options: Options,
) -> Result<Results, Error> {
    let as_e = |tensor: &Tensor<f32>| {
        let data = tensor.as_slice().iter().map(|x| E::from_f32(*x)).collect();
        Tensor::<E>::new(data, tensor.view().dims(), ORDER).unwrap()
    };
    let [q, k, v, dout] = [&share.q, &share.k, &share.v, &share.dout].map(as_e);
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let mut ring = Ring::new(transport, problem, options)?;
    let output = ring.forward(inputs)?;
    let gradient = OutputGradient { dout: dout.view(), dlse: share.dlse.as_deref() };
    let gradients = ring.backward(inputs, &output, gradient)?;
    let tally = ring.tally();
    let needed = ring.bytes_needed();
    assert_eq!(tally.received, needed.0 + needed.1);
    let list = |view: View<'_, E>| {
        let Dims { batch, tokens, heads, dim } = view.dims();
        let mut all = Vec::new();
        let mut row = vec![E::default(); dim];
        for index in 0..batch * heads * tokens {
            let (head, token) = (index / tokens, index % tokens);
            view.copy_row(head / heads, token, head % heads, &mut row);
            all.extend(row.iter().map(|x| x.to_f32()));
        }
        all
    };
    Ok(Results {
        out: list(output.out.view()),
        lse: output.lse.clone(),
        dq: list(gradients.dq.view()),
        dk: list(gradients.dk.view()),
        dv: list(gradients.dv.view()),
        dsink_logits: gradients.dsink_logits.unwrap_or_default(),
        dbias_table: gradients.dbias_table.unwrap_or_default(),
        dalibi_slopes: gradients.dalibi_slopes.unwrap_or_default(),
        tally,
        needed,
        pairs: ring.active_pairs()?,
    })
}

fn check<E: Element + bytemuck::Pod>(
    case: &Case,
    precision: Precision,
    ranks: &[usize],
) -> Vec<String> {
    let numbers = case.numbers().rounded(precision);
    let (truth, naive) = (truth(&numbers, Sample::ALL), naive(&numbers, Sample::ALL));
    let on_matrix_unit = E::TYPE == bf16::TYPE && Isa::available().contains(&Isa::Amx);
    let mut wrong = Vec::new();
    for &ranks in ranks {
        for (map, shards) in case.shards(ranks, 1) {
            let got = run::<E>(case, &numbers, &shards, &options());
            for measure in Measure::all(&numbers, &truth, &naive, &got, Sample::ALL) {
                let measure = if on_matrix_unit { measure.on_matrix_unit() } else { measure };
                if !measure.holds() {
                    wrong.push(format!("{ranks} ranks, {map}, {}: {measure}\n {case:?}", E::TYPE));
                }
            }
        }
    }
    wrong
}

fn verdict(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn equal_to_the_paper() {
    verdict(
        cases().iter().flat_map(|case| check::<f32>(case, Precision::F32, &[1, 2, 4])).collect(),
    );
}

#[test]
fn equal_on_three_and_on_seven_ranks() {
    verdict(cases().iter().flat_map(|case| check::<f32>(case, Precision::F32, &[3, 7])).collect());
}

#[test]
fn equal_in_bf16() {
    verdict(
        cases().iter().flat_map(|case| check::<bf16>(case, Precision::Bf16, &[2, 3])).collect(),
    );
}

/// Forward bits do not depend on the number of ranks, in both types.
#[test]
fn reproducible_bits_for_any_number_of_ranks() {
    fn bits<E: Element + bytemuck::Pod>(
        case: &Case,
        numbers: &Numbers,
        shards: &Shards,
    ) -> Vec<u32> {
        let mut parts = vec![Vec::new(); shards.ranks()];
        std::thread::scope(|scope| {
            let ranks = Local::ranks(shards.ranks()).into_iter().enumerate().zip(&mut parts);
            for ((rank, transport), part) in ranks {
                let share = Share::of(numbers, &positions(shards, rank));
                let problem = case.ring(shards, numbers).reduction(Reduction::Reproducible);
                scope.spawn(move || {
                    let as_e = |tensor: &Tensor<f32>| {
                        let data = tensor.as_slice().iter().map(|x| E::from_f32(*x)).collect();
                        Tensor::<E>::new(data, tensor.view().dims(), ORDER).unwrap()
                    };
                    let [q, k, v] = [&share.q, &share.k, &share.v].map(as_e);
                    let problem = problem.element(E::TYPE);
                    let mut ring = Ring::new(transport, problem, options()).unwrap();
                    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
                    let output = ring.forward(inputs).unwrap();
                    *part = output.out.as_slice().iter().map(|x| x.to_f32()).collect();
                    part.extend(&output.lse);
                });
            }
        });
        let Sizes { dim_v, tokens_k, .. } = numbers.sizes;
        let (mut out, mut lse) = (vec![0.0; numbers.sizes.out()], vec![0.0; numbers.sizes.rows()]);
        for (rank, part) in parts.iter().enumerate() {
            let chosen = positions(shards, rank);
            let (part_out, part_lse) = part.split_at(part.len() / (dim_v + 1) * dim_v);
            put(&mut out, tokens_k, dim_v, &chosen, part_out);
            put(&mut lse, tokens_k, 1, &chosen, part_lse);
        }
        out.iter().chain(&lse).map(|x| x.to_bits()).collect()
    }
    let cases = cases().into_iter().filter(|case| case.sizes.tokens_k > 300);
    for case in cases {
        let one = Shards::contiguous(case.sizes.tokens_k, 1, 64).unwrap();
        let numbers = case.numbers();
        let expected = (bits::<f32>(&case, &numbers, &one), bits::<bf16>(&case, &numbers, &one));
        for ranks in 1..=4 {
            for (map, shards) in
                case.shards(ranks, 64).into_iter().filter(|(map, _)| !map.contains("13"))
            {
                assert!(
                    bits::<f32>(&case, &numbers, &shards) == expected.0,
                    "f32, {ranks}, {map}: {case:?}"
                );
                assert!(
                    bits::<bf16>(&case, &numbers, &shards) == expected.1,
                    "bf16, {ranks}, {map}: {case:?}"
                );
            }
        }
    }
}

/// Which keys the query heads of each key head attend to, `[key head][query][key]`.
fn attended(case: &Case) -> Vec<Vec<BTreeSet<usize>>> {
    let seen = case.seen(&Numbers::normal(case.sizes, 3));
    let group = case.sizes.heads_q / case.sizes.heads_kv;
    let keys = |key_head: usize, query: usize| -> BTreeSet<usize> {
        let heads = key_head * group..(key_head + 1) * group;
        let rows = heads.flat_map(|head| (0..case.sizes.batch).map(move |entry| (entry, head)));
        rows.flat_map(|(entry, head)| seen.keys(entry, head, query))
            .map(|key| *key as usize)
            .collect()
    };
    let rows = |key_head| (0..case.sizes.tokens_q).map(|query| keys(key_head, query)).collect();
    (0..case.sizes.heads_kv).map(rows).collect()
}

/// Bytes of a key head's keys and values of a token in f32.
fn key_bytes(case: &Case) -> u64 {
    4 * (case.sizes.batch * (case.sizes.dim_k + case.sizes.dim_v)) as u64
}

fn bytes_needed(problem: &Problem, ranks: usize) -> Vec<(u64, u64)> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = Local::ranks(ranks)
            .into_iter()
            .map(|transport| {
                let problem = problem.clone();
                scope.spawn(|| Ring::new(transport, problem, options()).unwrap().bytes_needed())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Every rank receives the keys that a count of all pairs says, per key head, and in the backward pass
/// gradients of those that it sent; whole tiles under the reproducible reduction. Plans say the same.
#[test]
fn received_bytes_are_those_needed_per_key_head() {
    for case in cases().into_iter().filter(|case| case.sizes.tokens_k > 60) {
        let (attended, numbers) = (attended(&case), case.numbers());
        for ranks in [2, 5] {
            let overlapped = case.shards(ranks, 1).into_iter().map(|map| (map, false));
            let tiles = case.shards(ranks, 64).into_iter().take(3).map(|map| (map, true));
            for ((map, shards), tiled) in overlapped.chain(tiles) {
                let reduction = if tiled { Reduction::Reproducible } else { Reduction::Overlapped };
                let held: Vec<_> = (0..ranks).map(|rank| positions(&shards, rank)).collect();
                let unit = if tiled { 64 } else { 1 };
                // The tiles that a rank's queries attend to, per key head.
                let tiles = |rank: usize, head: usize| -> Vec<bool> {
                    let mut tiles = vec![false; case.sizes.tokens_k.div_ceil(unit)];
                    let rows = held[rank].iter().flat_map(|&query| &attended[head][query]);
                    rows.for_each(|key| tiles[key / unit] = true);
                    tiles
                };
                let heads = 0..case.sizes.heads_kv;
                let of_rank = |rank| heads.clone().map(|head| tiles(rank, head)).collect();
                let needed: Vec<Vec<Vec<bool>>> = (0..ranks).map(of_rank).collect();
                let transferred = |rank: usize, owner: usize| -> u64 {
                    let keys = |tiles: &Vec<bool>| {
                        held[owner].iter().filter(|key| tiles[*key / unit]).count()
                    };
                    needed[rank].iter().map(keys).sum::<usize>() as u64 * key_bytes(&case)
                };
                let problem = case.ring(&shards, &numbers).reduction(reduction);
                let mut planner = CommunicationPlanner::new(&problem).unwrap();
                let got = bytes_needed(&problem, ranks);
                for (rank, got) in got.into_iter().enumerate() {
                    let others = || (0..ranks).filter(|&other| other != rank);
                    let keys: u64 = others().map(|other| transferred(rank, other)).sum();
                    let gradients: u64 = others().map(|other| transferred(other, rank)).sum();
                    let at = format!("rank {rank} of {ranks}, {map}: {case:?}");
                    assert_eq!(got, (keys, keys + gradients), "{at}");
                    let plan = planner.rank(rank).unwrap();
                    let received =
                        |hops: &[PlannedHop]| hops.iter().map(PlannedHop::received).sum::<u64>();
                    assert_eq!((received(&plan.forward), received(&plan.backward)), got, "{at}");
                }
            }
        }
    }
}

/// One segment over all tokens: a rate of 4 without GQA needs a quarter of what the union of heads
/// would, a rate of 8 on two key heads half of it.
#[test]
fn key_heads_need_their_own_offsets() {
    for (rate, key_heads, part) in [(4, 8, 4), (8, 2, 2)] {
        let tokens = 1_024;
        let case = case(&[(tokens, rate)], Rule::Full, tokens as usize, (8, key_heads));
        let shards = Shards::contiguous(tokens as usize, 4, 1).unwrap();
        let union = 3 * (tokens as u64 / 4) * key_heads as u64 * key_bytes(&case);
        let problem = case.ring(&shards, &case.numbers());
        for (forward, _) in bytes_needed(&problem, 4) {
            assert_eq!(forward * part, union);
        }
    }
}

/// The planned pairs are those that a ring computes, and balanced shards have even ones.
#[test]
fn plans_have_the_pairs_of_rings() {
    for case in cases() {
        let tokens = case.sizes.tokens_k;
        let shards = Shards::balanced(case.dilated(), tokens, 3, 1).unwrap();
        let numbers = case.numbers();
        let problem = case.ring(&shards, &numbers);
        let mut planner = CommunicationPlanner::new(&problem).unwrap();
        // With padding it is the mean over batch entries, every part of it rounded up.
        let is_padded = matches!(case.lengths, Lengths::Padded(_));
        let slack = |pairs: u128| if is_padded { pairs / 100 } else { 0 };
        let mut sum = 0;
        for (rank, transport) in Local::ranks(3).into_iter().enumerate() {
            let plan = planner.rank(rank).unwrap();
            let pairs = |hops: &[PlannedHop]| hops.iter().map(|hop| hop.work.pairs).sum::<u128>();
            assert_eq!(pairs(&plan.forward), pairs(&plan.backward));
            let (planned, counted) =
                (pairs(&plan.forward), planner.pairs(rank, usize::MAX).unwrap());
            assert!(planned - counted <= slack(counted), "{planned} {counted}: {case:?}");
            sum += planned;
            drop(transport);
        }
        let seen = case.seen(&numbers);
        let pairs = |entry: usize| -> usize {
            let rows = (0..case.sizes.heads_q).flat_map(|head| (0..tokens).map(move |q| (head, q)));
            rows.map(|(head, query)| seen.keys(entry, head, query).len()).sum()
        };
        let batch = case.sizes.batch;
        let expected = (0..batch).map(pairs).sum::<usize>().div_ceil(batch) as u128;
        assert!(sum - expected <= slack(expected), "{sum} {expected}: {case:?}");
    }
    let long = case(&[(512, 1), (2_048, 4), (8_192, 16)], Rule::Causal, 8_192, (8, 8));
    let shards = Shards::balanced(long.dilated(), 8_192, 4, 64).unwrap();
    let problem =
        long.ring(&shards, &Numbers::normal(case(&[(1, 1)], Rule::Full, 1, (8, 8)).sizes, 1));
    let planner = CommunicationPlanner::new(&problem).unwrap();
    let pairs: Vec<_> = (0..4).map(|rank| planner.pairs(rank, usize::MAX).unwrap()).collect();
    let (most, all) = (*pairs.iter().max().unwrap(), pairs.iter().sum::<u128>());
    assert!(10 * 4 * most <= 11 * all, "{pairs:?}");
}

/// Padding with everything that rows can have, as in one process: a row outside of its entry's sequence has
/// no sink either.
#[test]
fn padding_is_that_of_one_process() {
    let mut case = cases().pop().unwrap().padded(&[0..300, 77..240]);
    case.net.also = Some(Rule::Window { left: 30, right: 0 });
    let numbers = case.numbers();
    let one = Shards::contiguous(case.sizes.tokens_k, 1, 1).unwrap();
    let expected = run::<f32>(&case, &numbers, &one, &options());
    let Sizes { batch, tokens_q, heads_q, .. } = case.sizes;
    for row in 0..batch * heads_q * tokens_q {
        let outside = row >= heads_q * tokens_q && !(77..240).contains(&(row % tokens_q));
        assert_eq!(expected.lse[row] == f32::NEG_INFINITY, outside);
    }
    for (map, shards) in case.shards(3, 1) {
        let got = run::<f32>(&case, &numbers, &shards, &options());
        let lists = |values: &Values<f32>| {
            let Values { out, lse, dq, dk, dv, dsink_logits, dbias_table, .. } = values.clone();
            [out, lse, dq, dk, dv, dsink_logits, dbias_table]
        };
        for (index, (got, expected)) in lists(&got).iter().zip(&lists(&expected)).enumerate() {
            // Sums over the rows of a head, in another order.
            let largest =
                expected.iter().filter(|x| x.is_finite()).fold(1.0, |a: f32, b| a.max(b.abs()));
            let near = 1e-6 * f64::from(largest);
            assert_close(format_args!("{map}, list {index}"), got, expected, near);
        }
    }
}

/// Options that a ring would not use are refused, on every rank; so are ranks with other branches.
#[test]
fn options_of_dilated_attention_are_refused() {
    let shards = Shards::contiguous(100, 2, 1).unwrap();
    let refused = |of: fn(usize) -> Dilated| -> Vec<String> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = Local::ranks(2)
                .into_iter()
                .enumerate()
                .map(|(rank, transport)| {
                    let problem = Problem::new(of(rank), shards.clone());
                    scope
                        .spawn(|| Ring::new(transport, problem, options()).unwrap_err().to_string())
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    let errors = refused(|_| Dilated::new([(8, 1)]).unwrap().scale(0.5));
    assert!(errors.iter().any(|error| error.contains("set them on the problem")), "{errors:?}");
    let errors = refused(|rank| Dilated::new([(8, 1), (16, 1 + rank as u64)]).unwrap());
    assert!(errors.iter().all(|error| error.contains("(8, 1), (16, 2)")), "{errors:?}");
}
