//! Masses against a definition in f64, over instruction sets, element types and shapes.

use std::sync::Mutex;

use longspan_pattern::{BlockSize, Layout, Pattern, Shape, splitmix64};

use super::*;
use crate::arguments::Inputs;
use crate::check;
use crate::dims::{Dims, Order};
use crate::driver::summaries::Keys;
use crate::exec::Hook;
use crate::isa::Isa;
use crate::kernel::masses::{PARTS, Sampling, Terms, part};
use crate::tensor::Tensor;

struct Case {
    sampling: Sampling,
    dims: (usize, usize),
    heads: (usize, usize),
    dim: usize,
    pattern: &'static str,
}

fn tensor<E: Element>(dims: Dims, seed: u64) -> Tensor<E> {
    let number = |i: usize| {
        let word = splitmix64(splitmix64(seed) ^ i as u64);
        E::from_f32((word >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    let data = (0..dims.elements().unwrap()).map(number).collect();
    Tensor::new(data, dims, Order::Bshd).unwrap()
}

/// Groups of the keys of a block: neighbors, or the nearest of centers that are far apart.
fn groups(sampling: Sampling, keys: &[Vec<f64>]) -> Vec<Vec<usize>> {
    if sampling.terms != Terms::Clusters {
        let all: Vec<usize> = (0..keys.len()).collect();
        return all.chunks(sampling.keys_per_group()).map(<[_]>::to_vec).collect();
    }
    let distance =
        |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum() };
    let mut centers: Vec<usize> = vec![0];
    let mut groups = vec![(0..keys.len()).collect::<Vec<_>>()];
    while groups.len() < sampling.groups {
        let nearest = |key: usize| {
            let far = centers.iter().map(|&center| distance(&keys[key], &keys[center]));
            far.fold(f64::INFINITY, f64::min)
        };
        let mut next = 0;
        for key in 1..keys.len() {
            next = if nearest(key) > nearest(next) { key } else { next };
        }
        let moves = |key: &usize| distance(&keys[*key], &keys[next]) < nearest(*key);
        let moved = (0..keys.len()).filter(moves).collect();
        groups.iter_mut().for_each(|group| group.retain(|key| !moves(key)));
        groups.push(moved);
        centers.push(next);
    }
    groups
}

/// The definition: per sampled query, the softmax over groups of keys, each with the logarithm of
/// its number of active keys.
fn expected<E: Element>(
    case: &Case,
    q: &View<'_, E>,
    k: &View<'_, E>,
    active: &dyn Fn(usize, usize) -> bool,
    (head, row): (usize, usize),
) -> Vec<f64> {
    let Case { sampling, dims: (queries, keys), heads, dim, .. } = *case;
    let Sampling { queries: block, step, terms, .. } = sampling;
    let key_head = head / (heads.0 / heads.1);
    let vector = |view: &View<'_, E>, token, head| -> Vec<f64> {
        let x = |d| f64::from(view.get(0, token, head, d).unwrap().to_f32());
        (0..dim).map(x).collect()
    };
    let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    let tokens = row * block..((row + 1) * block).min(queries);
    let first = match terms {
        Terms::Antidiagonals => step.min(tokens.len()) - 1,
        _ => (step / 2).min(tokens.len() - 1),
    };
    let scale = 1.0 / (dim as f64).sqrt();
    let sampled: Vec<usize> = (tokens.start + first..tokens.end).step_by(step).collect();
    let mut shares = vec![vec![0.0; keys.div_ceil(block)]; sampled.len()];
    for (column, first_key) in (0..keys).step_by(block).enumerate() {
        let own: Vec<Vec<f64>> = (first_key..(first_key + block).min(keys))
            .map(|key| vector(k, key, key_head))
            .collect();
        for group in groups(sampling, &own).iter().filter(|group| !group.is_empty()) {
            let sum = |d: usize| group.iter().map(|&key| own[key][d]).sum::<f64>();
            let mean: Vec<f64> = (0..dim).map(|d| sum(d) / group.len() as f64).collect();
            // Parts of the head dim share the mean of their variances.
            let mut parts = [(0.0, 0.0); PARTS];
            for d in 0..dim {
                let square = |&key: &usize| (own[key][d] - mean[d]).powi(2);
                let (sum, dims) = &mut parts[part(d, dim)];
                *sum += group.iter().map(square).sum::<f64>() / group.len() as f64;
                *dims += 1.0;
            }
            let variances: Vec<f64> =
                (0..dim).map(|d| parts[part(d, dim)]).map(|(sum, dims)| sum / dims).collect();
            for (index, &query) in sampled.iter().enumerate() {
                let at = vector(q, query, head);
                let squares: Vec<f64> = at.iter().map(|x| (x * scale).powi(2)).collect();
                let score = match terms {
                    Terms::Means => scale * dot(&at, &mean),
                    Terms::Clusters => {
                        let (spread, weight) =
                            (dot(&squares, &variances) / 2.0, (group.len() as f64).ln());
                        let bounded = 2.0 * (spread * weight).sqrt() - weight;
                        let added = if spread > weight { bounded } else { spread };
                        scale * dot(&at, &mean) + added
                    }
                    Terms::Antidiagonals => {
                        let back = group.iter().enumerate().filter(|(back, _)| *back <= first);
                        let term = |(back, &key): (usize, &usize)| {
                            dot(&vector(q, query - back, head), &own[key])
                        };
                        scale * back.map(term).sum::<f64>() / step as f64
                    }
                };
                let active = group.iter().filter(|&&key| active(query, first_key + key)).count();
                shares[index][column] += score.exp() * active as f64;
            }
        }
    }
    let mut masses = vec![0.0; keys.div_ceil(block)];
    for shares in shares {
        let total: f64 = shares.iter().sum();
        let add = |(mass, share): (&mut f64, &f64)| *mass += share / total;
        if total > 0.0 {
            masses.iter_mut().zip(&shares).for_each(add);
        }
    }
    masses
}

fn compare<E: Element>(case: &Case, shared: bool, tolerance: f64) {
    let Case { sampling, dims: (queries, keys), heads, dim, pattern } = *case;
    let block = sampling.queries;
    let shape = Shape::new(queries, keys);
    let pattern: Pattern = pattern.parse().unwrap();
    let block_size = BlockSize::new(block as u64).unwrap();
    let layout = Layout::compile(&pattern, &shape.clone().block(block_size)).unwrap();
    let fine = Layout::compile(&pattern, &shape.block(BlockSize::MIN)).unwrap();
    let mut active = vec![false; queries * keys];
    let mut masks = fine.masks();
    for row in fine.rows() {
        for run in fine.row(row) {
            for column in run.start..run.end() {
                let words = masks.get(row, column, run);
                for (query, word) in words.iter().enumerate() {
                    for key in (0..16).filter(|key| word >> key & 1 == 1) {
                        active[(row as usize * 16 + query) * keys + column as usize * 16 + key] =
                            true;
                    }
                }
            }
        }
    }
    let bits = |query: usize, key: usize| active[query * keys + key];
    let dims = |tokens, heads| Dims { batch: 1, tokens, heads, dim };
    let q = tensor::<E>(dims(queries, heads.0), 1);
    let k = tensor::<E>(dims(keys, heads.1), 2);
    let (q, k) = (q.view(), k.view());
    let base = Layouts::from(layout);
    for isa in Isa::available() {
        let options = Options::default().isa(isa).threads(2);
        let sizes = check::inputs(&options, &base, &Inputs::new(q, k, k)).unwrap();
        let monitor = Monitor::new(Hook::none());
        let run = |key_heads: Range<usize>, see: &Choose<'_>| {
            let (options, monitor) = (&options, &monitor);
            let keys = Keys { options, sizes, key_heads: key_heads.clone(), k, monitor };
            let (base, summaries) = (&base, &keys.summarize(sampling).unwrap());
            let candidates = Candidates::All;
            let estimate = Estimate {
                options,
                base,
                candidates,
                shared,
                sizes,
                key_heads,
                q,
                summaries,
                monitor,
            };
            estimate.run(see).unwrap()
        };
        let seen = Mutex::new(Vec::new());
        let see = |Row { head, row, .. }: Row<'_>, masses: &[f32]| {
            seen.lock().unwrap().push((head, row, masses.to_vec()));
            vec![row]
        };
        let mut chosen = run(0..heads.1, &see);
        if heads.1 > 1 {
            // Key heads by themselves.
            let all = std::mem::take(&mut *seen.lock().unwrap());
            chosen = (0..heads.1).flat_map(|head| run(head..head + 1, &see)).collect();
            let sorted = |mut seen: Vec<(usize, u32, Vec<f32>)>| {
                seen.sort_by_key(|&(head, row, _)| (head, row));
                seen
            };
            let parts = sorted(seen.lock().unwrap().clone());
            assert_eq!(sorted(all), parts);
        }
        let rows = queries.div_ceil(block);
        assert_eq!(chosen.len(), if shared { heads.1 } else { heads.0 });
        assert!(chosen.iter().all(|chosen| chosen.columns.iter().copied().eq(0..rows as u32)));
        for (head, row, masses) in seen.into_inner().unwrap() {
            let group = if shared { heads.0 / heads.1 } else { 1 };
            let mut sums = vec![0.0; masses.len()];
            for head in head..head + group {
                let own = expected(case, &q, &k, &bits, (head, row as usize));
                sums.iter_mut().zip(own).for_each(|(sum, mass)| *sum += mass);
            }
            for (mass, sum) in masses.iter().zip(&sums) {
                assert!(
                    (f64::from(*mass) - sum).abs() <= tolerance * (1.0 + sum),
                    "{isa} {sampling:?} block {block}, {queries} × {keys}, head {head}, row {row}: \
                     {masses:?}, expected {sums:?}"
                );
            }
        }
    }
}

fn cases() -> impl Iterator<Item = Case> {
    let kinds = [
        (Terms::Means, 16, 4, 64),
        (Terms::Means, 64, 1, 64),
        (Terms::Clusters, 8, 8, 64),
        (Terms::Clusters, 8, 8, 256),
        (Terms::Clusters, 4, 5, 16),
        (Terms::Antidiagonals, 8, 8, 64),
        (Terms::Antidiagonals, 8, 8, 32),
    ];
    let shapes = [
        (300, 300, "causal"),
        (131, 523, "causal & (window(100, 0) | sinks(3))"),
        (64, 64, "full"),
        (1, 1, "full"),
        (97, 1_031, "strided(5)"),
        (200, 90, "causal"),
    ];
    let heads = [(2, 1, 7), (4, 2, 64), (3, 3, 33)];
    kinds.into_iter().enumerate().flat_map(move |(number, (terms, queries, groups, block))| {
        shapes.into_iter().enumerate().map(move |(index, (rows, columns, pattern))| {
            let (query_heads, key_heads, dim) = heads[(number + index) % heads.len()];
            Case {
                sampling: Sampling {
                    terms,
                    queries: block,
                    step: block / queries,
                    keys: block,
                    groups,
                },
                dims: (rows, columns),
                heads: (query_heads, key_heads),
                dim,
                pattern,
            }
        })
    })
}

#[test]
fn masses_are_those_of_the_definition() {
    for (number, case) in cases().enumerate() {
        compare::<f32>(&case, number % 2 == 0, 1e-5);
    }
}

/// Summaries are rounded to the element type.
#[test]
fn masses_of_half_precision() {
    for (number, case) in cases().enumerate() {
        compare::<half::bf16>(&case, number % 2 == 0, 0.03);
        compare::<half::f16>(&case, number % 2 == 1, 0.004);
    }
}

/// Clusters of clusters have all keys once, their mean, and by the law of total variance their
/// variance.
#[test]
fn merged_clusters_have_the_moments_of_their_keys() {
    let (tokens, dim) = (1_000, 24);
    let k = tensor::<f32>(Dims { batch: 1, tokens, heads: 2, dim }, 3);
    let options = Options::default();
    let monitor = Monitor::new(Hook::none());
    let inputs = Inputs::new(k.view(), k.view(), k.view());
    let sizes = check::tensors(&options, &inputs).unwrap();
    let keys = Keys { options: &options, sizes, key_heads: 0..2, k: k.view(), monitor: &monitor };
    let sampling = |block, groups| {
        let (terms, step) = (Terms::Clusters, block / 8);
        Sampling { terms, queries: block, step, keys: block, groups }
    };
    let fine = keys.summarize(sampling(32, 5)).unwrap();
    let merged = keys.merge(&fine, sampling(256, 8)).unwrap();
    for (number, members) in merged.members.chunks_exact(8 * 4).enumerate() {
        let (head, block) = (number / merged.columns, number % merged.columns);
        let first = block * 256;
        let all = members.chunks_exact(4).fold([0_u64; 4], |mut all, group| {
            for (all, word) in all.iter_mut().zip(group) {
                assert_eq!(*all & word, 0, "a key in two clusters");
                *all |= word;
            }
            all
        });
        let count: u32 = all.iter().map(|word| word.count_ones()).sum();
        assert_eq!(count as usize, 256.min(tokens - first));
        for (group, members) in members.chunks_exact(4).enumerate() {
            let own: Vec<usize> =
                (0..256).filter(|key| members[key / 64] >> (key % 64) & 1 == 1).collect();
            let index = number * 8 + group;
            if own.is_empty() {
                continue;
            }
            assert!((f64::from(merged.weights[index]) - (own.len() as f64).ln()).abs() < 1e-6);
            let mut parts = [(0.0, 0.0); PARTS];
            for d in 0..dim {
                let x = |&key: &usize| f64::from(k.view().get(0, first + key, head, d).unwrap());
                let mean = own.iter().map(x).sum::<f64>() / own.len() as f64;
                let got = merged.terms.view().get(0, block * 8 + group, head, d).unwrap();
                // Two roundings of sums of up to 256 terms of up to 1.
                assert!((f64::from(got) - mean).abs() < 1e-5, "{got}, expected {mean}");
                let square = own.iter().map(|key| (x(key) - mean).powi(2)).sum::<f64>();
                let (sum, dims) = &mut parts[part(d, dim)];
                *sum += square / own.len() as f64;
                *dims += 1.0;
            }
            for (got, (sum, dims)) in merged.variances[index].iter().zip(parts) {
                assert!((f64::from(*got) - sum / dims).abs() < 1e-5, "{got}, expected {sum}");
            }
        }
    }
}

#[test]
fn blocks_in_larger_ones() {
    let layout = Layout::compile(&Pattern::causal(), &Shape::new(64 * 11, 64 * 11)).unwrap();
    let spans = |runs: &[Run]| -> Vec<(u32, u32)> {
        runs.iter().map(|run| (run.start, run.end())).collect()
    };
    // Blocks 0 to 9 are Full, block 10 is on the diagonal.
    let row = layout.row(10);
    assert_eq!(spans(&within(row, &[0, 2], 4)), [(0, 4), (8, 10), (10, 11)]);
    assert_eq!(spans(&within(row, &[1, 2, 7], 2)), [(2, 6)]);
    assert_eq!(spans(&within(row, &[], 4)), []);
    assert_eq!(spans(&whole_blocks(row, 4)), [(0, 2)]);
    assert_eq!(spans(&whole_blocks(&[Run::full(1, 6)], 4)), []);
    assert_eq!(spans(&whole_blocks(&[Run::full(1, 7)], 4)), [(1, 2)]);
}
