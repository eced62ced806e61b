//! Passes over components: each continues the state of those before it, or adds its gradients.

use std::ops::ControlFlow;

use super::{Component, List, Part};
use crate::arguments::{GradientsMut, Inputs, OutputMut, OutputRows, PriorState};
use crate::dims::Order;
use crate::driver;
use crate::dtype::{Element, ElementType};
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor, Progress};
use crate::options::Options;
use crate::rowwise;
use crate::softmax::RowStatistics;
use crate::state::StateMut;
use crate::tensor::{Selection, View, ViewMut, allocatable, allocate};

/// Output and log-sum-exp of all components.
pub(crate) fn forward_into<E: Element>(
    components: &List,
    options: &Options,
    inputs: &Inputs<'_, E>,
    output: OutputMut<'_, E>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    if components.disjoint {
        return finish_each(components, options, inputs, output, monitor);
    }
    let OutputMut { mut out, lse, lse_lo } = output;
    let (dims, workspaces) = (out.dims(), &options.workspaces);
    // A row's maximum and total stand where its log-sum-exp and the rest of it will.
    let mut own = if lse_lo.is_none() { workspaces.rows(dims.rows())? } else { Vec::new() };
    let totals = lse_lo.unwrap_or(&mut own);
    // f32 outputs hold the sums of their rows meanwhile.
    let in_place = E::TYPE == ElementType::F32 && out.strides().dim == 1;
    let mut sums = match in_place {
        true => None,
        false => Some(workspaces.rows(allocatable::<f32>(dims)?)?),
    };
    let rows = Rows { out: &mut out, lse, totals, sums: sums.as_deref_mut() };
    let result = rows.forward(components, options, inputs, monitor);
    [Some(own), sums].into_iter().flatten().for_each(|rows| workspaces.give_back(rows));
    result
}

/// Rows that several components continue.
struct Rows<'a, 'o, E> {
    out: &'a mut ViewMut<'o, E>,
    lse: &'a mut [f32],
    totals: &'a mut [f32],
    /// Sums that are not in the output.
    sums: Option<&'a mut [f32]>,
}

impl<E: Element> Rows<'_, '_, E> {
    fn forward(
        mut self,
        components: &[Component],
        options: &Options,
        inputs: &Inputs<'_, E>,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        self.state()?.clear(options.workers()?, monitor)?;
        // A call over all tensors comes last, and finishes all rows.
        let all = |component: &&Component| matches!(component.part, Part::All);
        let last = components.iter().rfind(all).map(std::ptr::from_ref);
        each(components, inputs.q.dims().batch, monitor, |entry, component, monitor| {
            if Some(std::ptr::from_ref(component)) != last {
                return continue_with(component, entry, options, inputs, self.state()?, monitor);
            }
            let rows = driver::Target::Finish(self.output()?);
            driver::forward(options, &component.layouts, inputs, rows, monitor)
        })?;
        match last {
            Some(_) => Ok(()),
            None => {
                let Rows { out, lse, totals, sums } = self;
                rowwise::finish(options, sums, out, lse, totals, monitor)
            }
        }
    }

    /// The rows as a state.
    fn state(&mut self) -> Result<StateMut<'_>> {
        let sums = match self.sums.as_deref_mut() {
            Some(sums) => ViewMut::new(sums, self.out.dims(), Order::Bhsd)?,
            None => self.out.reborrow().into_f32().unwrap_or_else(|_| unreachable!("f32 in place")),
        };
        StateMut::over(self.lse, self.totals, sums)
    }

    /// The rows as an output that goes on from the state.
    fn output(&mut self) -> Result<OutputRows<'_, E>> {
        let dims = self.out.dims();
        let prior = match self.sums.as_deref_mut() {
            Some(sums) => PriorState::Separate(ViewMut::new(sums, dims, Order::Bhsd)?),
            None => PriorState::InOutput,
        };
        let lse_lo = Some(&mut *self.totals);
        let output = OutputMut { out: self.out.reborrow(), lse: self.lse, lse_lo };
        Ok(OutputRows { prior, ..output.rows()? })
    }
}

/// Output and log-sum-exp of components without common rows.
fn finish_each<E: Element>(
    components: &[Component],
    options: &Options,
    inputs: &Inputs<'_, E>,
    mut output: OutputMut<'_, E>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let dims = output.out.dims();
    let rows = |component: &Component| match component.part {
        Part::All => dims.rows(),
        Part::Some { queries: Selection { segments, tokens, heads, .. }, .. } => {
            let entries = if component.place.is_some() { 1 } else { dims.batch };
            entries * segments.count * tokens.count * heads.count
        }
    };
    if components.iter().map(rows).sum::<usize>() < dims.rows() {
        rowwise::empty(options, &mut output, monitor)?;
    }
    let mut output = output.rows()?;
    each(components, dims.batch, monitor, |entry, component, monitor| {
        let (mut own, inputs) = component.call(options, inputs, entry);
        own.sink_logits = component.sink_logits(options);
        let rows = match component.part.of(entry) {
            None => output.reborrow(),
            Some((queries, _)) => output.select(&queries),
        };
        let rows = driver::Target::Finish(rows);
        driver::forward(&own, &component.layouts, &inputs, rows, monitor)
    })
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
        continue_with(component, entry, options, inputs, state.reborrow(), monitor)
    })
}

/// Continues a state with a component of a batch entry.
fn continue_with<E: Element>(
    component: &Component,
    entry: usize,
    options: &Options,
    inputs: &Inputs<'_, E>,
    mut state: StateMut<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let (options, inputs) = component.call(options, inputs, entry);
    let rows = match component.part.of(entry) {
        None => state,
        Some((queries, _)) => state.select(&queries),
    };
    driver::forward(&options, &component.layouts, &inputs, driver::Target::Extend(rows), monitor)
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

/// Every component and each batch entry that it has, those of all tensors last.
pub(super) fn calls(
    components: &[Component],
    batch: usize,
) -> impl Iterator<Item = (usize, &Component)> + Clone {
    let is_in = |component: &Component, entry| match component.part {
        Part::All => false,
        Part::Some { .. } => component.place.is_none_or(|place| place.entry == entry),
    };
    let some = (0..batch).flat_map(move |entry| {
        let here = components.iter().filter(move |component| is_in(component, entry));
        here.map(move |component| (entry, component))
    });
    let all = components.iter().filter(|component| matches!(component.part, Part::All));
    some.chain(all.filter(move |_| batch > 0).map(|component| (0, component)))
}

/// Runs `call` for all [`calls`]; `monitor` has the progress over all of them.
fn each(
    components: &[Component],
    batch: usize,
    monitor: &Monitor<'_>,
    mut call: impl FnMut(usize, &Component, &Monitor<'_>) -> Result<()>,
) -> Result<()> {
    let calls = calls(components, batch);
    let total = calls.clone().map(|(_, component)| component.weight).sum();
    let mut before = 0;
    for (entry, component) in calls {
        let weight = component.weight;
        let mut scaled = |progress: Progress| {
            let share = progress.done as f64 / progress.total.max(1) as f64;
            let done = before + (share * weight as f64) as usize;
            monitor.advance_to(Progress { done, total });
            if monitor.poll() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let hook = Hook::new(&mut scaled);
        call(entry, component, &Monitor::new(hook)).map_err(|error| match error {
            Error::Stopped { .. } => Error::Stopped { done: before, total },
            other => other,
        })?;
        before += weight;
    }
    Ok(())
}
