//! Dilated attention over sequences of several lengths, padded or packed: each is one of its own, against
//! `f64`, and against one call per sequence.

use std::ops::Range;

use half::bf16;
use longspan::{
    Attend, BiasTable, Branch, Dilated, Dims, Dropout, Error, Inputs, Isa, Order, OutputGradient,
    Overlap, Pattern, Score, Tensor, Threads,
};
use longspan_testing::{LongNet, Problem, Rule, Sample, Sizes, Span, naive, normals, truth};

use crate::common::*;

const PLACEMENT: Placement = Placement::Contiguous(Order::Bshd);

/// What is one sequence.
#[derive(Clone, Debug)]
enum Lengths {
    Padded(Vec<Range<usize>>),
    Packed(Vec<u64>, Vec<u64>),
}

#[derive(Clone, Debug)]
struct Case {
    net: LongNet,
    sizes: Sizes,
    lengths: Lengths,
}

fn dilated(net: &LongNet) -> Dilated {
    let branches = net.branches.iter().map(|&(w, r)| Branch::new(w as u64, r as u64).unwrap());
    let overlap = if net.once { Overlap::Union } else { Overlap::Weighted };
    let within: Pattern = net.within.to_string().parse().unwrap();
    let dilated = Dilated::new(branches).unwrap().within(within).overlap(overlap);
    match &net.also {
        Some(also) => dilated.also(also.to_string().parse().unwrap()),
        None => dilated,
    }
}

fn of_lengths(dilated: Dilated, lengths: &Lengths) -> Dilated {
    match lengths {
        Lengths::Padded(valid) => dilated.padded(valid.iter().cloned()),
        Lengths::Packed(queries, keys) => dilated.packed_cu_seqlens(queries, keys).unwrap(),
    }
}

impl Case {
    fn problem(&self) -> Problem {
        let mut problem = Problem::normal(self.sizes, 3);
        problem.dlse = Some(normals(5, self.sizes.rows()));
        problem.seen = self.net.seen_in(&problem, &self.spans());
        problem
    }

    fn spans(&self) -> Vec<Vec<Span>> {
        let Sizes { tokens_q, tokens_k, .. } = self.sizes;
        let offset = tokens_k as i64 - tokens_q as i64;
        match &self.lengths {
            Lengths::Padded(valid) => {
                let span = |valid: &Range<usize>| Span::padded(valid.clone(), tokens_q, offset);
                valid.iter().map(|valid| vec![span(valid)]).collect()
            }
            Lengths::Packed(queries, keys) => vec![Span::packed(queries, keys)],
        }
    }

    fn check<E: Number>(&self) -> Vec<String> {
        let problem = self.problem().rounded(E::PRECISION);
        let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
        let tensors = TensorsOf::<E>::of(&problem, PLACEMENT);
        let mut wrong = Vec::new();
        for (n, isa) in Isa::available().into_iter().enumerate() {
            let dilated = of_lengths(dilated(&self.net), &self.lengths);
            let dilated = dilated.isa(isa).threads(Threads::Count(1 + n % 2));
            let got = Run { attention: &dilated, tensors: &tensors, results: PLACEMENT }.both();
            for measure in measures::<E>(isa, &problem, (&truth, &naive), &got, Sample::ALL) {
                if !measure.holds() {
                    wrong.push(format!("{isa} {} {measure}\n    {self:?}", E::TYPE));
                }
            }
        }
        wrong
    }
}

/// Branches that divide by nothing, cut, joined and counted in every way.
fn nets() -> Vec<LongNet> {
    let net = |branches: &[(i64, i64)], within, also, once| LongNet {
        branches: branches.to_vec(),
        within,
        also,
        once,
    };
    let window = || Some(Rule::Window { left: 13, right: 4 });
    vec![
        net(&[(64, 1), (128, 2), (256, 4)], Rule::Causal, None, false),
        net(&[(50, 3), (70, 4), (31, 1)], Rule::Full, None, true),
        net(&[(40, 2), (1_000, 8)], Rule::Causal, window(), false),
        net(&[(7, 7), (5, 9)], Rule::Window { left: 20, right: 5 }, window(), true),
    ]
}

fn cases() -> Vec<Case> {
    let sizes = |batch, tokens_q, tokens_k, heads_kv| Sizes {
        batch,
        tokens_q,
        tokens_k,
        heads_q: 4,
        heads_kv,
        dim_k: 19,
        dim_v: 24,
    };
    let padded = |tokens_q, tokens_k, valid: &[Range<usize>]| {
        (sizes(valid.len(), tokens_q, tokens_k, 2), Lengths::Padded(valid.to_vec()))
    };
    let packed = |queries: &[u64], keys: &[u64]| {
        let last = |list: &[u64]| *list.last().unwrap() as usize;
        let lengths = Lengths::Packed(queries.to_vec(), keys.to_vec());
        (sizes(1, last(queries), last(keys), 4), lengths)
    };
    let lengths = [
        // On the right, on the left, on both sides, none, one token, nothing at all.
        padded(200, 200, &[0..151, 37..200, 20..183, 0..200, 77..78, 60..60]),
        padded(90, 200, &[0..150, 120..200, 0..100, 0..200]),
        padded(230, 200, &[0..200, 50..130]),
        packed(&[0, 64, 64, 65, 200, 331], &[0, 64, 64, 65, 200, 331]),
        packed(&[0, 10, 10, 11, 50, 130], &[0, 64, 70, 71, 200, 331]),
        // More queries than keys, and sequences of which one has only queries or keys.
        packed(&[0, 80, 90, 90, 140], &[0, 50, 50, 60, 101]),
    ];
    let with_lengths = |net: &LongNet| {
        let case = |(sizes, lengths)| Case { net: net.clone(), sizes, lengths };
        lengths.clone().map(case)
    };
    nets().iter().flat_map(with_lengths).collect()
}

fn verdict(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn each_sequence_counts_from_its_first_key() {
    verdict(cases().iter().flat_map(Case::check::<f32>).collect());
}

#[test]
fn in_bf16() {
    verdict(cases().iter().step_by(2).flat_map(Case::check::<bf16>).collect());
}

/// Rows of a tensor, `[batch, head, token]` and their elements, of some tokens.
fn part(
    list: &[f32],
    (heads, tokens, dim): (usize, usize, usize),
    entry: usize,
    range: &Range<usize>,
) -> Vec<f32> {
    let rows = (0..heads).flat_map(|head| {
        let first = (entry * heads + head) * tokens;
        list[(first + range.start) * dim..(first + range.end) * dim].iter().copied()
    });
    rows.collect()
}

/// Everything that a row can have: additions, sinks and dropout.
fn with_options(dilated: Dilated) -> Dilated {
    let table = BiasTable::new(&normals(21, 4 * 26), 20, 5).unwrap();
    let score = Score::default().alibi_slopes([0.5, 0.1, 0.02, 0.3]).bias_table(table);
    dilated.score(score).sink_logits([1.0, -0.5, 0.3, 2.0]).dropout(Dropout::new(0.3, 7).unwrap())
}

/// What a call makes of tensors `[batch, head, token, dim]`.
struct Made {
    lists: [Vec<f32>; 5],
    learned: [Vec<f32>; 3],
}

fn run(dilated: &Dilated, sizes: Sizes, [q, k, v, dout]: [Vec<f32>; 4], dlse: &[f32]) -> Made {
    let Sizes { batch, tokens_q, tokens_k, heads_q, heads_kv, dim_k, dim_v } = sizes;
    let tensor = |data: Vec<f32>, tokens, heads, dim| {
        Tensor::new(data, Dims { batch, tokens, heads, dim }, Order::Bhsd).unwrap()
    };
    let (q, k) = (tensor(q, tokens_q, heads_q, dim_k), tensor(k, tokens_k, heads_kv, dim_k));
    let (v, dout) = (tensor(v, tokens_k, heads_kv, dim_v), tensor(dout, tokens_q, heads_q, dim_v));
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let output = dilated.forward(inputs).unwrap();
    let gradient = OutputGradient { dout: dout.view(), dlse: Some(dlse) };
    let gradients = Attend::backward(dilated, inputs, (&output).into(), gradient).unwrap();
    let list = |tensor: &Tensor<f32>| tensor.as_slice().to_vec();
    let (dq, dk, dv) = (list(&gradients.dq), list(&gradients.dk), list(&gradients.dv));
    Made {
        lists: [list(&output.out), output.lse, dq, dk, dv],
        learned: [
            gradients.dsink_logits.unwrap(),
            gradients.dbias_table.unwrap(),
            gradients.dalibi_slopes.unwrap(),
        ],
    }
}

/// With sinks, additions and dropout: results of one call per sequence, gradients of parameters summed
/// over them, and nothing anywhere else.
#[test]
fn equal_to_one_call_per_sequence() {
    for case in cases() {
        let problem = case.problem();
        let Sizes { tokens_q, tokens_k, heads_q, heads_kv, dim_k, dim_v, .. } = case.sizes;
        let (queries, keys) = ((heads_q, tokens_q), (heads_kv, tokens_k));
        let shapes =
            [(queries, dim_v), (queries, 1), (queries, dim_k), (keys, dim_k), (keys, dim_v)];
        let shapes = shapes.map(|((heads, tokens), dim)| (heads, tokens, dim));
        let whole = with_options(of_lengths(dilated(&case.net), &case.lengths));
        let dlse = problem.dlse.clone().unwrap();
        let inputs =
            [&problem.q, &problem.k, &problem.v, &problem.dout].map(|list: &Vec<f32>| list.clone());
        let got = run(&whole, case.sizes, inputs.clone(), &dlse);
        let mut learned = got.learned.clone().map(|list| vec![0.0; list.len()]);
        let mut covered = 0;
        for (entry, spans) in case.spans().iter().enumerate() {
            for (number, span) in spans.iter().enumerate() {
                let cut = |list: &[f32], shape: (usize, usize, usize), of_keys: bool| {
                    part(list, shape, entry, if of_keys { &span.keys } else { &span.queries })
                };
                let [q, k, v, dout] = &inputs;
                let own = [
                    cut(q, shapes[2], false),
                    cut(k, shapes[3], true),
                    cut(v, shapes[4], true),
                    cut(dout, shapes[0], false),
                ];
                let sizes = Sizes {
                    batch: 1,
                    tokens_q: span.queries.len(),
                    tokens_k: span.keys.len(),
                    ..case.sizes
                };
                // Dropout of a sequence is that of the batch entry of its number.
                let sequence = if spans.len() > 1 { number } else { entry };
                let one = with_options(dilated(&case.net)).query_offset(span.first);
                let one = of_batch(one, sizes, sequence, own, &cut(&dlse, shapes[1], false));
                for (index, (list, expected)) in got.lists.iter().zip(&one.lists).enumerate() {
                    let found = cut(list, shapes[index], index > 2);
                    // The same kernel calls, so the same bits.
                    let at = format!("list {index} of sequence {number} of entry {entry}");
                    assert_eq!(&found, expected, "{at}: {case:?}");
                    covered += found.iter().filter(|x| **x != 0.0 && x.is_finite()).count();
                }
                for (sums, own) in learned.iter_mut().zip(&one.learned) {
                    sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
                }
            }
        }
        for (found, expected) in got.learned.iter().zip(&learned) {
            // Sums over sequences in f32, one rounding each: three times the largest of 1.4e-6.
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 4.5e-6 * b.abs().max(1.0);
            assert!(found.iter().zip(expected).all(close), "{found:?} {expected:?}: {case:?}");
        }
        let nonzero = |list: &Vec<f32>| list.iter().filter(|x| **x != 0.0 && x.is_finite()).count();
        assert_eq!(got.lists.iter().map(nonzero).sum::<usize>(), covered, "outside: {case:?}");
        assert!(covered > 1_000, "{case:?}");
    }
}

/// One call on the entry with a number, in a batch of as many before it.
fn of_batch(
    dilated: Dilated,
    sizes: Sizes,
    number: usize,
    tensors: [Vec<f32>; 4],
    dlse: &[f32],
) -> Made {
    // Entries before it are zeros without gradients: they add nothing to those of parameters.
    let repeat = |list: &[f32]| [vec![0.0; number * list.len()], list.to_vec()].concat();
    let sizes = Sizes { batch: number + 1, ..sizes };
    let tensors = tensors.map(|list| repeat(&list));
    let Made { lists, learned } = run(&dilated, sizes, tensors, &repeat(dlse));
    let last = |list: Vec<f32>| list[list.len() / (number + 1) * number..].to_vec();
    Made { lists: lists.map(last), learned }
}

/// Padded and packed sequences are the same ones, dropout included.
#[test]
fn packed_is_padded() {
    let net = &nets()[2];
    let lengths = [70_usize, 1, 120];
    let sizes = Sizes {
        batch: 1,
        tokens_q: 191,
        tokens_k: 191,
        heads_q: 4,
        heads_kv: 2,
        dim_k: 16,
        dim_v: 16,
    };
    let problem = Problem::normal(sizes, 3);
    let bounds = [0_u64, 70, 71, 191];
    let packed = with_options(dilated(net)).packed_cu_seqlens(&bounds, &bounds).unwrap();
    let inputs = [&problem.q, &problem.k, &problem.v, &problem.dout].map(|x: &Vec<f32>| x.clone());
    let expected = run(&packed, sizes, inputs.clone(), &vec![0.0; sizes.rows()]);
    // On the left, in a batch.
    let mut batch = [4, 2, 2, 4].map(|heads| vec![0.0; 3 * heads * 120 * 16]);
    for (entry, &length) in lengths.iter().enumerate() {
        for (list, from) in batch.iter_mut().zip(&inputs) {
            let heads = list.len() / (3 * 120 * 16);
            let range = bounds[entry] as usize..bounds[entry + 1] as usize;
            let rows = part(from, (heads, 191, 16), 0, &range);
            for head in 0..heads {
                let to = ((entry * heads + head) * 120 + 120 - length) * 16;
                let own = &rows[head * length * 16..][..length * 16];
                list[to..to + length * 16].copy_from_slice(own);
            }
        }
    }
    let padded = with_options(dilated(net)).padded(lengths.map(|length| 120 - length..120));
    let sizes = Sizes { batch: 3, tokens_q: 120, tokens_k: 120, ..sizes };
    let got = run(&padded, sizes, batch, &vec![0.0; sizes.rows()]);
    for (entry, &length) in lengths.iter().enumerate() {
        let range = bounds[entry] as usize..bounds[entry + 1] as usize;
        let found = part(&got.lists[0], (4, 120, 16), entry, &(120 - length..120));
        assert_eq!(found, part(&expected.lists[0], (4, 191, 16), 0, &range), "{entry}");
    }
}

#[test]
fn wrong_lengths_are_errors() {
    let x = Tensor::<f32>::zeros(Dims { batch: 2, tokens: 10, heads: 1, dim: 4 }, Order::Bshd);
    let x = x.unwrap();
    let inputs = || Inputs::new(x.view(), x.view(), x.view());
    let plain = || Dilated::new([(4, 1)]).unwrap();
    let message = |dilated: Dilated| dilated.forward(inputs()).unwrap_err().to_string();
    assert_eq!(
        message(plain().padded(std::iter::once(0..10))),
        "padding has batch 1, expected 2 (as q)"
    );
    let wrong =
        "padding of batch entry 1: valid keys 3..11, expected an ascending range within 10 keys";
    assert_eq!(message(plain().padded([0..10, 3..11])), wrong);
    let packed = |list: &[u64]| plain().packed_cu_seqlens(list, list);
    let wrong = "q has batch 2, expected 1 (packed sequences lie side by side)";
    assert_eq!(message(packed(&[0, 10]).unwrap()), wrong);
    assert!(matches!(packed(&[0, 7, 5]), Err(Error::Pattern(_))));
    assert!(matches!(packed(&[]), Err(Error::Pattern(_))));
    let one = Tensor::<f32>::zeros(Dims { batch: 1, tokens: 10, heads: 1, dim: 4 }, Order::Bshd);
    let one = one.unwrap();
    let inputs = || Inputs::new(one.view(), one.view(), one.view());
    let message = |dilated: Dilated| dilated.forward(inputs()).unwrap_err().to_string();
    let wrong = "cu_seqlens_q has end 9, expected 10 (the tokens of q)";
    assert_eq!(message(packed(&[0, 3, 9]).unwrap()), wrong);
    let offset = packed(&[0, 10]).unwrap().query_offset(0);
    assert!(matches!(offset.forward(inputs()), Err(Error::Unexpected { .. })));
}
