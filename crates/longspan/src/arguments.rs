//! What calls take and give: tensors to read and to write, statistics of rows, the hook.

use std::ops::ControlFlow;

use crate::check;
use crate::element::Element;
use crate::error::Result;
use crate::view::{Dims, Order, Tensor, View, ViewMut, allocatable, allocate};

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

/// What [`Attention::forward`](crate::Attention::forward) returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Output<E = f32> {
    /// One weighted sum of values a query: axes and order as the queries, head dim of the values.
    pub out: Tensor<E>,
    /// Natural logarithm of the sum of exponentials of each row's scores, `[batch, head, token]`;
    /// −∞ where a query sees no key.
    pub lse: Vec<f32>,
    /// What rounding `lse` to f32 left out, a number for each of its: the logarithm is
    /// `lse + lse_rest`, to f32's precision of the *sum*, however large `lse` is. 0 where `lse`
    /// isn't finite.
    pub lse_rest: Vec<f32>,
}

impl<E: Element> Output<E> {
    /// Zeros, to write an output to.
    pub fn zeros(dims: Dims, order: Order) -> Result<Self> {
        let rows = || allocate::zeros(allocatable::<f32>(Dims { dim: 1, ..dims })?);
        Ok(Output { out: Tensor::zeros(dims, order)?, lse: rows()?, lse_rest: rows()? })
    }

    /// All of it, to write.
    pub fn as_mut(&mut self) -> OutputMut<'_, E> {
        let Output { out, lse, lse_rest } = self;
        OutputMut { out: out.view_mut(), lse, lse_rest: Some(lse_rest) }
    }
}

/// Where [`Attention::forward_into`](crate::Attention::forward_into) writes.
#[derive(Debug)]
pub struct OutputMut<'a, E = f32> {
    /// See [`Output::out`]; any strides.
    pub out: ViewMut<'a, E>,
    /// See [`Output::lse`].
    pub lse: &'a mut [f32],
    /// See [`Output::lse_rest`]; of use to the backward pass alone.
    pub lse_rest: Option<&'a mut [f32]>,
}

impl<E: Element> OutputMut<'_, E> {
    /// Refuses what has not the shapes of an output of `inputs`, and memory that is theirs or is
    /// named twice. Calls of this library do it themselves; this is for who writes to it otherwise.
    pub fn check(&self, inputs: &Inputs<'_, E>) -> Result<()> {
        check::output(inputs, self)
    }
}

/// What the forward pass found, and the gradient that arrives at it.
#[derive(Debug, Clone, Copy)]
pub struct Arrived<'a, E = f32> {
    /// The output of the forward pass.
    pub out: View<'a, E>,
    /// Its log-sum-exp, `[batch, head, token]`.
    pub lse: &'a [f32],
    /// See [`Output::lse_rest`]; 0 where it isn't at hand, at the cost that
    /// [`Attention::backward`](crate::Attention::backward) names.
    pub lse_rest: Option<&'a [f32]>,
    /// Gradient with respect to the output.
    pub dout: View<'a, E>,
    /// Gradient with respect to the log-sum-exp, where there is one.
    pub dlse: Option<&'a [f32]>,
}

impl<'a, E: Element> Arrived<'a, E> {
    /// All that the forward pass found, and the gradient of its output.
    pub fn of(output: &'a Output<E>, dout: View<'a, E>) -> Self {
        let Output { out, lse, lse_rest } = output;
        Arrived { out: out.view(), lse, lse_rest: Some(lse_rest), dout, dlse: None }
    }
}

/// What [`Attention::backward`](crate::Attention::backward) returns: gradients with axes and order as their tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<E = f32> {
    /// With respect to the queries.
    pub dq: Tensor<E>,
    /// With respect to the keys.
    pub dk: Tensor<E>,
    /// With respect to the values.
    pub dv: Tensor<E>,
}

impl<E: Element> Gradients<E> {
    /// Zeros, to write the gradients of `inputs` to.
    ///
    /// ```
    /// use longspan::{Dims, Gradients, Inputs, Order, Tensor};
    ///
    /// let dims = Dims { batch: 1, tokens: 5, heads: 2, dim: 3 };
    /// let x = Tensor::filled(1.0_f32, dims, Order::BatchHeadTokenDim)?;
    /// let mut gradients = Gradients::zeros(&Inputs { q: x.view(), k: x.view(), v: x.view() })?;
    /// gradients.as_mut().dk.fill(2.0);
    /// assert_eq!((gradients.dq.view().dims(), gradients.dk.as_slice()[0]), (dims, 2.0));
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn zeros(inputs: &Inputs<'_, E>) -> Result<Self> {
        let like = |view: &View<'_, E>| Tensor::zeros(view.dims(), view.order());
        Ok(Gradients { dq: like(&inputs.q)?, dk: like(&inputs.k)?, dv: like(&inputs.v)? })
    }

    /// All of them, to write.
    pub fn as_mut(&mut self) -> GradientsMut<'_, E> {
        let Gradients { dq, dk, dv } = self;
        GradientsMut { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() }
    }
}

/// Where [`Attention::backward_into`](crate::Attention::backward_into) writes and [`Attention::accumulate`](crate::Attention::accumulate) adds; any strides.
#[derive(Debug)]
pub struct GradientsMut<'a, E = f32> {
    /// With respect to the queries.
    pub dq: ViewMut<'a, E>,
    /// With respect to the keys.
    pub dk: ViewMut<'a, E>,
    /// With respect to the values.
    pub dv: ViewMut<'a, E>,
}

impl<E: Element> GradientsMut<'_, E> {
    /// Refuses what has not the shapes of `inputs` and of what arrived, and memory that is theirs or
    /// is named twice: see [`OutputMut::check`].
    pub fn check(&self, inputs: &Inputs<'_, E>, arrived: &Arrived<'_, E>) -> Result<()> {
        let dims = Dims { dim: inputs.v.dims().dim, ..inputs.q.dims() };
        let read = check::arrived(arrived, dims)?;
        check::gradients(inputs, &read, self)
    }
}

/// What the backward pass has to know of each row once its softmax is final, `[batch, head,
/// token]` each.
#[derive(Debug, Clone, Copy)]
pub struct RowStatistics<'a> {
    /// The log-sum-exp over *all* keys of the row, wherever they are.
    pub lse: &'a [f32],
    /// See [`Arrived::lse_rest`].
    pub lse_rest: Option<&'a [f32]>,
    /// `Σ dout · out − dlse`, as [`row_deltas`](crate::row_deltas) finds it.
    pub delta: &'a [f32],
}

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Units of work that were done.
    pub done: usize,
    /// Units there are; 0 while the call is still preparing them.
    pub total: usize,
}

/// Called between tiles, on the thread that made the call: to poll a message engine, to show
/// progress, to stop.
///
/// ```
/// use std::ops::ControlFlow;
/// use longspan::Hook;
///
/// let mut polls = 0;
/// let mut poll = |_| {
///     polls += 1;
///     ControlFlow::Continue(())
/// };
/// let hook = Hook::new(&mut poll);
/// # drop(hook);
/// let nothing = Hook::none();
/// ```
pub struct Hook<'a>(pub(crate) Option<&'a mut dyn FnMut(Progress) -> ControlFlow<()>>);

impl<'a> Hook<'a> {
    /// Calls `between` every few tiles. [`ControlFlow::Break`] ends the call with
    /// [`Error::Stopped`](crate::Error::Stopped).
    pub fn new(between: &'a mut dyn FnMut(Progress) -> ControlFlow<()>) -> Self {
        Hook(Some(between))
    }

    /// Calls nothing.
    pub fn none() -> Self {
        Hook(None)
    }

    /// The same, for one call of several.
    pub fn reborrow(&mut self) -> Hook<'_> {
        Hook(self.0.as_mut().map(|between| &mut **between as _))
    }
}

impl std::fmt::Debug for Hook<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hook({})", if self.0.is_some() { "_" } else { "none" })
    }
}
