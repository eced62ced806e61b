//! Steps of a cache against attention in f64 over all tokens so far.

use longspan::{
    Dims, Error, Heads, Hook, Inputs, KvCache, Options, Order, Output, Pattern, Progress, Tensor,
};
use longspan_testing::{Random, assert_close, normals};

/// f32 against f64: some units of the last place of sums of hundreds of values up to 4.
const BOUND: f64 = 2e-5;

/// May the query at a position of a batch entry and head see a key?
type Rule = fn(usize, usize, usize, usize) -> bool;

/// Patterns, each with its meaning in other words.
const RULES: [(&str, Rule); 7] = [
    ("causal", |_, _, i, j| j <= i),
    ("causal & (window(16, 0) | sinks(4))", |_, _, i, j| j <= i && (j + 16 >= i || j < 4)),
    ("window(0, 0)", |_, _, i, j| j == i),
    ("window(70, 0) | sinks(130)", |_, _, i, j| j <= i && j + 70 >= i || j < 130),
    ("heads([causal & window(9, 0), causal & sinks(3)])", |_, h, i, j| {
        j <= i && if h == 0 { j + 9 >= i } else { j < 3 }
    }),
    ("batch([causal, causal & window(5, 0), heads([causal, window(2, 0)])])", |b, h, i, j| {
        j <= i
            && match (b, h) {
                (1, _) => j + 5 >= i,
                (2, 1) => j + 2 >= i,
                _ => true,
            }
    }),
    ("causal & dilated(32, 3, 1)", |_, _, i, j| {
        j <= i && i / 32 == j / 32 && i % 32 % 3 == 1 && j % 32 % 3 == 1
    }),
];

/// Keys and values of one sequence and head, a row per token.
#[derive(Default, Clone)]
struct Rows(Vec<Vec<f32>>);

struct Model {
    rule: Rule,
    slopes: [f32; 2],
    scale: f64,
    /// `[entry][key head]`.
    keys: Vec<Vec<Rows>>,
    values: Vec<Vec<Rows>>,
}

impl Model {
    /// Output and log-sum-exp of a query at a position.
    fn attend(&self, entry: usize, head: usize, query: &[f32], position: usize) -> (Vec<f64>, f64) {
        let key_head = if self.keys[entry].len() == 1 { 0 } else { head };
        let (keys, values) = (&self.keys[entry][key_head].0, &self.values[entry][key_head].0);
        let mut weights = Vec::new();
        for (j, key) in
            keys.iter().enumerate().filter(|(j, _)| (self.rule)(entry, head, position, *j))
        {
            let product: f64 =
                query.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            let distance = position.abs_diff(j) as f64;
            weights.push((j, product * self.scale - f64::from(self.slopes[head]) * distance));
        }
        let most = weights.iter().map(|weight| weight.1).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = weights.iter().map(|weight| (weight.1 - most).exp()).sum();
        let lse = if weights.is_empty() { f64::NEG_INFINITY } else { most + sum.ln() };
        let dim = values.first().map_or(0, Vec::len);
        let mut out = vec![0.0; dim];
        for &(j, score) in &weights {
            for (out, &value) in out.iter_mut().zip(&values[j]) {
                *out += (score - lse).exp() * f64::from(value);
            }
        }
        (out, lse)
    }
}

fn tensor(seed: u64, dims: Dims, order: Order) -> Tensor<f32> {
    Tensor::new(normals(seed, dims.elements().unwrap()), dims, order).unwrap()
}

fn row(x: &Tensor<f32>, entry: usize, token: usize, head: usize) -> Vec<f32> {
    let mut row = vec![0.0; x.dims().dim];
    x.view().copy_row(entry, token, head, &mut row);
    row
}

/// Random chunks, ragged and not, until every sequence has some hundred tokens.
fn run(seed: u64) {
    let mut random = Random::new(seed);
    let (text, rule) = RULES[random.below(RULES.len() as u64) as usize];
    let patterns: Heads = text.parse().unwrap();
    let batch = patterns.entries().unwrap_or(1 + random.below(3) as usize);
    let (heads, key_heads) = (2, 1 + random.below(2) as usize);
    let (dim, value_dim) = (1 + random.below(24) as usize, 1 + random.below(24) as usize);
    let slopes = if random.below(2) == 0 { [0.0; 2] } else { [0.25, 0.0625] };
    let capacity = random.below(90) as usize;
    let options = Options::default().alibi_slopes(slopes).threads(1 + random.below(2) as usize);
    let mut cache = KvCache::new(patterns).capacity(capacity).options(options);
    let rows = || vec![vec![Rows::default(); key_heads]; batch];
    let scale = 1.0 / (dim as f64).sqrt();
    let mut model = Model { rule, slopes, scale, keys: rows(), values: rows() };
    let steps = 4 + random.below(30);
    for step in 0..steps {
        let tokens = match random.below(4) {
            0 => 1 + random.below(130) as usize,
            1 => random.below(12) as usize,
            _ => 1,
        };
        let order = if random.below(2) == 0 { Order::Bhsd } else { Order::Bshd };
        let of = |number: u64, heads, dim| {
            tensor(seed * 1_000 + step * 10 + number, Dims { batch, tokens, heads, dim }, order)
        };
        let (q, k, v) = (of(0, heads, dim), of(1, key_heads, dim), of(2, key_heads, value_dim));
        let lengths: Option<Vec<usize>> = (random.below(3) == 0)
            .then(|| (0..batch).map(|_| random.below(tokens as u64 + 1) as usize).collect());
        if step > 0 && random.below(20) == 0 {
            let entry = random.below(batch as u64) as usize;
            cache.clear(entry);
            model.keys[entry].fill(Rows::default());
            model.values[entry].fill(Rows::default());
        }
        let own = |entry: usize| lengths.as_ref().map_or(tokens, |lengths| lengths[entry]);
        let before: Vec<usize> = (0..batch).map(|entry| model.keys[entry][0].0.len()).collect();
        for (entry, head) in (0..batch).flat_map(|b| (0..key_heads).map(move |h| (b, h))) {
            for token in 0..own(entry) {
                model.keys[entry][head].0.push(row(&k, entry, token, head));
                model.values[entry][head].0.push(row(&v, entry, token, head));
            }
        }
        if random.below(6) == 0 {
            match &lengths {
                Some(lengths) => cache.append_ragged(k.view(), v.view(), lengths).unwrap(),
                None => cache.append(k.view(), v.view()).unwrap(),
            }
            continue;
        }
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let output = match &lengths {
            Some(lengths) => cache.step_ragged(inputs, lengths).unwrap(),
            None => cache.step(inputs).unwrap(),
        };
        for (entry, head) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            assert_eq!(cache.len(entry), before[entry] + own(entry));
            for token in 0..tokens {
                let got = row(&output.out, entry, token, head);
                let lse = output.lse[(entry * heads + head) * tokens + token];
                if token >= own(entry) {
                    assert_eq!((got, lse), (vec![0.0; value_dim], f32::NEG_INFINITY));
                    continue;
                }
                let query = row(&q, entry, token, head);
                let (mut out, truth) = model.attend(entry, head, &query, before[entry] + token);
                out.resize(value_dim, 0.0);
                let what = format!("seed {seed}, {text}, step {step}, {entry} {head} {token}");
                assert_close(&what, &got, &out, BOUND);
                assert!(
                    f64::from(lse) == truth || (f64::from(lse) - truth).abs() < BOUND,
                    "{what}: {lse} {truth}"
                );
            }
        }
    }
}

#[test]
fn any_chunking_is_one_call() {
    for seed in 0..300 {
        run(seed);
    }
}

/// The numbers of a position, made when they are needed.
fn numbers(position: usize, salt: u64, dim: usize) -> Vec<f32> {
    normals(position as u64 * 4 + salt, dim)
}

/// A million steps with `LONGSPAN_STEPS=1000000`.
#[test]
fn a_window_with_sinks_stays_bounded() {
    const DIM: usize = 4;
    let steps: usize =
        std::env::var("LONGSPAN_STEPS").map_or(20_000, |steps| steps.parse().expect("a number"));
    let pattern: Pattern = "causal & (window(200, 0) | sinks(7))".parse().unwrap();
    let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: DIM };
    let mut cache = KvCache::new(pattern).options(Options::default().threads(1));
    let mut checked = 0;
    for position in 0..steps {
        let x: Vec<_> = (0..3)
            .map(|salt| Tensor::new(numbers(position, salt, DIM), dims, Order::Bhsd).unwrap())
            .collect();
        let output = cache.step(Inputs::new(x[0].view(), x[1].view(), x[2].view())).unwrap();
        assert!(cache.slots() <= 7 + 200 + 64, "{} slots at step {position}", cache.slots());
        if position % (steps / 1_000) != 0 {
            continue;
        }
        checked += 1;
        let mut model = Model {
            rule: |_, _, _, _| true,
            slopes: [0.0; 2],
            scale: 0.5,
            keys: vec![vec![Rows::default()]],
            values: vec![vec![Rows::default()]],
        };
        for key in (0..=position).filter(|&key| key < 7 || key + 200 >= position) {
            model.keys[0][0].0.push(numbers(key, 1, DIM));
            model.values[0][0].0.push(numbers(key, 2, DIM));
        }
        let (out, lse) = model.attend(0, 0, x[0].as_slice(), position);
        assert_close(format!("step {position}"), output.out.as_slice(), &out, 1e-5);
        assert!((f64::from(output.lse[0]) - lse).abs() < 1e-5);
    }
    assert_eq!((cache.len(0), checked), (steps, 1_000));
    assert_eq!(cache.bytes(), 2 * cache.slots() * DIM * 4);
}

#[test]
fn a_failed_step_leaves_the_cache_as_it_was() {
    let dims = Dims { batch: 2, tokens: 3, heads: 1, dim: 4 };
    let x = tensor(1, dims, Order::Bhsd);
    let inputs = Inputs::new(x.view(), x.view(), x.view());
    let mut cache = KvCache::new(Pattern::causal());
    let mut same = KvCache::new(Pattern::causal()).capacity(50);
    assert_eq!(cache.inputs(x.view()).unwrap_err(), Error::EmptyCache);
    // What is refused leaves no trace.
    let narrow = tensor(1, Dims { dim: 3, ..dims }, Order::Bhsd);
    cache.step(Inputs::new(x.view(), narrow.view(), narrow.view())).unwrap_err();
    cache.step(inputs).unwrap();
    same.step(inputs).unwrap();
    let mut output = Output::<f32>::zeros(dims, Order::Bhsd).unwrap();
    let mut stop = |_: Progress| std::ops::ControlFlow::Break(());
    let refused = cache.step_into(inputs, None, output.as_mut(), Hook::new(&mut stop));
    assert!(matches!(refused, Err(Error::Stopped { .. })), "{refused:?}");
    assert_eq!(cache.len(0), 3);
    assert_eq!(cache.step(inputs).unwrap(), same.step(inputs).unwrap());

    let message = |error: Error| error.to_string();
    let wrong = Inputs::new(narrow.view(), narrow.view(), narrow.view());
    let refused = message(cache.step(wrong).unwrap_err());
    assert_eq!(refused, "k has head dim 3, expected 4 (as the cache)");
    let refused = message(cache.step_ragged(inputs, &[1]).unwrap_err());
    assert_eq!(refused, "lengths has 1 elements, expected 2");
    let refused = message(cache.step_ragged(inputs, &[1, 4]).unwrap_err());
    assert_eq!(refused, "k has tokens 3, expected 4 (as many as lengths has for a batch entry)");
    let mut other = KvCache::new("batch([causal])".parse::<Heads>().unwrap());
    let refused = message(other.step(inputs).unwrap_err());
    assert_eq!(refused, "k has batch 2, expected 1 (as the patterns)");
    let half = Tensor::<half::bf16>::zeros(dims, Order::Bhsd).unwrap();
    let refused = message(cache.append(half.view(), half.view()).unwrap_err());
    assert_eq!(refused, "elements of bf16, expected f32 as those that the cache has already");
    cache.append_ragged(x.view(), x.view(), &[1, 2]).unwrap();
    assert!(message(cache.inputs(x.view()).unwrap_err()).contains("different lengths"));
}
