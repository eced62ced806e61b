//! From a checked call to kernels on threads.

mod backward;

pub(crate) use self::backward::BackwardPass;

use crate::arguments::{Arrived, GradientsMut, Inputs, OutputMut, RowStatistics};
use crate::attention::Layouts;
use crate::check::{self, Sizes};
use crate::element::{Element, ElementType, store};
use crate::error::Result;
use crate::exec::{Arena, Monitor, Tasks, Workers, Workspace};
use crate::isa::Isa;
use crate::kernel::Raw;
use crate::kernel::forward::{Forward, Target};
use crate::options::Options;
use crate::plan::{Idle, Plan, Stream};
use crate::score::{Alibi, Plain, Score, Softcap, Transform};
use crate::simd::{self, Operation, Simd, WithSimd};
use crate::state::{RawState, StateMut, merge_row};
use crate::tile::{Direct, Strided, Tiles};
use crate::view::{Dims, Order, Strides, View, ViewMut};
use std::marker::PhantomData;

/// Where rows of the forward pass go.
pub(crate) enum Rows<'a, E> {
    /// To output and log-sum-exp.
    Finish(OutputMut<'a, E>),
    /// On from a state, and back into it.
    Extend(StateMut<'a>),
}

/// Blocks × dims below which waking another thread costs more than it saves.
const SMALL: u64 = 64;

/// What both passes need of a call.
pub(crate) struct Call<'a, 'h, E> {
    pub(crate) options: &'a Options,
    pub(crate) layouts: &'a Layouts,
    pub(crate) sizes: Sizes,
    pub(crate) scale: f32,
    pub(crate) slopes: &'a [f32],
    pub(crate) workers: Workers<'a>,
    pub(crate) q: Raw<E>,
    pub(crate) k: Raw<E>,
    pub(crate) v: Raw<E>,
    pub(crate) monitor: &'a Monitor<'h>,
}

impl<'a, 'h, E: Element> Call<'a, 'h, E> {
    fn new(
        options: &'a Options,
        layouts: &'a Layouts,
        inputs: &Inputs<'_, E>,
        monitor: &'a Monitor<'h>,
    ) -> Result<Self> {
        let sizes = check::inputs(options, layouts, inputs)?;
        let slopes: &[f32] = match &options.score {
            Score::Alibi(slopes) => slopes,
            _ => &[],
        };
        Ok(Call {
            options,
            layouts,
            sizes,
            scale: options.scale.unwrap_or(1.0 / (sizes.dim as f32).sqrt()),
            slopes,
            workers: options.workers()?,
            q: Raw::read(&inputs.q),
            k: Raw::read(&inputs.k),
            v: Raw::read(&inputs.v),
            monitor,
        })
    }

    pub(crate) fn stream<'s>(&'s self, plan: &'s Plan, number: u32) -> Stream<'s> {
        plan.stream(self.layouts, &self.sizes, number)
    }

    /// The threads that tasks of so many blocks are worth.
    pub(crate) fn workers_for(&self, blocks: u64, tasks: usize) -> Workers<'a> {
        let work = blocks * (self.sizes.dim + self.sizes.value_dim) as u64 / 128;
        self.workers.at_most(if work < SMALL { 1 } else { tasks })
    }
}

/// A pass, ready for an instruction set and a transform.
pub(crate) trait Pass<E> {
    fn with<X: Tiles<Element = E>, T: Transform>(self, tiles: X, transform: T) -> Result<()>;
}

/// Picks the instruction set, then the transform: the one place where both become types.
pub(crate) fn dispatch<E: Element>(options: &Options, pass: impl Pass<E>) -> Result<()> {
    struct Chosen<'a, P, E>(&'a Score, P, PhantomData<E>);
    impl<P: Pass<E>, E: Element> WithSimd for Chosen<'_, P, E> {
        type Output = Result<()>;

        fn with<S: Simd>(self, simd: S) -> Result<()> {
            with_score(Direct::new(simd), self.0, self.1)
        }
    }
    let (isa, score) = (Isa::choose(options.isa)?, &options.score);
    let numbers = options.precision.numbers(E::TYPE, isa);
    let pass = match numbers.multiplied {
        ElementType::F32 => pass,
        _ => match E::on_matrix_unit(pass, score) {
            Ok(result) => return result,
            Err(pass) => pass,
        },
    };
    simd::dispatch(isa, Chosen(score, pass, PhantomData))
}

pub(crate) fn with_score<X: Tiles>(
    tiles: X,
    score: &Score,
    pass: impl Pass<X::Element>,
) -> Result<()> {
    match *score {
        Score::Plain => pass.with(tiles, Plain),
        Score::Softcap(cap) => pass.with(tiles, Softcap(cap)),
        Score::Alibi(_) => pass.with(tiles, Alibi),
    }
}

pub(crate) fn forward<E: Element>(
    options: &Options,
    layouts: &Layouts,
    inputs: &Inputs<'_, E>,
    rows: Rows<'_, E>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let call = Call::new(options, layouts, inputs, monitor)?;
    let dims = call.sizes.output();
    match &rows {
        Rows::Finish(output) => check::output_dims(output, dims)?,
        Rows::Extend(state) => check::same("the state", state.dims(), dims)?,
    }
    let mut space = options.workspaces.take();
    let result = E::forward(ForwardPass { call: &call, rows, space: &mut space });
    options.workspaces.put(space);
    result
}

pub(crate) struct ForwardPass<'a, 'h, E> {
    pub(crate) call: &'a Call<'a, 'h, E>,
    rows: Rows<'a, E>,
    space: &'a mut Workspace,
}

impl<E: Element> Pass<E> for ForwardPass<'_, '_, E> {
    fn with<X: Tiles<Element = E>, T: Transform>(self, tiles: X, transform: T) -> Result<()> {
        let ForwardPass { call, rows, space } = self;
        let sizes = &call.sizes;
        let plan = &mut space.plan;
        let idle = if matches!(rows, Rows::Extend(_)) { Idle::LeftOut } else { Idle::Written };
        plan.forward(call.layouts, sizes, idle);
        let kernel = Forward {
            tiles,
            transform,
            scale: call.scale,
            slopes: call.slopes,
            q: call.q,
            k: call.k,
            v: call.v,
            dim: sizes.dim,
            value_dim: sizes.value_dim,
            keys: sizes.keys,
        };
        let target = match rows {
            Rows::Finish(mut output) => Target::Output {
                out: Raw::write(&mut output.out),
                lse: output.lse.as_mut_ptr(),
                lse_rest: output.lse_rest.map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr),
            },
            Rows::Extend(mut state) => Target::Extend(state.raw()),
        };
        let workers = call.workers_for(plan.weight, plan.units.len());
        let (room, row_tiles, pieces) = (kernel.room(plan.tiles), plan.row_tiles, plan.pieces);
        space.grow_scratch(workers.threads, |scratch| {
            scratch.numbers.room(room);
            scratch.lists.grow(row_tiles, pieces);
        });
        let parts = part_states(&mut space.parts, space.plan.part_rows, sizes.value_dim);

        let (space, plan) = (&*space, &space.plan);
        Tasks::counted(plan.units.len(), call.monitor).run(workers, &|unit| {
            let unit = &plan.units[unit];
            let scratch = &mut *space.scratch();
            let stream = call.stream(plan, unit.stream);
            let target = match unit.part {
                Some(first) => Target::Part(parts, first as usize),
                None => target,
            };
            let _session = tiles.session();
            let mut masks = stream.layout.masks_in(std::mem::take(&mut scratch.mask));
            // SAFETY: `check::inputs` has found the sizes of all layouts in the tensors and heads that
            // fit, `check::tensors` head dims from 1 on, and `forward` those sizes in the target; they
            // are borrowed for the call. `Plan::forward` gives each row to one unit, or to the parts of
            // one cut, which have rows of `parts` each. The session is this thread's.
            unsafe { kernel.rows(&stream, unit, target, &mut masks, scratch, call.monitor) };
            scratch.mask = masks.into_words();
        })?;
        for cut in &plan.cuts {
            let stream = call.stream(plan, cut.stream);
            // SAFETY: `each` returns when all units are done, so that no other thread uses the
            // rows; they are in the target and in `parts` as above.
            unsafe { join(&stream, cut, parts, target) };
        }
        Ok(())
    }
}

/// Cuts `room` into the states of parts.
fn part_states(arena: &mut Arena, rows: usize, dim: usize) -> RawState {
    let first = arena.room(rows * (dim + 2));
    // One row after the other, whatever entry and head it is of.
    let list =
        |first, tokens| Raw { first, strides: Strides { batch: 0, heads: 0, tokens, dim: 1 } };
    // SAFETY: the room is `rows` maxima, `rows` totals and `rows · dim` sums.
    let (totals, sums) = unsafe { (first.add(rows), first.add(2 * rows)) };
    let sums = list(sums, dim as isize);
    RawState { maxima: list(first, 1), totals: list(totals, 1), sums, dim }
}

/// Merges the states of a row's parts, in the order of their columns, into its target.
///
/// # Safety
///
/// `parts` must have the rows of the cut and `target` those of its row of blocks and heads, as
/// wide, and nothing else read or write either.
unsafe fn join<E: Element>(
    stream: &Stream<'_>,
    cut: &crate::plan::Cut,
    parts: RawState,
    target: Target<E>,
) {
    let tokens = stream.layout.row_tokens(cut.row);
    let (token, tokens) = (tokens.start as usize, (tokens.end - tokens.start) as usize);
    for lane in 0..cut.lanes as usize {
        let (head, token) = (stream.heads[lane / tokens] as usize, token + lane % tokens);
        let part = |part: u32| cut.first as usize + part as usize * cut.lanes as usize + lane;
        // SAFETY: lanes are below those of the cut, so that this function demands their rows. A row
        // of `into` is never the `other` one: it is the target's, or the first part's with `other`
        // from 1 on.
        unsafe {
            let start = if matches!(target, Target::Extend(_)) { 0 } else { 1 };
            let into = |parts: RawState| match target {
                Target::Extend(state) => state.row(stream.entry, head, token),
                _ => parts.row(0, 0, part(0)),
            };
            for other in start..cut.parts {
                let (m, l, acc) = parts.row(0, 0, part(other));
                merge_row(into(parts), (*m, *l, acc));
            }
            if let Target::Output { out, lse, lse_rest } = target {
                let (m, l, acc) = parts.row(0, 0, part(0));
                let row = stream.row(head, token);
                let finished = crate::state::finish(*m, *l);
                *lse.add(row) = finished.lse;
                if !lse_rest.is_null() {
                    *lse_rest.add(row) = finished.lse_rest;
                }
                let out = out.head(stream.entry, head, token);
                for (dim, x) in acc.iter().enumerate() {
                    *out.at(0, dim).first.cast_mut() = E::from_f32(x * finished.factor);
                }
            }
        }
    }
}

pub(crate) fn backward<E: Element>(
    options: &Options,
    layouts: &Layouts,
    inputs: &Inputs<'_, E>,
    dout: View<'_, E>,
    rows: RowStatistics<'_>,
    gradients: GradientsMut<'_, f32>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let call = Call::new(options, layouts, inputs, monitor)?;
    check::statistics(&dout, &rows, call.sizes.output())?;
    check::gradient_dims(inputs, &gradients)?;
    let mut space = options.workspaces.take();
    let pass =
        BackwardPass { call: &call, dout: Raw::read(&dout), rows, gradients, space: &mut space };
    let result = E::backward(pass);
    options.workspaces.put(space);
    result
}

/// Rows that a thread claims at a time.
const ROWS: usize = 1_024;

/// The threads that so many rows are worth.
fn workers_for_rows(workers: Workers<'_>, rows: usize, dim: usize) -> Workers<'_> {
    workers.at_most(if rows * dim < 64 * ROWS { 1 } else { rows.div_ceil(ROWS) })
}

/// Runs `work(entry, head, token)` for every row of a tensor.
pub(crate) fn each_row(
    dims: Dims,
    workers: Workers<'_>,
    monitor: &Monitor<'_>,
    work: &(dyn Fn(usize, usize, usize) + Sync),
) -> Result<()> {
    let rows = dims.rows();
    let workers = workers_for_rows(workers, rows, dims.dim);
    Tasks::uncounted(rows.div_ceil(ROWS), monitor).run(workers, &|chunk| {
        for row in chunk * ROWS..((chunk + 1) * ROWS).min(rows) {
            let (head, token) = (row / dims.tokens, row % dims.tokens);
            work(head / dims.heads, head % dims.heads, token);
        }
    })
}

/// Writes 0 to every element.
pub(crate) fn clear<E: Element>(
    view: &mut ViewMut<'_, E>,
    workers: Workers<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let (dims, raw) = (view.dims(), Raw::write(view));
    each_row(dims, workers, monitor, &|entry, head, token| {
        // SAFETY: `each_row` gives each row of the view's dims to one thread, once; the view is exclusive.
        unsafe {
            let row = raw.head(entry, head, token);
            if row.column == 1 {
                std::slice::from_raw_parts_mut(row.first.cast_mut(), dims.dim).fill(E::default());
                return;
            }
            for dim in 0..dims.dim {
                *row.at(0, dim).first.cast_mut() = E::default();
            }
        }
    })
}

/// Writes sums, `[batch, head, token, dim]`, rounded to the elements of `view`.
pub(crate) fn round<E: Element>(
    options: &Options,
    sums: &[f32],
    view: &mut ViewMut<'_, E>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    struct Round<'a, 'h, E> {
        sums: &'a [f32],
        dims: Dims,
        raw: Raw<E>,
        workers: Workers<'a>,
        monitor: &'a Monitor<'h>,
    }
    impl<E: Element> WithSimd for Round<'_, '_, E> {
        type Output = Result<()>;

        fn with<S: Simd>(self, simd: S) -> Result<()> {
            let Round { sums, dims, raw, workers, monitor } = self;
            each_row(dims, workers, monitor, &|entry, head, token| {
                let row = (entry * dims.heads + head) * dims.tokens + token;
                let from = &sums[row * dims.dim..][..dims.dim];
                // SAFETY: `each_row` gives each row of the view's dims to one thread, once; the
                // view is exclusive, and `from` as long as a row.
                unsafe { simd.call(Narrow { from, to: raw.head(entry, head, token) }) }
            })
        }
    }
    let (dims, raw) = (view.dims(), Raw::write(view));
    let (isa, workers) = (Isa::choose(options.isa)?, options.workers()?);
    simd::dispatch(isa, Round { sums, dims, raw, workers, monitor })
}

/// Makes outputs and log-sum-exps of partial softmaxes: `lse` holds each row's maximum and `rests`
/// its total, both replaced. Sums lie in `out` itself where there are no others: it must then be
/// f32, with the elements of a row side by side.
pub(crate) fn finish<E: Element>(
    options: &Options,
    sums: Option<&mut [f32]>,
    out: &mut ViewMut<'_, E>,
    lse: &mut [f32],
    rests: &mut [f32],
    monitor: &Monitor<'_>,
) -> Result<()> {
    let (dims, order) = (out.dims(), Order::BatchHeadTokenDim);
    let mut sums = sums;
    let in_place = match sums {
        Some(_) => None,
        None => out.reborrow().into_f32().ok().filter(|out| out.strides().dim == 1),
    };
    let raw = match in_place {
        Some(mut out) => Raw::write(&mut out),
        None => {
            let sums = sums.as_deref_mut().unwrap_or_default();
            Raw::write(&mut ViewMut::new(sums, dims, order)?)
        }
    };
    let list = |list| ViewMut::new(list, Dims { dim: 1, ..dims }, order);
    let lists = [Raw::write(&mut list(lse)?), Raw::write(&mut list(rests)?)];
    each_row(dims, options.workers()?, monitor, &|entry, head, token| {
        // SAFETY: `each_row` gives each row of `dims` to one thread, once. `ViewMut::new` has found lists
        // of a number per row, and sums of `dims` side by side; so are those of `out` where they are
        // taken from it. All are exclusive.
        unsafe {
            let [lse, rest] = lists.map(|list| list.head(entry, head, token).first.cast_mut());
            let finished = crate::state::finish(*lse, *rest);
            (*lse, *rest) = (finished.lse, finished.lse_rest);
            let sums = raw.head(entry, head, token).first.cast_mut();
            let sums = std::slice::from_raw_parts_mut(sums, dims.dim);
            sums.iter_mut().for_each(|sum| *sum *= finished.factor);
        }
    })?;
    sums.map_or(Ok(()), |sums| round(options, sums, out, monitor))
}

/// Writes a row of f32, rounded.
///
/// # Safety
///
/// As many elements of row 0 must be writable as `from` has, and no part of it.
struct Narrow<'a, E> {
    from: &'a [f32],
    to: Strided<E>,
}

impl<E: Element> Operation for Narrow<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) {
        let Narrow { from, to } = self;
        let whole = if to.column == 1 { from.len() / S::WIDTH * S::WIDTH } else { 0 };
        // SAFETY: `at` is below the length of `from`, a vector's end too, and the type demands as
        // many of the row; vectors are only stored where its elements lie side by side.
        unsafe {
            for at in (0..whole).step_by(S::WIDTH) {
                let x = simd.load(from.as_ptr().add(at));
                store(simd, to.first.cast_mut().add(at), x);
            }
            for (at, &x) in from.iter().enumerate().skip(whole) {
                *to.at(0, at).first.cast_mut() = E::from_f32(x);
            }
        }
    }
}

/// `Σ dout · out − dlse`, in f64: it is taken from every score of the row.
pub(crate) fn deltas<E: Element>(
    arrived: &Arrived<'_, E>,
    deltas: &mut [f32],
    workers: Workers<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let dims = arrived.out.dims();
    assert_eq!((arrived.dout.dims(), deltas.len()), (dims, dims.rows()), "dims of the output");
    let (out, dout) = (Raw::read(&arrived.out), Raw::read(&arrived.dout));
    let mut deltas = ViewMut::new(deltas, Dims { dim: 1, ..dims }, Order::BatchHeadTokenDim)?;
    let deltas = Raw::write(&mut deltas);
    each_row(dims, workers, monitor, &|entry, head, token| {
        let row = (entry * dims.heads + head) * dims.tokens + token;
        let dlse = arrived.dlse.map_or(0.0, |dlse| f64::from(dlse[row]));
        // SAFETY: both tensors have these dims, and there are as many deltas as rows: asserted. `each_row`
        // gives each row to one thread, once.
        unsafe {
            let sum = dot(out.head(entry, head, token), dout.head(entry, head, token), dims.dim);
            *deltas.head(entry, head, token).first.cast_mut() = (sum - dlse) as f32;
        }
    })
}

/// Σ a · b over the first `len` columns of two rows.
///
/// # Safety
///
/// Both must be readable.
unsafe fn dot<E: Element>(a: Strided<E>, b: Strided<E>, len: usize) -> f64 {
    let wide = |x: E| f64::from(x.to_f32());
    // SAFETY: columns are below `len`, and slices are only made where they lie side by side.
    unsafe {
        if a.column == 1 && b.column == 1 {
            let a = std::slice::from_raw_parts(a.first, len);
            let b = std::slice::from_raw_parts(b.first, len);
            let mut sums = [0.0_f64; 8];
            let (mut a8, mut b8) = (a.chunks_exact(8), b.chunks_exact(8));
            for (a, b) in (&mut a8).zip(&mut b8) {
                for i in 0..8 {
                    sums[i] += wide(a[i]) * wide(b[i]);
                }
            }
            let rest = a8.remainder().iter().zip(b8.remainder());
            let rest: f64 = rest.map(|(&a, &b)| wide(a) * wide(b)).sum();
            return sums.iter().sum::<f64>() + rest;
        }
        (0..len).map(|i| wide(*a.at(0, i).first) * wide(*b.at(0, i).first)).sum()
    }
}
