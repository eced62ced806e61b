//! The partial softmax of one row, its merge, and its result.
//!
//! Over some keys a row has `m = max score`, `l = Σ exp(score − m)` and `acc = Σ exp(score − m) v`.
//! Kernels, parts of long rows and [`State`](crate::State) merge and finish rows by the functions
//! here.

use crate::tensor::{Raw, Strided};

/// A row `(m, l, acc)` to add to.
pub(crate) type RowMut<'a> = (&'a mut f32, &'a mut f32, &'a mut [f32]);

/// Joins a row to another over disjoint keys.
pub(crate) fn merge_row(into: RowMut<'_>, other: (f32, f32, &[f32])) {
    let (m, l, acc) = into;
    let (other_m, other_l, other_acc) = other;
    if other_m == f32::NEG_INFINITY {
        return;
    }
    if *m == f32::NEG_INFINITY {
        (*m, *l) = (other_m, other_l);
        acc.copy_from_slice(other_acc);
        return;
    }
    // NaN stays: it isn't greater, and every difference with it is NaN.
    let greatest = if other_m > *m { other_m } else { *m };
    let (a, b) = ((*m - greatest).exp(), (other_m - greatest).exp());
    *m = greatest;
    *l = *l * a + other_l * b;
    for (acc, other) in acc.iter_mut().zip(other_acc) {
        *acc = *acc * a + other * b;
    }
}

/// What a row has come to.
pub(crate) struct Finished {
    /// What its sums are multiplied by to become its output.
    pub(crate) factor: f32,
    pub(crate) lse: f32,
    pub(crate) lse_lo: f32,
}

/// What a row `(m, l, _)` has come to, once it is merged with the sink of its head, `(sink, 1, 0)`,
/// if there is one. Every final state becomes a result here, so that a sink counts once per row.
pub(crate) fn finish(m: f32, l: f32, sink: Option<f32>) -> Finished {
    if let Some(sink) = sink {
        return finish_with_sink(m, l, sink);
    }
    if l == 0.0 {
        return Finished { factor: 0.0, lse: f32::NEG_INFINITY, lse_lo: 0.0 };
    }
    let (lse, lse_lo) = sum_in_two(m, f64::from(l).ln());
    Finished { factor: 1.0 / l, lse, lse_lo }
}

/// In f64, so that a sink costs no accuracy. Apart, so that rows without one don't pay for it.
#[cold]
#[inline(never)]
fn finish_with_sink(m: f32, l: f32, sink: f32) -> Finished {
    if sink == f32::NEG_INFINITY {
        return finish(m, l, None);
    }
    if l == 0.0 {
        return Finished { factor: 0.0, lse: sink, lse_lo: 0.0 };
    }
    // NaN stays, as in `merge_row`.
    let greatest = if sink > m { sink } else { m };
    let below = |x: f32| (f64::from(x) - f64::from(greatest)).exp();
    let (a, b) = (below(m), below(sink));
    let total = f64::from(l) * a + b;
    let (lse, lse_lo) = sum_in_two(greatest, total.ln());
    Finished { factor: (a / total) as f32, lse, lse_lo }
}

/// `m + logarithm` rounded to f32, and what that leaves out; nothing where it isn't finite.
pub(crate) fn sum_in_two(m: f32, logarithm: f64) -> (f32, f32) {
    let m = f64::from(m);
    let high = (m + logarithm) as f32;
    // In this order, since `m + logarithm` in f64 is no longer exact from about 1e9 on.
    let rest = ((m - f64::from(high)) + logarithm) as f32;
    (high, if high.is_finite() { rest } else { 0.0 })
}

/// States as kernels see them: numbers of rows, and the rows themselves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawState {
    pub(crate) maxima: Raw,
    pub(crate) totals: Raw,
    pub(crate) sums: Raw,
    pub(crate) dim: usize,
}

impl RawState {
    /// Maxima, totals and sums, from a row on.
    ///
    /// # Safety
    ///
    /// The three must be tensors that are still borrowed, with such a row.
    pub(crate) unsafe fn rows(self, entry: usize, head: usize, token: usize) -> [Strided; 3] {
        // SAFETY: `head` has this function's condition, for each of the three.
        [self.maxima, self.totals, self.sums].map(|raw| unsafe { raw.head(entry, head, token) })
    }

    /// One row, to add to.
    ///
    /// # Safety
    ///
    /// That of [`rows`](Self::rows); `dim` elements of a row of sums must lie side by side, and
    /// nothing else read or write the row for as long as it is used.
    pub(crate) unsafe fn row<'a>(self, entry: usize, head: usize, token: usize) -> RowMut<'a> {
        // SAFETY: this function demands the row, of `dim` elements side by side, for itself alone.
        unsafe {
            let [m, l, sums] = self.rows(entry, head, token).map(|rows| rows.first.cast_mut());
            (&mut *m, &mut *l, std::slice::from_raw_parts_mut(sums, self.dim))
        }
    }
}

/// Output and log-sum-exp of rows, as kernels address them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawOutput<E> {
    pub(crate) out: Raw<E>,
    /// A number for each batch entry, head and token.
    pub(crate) lse: Raw,
    pub(crate) lse_lo: Option<Raw>,
}

impl<E> RawOutput<E> {
    /// Writes the log-sum-exp of a row, and its rest where it is wanted.
    ///
    /// # Safety
    ///
    /// Both must be tensors that are still borrowed, with such a row, and nothing else read or write it.
    pub(crate) unsafe fn write_lse(
        &self,
        (entry, head, token): (usize, usize, usize),
        finished: &Finished,
    ) {
        // SAFETY: `head` has this function's condition.
        unsafe {
            *self.lse.head(entry, head, token).first.cast_mut() = finished.lse;
            if let Some(rests) = self.lse_lo {
                *rests.head(entry, head, token).first.cast_mut() = finished.lse_lo;
            }
        }
    }
}

/// What the backward pass has to know of each row once its softmax is final, `[batch, head,
/// token]` each.
#[derive(Debug, Clone, Copy)]
pub struct RowStatistics<'a> {
    /// The log-sum-exp over *all* keys of the row, wherever they are.
    pub lse: &'a [f32],
    /// See [`Output::lse_lo`](crate::Output::lse_lo).
    pub lse_lo: Option<&'a [f32]>,
    /// `Σ dout · out − dlse`, as [`row_deltas`](crate::row_deltas) finds it.
    pub delta: &'a [f32],
}
