//! Memory in which the backward pass accumulates gradients.

use bytemuck::{Pod, cast_slice_mut};
use longspan::{Element, ElementType, GradientsMut, ViewMut};

use crate::error::Result;
use crate::transport::Poll;

/// Sums of the gradients of a rank's own tokens, `[batch, head, token, dim]`; zero at first.
pub(crate) struct GradientSums<'a> {
    pub(crate) dq: &'a mut [f32],
    pub(crate) dk: &'a mut [f32],
    pub(crate) dv: &'a mut [f32],
    pub(crate) biases: BiasSums<'a>,
}

/// Sums of the gradients of biases over the pairs that this rank computes.
pub(crate) struct BiasSums<'a> {
    pub(crate) table: Option<&'a mut [f32]>,
    pub(crate) slopes: Option<&'a mut [f32]>,
}

impl BiasSums<'_> {
    /// Adds them to what a call accumulates.
    pub(crate) fn with<'b>(&'b mut self, gradients: GradientsMut<'b>) -> GradientsMut<'b> {
        GradientsMut {
            dbias_table: self.table.as_deref_mut(),
            dalibi_slopes: self.slopes.as_deref_mut(),
            ..gradients
        }
    }
}

/// Zeroed f32 sums of a gradient, `[batch, head, token, dim]`: its own memory where it has this dtype
/// and order, else `temporary`.
pub(crate) fn f32_sums<'b, E: Element + Pod>(
    gradient: &'b mut ViewMut<'_, E>,
    temporary: &'b mut Vec<f32>,
    poll: &mut Poll<'_>,
) -> Result<&'b mut [f32]> {
    /// Elements that are cleared between two polls, in about a millisecond.
    const CHUNK: usize = 1 << 20;
    let elements = gradient.dims().elements().unwrap_or(0);
    match gradient.as_mut_slice() {
        Some(own) if E::TYPE == ElementType::F32 => {
            let own: &mut [f32] = cast_slice_mut(own);
            for chunk in own.chunks_mut(CHUNK) {
                chunk.fill(0.0);
                if poll().is_break() {
                    return Err(longspan::Error::Stopped { done: 0, total: 0 }.into());
                }
            }
            Ok(own)
        }
        _ => {
            *temporary = vec![0.0; elements];
            Ok(temporary)
        }
    }
}
