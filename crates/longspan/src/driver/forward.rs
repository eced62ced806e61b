//! The forward pass on workers: tasks, and the merge of rows that were split.

#[cfg(target_arch = "x86_64")]
use super::on_matrix_unit;
use super::{Call, FusedPass, dispatch, dispatch_on_dtype};
use crate::arguments::{Inputs, OutputRows, PriorState};
use crate::check;
use crate::dims::Strides;
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::exec::{Arena, Hook, Monitor, Tasks};
use crate::kernel::forward::{Forward, Target as RowTarget};
use crate::kernel::fused::FusedKernel;
use crate::layouts::Layouts;
use crate::options::Options;
use crate::softmax::{RawOutput, RawState, finish, merge_row};
use crate::state::StateMut;
use crate::tasks::{EmptyRows, Stream};
use crate::tensor::Raw;
use crate::workspace::Workspace;

/// Where the forward pass writes its rows.
pub(crate) enum Target<'a, E> {
    /// To output and log-sum-exp.
    Finish(OutputRows<'a, E>),
    /// On from a state, and back into it.
    Extend(StateMut<'a>),
}

pub(crate) fn forward<E: Element>(
    options: &Options,
    layouts: &Layouts,
    inputs: &Inputs<'_, E>,
    rows: Target<'_, E>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let call = Call::forward(options, layouts, inputs, &rows, monitor)?;
    let mut space = options.workspaces.take();
    let rows = Some(rows);
    let result =
        dispatch_on_dtype!(ForwardPass, ForwardPass { call: &call, rows, space: &mut space });
    options.workspaces.put(space);
    result
}

impl<'a, 'h, E: Element> Call<'a, 'h, E> {
    /// A forward call, all tensors of which fit.
    pub(crate) fn forward(
        options: &'a Options,
        layouts: &'a Layouts,
        inputs: &Inputs<'_, E>,
        rows: &Target<'_, E>,
        monitor: &'a Monitor<'h>,
    ) -> Result<Self> {
        let call = Call::new(options, layouts, inputs, monitor)?;
        let dims = call.sizes.output();
        match rows {
            Target::Finish(rows) => check::output_rows(rows, dims)?,
            Target::Extend(state) => check::same("the state", state.dims(), dims)?,
        }
        Ok(call)
    }
}

/// Prepares a workspace for [`forward`]; its bytes.
pub(crate) fn forward_bytes<E: Element>(
    options: &Options,
    layouts: &Layouts,
    inputs: &Inputs<'_, E>,
    space: &mut Workspace,
) -> Result<usize> {
    let monitor = Monitor::new(Hook::none());
    let call = Call::new(options, layouts, inputs, &monitor)?;
    dispatch_on_dtype!(ForwardPass, ForwardPass { call: &call, rows: None, space: &mut *space })?;
    Ok(space.bytes())
}

pub(crate) struct ForwardPass<'a, 'h, E> {
    pub(crate) call: &'a Call<'a, 'h, E>,
    /// Nothing where the workspace alone is prepared.
    rows: Option<Target<'a, E>>,
    space: &'a mut Workspace,
}

impl<E: Element> FusedPass<E> for ForwardPass<'_, '_, E> {
    fn with<X: FusedKernel<Element = E>>(self, tiles: X) -> Result<()> {
        // Unit tests run no pass: without its kernels they compile in half the time.
        if cfg!(test) {
            unreachable!("passes are tested from outside, in `tests`");
        }
        let ForwardPass { call, rows, space } = self;
        let sizes = &call.sizes;
        let plan = &mut space.plan;
        let empty_rows = if matches!(rows, Some(Target::Extend(_))) {
            EmptyRows::Skip
        } else {
            EmptyRows::Write
        };
        plan.forward(call.layouts, sizes, empty_rows);
        let kernel = Forward {
            tiles,
            scale: call.scale,
            additions: call.additions.as_ref(),
            sink_logits: call.options.sink_logits.as_deref(),
            q: call.q,
            k: call.k,
            v: call.v,
            dim: sizes.dim,
            value_dim: sizes.value_dim,
            keys: sizes.keys,
            uniform: call.options.uniform,
            saves: matches!(&rows, Some(Target::Finish(rows)) if rows.are_saved()),
        };
        let workers = call.workers_for(plan.weight, plan.units.len());
        let (workspace, row_tiles, pieces) =
            (kernel.workspace_len(plan.tiles), plan.row_tiles, plan.pieces);
        space.grow_scratch(workers.threads, |scratch| {
            scratch.elements.reserve(workspace);
            scratch.lists.grow(row_tiles, pieces);
        });
        let parts = part_states(&mut space.parts, space.plan.part_rows, sizes.value_dim);
        let target = match rows {
            None => return Ok(()),
            Some(Target::Finish(rows)) => finishing(rows),
            Some(Target::Extend(mut state)) => RowTarget::Extend(state.raw()),
        };

        let (space, plan) = (&*space, &space.plan);
        Tasks::counted(plan.units.len(), call.monitor).run(workers, &|unit| {
            let unit = &plan.units[unit];
            let scratch = &mut *space.scratch();
            let stream = call.stream(plan, unit.stream);
            let target = match unit.part {
                Some(first) => RowTarget::Part(parts, first as usize),
                None => target,
            };
            let _session = tiles.session();
            let mut masks = stream.layout.masks_in(std::mem::take(&mut scratch.mask));
            // SAFETY: `check::inputs` has found the sizes of all layouts in the tensors and heads
            // that fit, `check::tensors` head dims from 1 on, and `forward` those sizes in the
            // target; they are borrowed for the call. `Plan::forward` gives each row to one unit,
            // or to the parts of one cut, which have rows of `parts` each. The session is this
            // thread's.
            unsafe { kernel.rows(&stream, unit, target, &mut masks, scratch, call.monitor) };
            scratch.mask = masks.into_words();
        })?;
        for cut in &plan.cuts {
            let stream = call.stream(plan, cut.stream);
            // SAFETY: `each` returns when all units are done, so that no other thread uses the
            // rows; they are in the target and in `parts` as above.
            unsafe { join(&stream, cut, parts, target, kernel.sink_logits) };
        }
        Ok(())
    }
}

/// Cuts `workspace` into the states of parts.
fn part_states(arena: &mut Arena, rows: usize, dim: usize) -> RawState {
    let first = arena.replace(rows * (dim + 2));
    // One row after the other, whatever entry and head it is of.
    let list =
        |first, tokens| Raw { first, strides: Strides { batch: 0, heads: 0, tokens, dim: 1 } };
    // SAFETY: the room is `rows` maxima, `rows` totals and `rows · dim` sums.
    let (totals, sums) = unsafe { (first.add(rows), first.add(2 * rows)) };
    let sums = list(sums, dim as isize);
    RawState { maxima: list(first, 1), totals: list(totals, 1), sums, dim }
}

/// Where rows that are finished go, and what they go on from.
fn finishing<E: Element>(rows: OutputRows<'_, E>) -> RowTarget<E> {
    let OutputRows { mut out, mut lse, mut lse_lo, prior } = rows;
    let (dim, goes_on) = (out.dims().dim, !matches!(prior, PriorState::None));
    let sums = match prior {
        PriorState::None => None,
        PriorState::InOutput => {
            out.reborrow().into_f32().ok().map(|mut sums| Raw::write(&mut sums))
        }
        PriorState::Separate(mut sums) => Some(Raw::write(&mut sums)),
    };
    let output = RawOutput {
        out: Raw::write(&mut out),
        lse: Raw::write(&mut lse),
        lse_lo: lse_lo.as_mut().map(Raw::write),
    };
    assert!(!goes_on || sums.is_some() && output.lse_lo.is_some(), "sums and totals of a state");
    let state = sums.zip(output.lse_lo);
    let state = state.map(|(sums, totals)| RawState { maxima: output.lse, totals, sums, dim });
    RowTarget::Finish { state, output }
}

/// Merges the states of a row's parts, in the order of their columns, into its target.
///
/// # Safety
///
/// `parts` must have the rows of the cut and `target` those of its row of blocks and heads, as
/// wide, and nothing else read or write either.
unsafe fn join<E: Element>(
    stream: &Stream<'_>,
    cut: &crate::tasks::Cut,
    parts: RawState,
    target: RowTarget<E>,
    sink_logits: Option<&[f32]>,
) {
    let tokens = stream.layout.row_tokens(cut.row);
    let (token, tokens) = (tokens.start, tokens.len());
    for lane in 0..cut.lanes as usize {
        let (head, token) = (stream.heads[lane / tokens] as usize, token + lane % tokens);
        let part = |part: u32| cut.first as usize + part as usize * cut.lanes as usize + lane;
        // SAFETY: lanes are below those of the cut, so that this function demands their rows. A row
        // that is merged into is never the other one: it is the target's, or the first part's with
        // others from the second on. An output is written once its state has been read.
        unsafe {
            let start = if matches!(target, RowTarget::Extend(_)) { 0 } else { 1 };
            let into = |parts: RawState| match target {
                RowTarget::Extend(state) => state.row(stream.entry, head, token),
                _ => parts.row(0, 0, part(0)),
            };
            if let RowTarget::Finish { state: Some(state), .. } = target {
                let (m, l, acc) = state.row(stream.entry, head, token);
                merge_row(into(parts), (*m, *l, acc));
            }
            for other in start..cut.parts {
                let (m, l, acc) = parts.row(0, 0, part(other));
                merge_row(into(parts), (*m, *l, acc));
            }
            if let RowTarget::Finish { output, .. } = target {
                let (m, l, acc) = parts.row(0, 0, part(0));
                let finished = finish(*m, *l, sink_logits.map(|logits| logits[head]));
                output.write_lse((stream.entry, head, token), &finished);
                let out = output.out.head(stream.entry, head, token);
                for (dim, x) in acc.iter().enumerate() {
                    *out.at(0, dim).first.cast_mut() = E::from_f32(x * finished.factor);
                }
            }
        }
    }
}
