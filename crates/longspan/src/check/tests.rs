//! What passes refuse by themselves: kernels write through pointers, so that no pass may depend on
//! checks that were made elsewhere. Passes are not run: unit tests have no kernels, which take a minute to
//! compile.

use half::bf16;
use longspan_pattern::{Layout, Pattern, Shape};

use super::*;
use crate::dims::Order;
use crate::driver::{Call, Target};
use crate::exec::{Hook, Monitor};
use crate::state::StateMut;
use crate::tensor::ViewMut;

fn monitor() -> Monitor<'static> {
    Monitor::new(Hook::none())
}

const DIMS: Dims = Dims { batch: 1, tokens: 8, heads: 2, dim: 4 };
/// What all outputs lie in, so that one that is too short is followed by memory of its own.
const MEMORY: usize = 256;
const ORDER: Order = Order::Bhsd;

fn layouts() -> Layouts {
    Layout::compile(&Pattern::causal(), &Shape::new(8, 8)).unwrap().into()
}

fn inputs(data: &[f32]) -> Inputs<'_, f32> {
    let view = View::new(&data[..64], DIMS, ORDER).unwrap();
    Inputs { q: view, k: view, v: view }
}

fn slice(memory: &mut [f32], dims: Dims) -> ViewMut<'_, f32> {
    ViewMut::new(&mut memory[..dims.elements().unwrap()], dims, ORDER).unwrap()
}

#[test]
fn a_forward_pass_refuses_rows_of_other_dims() {
    let (options, layouts, data) = (Options::default(), layouts(), vec![0.5; MEMORY]);
    let fewer = Dims { tokens: 7, ..DIMS };
    for (dims, right) in [(DIMS, true), (fewer, false), (Dims { dim: 3, ..DIMS }, false)] {
        let [mut out, mut lse, mut totals] = [(); 3].map(|()| vec![0.0; MEMORY]);
        let rows = dims.rows();
        let output = OutputMut { out: slice(&mut out, dims), lse: &mut lse[..rows], lse_lo: None };
        let finish = Target::Finish(output.rows().unwrap());
        let (inputs, monitor) = (inputs(&data), monitor());
        let call = Call::forward(&options, &layouts, &inputs, &finish, &monitor);
        assert_eq!(call.is_ok(), right, "{dims:?}");

        let sums = slice(&mut out, dims);
        let state = StateMut::over(&mut lse[..rows], &mut totals[..rows], sums).unwrap();
        let extend = Target::Extend(state);
        let call = Call::forward(&options, &layouts, &inputs, &extend, &monitor);
        assert_eq!(call.is_ok(), right, "{dims:?}");
    }
    let [mut out, mut lse] = [(); 2].map(|()| vec![0.0; MEMORY]);
    let output = OutputMut { out: slice(&mut out, DIMS), lse: &mut lse[..15], lse_lo: None };
    assert!(output.rows().is_err());
}

#[test]
fn a_backward_pass_refuses_statistics_and_gradients_of_other_dims() {
    let (options, layouts, data) = (Options::default(), layouts(), vec![0.5; MEMORY]);
    let fewer = Dims { tokens: 7, ..DIMS };
    let cases = [
        (DIMS, 16, 16, DIMS, true),
        (fewer, 16, 16, DIMS, false),
        (DIMS, 15, 16, DIMS, false),
        (DIMS, 16, 15, DIMS, false),
        (DIMS, 16, 16, fewer, false),
    ];
    for (dout, lse, delta, gradient, right) in cases {
        let [mut dq, mut dk, mut dv] = [(); 3].map(|()| vec![0.0; MEMORY]);
        let gradients =
            GradientsMut::new(slice(&mut dq, gradient), slice(&mut dk, DIMS), slice(&mut dv, DIMS));
        let rows = RowStatistics { lse: &data[..lse], lse_lo: None, delta: &data[..delta] };
        let dout = View::new(&data[..dout.elements().unwrap()], dout, ORDER).unwrap();
        let (inputs, monitor) = (inputs(&data), monitor());
        let call =
            Call::backward(&options, &layouts, &inputs, (&dout, &rows), &gradients, &monitor);
        assert_eq!(call.is_ok(), right, "{:?}, {lse}, {delta}, {gradient:?}", dout.dims());
    }
}

#[test]
fn only_f32_outputs_hold_their_own_sums() {
    let (options, mut memory) = (Options::default(), vec![bf16::ONE; MEMORY]);
    let mut out = ViewMut::new(&mut memory[..64], DIMS, ORDER).unwrap();
    let [mut lse, mut totals] = [(); 2].map(|()| vec![1.0; 16]);
    assert!(
        crate::rowwise::finish(&options, None, &mut out, &mut lse, &mut totals, &monitor())
            .is_err()
    );
    assert!(memory[64..].iter().all(|&x| x == bf16::ONE));
}
