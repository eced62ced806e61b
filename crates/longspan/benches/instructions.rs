//! A fixed set of calls whose instructions are counted, for `.ci/instructions`.
//!
//! ```text
//! instructions         the names of all calls, a line each
//! instructions NAME    the call, twice: the second time in `counted`
//! ```
//!
//! Under `callgrind --toggle-collect=counted` only what happens in [`counted`] is counted: tensors
//! and layouts are made before it, and the first call has made all scratch. One thread does the
//! work, on AVX2, which is the most that valgrind shows. Sizes are small, since valgrind is fifty
//! times slower than the CPU, and no multiple of a block, so that edges count too.

// This is a program that prints.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;

use longspan::{
    Attention, Dims, GradientsMut, Hook, Inputs, Isa, Layout, Order, OutputGradient, OutputMut,
    OutputRef, Pattern, Shape, Tensor, Threads,
};

/// A call: which tensors, which pairs.
struct Call {
    name: &'static str,
    pattern: &'static str,
    queries: usize,
    keys: usize,
    heads: usize,
    key_heads: usize,
    dim: usize,
    pass: Pass,
}

#[derive(Clone, Copy)]
enum Pass {
    Forward,
    Backward,
}

const DENSE: &str = "full";
const LOCAL: &str = "causal & (window(100, 0) | sinks(4))";

const fn square(name: &'static str, pattern: &'static str, dim: usize, pass: Pass) -> Call {
    Call { name, pattern, queries: 300, keys: 300, heads: 1, key_heads: 1, dim, pass }
}

/// Four query heads on each of two key heads, and one query of each.
const fn decode(name: &'static str, dim: usize) -> Call {
    let (queries, keys, heads, key_heads) = (1, 1_500, 8, 2);
    Call { name, pattern: "causal", queries, keys, heads, key_heads, dim, pass: Pass::Forward }
}

const CALLS: [Call; 10] = [
    square("dense-64-forward", DENSE, 64, Pass::Forward),
    square("dense-64-backward", DENSE, 64, Pass::Backward),
    square("dense-33-forward", DENSE, 33, Pass::Forward),
    square("dense-33-backward", DENSE, 33, Pass::Backward),
    square("local-64-forward", LOCAL, 64, Pass::Forward),
    square("local-64-backward", LOCAL, 64, Pass::Backward),
    square("local-33-forward", LOCAL, 33, Pass::Forward),
    square("local-33-backward", LOCAL, 33, Pass::Backward),
    decode("decode-64-forward", 64),
    decode("decode-33-forward", 33),
];

/// What is counted. Its name is what callgrind is told, so it keeps it, and is not inlined.
#[unsafe(no_mangle)]
#[inline(never)]
fn counted(work: &mut dyn FnMut()) {
    work();
}

/// Numbers of about unit size, always the same.
fn tensor(dims: Dims, phase: f32) -> Tensor<f32> {
    let numbers = 0..dims.elements().expect("a small tensor");
    let numbers = numbers.map(|n| 1.5 * (n as f32 * 0.37 + phase).sin()).collect();
    Tensor::new(numbers, dims, Order::Bshd).expect("as many as the dims say")
}

fn run(call: &Call) -> longspan::Result<()> {
    let Call { queries, keys, heads, key_heads, dim, .. } = *call;
    let pattern: Pattern = call.pattern.parse()?;
    let layout = Layout::compile(&pattern, &Shape::new(queries, keys))?;
    let attention = Attention::new(layout).isa(Isa::Avx2).threads(Threads::Count(1));
    let dims_q = Dims { batch: 1, tokens: queries, heads, dim };
    let dims_k = Dims { tokens: keys, heads: key_heads, ..dims_q };
    let (q, k, v) = (tensor(dims_q, 0.0), tensor(dims_k, 1.0), tensor(dims_k, 2.0));
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    let dout = tensor(dims_q, 3.0);
    let zeros = |dims| Tensor::zeros(dims, Order::Bshd);
    let (mut out, mut lse) = (zeros(dims_q)?, vec![0.0; heads * queries]);
    let mut lse_lo = lse.clone();
    let (mut dq, mut dk, mut dv) = (zeros(dims_q)?, zeros(dims_k)?, zeros(dims_k)?);

    let mut forward = || {
        let lse_lo = Some(&mut lse_lo[..]);
        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo };
        attention.forward_into(inputs, output, Hook::none()).expect("a call that fits");
    };
    forward();
    if let Pass::Forward = call.pass {
        counted(&mut forward);
        return Ok(());
    }
    let mut backward = || {
        let (lse, lse_lo) = (&lse[..], Some(&lse_lo[..]));
        let (saved, gradient) = (
            OutputRef { out: out.view(), lse, lse_lo },
            OutputGradient { dout: dout.view(), dlse: None },
        );
        let gradients = GradientsMut::new(dq.view_mut(), dk.view_mut(), dv.view_mut());
        attention
            .backward_into(inputs, saved, gradient, gradients, Hook::none())
            .expect("a call that fits");
    };
    backward();
    counted(&mut backward);
    Ok(())
}

fn main() -> ExitCode {
    // `cargo bench` adds an argument of its own.
    let Some(name) = std::env::args().skip(1).find(|argument| argument != "--bench") else {
        for call in &CALLS {
            println!("{}", call.name);
        }
        return ExitCode::SUCCESS;
    };
    let Some(call) = CALLS.iter().find(|call| call.name == name) else {
        eprintln!("no call is named {name}; without a name, all are listed");
        return ExitCode::FAILURE;
    };
    match run(call) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}
