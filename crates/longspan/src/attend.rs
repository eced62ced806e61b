//! One interface for attention of every kind.

use crate::arguments::{
    Gradients, GradientsMut, Inputs, Output, OutputGradient, OutputMut, OutputRef, Pass,
};
use crate::attention::Attention;
use crate::dilated::Dilated;
use crate::dims::Dims;
use crate::dtype::Element;
use crate::error::Result;
use crate::exec::Hook;
use crate::options::Options;

/// Attention of any kind: [`Attention`] over layouts or [`Dilated`] attention over branches.
///
/// Code that only runs attention takes this trait, so that callers choose the kind.
///
/// ```
/// use longspan::{Attend, Attention, Dilated, Dims, Inputs, Layout, Order, Pattern, Shape, Tensor};
///
/// fn mean(attention: &impl Attend, x: &Tensor<f32>) -> Result<f32, longspan::Error> {
///     let output = attention.forward(Inputs::new(x.view(), x.view(), x.view()))?;
///     Ok(output.out.as_slice().iter().sum::<f32>() / output.out.as_slice().len() as f32)
/// }
///
/// let dims = Dims { batch: 1, tokens: 64, heads: 2, dim: 8 };
/// let x = Tensor::filled(0.5, dims, Order::Bhsd)?;
/// let window = Layout::compile(&Pattern::window(8, 8)?, &Shape::new(64, 64))?;
/// assert_eq!(mean(&Attention::new(window), &x)?, 0.5);
/// assert_eq!(mean(&Dilated::new([(16, 1), (64, 4)])?, &x)?, 0.5);
/// # Ok::<_, longspan::Error>(())
/// ```
pub trait Attend: Send + Sync {
    /// The same attention with changed options: for parameters that change from call to call. It
    /// shares layouts and workspaces with this one.
    ///
    /// ```
    /// use longspan::{Attend, Dilated};
    ///
    /// let dilated = Dilated::new([(16, 1), (64, 4)])?.softcap(30.0);
    /// let biased = dilated.with_options(|options| options.alibi_slopes([0.5, 0.25]));
    /// # Ok::<_, longspan::Error>(())
    /// ```
    #[must_use]
    fn with_options(&self, change: impl FnOnce(Options) -> Options) -> Self
    where
        Self: Sized;

    /// See [`Attention::bytes_needed`].
    fn bytes_needed<E: Element>(&self, dims: [Dims; 3], pass: Pass) -> Result<usize>;

    /// See [`Attention::forward`].
    fn forward<E: Element>(&self, inputs: Inputs<'_, E>) -> Result<Output<E>>;

    /// See [`Attention::forward_into`].
    fn forward_into<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()>;

    /// See [`Attention::backward`].
    fn backward<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputRef<'_, E>,
        gradient: OutputGradient<'_, E>,
    ) -> Result<Gradients<E>>;

    /// See [`Attention::backward_into`].
    fn backward_into<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputRef<'_, E>,
        gradient: OutputGradient<'_, E>,
        gradients: GradientsMut<'_, E>,
        hook: Hook<'_>,
    ) -> Result<()>;
}

macro_rules! implement {
    ($($kind:ident),*) => {$(
        impl Attend for $kind {
            fn with_options(&self, change: impl FnOnce(Options) -> Options) -> Self {
                self.clone().options(change(self.options.clone()))
            }

            fn bytes_needed<E: Element>(&self, dims: [Dims; 3], pass: Pass) -> Result<usize> {
                $kind::bytes_needed::<E>(self, dims, pass)
            }

            fn forward<E: Element>(&self, inputs: Inputs<'_, E>) -> Result<Output<E>> {
                $kind::forward(self, inputs)
            }

            fn forward_into<E: Element>(
                &self,
                inputs: Inputs<'_, E>,
                output: OutputMut<'_, E>,
                hook: Hook<'_>,
            ) -> Result<()> {
                $kind::forward_into(self, inputs, output, hook)
            }

            fn backward<E: Element>(
                &self,
                inputs: Inputs<'_, E>,
                output: OutputRef<'_, E>,
                gradient: OutputGradient<'_, E>,
            ) -> Result<Gradients<E>> {
                $kind::backward(self, inputs, output, gradient)
            }

            fn backward_into<E: Element>(
                &self,
                inputs: Inputs<'_, E>,
                output: OutputRef<'_, E>,
                gradient: OutputGradient<'_, E>,
                gradients: GradientsMut<'_, E>,
                hook: Hook<'_>,
            ) -> Result<()> {
                $kind::backward_into(self, inputs, output, gradient, gradients, hook)
            }
        }
    )*};
}

implement!(Attention, Dilated);
