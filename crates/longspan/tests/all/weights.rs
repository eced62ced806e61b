//! Attention weights of chosen rows: against the definition in f64, and against outputs.

use std::ops::ControlFlow;

use half::{bf16, f16};
use longspan::{
    Attention, Dims, Element, Error, Hook, Inputs, Isa, Layout, Order, Pattern, Shape, Tensor,
    WeightRows,
};
use longspan_testing::{AttentionCase, Problem, Rule, attention_cases, normals};

use crate::common::*;

/// The weights of a query over all keys, as the definition has them.
fn defined(problem: &Problem, entry: usize, head: usize, query: usize) -> Vec<f64> {
    let sizes = &problem.sizes;
    let token = |tensor: &[f32], row: usize| -> Vec<f64> {
        tensor[row * sizes.dim_k..][..sizes.dim_k].iter().map(|&x| x.into()).collect()
    };
    let q = token(&problem.q, (entry * sizes.heads_q + head) * sizes.tokens_q + query);
    let key_head = entry * sizes.heads_kv + head * sizes.heads_kv / sizes.heads_q;
    let transform = &problem.transform;
    let mut scores = vec![f64::NEG_INFINITY; sizes.tokens_k];
    for &key in problem.seen.keys(entry, head, query) {
        let key = key as usize;
        let k = token(&problem.k, key_head * sizes.tokens_k + key);
        let mut score = problem.scale * q.iter().zip(&k).map(|(x, y)| x * y).sum::<f64>();
        if let Some(cap) = transform.softcap.map(f64::from) {
            score = cap * (score / cap).tanh();
        }
        if transform.has_distances() {
            let positions = &problem.score_positions[head % problem.score_positions.len()];
            let distance = positions[0][query] - positions[1][key];
            if let Some(&slope) = transform.slopes.get(head) {
                score -= f64::from(slope) * distance.abs() as f64;
            }
            if let Some(table) = &transform.table {
                let (left, right) = (table.left as i64, table.right as i64);
                let column = (distance.clamp(-right, left) + right) as usize;
                score += f64::from(table.values[head * (table.left + table.right + 1) + column]);
            }
        }
        scores[key] = score;
    }
    let sink = problem.sink_logits.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[head].into());
    let greatest = scores.iter().copied().fold(sink, f64::max);
    if greatest == f64::NEG_INFINITY {
        return vec![0.0; sizes.tokens_k];
    }
    let total = scores.iter().map(|score| (score - greatest).exp()).sum::<f64>();
    let total = total + (sink - greatest).exp();
    let weight = |(key, score): (usize, &f64)| {
        let positions = (problem.query_positions[query], problem.key_positions[key]);
        let kept = transform.kept(entry, sizes.heads_q, head, positions.0, positions.1);
        kept * (score - greatest).exp() / total
    };
    scores.iter().enumerate().map(weight).collect()
}

/// What cases had.
#[derive(Default)]
struct Had {
    rows: usize,
    shared_heads: usize,
    padding: usize,
    packed: usize,
    lengths: usize,
    maps: usize,
    empty_rows: usize,
    sinks: usize,
    dropout: usize,
    biases: usize,
    softcaps: usize,
}

/// Compares some rows of a case.
fn check_case<E: Number>(case: &AttentionCase, had: &mut Had) {
    let problem = case.problem().rounded(E::PRECISION);
    let sizes = problem.sizes;
    if sizes.tokens_q == 0 {
        return;
    }
    let tensors = TensorsOf::<E>::of(&problem, Placement::Gaps(Order::Bshd));
    let inputs = tensors.inputs();
    let attention = attention(case, Isa::best(), 1);
    let last = sizes.tokens_q - 1;
    let queries = [last, 0, last / 2, last / 3, last];
    let weights =
        attention.attention_weights(inputs.q, inputs.k, &WeightRows::new(queries)).unwrap();
    let (batch, heads, keys) = (sizes.batch, sizes.heads_q, sizes.tokens_k);
    let expected = Dims { batch, tokens: queries.len(), heads, dim: keys };
    assert_eq!((weights.dims(), weights.order()), (expected, Order::Bhsd));
    let output = attention.forward(inputs).unwrap();
    let row_of = |index: usize| &weights.as_slice()[index * keys..][..keys];
    for index in 0..batch * heads * queries.len() {
        let (pair, query) = (index / queries.len(), queries[index % queries.len()]);
        let (entry, head) = (pair / heads, pair % heads);
        let (got, truth) = (row_of(index), defined(&problem, entry, head, query));
        for (key, (&weight, &truth)) in got.iter().zip(&truth).enumerate() {
            // The nearest f32, which the rule of `right.rs` calls the best; scores in f64 move the
            // truth by less than a thousandth of that. The smallest f32 is 2^-149.
            let bound = truth * 2_f64.powi(-24) * 1.001 + 2_f64.powi(-149);
            let error = (f64::from(weight) - truth).abs();
            assert!(
                error <= bound,
                "entry {entry}, head {head}, query {query}, key {key}: {weight:e}, expected \
                 {truth:e}\n{case}"
            );
            let is_seen = problem.seen.sees(entry, head, query, key);
            assert!(is_seen || weight.to_bits() == 0, "key {key} is masked\n{case}");
        }
        had.rows += 1;
        had.empty_rows += usize::from(problem.seen.keys(entry, head, query).is_empty());
        let total: f64 = truth.iter().sum();
        if problem.transform.dropout.is_none() && problem.sink_logits.is_none() {
            assert!(total == 0.0 || (total - 1.0).abs() < 1e-12);
        }

        // Times the values: the output. Its scores are sums of f32 of `dim` terms, in which a sum of
        // `|terms|` up to 16 is off by up to 2^-24 · 16 · 8 (scores of larger terms aren't compared);
        // it is rounded to the tensor's type at the end, and on a matrix unit so are its weights.
        if !problem.unit_scale {
            continue;
        }
        let unit = 2_f64.powi(-17) + if E::TYPE == f32::TYPE { 0.0 } else { 2_f64.powi(-8) * 2.0 };
        for dim in 0..sizes.dim_v {
            let value = |key: usize| {
                let head = head * sizes.heads_kv / heads;
                f64::from(inputs.v.get(entry, key, head, dim).unwrap().to_f32())
            };
            let terms = got.iter().enumerate().map(|(key, &weight)| f64::from(weight) * value(key));
            let (sum, gross) = terms.fold((0.0, 0.0), |(sum, gross), x| (sum + x, gross + x.abs()));
            let out = f64::from(output.out.view().get(entry, query, head, dim).unwrap().to_f32());
            let error = (out - sum).abs();
            assert!(error <= unit * gross + 1e-7, "{out} against {sum} ± {gross}\n{case}");
        }
    }

    // Some batch entries and heads: the same bits.
    if batch > 0 && heads > 0 {
        let some = WeightRows::new([last / 2]).batch([batch - 1]).heads([heads - 1, 0]);
        let some = attention.attention_weights(inputs.q, inputs.k, &some).unwrap();
        let of = |head: usize| row_of(((batch - 1) * heads + head) * queries.len() + 2);
        let expected = [of(heads - 1), of(0)].concat();
        assert_eq!(bits(some.as_slice()), bits(&expected), "{case}");
    }

    had.shared_heads += usize::from(sizes.heads_kv < heads);
    had.padding += usize::from(!case.padding.is_empty());
    had.packed += usize::from(case.pattern_text().contains("packed"));
    had.lengths += usize::from(sizes.tokens_q != keys);
    had.maps += usize::from(case.layout.key_map.is_some());
    had.sinks += usize::from(problem.sink_logits.is_some());
    had.dropout += usize::from(problem.transform.dropout.is_some());
    had.biases += usize::from(problem.transform.has_distances());
    had.softcaps += usize::from(problem.transform.softcap.is_some());
}

#[test]
fn weights_are_those_of_the_definition() {
    let mut had = Had::default();
    for seed in 0..600 {
        let case = AttentionCase::small(seed);
        match seed % 3 {
            0 => check_case::<f32>(&case, &mut had),
            1 => check_case::<bf16>(&case, &mut had),
            _ => check_case::<f16>(&case, &mut had),
        }
    }
    for (n, seed) in (0..200).enumerate() {
        let case = AttentionCase::from_seed(seed);
        if n % 2 == 0 {
            check_case::<f32>(&case, &mut had);
        } else {
            check_case::<bf16>(&case, &mut had);
        }
    }
    for case in attention_cases() {
        if case.layout.tokens_q * case.layout.tokens_k < 200_000 {
            check_case::<f32>(&case, &mut had);
        }
    }
    let Had { rows, shared_heads, padding, packed, lengths, maps, .. } = had;
    let Had { empty_rows, sinks, dropout, biases, softcaps, .. } = had;
    let features = [shared_heads, padding, packed, lengths, maps, sinks, dropout, biases, softcaps];
    assert!(features.iter().all(|&count| count >= 20), "{features:?}");
    assert!(rows > 5_000 && empty_rows > 100, "{rows} rows, {empty_rows} of them empty");
}

/// A tensor of unit-normal numbers.
fn tensor(dims: Dims, seed: u64) -> Tensor<f32> {
    Tensor::new(normals(seed, dims.elements().unwrap()), dims, Order::Bhsd).unwrap()
}

/// Rows of many keys on several threads: the same bits, and those of the keys that are seen alone.
#[test]
fn threads_and_components_do_not_matter() {
    let dims = Dims { batch: 1, tokens: 20_000, heads: 2, dim: 32 };
    let (q, k) = (tensor(dims, 1), tensor(dims, 2));
    let layout = compile("causal & (window(999, 0) | strided(64))", 20_000, 20_000);
    let attention = Attention::new(layout);
    let rows = WeightRows::new([19_999, 5, 12_345]);
    let run = |attention: Attention| {
        bits(attention.attention_weights(q.view(), k.view(), &rows).unwrap().as_slice())
    };
    let one = run(attention.clone().threads(1));
    assert_eq!(one, run(attention.clone().threads(3)));
    for isa in Isa::available() {
        assert_eq!(one, run(attention.clone().isa(isa).split(true)), "{isa}");
    }
    // 1,000 keys of the window, and every 64th before it.
    let seen = one[..20_000].iter().filter(|&&bits| bits != 0).count();
    assert_eq!(seen, 1_000 + 19_999 / 64 - 999 / 64);
}

/// Keys that a query does not see have no effect, whatever they hold; one that it sees has.
#[test]
fn numbers_that_are_not_finite() {
    let dims = Dims { batch: 1, tokens: 100, heads: 1, dim: 8 };
    let (q, mut k) = (tensor(dims, 1), tensor(dims, 2));
    let attention = Attention::new(compile("causal", 100, 100));
    let rows = WeightRows::new([49, 50]);
    let before = attention.attention_weights(q.view(), k.view(), &rows).unwrap();
    k.as_mut_slice()[50 * 8] = f32::NAN;
    let after = attention.attention_weights(q.view(), k.view(), &rows).unwrap();
    assert_eq!(bits(&before.as_slice()[..100]), bits(&after.as_slice()[..100]));
    assert!(after.as_slice()[100..151].iter().all(|weight| weight.is_nan()));
    assert!(after.as_slice()[151..].iter().all(|&weight| weight == 0.0));
}

#[test]
fn what_is_refused() {
    let dims = Dims { batch: 2, tokens: 100, heads: 4, dim: 8 };
    let x = tensor(dims, 1);
    let attention = Attention::new(compile("causal", 100, 100));
    let run = |attention: &Attention, rows: &WeightRows| {
        attention.attention_weights(x.view(), x.view(), rows).unwrap_err().to_string()
    };
    for (rows, message) in [
        (WeightRows::new([100]), "query 100, expected an index below 100"),
        (WeightRows::new([0]).heads([0, 4]), "query head 4, expected an index below 4"),
        (WeightRows::new([0]).batch([2]), "batch entry 2, expected an index below 2"),
        (
            WeightRows::new([0, 1]).max_bytes(6_399),
            "2 batch entries × 4 heads × 2 queries over 100 keys take 6400 bytes, the limit is 6399: \
             choose fewer queries",
        ),
    ] {
        let error = run(&attention, &rows);
        assert!(error.contains(message), "{error}");
    }
    let within = WeightRows::new([0, 1]).max_bytes(6_400);
    assert!(attention.attention_weights(x.view(), x.view(), &within).is_ok());

    // Options are checked as those of a forward pass.
    let rows = WeightRows::new([0]);
    let sinks = run(&attention.clone().sink_logits([0.0]), &rows);
    assert!(sinks.contains("sink_logits has 1 elements, expected 4"), "{sinks}");
    let mixed = Attention::new(compile("packed([50, 50], [50, 50], causal) | sinks(1)", 100, 100));
    let mixed = run(&mixed.alibi_slopes([0.5; 4]), &rows);
    assert!(mixed.contains("a score bias has no distance to use"), "{mixed}");
    let longer = run(&Attention::new(compile("causal", 101, 101)), &rows);
    assert!(longer.contains("q has tokens 100, expected 101"), "{longer}");

    let mut list = vec![0.0; 799];
    let short =
        attention.attention_weights_into(x.view(), x.view(), &rows, &mut list, Hook::none());
    let expected = Error::Length { what: "the list of weights", len: 799, expected: 800 };
    assert_eq!(short, Err(expected));
}

#[test]
fn rows_and_keys_of_nothing() {
    let dims = |tokens| Dims { batch: 1, tokens, heads: 2, dim: 8 };
    let (x, none) = (tensor(dims(10), 1), tensor(dims(0), 1));
    let attention = Attention::new(compile("full", 10, 10));
    let weights = attention.attention_weights(x.view(), x.view(), &WeightRows::new([])).unwrap();
    assert_eq!(weights.dims(), Dims { batch: 1, tokens: 0, heads: 2, dim: 10 });
    let attention = Attention::new(compile("full", 10, 0));
    let weights =
        attention.attention_weights(x.view(), none.view(), &WeightRows::new([3])).unwrap();
    assert_eq!(weights.dims(), Dims { batch: 1, tokens: 1, heads: 2, dim: 0 });
}

#[test]
fn hooks_stop_it() {
    let dims = Dims { batch: 1, tokens: 5_000, heads: 1, dim: 8 };
    let x = tensor(dims, 1);
    let layout = Layout::compile(&Pattern::full(), &Shape::new(5_000, 5_000)).unwrap();
    let mut list = vec![0.0; 10 * 5_000];
    let mut calls = 0;
    let mut stop = |_| {
        calls += 1;
        if calls == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let rows = WeightRows::new((0..10).collect::<Vec<_>>());
    let attention = Attention::new(layout).threads(1);
    let hook = Hook::new(&mut stop);
    let stopped = attention.attention_weights_into(x.view(), x.view(), &rows, &mut list, hook);
    assert!(matches!(stopped, Err(Error::Stopped { total: 10, .. })), "{stopped:?}");
    assert_eq!(calls, 3);
}

/// Half of the probability is the sink's; the value of dropped pairs is not spread over the others.
#[test]
fn sinks_take_their_share_and_dropout_scales() {
    let dims = Dims { batch: 1, tokens: 4, heads: 1, dim: 8 };
    let zeros = Tensor::<f32>::zeros(dims, Order::Bhsd).unwrap();
    let inputs = Inputs::new(zeros.view(), zeros.view(), zeros.view());
    let attention = Attention::new(compile("causal", 4, 4)).sink_logits([4_f32.ln()]);
    let weights = |attention: &Attention| {
        attention.attention_weights(inputs.q, inputs.k, &WeightRows::new([3]))
    };
    assert_eq!(weights(&attention).unwrap().as_slice(), [0.125; 4]);
    let dropped = attention.dropout(longspan::Dropout::new(0.5, 1).unwrap());
    let dropped = weights(&dropped).unwrap();
    assert!(dropped.as_slice().iter().all(|&weight| weight == 0.25 || weight == 0.0));
}

/// A case of its own for each rule whose rows are read from masks in another way.
#[test]
fn blocks_of_every_size() {
    let mut had = Had::default();
    for block in [16, 17, 64, 100, 256] {
        for (rule, mask_bytes) in [
            (Rule::Window { left: 40, right: 7 }, None),
            (Rule::Strided { stride: 7 }, Some(0)),
            (Rule::Full, None),
        ] {
            let mut case = AttentionCase::new("blocks", rule, 301);
            (case.layout.block, case.layout.mask_bytes) = (block, mask_bytes);
            check_case::<f32>(&case, &mut had);
        }
    }
}
