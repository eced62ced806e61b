//! From the gradient of an output to those of the inputs: what is the same for every order of
//! summation.
//!
//! A backward pass adds to f32 numbers. Gradients of other types are summed up in f32 first, and
//! rounded once.

use crate::arguments::{Gradients, GradientsMut, Inputs, OutputGradient, OutputRef};
use crate::check;
use crate::dims::{Dims, Order};
use crate::dtype::{Element, ElementType};
use crate::error::{Error, Result};
use crate::exec::Monitor;
use crate::options::Options;
use crate::rowwise;
use crate::softmax::RowStatistics;
use crate::tensor::{ViewMut, allocatable, allocate};

/// Zeros, with those of all options that have gradients.
pub(crate) fn zeros<E: Element>(options: &Options, inputs: &Inputs<'_, E>) -> Result<Gradients<E>> {
    let zeros = |len: Option<usize>| len.map(allocate::zeros).transpose();
    let [sink_logits, bias_table, alibi_slopes] = options.gradient_lens();
    Ok(Gradients {
        dsink_logits: zeros(sink_logits)?,
        dbias_table: zeros(bias_table)?,
        dalibi_slopes: zeros(alibi_slopes)?,
        ..Gradients::zeros(inputs)?
    })
}

/// Makes gradients zero that are added to; others are written anyway.
pub(crate) fn clear<E: Element>(
    options: &Options,
    gradients: &mut GradientsMut<'_, E>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    if E::TYPE == ElementType::F32 {
        let workers = options.workers()?;
        for gradient in [&mut gradients.dq, &mut gradients.dk, &mut gradients.dv] {
            rowwise::clear(gradient, workers, monitor)?;
        }
    }
    for list in [&mut gradients.dbias_table, &mut gradients.dalibi_slopes] {
        list.as_deref_mut().unwrap_or_default().fill(0.0);
    }
    Ok(())
}

/// Finds the statistics of rows, and has `accumulate` add to f32 gradients: those of the caller,
/// which are zero, or sums that are rounded to them. `dims` are those of the output.
pub(crate) fn differentiate<E: Element>(
    options: &Options,
    dims: Dims,
    (output, gradient): (OutputRef<'_, E>, OutputGradient<'_, E>),
    gradients: GradientsMut<'_, E>,
    monitor: &Monitor<'_>,
    accumulate: impl FnOnce(RowStatistics<'_>, GradientsMut<'_>) -> Result<()>,
) -> Result<()> {
    check::backward(&output, &gradient, dims)?;
    let mut delta = options.workspaces.rows(dims.rows())?;
    rowwise::deltas(output, gradient, &mut delta, options.workers()?, monitor)?;
    let OutputRef { lse, lse_lo, .. } = output;
    let rows = RowStatistics { lse, lse_lo, delta: &delta };
    let GradientsMut { dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes } = gradients;
    if let Some(into) = dsink_logits {
        sink_gradients(options, dims, rows, into, monitor)?;
    }
    let result = match (dq.into_f32(), dk.into_f32(), dv.into_f32()) {
        (Ok(dq), Ok(dk), Ok(dv)) => {
            let into = GradientsMut { dbias_table, dalibi_slopes, ..GradientsMut::new(dq, dk, dv) };
            accumulate(rows, into)
        }
        (Err(dq), Err(dk), Err(dv)) => {
            let into = GradientsMut::new(dq, dk, dv);
            round(options, into, monitor, |into| {
                accumulate(rows, GradientsMut { dbias_table, dalibi_slopes, ..into })
            })
        }
        _ => unreachable!("all three have the same element type"),
    };
    options.workspaces.give_back(delta);
    result
}

/// Gradients of sink logits, one per query head of `dims`, which are those of the output.
pub(crate) fn sink_gradients(
    options: &Options,
    dims: Dims,
    rows: RowStatistics<'_>,
    into: &mut [f32],
    monitor: &Monitor<'_>,
) -> Result<()> {
    options.check_sink_logits(dims.heads)?;
    check::sink_gradients(into.len(), dims.heads)?;
    let Some(logits) = options.sink_logits.as_deref() else {
        let why = "the attention has no sink_logits";
        return Err(Error::Unexpected { what: "dsink_logits", why });
    };
    rowwise::sink_gradients((logits, dims), rows, into, options.workers()?, monitor)
}

/// Has `accumulate` add to f32 sums, and rounds them once.
fn round<E: Element>(
    options: &Options,
    gradients: GradientsMut<'_, E>,
    monitor: &Monitor<'_>,
    accumulate: impl FnOnce(GradientsMut<'_>) -> Result<()>,
) -> Result<()> {
    let GradientsMut { dq, dk, dv, .. } = gradients;
    let order = Order::Bhsd;
    let sums = |dims: Dims| options.workspaces.rows(allocatable::<f32>(dims)?);
    let (q_dims, k_dims, v_dims) = (dq.dims(), dk.dims(), dv.dims());
    let mut sums = [sums(q_dims)?, sums(k_dims)?, sums(v_dims)?];
    let [q, k, v] = &mut sums;
    let mut into = GradientsMut::new(
        ViewMut::new(q, q_dims, order)?,
        ViewMut::new(k, k_dims, order)?,
        ViewMut::new(v, v_dims, order)?,
    );
    clear(options, &mut into, monitor)?;
    let result = accumulate(into);
    if result.is_ok() {
        for (sums, mut gradient) in sums.iter().zip([dq, dk, dv]) {
            rowwise::round(options, sums, &mut gradient, monitor)?;
        }
    }
    sums.into_iter().rev().for_each(|sums| options.workspaces.give_back(sums));
    result
}
