//! The hook: on the caller's thread, between tiles, with progress; and it can stop a call.

use std::ops::ControlFlow;
use std::thread::ThreadId;

use half::bf16;
use longspan::{
    Attention, Dims, Error, Gradients, GradientsMut, Hook, Inputs, Isa, Layout, Order,
    OutputGradient, OutputMut, OutputRef, Pattern, Progress, RowStatistics, Shape, State, Tensor,
    Threads,
};
use longspan_testing::{AttentionCase, Rule};

use crate::common::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Extend,
    Backward,
    Accumulate,
}

const PASSES: [Pass; 4] = [Pass::Forward, Pass::Extend, Pass::Backward, Pass::Accumulate];
const PLACEMENT: Placement = Placement::Contiguous(Order::Bshd);

fn case() -> AttentionCase {
    let rule = Rule::And(vec![Rule::Causal, Rule::Window { left: 300, right: 0 }]);
    AttentionCase { heads_q: 4, ..AttentionCase::new("hook", rule, 2000) }
}

fn run(
    tensors: &Tensors,
    pass: Pass,
    threads: usize,
    between: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(), Error> {
    let attention = attention(&case(), Isa::best(), threads);
    let sizes = &tensors.sizes;
    let (inputs, hook) = (tensors.inputs(), Hook::new(between));
    let mut lse = vec![0.0; sizes.rows()];
    let delta = vec![0.0; sizes.rows()];
    let mut out = Buffer::poisoned(dims_out(sizes), PLACEMENT);
    let mut dq = Buffer::poisoned(dims_q(sizes), PLACEMENT);
    let mut dk = Buffer::poisoned(dims_k(sizes), PLACEMENT);
    let mut dv = Buffer::poisoned(dims_v(sizes), PLACEMENT);
    let gradients = GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
    let dout = tensors.dout.view();
    match pass {
        Pass::Forward => {
            let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: None };
            attention.forward_into(inputs, output, hook)
        }
        Pass::Extend => attention.extend(inputs, &mut State::empty(dims_out(sizes)).unwrap(), hook),
        Pass::Backward => {
            let (saved, gradient) = (
                OutputRef { out: dout, lse: &lse, lse_lo: None },
                OutputGradient { dout, dlse: None },
            );
            attention.backward_into(inputs, saved, gradient, gradients, hook)
        }
        Pass::Accumulate => {
            let rows = RowStatistics { lse: &lse, lse_lo: None, delta: &delta };
            attention.accumulate(inputs, dout, rows, gradients, hook)
        }
    }
}

#[test]
fn called_on_the_callers_thread_until_all_is_done() {
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    for pass in PASSES {
        // With several threads the last unit may be done by another: try often.
        for threads in [1, 2, 3, 8, 8, 8, 2, 2, 2] {
            let mut calls: Vec<(ThreadId, Progress)> = Vec::new();
            let mut record = |progress| {
                calls.push((std::thread::current().id(), progress));
                ControlFlow::Continue(())
            };
            run(&tensors, pass, threads, &mut record).unwrap();
            let what = format!("{pass:?}, {threads} threads");
            let here = std::thread::current().id();
            assert!(calls.iter().all(|call| call.0 == here), "{what}");
            // While a call prepares its units, it has done none of none.
            let progress: Vec<Progress> = calls.iter().map(|call| call.1).collect();
            let prepared = progress.partition_point(|p| *p == Progress { done: 0, total: 0 });
            let progress = &progress[prepared..];
            let last = progress.last().unwrap_or_else(|| panic!("never called: {what}"));
            assert!(last.total > 0 && progress.iter().all(|p| p.total == last.total), "{what}");
            assert!(progress.is_sorted_by_key(|p| p.done), "{what}: {progress:?}");
            assert!(progress.iter().all(|p| p.done <= p.total), "{what}");
            assert_eq!(last.done, last.total, "{what}");
            // Between tiles, not once at the end.
            if threads == 1 {
                assert!(progress.len() >= 10, "{what}: {} calls", progress.len());
            }
        }
    }
}

#[test]
fn a_break_stops_the_call() {
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    for pass in PASSES {
        for threads in [1, 2, 8] {
            for after in [1, 5] {
                let mut calls = 0;
                let mut broke_at = None;
                let mut stop = |progress: Progress| {
                    calls += 1;
                    if calls < after {
                        return ControlFlow::Continue(());
                    }
                    broke_at.get_or_insert(progress);
                    ControlFlow::Break(())
                };
                let result = run(&tensors, pass, threads, &mut stop);
                let what = format!("{pass:?}, {threads} threads, after {after}: {result:?}");
                if threads == 1 {
                    assert_eq!(calls, after, "called on after it said stop: {what}");
                }
                match (broke_at, result) {
                    (
                        Some(Progress { total: 0, .. }),
                        Err(Error::Stopped { done: 0, total: 0 }),
                    ) => {}
                    (Some(at), Err(Error::Stopped { done, total })) => {
                        assert!(at.done <= done && done < total && at.total == total, "{what}");
                        let text = Error::Stopped { done, total }.to_string();
                        assert!(text.contains(&format!("{done} of {total}")), "{text}");
                    }
                    // Others may have done all there was before the caller had its say, or have
                    // been at the last units when it said so.
                    (None, Ok(())) if threads > 1 => {}
                    (Some(at), Ok(())) if at.done + 2 * threads >= at.total => {}
                    _ => panic!("{what}, broke at {broke_at:?}"),
                }
            }
        }
    }
}

/// A call that was stopped leaves nothing behind that the next would feel.
#[test]
fn the_call_after_stopped_one_is_right() {
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    let attention = attention(&case(), Isa::best(), 2);
    let run = Run { attention: &attention, tensors: &tensors, results: PLACEMENT };
    let first = run.both();
    let mut stop = |_| ControlFlow::Break(());
    let mut out = Buffer::poisoned(dims_out(&tensors.sizes), PLACEMENT);
    let mut lse = vec![0.0; tensors.sizes.rows()];
    let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: None };
    let stopped = attention.forward_into(tensors.inputs(), output, Hook::new(&mut stop));
    assert!(matches!(stopped, Err(Error::Stopped { .. })));
    assert_eq!(first, run.both());
}

/// A panic in the hook is the caller's; the pool and the scratch survive it.
#[test]
fn a_panic_in_the_hook_is_passed_on() {
    let tensors = Tensors::of(&case().unmasked(), PLACEMENT);
    let attention = attention(&case(), Isa::best(), 2);
    let run = Run { attention: &attention, tensors: &tensors, results: PLACEMENT };
    let first = run.both();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut panic = |_| panic!("on purpose");
        let mut state = State::empty(dims_out(&tensors.sizes)).unwrap();
        attention.extend(tensors.inputs(), &mut state, Hook::new(&mut panic))
    }));
    assert!(panicked.is_err());
    assert_eq!(first, run.both());
}

/// A hook may compute attention itself, on a matrix unit too: the pass that it interrupts goes on as
/// if it hadn't.
#[test]
fn a_hook_may_call_attention() {
    let dims = Dims { batch: 1, tokens: 600, heads: 1, dim: 32 };
    let numbers = (0..600 * 32).map(|i| bf16::from_f32((i as f32).sin())).collect();
    let x = Tensor::new(numbers, dims, Order::Bshd).unwrap();
    let layout = Layout::compile(&Pattern::causal(), &Shape::new(600, 600)).unwrap();
    // One thread, so that both passes are on that of the hook.
    let attention = Attention::new(layout).threads(Threads::Count(1));
    let output = attention.forward(Inputs::new(x.view(), x.view(), x.view())).unwrap();
    let gradients = |hook: Hook<'_>| {
        let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
        let mut gradients = Gradients::zeros(&inputs).unwrap();
        let (saved, gradient) = (&output, x.view());
        attention.backward_into(inputs, saved, gradient, gradients.as_mut(), hook).unwrap();
        [gradients.dq, gradients.dk, gradients.dv].map(|tensor| tensor.as_slice().to_vec())
    };
    let mut calls = 0;
    let mut again = |_| {
        calls += 1;
        let inner = attention.forward(Inputs::new(x.view(), x.view(), x.view())).unwrap();
        assert_eq!(inner.lse, output.lse);
        ControlFlow::Continue(())
    };
    let interrupted = gradients(Hook::new(&mut again));
    assert!(calls > 3, "{calls}");
    assert_eq!(interrupted, gradients(Hook::none()));
}
