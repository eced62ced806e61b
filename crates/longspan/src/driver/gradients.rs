//! From the gradient of an output to those of the inputs: what is the same for every order of
//! summation.
//!
//! A backward pass adds to f32 numbers. Gradients of other types are summed up in f32 first, and
//! rounded once.

use crate::arguments::{GradientsMut, OutputGradient, OutputRef};
use crate::check;
use crate::dims::{Dims, Order};
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::exec::Monitor;
use crate::options::Options;
use crate::rowwise;
use crate::softmax::RowStatistics;
use crate::tensor::{ViewMut, allocatable};

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
    let GradientsMut { dq, dk, dv } = gradients;
    let result = match (dq.into_f32(), dk.into_f32(), dv.into_f32()) {
        (Ok(dq), Ok(dk), Ok(dv)) => accumulate(rows, GradientsMut { dq, dk, dv }),
        (Err(dq), Err(dk), Err(dv)) => {
            let into = GradientsMut { dq, dk, dv };
            round(options, into, monitor, |gradients| accumulate(rows, gradients))
        }
        _ => unreachable!("all three have the same element type"),
    };
    options.workspaces.give_back(delta);
    result
}

/// Has `accumulate` add to f32 sums, and rounds them once.
fn round<E: Element>(
    options: &Options,
    gradients: GradientsMut<'_, E>,
    monitor: &Monitor<'_>,
    accumulate: impl FnOnce(GradientsMut<'_>) -> Result<()>,
) -> Result<()> {
    let GradientsMut { dq, dk, dv } = gradients;
    let order = Order::Bhsd;
    let sums = |dims: Dims| options.workspaces.rows(allocatable::<f32>(dims)?);
    let (q_dims, k_dims, v_dims) = (dq.dims(), dk.dims(), dv.dims());
    let mut sums = [sums(q_dims)?, sums(k_dims)?, sums(v_dims)?];
    let [q, k, v] = &mut sums;
    let mut into = GradientsMut {
        dq: ViewMut::new(q, q_dims, order)?,
        dk: ViewMut::new(k, k_dims, order)?,
        dv: ViewMut::new(v, v_dims, order)?,
    };
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
