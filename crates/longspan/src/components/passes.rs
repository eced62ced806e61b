//! Passes over components: each continues the state of those before it, or adds its gradients.

use std::ops::ControlFlow;

use super::{Component, Part};
use crate::arguments::{GradientsMut, Inputs, OutputMut};
use crate::dims::Order;
use crate::driver;
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor, Progress};
use crate::options::Options;
use crate::rowwise;
use crate::softmax::RowStatistics;
use crate::state::StateMut;
use crate::tensor::{Selection, View, ViewMut, allocatable, allocate};

/// Output and log-sum-exp of all components. f32 outputs hold the state of their rows meanwhile.
pub(crate) fn forward_into<E: Element>(
    components: &[Component],
    options: &Options,
    inputs: &Inputs<'_, E>,
    output: OutputMut<'_, E>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let OutputMut { mut out, lse, lse_lo } = output;
    let (dims, workspaces) = (out.dims(), &options.workspaces);
    // A row's maximum and total stand where its log-sum-exp and the rest of it will.
    let mut own = if lse_lo.is_none() { workspaces.rows(dims.rows())? } else { Vec::new() };
    let totals = lse_lo.unwrap_or(&mut own);
    let mut sums = Vec::new();
    let from_nothing = |mut state: StateMut<'_>| {
        state.clear(options.workers()?, monitor)?;
        extend(components, options, inputs, &mut state, monitor)
    };
    let result = match out.reborrow().into_f32() {
        Ok(out) if out.strides().dim == 1 => from_nothing(StateMut::over(lse, totals, out)?),
        _ => {
            sums = workspaces.rows(allocatable::<f32>(dims)?)?;
            let sums = ViewMut::new(&mut sums, dims, Order::Bhsd)?;
            from_nothing(StateMut::over(lse, totals, sums)?)
        }
    };
    if result.is_ok() {
        let sums = (!sums.is_empty()).then_some(&mut sums[..]);
        rowwise::finish(options, sums, &mut out, lse, totals, monitor)?;
    }
    [own, sums].into_iter().for_each(|rows| workspaces.give_back(rows));
    result
}

/// Continues a state with all components.
pub(crate) fn extend<E: Element>(
    components: &[Component],
    options: &Options,
    inputs: &Inputs<'_, E>,
    state: &mut StateMut<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    each(components, inputs.q.dims().batch, monitor, |entry, component, monitor| {
        let (options, inputs) = component.call(options, inputs, entry);
        let rows = driver::Target::Extend(match component.part.of(entry) {
            None => state.reborrow(),
            Some((queries, _)) => state.select(&queries),
        });
        driver::forward(&options, &component.layouts, &inputs, rows, monitor)
    })
}

/// Adds the gradients of all components, given the final statistics of rows.
pub(crate) fn accumulate<E: Element>(
    components: &[Component],
    options: &Options,
    inputs: &Inputs<'_, E>,
    dout: View<'_, E>,
    rows: RowStatistics<'_>,
    mut gradients: GradientsMut<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let (all, dims) = (options, dout.dims());
    each(components, dims.batch, monitor, |entry, component, monitor| {
        let (options, selected) = component.call(all, inputs, entry);
        let Some((queries, keys)) = component.part.of(entry) else {
            let into = gradients.reborrow();
            let layouts = &component.layouts;
            return driver::backward(&options, layouts, &selected, dout, rows, into, monitor);
        };
        let gather = |list: &[f32]| -> Result<Vec<f32>> {
            let Selection { segments, tokens, heads, .. } = queries;
            let mut own = all.workspaces.rows(segments.count * tokens.count * heads.count)?;
            own.clear();
            for first in segments.indices() {
                for head in heads.indices() {
                    let row = (entry * dims.heads + head) * dims.tokens + first;
                    own.extend(tokens.indices().map(|token| list[row + token]));
                }
            }
            Ok(own)
        };
        let (lse, delta) = (gather(rows.lse)?, gather(rows.delta)?);
        let rest = rows.lse_lo.map(gather).transpose()?;
        let rows = RowStatistics { lse: &lse, lse_lo: rest.as_deref(), delta: &delta };
        // Gradients of biases of the component's heads.
        let [_, bias_table, alibi_slopes] = options.gradient_lens();
        let own = |wanted: bool, len: Option<usize>| {
            len.filter(|_| wanted).map(allocate::zeros::<f32>).transpose()
        };
        let mut own_table = own(gradients.dbias_table.is_some(), bias_table)?;
        let mut own_slopes = own(gradients.dalibi_slopes.is_some(), alibi_slopes)?;
        let into = GradientsMut {
            dq: gradients.dq.select(&queries),
            dk: gradients.dk.select(&keys),
            dv: gradients.dv.select(&keys),
            dsink_logits: None,
            dbias_table: own_table.as_deref_mut(),
            dalibi_slopes: own_slopes.as_deref_mut(),
        };
        let dout = dout.select(&queries);
        let layouts = &component.layouts;
        let result = driver::backward(&options, layouts, &selected, dout, rows, into, monitor);
        let lists =
            [(&mut gradients.dbias_table, own_table), (&mut gradients.dalibi_slopes, own_slopes)];
        for (all, own) in lists {
            let (Some(all), Some(own)) = (all, own) else { continue };
            let per_head = all.len() / dims.heads;
            for (head, own) in queries.heads.indices().zip(own.chunks(per_head)) {
                let all = &mut all[head * per_head..][..per_head];
                all.iter_mut().zip(own).for_each(|(all, own)| *all += own);
            }
        }
        for own in [lse, delta].into_iter().chain(rest) {
            all.workspaces.give_back(own);
        }
        result
    })
}

/// Runs `call` for every component and each batch entry that it has; `monitor` has the progress over all
/// of them.
fn each(
    components: &[Component],
    batch: usize,
    monitor: &Monitor<'_>,
    mut call: impl FnMut(usize, &Component, &Monitor<'_>) -> Result<()>,
) -> Result<()> {
    let runs = |component: &Component| if component.place.is_some() { 1 } else { batch };
    let total = components.iter().map(|component| runs(component) * component.weight).sum();
    let mut before = 0;
    for entry in 0..batch {
        let here =
            |component: &&Component| component.place.is_none_or(|place| place.entry == entry);
        for component in components.iter().filter(here) {
            let all = matches!(component.part, Part::All);
            let weight = component.weight;
            if all && entry > 0 {
                before += weight;
                continue;
            }
            let mut scaled = |progress: Progress| {
                let share = progress.done as f64 / progress.total.max(1) as f64;
                let done = before + (share * weight as f64) as usize;
                monitor.advance_to(Progress { done, total });
                if monitor.poll() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            call(entry, component, &Monitor::new(Hook::new(&mut scaled))).map_err(|error| {
                match error {
                    Error::Stopped { .. } => Error::Stopped { done: before, total },
                    other => other,
                }
            })?;
            before += weight;
        }
    }
    Ok(())
}
