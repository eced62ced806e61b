//! `longspan bench`: how fast attention over a pattern is here, and how fast it could be.
//!
//! ```text
//! check on one token → compile → make tensors → ┌ ceilings ┐ → poison gone? → report
//!                                               └── call ──┘ × repeat, a pass
//! ```
//!
//! Ceilings (the FMA peak; with a matrix unit its peak, for decoding the read bandwidth too) are measured between the calls,
//! because a share of them means something only if both saw the same machine in the same minutes.

mod measure;
mod problem;
mod report;

use std::io::{Write, stdout};
use std::time::Instant;

use anyhow::Result;
use longspan::{Arrived, Attention, Element, GradientsMut, Hook, OutputMut, Threads};
use longspan_pattern::{BlockSize, Shape};

use crate::args::{Bench, Pass};
use crate::compile::{self, BadInput};
use crate::element::with_element;
use crate::machine::Growth;
use crate::number::bytes;
use crate::progress::Stage;
use crate::{choice, machine, random};
use measure::{Ceilings, Repeat, Samples};
use problem::{Problem, Sizes, Tensors};

/// What was found out about one pass.
struct Finding {
    pass: &'static str,
    samples: Samples,
    /// Operations on active pairs.
    flops: u128,
    /// Compilation, with the transpose for the backward pass.
    layout_ms: f64,
    /// By how much the process grew until the pass was over.
    peak_bytes: Option<u64>,
    /// Tensors that the pass reads and writes.
    tensor_bytes: u64,
}

/// `longspan bench`
pub(crate) fn run(args: &Bench) -> Result<()> {
    with_element!(args.dtype, E => run_on::<E>(args))
}

/// The same with tensors of one type.
fn run_on<E: Element>(args: &Bench) -> Result<()> {
    let growth = Growth::since_now();
    let isa = choice::isa(args.isa)?.value;
    let threads = choice::threads(args.threads)?.value;
    let patterns = compile::patterns(&args.pattern)?;
    let sizes = Sizes::of::<E>(args, &patterns)?;
    check_memory(&sizes, args.pass)?;

    let shape = Shape::new(sizes.queries as u64, sizes.keys as u64);
    let shape = shape.block(BlockSize::new(args.block)?);
    let compiled = compile::by_head(&patterns, sizes.heads, &shape).map_err(in_our_words)?;
    let mut layout_ms = compiled.ms();
    let stage = Stage::new("counting pairs");
    let problem = Problem::new(sizes, args.order.into(), &compiled)?;
    drop(stage);
    let attention = Attention::new(problem.layouts.clone());
    let attention = attention.isa(isa).threads(Threads::Count(threads));

    let stage = Stage::new(format!("making tensors, {}", bytes(sizes.forward_bytes() as usize)));
    let tensors = Tensors::<E>::new(&problem, threads)?;
    let inputs = tensors.inputs();
    let mut out = problem.tensor(random::poison::<E>(sizes.out(), threads), sizes.dims_out())?;
    let mut lse = random::poison::<f32>(sizes.rows(), threads);
    let mut lse_rest = random::poison::<f32>(sizes.rows(), threads);
    drop(stage);

    let repeat = args.repeat.map_or(Repeat::Auto, Repeat::Exactly);
    let ceilings = Ceilings::<E> { isa, threads: choice::at_once(threads), reads: None };
    let mut forward = |hook: Hook<'_>| {
        let lse_rest = Some(&mut lse_rest[..]);
        let output = OutputMut { out: out.view_mut(), lse: &mut lse, lse_rest };
        attention.forward_into(inputs, output, hook)
    };
    let mut findings = Vec::new();
    if args.pass == Pass::Backward {
        // It starts from what a forward pass found.
        measure::once("forward", &mut forward)?;
    } else {
        let ceilings = Ceilings { reads: problem.reads(&tensors), ..ceilings };
        let samples = measure::several("forward", repeat, &ceilings, &mut forward)?;
        findings.push(Finding {
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
    check_written("lse_rest", &lse_rest)?;

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
        let (lse, lse_rest) = (&lse[..], Some(&lse_rest[..]));
        let arrived = Arrived { out: out.view(), lse, lse_rest, dout: dout.view(), dlse: None };
        let samples = measure::several("backward", repeat, &ceilings, |hook| {
            let (dq, dk, dv) = (dq.view_mut(), dk.view_mut(), dv.view_mut());
            attention.backward_into(inputs, arrived, GradientsMut { dq, dk, dv }, hook)
        })?;
        findings.push(Finding {
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
        tokens: args.tokens,
        block: args.block,
        isa,
        threads,
        problem: &problem,
    };
    let mut out = stdout().lock();
    match args.json {
        true => report::json(&about, &findings, &mut out)?,
        false => report::table(&about, &findings, &mut out)?,
    }
    out.flush()?;
    Ok(())
}

/// Whether the tensors fit, before an hour is spent on finding out.
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

/// Every number was NaN before it was computed.
fn check_written<E: Element>(name: &str, numbers: &[E]) -> Result<()> {
    match numbers.iter().position(|x| x.to_f32().is_nan()) {
        Some(place) => anyhow::bail!("{name} has a NaN at element {place}: please report this"),
        None => Ok(()),
    }
}

/// The library's advice names its own functions; here it has to name options.
fn in_our_words(error: longspan_pattern::Error) -> anyhow::Error {
    match error {
        longspan_pattern::Error::TooLarge { limit, row, rows } => {
            let limit = bytes(limit as usize);
            let message = format!("the layout outgrew {limit} at row {row} of {rows}");
            BadInput(format!("{message}: use a larger --block")).into()
        }
        error => error.into(),
    }
}
