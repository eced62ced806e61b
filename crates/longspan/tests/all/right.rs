//! Forward and every gradient against the `f64` oracle, on every instruction set of this CPU.
//!
//! The rule is that of [`Measure`](longspan_testing::Measure): at most twelve times the error of
//! the truth rounded to `f32`, and never above that of the formulas computed naively in `f32`.
//! `LONGSPAN_CASES` sets how many random cases (400 where left out) and `LONGSPAN_SEED` the first.

use longspan::{
    Attention, Dims, Inputs, Isa, Order, OutputGradient, OutputRef, Strides, Tensor, View,
};
use longspan_testing::{
    AttentionCase, Measure, Rule, Sample, Values, attention_cases, naive, truth,
};

use crate::common::*;

/// A quarter of the table, so that the quarters run side by side.
fn quarter(number: usize) -> impl Iterator<Item = AttentionCase> {
    attention_cases().into_iter().skip(number).step_by(4)
}

#[test]
fn table_first_quarter() {
    check_all::<f32>(quarter(0));
}

#[test]
fn table_second_quarter() {
    check_all::<f32>(quarter(1));
}

#[test]
fn table_third_quarter() {
    check_all::<f32>(quarter(2));
}

#[test]
fn table_fourth_quarter() {
    check_all::<f32>(quarter(3));
}

fn random(part: u64) -> impl Iterator<Item = AttentionCase> {
    let (first, cases) = (number("LONGSPAN_SEED", 0), number("LONGSPAN_CASES", 400));
    (first..first + cases).filter(move |seed| seed % 2 == part).map(AttentionCase::from_seed)
}

#[test]
fn random_even_seeds() {
    check_all::<f32>(random(0).chain([AttentionCase::from_seed(0)]));
}

#[test]
fn random_odd_seeds() {
    check_all::<f32>(random(1).chain([AttentionCase::from_seed(1)]));
}

#[test]
fn sizes_that_divide_no_tile() {
    check_all::<f32>(odd_sizes());
}

#[test]
fn decoding_with_any_number_of_queries() {
    check_all::<f32>(few_queries());
}

#[test]
fn any_strides() {
    check_strides::<f32>();
}

#[test]
fn mixed_strides() {
    check_mixed_strides::<f32>();
}

/// Zero strides: one sequence for all batch entries, one key head for all, one key for all tokens.
#[test]
fn broadcast_inputs() {
    let case = AttentionCase {
        batch: 3,
        heads_q: 4,
        heads_kv: 4,
        dim_k: 9,
        dim_v: 20,
        ..AttentionCase::new("broadcast", Rule::Causal, 70)
    };
    let mut problem = case.problem();
    let sizes = problem.sizes;
    let (dim_k, dim_v, tokens) = (sizes.dim_k, sizes.dim_v, sizes.tokens_k);
    // Queries: the same in every batch entry. Keys: the same in every head of an entry. Values:
    // one for all tokens of a head. Gradient of the output: one number for everything.
    let q = problem.q[..sizes.q() / 3].to_vec();
    problem.q = q.repeat(3);
    let keys = problem.k.clone();
    for (n, head) in problem.k.chunks_mut(tokens * dim_k).enumerate() {
        head.copy_from_slice(&keys[n / 4 * 4 * tokens * dim_k..][..tokens * dim_k]);
    }
    let values: Vec<f32> =
        problem.v.chunks(tokens * dim_v).flat_map(|h| h[..dim_v].to_vec()).collect();
    for (n, token) in problem.v.chunks_mut(dim_v).enumerate() {
        token.copy_from_slice(&values[n / tokens * dim_v..][..dim_v]);
    }
    problem.dout.fill(0.75);
    problem.unit_scale = false;

    let strides = |batch, heads, tokens, dim| Strides { batch, heads, tokens, dim };
    let (t, k, v) = (tokens as isize, dim_k as isize, dim_v as isize);
    let kept: Vec<f32> =
        (0..3).flat_map(|b| keys[b * 4 * tokens * dim_k..][..tokens * dim_k].to_vec()).collect();
    let inputs = Inputs {
        q: View::strided(&q, 0, dims_q(&sizes), strides(0, t * k, k, 1)).unwrap(),
        k: View::strided(&kept, 0, dims_k(&sizes), strides(t * k, 0, k, 1)).unwrap(),
        v: View::strided(&values, 0, dims_v(&sizes), strides(4 * v, v, 0, 1)).unwrap(),
    };
    let dout = View::strided(&[0.75], 0, dims_out(&sizes), strides(0, 0, 0, 0)).unwrap();
    let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    for isa in Isa::available() {
        let attention = attention(&case, isa, 2);
        let output = attention.forward(inputs).unwrap();
        let gradients = attention.backward(inputs, &output, dout).unwrap();
        let got = Values {
            out: dense(&output.out),
            lse: output.lse.clone(),
            dq: dense(&gradients.dq),
            dk: dense(&gradients.dk),
            dv: dense(&gradients.dv),
            ..Values::default()
        };
        for measure in Measure::all(&problem, &truth, &naive, &got, Sample::ALL) {
            assert!(measure.holds(), "{isa}, {measure}");
        }
    }
}

/// The numbers of a tensor in the oracle's order.
fn dense(tensor: &Tensor<f32>) -> Vec<f32> {
    let Dims { batch, tokens, heads, dim } = tensor.dims();
    let view = tensor.view();
    let mut numbers = Vec::new();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for (t, d) in (0..tokens).flat_map(|t| (0..dim).map(move |d| (t, d))) {
            numbers.push(view.get(b, t, h, d).unwrap());
        }
    }
    numbers
}

/// Results that the call allocates: values, axes, and the order of the queries.
#[test]
fn allocated_results_are_those_written_in_place() {
    for order in [Order::Bshd, Order::Bhsd] {
        let case = AttentionCase {
            batch: 2,
            heads_q: 4,
            heads_kv: 2,
            dim_k: 8,
            dim_v: 12,
            ..AttentionCase::new("allocated", Rule::Causal, 75)
        };
        let problem = case.problem();
        let placement = Placement::Contiguous(order);
        let tensors = Tensors::of(&problem, placement);
        let attention = attention(&case, Isa::best(), 1);
        let written = Run { attention: &attention, tensors: &tensors, results: placement }.both();
        let inputs = tensors.inputs();
        let output = attention.forward(inputs).unwrap();
        let dout = tensors.dout.view();
        let gradients = attention.backward(inputs, &output, dout).unwrap();
        let sizes = &problem.sizes;
        let tensors = [
            (&output.out, &written.out, dims_out(sizes)),
            (&gradients.dq, &written.dq, dims_q(sizes)),
            (&gradients.dk, &written.dk, dims_k(sizes)),
            (&gradients.dv, &written.dv, dims_v(sizes)),
        ];
        for (got, written, dims) in tensors {
            assert_eq!((got.dims(), got.order()), (dims, order));
            assert_eq!(bits(&dense(got)), bits(written));
        }
        assert_eq!(bits(&output.lse), bits(&written.lse));
        assert_eq!(output.lse_lo.len(), output.lse.len());
    }
}

/// A set of layouts that are all alike is one layout for all.
#[test]
fn a_set_of_one_layout_is_that_layout() {
    let case = AttentionCase {
        batch: 2,
        heads_q: 4,
        heads_kv: 2,
        ..AttentionCase::new("set", Rule::Causal, 150)
    };
    let problem = case.problem();
    let placement = Placement::Contiguous(Order::Bshd);
    let tensors = Tensors::of(&problem, placement);
    for isa in Isa::available() {
        let one = attention(&case, isa, 2);
        let set = Attention::new(compile_set(&case)).isa(isa);
        let run = |attention| Run { attention, tensors: &tensors, results: placement }.both();
        assert_eq!(run(&one), run(&set), "{isa}");
    }
}

/// The default scale is `1/√dim`, and a scale is honoured.
#[test]
fn scale_is_factor_of_scores() {
    let case = AttentionCase { dim_k: 16, ..AttentionCase::new("scale", Rule::Full, 40) };
    let problem = case.problem();
    let placement = Placement::Contiguous(Order::Bshd);
    let tensors = Tensors::of(&problem, placement);
    let run = |scale| {
        let case = AttentionCase { scale, ..case.clone() };
        let attention = attention(&case, Isa::best(), 1);
        Run { attention: &attention, tensors: &tensors, results: placement }.both()
    };
    assert_eq!(run(None), run(Some(0.25)));
    assert_ne!(run(None).lse, run(Some(0.26)).lse);
}

#[cfg(feature = "ndarray")]
#[test]
fn ndarray_views() {
    use longspan::{GradientsMut, Hook, OutputMut, ViewMut};
    use ndarray::{Array4, s};

    let case = AttentionCase { dim_k: 8, dim_v: 8, ..AttentionCase::new("nd", Rule::Causal, 45) };
    let problem = case.problem();
    let sizes = problem.sizes;
    // Every second token of a longer array, with the head axis first in memory; keys back to front.
    let shape = (1, 2, 90, 8);
    let mut arrays = [Array4::from_elem(shape, f32::NAN), Array4::from_elem(shape, f32::NAN)];
    for (array, numbers) in arrays.iter_mut().zip([&problem.q, &problem.k]) {
        let mut tokens = array.slice_mut(s![.., .., ..;2, ..]);
        tokens.iter_mut().zip(numbers.iter()).for_each(|(x, y)| *x = *y);
    }
    let [q, k] = &mut arrays;
    let numbers: Vec<f32> = k.slice(s![.., .., ..;2, ..]).iter().copied().collect();
    let mut backwards = k.slice_mut(s![.., .., ..;-2, ..]);
    backwards.iter_mut().zip(numbers).for_each(|(x, y)| *x = y);
    let v = Array4::from_shape_vec((1, 2, 45, 8), problem.v.clone()).unwrap();
    let v = v.permuted_axes([0, 2, 1, 3]);
    let dout = Array4::from_shape_vec((1, 2, 45, 8), problem.dout.clone()).unwrap();

    let order = Order::Bhsd;
    let inputs = Inputs {
        q: View::from_ndarray(q.slice(s![.., .., ..;2, ..]), order),
        k: View::from_ndarray(k.slice(s![.., .., ..;-2, ..]), order),
        v: View::from_ndarray(v.view(), Order::Bshd),
    };
    let attention = attention(&case, Isa::best(), 1);
    let zeros = || Array4::<f32>::from_elem((1, 45, 2, 8), f32::NAN);
    let (mut out, mut dq, mut dk, mut dv) = (zeros(), zeros(), zeros(), zeros());
    let mut lse = vec![0.0; sizes.rows()];
    let mut lse_lo = lse.clone();
    fn write(array: &mut Array4<f32>) -> ViewMut<'_, f32> {
        ViewMut::from_ndarray(array.view_mut(), Order::Bshd).unwrap()
    }
    let rest = Some(&mut lse_lo[..]);
    let output = OutputMut { out: write(&mut out), lse: &mut lse, lse_lo: rest };
    attention.forward_into(inputs, output, Hook::none()).unwrap();
    let (saved, gradient) = (
        OutputRef {
            out: View::from_ndarray(out.view(), Order::Bshd),
            lse: &lse,
            lse_lo: Some(&lse_lo),
        },
        OutputGradient { dout: View::from_ndarray(dout.view(), order), dlse: None },
    );
    let gradients = GradientsMut::new(write(&mut dq), write(&mut dk), write(&mut dv));
    attention.backward_into(inputs, saved, gradient, gradients, Hook::none()).unwrap();

    let dense = |array: &Array4<f32>| {
        array.view().permuted_axes([0, 2, 1, 3]).iter().copied().collect::<Vec<f32>>()
    };
    let (out, dq, dk, dv) = (dense(&out), dense(&dq), dense(&dk), dense(&dv));
    let got = Values { out, lse, dq, dk, dv, ..Values::default() };
    let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    for measure in Measure::all(&problem, &truth, &naive, &got, Sample::ALL) {
        assert!(measure.holds(), "{measure}");
    }
}

/// One key has all the weight, however large its logit: the backward pass computes that it is 1 only
/// if the forward pass has added up the same score.
#[test]
fn few_queries_and_one_key() {
    for (dim, heads_q) in [(64, 8), (128, 16), (40, 16), (48, 1)] {
        let name = format!("{heads_q} queries, one key of {dim}");
        let case = AttentionCase::new(name, Rule::Full, 1);
        let (dim_k, dim_v, scale) = (dim, dim, Some(4.0));
        let case = AttentionCase { batch: 40, heads_q, heads_kv: 1, dim_k, dim_v, scale, ..case };
        let (problem, results) = (case.problem(), Placement::Contiguous(Order::Bshd));
        let (truth, naive) = (truth(&problem, case.sample), naive(&problem, case.sample));
        let tensors = TensorsOf::<f32>::of(&problem, results);
        for isa in Isa::available() {
            let attention = attention(&case, isa, 1);
            let got = Run { attention: &attention, tensors: &tensors, results }.both();
            let measures = measures::<f32>(isa, &problem, (&truth, &naive), &got, case.sample);
            let dv = measures.into_iter().find(|measure| measure.tensor == "dv").unwrap();
            // Sums of the same output gradients: not even a rounding of the score comes in.
            assert!(dv.ratio() < 1.0, "{isa} {dv}\n    {case}");
        }
    }
}
