//! A partial softmax, and how two of them become one.
//!
//! Over some keys a row has `m = max score`, `l = Σ exp(score − m)` and `acc = Σ exp(score − m) v`.
//! Over the union of two disjoint sets of keys:
//!
//! ```text
//! m = max(m₁, m₂)    l = l₁·exp(m₁ − m) + l₂·exp(m₂ − m)    acc likewise
//! out = acc / l      lse + rest = m + ln l, rounded twice
//! ```
//!
//! A tile of keys inside the kernel, a part of a long row, a hop of a ring and a branch of LongNet
//! are all joined this way. A row that has seen nothing is `(−∞, 0, 0)`; joining it to another
//! leaves the other as it is, to the bit.

use crate::arguments::{Output, OutputMut};
use crate::check;
use crate::dims::{Dims, Order};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::exec::{Hook, Monitor, Workers};
use crate::rowwise;
use crate::softmax::{Finished, RawState, finish, merge_row, sum_in_two};
use crate::tensor::{Raw, Selection, View, ViewMut, allocatable, allocate};

/// Partial softmaxes of many rows.
///
/// ```
/// use longspan::{Dims, Order, State};
///
/// let dims = Dims { batch: 1, tokens: 3, heads: 2, dim: 4 };
/// let nothing = State::empty(dims)?.finish(Order::Bshd)?;
/// assert!(nothing.out.as_slice().iter().all(|&x| x == 0.0));
/// assert!(nothing.lse.iter().all(|&x| x == f32::NEG_INFINITY));
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    dims: Dims,
    maxima: Vec<f32>,
    totals: Vec<f32>,
    sums: Vec<f32>,
}

impl State {
    /// Rows that have seen nothing: one per batch entry, head and token, `dims.dim` numbers per
    /// value.
    pub fn empty(dims: Dims) -> Result<Self> {
        let elements = allocatable::<f32>(dims)?;
        let rows = allocatable::<f32>(Dims { dim: 1, ..dims })?;
        Ok(State {
            dims,
            maxima: allocate::filled(f32::NEG_INFINITY, rows)?,
            totals: allocate::zeros(rows)?,
            sums: allocate::zeros(elements)?,
        })
    }

    /// Forgets what rows have seen, and keeps their memory.
    pub fn clear(&mut self) {
        self.maxima.fill(f32::NEG_INFINITY);
        self.totals.fill(0.0);
        self.sums.fill(0.0);
    }

    /// What [`maxima`](Self::maxima), [`totals`](Self::totals) and [`sums`](Self::sums) say of a
    /// state, which may have come from elsewhere.
    pub fn from_parts(
        dims: Dims,
        maxima: Vec<f32>,
        totals: Vec<f32>,
        sums: Vec<f32>,
    ) -> Result<Self> {
        check::rows("the list of maxima", maxima.len(), dims)?;
        check::rows("the list of totals", totals.len(), dims)?;
        check::elements("the list of sums", sums.len(), dims)?;
        Ok(State { dims, maxima, totals, sums })
    }

    /// How many rows there are, by axis; `dim` is that of the values.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// The greatest score of each row, `[batch, head, token]`.
    pub fn maxima(&self) -> &[f32] {
        &self.maxima
    }

    /// `Σ exp(score − maximum)` of each row, `[batch, head, token]`.
    pub fn totals(&self) -> &[f32] {
        &self.totals
    }

    /// `Σ exp(score − maximum) · value` of each row, `[batch, head, token, dim]`.
    pub fn sums(&self) -> &[f32] {
        &self.sums
    }

    /// Joins `other`, which has seen other keys, to this.
    pub fn merge(&mut self, other: &State) -> Result<()> {
        check::same("the other state", other.dims, self.dims)?;
        (0..self.maxima.len()).for_each(|row| self.merge_one(row, other, row));
        Ok(())
    }

    /// Joins `other`, whose tokens are some of this one's: its first is `tokens[0]`, and so on.
    ///
    /// ```
    /// use longspan::{Dims, State};
    ///
    /// let dims = |tokens| Dims { batch: 1, tokens, heads: 1, dim: 1 };
    /// let mut state = State::empty(dims(3))?;
    /// let last = State::from_parts(dims(1), vec![0.5], vec![1.0], vec![2.0])?;
    /// state.merge_tokens(&[2], &last)?;
    /// assert_eq!(state.sums(), [0.0, 0.0, 2.0]);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn merge_tokens(&mut self, tokens: &[usize], other: &State) -> Result<()> {
        let dims = Dims { tokens: tokens.len(), ..self.dims };
        check::same("the other state", other.dims, dims)?;
        if let Some(&token) = tokens.iter().find(|&&token| token >= self.dims.tokens) {
            return Err(Error::Token { token, tokens: self.dims.tokens });
        }
        for (row, (entry, head, index)) in rows(dims).enumerate() {
            let into = (entry * self.dims.heads + head) * self.dims.tokens + tokens[index];
            self.merge_one(into, other, row);
        }
        Ok(())
    }

    fn merge_one(&mut self, into: usize, other: &State, row: usize) {
        let dim = self.dims.dim;
        let (m, l) = (&mut self.maxima[into], &mut self.totals[into]);
        let other_sums = &other.sums[row * dim..(row + 1) * dim];
        let sums = &mut self.sums[into * dim..(into + 1) * dim];
        merge_row((m, l, sums), (other.maxima[row], other.totals[row], other_sums));
    }

    /// Output and log-sum-exp of what was seen. Sinks are not part of a state:
    /// [`Attention::finish_state`](crate::Attention::finish_state) adds them.
    pub fn finish(&self, order: Order) -> Result<Output> {
        let mut output = Output::zeros(self.dims, order)?;
        self.finish_into(output.as_mut())?;
        Ok(output)
    }

    /// Output and log-sum-exp of what was seen, written where `output` says.
    /// [`Attention::finish_state`](crate::Attention::finish_state) does it on several threads, and
    /// with sinks.
    pub fn finish_into<E: Element>(&self, output: OutputMut<'_, E>) -> Result<()> {
        self.finish_on(output, None, Workers::caller(), &Monitor::new(Hook::none()))
    }

    pub(crate) fn finish_on<E: Element>(
        &self,
        mut output: OutputMut<'_, E>,
        sink_logits: Option<&[f32]>,
        workers: Workers<'_>,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        check::same("out", output.out.dims(), self.dims)?;
        check::rows("lse", output.lse.len(), self.dims)?;
        check::optional_rows("lse_lo", output.lse_lo.as_deref(), self.dims)?;
        let (dims, order) = (Dims { dim: 1, ..self.dims }, Order::Bhsd);
        let out = Raw::write(&mut output.out);
        let lse = Raw::write(&mut ViewMut::new(output.lse, dims, order)?);
        let rests = output.lse_lo.map(|rests| ViewMut::new(rests, dims, order)).transpose()?;
        let rests = rests.map(|mut rests| Raw::write(&mut rests));
        rowwise::each_row(self.dims, workers, monitor, &|entry, head, token| {
            let row = (entry * self.dims.heads + head) * self.dims.tokens + token;
            let Finished { factor, lse_lo, lse: logarithm } =
                finish(self.maxima[row], self.totals[row], sink_logits.map(|logits| logits[head]));
            // SAFETY: output and lists were checked to have the rows of the state, and `each_row`
            // has one thread write each.
            unsafe {
                *lse.head(entry, head, token).first.cast_mut() = logarithm;
                if let Some(rests) = rests {
                    *rests.head(entry, head, token).first.cast_mut() = lse_lo;
                }
                let out = out.head(entry, head, token);
                let sums = &self.sums[row * self.dims.dim..][..self.dims.dim];
                for (dim, sum) in sums.iter().enumerate() {
                    *out.at(0, dim).first.cast_mut() = E::from_f32(sum * factor);
                }
            }
        })
    }

    /// The same rows, to go on from.
    pub(crate) fn as_mut(&mut self) -> StateMut<'_> {
        let State { dims, maxima, totals, sums } = self;
        StateMut::new(*dims, maxima, totals, sums).expect("checked when it was made")
    }
}

/// Partial softmaxes of rows that lie anywhere: what a forward pass goes on from, and writes.
#[derive(Debug)]
pub(crate) struct StateMut<'a> {
    /// `[batch, head, token]`, one number each.
    maxima: ViewMut<'a, f32>,
    totals: ViewMut<'a, f32>,
    /// The numbers of a row lie side by side.
    sums: ViewMut<'a, f32>,
}

impl<'a> StateMut<'a> {
    /// Rows and sums `[batch, head, token]`, contiguous.
    fn new(
        dims: Dims,
        maxima: &'a mut [f32],
        totals: &'a mut [f32],
        sums: &'a mut [f32],
    ) -> Result<Self> {
        Self::over(maxima, totals, ViewMut::new(sums, dims, Order::Bhsd)?)
    }

    /// Sums wherever they lie, if the numbers of a row lie side by side.
    pub(crate) fn over(
        maxima: &'a mut [f32],
        totals: &'a mut [f32],
        sums: ViewMut<'a, f32>,
    ) -> Result<Self> {
        // `RawState::row` makes slices of them.
        assert!(sums.strides().dim == 1 || sums.dims().dim <= 1, "numbers of a row side by side");
        let dims = Dims { dim: 1, ..sums.dims() };
        let rows = |list| ViewMut::new(list, dims, Order::Bhsd);
        Ok(StateMut { maxima: rows(maxima)?, totals: rows(totals)?, sums })
    }

    /// Rows that have seen nothing.
    pub(crate) fn clear(&mut self, workers: Workers<'_>, monitor: &Monitor<'_>) -> Result<()> {
        self.maxima.fill(f32::NEG_INFINITY);
        rowwise::clear(&mut self.totals, workers, monitor)?;
        rowwise::clear(&mut self.sums, workers, monitor)
    }

    /// All of the rows.
    pub(crate) fn reborrow(&mut self) -> StateMut<'_> {
        StateMut {
            maxima: self.maxima.reborrow(),
            totals: self.totals.reborrow(),
            sums: self.sums.reborrow(),
        }
    }

    /// Some of the rows.
    pub(crate) fn select(&mut self, selection: &Selection) -> StateMut<'_> {
        StateMut {
            maxima: self.maxima.select(selection),
            totals: self.totals.select(selection),
            sums: self.sums.select(selection),
        }
    }

    pub(crate) fn dims(&self) -> Dims {
        self.sums.dims()
    }

    /// What kernels read and write: rows of `dims`, the elements of each side by side.
    pub(crate) fn raw(&mut self) -> RawState {
        RawState {
            maxima: Raw::write(&mut self.maxima),
            totals: Raw::write(&mut self.totals),
            dim: self.sums.dims().dim,
            sums: Raw::write(&mut self.sums),
        }
    }
}

/// Joins an output over other keys, with its log-sum-exp, to `into`.
///
/// Outputs are normalised, so this is `merge` with `l = 1` and `m = lse`: what remains of a
/// partial softmax once it has left the library that made it. A `lse_lo` in `into` counts and is
/// renewed; the other log-sum-exp is taken as exact. Where both include the sinks of their heads
/// ([`Options::sink_logits`](crate::Options::sink_logits)), these count twice: give them to one of
/// both.
///
/// ```
/// use longspan::{Dims, Order, OutputMut, Tensor, merge_outputs};
///
/// let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: 1 };
/// let mut out = Tensor::new(vec![1.0], dims, Order::Bshd)?;
/// let mut lse = [0.0];
/// let other = Tensor::new(vec![4.0], dims, Order::Bshd)?;
/// // The other keys weigh twice as much.
/// let into = OutputMut { out: out.view_mut(), lse: &mut lse, lse_lo: None };
/// merge_outputs(into, other.view(), &[2.0_f32.ln()])?;
/// assert!((out.as_slice()[0] - 3.0).abs() < 1e-6);
/// assert!((lse[0] - 3.0_f32.ln()).abs() < 1e-6);
/// # Ok::<_, longspan::Error>(())
/// ```
pub fn merge_outputs<E: Element>(
    mut into: OutputMut<'_, E>,
    out: View<'_, E>,
    lse: &[f32],
) -> Result<()> {
    let dims = into.out.dims();
    check::same("the other output", out.dims(), dims)?;
    check::rows("lse", into.lse.len(), dims)?;
    check::optional_rows("lse_lo", into.lse_lo.as_deref(), dims)?;
    check::rows("the other lse", lse.len(), dims)?;
    let strides = into.out.strides();
    let target = into.out.as_mut_ptr();
    for (row, (entry, head, token)) in rows(dims).enumerate() {
        let (mine, theirs) = (into.lse[row], lse[row]);
        if theirs == f32::NEG_INFINITY {
            continue;
        }
        let greatest = if theirs > mine { theirs } else { mine };
        let rest = into.lse_lo.as_ref().map_or(0.0, |rests| f64::from(rests[row]));
        let below = |lse: f32| f64::from(lse) - f64::from(greatest);
        let (a, b) = ((below(mine) + rest).exp(), below(theirs).exp());
        let (logarithm, rest) = sum_in_two(greatest, (a + b).ln());
        into.lse[row] = logarithm;
        if let Some(rests) = &mut into.lse_lo {
            rests[row] = rest;
        }
        let (a, b) = ((a / (a + b)) as f32, (b / (a + b)) as f32);
        let offset = entry as isize * strides.batch
            + head as isize * strides.heads
            + token as isize * strides.tokens;
        for dim in 0..dims.dim {
            let theirs = out.get(entry, token, head, dim).expect("dims are the same");
            // SAFETY: `dims` are the view's, so that the index is in it; it is exclusive, and no
            // other reference to its elements is alive.
            let at = unsafe { &mut *target.offset(offset + dim as isize * strides.dim) };
            *at = match mine == f32::NEG_INFINITY {
                true => theirs,
                false => E::from_f32(at.to_f32() * a + theirs.to_f32() * b),
            };
        }
    }
    Ok(())
}

/// Batch entry, head and token of each row, in order.
fn rows(dims: Dims) -> impl Iterator<Item = (usize, usize, usize)> {
    let Dims { batch, heads, tokens, .. } = dims;
    (0..batch * heads * tokens)
        .map(move |row| (row / tokens / heads, row / tokens % heads, row % tokens))
}
