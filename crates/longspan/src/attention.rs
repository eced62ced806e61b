//! Attention over a layout: what a caller writes.
//!
//! [`Attention`] is a layout plus options. Its two everyday methods are
//! [`forward`](Attention::forward) and [`backward`](Attention::backward), which allocate their
//! results; each has an `_into` twin that writes where the caller says. A ring or a mix of
//! branches uses [`extend`](Attention::extend), which goes on from a partial softmax, and
//! [`accumulate`](Attention::accumulate), which adds gradients that belong to the final statistics
//! of each row.

use std::sync::Arc;

use crate::arguments::{
    Gradients, GradientsMut, Inputs, Output, OutputGradient, OutputMut, OutputRef, Pass,
};
use crate::check;
use crate::components::{self, Kept, List, SplitKey};
use crate::dims::{Dims, Sizes};
use crate::driver::{self, gradients};
use crate::dtype::Element;
use crate::error::Result;
use crate::exec::{Hook, Monitor, Workers};
use crate::layouts::Layouts;
use crate::options::{Options, setters};
use crate::rowwise;
use crate::softmax::RowStatistics;
use crate::state::State;
use crate::tensor::{View, ViewMut};
use crate::workspace::Workspace;

/// Exact attention over the blocks of a layout.
///
/// `out_i = Σ_j softmax_j(scale · q_i·k_j) v_j` over the keys `j` that query `i` may see, one
/// softmax over all of them. A query that sees no key has output 0, log-sum-exp −∞ and gradient 0.
///
/// With [sink logits](Attention::sink_logits) the softmax has one term more, of value 0.
///
/// The same inputs give the same bits whatever the number of threads.
///
/// Tensors hold [elements](Element) of one type, f32, bf16 or f16. Scores, softmax, sums and
/// log-sum-exp are f32 whatever they are; a result is rounded to the type of the inputs once.
///
/// ```
/// use longspan::{Attention, Dims, Inputs, Layout, Order, Pattern, Shape, Tensor};
///
/// let tokens = 1_000;
/// let pattern: Pattern = "causal & (window(128, 0) | sinks(4))".parse()?;
/// let layout = Layout::compile(&pattern, &Shape::new(tokens, tokens))?;
/// let attention = Attention::new(layout);
///
/// let dims = Dims { batch: 1, tokens, heads: 2, dim: 32 };
/// let number = |i: usize| (i as f32).sin();
/// let make = |shift: usize| {
///     let data = (0..dims.elements().unwrap()).map(|i| number(i + shift)).collect();
///     Tensor::new(data, dims, Order::Bshd)
/// };
/// let (q, k, v) = (make(0)?, make(1)?, make(2)?);
///
/// let output = attention.forward(Inputs::new(q.view(), k.view(), v.view()))?;
/// // The first query attends to its own key alone.
/// let (out, value) = (output.out.view().get(0, 0, 1, 5), v.view().get(0, 0, 1, 5));
/// assert!((out.unwrap() - value.unwrap()).abs() <= f32::EPSILON);
/// # Ok::<_, longspan::Error>(())
/// ```
///
/// A clone shares layouts and workspaces with what it is a clone of.
#[derive(Debug, Clone)]
pub struct Attention {
    pub(crate) layouts: Layouts,
    pub(crate) options: Options,
    kept: Kept<SplitKey>,
}

impl Attention {
    /// Attention over a [`Layout`](crate::Layout) for every batch entry and head, or over a
    /// [`LayoutSet`](crate::LayoutSet).
    pub fn new(layouts: impl Into<Layouts>) -> Self {
        Attention { layouts: layouts.into(), options: Options::default(), kept: Kept::default() }
    }

    setters!(options);

    /// Whether `strided` and `dilated` terms of patterns are computed in an order of positions in which
    /// they are dense ([`Layout::split`](crate::Layout::split)): wherever there are such terms, or
    /// nowhere. By default where a cost model finds that faster. Outputs differ by rounding.
    ///
    /// ```
    /// use longspan::{Attention, Dims, Inputs, Layout, Order, Shape, Tensor};
    ///
    /// let layout = Layout::compile(&"strided(16) | window(8, 8)".parse()?, &Shape::new(500, 500))?;
    /// let dims = Dims { batch: 1, tokens: 500, heads: 1, dim: 8 };
    /// let data: Vec<f32> = (0..4_000).map(|i| (i as f32).sin()).collect();
    /// let x = Tensor::new(data, dims, Order::Bhsd)?;
    /// let inputs = Inputs::new(x.view(), x.view(), x.view());
    /// let attention = Attention::new(layout);
    /// let split = attention.clone().split(true).forward(inputs)?;
    /// let whole = attention.split(false).forward(inputs)?;
    /// for (a, b) in split.out.as_slice().iter().zip(whole.out.as_slice()) {
    ///     assert!((a - b).abs() < 1e-6);
    /// }
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn split(mut self, split: impl Into<Option<bool>>) -> Self {
        self.options.split = split.into();
        self
    }

    /// The layouts it runs over.
    pub fn layouts(&self) -> &Layouts {
        &self.layouts
    }

    /// Output and log-sum-exp.
    pub fn forward<E: Element>(&self, inputs: Inputs<'_, E>) -> Result<Output<E>> {
        let dims = check::inputs(&self.options, &self.layouts, &inputs)?.output();
        let mut output = Output::zeros(dims, inputs.q.order())?;
        self.forward_into(inputs, output.as_mut(), Hook::none())?;
        Ok(output)
    }

    /// Output and log-sum-exp, written where `output` says.
    pub fn forward_into<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let sizes = check::inputs(&self.options, &self.layouts, &inputs)?;
        check::output(&inputs, &output)?;
        let monitor = Monitor::new(hook);
        match self.components::<E>(&sizes, &monitor)? {
            Some(list) => components::forward_into(&list, &self.options, &inputs, output, &monitor),
            None => {
                let rows = driver::Target::Finish(output.rows()?);
                driver::forward(&self.options, &self.layouts, &inputs, rows, &monitor)
            }
        }
    }

    /// The components that layouts are computed as, where they are not computed as they are.
    fn components<E: Element>(
        &self,
        sizes: &Sizes,
        monitor: &Monitor<'_>,
    ) -> Result<Option<Arc<List>>> {
        let (options, layouts) = (&self.options, &self.layouts);
        components::split(options, E::TYPE, layouts, sizes, &self.kept, monitor)
    }

    /// Bytes that the first call of a pass over queries, keys and values of these dims allocates:
    /// its results, and the workspace of as many threads as the options ask for. The layouts, which
    /// exist already, are not counted.
    ///
    /// Later calls of the same dims find the workspace, and [`forward_into`](Self::forward_into) and
    /// [`backward_into`](Self::backward_into) allocate no results. Inputs with values that are not
    /// finite take a few pages per thread more.
    ///
    /// ```
    /// use longspan::{Attention, Dims, Layout, Pass, Pattern, Shape};
    ///
    /// let layout = Layout::compile(&Pattern::sliding_window(512)?, &Shape::new(100_000, 100_000))?;
    /// let dims = Dims { batch: 1, tokens: 100_000, heads: 8, dim: 64 };
    /// let attention = Attention::new(layout).threads(1);
    /// let bytes = attention.bytes_needed::<f32>([dims; 3], Pass::Forward)?;
    /// let tensor = dims.elements().unwrap() * 4;
    /// assert!(tensor < bytes && bytes < tensor + tensor / 10);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn bytes_needed<E: Element>(&self, dims: [Dims; 3], pass: Pass) -> Result<usize> {
        let element = [E::default()];
        let inputs = driver::bytes::inputs(&element, dims)?;
        let sizes = check::inputs(&self.options, &self.layouts, &inputs)?;
        if let Some(list) = self.components::<E>(&sizes, &Monitor::new(Hook::none()))? {
            return components::bytes_needed(&list, &self.options, &inputs, &sizes, pass);
        }
        let (options, layouts, space) = (&self.options, &self.layouts, &mut Workspace::default());
        let workspace = match pass {
            Pass::Forward => driver::forward_bytes(options, layouts, &inputs, space)?,
            Pass::Backward => driver::backward_bytes(options, layouts, &inputs, space)?,
        };
        Ok(driver::bytes::of_results::<E>(options, &sizes, pass) + workspace)
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
    ///     Tensor::new(data, dims(tokens), Order::Bshd)
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
    /// let whole = Attention::new(layout).forward(Inputs::new(q.view(), k.view(), v.view()))?;
    /// let joined = state.finish(Order::Bshd)?;
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
        let sizes = check::inputs(&self.options, &self.layouts, &inputs)?;
        check::same("the state", state.dims(), sizes.output())?;
        let monitor = Monitor::new(hook);
        match self.components::<E>(&sizes, &monitor)? {
            Some(list) => {
                components::extend(&list, &self.options, &inputs, &mut state.as_mut(), &monitor)
            }
            None => {
                let rows = driver::Target::Extend(state.as_mut());
                driver::forward(&self.options, &self.layouts, &inputs, rows, &monitor)
            }
        }
    }

    /// Gradients with respect to queries, keys, values and sink logits, if there are any.
    ///
    /// `P_ij = exp(score_ij − lse_i − lse_lo_i)` is computed from the stored log-sum-exp. With
    /// its low part, probabilities are as exact as their scores, however large those are.
    ///
    /// Without it the relative error of a row's gradients is at least that of `exp(lse_i)`, half
    /// an ulp of `lse_i`: below 1e-6 where |lse| < 16, and growing with it. Where |lse| is so large
    /// that its last bit is worth more than 1 (2²⁴), a row's probabilities may be anything from 0
    /// to 1 each; gradients stay finite.
    ///
    /// ```
    /// use longspan::{Attention, Dims, Inputs, Layout, Order, Pattern, Shape, Tensor};
    ///
    /// let layout = Layout::compile(&Pattern::window(8, 8)?, &Shape::new(50, 50))?;
    /// let attention = Attention::new(layout);
    /// let dims = Dims { batch: 1, tokens: 50, heads: 1, dim: 8 };
    /// let data: Vec<f32> = (0..400).map(|i| (i as f32).sin()).collect();
    /// let x = Tensor::new(data, dims, Order::Bhsd)?;
    ///
    /// let inputs = Inputs { q: x.view(), k: x.view(), v: x.view() };
    /// let output = attention.forward(inputs)?;
    /// let dout = Tensor::filled(1.0, dims, Order::Bhsd)?;
    /// let gradients = attention.backward(inputs, &output, dout.view())?;
    /// // Each row's weights sum to 1, so each column of the values' gradient sums to the tokens.
    /// let sum: f32 = gradients.dv.as_slice().iter().sum();
    /// assert!((sum - 400.0).abs() < 1e-3);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn backward<'a, E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: impl Into<OutputRef<'a, E>>,
        gradient: impl Into<OutputGradient<'a, E>>,
    ) -> Result<Gradients<E>> {
        let mut gradients = self.zero_gradients(&inputs)?;
        let monitor = Monitor::new(Hook::none());
        self.differentiate(inputs, output.into(), gradient.into(), gradients.as_mut(), &monitor)?;
        Ok(gradients)
    }

    /// Gradients, written where `gradients` says; see [`backward`](Self::backward).
    pub fn backward_into<'a, E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: impl Into<OutputRef<'a, E>>,
        gradient: impl Into<OutputGradient<'a, E>>,
        mut gradients: GradientsMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        let sizes = check::inputs(&self.options, &self.layouts, &inputs)?;
        let (output, gradient) = (output.into(), gradient.into());
        let read = check::backward(&output, &gradient, sizes.output())?;
        check::gradients(&inputs, &read, &gradients)?;
        check::option_gradients(&self.options, &gradients)?;
        let monitor = Monitor::new(hook);
        gradients::clear(&self.options, &mut gradients, &monitor)?;
        self.differentiate(inputs, output, gradient, gradients, &monitor)
    }

    /// Zeros, to write the gradients of `inputs` and of all options that have gradients to.
    pub fn zero_gradients<E: Element>(&self, inputs: &Inputs<'_, E>) -> Result<Gradients<E>> {
        gradients::zeros(&self.options, inputs)
    }

    /// Adds gradients to what `gradients` holds. `rows` are the final statistics of each row, over
    /// all keys it has anywhere: a ring hop or one branch of many adds its part. Sinks belong to
    /// whole rows: their gradients are those of [`sink_gradients`](Self::sink_gradients).
    pub fn accumulate<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        dout: View<'_, E>,
        rows: RowStatistics<'_>,
        gradients: GradientsMut<'_>,
        hook: Hook<'_>,
    ) -> Result<()> {
        self.add_gradients(inputs, dout, rows, gradients, &Monitor::new(hook))
    }

    fn add_gradients<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        dout: View<'_, E>,
        rows: RowStatistics<'_>,
        gradients: GradientsMut<'_>,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let sizes = check::inputs(&self.options, &self.layouts, &inputs)?;
        check::statistics(&dout, &rows, sizes.output())?;
        check::accumulated(&self.options, &inputs, &dout, &rows, &gradients)?;
        let Attention { layouts, options, .. } = self;
        match self.components::<E>(&sizes, monitor)? {
            Some(list) => {
                components::accumulate(&list, options, &inputs, dout, rows, gradients, monitor)
            }
            None => driver::backward(options, layouts, &inputs, dout, rows, gradients, monitor),
        }
    }

    /// Forgets what the rows of a state have seen, on the threads of this attention.
    pub fn clear_state(&self, state: &mut State, hook: Hook<'_>) -> Result<()> {
        state.as_mut().clear(self.options.workers()?, &Monitor::new(hook))
    }

    /// [`State::finish_into`] on the threads of this attention, and with its
    /// [sink logits](Self::sink_logits), which a state does not have before.
    ///
    /// ```
    /// use longspan::{Attention, Dims, Hook, Layout, Order, Output, Pattern, Shape, State};
    ///
    /// let layout = Layout::compile(&Pattern::full(), &Shape::new(1, 1))?;
    /// let attention = Attention::new(layout).sink_logits([0.0]);
    /// // One key with score 0 and value 3, as likely as the sink.
    /// let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: 1 };
    /// let state = State::from_parts(dims, vec![0.0], vec![1.0], vec![3.0])?;
    /// let mut output = Output::<f32>::zeros(dims, Order::Bhsd)?;
    /// attention.finish_state(&state, output.as_mut(), Hook::none())?;
    /// assert_eq!(output.out.as_slice(), [1.5]);
    /// assert_eq!(output.lse, [2.0_f32.ln()]);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn finish_state<E: Element>(
        &self,
        state: &State,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        self.options.check_sink_logits(state.dims().heads)?;
        let sink_logits = self.options.sink_logits.as_deref();
        state.finish_on(output, sink_logits, self.options.workers()?, &Monitor::new(hook))
    }

    /// Gradients with respect to the sink logits, one per query head, written to `into`: what rows
    /// of these `dims` contribute, given their final statistics. [`backward`](Self::backward) has
    /// them already; this is for those who [`accumulate`](Self::accumulate).
    ///
    /// `−Σ exp(s − lse) · delta` over the batch and the queries of a head, summed in f64 and in the
    /// same order for any number of threads.
    ///
    /// ```
    /// use longspan::{Attention, Dims, Hook, Layout, Pattern, RowStatistics, Shape};
    ///
    /// let layout = Layout::compile(&Pattern::full(), &Shape::new(1, 1))?;
    /// let attention = Attention::new(layout).sink_logits([0.0]);
    /// let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: 1 };
    /// // The sink has half of the probability.
    /// let rows = RowStatistics { lse: &[2.0_f32.ln()], lse_lo: None, delta: &[3.0] };
    /// let mut gradient = [0.0];
    /// attention.sink_gradients(dims, rows, &mut gradient, Hook::none())?;
    /// assert!((gradient[0] + 1.5).abs() < 1e-6);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn sink_gradients(
        &self,
        dims: Dims,
        rows: RowStatistics<'_>,
        into: &mut [f32],
        hook: Hook<'_>,
    ) -> Result<()> {
        check::rows("lse", rows.lse.len(), dims)?;
        check::optional_rows("lse_lo", rows.lse_lo, dims)?;
        check::rows("delta", rows.delta.len(), dims)?;
        gradients::sink_gradients(&self.options, dims, rows, into, &Monitor::new(hook))
    }

    /// [`row_deltas`] on the threads of this attention.
    pub fn row_deltas<'a, E: Element>(
        &self,
        output: impl Into<OutputRef<'a, E>>,
        gradient: impl Into<OutputGradient<'a, E>>,
        deltas: &mut [f32],
        hook: Hook<'_>,
    ) -> Result<()> {
        let (output, gradient) = (output.into(), gradient.into());
        let dims = output.out.dims();
        check::backward(&output, &gradient, dims)?;
        check::rows("deltas", deltas.len(), dims)?;
        rowwise::deltas(output, gradient, deltas, self.options.workers()?, &Monitor::new(hook))
    }

    /// Writes f32 `sums`, `[batch, head, token, dim]`, rounded to the elements of `into`, on the
    /// threads of this attention.
    pub fn round<E: Element>(
        &self,
        sums: &[f32],
        mut into: ViewMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()> {
        check::elements("the list of sums", sums.len(), into.dims())?;
        rowwise::round(&self.options, sums, &mut into, &Monitor::new(hook))
    }

    /// Adds to f32 gradients that are zero; others are written.
    fn differentiate<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputRef<'_, E>,
        gradient: OutputGradient<'_, E>,
        gradients: GradientsMut<'_, E>,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let dims = check::inputs(&self.options, &self.layouts, &inputs)?.output();
        let add = |rows: RowStatistics<'_>, gradients: GradientsMut<'_>| {
            self.add_gradients(inputs, gradient.dout, rows, gradients, monitor)
        };
        gradients::differentiate(&self.options, dims, (output, gradient), gradients, monitor, add)
    }
}

/// `Σ dout · out − dlse` of each row, `[batch, head, token]`: what the softmax's own gradient
/// takes away from every score of the row.
///
/// ```
/// use longspan::{Dims, Order, OutputGradient, OutputRef, Tensor, row_deltas};
///
/// let dims = Dims { batch: 1, tokens: 1, heads: 1, dim: 2 };
/// let out = Tensor::new(vec![1.0, 2.0], dims, Order::Bshd)?;
/// let dout = Tensor::new(vec![3.0, 4.0], dims, Order::Bshd)?;
/// let mut deltas = [0.0];
/// let output = OutputRef { out: out.view(), lse: &[0.5], lse_lo: None };
/// let gradient = OutputGradient { dout: dout.view(), dlse: Some(&[1.0]) };
/// row_deltas(output, gradient, &mut deltas)?;
/// assert_eq!(deltas, [10.0]);
/// # Ok::<_, longspan::Error>(())
/// ```
pub fn row_deltas<'a, E: Element>(
    output: impl Into<OutputRef<'a, E>>,
    gradient: impl Into<OutputGradient<'a, E>>,
    deltas: &mut [f32],
) -> Result<()> {
    let (output, gradient) = (output.into(), gradient.into());
    let dims = output.out.dims();
    check::backward(&output, &gradient, dims)?;
    check::rows("deltas", deltas.len(), dims)?;
    rowwise::deltas(output, gradient, deltas, Workers::caller(), &Monitor::new(Hook::none()))
}
