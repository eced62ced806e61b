//! The backward pass on threads: units, turns, and the sums of buffers.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

#[cfg(target_arch = "x86_64")]
use super::on_matrix_unit;
use super::{Call, FusedPass, dispatch, dispatch_on_dtype};
use crate::arguments::{GradientsMut, Inputs};
use crate::check;
use crate::dtype::{Element, ElementType};
use crate::error::Result;
use crate::exec::fault::cut;
use crate::exec::{Arena, Hook, Monitor, Tasks};
use crate::kernel::Scratch;
use crate::kernel::backward::{Backward, OrderedWriter, QueryTarget};
use crate::kernel::bias::BiasSums;
use crate::kernel::fused::FusedKernel;
use crate::layouts::Layouts;
use crate::options::Options;
use crate::softmax::RowStatistics;
use crate::tasks::backward::{Plan, Unit};
use crate::tensor::{Raw, Strided, View};
use crate::workspace::Workspace;

pub(crate) fn backward<E: Element>(
    options: &Options,
    layouts: &Layouts,
    inputs: &Inputs<'_, E>,
    dout: View<'_, E>,
    rows: RowStatistics<'_>,
    gradients: GradientsMut<'_, f32>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let call = Call::backward(options, layouts, inputs, (&dout, &rows), &gradients, monitor)?;
    let mut space = options.workspaces.take();
    let given = Some(Given { dout: Raw::read(&dout), rows, gradients });
    let pass = BackwardPass { call: &call, given, space: &mut space };
    let result = dispatch_on_dtype!(BackwardPass, pass);
    options.workspaces.put(space);
    result
}

impl<'a, 'h, E: Element> Call<'a, 'h, E> {
    /// A backward call, all tensors of which fit.
    pub(crate) fn backward(
        options: &'a Options,
        layouts: &'a Layouts,
        inputs: &Inputs<'_, E>,
        (dout, rows): (&View<'_, E>, &RowStatistics<'_>),
        gradients: &GradientsMut<'_, f32>,
        monitor: &'a Monitor<'h>,
    ) -> Result<Self> {
        let call = Call::new(options, layouts, inputs, monitor)?;
        check::statistics(dout, rows, call.sizes.output())?;
        check::gradient_dims(inputs, gradients)?;
        Ok(call)
    }
}

/// Prepares a workspace for [`backward`]; its bytes, with gradients of all options that have some.
pub(crate) fn backward_bytes<E: Element>(
    options: &Options,
    layouts: &Layouts,
    inputs: &Inputs<'_, E>,
    space: &mut Workspace,
) -> Result<usize> {
    let monitor = Monitor::new(Hook::none());
    let call = Call::new(options, layouts, inputs, &monitor)?;
    let pass = BackwardPass { call: &call, given: None, space: &mut *space };
    dispatch_on_dtype!(BackwardPass, pass)?;
    // Sums of units and their totals are f64.
    let [_, bias_table, alibi_slopes] = options.gradient_lens();
    let biases = bias_table.unwrap_or(0) + alibi_slopes.unwrap_or(0);
    let of_unit = biases / call.sizes.key_heads.max(1);
    Ok(space.bytes() + (biases + call.workers.threads * of_unit) * size_of::<f64>())
}

struct BackwardPass<'a, 'h, E> {
    call: &'a Call<'a, 'h, E>,
    /// Nothing where the workspace alone is prepared.
    given: Option<Given<'a, E>>,
    space: &'a mut Workspace,
}

/// What the backward pass starts from and adds to.
struct Given<'a, E> {
    dout: Raw<E>,
    rows: RowStatistics<'a>,
    gradients: GradientsMut<'a, f32>,
}

impl<E: Element> FusedPass<E> for BackwardPass<'_, '_, E> {
    fn with<X: FusedKernel<Element = E>>(self, tiles: X) -> Result<()> {
        // Unit tests run no pass: without its kernels they compile in half the time.
        if cfg!(test) {
            unreachable!("passes are tested from outside, in `tests`");
        }
        let BackwardPass { call, given, space } = self;
        let (sizes, layouts) = (&call.sizes, call.layouts);
        space.plan.list_streams(layouts, sizes, usize::MAX);
        space.backward.fill(&space.plan, layouts, sizes, X::KEY_PANEL, call.monitor)?;
        let (grid, dims) = (space.backward.grid, (sizes.dim, sizes.value_dim));
        let workers = call.workers_for(space.backward.weight, space.backward.units.len());
        space.grow_scratch(workers.threads, |scratch| {
            let len = Backward::<X>::workspace_len(grid, dims, call.additions.is_some());
            scratch.elements.reserve(len);
            scratch.clean.reserve(Backward::<X>::finite_copy_len(dims));
        });
        let plan = &space.backward;
        space.counters.resize_with(space.counters.len().max(plan.counters), AtomicU32::default);
        let buffers = Buffers::carve(plan, sizes.dim, sizes.value_dim, &mut space.parts);
        let Some(Given { dout, rows, mut gradients }) = given else { return Ok(()) };
        let kernel = Backward {
            tiles,
            scale: call.scale,
            additions: call.additions.as_ref(),
            bias_gradients: gradients.dbias_table.is_some() || gradients.dalibi_slopes.is_some(),
            q: call.q,
            k: call.k,
            v: call.v,
            dout,
            dq: Raw::write(&mut gradients.dq),
            dk: Raw::write(&mut gradients.dk),
            dv: Raw::write(&mut gradients.dv),
            rows,
            dim: sizes.dim,
            value_dim: sizes.value_dim,
            keys: sizes.keys,
            grid,
        };
        let bias = BiasTotals::new(&mut gradients);
        let work = Work { call, space: &*space, kernel, buffers, bias };
        work.space.counters[..plan.counters]
            .iter()
            .for_each(|ticket| ticket.store(0, Ordering::Relaxed));
        Tasks::counted(plan.units.len(), call.monitor).run(workers, &|unit| {
            // SAFETY: `check::inputs` has found the sizes of all layouts in the tensors and heads
            // that fit, and head dims from 1 on; `backward` has found those sizes in dO, the
            // statistics and the gradients. All are borrowed for the call. `Plan::fill` made the
            // unit for these layouts.
            unsafe { work.unit(unit, &mut work.space.scratch()) };
        })?;
        // SAFETY: `Tasks::run` returns when all units are done, so that no other thread uses
        // gradients or buffers; the sizes are as above.
        unsafe { work.add_up() };
        work.bias.add_to(&mut gradients);
        Ok(())
    }
}

/// Where parts of heavy key panels and chains of heavy query panels put their sums.
#[derive(Clone, Copy)]
struct Buffers {
    first: *mut f32,
    /// Numbers of a dQ buffer, which come first, and of a dK/dV buffer.
    query: usize,
    key: usize,
    queries: usize,
}

// SAFETY: these are addresses; the `unsafe` blocks that write there prove that no other thread
// does.
unsafe impl Sync for Buffers {}

impl Buffers {
    fn carve(plan: &Plan, dim: usize, value_dim: usize, arena: &mut Arena) -> Self {
        // A row of blocks may reach past the end of its query panel.
        let query = (plan.grid.query_panel + longspan_pattern::BlockSize::MAX.get()) * dim;
        let key = plan.grid.panel * (dim + value_dim);
        let queries = plan.query_buffers;
        let first = arena.replace(queries * query + plan.key_buffers * key);
        // dQ buffers are added to from the start, dK/dV buffers are written.
        // SAFETY: the room begins with so many elements, which nothing else refers to.
        unsafe { std::ptr::write_bytes(first, 0, queries * query) };
        Buffers { first, query, key, queries }
    }

    fn query(&self, index: usize) -> *mut f32 {
        self.first.wrapping_add(index * self.query)
    }

    fn key(&self, index: usize) -> *mut f32 {
        self.first.wrapping_add(self.queries * self.query + index * self.key)
    }
}

struct Work<'a, 'h, X: FusedKernel> {
    call: &'a Call<'a, 'h, X::Element>,
    space: &'a Workspace,
    kernel: Backward<'a, X>,
    buffers: Buffers,
    bias: BiasTotals,
}

/// Gradients of biases of all heads, to which units are added in their order.
struct BiasTotals {
    next: AtomicU32,
    /// Those of the table, and those of slopes; empty where they aren't wanted.
    sums: Mutex<[Vec<f64>; 2]>,
}

impl BiasTotals {
    fn new(gradients: &mut GradientsMut<'_>) -> Self {
        let GradientsMut { dbias_table, dalibi_slopes, .. } = gradients;
        let zeros = |list: &Option<&mut [f32]>| vec![0.0; list.as_deref().map_or(0, <[f32]>::len)];
        let sums = Mutex::new([zeros(dbias_table), zeros(dalibi_slopes)]);
        BiasTotals { next: AtomicU32::new(0), sums }
    }

    /// Adds the sums of a unit when it is its turn, unless the call stops before.
    fn add(&self, unit: usize, bias: &BiasSums, monitor: &Monitor<'_>) {
        let writer = OrderedWriter { counter: &self.next, rank: unit as u32 };
        if writer.enter(|| monitor.is_stopped()) {
            let [table, slopes] = &mut *self.sums.lock().unwrap_or_else(PoisonError::into_inner);
            bias.add_to(table, slopes);
            writer.leave();
        }
    }

    fn add_to(self, gradients: &mut GradientsMut<'_>) {
        let sums = self.sums.into_inner().unwrap_or_else(PoisonError::into_inner);
        let lists = [&mut gradients.dbias_table, &mut gradients.dalibi_slopes];
        for (list, sums) in lists.into_iter().zip(sums) {
            let Some(list) = list else { continue };
            list.iter_mut().zip(sums).for_each(|(into, sum)| *into += sum as f32);
        }
    }
}

impl<X: FusedKernel> Work<'_, '_, X> {
    /// A key panel, or some query panels of it.
    ///
    /// # Safety
    ///
    /// The tensors, statistics and gradients of the kernel must have the sizes of the call and its
    /// layouts, and nothing but units of this plan read or write gradients and buffers. The plan
    /// must be made for the layouts, unit `number` be one of it, and not be run twice.
    unsafe fn unit(&self, number: usize, scratch: &mut Scratch) {
        let (kernel, plan, monitor) = (&self.kernel, &self.space.backward, self.call.monitor);
        let unit: &Unit = &plan.units[number];
        let _session = kernel.tiles.session();
        let family = plan.families[unit.family as usize];
        let at = (family.entry as usize, family.key_head as usize);
        if let Some(additions) = &self.call.additions
            && kernel.bias_gradients
        {
            let heads = self.call.sizes.heads / self.call.sizes.key_heads;
            scratch.bias.clear(additions, at.1 * heads, heads);
        }
        // SAFETY: `open`, `query_panel` and `close` are given the entry, key head, key panel,
        // streams and query panels of the plan, which are those of the tensors, statistics and
        // layouts. The session is this thread's, and scratch is used for this key panel alone. Of
        // dQ, a query panel of a head, in the tensor or in one buffer, is a chain: `OrderedWriter`
        // lets one unit at a time have it. dK and dV of a key panel belong to its one unit, or each
        // part of it has a buffer, `grid.panel` rows of both.
        unsafe {
            let mut panel = kernel.open(scratch, at, unit.panel);
            for number in family.streams.0..family.streams.1 {
                let stream = self.call.stream(&self.space.plan, number);
                let of_stream = plan.streams[number as usize];
                let tickets = &plan.tickets[of_stream.tickets as usize];
                let mut masks = stream.layout.masks_in(std::mem::take(&mut scratch.mask));
                for (index, &head) in stream.heads.iter().enumerate() {
                    for ticket in tickets.of(unit.panel) {
                        if ticket.query_panel < unit.query_panels.0
                            || unit.query_panels.1 <= ticket.query_panel
                        {
                            continue;
                        }
                        let chains = tickets.buffers.len();
                        let chain = of_stream.counters + index * chains + ticket.chain as usize;
                        let writer = OrderedWriter {
                            counter: &self.space.counters[chain],
                            rank: ticket.rank,
                        };
                        let target = match tickets.buffers[ticket.chain as usize] {
                            None => QueryTarget::Tensor,
                            Some(buffer) => {
                                let first = of_stream.buffers + index * tickets.buffered.len();
                                QueryTarget::Buffer(self.buffers.query(first + buffer as usize))
                            }
                        };
                        cut(None);
                        if !writer.enter(|| monitor.is_stopped()) {
                            return;
                        }
                        kernel.query_panel(
                            &mut panel,
                            &stream,
                            head as usize,
                            ticket.query_panel,
                            target,
                            (&mut masks, &mut scratch.bias),
                            monitor,
                        );
                        writer.leave();
                        cut(Some(chain));
                        if monitor.poll() {
                            return;
                        }
                    }
                }
                scratch.mask = masks.into_words();
            }
            if kernel.bias_gradients {
                self.bias.add(number, &scratch.bias, monitor);
            }
            kernel.close(&panel, at, unit.buffer.map(|buffer| self.buffers.key(buffer as usize)));
        }
    }

    /// Adds the buffers to the gradients, in the order of the plan.
    ///
    /// # Safety
    ///
    /// That of [`unit`](Self::unit); all units must be done.
    unsafe fn add_up(&self) {
        let (kernel, plan) = (&self.kernel, &self.space.backward);
        let sizes = &self.call.sizes;
        // SAFETY: entries, heads, keys and queries are those of the plan, and so of the gradients.
        // A buffer has the rows of a key panel, or those of a query panel from its first query on:
        // both fit, as `cut` made them, and no thread writes any more.
        unsafe {
            for unit in &plan.units {
                let Some(buffer) = unit.buffer else { continue };
                let family = plan.families[unit.family as usize];
                let (entry, head) = (family.entry as usize, family.key_head as usize);
                let key = unit.panel as usize * plan.grid.panel;
                let keys = (sizes.keys - key).min(plan.grid.panel);
                let dk = self.buffers.key(buffer as usize);
                let dv = dk.add(plan.grid.panel * sizes.dim);
                add_rows(kernel.dk.head(entry, head, key), dk, keys, sizes.dim);
                add_rows(kernel.dv.head(entry, head, key), dv, keys, sizes.value_dim);
            }
            for (number, of_stream) in plan.streams.iter().enumerate() {
                let stream = self.call.stream(&self.space.plan, number as u32);
                let tickets = &plan.tickets[of_stream.tickets as usize];
                for (index, &head) in stream.heads.iter().enumerate() {
                    for (buffer, &query_panel) in tickets.buffered.iter().enumerate() {
                        let rows = plan.grid.rows(stream.layout, query_panel);
                        if rows.is_empty() {
                            continue;
                        }
                        let first_of_query_panel = query_panel as usize * plan.grid.query_panel;
                        let first = stream.layout.row_tokens(rows.start).start;
                        let end = stream.layout.row_tokens(rows.end - 1).end;
                        let at = of_stream.buffers + index * tickets.buffered.len() + buffer;
                        let from =
                            self.buffers.query(at).add((first - first_of_query_panel) * sizes.dim);
                        let dq = kernel.dq.head(stream.entry, head as usize, first);
                        add_rows(dq, from, end - first, sizes.dim);
                    }
                }
            }
        }
    }
}

/// Adds contiguous rows to strided ones.
///
/// # Safety
///
/// rows × dims elements must be readable at `from`, and readable and writable at `to`, none of them
/// shared.
unsafe fn add_rows(to: Strided, from: *const f32, rows: usize, dims: usize) {
    for row in 0..rows {
        for dim in 0..dims {
            // SAFETY: row and dim are below those that this function demands of both.
            unsafe { *to.at(row, dim).first.cast_mut() += *from.add(row * dims + dim) };
        }
    }
}
