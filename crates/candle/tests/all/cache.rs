//! Steps of a cache against one call over all tokens.

use candle_core::{DType, Device, Tensor};
use longspan_candle::longspan::{Heads, Options, Pattern};
use longspan_candle::{KvCache, SparseAttention};

const PATTERN: &str = "causal & (window(24, 0) | sinks(3))";

fn difference(a: &Tensor, b: &Tensor) -> f32 {
    let a = a.to_dtype(DType::F32).unwrap();
    let difference = (a - b.to_dtype(DType::F32).unwrap()).unwrap().abs().unwrap();
    difference.max_all().unwrap().to_scalar().unwrap()
}

#[test]
fn steps_are_one_call() {
    // Both sides are rounded to the type: a few units of values up to 4.
    for (dtype, bound) in [(DType::F32, 1e-5), (DType::BF16, 0.03), (DType::F16, 4e-3)] {
        let random = |heads| {
            let x = Tensor::randn(0f32, 1.0, (2, heads, 150, 16), &Device::Cpu).unwrap();
            x.to_dtype(dtype).unwrap()
        };
        let (q, k, v) = (random(4), random(2), random(2));
        let attention: SparseAttention = PATTERN.parse().unwrap();
        let whole = attention.forward(&q, &k, &v).unwrap();
        let mut cache = KvCache::new(PATTERN.parse::<Pattern>().unwrap());
        let mut first = 0;
        for tokens in [70, 1, 1, 40, 7, 1, 1, 29] {
            let part = |x: &Tensor| x.narrow(2, first, tokens).unwrap();
            let out = cache.step(&part(&q), &part(&k), &part(&v)).unwrap();
            assert_eq!(out.dtype(), dtype);
            assert!(difference(&out, &part(&whole)) < bound, "{dtype:?} at {first}");
            first += tokens;
        }
        assert_eq!((first, cache.engine().len(1)), (150, 150));

        let (part, last) =
            (|x: &Tensor| x.narrow(2, 0, 149).unwrap(), |x: &Tensor| x.narrow(2, 149, 1).unwrap());
        let mut cache = KvCache::new(PATTERN.parse::<Pattern>().unwrap());
        cache.append(&part(&k), &part(&v), Some(&[149, 149])).unwrap();
        let out = cache.step(&last(&q), &last(&k), &last(&v)).unwrap();
        assert!(difference(&out, &last(&whole)) < bound, "{dtype:?} appended");
    }
}

#[test]
fn packed_sequences_are_calls_of_their_own() {
    let x = Tensor::randn(0f32, 1.0, (1, 2, 150, 16), &Device::Cpu).unwrap();
    let attention: SparseAttention = PATTERN.parse().unwrap();
    let ends = [0_usize, 40, 40, 41, 150];
    let cumulative = ends.map(|end| end as u64);
    let packed = attention.forward_packed(&x, &x, &x, &cumulative, &cumulative).unwrap();
    for ends in ends.windows(2).filter(|ends| ends[0] < ends[1]) {
        let part = |x: &Tensor| x.narrow(2, ends[0], ends[1] - ends[0]).unwrap();
        let own = attention.forward(&part(&x), &part(&x), &part(&x)).unwrap();
        assert!(difference(&part(&packed), &own) < 1e-5);
    }
    let refused = attention.forward_packed(&x, &x, &x, &[0, 9, 3], &[0, 9, 150]).unwrap_err();
    assert!(refused.to_string().contains("cu_seqlens_q"), "{refused}");
}

#[test]
fn ragged_steps_and_refusals() {
    let x = Tensor::randn(0f32, 1.0, (2, 2, 5, 8), &Device::Cpu).unwrap();
    let patterns: Heads = "batch([causal, causal & window(1, 0)])".parse().unwrap();
    let mut cache = KvCache::new(patterns).options(Options::default().threads(1));
    let (out, lse) = cache.step_ragged(&x, &x, &x, &[5, 2]).unwrap();
    assert_eq!((cache.engine().len(0), cache.engine().len(1)), (5, 2));
    let beyond = out.get(1).unwrap().narrow(1, 2, 3).unwrap();
    assert_eq!(beyond.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
    let beyond = lse.get(1).unwrap().narrow(1, 2, 3).unwrap().flatten_all().unwrap();
    assert_eq!(beyond.to_vec1::<f32>().unwrap(), [f32::NEG_INFINITY; 6]);
    cache.clear(0);
    assert_eq!((cache.engine().len(0), cache.engine().len(1)), (0, 2));
    let wrong = x.to_dtype(DType::F64).unwrap();
    let refused = cache.step(&wrong, &wrong, &wrong).unwrap_err().to_string();
    assert!(refused.contains("q holds f64"), "{refused}");
    let half = x.to_dtype(DType::BF16).unwrap();
    let refused = cache.step(&half, &half, &half).unwrap_err().to_string();
    assert!(refused.contains("elements of bf16, expected f32"), "{refused}");
}
