//! What can't be done is an error that names the value and the rule; nothing is ignored.

use longspan::{
    Attention, BlockSize, Dims, Error, GradientsMut, Hook, Inputs, Isa, KvCache, Layout, LayoutSet,
    Order, OutputGradient, OutputMut, OutputRef, Padding, Pattern, RowStatistics, Score, Shape,
    State, Strides, Tensor, Threads, View, ViewMut, merge_outputs, row_deltas,
};

mod overlap;

use crate::common::{bits, compile};

const ORDER: Order = Order::Bshd;

fn dims(batch: usize, tokens: usize, heads: usize, dim: usize) -> Dims {
    Dims { batch, tokens, heads, dim }
}

fn tensor(dims: Dims) -> Tensor<f32> {
    Tensor::filled(0.5, dims, ORDER).unwrap()
}

/// The error of a result, whose message has all of these in it.
#[track_caller]
fn refused<T>(result: Result<T, Error>, words: &[&str]) -> Error {
    let Err(error) = result else { panic!("accepted, expected an error with {words:?}") };
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "{text:?} doesn't say {word:?}");
    }
    error
}

fn forward(q: Dims, k: Dims, v: Dims) -> Result<(), Error> {
    let attention = Attention::new(compile("causal", 6, 9));
    attention.forward(Inputs::new(tensor(q).view(), tensor(k).view(), tensor(v).view())).map(drop)
}

#[test]
fn axes_that_do_not_fit() {
    let (q, k, v) = (dims(2, 6, 4, 8), dims(2, 9, 2, 8), dims(2, 9, 2, 5));
    assert!(forward(q, k, v).is_ok());
    let shape = |result, words: &[&str], axis: (&str, &str)| match refused(result, words) {
        Error::Shape { tensor, axis: name, .. } => assert_eq!((tensor, name), axis),
        other => panic!("{other:?}"),
    };
    shape(forward(q, Dims { batch: 3, ..k }, v), &["3", "2"], ("k", "batch"));
    shape(forward(q, k, Dims { batch: 1, ..v }), &["1", "2"], ("v", "batch"));
    shape(forward(q, Dims { dim: 7, ..k }, v), &["7", "8"], ("k", "head dim"));
    shape(forward(q, k, Dims { tokens: 8, ..v }), &["8", "9"], ("v", "tokens"));
    shape(forward(q, k, Dims { heads: 4, ..v }), &["4", "2"], ("v", "heads"));
    shape(forward(Dims { tokens: 7, ..q }, k, v), &["7", "6"], ("q", "tokens"));
    let more = (Dims { tokens: 10, ..k }, Dims { tokens: 10, ..v });
    shape(forward(q, more.0, more.1), &["10", "9"], ("k", "tokens"));

    for heads in [3, 5, 1] {
        let error = refused(forward(Dims { heads, ..q }, k, v), &[&heads.to_string(), "2"]);
        assert_eq!(error, Error::Heads { query: heads, key: 2 });
    }
    let none = (Dims { heads: 0, ..k }, Dims { heads: 0, ..v });
    let error = refused(forward(q, none.0, none.1), &["4", "0"]);
    assert_eq!(error, Error::Heads { query: 4, key: 0 });
    for dim in [0, 257, 1000] {
        let result = forward(Dims { dim, ..q }, Dims { dim, ..k }, v);
        let error = refused(result, &[&dim.to_string(), "256"]);
        assert_eq!(error, Error::HeadDim { tensor: "q", dim, most: 256 });
        let error = refused(forward(q, k, Dims { dim, ..v }), &[&dim.to_string(), "256"]);
        assert_eq!(error, Error::HeadDim { tensor: "v", dim, most: 256 });
    }
}

#[test]
fn layouts_that_do_not_fit() {
    let run = |attention: Attention, batch: usize, heads: usize| {
        let x = tensor(dims(batch, 100, heads, 4));
        attention.forward(Inputs::new(x.view(), x.view(), x.view())).map(drop)
    };
    let shape = Shape::new(100, 100);
    let set = |batch, heads| {
        let padding = Padding::None(batch);
        LayoutSet::compile(&Pattern::causal().into(), heads, &shape, &padding, None).unwrap()
    };
    assert!(run(Attention::new(set(2, 3)), 2, 3).is_ok());
    refused(run(Attention::new(set(2, 3)), 3, 3), &["batch", "3", "2"]);
    refused(run(Attention::new(set(2, 3)), 2, 6), &["heads", "6", "3"]);

    // Rows that weren't compiled are not rows that see nothing.
    let some = shape.clone().block(BlockSize::new(16).unwrap()).rows(1..3);
    let layout = Layout::compile(&Pattern::causal(), &some).unwrap();
    refused(run(Attention::new(layout), 1, 1), &["rows", "2", "7"]);
}

#[test]
fn slices_and_strides() {
    let data = vec![0.0_f32; 24];
    let d = dims(1, 3, 2, 4);
    assert!(View::new(&data, d, ORDER).is_ok());
    let error = refused(View::new(&data[1..], d, ORDER), &["23", "24"]);
    assert!(matches!(error, Error::Length { len: 23, expected: 24, .. }));

    let strides = |tokens, heads, dim| Strides { batch: 0, tokens, heads, dim };
    assert!(View::strided(&data, 0, d, strides(8, 4, 1)).is_ok());
    assert!(View::strided(&data, 20, d, strides(-8, -4, 1)).is_ok());
    let error = refused(View::strided(&data, 1, d, strides(8, 4, 1)), &["1", "23", "24"]);
    assert_eq!(error, Error::Outside { first: 1, low: 0, high: 23, len: 24 });
    refused(View::strided(&data, 19, d, strides(-8, -4, 1)), &["19", "-20"]);
    refused(View::strided(&data, 24, dims(1, 1, 1, 1), strides(1, 1, 1)), &["24"]);
    refused(View::strided(&data, usize::MAX, d, strides(8, 4, 1)), &["24"]);
    // Without elements there is nothing to reach.
    assert!(View::strided(&data, 0, dims(0, 3, 2, 4), strides(1000, 1000, 1000)).is_ok());
}

#[test]
fn sizes_that_can_not_be_counted() {
    let data = [0.0_f32; 4];
    let huge = [
        dims(usize::MAX, 2, 1, 1),
        dims(1 << 32, 1 << 32, 1, 1),
        dims(1 << 20, 1 << 20, 1 << 20, 1 << 20),
    ];
    for dims in huge {
        let error = refused(View::new(&data, dims, ORDER), &["64 bits"]);
        assert_eq!(error, Error::Overflow { dims });
        refused(Tensor::filled(0.0_f32, dims, ORDER), &["64 bits"]);
        refused(State::empty(dims), &["64 bits"]);
    }
    // Elements can be counted, their bytes can't.
    let bytes = dims(1 << 31, 1 << 31, 1, 1);
    assert!(View::new(&data, bytes, ORDER).is_err());
    refused(Tensor::filled(0.0_f32, bytes, ORDER), &[]);
    refused(State::empty(bytes), &[]);
    // Rows can't be counted although there is no element.
    refused(State::empty(dims(1 << 32, 1 << 32, 1 << 10, 0)), &["64 bits"]);
    // Offsets can't be counted.
    let strides = |tokens| Strides { batch: 1, tokens, heads: 1, dim: 1 };
    for stride in [isize::MAX, isize::MIN, 1 << 61] {
        let d = dims(1, 3, 1, 1);
        let error = refused(View::strided(&data, 0, d, strides(stride)), &[]);
        assert!(matches!(error, Error::Overflow { .. } | Error::Outside { .. }), "{error:?}");
        // SAFETY: refused before anything is read.
        let view = unsafe { View::from_raw(data.as_ptr(), d, strides(stride)) };
        refused(view, &["64 bits"]);
    }
    // No tokens, but batch entries that tasks would number.
    for many in [dims(1 << 40, 0, 1, 8), dims(1 << 20, 0, 1 << 20, 8)] {
        let error = refused(forward(many, many, many), &["2^28"]);
        assert_eq!(error, Error::TooManyHeads { dims: many });
        refused(forward(dims(1, 0, 0, 8), many, many), &["2^28"]);
        let mut cache = KvCache::new(Pattern::causal());
        refused(cache.append(tensor(many).view(), tensor(many).view()), &["2^28"]);
    }
    // No elements, whatever the other axes say.
    let none: [f32; 0] = [];
    for dims in [dims(0, usize::MAX, 2, 2), dims(usize::MAX, usize::MAX, 0, 1)] {
        for order in [ORDER, Order::Bhsd] {
            assert!(View::new(&none, dims, order).is_ok());
        }
    }
}

#[test]
fn pointers() {
    let data = [0.0_f32; 8];
    let (d, strides) = (dims(1, 1, 1, 4), Strides { batch: 4, tokens: 4, heads: 4, dim: 1 });
    // SAFETY: either within `data`, or refused before anything is read.
    unsafe {
        assert!(View::from_raw(data.as_ptr(), d, strides).is_ok());
        for bytes in 1..4 {
            let off = data.as_ptr().byte_add(bytes);
            let error = refused(View::from_raw(off, d, strides), &["multiple of 4"]);
            assert_eq!(error, Error::Misaligned { address: off as usize, align: 4 });
            refused(ViewMut::from_raw(off.cast_mut(), d, strides), &["multiple of 4"]);
        }
        refused(View::from_raw(std::ptr::null::<f32>(), d, strides), &["0x0", "non-null"]);
        refused(ViewMut::from_raw(std::ptr::null_mut::<f32>(), d, strides), &["non-null"]);
        // A null pointer to nothing is what some libraries have for an empty tensor.
        let empty = Dims { tokens: 0, ..d };
        assert!(View::from_raw(std::ptr::null::<f32>(), empty, strides).is_ok());
    }
}

#[test]
fn lists_of_rows() {
    let attention = Attention::new(compile("causal", 10, 10));
    let d = dims(2, 10, 3, 4);
    let x = tensor(d);
    let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
    let right = vec![0.0; 60];
    let length = |result: Result<(), Error>, len: usize| {
        let error = refused(result, &[&len.to_string(), "60"]);
        let expected = 60;
        assert!(
            matches!(error, Error::Length { len: l, expected: e, .. } if (l, e) == (len, expected))
        );
    };
    for len in [0, 59, 61, 20] {
        let wrong = vec![0.0; len];
        let write = |call: &dyn Fn(OutputMut<'_>) -> Result<(), Error>| {
            let mut out = tensor(d);
            let (mut wrong, mut right) = (wrong.clone(), right.clone());
            let output = OutputMut { out: out.view_mut(), lse: &mut wrong, lse_lo: None };
            length(call(output), len);
            let lse_lo = Some(&mut wrong[..]);
            length(call(OutputMut { out: out.view_mut(), lse: &mut right, lse_lo }), len);
        };
        write(&|output| attention.forward_into(inputs, output, Hook::none()));
        write(&|output| State::empty(d).unwrap().finish_into(output));
        write(&|output| merge_outputs(output, x.view(), &right));
        let (out, dout) = (x.view(), x.view());
        let output = OutputRef { out, lse: &right, lse_lo: None };
        let gradient = OutputGradient { dout, dlse: None };
        for (output, gradient) in [
            (OutputRef { lse: &wrong, ..output }, gradient),
            (OutputRef { lse_lo: Some(&wrong), ..output }, gradient),
            (output, OutputGradient { dlse: Some(&wrong), ..gradient }),
        ] {
            length(attention.backward(inputs, output, gradient).map(drop), len);
        }
        length(row_deltas(output, gradient, &mut wrong.clone()), len);
        let fits = RowStatistics { lse: &right, lse_lo: None, delta: &right };
        for rows in [
            RowStatistics { lse: &wrong, ..fits },
            RowStatistics { lse_lo: Some(&wrong), ..fits },
            RowStatistics { delta: &wrong, ..fits },
        ] {
            let (mut a, mut b, mut c) = (tensor(d), tensor(d), tensor(d));
            let gradients = GradientsMut::new(a.view_mut(), b.view_mut(), c.view_mut());
            length(attention.accumulate(inputs, x.view(), rows, gradients, Hook::none()), len);
        }
    }
}

#[test]
fn results_of_another_shape() {
    let attention = Attention::new(compile("causal", 10, 10));
    let (d, k) = (dims(1, 10, 4, 8), dims(1, 10, 2, 8));
    let v = Dims { dim: 5, ..k };
    let (q, k, v) = (tensor(d), tensor(k), tensor(v));
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let right = Dims { dim: 5, ..d };
    let lse = vec![0.0; 40];
    let wrong = [
        (Dims { batch: 2, ..right }, "batch"),
        (Dims { tokens: 11, ..right }, "tokens"),
        (Dims { heads: 2, ..right }, "heads"),
        (Dims { dim: 8, ..right }, "head dim"),
    ];
    for (dims, axis) in wrong {
        let mut out = tensor(dims);
        let mut rows = vec![0.0; 40];
        let output = OutputMut { out: out.view_mut(), lse: &mut rows, lse_lo: None };
        refused(attention.forward_into(inputs, output, Hook::none()), &["out", axis]);
        let mut state = State::empty(dims).unwrap();
        refused(attention.extend(inputs, &mut state, Hook::none()), &["state", axis]);
        refused(State::empty(right).unwrap().merge(&state), &["state", axis]);
        let (good, bad) = (tensor(right), tensor(dims));
        for (out, dout) in [(&good, &bad), (&bad, &good)] {
            let (out, dout) = (out.view(), dout.view());
            let (saved, gradient) =
                (OutputRef { out, lse: &lse, lse_lo: None }, OutputGradient { dout, dlse: None });
            refused(attention.backward(inputs, saved, gradient), &[axis]);
        }
    }
    let good = tensor(right);
    let out = good.view();
    let (saved, gradient) =
        (OutputRef { out, lse: &lse, lse_lo: None }, OutputGradient { dout: out, dlse: None });
    for wrong in 0..3 {
        let mut sizes = [q.dims(), k.dims(), v.dims()];
        sizes[wrong].tokens += 1;
        let [mut a, mut b, mut c] = sizes.map(tensor);
        let gradients = GradientsMut::new(a.view_mut(), b.view_mut(), c.view_mut());
        let result = attention.backward_into(inputs, saved, gradient, gradients, Hook::none());
        refused(result, &[["dq", "dk", "dv"][wrong], "tokens", "11", "10"]);
    }
}

/// A call that is refused writes nothing.
#[test]
fn refused_calls_write_nothing() {
    let attention = Attention::new(compile("causal", 10, 10));
    let d = dims(1, 10, 1, 4);
    let x = tensor(d);
    let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
    let short = vec![0.0; 9];
    let (mut a, mut b, mut c) = (tensor(d), tensor(d), tensor(d));
    let gradients = GradientsMut::new(a.view_mut(), b.view_mut(), c.view_mut());
    let out = x.view();
    let (saved, gradient) =
        (OutputRef { out, lse: &short, lse_lo: None }, OutputGradient { dout: out, dlse: None });
    refused(
        attention.backward_into(inputs, saved, gradient, gradients, Hook::none()),
        &["9", "10"],
    );
    for gradient in [a, b, c] {
        assert_eq!(bits(gradient.as_slice()), bits(x.as_slice()));
    }
}

#[test]
fn options() {
    let x = tensor(dims(1, 20, 4, 8));
    let layout = std::sync::Arc::new(compile("causal", 20, 20));
    let run = |change: &dyn Fn(Attention) -> Attention| {
        change(Attention::new(layout.clone()))
            .forward(Inputs::new(x.view(), x.view(), x.view()))
            .map(drop)
    };
    assert!(run(&|a| a).is_ok());
    for (scale, text) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-f32::INFINITY, "-inf")] {
        let error = refused(run(&|a| a.scale(scale)), &["scale", text, "finite"]);
        assert!(matches!(error, Error::Number { .. }));
    }
    for (cap, text) in [(0.0, "0"), (-3.0, "-3"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        refused(run(&|a| a.softcap(cap)), &["softcap", text, "positive"]);
    }
    let slopes = |slopes: &[f32]| Score::default().alibi_slopes(slopes);
    assert!(run(&|a| a.score(slopes(&[0.5; 4]))).is_ok());
    refused(run(&|a| a.score(slopes(&[0.5; 3]))), &["slopes", "3", "4"]);
    refused(run(&|a| a.score(slopes(&[0.5, 0.5, f32::NAN, 1.0]))), &["slope", "NaN", "finite"]);
    // More threads than the work needs are fine, more than any machine has aren't.
    let threads = |count| Threads::Count(count);
    assert!(run(&|a| a.threads(threads(4_096))).is_ok());
    for count in [4_097, usize::MAX] {
        let error = refused(run(&|a| a.threads(threads(count))), &[&count.to_string(), "4096"]);
        assert_eq!(error, Error::Threads { asked: count, most: 4_096 });
    }
    for isa in [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512] {
        let result = run(&|a| a.isa(isa));
        if Isa::available().contains(&isa) {
            result.unwrap();
        } else {
            let error = refused(result, &[&isa.to_string(), "portable"]);
            let has = Isa::available().into_iter().map(Isa::name).collect();
            assert_eq!(error, Error::Isa { asked: isa.name(), has });
        }
    }
    let error = refused("sse9".parse::<Isa>(), &["sse9", "portable", "avx512"]);
    assert_eq!(error, Error::IsaName { name: "sse9".into() });
}
