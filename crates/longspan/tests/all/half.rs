//! bf16 and f16 against the `f64` oracle, on every instruction set of this CPU.
//!
//! The rule is that of [`Measure`](longspan_testing::Measure): rounding once is all that those cost
//! who widen, besides what the rounded output costs gradients; AMX multiplies probabilities and
//! their gradients as bf16, and may be off by what that is expected to cost.

use half::{bf16, f16};
use longspan::{
    Attention, Dims, ElementType, GradientsMut, Hook, Inputs, Isa, Layout, Order, OutputGradient,
    OutputRef, Pattern, RowStatistics, Shape, State, Strides, Tensor, View, row_deltas,
};
use longspan_testing::{
    AttentionCase, Measure, Precision, Problem, Rule, Sample, Sizes, Values, attention_cases,
    naive, truth,
};

use crate::common::*;

/// Random cases of each type, from seeds that f32 isn't tested with by default.
fn random() -> impl Iterator<Item = AttentionCase> {
    let (first, cases) = (number("LONGSPAN_SEED", 1000), number("LONGSPAN_CASES", 400) / 8);
    (first..first + cases.max(1)).map(AttentionCase::from_seed)
}

/// The table without its longest cases, which take most of its time; long rows have their own test.
fn table() -> impl Iterator<Item = AttentionCase> {
    let pairs = |case: &AttentionCase| case.sizes().tokens_q * case.sizes().tokens_k;
    attention_cases().into_iter().filter(move |case| pairs(case) <= 1 << 20)
}

#[test]
fn even_table_of_bf16() {
    check_all::<bf16>(table().step_by(2));
}

#[test]
fn odd_table_of_bf16() {
    check_all::<bf16>(table().skip(1).step_by(2));
}

/// Where f16 differs from bf16 is in two conversions: a third of the table.
#[test]
fn table_of_f16() {
    check_all::<f16>(table().step_by(3));
}

#[test]
fn random_bf16() {
    check_all::<bf16>(random());
}

#[test]
fn random_f16() {
    check_all::<f16>(random());
}

#[test]
fn sizes_that_divide_no_tile() {
    check_all::<bf16>(odd_sizes());
}

#[test]
fn decoding_with_any_number_of_queries() {
    check_all::<bf16>(few_queries());
    check_all::<f16>(few_queries());
}

#[test]
fn any_strides() {
    check_strides::<bf16>();
    check_strides::<f16>();
}

#[test]
fn mixed_strides() {
    check_mixed_strides::<bf16>();
    check_mixed_strides::<f16>();
}

/// Zero strides give the bits of the same numbers written out: one sequence for all batch entries,
/// one key head for all, one value for all tokens.
fn broadcast<E: Number>() {
    let case = AttentionCase {
        batch: 3,
        heads_q: 4,
        heads_kv: 4,
        dim_k: 32,
        dim_v: 20,
        ..AttentionCase::new("broadcast", Rule::Causal, 70)
    };
    let problem = case.unmasked();
    let sizes = problem.sizes;
    let narrow = |numbers: &[f32]| numbers.iter().map(|&x| E::from_f32(x)).collect::<Vec<E>>();
    let (q, k, v) = (narrow(&problem.q), narrow(&problem.k), narrow(&problem.v));
    let tokens = sizes.tokens_k as isize;
    let (of_q, of_v) = (sizes.dim_k as isize, sizes.dim_v as isize);
    let strides = |batch, heads, tokens, dim| Strides { batch, heads, tokens, dim };
    let inputs = Inputs {
        q: View::strided(&q, 0, dims_q(&sizes), strides(0, tokens * of_q, of_q, 1)).unwrap(),
        k: View::strided(&k, 0, dims_k(&sizes), strides(tokens * of_q, 0, of_q, 1)).unwrap(),
        v: View::strided(&v, 0, dims_v(&sizes), strides(4 * of_v, of_v, 0, 1)).unwrap(),
    };
    let one = [E::from_f32(0.75)];
    let dout = View::strided(&one, 0, dims_out(&sizes), strides(0, 0, 0, 0)).unwrap();
    let [q, k, v, whole] = [inputs.q, inputs.k, inputs.v, dout].map(written_out);
    let written = Inputs { q: q.view(), k: k.view(), v: v.view() };
    for isa in Isa::available() {
        let attention = attention(&case, isa, 2);
        let run = |inputs: Inputs<'_, E>, dout| {
            let output = attention.forward(inputs).unwrap();
            let gradients = attention.backward(inputs, &output, dout).unwrap();
            let tensors = [output.out, gradients.dq, gradients.dk, gradients.dv];
            (tensors.map(|tensor| written_out(tensor.view())), output.lse)
        };
        assert_eq!(run(inputs, dout), run(written, whole.view()), "{isa} {}", E::TYPE);
    }
}

/// A tensor's elements in memory of their own.
fn written_out<E: Number>(view: View<'_, E>) -> Tensor<E> {
    let Dims { batch, tokens, heads, dim } = view.dims();
    let mut data = Vec::new();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        for (t, d) in (0..tokens).flat_map(|t| (0..dim).map(move |d| (t, d))) {
            data.push(view.get(b, t, h, d).unwrap());
        }
    }
    Tensor::new(data, view.dims(), Order::Bhsd).unwrap()
}

#[test]
fn broadcast_inputs() {
    broadcast::<bf16>();
    broadcast::<f16>();
}

/// Rows and columns of 65,536 terms are no farther from the best than those of 4,096.
fn long<E: Number>(isas: &[Isa]) {
    let ratios = |tokens_q: usize, tokens_k: usize| -> Vec<(Isa, &str, f64)> {
        let case = AttentionCase {
            heads_q: 1,
            heads_kv: 1,
            ..AttentionCase::new("long", Rule::Full, tokens_k as u64)
        };
        let case = AttentionCase {
            layout: longspan_testing::Case { tokens_q: tokens_q as u64, ..case.layout.clone() },
            ..case
        };
        let sizes =
            Sizes { batch: 1, tokens_q, tokens_k, heads_q: 1, heads_kv: 1, dim_k: 32, dim_v: 32 };
        let problem = Problem::normal(sizes, 5).rounded(E::PRECISION);
        let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
        let placement = Placement::Contiguous(Order::Bshd);
        let tensors = TensorsOf::<E>::of(&problem, placement);
        let mut ratios = Vec::new();
        for &isa in isas {
            let attention = attention(&case, isa, 2);
            let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
            for measure in measures::<E>(isa, &problem, (&truth, &naive), &got, Sample::ALL) {
                assert!(measure.holds(), "{isa} {tokens_q} x {tokens_k}: {measure}");
                ratios.push((isa, measure.tensor, measure.ratio()));
            }
        }
        ratios
    };
    // More queries than the matrix unit leaves to vectors.
    const FEW: usize = 40;
    // `out` and `dq` are sums over keys, `dk` and `dv` over queries. Means over 1,280 numbers are
    // within 6 % of each other, three standard deviations; log-sum-exps have the rule of f32.
    let pairs = [
        (["out", "dq"], ratios(FEW, 1 << 12), ratios(FEW, 1 << 16)),
        (["dk", "dv"], ratios(1 << 12, FEW), ratios(1 << 16, FEW)),
    ];
    for (tensors, short, long) in pairs {
        for (&(isa, tensor, short), &(.., long)) in short.iter().zip(&long) {
            let matters = tensors.contains(&tensor);
            assert!(!matters || long < 1.06 * short, "{isa} {tensor}: {short} and then {long}");
        }
    }
}

#[test]
fn long_rows_are_as_good_as_short_ones() {
    let isas = Isa::available();
    long::<bf16>(&isas[isas.len().saturating_sub(2)..]);
}

/// Keys in two pieces: a state goes on over them, and gradients are added up. Both are f32, so what
/// doesn't multiply as bf16 is held to the rule of f32.
fn pieces<E: Number>() {
    const TOKENS: usize = 150;
    const CUT: usize = 67;
    let case = AttentionCase::new("pieces", Rule::Causal, TOKENS as u64);
    let problem = case.problem().rounded(E::PRECISION);
    let sizes = problem.sizes;
    let wide = Problem { precision: Precision::F32, ..problem.clone() };
    let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    let tensors = TensorsOf::<E>::of(&problem, Placement::Contiguous(dense_order()));
    let Inputs { q, k, v } = tensors.inputs();
    for isa in Isa::available() {
        // A piece's keys of each tensor, and what they are seen by.
        let pieces = [0..CUT, CUT..TOKENS].map(|keys| {
            let shape = Shape::new(TOKENS, keys.len()).query_offset(0);
            let shape = shape.key_offset(keys.start as i64);
            let layout = Layout::compile(&Pattern::causal(), &shape).unwrap();
            let part = |view: View<'_, E>| {
                let first = keys.start as isize * view.strides().tokens;
                let dims = Dims { tokens: keys.len(), ..view.dims() };
                let first = view.as_ptr().wrapping_offset(first);
                // SAFETY: tokens of the view; the tensors outlive it.
                unsafe { View::<E>::from_raw(first, dims, view.strides()) }.unwrap()
            };
            (Attention::new(layout).isa(isa), Inputs { q, k: part(k), v: part(v) }, keys)
        });
        let mut state = State::empty(dims_out(&sizes)).unwrap();
        for (attention, inputs, _) in &pieces {
            attention.extend(*inputs, &mut state, Hook::none()).unwrap();
        }
        let output = state.finish(dense_order()).unwrap();
        let out: Vec<E> = output.out.as_slice().iter().map(|&x| E::from_f32(x)).collect();
        let out = Tensor::new(out, dims_out(&sizes), dense_order()).unwrap();
        let (saved, gradient) = (
            OutputRef { out: out.view(), lse: &output.lse, lse_lo: Some(&output.lse_lo) },
            OutputGradient { dout: tensors.dout.view(), dlse: None },
        );
        let mut delta = vec![0.0; sizes.rows()];
        row_deltas(saved, gradient, &mut delta).unwrap();
        let rows = RowStatistics { lse: &output.lse, lse_lo: Some(&output.lse_lo), delta: &delta };
        let zeros = |dims| Tensor::filled(0.0_f32, dims, dense_order()).unwrap();
        let mut dq = zeros(dims_q(&sizes));
        let (mut dk, mut dv) = (zeros(dims_k(&sizes)), zeros(dims_v(&sizes)));
        for (attention, inputs, keys) in &pieces {
            let (mut part_k, mut part_v) = (zeros(inputs.k.dims()), zeros(inputs.v.dims()));
            let gradients = GradientsMut::new(dq.view_mut(), part_k.view_mut(), part_v.view_mut());
            let dout = tensors.dout.view();
            attention.accumulate(*inputs, dout, rows, gradients, Hook::none()).unwrap();
            for (whole, part) in [(&mut dk, &part_k), (&mut dv, &part_v)] {
                let dim = part.dims().dim;
                let heads = whole.as_mut_slice().chunks_mut(TOKENS * dim);
                for (whole, part) in heads.zip(part.as_slice().chunks(keys.len() * dim)) {
                    whole[keys.start * dim..keys.end * dim].copy_from_slice(part);
                }
            }
        }
        let got = Values {
            out: output.out.into_vec(),
            lse: output.lse.clone(),
            dq: dq.into_vec(),
            dk: dk.into_vec(),
            dv: dv.into_vec(),
            ..Values::default()
        };
        let exact = isa != Isa::Amx || E::PRECISION != Precision::Bf16;
        for tensor in ["out", "lse", "dq", "dk", "dv"] {
            // The output reaches gradients of queries and keys rounded.
            let rounded = ["dq", "dk"].contains(&tensor) || !exact;
            let problem = if rounded { &problem } else { &wide };
            let measures = measures::<E>(isa, problem, (&truth, &naive), &got, Sample::ALL);
            let measure = measures.iter().find(|measure| measure.tensor == tensor).unwrap();
            assert!(measure.holds(), "{isa} {} {measure}", E::TYPE);
        }
    }
}

#[test]
fn keys_in_pieces() {
    pieces::<bf16>();
    pieces::<f16>();
}

/// One query is too few for a matrix unit: decoding is as exact there as anywhere.
#[test]
fn decoding_multiplies_nothing_as_bf16() {
    let mut case = AttentionCase::new("decode", Rule::Causal, 700);
    (case.layout.tokens_q, case.heads_q, case.heads_kv) = (1, 8, 2);
    let problem = case.problem().rounded(Precision::Bf16);
    let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    let placement = Placement::Contiguous(Order::Bshd);
    let tensors = TensorsOf::<bf16>::of(&problem, placement);
    for isa in Isa::available() {
        let attention = attention(&case, isa, 1);
        let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
        let out = Measure::all(&problem, &truth, &naive, &got, Sample::ALL)[0];
        assert!(out.holds(), "{isa}, {out}");
    }
}

/// Asked to be exact, every instruction set multiplies f32 numbers, and says so.
#[test]
fn exact_products_are_those_of_f32() {
    let case = AttentionCase::new("exact", Rule::Causal, 331);
    let problem = case.problem().rounded(Precision::Bf16);
    let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
    let placement = Placement::Contiguous(Order::Bshd);
    let tensors = TensorsOf::<bf16>::of(&problem, placement);
    for isa in Isa::available() {
        let attention = attention(&case, isa, 1).precision(longspan::Precision::Widened);
        let numbers = attention.compute_types::<bf16>().unwrap();
        assert_eq!((numbers.stored, numbers.multiplied), (ElementType::Bf16, ElementType::F32));
        let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
        for measure in Measure::all(&problem, &truth, &naive, &got, Sample::ALL) {
            assert!(measure.holds(), "{isa}, {measure}");
        }
    }
}

/// Scores that rise by more than a maximum may be off, late in a key tile or from one tile to the next,
/// in some rows and not in others.
#[test]
fn scores_that_rise() {
    for (first, factor) in [(40, 6.0), (300, 12.0), (520, 25.0), (1_000, 60.0)] {
        let case = AttentionCase::new("rising", Rule::Full, 1_100);
        let mut problem = case.problem();
        let dim = problem.sizes.dim_k;
        for key in problem.k.chunks_mut(dim).skip(first).step_by(200) {
            key.iter_mut().for_each(|x| *x *= factor);
        }
        problem.unit_scale = false;
        let problem = problem.rounded(Precision::Bf16);
        let (truth, naive) = (truth(&problem, Sample::ALL), naive(&problem, Sample::ALL));
        let placement = Placement::Contiguous(Order::Bhsd);
        let tensors = TensorsOf::<bf16>::of(&problem, placement);
        for isa in Isa::available() {
            let attention = attention(&case, isa, 2);
            let got = Run { attention: &attention, tensors: &tensors, results: placement }.both();
            for measure in measures::<bf16>(isa, &problem, (&truth, &naive), &got, Sample::ALL) {
                assert!(measure.holds(), "{isa}, from {first}, times {factor}: {measure}");
            }
        }
    }
}

/// Scores in the thousands are computed with more care; their neighbours keep their bits.
#[test]
fn a_large_row_leaves_its_neighbours_alone() {
    let dims = Dims { batch: 1, tokens: 96, heads: 1, dim: 32 };
    let wave = |i: usize, shift: usize| bf16::from_f32(((i * 7 + shift) as f32).sin());
    let tensor = |shift| {
        let data = (0..dims.elements().unwrap()).map(|i| wave(i, shift)).collect();
        Tensor::new(data, dims, Order::Bhsd).unwrap()
    };
    let (q, k, v) = (tensor(1), tensor(2), tensor(3));
    let mut large = q.clone();
    let row = 37 * dims.dim..38 * dims.dim;
    for x in &mut large.as_mut_slice()[row.clone()] {
        *x = bf16::from_f32(x.to_f32() * 65_536.0);
    }
    for isa in Isa::available() {
        let layout = Layout::compile(&Pattern::full(), &Shape::new(96, 96)).unwrap();
        let attention = Attention::new(layout).isa(isa);
        let run = |q: &Tensor<bf16>| {
            attention.forward(Inputs::new(q.view(), k.view(), v.view())).unwrap()
        };
        let (before, after) = (run(&q), run(&large));
        assert!(after.lse[37].abs() > 1024.0, "{isa}: {}", after.lse[37]);
        let pairs = before.out.as_slice().iter().zip(after.out.as_slice());
        for (at, (before, after)) in pairs.enumerate().filter(|(at, _)| !row.contains(at)) {
            assert_eq!(before.to_bits(), after.to_bits(), "{isa}: number {at}");
        }
        for (at, (before, after)) in before.lse.iter().zip(&after.lse).enumerate() {
            assert!(at == 37 || before.to_bits() == after.to_bits(), "{isa}: row {at}");
        }
    }
}
