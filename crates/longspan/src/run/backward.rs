//! The backward pass on threads: units, turns, and the sums of buffers.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{Call, Pass};
use crate::arguments::{GradientsMut, RowStatistics};
use crate::element::Element;
use crate::error::Result;
use crate::exec::{Arena, Scratch, Tasks, Workspace};
use crate::kernel::Raw;
use crate::kernel::backward::{Backward, QueryTarget, Turnstile};
use crate::plan::backward::{Plan, Unit};
use crate::score::Transform;
use crate::tile::Tiles;

pub(crate) struct BackwardPass<'a, 'h, E> {
    pub(crate) call: &'a Call<'a, 'h, E>,
    pub(super) dout: Raw<E>,
    pub(super) rows: RowStatistics<'a>,
    pub(super) gradients: GradientsMut<'a, f32>,
    pub(super) space: &'a mut Workspace,
}

impl<E: Element> Pass<E> for BackwardPass<'_, '_, E> {
    fn with<X: Tiles<Element = E>, T: Transform>(self, tiles: X, transform: T) -> Result<()> {
        let BackwardPass { call, dout, rows, mut gradients, space } = self;
        let (sizes, layouts) = (&call.sizes, call.layouts);
        space.plan.list_streams(layouts, sizes, usize::MAX);
        space.backward.fill(&space.plan, layouts, sizes, call.monitor)?;
        let plan = &space.backward;
        let kernel = Backward {
            tiles,
            transform,
            scale: call.scale,
            slopes: call.slopes,
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
            grid: plan.grid,
        };
        let workers = call.workers_for(plan.weight, plan.units.len());
        space.grow_scratch(workers.threads, |scratch| {
            scratch.numbers.room(kernel.room());
            scratch.clean.room(kernel.clean_room());
        });
        let plan = &space.backward;
        space.counters.resize_with(space.counters.len().max(plan.counters), AtomicU32::default);
        let buffers = Buffers::cut(plan, sizes.dim, sizes.value_dim, &mut space.parts);
        let work = Work { call, space: &*space, kernel, buffers };
        work.space.counters[..plan.counters]
            .iter()
            .for_each(|turn| turn.store(0, Ordering::Relaxed));
        Tasks::counted(plan.units.len(), call.monitor).run(workers, &|unit| {
            // SAFETY: `check::inputs` has found the sizes of all layouts in the tensors and heads that
            // fit, and head dims from 1 on; `backward` has found those sizes in dO, the statistics and the
            // gradients. All are borrowed for the call. `Plan::fill` made the unit for these layouts.
            unsafe { work.unit(&plan.units[unit], &mut work.space.scratch()) };
        })?;
        // SAFETY: `Tasks::run` returns when all units are done, so that no other thread uses gradients or
        // buffers; the sizes are as above.
        unsafe { work.add_up() };
        Ok(())
    }
}

/// Where parts of heavy slabs and chains of heavy bands put their sums.
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
    fn cut(plan: &Plan, dim: usize, value_dim: usize, arena: &mut Arena) -> Self {
        // A row of blocks may reach past the end of its band.
        let query = (plan.grid.band + longspan_pattern::BlockSize::MAX.get()) * dim;
        let key = plan.grid.slab * (dim + value_dim);
        let queries = plan.query_buffers;
        let first = arena.room(queries * query + plan.key_buffers * key);
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

struct Work<'a, 'h, X: Tiles, T> {
    call: &'a Call<'a, 'h, X::Element>,
    space: &'a Workspace,
    kernel: Backward<'a, X, T>,
    buffers: Buffers,
}

impl<X: Tiles, T: Transform> Work<'_, '_, X, T> {
    /// A slab, or some bands of it.
    ///
    /// # Safety
    ///
    /// The tensors, statistics and gradients of the kernel must have the sizes of the call and its
    /// layouts, and nothing but units of this plan read or write gradients and buffers. The plan must be
    /// made for the layouts, `unit` be one of it, and not be run twice.
    unsafe fn unit(&self, unit: &Unit, scratch: &mut Scratch) {
        let (kernel, plan, monitor) = (&self.kernel, &self.space.backward, self.call.monitor);
        let _session = kernel.tiles.session();
        let family = plan.families[unit.family as usize];
        let at = (family.entry as usize, family.key_head as usize);
        // SAFETY: `open`, `band` and `close` are given the entry, key head, slab, streams and bands of the
        // plan, which are those of the tensors, statistics and layouts. The session is this thread's, and
        // scratch is used for this slab alone. Of dQ, a band of a head, in the tensor or in one buffer,
        // is a chain: `Turnstile` lets one unit at a time have it. dK and dV of a slab belong to its one
        // unit, or each part of it has a buffer, `grid.slab` rows of both.
        unsafe {
            let mut slab = kernel.open(scratch, at, unit.slab);
            for number in family.streams.0..family.streams.1 {
                let stream = self.call.stream(&self.space.plan, number);
                let of_stream = plan.streams[number as usize];
                let turns = &plan.turns[of_stream.turns as usize];
                let mut masks = stream.layout.masks_in(std::mem::take(&mut scratch.mask));
                for (index, &head) in stream.heads.iter().enumerate() {
                    for turn in turns.of(unit.slab) {
                        if turn.band < unit.bands.0 || unit.bands.1 <= turn.band {
                            continue;
                        }
                        let chains = turns.buffers.len();
                        let chain = of_stream.counters + index * chains + turn.chain as usize;
                        let turnstile =
                            Turnstile { counter: &self.space.counters[chain], rank: turn.rank };
                        let target = match turns.buffers[turn.chain as usize] {
                            None => QueryTarget::Tensor,
                            Some(buffer) => {
                                let first = of_stream.buffers + index * turns.buffered.len();
                                QueryTarget::Buffer(self.buffers.query(first + buffer as usize))
                            }
                        };
                        if !turnstile.enter(|| monitor.is_stopped()) {
                            return;
                        }
                        kernel.band(
                            &mut slab,
                            &stream,
                            head as usize,
                            turn.band,
                            target,
                            &mut masks,
                            monitor,
                        );
                        turnstile.leave();
                        if monitor.poll() {
                            return;
                        }
                    }
                }
                scratch.mask = masks.into_words();
            }
            kernel.close(&slab, at, unit.buffer.map(|buffer| self.buffers.key(buffer as usize)));
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
        // A buffer has the rows of a slab, or those of a band from its first query on: both fit, as
        // `cut` made them, and no thread writes any more.
        unsafe {
            for unit in &plan.units {
                let Some(buffer) = unit.buffer else { continue };
                let family = plan.families[unit.family as usize];
                let (entry, head) = (family.entry as usize, family.key_head as usize);
                let key = unit.slab as usize * plan.grid.slab;
                let keys = (sizes.keys - key).min(plan.grid.slab);
                let dk = self.buffers.key(buffer as usize);
                let dv = dk.add(plan.grid.slab * sizes.dim);
                add_rows(kernel.dk.head(entry, head, key), dk, keys, sizes.dim);
                add_rows(kernel.dv.head(entry, head, key), dv, keys, sizes.value_dim);
            }
            for (number, of_stream) in plan.streams.iter().enumerate() {
                let stream = self.call.stream(&self.space.plan, number as u32);
                let turns = &plan.turns[of_stream.turns as usize];
                for (index, &head) in stream.heads.iter().enumerate() {
                    for (buffer, &band) in turns.buffered.iter().enumerate() {
                        let rows = plan.grid.rows(stream.layout, band);
                        if rows.is_empty() {
                            continue;
                        }
                        let first_of_band = band as usize * plan.grid.band;
                        let first = stream.layout.row_tokens(rows.start).start as usize;
                        let end = stream.layout.row_tokens(rows.end - 1).end as usize;
                        let at = of_stream.buffers + index * turns.buffered.len() + buffer;
                        let from = self.buffers.query(at).add((first - first_of_band) * sizes.dim);
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
unsafe fn add_rows(to: crate::tile::Strided, from: *const f32, rows: usize, dims: usize) {
    for row in 0..rows {
        for dim in 0..dims {
            // SAFETY: row and dim are below those that this function demands of both.
            unsafe { *to.at(row, dim).first.cast_mut() += *from.add(row * dims + dim) };
        }
    }
}
