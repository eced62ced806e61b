//! LongNet's dilated attention on candle's tensors.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use longspan::Dilated;

use crate::call;
use crate::tensor::foreign;

/// Dilated attention as LongNet defines it: what a layer of a model holds.
///
/// Branches, what they are cut with, how often a key counts and all other choices are those of the
/// [`Dilated`] that it is made from. Layouts are compiled for each new length; those of the last few
/// are kept. With fewer queries than keys the queries are the *last* positions.
///
/// ```
/// use candle_core::{Device, Error, Tensor, Var};
/// use longspan_candle::DilatedAttention;
/// use longspan_candle::longspan::{Branch, Dilated, Pattern};
///
/// let branches = [(256, 1), (512, 2), (1_024, 4)].map(|(w, r)| Branch::new(w, r).unwrap());
/// let dilated = Dilated::new(branches).map_err(Error::wrap)?.within(Pattern::causal());
/// let attention = DilatedAttention::from(dilated);
///
/// // (batch, tokens, heads, dim), as a projection makes it, read where it lies.
/// let x = Var::randn(0f32, 1.0, (2, 1_500, 4, 16), &Device::Cpu)?;
/// let heads = x.transpose(1, 2)?;
/// let out = attention.forward(&heads, &heads, &heads)?;
/// assert_eq!(out.dims(), [2, 4, 1_500, 16]);
/// assert!(out.sqr()?.mean_all()?.backward()?.get(&x).is_some());
/// # Ok::<_, Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DilatedAttention(Arc<Dilated>);

impl DilatedAttention {
    /// What it was made from: for [`attention`](crate::attention) and
    /// [`attention_with_lse`](crate::attention_with_lse).
    pub fn dilated(&self) -> &Arc<Dilated> {
        &self.0
    }

    /// Attention of `q` over `k` and `v`, each `(batch, heads, tokens, dim)`, with gradients; see
    /// [`attention`](crate::attention).
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        call::attention(&self.0, q, k, v)
    }

    /// [`forward`](Self::forward) for a batch with padding: the keys `valid[entry]` of each batch entry
    /// are a sequence of their own, in which branches count from the first: see [`Dilated::padded`].
    pub fn forward_padded(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        valid: &[Range<usize>],
    ) -> Result<Tensor> {
        let padded = Dilated::clone(&self.0).padded(valid.iter().cloned());
        call::attention(&Arc::new(padded), q, k, v)
    }

    /// [`forward`](Self::forward) within each of several sequences that lie side by side in tensors of
    /// batch 1: see [`Dilated::packed_cu_seqlens`].
    pub fn forward_packed(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        cu_seqlens_q: &[u64],
        cu_seqlens_k: &[u64],
    ) -> Result<Tensor> {
        let packed = Dilated::clone(&self.0).packed_cu_seqlens(cu_seqlens_q, cu_seqlens_k);
        call::attention(&Arc::new(packed.map_err(foreign)?), q, k, v)
    }
}

impl From<Dilated> for DilatedAttention {
    fn from(dilated: Dilated) -> Self {
        DilatedAttention(Arc::new(dilated))
    }
}
