//! Selectors through the public API: what a choice must contain, and what it must not depend on.

use std::ops::Range;

use half::bf16;
use longspan::{
    Attention, BlockSelector, BlockSize, Dims, Element, Error, Estimator, Heads, Hook, Inputs, Isa,
    Layout, LayoutSet, ListedBlocks, Options, Order, Padding, Pattern, RunKind, Selection,
    Selector, Shape, Sharing, Tensor, View,
};
use longspan_testing::Random;

/// Random numbers with a few heavy directions, so that some blocks hold most of the mass.
fn tensor<E: Element>(dims: Dims, random: &mut Random, loud: f32) -> Tensor<E> {
    let Dims { tokens, heads, dim, .. } = dims;
    let data = (0..dims.elements().unwrap()).map(|index| {
        let token = index / (heads * dim) % tokens.max(1);
        let heavy = if token % 311 < 7 { loud } else { 1.0 };
        E::from_f32(heavy * (random.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0))
    });
    Tensor::new(data.collect(), dims, Order::Bshd).unwrap()
}

fn hashes(set: &LayoutSet) -> Vec<String> {
    let pairs = (0..set.batch()).flat_map(|entry| (0..set.heads()).map(move |head| (entry, head)));
    pairs.map(|(entry, head)| set.get(entry, head).hash().unwrap().to_string()).collect()
}

fn blocks(layout: &Layout, row: u32) -> Vec<u32> {
    layout.row(row).iter().flat_map(|run| run.start..run.end()).collect()
}

/// A random selector and what it chooses from.
struct Case {
    selector: BlockSelector,
    q: Tensor<f32>,
    k: Tensor<f32>,
    coarse: bool,
    base: Pattern,
    always: Pattern,
}

fn case(seed: u64) -> Case {
    let mut random = Random::new(seed);
    let mut pick = |options: &[usize]| options[random.below(options.len() as u64) as usize];
    let (heads, groups, dim) = (pick(&[1, 2]), pick(&[1, 2, 3]), pick(&[4, 16, 33]));
    let keys = 256 * pick(&[4, 5, 6]) - pick(&[0, 0, 1, 63, 70]);
    let batch = pick(&[1, 2]);
    let coarse_from = pick(&[0, 700, usize::MAX]);
    let estimator = match pick(&[0, 1, 2, 3]) {
        0 => Estimator::Means { queries: pick(&[4, 16, 64]), means: pick(&[1, 4]) },
        1 => Estimator::Antidiagonals { sums: pick(&[4, 8]) },
        _ => Estimator::Clusters { queries: pick(&[4, 8]), clusters: pick(&[3, 8]) },
    };
    let base = ["causal", "causal & window(700, 0)", "causal & (window(400, 0) | sinks(70))"];
    let base: Pattern = base[pick(&[0, 1, 2])].parse().unwrap();
    let always = ["window(64, 0) | sinks(1)", "sinks(1)", "!full"];
    let always: Pattern = always[pick(&[0, 1, 2])].parse().unwrap();
    let sharing = if pick(&[0, 1]) == 1 { Sharing::PerKeyHead } else { Sharing::PerHead };
    let selector = BlockSelector::new(base.clone())
        .always(always.clone())
        .mass(pick(&[30, 60, 90]) as f32 / 100.0)
        .block_mass(pick(&[0, 0, 2]) as f32 / 100.0)
        .min_blocks(pick(&[1, 2]))
        .max_blocks(pick(&[4, 9, 1_000]))
        .estimator(estimator)
        .sharing(sharing)
        .dense_below(pick(&[0, 0, 400]))
        .coarse_from(coarse_from);
    let dims = |heads| Dims { batch, tokens: keys, heads, dim };
    let q = tensor(dims(heads * groups), &mut random, 2.0);
    let k = tensor(dims(heads), &mut random, 6.0);
    Case { selector, q, k, coarse: coarse_from < usize::MAX, base, always }
}

fn cases() -> Range<u64> {
    let number = std::env::var("LONGSPAN_SELECTIONS").ok();
    0..number.map_or(150, |number| number.parse().expect("a number of cases"))
}

/// One entry of a batch.
fn entry<'a>(view: View<'a, f32>, entry: usize) -> View<'a, f32> {
    let (dims, strides) = (view.dims(), view.strides());
    let offset = entry as isize * strides.batch;
    // SAFETY: the entry is one of the view's, which is borrowed as long as the new one.
    unsafe {
        View::from_raw(view.as_ptr().offset(offset), Dims { batch: 1, ..dims }, strides).unwrap()
    }
}

/// The same choice for any number of threads, any chunks of the prompt, any other batch entries.
#[test]
fn choices_do_not_depend_on_how_they_are_computed() {
    let mut dropped = 0;
    for seed in cases() {
        let Case { selector, q, k, coarse, .. } = case(seed);
        let (q, k) = (q.view(), k.view());
        let whole = selector.clone().options(Options::default().threads(1)).select(q, k).unwrap();
        dropped += usize::from(whole.density() < 0.9);
        let expected = hashes(whole.layouts());
        for threads in [2, 3, 8] {
            let options = Options::default().threads(threads);
            let other = selector.clone().options(options).select(q, k).unwrap();
            assert_eq!(hashes(other.layouts()), expected, "seed {seed}, {threads} threads");
        }
        let heads = q.dims().heads;
        for number in 0..q.dims().batch {
            let alone = selector.select(entry(q, number), entry(k, number)).unwrap();
            let own = &expected[number * heads..(number + 1) * heads];
            assert_eq!(hashes(alone.layouts()), own, "seed {seed}, entry {number} alone");
        }
        // Chunks of the prompt, each with the keys so far.
        let grain = if coarse { 256 } else { 64 };
        let tokens = q.dims().tokens;
        let mut random = Random::new(!seed);
        let mut first = 0;
        while first < tokens {
            let grains = (tokens - first).div_ceil(grain) as u64;
            let end = (first + grain * (1 + random.below(grains) as usize)).min(tokens);
            let chunk = selector.select(q.tokens(first..end), k.tokens(0..end)).unwrap();
            let (first_row, rows) = ((first / 64) as u32, ((end - first).div_ceil(64)) as u32);
            for (entry, head) in (0..q.dims().batch).flat_map(|e| (0..heads).map(move |h| (e, h))) {
                let (all, own) =
                    (whole.layouts().get(entry, head), chunk.layouts().get(entry, head));
                for row in 0..rows {
                    let what = format!("seed {seed}, queries {first}..{end}, row {row}");
                    assert_eq!(blocks(own, row), blocks(all, first_row + row), "{what}");
                }
            }
            first = end;
        }
    }
    assert!(dropped > cases().count() / 2, "{dropped} choices drop something");
}

/// The same with so many keys that candidates are looked for in larger blocks first, of which the
/// last has keys that chunks do not have yet.
#[test]
fn choices_of_many_keys_do_not_depend_on_chunks() {
    let (keys, chunk) = (66 * 2_048 + 768, 256);
    let mut random = Random::new(5);
    let dims = |tokens| Dims { batch: 1, tokens, heads: 1, dim: 8 };
    let (q, k) = (tensor(dims(768), &mut random, 2.0), tensor(dims(keys), &mut random, 6.0));
    let (q, k): (View<'_, f32>, View<'_, f32>) = (q.view(), k.view());
    let selector = BlockSelector::new(Pattern::causal()).mass(1.0).max_blocks(16);
    let whole = selector.select(q, k).unwrap();
    for first in (0..768).step_by(chunk) {
        let (queries, before) = (first..first + chunk, keys - 768);
        let options = Options::default().threads(1);
        let selector = selector.clone().options(options);
        let own = selector.select(q.tokens(queries.clone()), k.tokens(0..before + queries.end));
        let own = own.unwrap();
        for row in 0..4 {
            let all = blocks(whole.layouts().get(0, 0), (first / 64) as u32 + row);
            assert_eq!(all.len(), 16);
            assert_eq!(blocks(own.layouts().get(0, 0), row), all, "queries {queries:?}, row {row}");
        }
    }
}

#[test]
fn choices_keep_their_promises() {
    for seed in cases() {
        let Case { selector, q, k, base, always, .. } = case(seed);
        let tokens = q.dims().tokens;
        let shape = Shape::new(tokens, tokens);
        let compile = |pattern: &Pattern| Layout::compile(pattern, &shape).unwrap();
        let (base_layout, always) = (compile(&base), compile(&(base.clone() & always)));
        let selection = selector.select(q.view(), k.view()).unwrap();
        let mut kept = 0;
        for layout in selection.layouts().layouts() {
            let (mut masks, mut base_masks) = (layout.masks(), base_layout.masks());
            for row in layout.rows() {
                let chosen = blocks(layout, row);
                kept += chosen.len();
                for column in blocks(&always, row) {
                    assert!(chosen.contains(&column), "seed {seed}: ({row}, {column}) is always");
                }
                assert!(!chosen.is_empty(), "seed {seed}: row {row} has a floor");
                for run in layout.row(row) {
                    for column in run.start..run.end() {
                        let of_base = base_layout.row(row).iter();
                        let of_base =
                            of_base.clone().find(|r| r.start <= column && column < r.end());
                        let of_base = of_base.expect("a block of the base");
                        assert_eq!(run.kind(), of_base.kind(), "seed {seed}: ({row}, {column})");
                        if run.kind() == RunKind::Partial {
                            let mask = masks.get(row, column, run).to_vec();
                            assert_eq!(mask, base_masks.get(row, column, of_base), "seed {seed}");
                        }
                    }
                }
            }
        }
        assert!(kept > 0 && selection.density() > 0.0 && selection.density() <= 1.0);
    }
}

/// Blocks with planted keys are found, and the report covers the truth.
#[test]
fn needles_are_found() {
    let dims = Dims { batch: 1, tokens: 4_096, heads: 2, dim: 32 };
    let mut random = Random::new(5);
    let mut q = tensor::<f32>(dims, &mut random, 1.0);
    let mut k = tensor::<f32>(dims, &mut random, 1.0);
    // Queries 4,000 to 4,010 look for keys 777 and 2,222, in a direction that no other key has.
    for (tensor, tokens) in [(&mut q, [4_000..4_064, 0..0]), (&mut k, [777..778, 2_222..2_223])] {
        for token in tokens.into_iter().flatten() {
            let row = &mut tensor.as_mut_slice()[token * 64..][..64];
            row.iter_mut().enumerate().for_each(|(d, x)| *x = if d % 32 == 3 { 9.0 } else { 0.0 });
        }
    }
    let inputs = Inputs::new(q.view(), k.view(), k.view());
    for isa in Isa::available() {
        let options = Options::default().isa(isa);
        let selector = BlockSelector::new(Pattern::causal())
            .always("window(64, 0)".parse().unwrap())
            .max_blocks(4)
            .options(options.clone());
        let selection = selector.select(q.view(), k.view()).unwrap();
        for head in 0..2 {
            let chosen = blocks(selection.layouts().get(0, head), 62);
            assert!(chosen.contains(&(777 / 64)) && chosen.contains(&(2_222 / 64)), "{chosen:?}");
            assert_eq!(chosen.len(), 4);
        }
        let attention = Attention::new(selection.layouts().clone()).options(options.clone());
        let lse = attention.forward(inputs).unwrap().lse;
        let dense = Layout::compile(&Pattern::causal(), &Shape::new(4_096, 4_096)).unwrap();
        let whole = Attention::new(dense).options(options).forward(inputs).unwrap().lse;
        let kept = lse.iter().zip(&whole).map(|(own, all)| f64::from((own - all).exp()));
        let truth = kept.sum::<f64>() / whole.len() as f64;
        let mut covered = 0;
        for seed in 0..100 {
            let kept =
                selection.kept_mass_with(q.view(), k.view(), &lse, seed, Hook::none()).unwrap();
            let (low, high) = kept.interval;
            assert!(high - low <= 0.01 && kept.mean > 0.0, "{kept:?}");
            covered += usize::from(low <= truth && truth <= high);
            let median = kept.quantile(0.5).unwrap();
            assert!(median > 0.0 && median <= 1.0 + 1e-5);
        }
        assert!((90..=99).contains(&covered), "{covered} of 100 intervals cover {truth}");
    }
}

/// Gradients are those of attention over the chosen pairs.
#[test]
fn gradients_are_those_of_the_choice() {
    let dims = Dims { batch: 1, tokens: 300, heads: 2, dim: 5 };
    let mut random = Random::new(9);
    let [q, k, v, dout] = std::array::from_fn(|_| tensor::<f32>(dims, &mut random, 3.0));
    let shape = Shape::new(300, 300).block(BlockSize::MIN);
    let selector = BlockSelector::new(Pattern::causal()).mass(0.5).dense_below(0);
    let selection =
        selector.select_with(q.view(), k.view(), &shape, &Padding::None(1), Hook::none()).unwrap();
    assert!(selection.density() < 0.8);
    let attention = Attention::new(selection.layouts().clone());
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let output = attention.forward(inputs).unwrap();
    let gradients = attention.backward(inputs, &output, dout.view()).unwrap();

    let loss = |q: &[f64], k: &[f64], v: &[f64]| naive(&selection, dims, q, k, v, &dout);
    let wide = |tensor: &Tensor<f32>| -> Vec<f64> {
        tensor.as_slice().iter().map(|&x| f64::from(x)).collect()
    };
    let inputs = [wide(&q), wide(&k), wide(&v)];
    let found = [&gradients.dq, &gradients.dk, &gradients.dv];
    for number in 0..60 {
        let (which, at) = (number % 3, random.below(3_000) as usize);
        let moved = |by: f64| {
            let mut moved = inputs.clone();
            moved[which][at] += by;
            loss(&moved[0], &moved[1], &moved[2])
        };
        let difference = (moved(1e-5) - moved(-1e-5)) / 2e-5;
        let gradient = f64::from(found[which].as_slice()[at]);
        assert!((gradient - difference).abs() < 1e-4 * (1.0 + difference.abs()), "{which} {at}");
    }
}

/// `Σ out · dout` in f64, pair by pair.
fn naive(
    selection: &Selection,
    dims: Dims,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &Tensor<f32>,
) -> f64 {
    let Dims { heads, dim, .. } = dims;
    let row = |x: &[f64], token: usize, head: usize| -> Vec<f64> {
        x[(token * heads + head) * dim..][..dim].to_vec()
    };
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let mut loss = 0.0;
    for head in 0..heads {
        let layout = selection.layouts().get(0, head);
        let mut masks = layout.masks();
        for block_row in layout.rows() {
            for query in layout.row_tokens(block_row) {
                let (mut sum, mut weighted) = (0.0, 0.0);
                for run in layout.row(block_row) {
                    for column in run.start..run.end() {
                        let word = masks.get(block_row, column, run)[query % 16];
                        for key in
                            layout.column_tokens(column).filter(|key| word >> (key % 16) & 1 == 1)
                        {
                            let score = dot(&row(q, query, head), &row(k, key, head));
                            let p = (score / (dim as f64).sqrt()).exp();
                            let dout = &dout.as_slice()[(query * heads + head) * dim..][..dim];
                            let dout: Vec<f64> = dout.iter().map(|&x| f64::from(x)).collect();
                            sum += p;
                            weighted += p * dot(&row(v, key, head), &dout);
                        }
                    }
                }
                loss += weighted / sum;
            }
        }
    }
    loss
}

#[test]
fn padding_and_half_precision() {
    let dims = Dims { batch: 2, tokens: 1_500, heads: 2, dim: 16 };
    let mut random = Random::new(11);
    let (q, k) = (tensor::<bf16>(dims, &mut random, 2.0), tensor::<bf16>(dims, &mut random, 5.0));
    let padding = Padding::Each(vec![0..1_500, 700..1_500]);
    let selector = BlockSelector::new(Pattern::causal()).mass(0.6);
    let shape = Shape::new(1_500, 1_500);
    let selection =
        selector.select_with(q.view(), k.view(), &shape, &padding, Hook::none()).unwrap();
    for head in 0..2 {
        let layout = selection.layouts().get(1, head);
        assert!(layout.rows().all(|row| blocks(layout, row).iter().all(|&column| column >= 10)));
        assert!(layout.row(0).is_empty());
    }
}

#[test]
fn mistakes_are_refused() {
    let dims = Dims { batch: 1, tokens: 1_100, heads: 1, dim: 4 };
    let x = tensor::<f32>(dims, &mut Random::new(1), 1.0);
    let refused = |selector: BlockSelector| selector.select(x.view(), x.view()).unwrap_err();
    let new = || BlockSelector::new(Pattern::causal());
    assert!(refused(new().mass(0.0)).to_string().contains("a share above 0"));
    assert!(refused(new().block_mass(2.0)).to_string().contains("from 0 to 1"));
    assert!(refused(new().max_blocks(0)).to_string().contains("at least 1"));
    let clusters = |queries, clusters| new().estimator(Estimator::Clusters { queries, clusters });
    assert!(refused(clusters(7, 8)).to_string().contains("divisor"));
    assert!(refused(clusters(8, 0)).to_string().contains("groups"));
    let error = refused(new().options(Options::default().softcap(30.0)));
    assert!(matches!(error, Error::Unexpected { .. }), "{error}");
    let dropout = longspan::Dropout::new(0.1, 7).unwrap();
    let error = refused(new().options(Options::default().dropout(dropout)));
    assert!(error.to_string().contains("attention over the choice"), "{error}");
    let heads: Heads = "heads([causal, causal & window(9, 0)])".parse().unwrap();
    let error = refused(BlockSelector::new(heads).sharing(Sharing::PerKeyHead));
    assert!(error.to_string().contains("use Sharing::PerHead"), "{error}");
    let selection = new().select(x.view(), x.view()).unwrap();
    let error = selection.kept_mass(x.view(), x.view(), &[0.0; 3]).unwrap_err();
    assert_eq!(error, Error::Length { what: "lse", len: 3, expected: 1_100 });
}

/// Short sequences keep everything, and say so.
#[test]
fn short_sequences_are_dense() {
    let dims = Dims { batch: 1, tokens: 500, heads: 1, dim: 4 };
    let x = tensor::<f32>(dims, &mut Random::new(1), 1.0);
    let selection = BlockSelector::new(Pattern::causal()).select(x.view(), x.view()).unwrap();
    assert_eq!(selection.density(), 1.0);
}

/// Lists are those that a selector wrote, in any order and with padding: the same layouts come out.
#[test]
fn listed_blocks_are_a_choice() {
    let mut random = Random::new(5);
    let dims = |heads| Dims { batch: 2, tokens: 1_500, heads, dim: 16 };
    let (q, k) = (tensor::<f32>(dims(4), &mut random, 2.0), tensor(dims(2), &mut random, 6.0));
    let base: Pattern = "causal & (window(900, 0) | sinks(70))".parse().unwrap();
    let selector = BlockSelector::new(base.clone()).mass(0.6).dense_below(0);
    let chosen = selector.select(q.view(), k.view()).unwrap();
    let set = chosen.layouts();
    let width = 24;
    let (mut counts, mut indices, mut padded) = (Vec::new(), Vec::new(), Vec::new());
    for (entry, head) in (0..2).flat_map(|entry| (0..4).map(move |head| (entry, head))) {
        let layout = set.get(entry, head);
        for row in layout.rows() {
            let mut listed = blocks(layout, row);
            listed.reverse();
            // One that the base does not have, where there is one.
            listed.extend((row + 1 < layout.columns()).then(|| layout.columns() - 1));
            counts.push(listed.len());
            indices.extend_from_slice(&listed);
            listed.resize(width, 7);
            padded.extend(listed);
        }
    }
    let select = |listed: &ListedBlocks| listed.select(q.view(), k.view());
    let one = ListedBlocks::new(base.clone(), (2, 4), counts.clone(), indices.clone());
    let two = ListedBlocks::padded(base.clone(), (2, 4), counts.clone(), &padded, width).unwrap();
    for listed in [&one, &two] {
        let selection = select(listed).unwrap();
        assert_eq!(hashes(selection.layouts()), hashes(set));
        assert_eq!(selection.density(), chosen.density());
        let attention = Attention::new(selection.layouts().clone());
        let output = attention.forward(Inputs::new(q.view(), k.view(), k.view())).unwrap();
        let kept = selection.kept_mass(q.view(), k.view(), &output.lse).unwrap();
        assert_eq!(kept, chosen.kept_mass(q.view(), k.view(), &output.lse).unwrap());
    }
    // One list for all entries and heads.
    let rows = 1_500_usize.div_ceil(64);
    let of_first: usize = counts[..rows].iter().sum();
    let (first, few) = (counts[..rows].to_vec(), indices[..of_first].to_vec());
    let same = select(&ListedBlocks::new(base.clone(), (1, 1), first, few)).unwrap();
    assert!(hashes(same.layouts()).iter().all(|hash| *hash == hashes(set)[0]));

    let refused = |lists, counts: &[usize], indices: &[u32]| {
        let listed = ListedBlocks::new(base.clone(), lists, counts.to_vec(), indices.to_vec());
        assert!(select(&listed).is_err(), "{lists:?}");
    };
    for options in [Options::default().softcap(3.0), Options::default().alibi_slopes([0.5; 4])] {
        assert!(select(&one.clone().options(options)).is_err());
    }
    refused((3, 4), &counts, &indices);
    refused((2, 3), &counts, &indices);
    refused((2, 4), &counts[1..], &indices);
    refused((2, 4), &counts, &indices[1..]);
    let mut wrong = indices.clone();
    wrong[0] = 24;
    refused((2, 4), &counts, &wrong);
    // The first block of the first row that has two.
    let row = counts.iter().position(|&count| count > 1).unwrap();
    let first: usize = counts[..row].iter().sum();
    let mut wrong = indices;
    wrong[first + 1] = wrong[first];
    refused((2, 4), &counts, &wrong);
    assert!(
        ListedBlocks::padded(base.clone(), (2, 4), counts.clone(), &padded[1..], width).is_err()
    );
    assert!(ListedBlocks::padded(base.clone(), (1, 1), vec![3], &[0, 1], 2).is_err());
}
