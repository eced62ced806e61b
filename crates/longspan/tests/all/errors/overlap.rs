//! Tensors that overlap what is written.

use half::{bf16, f16};
use longspan::{
    Attention, Dims, Error, GradientsMut, Hook, Inputs, OutputGradient, OutputMut, OutputRef,
    RowStatistics, Strides, Tensor, View, ViewMut,
};

use super::{ORDER, dims, refused, tensor};
use crate::common::compile;

#[test]
fn tensors_that_overlap_themselves() {
    let mut data = vec![0.0_f32; 1000];
    let d = dims(1, 3, 2, 4);
    let strides = |tokens, heads, dim| Strides { batch: 0, tokens, heads, dim };
    for good in [strides(8, 4, 1), strides(-8, -4, -1), strides(1, 3, 6), strides(4, 12, 1)] {
        let first = 500;
        assert!(ViewMut::strided(&mut data, first, d, good).is_ok(), "{good:?}");
    }
    for bad in [
        strides(0, 4, 1),
        strides(8, 0, 1),
        strides(8, 4, 0),
        strides(4, 4, 1),
        strides(7, 4, 1),
        strides(8, 3, 1),
        strides(-7, 4, 1),
    ] {
        let error = refused(ViewMut::strided(&mut data, 500, d, bad), &["overlap"]);
        assert_eq!(error, Error::SelfOverlap { dims: d, strides: bad });
    }
    // An axis of one element has no stride to speak of.
    let one = Dims { tokens: 1, ..d };
    assert!(ViewMut::strided(&mut data, 0, one, strides(0, 4, 1)).is_ok());
}

/// Both passes on tensors of one allocation, each from its own element on.
struct Shared {
    data: Vec<f32>,
    tokens: usize,
    stride: usize,
}

#[derive(Clone, Copy)]
struct At {
    q: usize,
    k: usize,
    v: usize,
    out: usize,
    dout: usize,
    dq: usize,
    dk: usize,
    dv: usize,
}

impl Shared {
    fn dims(&self) -> Dims {
        dims(1, self.tokens, 1, 4)
    }

    fn strides(&self) -> Strides {
        Strides { batch: 1, tokens: self.stride as isize, heads: 1, dim: 1 }
    }

    fn read(&self, at: usize) -> View<'_, f32> {
        View::strided(&self.data, at, self.dims(), self.strides()).unwrap()
    }

    /// # Safety
    ///
    /// Overlap is what the call has to refuse.
    unsafe fn write(&self, at: usize) -> ViewMut<'_, f32> {
        let first = self.data.as_ptr().wrapping_add(at).cast_mut();
        // SAFETY: `read` of the same place has checked that it lies within.
        unsafe { ViewMut::from_raw(first, self.dims(), self.strides()) }.unwrap()
    }

    fn run(&self, at: At) -> Result<(), Error> {
        let attention = Attention::new(compile("full", self.tokens, self.tokens));
        let inputs = Inputs { q: self.read(at.q), k: self.read(at.k), v: self.read(at.v) };
        let mut lse = vec![0.0; self.tokens];
        // SAFETY: as `write` says.
        unsafe {
            let output = OutputMut { out: self.write(at.out), lse: &mut lse, lse_lo: None };
            attention.forward_into(inputs, output, Hook::none())?;
            let gradients =
                GradientsMut::new(self.write(at.dq), self.write(at.dk), self.write(at.dv));
            let (out, dout) = (self.read(at.out), self.read(at.dout));
            let (saved, gradient) =
                (OutputRef { out, lse: &lse, lse_lo: None }, OutputGradient { dout, dlse: None });
            attention.backward_into(inputs, saved, gradient, gradients, Hook::none())
        }
    }
}

#[test]
fn results_that_overlap_something() {
    // Eight tensors side by side within each token, as a fused projection leaves them: legal.
    let shared = Shared { data: vec![0.5; 64 * 5], tokens: 5, stride: 64 };
    let touching = At { q: 0, k: 4, v: 8, out: 12, dout: 16, dq: 20, dk: 24, dv: 28 };
    shared.run(touching).unwrap();
    let at = At { q: 0, k: 8, v: 16, out: 24, dout: 32, dq: 40, dk: 48, dv: 56 };
    shared.run(at).unwrap();
    // Inputs may be one and the same.
    shared.run(At { k: 0, v: 0, dout: 0, ..at }).unwrap();

    let overlap = |at: At, first: &str, second: &str| {
        let error = refused(shared.run(at), &[first, second, "overlap"]);
        assert!(matches!(error, Error::Overlap { .. }), "{error:?}");
    };
    for shift in [0, 1, 3] {
        overlap(At { out: at.q + shift, ..at }, "out", "q");
        overlap(At { out: at.v + shift, ..at }, "out", "v");
        overlap(At { dq: at.k + shift, ..at }, "dq", "k");
        overlap(At { dk: at.k + shift, ..at }, "dk", "k");
        overlap(At { dv: at.dout + shift, ..at }, "dv", "dout");
        overlap(At { dq: at.dk + shift, ..at }, "dq", "dk");
        overlap(At { dv: at.dk + shift, ..at }, "dk", "dv");
        // The output is read by the backward pass: gradients mustn't lie on it.
        overlap(At { dq: at.out + shift, ..at }, "dq", "out");
        overlap(At { dv: at.out + shift, ..at }, "dv", "out");
    }
}

/// Statistics of rows are read and written too.
#[test]
fn row_statistics_that_overlap_something() {
    let attention = Attention::new(compile("full", 4, 4));
    let d = dims(1, 4, 1, 4);
    let x = tensor(d);
    let mut data = vec![0.25_f32; 16];
    let first = data.as_mut_ptr();
    let strides = x.view().strides();
    // SAFETY: the overlap is what the calls have to refuse.
    unsafe {
        let rows = || std::slice::from_raw_parts_mut(first.add(8), 4);
        let write = || ViewMut::from_raw(first, d, strides).unwrap();
        let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
        let mut other = [0.0; 4];
        let (mut a, mut b) = (x.clone(), x.clone());
        let overlap = |result, first, second| {
            let error = refused(result, &[first, second, "overlap"]);
            assert_eq!(error, Error::Overlap { first, second });
        };
        let forward = |out: ViewMut<'_, f32>, lse: &mut [f32], lse_lo: Option<&mut [f32]>| {
            let output = OutputMut { out, lse, lse_lo };
            attention.forward_into(inputs, output, Hook::none())
        };
        overlap(forward(write(), rows(), None), "out", "lse");
        overlap(forward(write(), &mut other, Some(rows())), "out", "lse_lo");
        overlap(forward(a.view_mut(), rows(), Some(rows())), "lse", "lse_lo");
        let on_q = std::slice::from_raw_parts_mut(x.as_slice().as_ptr().cast_mut(), 4);
        overlap(forward(a.view_mut(), rows(), Some(on_q)), "lse_lo", "q");

        for (lse, lse_lo, name) in [(&*rows(), None, "lse"), (&other[..], Some(&*rows()), "lse_lo")]
        {
            let gradients = GradientsMut::new(write(), a.view_mut(), b.view_mut());
            let (saved, gradient) = (
                OutputRef { out: x.view(), lse, lse_lo },
                OutputGradient { dout: x.view(), dlse: None },
            );
            overlap(
                attention.backward_into(inputs, saved, gradient, gradients, Hook::none()),
                "dq",
                name,
            );
            let gradients = GradientsMut::new(write(), a.view_mut(), b.view_mut());
            let rows = RowStatistics { lse, lse_lo, delta: &other };
            let result = attention.accumulate(inputs, x.view(), rows, gradients, Hook::none());
            overlap(result, "dq", name);
        }
    }
}

/// Elements of two bytes and lists of four: they overlap where they share a byte, whichever way the
/// tensor runs.
#[test]
fn half_tensors_that_overlap_lists() {
    let attention = Attention::new(compile("full", 4, 4));
    let d = dims(1, 4, 1, 4);
    let x = Tensor::filled(bf16::ONE, d, ORDER).unwrap();
    let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
    let forwards = x.view().strides();
    let backwards = Strides { tokens: -forwards.tokens, dim: -1, ..forwards };
    // 32 bytes of a tensor against the 16 bytes of a list that begins at byte 48.
    let mut data = [0.25_f32; 24];
    let first = data.as_mut_ptr().cast::<u8>();
    for at in (0..=64).step_by(2) {
        for (strides, start) in [(forwards, at), (backwards, at + 30)] {
            // SAFETY: both lie within `data`; overlap is what the calls have to refuse.
            let (write, rows) = unsafe {
                let tensor = || ViewMut::from_raw(first.add(start).cast(), d, strides).unwrap();
                let rows = || std::slice::from_raw_parts_mut(first.add(48).cast::<f32>(), 4);
                (tensor, rows)
            };
            let check = |result, first, second| {
                if 16 < at && at < 64 {
                    let error = refused(result, &[first, second, "overlap"]);
                    assert_eq!(error, Error::Overlap { first, second }, "{at}");
                } else {
                    result.unwrap_or_else(|error| panic!("byte {at}: {error}"));
                }
            };
            let mut other = [0.0; 4];
            let output = OutputMut { out: write(), lse: rows(), lse_lo: None };
            check(attention.forward_into(inputs, output, Hook::none()), "out", "lse");
            let output = OutputMut { out: write(), lse: &mut other, lse_lo: Some(rows()) };
            check(attention.forward_into(inputs, output, Hook::none()), "out", "lse_lo");
            // A list that is written, a tensor that is read.
            let mut out = x.clone();
            let output = OutputMut { out: out.view_mut(), lse: rows(), lse_lo: None };
            let tensor = write();
            let on_rows = Inputs { q: tensor.as_view(), ..inputs };
            check(attention.forward_into(on_rows, output, Hook::none()), "lse", "q");
            let (mut a, mut b) = (x.clone(), x.clone());
            for (lse, dlse, name) in [(&*rows(), None, "lse"), (&[0.0; 4], Some(&*rows()), "dlse")]
            {
                let (saved, gradient) = (
                    OutputRef { out: x.view(), lse, lse_lo: None },
                    OutputGradient { dout: x.view(), dlse },
                );
                let gradients = GradientsMut::new(a.view_mut(), write(), b.view_mut());
                let result =
                    attention.backward_into(inputs, saved, gradient, gradients, Hook::none());
                check(result, "dk", name);
            }
        }
    }
}

/// Gradients that are added to are f32, and mustn't lie on inputs of half their size.
#[test]
fn wide_gradients_that_overlap_narrow_inputs() {
    let attention = Attention::new(compile("full", 4, 4));
    let d = dims(1, 4, 1, 4);
    let x = Tensor::filled(f16::ONE, d, ORDER).unwrap();
    let strides = x.view().strides();
    // 64 bytes of a gradient against the 32 bytes of an input that begins at byte 64.
    let mut data = [0_u32; 48];
    let first = data.as_mut_ptr().cast::<u8>();
    for at in (0..=128).step_by(4) {
        // SAFETY: both lie within `data`; overlap is what the call has to refuse.
        let (dq, v) = unsafe {
            let dq = ViewMut::<f32>::from_raw(first.add(at).cast(), d, strides).unwrap();
            (dq, View::<f16>::from_raw(first.add(64).cast(), d, strides).unwrap())
        };
        let inputs = Inputs { q: x.view(), k: x.view(), v };
        let (mut dk, mut dv) = (tensor(d), tensor(d));
        let gradients = GradientsMut::new(dq, dk.view_mut(), dv.view_mut());
        let rows = RowStatistics { lse: &[0.0; 4], lse_lo: None, delta: &[0.0; 4] };
        let result = attention.accumulate(inputs, x.view(), rows, gradients, Hook::none());
        if 0 < at && at < 96 {
            let error = refused(result, &["dq", "v", "overlap"]);
            assert_eq!(error, Error::Overlap { first: "dq", second: "v" }, "{at}");
        } else {
            result.unwrap_or_else(|error| panic!("byte {at}: {error}"));
        }
    }
}

/// Strides are the same, lengths aren't: one token of four numbers, three tokens of two.
#[test]
fn overlap_of_tensors_with_other_lengths() {
    let attention = Attention::new(compile("full", 1, 3));
    let data = [0.5_f32; 64];
    let strides = Strides { batch: 1, tokens: 2, heads: 1, dim: 1 };
    let apart = Strides { tokens: 4, ..strides };
    let (dq, dv) = (dims(1, 1, 1, 4), dims(1, 3, 1, 2));
    let (q, k) = (tensor(dq), tensor(dims(1, 3, 1, 4)));
    let v = tensor(dv);
    let out = tensor(dims(1, 1, 1, 2));
    for distance in 0..8_usize {
        // SAFETY: within `data`; overlap is what the call has to refuse.
        let gradients = unsafe {
            let at = |n: usize| data.as_ptr().wrapping_add(n).cast_mut();
            GradientsMut::new(
                ViewMut::from_raw(at(0), dq, strides).unwrap(),
                ViewMut::from_raw(at(40), k.dims(), apart).unwrap(),
                ViewMut::from_raw(at(distance), dv, strides).unwrap(),
            )
        };
        let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
        let (out, lse) = (out.view(), &[0.0]);
        let (saved, gradient) =
            (OutputRef { out, lse, lse_lo: None }, OutputGradient { dout: out, dlse: None });
        let result = attention.backward_into(inputs, saved, gradient, gradients, Hook::none());
        if distance < 4 {
            let error = refused(result, &["dq", "dv"]);
            assert_eq!(error, Error::Overlap { first: "dq", second: "dv" }, "{distance}");
        } else {
            result.unwrap();
        }
    }
}
