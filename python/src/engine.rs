//! What computes a call: attention over layouts, or dilated attention.

use longspan::{
    Attention, Dims, Element, GradientsMut, Hook, Inputs, OutputGradient, OutputMut, OutputRef,
    Pass,
};

/// What computes a call.
pub(crate) enum Engine {
    Attention(Attention),
    Dilated(longspan::Dilated),
}

impl Engine {
    pub(crate) fn bytes_needed<E: Element>(
        &self,
        dims: [Dims; 3],
        pass: Pass,
    ) -> longspan::Result<usize> {
        match self {
            Engine::Attention(attention) => attention.bytes_needed::<E>(dims, pass),
            Engine::Dilated(dilated) => dilated.bytes_needed::<E>(dims, pass),
        }
    }

    pub(crate) fn forward<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        output: OutputMut<'_, E>,
        hook: Hook<'_>,
    ) -> longspan::Result<()> {
        match self {
            Engine::Attention(attention) => attention.forward_into(inputs, output, hook),
            Engine::Dilated(dilated) => dilated.forward_into(inputs, output, hook),
        }
    }

    pub(crate) fn backward<E: Element>(
        &self,
        inputs: Inputs<'_, E>,
        saved: OutputRef<'_, E>,
        gradient: OutputGradient<'_, E>,
        gradients: GradientsMut<'_, E>,
        hook: Hook<'_>,
    ) -> longspan::Result<()> {
        match self {
            Engine::Attention(engine) => {
                engine.backward_into(inputs, saved, gradient, gradients, hook)
            }
            Engine::Dilated(engine) => {
                engine.backward_into(inputs, saved, gradient, gradients, hook)
            }
        }
    }
}
