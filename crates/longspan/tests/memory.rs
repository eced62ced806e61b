//! A second call of the same shape allocates nothing when the caller brings the results.
//!
//! One test, in a binary of its own: the allocator counts what the whole process does.

use std::alloc::{GlobalAlloc, Layout as Size, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use longspan::{
    Dims, Element, GradientsMut, Hook, Inputs, Isa, Order, OutputGradient, OutputMut, OutputRef,
    RowStatistics, State, Tensor,
};
use longspan_testing::{AttentionCase, Rule, Transform};

mod common;

use common::*;

struct Overlap;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Overlap {
    unsafe fn alloc(&self, size: Size) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(size.size(), Ordering::Relaxed);
        // SAFETY: `System` demands what `GlobalAlloc` does.
        unsafe { System.alloc(size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, size: Size) {
        // SAFETY: `System` demands what `GlobalAlloc` does.
        unsafe { System.dealloc(pointer, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Overlap = Overlap;

/// Allocations while `f` runs, and their bytes.
fn allocations(f: impl FnOnce()) -> (usize, usize) {
    let before = (CALLS.load(Ordering::SeqCst), BYTES.load(Ordering::SeqCst));
    f();
    let after = (CALLS.load(Ordering::SeqCst), BYTES.load(Ordering::SeqCst));
    (after.0 - before.0, after.1 - before.1)
}

/// Waits until a call's helper has started: a new thread allocates its own name.
fn wait_for_helper() {
    let helper = |task: std::io::Result<std::fs::DirEntry>| {
        let name = std::fs::read_to_string(task.ok()?.path().join("comm")).ok()?;
        name.starts_with("longspan-").then_some(())
    };
    for _ in 0..1000 {
        if std::fs::read_dir("/proc/self/task").unwrap().find_map(helper).is_some() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("a call on two threads started none");
}

#[test]
fn the_second_call_allocates_nothing() {
    // The counter counts: the first allocation and the regrown one.
    let (calls, bytes) = allocations(|| {
        let mut numbers = vec![1.0_f32; 100];
        numbers.resize(1000, 2.0);
        std::hint::black_box(&numbers);
    });
    assert!(calls >= 2 && bytes >= 4400, "{calls} allocations of {bytes} bytes");

    let case = |name: &str, rule, tokens| AttentionCase {
        heads_q: 4,
        heads_kv: 2,
        ..AttentionCase::new(name, rule, tokens)
    };
    let mut decode = case("decode", Rule::Causal, 5000);
    decode.layout.tokens_q = 1;
    // Masks that a layout doesn't store are made by a reader with memory of its own, a few hundred
    // bytes per unit of work: not a case for here.
    let cases = [
        case("causal", Rule::Causal, 500),
        case("window", Rule::SlidingWindow { width: 70 }, 1000),
        case("global tokens", Rule::GlobalTokens { n: 2 }, 1500),
        case("components", Rule::Strided { stride: 16 }, 3000),
        decode,
        AttentionCase {
            batch: 2,
            per_head: vec![Rule::Causal, Rule::Full, Rule::Strided { stride: 4 }, Rule::Causal],
            padding: vec![0..200, 20..190],
            ..case("set", Rule::Full, 200)
        },
        AttentionCase {
            transform: Transform::alibi(vec![0.1; 4]),
            ..case("alibi", Rule::Causal, 300)
        },
    ];
    let mut wrong = Vec::new();
    check::<f32>(&cases, &mut wrong);
    check::<bf16>(&cases, &mut wrong);
    check::<f16>(&cases, &mut wrong);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// All passes over each case, with tensors of `E`.
fn check<E: Number>(cases: &[AttentionCase], wrong: &mut Vec<String>) {
    for case in cases {
        let tensors = TensorsOf::<E>::of(&case.unmasked(), Placement::Contiguous(Order::Bshd));
        let sizes = tensors.sizes;
        fn make<T: Element>(dims: Dims) -> Tensor<T> {
            Tensor::filled(T::default(), dims, Order::Bshd).unwrap()
        }
        let (mut out, mut lse) = (make::<E>(dims_out(&sizes)), vec![0.0; sizes.rows()]);
        let (mut lse_lo, delta) = (lse.clone(), lse.clone());
        let (mut dq, mut dk) = (make::<E>(dims_q(&sizes)), make::<E>(dims_k(&sizes)));
        let mut dv = make::<E>(dims_v(&sizes));
        // What is added to is f32, whatever the inputs are.
        let mut sums = [make::<f32>(dims_q(&sizes)), make(dims_k(&sizes)), make(dims_v(&sizes))];
        let mut state = State::empty(dims_out(&sizes)).unwrap();
        let Inputs { q, k, v } = tensors.inputs();
        let (inputs, dout) = (Inputs { q, k, v }, tensors.dout.view());
        // Scratch depends on the width of vectors: one case for every instruction set.
        let all = if case.name == "alibi" { Isa::available() } else { vec![Isa::best()] };
        for isa in all {
            for threads in [1, 2] {
                let attention = attention(case, isa, threads);
                let mut forward = || {
                    let lse_lo = Some(&mut lse_lo[..]);
                    let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo };
                    attention.forward_into(inputs, output, Hook::none()).unwrap();
                };
                forward();
                if threads > 1 {
                    wait_for_helper();
                }
                let of_forward = allocations(&mut forward);
                let mut extend = || attention.extend(inputs, &mut state, Hook::none()).unwrap();
                extend();
                let of_extend = allocations(&mut extend);
                let mut backward = || {
                    let (lse, lse_lo) = (&lse[..], Some(&lse_lo[..]));
                    let (saved, gradient) = (
                        OutputRef { out: out.view(), lse, lse_lo },
                        OutputGradient { dout, dlse: None },
                    );
                    let gradients = GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
                    attention
                        .backward_into(inputs, saved, gradient, gradients, Hook::none())
                        .unwrap();
                };
                backward();
                let of_backward = allocations(&mut backward);
                let mut accumulate = || {
                    let (lse, lse_lo) = (&lse[..], Some(&lse_lo[..]));
                    let rows = RowStatistics { lse, lse_lo, delta: &delta };
                    let [dq, dk, dv] = &mut sums;
                    let gradients = GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
                    attention.accumulate(inputs, dout, rows, gradients, Hook::none()).unwrap();
                };
                accumulate();
                let of_accumulate = allocations(&mut accumulate);
                // Passes in turn don't take each other's scratch away.
                let in_turn = allocations(|| {
                    for _ in 0..3 {
                        let rest = Some(&mut lse_lo[..]);
                        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: rest };
                        attention.forward_into(inputs, output, Hook::none()).unwrap();
                        let (lse, lse_lo) = (&lse[..], Some(&lse_lo[..]));
                        let rows = RowStatistics { lse, lse_lo, delta: &delta };
                        let [dq, dk, dv] = &mut sums;
                        let gradients =
                            GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
                        attention.accumulate(inputs, dout, rows, gradients, Hook::none()).unwrap();
                    }
                });
                for (pass, (calls, bytes)) in [
                    ("forward_into", of_forward),
                    ("extend", of_extend),
                    ("backward_into", of_backward),
                    ("accumulate", of_accumulate),
                    ("in turn", in_turn),
                ] {
                    if calls > 0 {
                        wrong.push(format!(
                            "{pass}: {calls} allocations of {bytes} bytes, {isa}, {}, {threads} threads, {case}",
                            E::TYPE
                        ));
                    }
                }
            }
        }
    }
}
