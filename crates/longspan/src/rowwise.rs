//! Element-wise operations over the rows of tensors, on several threads.

use crate::arguments::{OutputGradient, OutputMut, OutputRef};
use crate::dims::{Dims, Order};
use crate::dtype::{Element, store};
use crate::error::Result;
use crate::exec::{Monitor, Tasks, Workers};
use crate::isa::Isa;
use crate::options::Options;
use crate::simd::{self, Operation, Simd, WithSimd};
use crate::softmax::{self, RowStatistics};
use crate::tensor::{Raw, Strided, ViewMut};

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
        // SAFETY: `each_row` gives each row of the view's dims to one thread, once; the view is
        // exclusive.
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

/// Makes outputs and log-sum-exps of partial softmaxes, with the sinks of the options: `lse` holds each row's maximum and `rests`
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
    let (dims, order) = (out.dims(), Order::Bhsd);
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
    let sink_logits = options.sink_logits.as_deref();
    each_row(dims, options.workers()?, monitor, &|entry, head, token| {
        // SAFETY: `each_row` gives each row of `dims` to one thread, once. `ViewMut::new` has found
        // lists of a number per row, and sums of `dims` side by side; so are those of `out` where
        // they are taken from it. All are exclusive.
        unsafe {
            let [lse, rest] = lists.map(|list| list.head(entry, head, token).first.cast_mut());
            let finished = softmax::finish(*lse, *rest, sink_logits.map(|logits| logits[head]));
            (*lse, *rest) = (finished.lse, finished.lse_lo);
            let sums = raw.head(entry, head, token).first.cast_mut();
            let sums = std::slice::from_raw_parts_mut(sums, dims.dim);
            sums.iter_mut().for_each(|sum| *sum *= finished.factor);
        }
    })?;
    sums.map_or(Ok(()), |sums| round(options, sums, out, monitor))
}

/// Writes what rows come to that attend to nothing but the sinks of the options.
pub(crate) fn empty<E: Element>(
    options: &Options,
    output: &mut OutputMut<'_, E>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let OutputMut { out, lse, lse_lo } = output;
    clear(out, options.workers()?, monitor)?;
    let Dims { tokens, heads, .. } = out.dims();
    let rests = lse_lo.as_deref_mut().unwrap_or_default();
    for head in 0..lse.len().checked_div(tokens).unwrap_or(0) {
        let sink = options.sink_logits.as_deref().map(|logits| logits[head % heads]);
        let finished = softmax::finish(f32::NEG_INFINITY, 0.0, sink);
        let rows = head * tokens..(head + 1) * tokens;
        lse[rows.clone()].fill(finished.lse);
        rests.get_mut(rows).unwrap_or_default().fill(finished.lse_lo);
    }
    Ok(())
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
    output: OutputRef<'_, E>,
    gradient: OutputGradient<'_, E>,
    deltas: &mut [f32],
    workers: Workers<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let dims = output.out.dims();
    assert_eq!((gradient.dout.dims(), deltas.len()), (dims, dims.rows()), "dims of the output");
    let (out, dout) = (Raw::read(&output.out), Raw::read(&gradient.dout));
    let mut deltas = ViewMut::new(deltas, Dims { dim: 1, ..dims }, Order::Bhsd)?;
    let deltas = Raw::write(&mut deltas);
    each_row(dims, workers, monitor, &|entry, head, token| {
        let row = (entry * dims.heads + head) * dims.tokens + token;
        let dlse = gradient.dlse.map_or(0.0, |dlse| f64::from(dlse[row]));
        // SAFETY: both tensors have these dims, and there are as many deltas as rows: asserted.
        // `each_row` gives each row to one thread, once.
        unsafe {
            let sum = dot(out.head(entry, head, token), dout.head(entry, head, token), dims.dim);
            *deltas.head(entry, head, token).first.cast_mut() = (sum - dlse) as f32;
        }
    })
}

/// The gradient of each head's sink logit, `−Σ exp(s − lse) · delta` over its rows.
///
/// A row's sink has the probability `p = exp(s − lse)` and the value 0, so that it receives what a
/// key with `dout · v = 0` does: `p · (0 − delta)`. Summed in f64, by one thread per head in the
/// order of rows: the same bits for any number of threads.
pub(crate) fn sink_gradients(
    (logits, dims): (&[f32], Dims),
    rows: RowStatistics<'_>,
    gradients: &mut [f32],
    workers: Workers<'_>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let Dims { batch, tokens, heads, .. } = dims;
    assert_eq!((logits.len(), gradients.len()), (heads, heads), "one per query head");
    let RowStatistics { lse, lse_lo, delta } = rows;
    let own = Dims { batch: 1, tokens: 1, heads, dim: 1 };
    let gradients = Raw::write(&mut ViewMut::new(gradients, own, Order::Bhsd)?);
    let workers = workers_for_rows(workers, dims.rows(), 64);
    Tasks::uncounted(heads, monitor).run(workers, &|head| {
        let sink = f64::from(logits[head]);
        let term = |row: usize| {
            // A row outside of its batch entry's sequence has no sink.
            if lse[row] == f32::NEG_INFINITY {
                return 0.0;
            }
            let low = lse_lo.map_or(0.0, |low| f64::from(low[row]));
            (sink - f64::from(lse[row]) - low).exp() * f64::from(delta[row])
        };
        let rows = (0..batch).flat_map(|entry| {
            let first = (entry * heads + head) * tokens;
            first..first + tokens
        });
        // A head without a sink may have rows without a log-sum-exp.
        let sum = if sink == f64::NEG_INFINITY { 0.0 } else { rows.map(term).sum::<f64>() };
        // SAFETY: there are `heads` gradients, which are exclusive, and each has one task.
        unsafe { *gradients.head(0, head, 0).first.cast_mut() = -sum as f32 };
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
