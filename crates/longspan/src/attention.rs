//! Attention over a layout: what a caller writes.
//!
//! [`Attention`] is a layout plus options. Its two everyday methods are
//! [`forward`](Attention::forward) and [`backward`](Attention::backward), which allocate their
//! results; each has an `_into` twin that writes where the caller says. A ring or a mix of
//! branches uses [`extend`](Attention::extend), which goes on from a partial softmax, and
//! [`accumulate`](Attention::accumulate), which adds gradients that belong to the final statistics
//! of each row.

use std::ops::ControlFlow;
use std::sync::Arc;

use longspan_pattern::{Layout, LayoutSet};

use crate::check;
use crate::element::{Element, ElementType};
use crate::error::{Error, Result};
use crate::isa::Isa;
use crate::precision::{Numbers, Precision};
use crate::run;
use crate::score::Score;
use crate::state::State;
use crate::threads::Threads;
use crate::view::{Dims, Memory, Order, Tensor, View, ViewMut, allocatable};
use crate::workspace::Workspaces;

/// Which layout each batch entry and query head has.
#[derive(Debug, Clone)]
pub enum Layouts {
    /// One for all, however many there are.
    One(Arc<Layout>),
    /// One a batch entry and query head.
    Each(LayoutSet),
}

impl Layouts {
    /// The layout of a batch entry and query head.
    pub fn get(&self, entry: usize, head: usize) -> &Layout {
        match self {
            Layouts::One(layout) => layout,
            Layouts::Each(set) => set.get(entry, head),
        }
    }

    /// All that differ.
    pub(crate) fn distinct(&self) -> &[Arc<Layout>] {
        match self {
            Layouts::One(layout) => std::slice::from_ref(layout),
            Layouts::Each(set) => set.layouts(),
        }
    }

    /// The number of a batch entry's and query head's layout among those.
    pub(crate) fn index(&self, entry: usize, head: usize) -> usize {
        match self {
            Layouts::One(_) => 0,
            Layouts::Each(set) => set.index(entry, head),
        }
    }
}

impl From<Layout> for Layouts {
    fn from(layout: Layout) -> Self {
        Layouts::One(Arc::new(layout))
    }
}

impl From<Arc<Layout>> for Layouts {
    fn from(layout: Arc<Layout>) -> Self {
        Layouts::One(layout)
    }
}

impl From<LayoutSet> for Layouts {
    fn from(set: LayoutSet) -> Self {
        Layouts::Each(set)
    }
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

/// What [`Attention::forward`] returns.
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

/// Where [`Attention::forward_into`] writes.
#[derive(Debug)]
pub struct OutputMut<'a, E = f32> {
    /// See [`Output::out`]; any strides.
    pub out: ViewMut<'a, E>,
    /// See [`Output::lse`].
    pub lse: &'a mut [f32],
    /// See [`Output::lse_rest`]; of use to the backward pass alone.
    pub lse_rest: Option<&'a mut [f32]>,
}

/// What the forward pass found, and the gradient that arrives at it.
#[derive(Debug, Clone, Copy)]
pub struct Arrived<'a, E = f32> {
    /// The output of the forward pass.
    pub out: View<'a, E>,
    /// Its log-sum-exp, `[batch, head, token]`.
    pub lse: &'a [f32],
    /// See [`Output::lse_rest`]; 0 where it isn't at hand, at the cost that
    /// [`Attention::backward`] names.
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

/// What [`Attention::backward`] returns: gradients with axes and order as their tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<E = f32> {
    /// With respect to the queries.
    pub dq: Tensor<E>,
    /// With respect to the keys.
    pub dk: Tensor<E>,
    /// With respect to the values.
    pub dv: Tensor<E>,
}

/// Where [`Attention::backward_into`] writes and [`Attention::accumulate`] adds; any strides.
#[derive(Debug)]
pub struct GradientsMut<'a, E = f32> {
    /// With respect to the queries.
    pub dq: ViewMut<'a, E>,
    /// With respect to the keys.
    pub dk: ViewMut<'a, E>,
    /// With respect to the values.
    pub dv: ViewMut<'a, E>,
}

/// What the backward pass has to know of each row once its softmax is final, `[batch, head,
/// token]` each.
#[derive(Debug, Clone, Copy)]
pub struct RowStatistics<'a> {
    /// The log-sum-exp over *all* keys of the row, wherever they are.
    pub lse: &'a [f32],
    /// See [`Arrived::lse_rest`].
    pub lse_rest: Option<&'a [f32]>,
    /// `Σ dout · out − dlse`, as [`row_deltas`] finds it.
    pub delta: &'a [f32],
}

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Units of work that were done.
    pub done: usize,
    /// Units there are.
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
    /// [`Error::Stopped`].
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

/// Exact attention over the blocks of a layout.
///
/// `out_i = Σ_j softmax_j(scale · q_i·k_j) v_j` over the keys `j` that query `i` may see, one
/// softmax over all of them. A query that sees no key has output 0, log-sum-exp −∞ and gradient 0.
///
/// The same inputs give the same bits whatever the number of threads.
///
/// Tensors hold [elements](Element) of one type, f32, bf16 or f16. Scores, softmax, sums and
/// log-sum-exp are f32 whatever they are; a result is rounded to the type of the inputs once.
///
/// ```
/// use longspan::{Attention, Dims, Layout, Order, Pattern, Shape, Tensor};
///
/// let tokens = 1_000;
/// let pattern: Pattern = "causal & (window(128, 0) | sinks(4))".parse()?;
/// let layout = Layout::compile(&pattern, &Shape::new(tokens, tokens))?;
/// let attention = Attention::new(layout);
///
/// let dims = Dims { batch: 1, tokens: tokens as usize, heads: 2, dim: 32 };
/// let number = |i: usize| (i as f32).sin();
/// let make = |shift: usize| {
///     let data = (0..dims.elements().unwrap()).map(|i| number(i + shift)).collect();
///     Tensor::new(data, dims, Order::BatchTokenHeadDim)
/// };
/// let (q, k, v) = (make(0)?, make(1)?, make(2)?);
///
/// let output = attention.forward(q.view(), k.view(), v.view())?;
/// // The first query sees only itself.
/// assert_eq!(output.out.view().get(0, 0, 1, 5), v.view().get(0, 0, 1, 5));
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug)]
pub struct Attention {
    pub(crate) layouts: Layouts,
    pub(crate) scale: Option<f32>,
    pub(crate) score: Score,
    pub(crate) threads: Threads,
    pub(crate) isa: Option<Isa>,
    pub(crate) precision: Precision,
    pub(crate) workspaces: Arc<Workspaces>,
}

impl Attention {
    /// Attention over a [`Layout`] for every batch entry and head, or over a [`LayoutSet`].
    pub fn new(layouts: impl Into<Layouts>) -> Self {
        Attention {
            layouts: layouts.into(),
            scale: None,
            score: Score::Plain,
            threads: Threads::Auto,
            isa: None,
            precision: Precision::Fastest,
            workspaces: Arc::default(),
        }
    }

    /// What scores are multiplied by; `1/√dim` where it isn't set.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// What is done to scores before the softmax.
    #[must_use]
    pub fn score(mut self, score: Score) -> Self {
        self.score = score;
        self
    }

    /// How many threads work on a call. Results don't depend on it.
    #[must_use]
    pub fn threads(mut self, threads: Threads) -> Self {
        self.threads = threads;
        self
    }

    /// The instruction set to use, in place of the fastest one. Calls fail where the CPU hasn't
    /// got it.
    #[must_use]
    pub fn isa(mut self, isa: Isa) -> Self {
        self.isa = Some(isa);
        self
    }

    /// What products are made of, where there is a choice.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// What is stored, multiplied and accumulated in calls on tensors of `E`, on this CPU.
    pub fn numbers<E: Element>(&self) -> Result<Numbers> {
        Ok(self.precision.numbers(E::TYPE, Isa::choose(self.isa)?))
    }

    /// Works in the scratch of `other` in place of its own. Scratch never shrinks: many layouts
    /// that take turns then keep that of the largest call, not each their own.
    ///
    /// ```
    /// use longspan::{Attention, Layout, Pattern, Shape};
    ///
    /// let layout = |tokens| Layout::compile(&Pattern::causal(), &Shape::new(tokens, tokens));
    /// let long = Attention::new(layout(1_000)?);
    /// let short = Attention::new(layout(100)?).share_scratch(&long);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    #[must_use]
    pub fn share_scratch(mut self, other: &Attention) -> Self {
        self.workspaces = other.workspaces.clone();
        self
    }

    /// The layouts it runs over.
    pub fn layouts(&self) -> &Layouts {
        &self.layouts
    }

    /// Output and log-sum-exp.
    pub fn forward<E: Element>(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<Output<E>> {
        let inputs = Inputs { q, k, v };
        let dims = check::inputs(self, &inputs)?;
        let mut out = Tensor::filled(E::default(), dims.output(), q.order())?;
        let mut lse = vec![0.0; dims.output().rows()];
        let mut lse_rest = lse.clone();
        let output =
            OutputMut { out: out.view_mut(), lse: &mut lse, lse_rest: Some(&mut lse_rest) };
        self.forward_into(inputs, output, Hook::none())?;
        Ok(Output { out, lse, lse_rest })
    }

    /// Output and log-sum-exp, written where `output` says.
    pub fn forward_into<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        check::inputs(self, &inputs)?;
        check::output(&inputs, &output)?;
        run::forward(self, &inputs, run::Rows::Finish(output), hook)
    }

    /// Adds the keys of `inputs` to a partial softmax: the forward pass of a ring hop or of one
    /// branch of many. [`State::finish`] makes output and log-sum-exp of it.
    ///
    /// ```
    /// use longspan::{Attention, Dims, Hook, Inputs, Layout, Order, Pattern, Shape, State, Tensor};
    ///
    /// // Ten queries and the keys in two halves, each at its own positions.
    /// let dims = |tokens| Dims { batch: 1, tokens, heads: 1, dim: 4 };
    /// let make = |tokens: usize, shift: usize| {
    ///     let data = (0..tokens * 4).map(|i| ((i + shift) as f32).sin()).collect();
    ///     Tensor::new(data, dims(tokens), Order::BatchTokenHeadDim)
    /// };
    /// let q = make(10, 0)?;
    /// let mut state = State::empty(dims(10))?;
    /// for half in 0..2 {
    ///     let shape = Shape::new(10, 5).query_offset(0).key_offset(5 * half);
    ///     let attention = Attention::new(Layout::compile(&Pattern::causal(), &shape)?);
    ///     let (k, v) = (make(5, 20 * half as usize + 7)?, make(5, 20 * half as usize + 9)?);
    ///     let inputs = Inputs { q: q.view(), k: k.view(), v: v.view() };
    ///     attention.extend(inputs, &mut state, Hook::none())?;
    /// }
    ///
    /// let layout = Layout::compile(&Pattern::causal(), &Shape::new(10, 10))?;
    /// let (k, v) = (make(10, 7)?, make(10, 9)?);
    /// let whole = Attention::new(layout).forward(q.view(), k.view(), v.view())?;
    /// let joined = state.finish(Order::BatchTokenHeadDim)?;
    /// for (a, b) in whole.out.as_slice().iter().zip(joined.out.as_slice()) {
    ///     assert!((a - b).abs() < 1e-6);
    /// }
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn extend<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        state: &mut State,
        hook: Hook<'_>,
    ) -> Result<()> {
        let dims = check::inputs(self, &inputs)?;
        check::state(&dims, state)?;
        run::forward(self, &inputs, run::Rows::Extend(state), hook)
    }

    /// Gradients with respect to queries, keys and values.
    ///
    /// `P_ij = exp(score_ij − lse_i − lse_rest_i)` is computed from the stored log-sum-exp. With
    /// its rest, probabilities are as exact as their scores, however large those are.
    ///
    /// Without it the relative error of a row's gradients is at least that of `exp(lse_i)`, half
    /// an ulp of `lse_i`: below 1e-6 where |lse| < 16, and growing with it. Where |lse| is so large
    /// that its last bit is worth more than 1 (2²⁴), a row's probabilities may be anything from 0
    /// to 1 each; gradients stay finite.
    ///
    /// ```
    /// use longspan::{Arrived, Attention, Dims, Inputs, Layout, Order, Pattern, Shape, Tensor};
    ///
    /// let layout = Layout::compile(&Pattern::window(8, 8)?, &Shape::new(50, 50))?;
    /// let attention = Attention::new(layout);
    /// let dims = Dims { batch: 1, tokens: 50, heads: 1, dim: 8 };
    /// let data: Vec<f32> = (0..400).map(|i| (i as f32).sin()).collect();
    /// let x = Tensor::new(data, dims, Order::BatchHeadTokenDim)?;
    ///
    /// let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
    /// let output = attention.forward(inputs.q, inputs.k, inputs.v)?;
    /// let dout = Tensor::filled(1.0, dims, Order::BatchHeadTokenDim)?;
    /// let gradients = attention.backward(inputs, Arrived::of(&output, dout.view()))?;
    /// // Each row's weights sum to 1, so each column of the values' gradient sums to the tokens.
    /// let sum: f32 = gradients.dv.as_slice().iter().sum();
    /// assert!((sum - 400.0).abs() < 1e-3);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn backward<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        arrived: Arrived<'_, E>,
    ) -> Result<Gradients<E>> {
        check::inputs(self, &inputs)?;
        let like = |view: &View<'_, E>| Tensor::filled(E::default(), view.dims(), view.order());
        let (mut dq, mut dk, mut dv) = (like(&inputs.q)?, like(&inputs.k)?, like(&inputs.v)?);
        let into = GradientsMut { dq: dq.view_mut(), dk: dk.view_mut(), dv: dv.view_mut() };
        self.differentiate(inputs, arrived, into, Hook::none())?;
        Ok(Gradients { dq, dk, dv })
    }

    /// Gradients, written where `gradients` says; see [`backward`](Self::backward).
    pub fn backward_into<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        arrived: Arrived<'_, E>,
        mut gradients: GradientsMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let sizes = check::inputs(self, &inputs)?;
        let read = check::arrived(&arrived, sizes.output())?;
        check::gradients(&inputs, &read, &gradients)?;
        if E::TYPE == ElementType::F32 {
            let threads = self.threads.count()?;
            for gradient in [&mut gradients.dq, &mut gradients.dk, &mut gradients.dv] {
                run::clear(gradient, threads);
            }
        }
        self.differentiate(inputs, arrived, gradients, hook)
    }

    /// Adds gradients to what `gradients` holds. `rows` are the final statistics of each row, over
    /// all keys it has anywhere: a ring hop or one branch of many adds its part.
    pub fn accumulate<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        dout: View<'_, E>,
        rows: RowStatistics<'_>,
        gradients: GradientsMut<'_>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let dims = check::inputs(self, &inputs)?;
        check::like("dout", &dout, dims.output())?;
        check::rows("lse", rows.lse.len(), dims.output())?;
        check::optional_rows("lse_rest", rows.lse_rest, dims.output())?;
        check::rows("delta", rows.delta.len(), dims.output())?;
        let read = [
            ("dout", dout.memory()),
            ("lse", Memory::of(rows.lse)),
            ("lse_rest", Memory::of(rows.lse_rest.unwrap_or_default())),
            ("delta", Memory::of(rows.delta)),
        ];
        check::gradients(&inputs, &read, &gradients)?;
        run::backward(self, &inputs, dout, rows, gradients, hook)
    }

    /// Adds to f32 gradients that are zero; others are written, summed up in f32 before.
    fn differentiate<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        arrived: Arrived<'_, E>,
        gradients: GradientsMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let dims = check::inputs(self, &inputs)?.output();
        check::arrived(&arrived, dims)?;
        let mut delta = self.workspaces.rows(dims.rows());
        run::deltas(&arrived, &mut delta, self.threads.count()?);
        let Arrived { lse, lse_rest, .. } = arrived;
        let rows = RowStatistics { lse, lse_rest, delta: &delta };
        let GradientsMut { dq, dk, dv } = gradients;
        let result = match (dq.into_f32(), dk.into_f32(), dv.into_f32()) {
            (Ok(dq), Ok(dk), Ok(dv)) => {
                let gradients = GradientsMut { dq, dk, dv };
                self.accumulate(inputs, arrived.dout, rows, gradients, hook)
            }
            (Err(dq), Err(dk), Err(dv)) => {
                let gradients = GradientsMut { dq, dk, dv };
                self.accumulate_rounded(inputs, arrived.dout, rows, gradients, hook)
            }
            _ => unreachable!("all three have the same element type"),
        };
        self.workspaces.give_back(delta);
        result
    }

    /// Sums gradients up in f32, and rounds them once.
    fn accumulate_rounded<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        dout: View<'_, E>,
        rows: RowStatistics<'_>,
        gradients: GradientsMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let threads = self.threads.count()?;
        let GradientsMut { dq, dk, dv } = gradients;
        let order = Order::BatchHeadTokenDim;
        let sums = |dims: Dims| -> Result<Vec<f32>> {
            Ok(self.workspaces.rows(allocatable::<f32>(dims)?))
        };
        let (q_dims, k_dims, v_dims) = (dq.dims(), dk.dims(), dv.dims());
        let mut sums = [sums(q_dims)?, sums(k_dims)?, sums(v_dims)?];
        let [q, k, v] = &mut sums;
        let mut into = GradientsMut {
            dq: ViewMut::new(q, q_dims, order)?,
            dk: ViewMut::new(k, k_dims, order)?,
            dv: ViewMut::new(v, v_dims, order)?,
        };
        for gradient in [&mut into.dq, &mut into.dk, &mut into.dv] {
            run::clear(gradient, threads);
        }
        let result = self.accumulate(inputs, dout, rows, into, hook);
        if result.is_ok() {
            for (sums, mut gradient) in sums.iter().zip([dq, dk, dv]) {
                run::round(self, sums, &mut gradient, threads)?;
            }
        }
        sums.into_iter().rev().for_each(|sums| self.workspaces.give_back(sums));
        result
    }
}

/// `Σ dout · out − dlse` of each row, `[batch, head, token]`: what the softmax's own gradient
/// takes away from every score of the row.
///
/// ```
/// use longspan::{Arrived, Dims, Order, Tensor, row_deltas};
///
/// let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: 2 };
/// let out = Tensor::new(vec![1.0, 2.0], dims, Order::BatchTokenHeadDim)?;
/// let dout = Tensor::new(vec![3.0, 4.0], dims, Order::BatchTokenHeadDim)?;
/// let mut deltas = [0.0];
/// let (out, dout) = (out.view(), dout.view());
/// let arrived = Arrived { out, lse: &[0.5], lse_rest: None, dout, dlse: Some(&[1.0]) };
/// row_deltas(arrived, &mut deltas)?;
/// assert_eq!(deltas, [10.0]);
/// # Ok::<_, longspan::Error>(())
/// ```
pub fn row_deltas<E: Element>(arrived: Arrived<'_, E>, deltas: &mut [f32]) -> Result<()> {
    let dims = arrived.out.dims();
    check::arrived(&arrived, dims)?;
    check::rows("deltas", deltas.len(), dims)?;
    run::deltas(&arrived, deltas, 1);
    Ok(())
}

impl Error {
    pub(crate) fn stopped(progress: Progress) -> Self {
        Error::Stopped { done: progress.done, total: progress.total }
    }
}
