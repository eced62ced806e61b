//! What calls take and give: tensors to read and to write, statistics of rows, the hook.

use crate::dims::{Dims, Order};
use crate::dtype::Element;
use crate::error::Result;
use crate::tensor::{Selection, Tensor, View, ViewMut, allocatable, allocate};

/// A pass of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// From queries, keys and values to output and log-sum-exp.
    Forward,
    /// From the output's gradient to those of queries, keys and values.
    Backward,
}

/// The three tensors that attention reads.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, E = f32> {
    /// Queries.
    pub q: View<'a, E>,
    /// Keys; their heads divide those of the queries.
    pub k: View<'a, E>,
    /// Values; tokens and heads as the keys, any head dim.
    pub v: View<'a, E>,
}

impl<'a, E> Inputs<'a, E> {
    /// Queries, keys and values.
    pub fn new(q: View<'a, E>, k: View<'a, E>, v: View<'a, E>) -> Self {
        Inputs { q, k, v }
    }
}

/// What [`Attention::forward`](crate::Attention::forward) returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<E = f32> {
    /// One weighted sum of values per query: axes and order as the queries, head dim of the values.
    pub out: Tensor<E>,
    /// Natural logarithm of the sum of exponentials of each row's scores, `[batch, head, token]`;
    /// −∞ where a query sees no key. It includes the sink of the row's head, if there is one.
    pub lse: Vec<f32>,
    /// The low part of the log-sum-exp, whose f32 rounding is `lse`: `lse + lse_lo` is a
    /// double-f32. 0 where `lse` is not finite.
    pub lse_lo: Vec<f32>,
}

impl<E: Element> Output<E> {
    /// Zeros, to write an output to.
    pub fn zeros(dims: Dims, order: Order) -> Result<Self> {
        let rows = || allocate::zeros(allocatable::<f32>(Dims { dim: 1, ..dims })?);
        Ok(Output { out: Tensor::zeros(dims, order)?, lse: rows()?, lse_lo: rows()? })
    }

    /// All of it, to write.
    pub fn as_mut(&mut self) -> OutputMut<'_, E> {
        let Output { out, lse, lse_lo } = self;
        OutputMut { out: out.view_mut(), lse, lse_lo: Some(lse_lo) }
    }
}

/// Where [`Attention::forward_into`](crate::Attention::forward_into) writes.
#[derive(Debug)]
pub struct OutputMut<'a, E = f32> {
    /// See [`Output::out`]; any strides.
    pub out: ViewMut<'a, E>,
    /// See [`Output::lse`].
    pub lse: &'a mut [f32],
    /// See [`Output::lse_lo`]; of use to the backward pass alone. With it, scores of few queries are
    /// added up in that pass's order, which takes longer: leave it out where none follows.
    pub lse_lo: Option<&'a mut [f32]>,
}

impl<'a, E: Element> OutputMut<'a, E> {
    /// All rows, which go on from nothing.
    pub(crate) fn rows(self) -> Result<OutputRows<'a, E>> {
        let OutputMut { out, lse, lse_lo } = self;
        let list = |list| ViewMut::new(list, Dims { dim: 1, ..out.dims() }, Order::Bhsd);
        let (lse, lse_lo) = (list(lse)?, lse_lo.map(list).transpose()?);
        Ok(OutputRows { out, lse, lse_lo, prior: PriorState::None })
    }
}

/// Output and log-sum-exp of rows that lie anywhere: what a forward pass writes.
#[derive(Debug)]
pub(crate) struct OutputRows<'a, E> {
    pub(crate) out: ViewMut<'a, E>,
    /// `[batch, head, token]`, one number each.
    pub(crate) lse: ViewMut<'a, f32>,
    pub(crate) lse_lo: Option<ViewMut<'a, f32>>,
    pub(crate) prior: PriorState<'a>,
}

/// The state that rows go on from: where its sums are. Maxima and totals stand where log-sum-exps and
/// their rests will.
#[derive(Debug)]
pub(crate) enum PriorState<'a> {
    /// Rows have seen nothing.
    None,
    /// In the output, which is f32, with the elements of a row side by side.
    InOutput,
    /// In a tensor of their own.
    Separate(ViewMut<'a, f32>),
}

impl<E: Element> OutputRows<'_, E> {
    /// Whether a backward pass starts from them: it alone uses `lse_lo`. Rows that go on from a state
    /// have their totals there, which says nothing of it.
    pub(crate) fn are_saved(&self) -> bool {
        self.lse_lo.is_some() && matches!(self.prior, PriorState::None)
    }

    /// All of the rows, which go on from nothing.
    pub(crate) fn reborrow(&mut self) -> OutputRows<'_, E> {
        OutputRows {
            out: self.out.reborrow(),
            lse: self.lse.reborrow(),
            lse_lo: self.lse_lo.as_mut().map(ViewMut::reborrow),
            prior: PriorState::None,
        }
    }

    /// Some of the rows, which go on from nothing.
    pub(crate) fn select(&mut self, selection: &Selection) -> OutputRows<'_, E> {
        OutputRows {
            out: self.out.select(selection),
            lse: self.lse.select(selection),
            lse_lo: self.lse_lo.as_mut().map(|rests| rests.select(selection)),
            prior: PriorState::None,
        }
    }
}

/// The result of a forward pass, to read: what the backward pass starts from.
#[derive(Debug, Clone, Copy)]
pub struct OutputRef<'a, E = f32> {
    /// See [`Output::out`]; any strides.
    pub out: View<'a, E>,
    /// See [`Output::lse`].
    pub lse: &'a [f32],
    /// See [`Output::lse_lo`]; 0 where it is `None`, with the error that
    /// [`Attention::backward`](crate::Attention::backward) states.
    pub lse_lo: Option<&'a [f32]>,
}

impl<'a, E: Element> From<&'a Output<E>> for OutputRef<'a, E> {
    fn from(output: &'a Output<E>) -> Self {
        let Output { out, lse, lse_lo } = output;
        OutputRef { out: out.view(), lse, lse_lo: Some(lse_lo) }
    }
}

/// The gradient that the backward pass starts from. A view of `dout` alone converts into it.
#[derive(Debug, Clone, Copy)]
pub struct OutputGradient<'a, E = f32> {
    /// With respect to the output.
    pub dout: View<'a, E>,
    /// With respect to the log-sum-exp, `[batch, head, token]`; 0 where it is `None`.
    pub dlse: Option<&'a [f32]>,
}

impl<'a, E> From<View<'a, E>> for OutputGradient<'a, E> {
    fn from(dout: View<'a, E>) -> Self {
        OutputGradient { dout, dlse: None }
    }
}

/// What [`Attention::backward`](crate::Attention::backward) returns: gradients with axes and order
/// as their tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<E = f32> {
    /// With respect to the queries.
    pub dq: Tensor<E>,
    /// With respect to the keys.
    pub dk: Tensor<E>,
    /// With respect to the values.
    pub dv: Tensor<E>,
    /// With respect to the [sink logits](crate::Options::sink_logits), one per query head: a sum
    /// over the batch and the queries, in f32 whatever `E` is. `None` without sinks.
    pub dsink_logits: Option<Vec<f32>>,
    /// With respect to the values of the [bias table](crate::Score::bias_table), likewise.
    pub dbias_table: Option<Vec<f32>>,
    /// With respect to the [slopes](crate::Score::alibi_slopes), likewise.
    pub dalibi_slopes: Option<Vec<f32>>,
}

impl<E: Element> Gradients<E> {
    /// Zeros, to write the gradients of `inputs` to. Those of options are not among them; set them
    /// to lists of as many elements as the option has.
    ///
    /// ```
    /// use longspan::{Dims, Gradients, Inputs, Order, Tensor};
    ///
    /// let dims = Dims { batch: 1, tokens: 5, heads: 2, dim: 3 };
    /// let x = Tensor::filled(1.0_f32, dims, Order::Bhsd)?;
    /// let mut gradients = Gradients::zeros(&Inputs { q: x.view(), k: x.view(), v: x.view() })?;
    /// gradients.as_mut().dk.fill(2.0);
    /// assert_eq!((gradients.dq.view().dims(), gradients.dk.as_slice()[0]), (dims, 2.0));
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn zeros(inputs: &Inputs<'_, E>) -> Result<Self> {
        let like = |view: &View<'_, E>| Tensor::zeros(view.dims(), view.order());
        let (dq, dk, dv) = (like(&inputs.q)?, like(&inputs.k)?, like(&inputs.v)?);
        Ok(Gradients { dq, dk, dv, dsink_logits: None, dbias_table: None, dalibi_slopes: None })
    }

    /// All of them, to write.
    pub fn as_mut(&mut self) -> GradientsMut<'_, E> {
        let Gradients { dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes } = self;
        GradientsMut {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            dsink_logits: dsink_logits.as_deref_mut(),
            dbias_table: dbias_table.as_deref_mut(),
            dalibi_slopes: dalibi_slopes.as_deref_mut(),
        }
    }
}

/// Where [`Attention::backward_into`](crate::Attention::backward_into) writes and
/// [`Attention::accumulate`](crate::Attention::accumulate) adds; any strides.
#[derive(Debug)]
pub struct GradientsMut<'a, E = f32> {
    /// With respect to the queries.
    pub dq: ViewMut<'a, E>,
    /// With respect to the keys.
    pub dk: ViewMut<'a, E>,
    /// With respect to the values.
    pub dv: ViewMut<'a, E>,
    /// See [`Gradients::dsink_logits`]; not computed where it is `None`.
    /// [`Attention::accumulate`](crate::Attention::accumulate) refuses it.
    pub dsink_logits: Option<&'a mut [f32]>,
    /// See [`Gradients::dbias_table`]; not computed where it is `None`.
    pub dbias_table: Option<&'a mut [f32]>,
    /// See [`Gradients::dalibi_slopes`]; not computed where it is `None`.
    pub dalibi_slopes: Option<&'a mut [f32]>,
}

impl<'a, E> GradientsMut<'a, E> {
    /// Gradients of queries, keys and values.
    pub fn new(dq: ViewMut<'a, E>, dk: ViewMut<'a, E>, dv: ViewMut<'a, E>) -> Self {
        GradientsMut { dq, dk, dv, dsink_logits: None, dbias_table: None, dalibi_slopes: None }
    }
}

impl<E: Element> GradientsMut<'_, E> {
    /// The same gradients, for a shorter time.
    pub(crate) fn reborrow(&mut self) -> GradientsMut<'_, E> {
        GradientsMut {
            dq: self.dq.reborrow(),
            dk: self.dk.reborrow(),
            dv: self.dv.reborrow(),
            dsink_logits: self.dsink_logits.as_deref_mut(),
            dbias_table: self.dbias_table.as_deref_mut(),
            dalibi_slopes: self.dalibi_slopes.as_deref_mut(),
        }
    }
}
