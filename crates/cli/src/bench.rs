//! `longspan bench`: the speed of attention over a pattern, and its share of the machine's peak.
//!
//! ```text
//! check on one token → compile → make tensors → ┌ peaks ┐ → check for NaN → report
//!                                               └─ call ┘ × repeat, per pass
//! ```
//!
//! Peaks (FMA; of the matrix unit where it is used; read bandwidth for decoding) are measured between
//! the calls, so that both see the machine in the same state.

mod measure;
mod problem;
mod report;

use std::io::{Write, stdout};
use std::time::Instant;

use anyhow::Result;
use longspan::{
    Attention, Element, ElementType, GradientsMut, Hook, OutputGradient, OutputMut, OutputRef,
};
use longspan_pattern::Shape;

use crate::args::{Bench, Pass};
use crate::compile::{self, BadInput};
use crate::element::with_element;
use crate::machine::Growth;
use crate::number::bytes;
use crate::progress::Stage;
use crate::{choice, machine, random};
use measure::{Peaks, Repeat, Samples};
use problem::{Problem, Sizes, Tensors};

/// The measurements of one pass.
struct PassResult {
    pass: &'static str,
    samples: Samples,
    /// FLOPs on active pairs.
    flops: u128,
    /// Compile time; with the transpose for the backward pass.
    layout_ms: f64,
    /// Peak growth of the process until the end of the pass.
    peak_bytes: Option<u64>,
    /// Tensors that the pass reads and writes.
    tensor_bytes: u64,
}

/// `longspan bench`
pub(crate) fn run(args: &Bench) -> Result<()> {
    with_element!(args.tensors.dtype, E => run_on::<E>(args))
}

/// The same for one element type.
fn run_on<E: Element>(args: &Bench) -> Result<()> {
    let growth = Growth::since_now();
    let isa = choice::isa(args.isa)?.value;
    let threads = choice::threads(args.threads)?.value;
    let patterns = compile::patterns(&args.input.pattern)?;
    let sizes = Sizes::of::<E>(args, &patterns)?;
    check_memory(&sizes, args.pass)?;

    let shape = args.block.of(Shape::new(sizes.queries, sizes.keys))?;
    let compiled = compile::by_head(&patterns, sizes.heads, &shape).map_err(with_options)?;
    let mut layout_ms = compiled.ms();
    let stage = Stage::new("counting pairs");
    let problem = Problem::new(sizes, args.order.into(), &compiled)?;
    drop(stage);
    let attention = Attention::new(problem.layouts.clone());
    let attention = attention.isa(isa).threads(threads.get()).precision(args.precision);
    let isa = match attention.compute_types::<E>()?.multiplied {
        ElementType::Bf16 => isa,
        _ => choice::vector_isa(isa),
    };

    let stage = Stage::new(format!("making tensors, {}", bytes(sizes.forward_bytes() as usize)));
    let tensors = Tensors::<E>::new(&problem, threads)?;
    let inputs = tensors.inputs();
    let mut out = problem.tensor(random::poison::<E>(sizes.out(), threads), sizes.dims_out())?;
    let mut lse = random::poison::<f32>(sizes.rows(), threads);
    let mut lse_lo = random::poison::<f32>(sizes.rows(), threads);
    drop(stage);

    let repeat = args.repeat.map_or(Repeat::Auto, Repeat::Exactly);
    let peaks = Peaks::<E> { isa, threads: choice::at_once(threads), reads: None };
    let mut forward = |hook: Hook<'_>| {
        let lse_lo = Some(&mut lse_lo[..]);
        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo };
        attention.forward_into(inputs, output, hook)
    };
    let mut results = Vec::new();
    if args.pass == Pass::Backward {
        // It reads the results of a forward pass.
        measure::once("forward", &mut forward)?;
    } else {
        let peaks = Peaks { reads: problem.reads(&tensors), ..peaks };
        let samples = measure::several("forward", repeat, &peaks, &mut forward)?;
        results.push(PassResult {
            pass: "forward",
            samples,
            flops: problem.forward_flops,
            layout_ms,
            peak_bytes: growth.as_ref().and_then(Growth::peak),
            tensor_bytes: sizes.forward_bytes(),
        });
    }
    check_written("out", out.as_slice())?;
    check_written("lse", &lse)?;
    check_written("lse_lo", &lse_lo)?;

    if args.pass != Pass::Forward {
        let stage = Stage::new("transposing");
        let start = Instant::now();
        for distinct in &compiled.distinct {
            distinct.layout.transpose()?;
        }
        layout_ms += start.elapsed().as_secs_f64() * 1e3;
        drop(stage);
        let stage = Stage::new("making tensors");
        let dout =
            problem.tensor(random::normals::<E>(3, sizes.out(), threads), sizes.dims_out())?;
        let poisoned = |len, dims| problem.tensor(random::poison::<E>(len, threads), dims);
        let mut dq = poisoned(sizes.q(), sizes.dims_q())?;
        let mut dk = poisoned(sizes.k(), sizes.dims_k())?;
        let mut dv = poisoned(sizes.v(), sizes.dims_v())?;
        drop(stage);
        let (lse, lse_lo) = (&lse[..], Some(&lse_lo[..]));
        let (saved, gradient) = (
            OutputRef { out: out.view(), lse, lse_lo },
            OutputGradient { dout: dout.view(), dlse: None },
        );
        let samples = measure::several("backward", repeat, &peaks, |hook| {
            let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
            attention.backward_into(inputs, saved, gradient, GradientsMut::new(dq, dk, dv), hook)
        })?;
        results.push(PassResult {
            pass: "backward",
            samples,
            flops: problem.backward_flops,
            layout_ms,
            peak_bytes: growth.as_ref().and_then(Growth::peak),
            tensor_bytes: sizes.backward_bytes(),
        });
        for (name, tensor) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
            check_written(name, tensor.as_slice())?;
        }
    }

    let about = report::About {
        pattern: &patterns,
        tokens: args.input.tokens,
        block: problem.layouts.get(0, 0).block().get(),
        isa,
        precision: args.precision,
        threads,
        problem: &problem,
    };
    let mut out = stdout().lock();
    match args.json {
        true => report::json(&about, &results, &mut out)?,
        false => report::table(&about, &results, &mut out)?,
    }
    out.flush()?;
    Ok(())
}

/// Checks that the tensors fit into free memory.
fn check_memory(sizes: &Sizes, pass: Pass) -> Result<()> {
    let need = match pass {
        Pass::Forward => sizes.forward_bytes(),
        Pass::Backward | Pass::Both => sizes.backward_bytes() + sizes.sum_bytes(),
    };
    let Some(free) = machine::free_memory().filter(|&free| free < need) else { return Ok(()) };
    let (need, free) = (bytes(need as usize), bytes(free as usize));
    let advice = match pass {
        Pass::Forward => "use fewer --tokens, --heads or --batch",
        _ => "use fewer --tokens, --heads or --batch, or --pass forward",
    };
    Err(BadInput(format!("the tensors take {need}, and {free} of memory are free: {advice}"))
        .into())
}

/// Checks that no element is NaN, which all were before the calls.
fn check_written<E: Element>(name: &str, elements: &[E]) -> Result<()> {
    match elements.iter().position(|x| x.to_f32().is_nan()) {
        Some(index) => anyhow::bail!("{name} has a NaN at element {index}: please report this"),
        None => Ok(()),
    }
}

/// Replaces the library's remedies, which name its functions, by options.
fn with_options(error: longspan_pattern::Error) -> anyhow::Error {
    match error {
        longspan_pattern::Error::TooLarge { limit, row, rows } => {
            let limit = bytes(limit as usize);
            let message = format!("the layout exceeds {limit} at row {row} of {rows}");
            BadInput(format!("{message}: use a larger --block")).into()
        }
        error => error.into(),
    }
}
