//! Selectors on candle's tensors: the choice is that of the library, gradients go through attention
//! over it.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use longspan::{Attention, BlockSelector, Dims, Order, Pattern, Selector, View};
use longspan_candle::{attention, select};

#[test]
fn the_choice_is_that_of_the_library() {
    let make = |heads| Tensor::randn(0f32, 2.0, (2, 1_300, heads, 16), &Device::Cpu).unwrap();
    let (q, k) = (make(4), make(2));
    let selector = BlockSelector::new(Pattern::causal()).mass(0.5).dense_below(0);
    // Transposed views are read where they are.
    let turned = [&q, &k].map(|x| x.transpose(1, 2).unwrap());
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let [q_there, k_there] = [&turned[0], &turned[1]].map(|x| x.to_dtype(dtype).unwrap());
        assert!(select(&selector, &q_there, &k_there).unwrap().density() < 0.9);
    }
    let got = select(&selector, &turned[0], &turned[1]).unwrap();
    let data = [&q, &k].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    let dims = |heads| Dims { batch: 2, tokens: 1_300, heads, dim: 16 };
    let view = |index: usize, heads| View::new(&data[index], dims(heads), Order::Bshd).unwrap();
    let expected = selector.select(view(0, 4), view(1, 2)).unwrap();
    for (entry, head) in (0..2).flat_map(|entry| (0..4).map(move |head| (entry, head))) {
        let hash = |set: &longspan::LayoutSet| set.get(entry, head).hash().unwrap();
        assert_eq!(hash(got.layouts()), hash(expected.layouts()));
    }
    assert!(select(&selector, &q.flatten_from(2).unwrap(), &k).is_err());
    assert!(select(&selector, &turned[0], &turned[1].to_dtype(DType::F64).unwrap()).is_err());
}

#[test]
fn gradients_go_through_attention_over_the_choice() {
    let x = Var::randn(0f32, 1.0, (1, 1, 300, 8), &Device::Cpu).unwrap();
    let selector = BlockSelector::new(Pattern::causal()).max_blocks(2).dense_below(0);
    let selection = select(&selector, &x, &x).unwrap();
    let sparse = Arc::new(Attention::new(selection.layouts().clone()));
    let loss = |x: &Tensor| attention(&sparse, x, x, x).unwrap().sqr().unwrap().sum_all().unwrap();
    let gradients = loss(&x).backward().unwrap();
    let gradient = gradients.get(&x).unwrap();
    // Along one direction, against a difference.
    let direction = Tensor::randn(0f32, 1.0, x.dims(), &Device::Cpu).unwrap();
    let along = (gradient * &direction).unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
    let shifted = |step: f64| {
        let there = (x.as_tensor() + (&direction * step).unwrap()).unwrap();
        f64::from(loss(&there).to_scalar::<f32>().unwrap())
    };
    let difference = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
    let error = (f64::from(along) - difference).abs();
    assert!(error < 2e-2 * difference.abs().max(1.0), "{along} and {difference}");
}
