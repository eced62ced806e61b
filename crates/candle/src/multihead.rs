//! Multi-head attention as a module: projections around an attention.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candle_nn::{Module, VarBuilder};
use serde::{Deserialize, Serialize};

use crate::dilated::DilatedAttention;
use crate::init;
use crate::lengths::Lengths;
use crate::linear::Linear;
use crate::norm::LayerNorm;
use crate::rotary::Rotary;
use crate::sparse::SparseAttention;

/// What stands between the projections: queries, keys and values, each `(batch, heads, tokens,
/// dim)`, to as many outputs, with gradients.
pub trait Attend {
    /// Attention of `q` over `k` and `v`, within each sequence.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, lengths: &Lengths) -> Result<Tensor>;
}

impl Attend for SparseAttention {
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, lengths: &Lengths) -> Result<Tensor> {
        match lengths {
            Lengths::Whole => self.forward(q, k, v),
            Lengths::Padded(valid) => self.forward_padded(q, k, v, valid),
            Lengths::Packed(bounds) => self.forward_packed(q, k, v, bounds, bounds),
        }
    }
}

impl Attend for DilatedAttention {
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, lengths: &Lengths) -> Result<Tensor> {
        match lengths {
            Lengths::Whole => self.forward(q, k, v),
            Lengths::Padded(valid) => self.forward_padded(q, k, v, valid),
            Lengths::Packed(bounds) => self.forward_packed(q, k, v, bounds, bounds),
        }
    }
}

impl<A: Attend> Attend for Arc<A> {
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, lengths: &Lengths) -> Result<Tensor> {
        A::attend(self, q, k, v, lengths)
    }
}

/// How a model knows where tokens stand.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Positions {
    /// Queries and keys are turned by their positions (arXiv 2104.09864); head dims have to be even.
    Rotary {
        /// The slowest pair of numbers turns once in `2π · base` tokens, nearly.
        base: f64,
    },
    /// It doesn't, or what goes in says it.
    None,
}

impl Default for Positions {
    fn default() -> Self {
        Positions::Rotary { base: 10_000.0 }
    }
}

/// Whether attention outputs are normalised before they are projected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum InnerNorm {
    /// They are projected as they are.
    None,
    /// MAGNETO's sub-layer norm, `inner_attn_ln`.
    LayerNorm {
        /// What is added to the variance.
        eps: f64,
    },
}

/// Sizes and choices of a [`Multihead`].
///
/// ```
/// use longspan_candle::{InnerNorm, MultiheadConfig};
///
/// let plain = MultiheadConfig::plain(256, 8);
/// assert_eq!((plain.inner_norm, plain.gain), (InnerNorm::None, 1.0));
/// let deep = MultiheadConfig::magneto(256, 8, 12);
/// assert!((deep.gain - 24_f64.ln().sqrt()).abs() < 1e-12);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MultiheadConfig {
    /// Elements per token, in and out.
    pub hidden_size: usize,
    /// Heads, which divide them.
    pub num_attention_heads: usize,
    /// How heads know where tokens stand.
    pub positions: Positions,
    /// What is done to the output of the attention.
    pub inner_norm: InnerNorm,
    /// What the weights of `v_proj` and `out_proj` begin with times as much of; `q_proj` and `k_proj`
    /// begin with 1.
    pub gain: f64,
}

impl MultiheadConfig {
    /// As attention mostly is: no norm inside, xavier's normal distribution for all weights.
    pub fn plain(hidden_size: usize, num_attention_heads: usize) -> Self {
        MultiheadConfig {
            hidden_size,
            num_attention_heads,
            positions: Positions::default(),
            inner_norm: InnerNorm::None,
            gain: 1.0,
        }
    }

    /// As MAGNETO (arXiv 2210.06423) has it in a stack of `layers`: with the norm inside, and with
    /// values and outputs that begin `√(ln 2N)` times as large.
    pub fn magneto(hidden_size: usize, num_attention_heads: usize, layers: usize) -> Self {
        MultiheadConfig {
            inner_norm: InnerNorm::LayerNorm { eps: 1e-5 },
            gain: init::magneto_gain(layers),
            ..Self::plain(hidden_size, num_attention_heads)
        }
    }
}

/// Self-attention of tokens, `(batch, tokens, hidden)`: projections to heads, an attention `A`, the
/// projection of its output.
///
/// Its weights are `q_proj`, `k_proj`, `v_proj` and `out_proj`, and `inner_attn_ln` where it has that
/// norm; each has a `weight` and a `bias`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use longspan_candle::{MultiheadAttention, MultiheadConfig};
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let near = "causal & window(63, 0)".parse()?;
/// let layer = MultiheadAttention::new(&MultiheadConfig::plain(32, 4), near, vb)?;
/// let x = Tensor::randn(0f32, 1.0, (2, 300, 32), &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), x.dims());
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Multihead<A> {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    out_proj: Linear,
    inner_attn_ln: Option<LayerNorm>,
    rotary: Option<Rotary>,
    heads: usize,
    attention: A,
}

/// [`Multihead`] with a pattern.
pub type MultiheadAttention = Multihead<SparseAttention>;

/// [`Multihead`] with LongNet's branches; [`MultiheadConfig::magneto`] is what the paper has around
/// them.
///
/// ```
/// use candle_core::{DType, Device, Error, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use longspan_candle::longspan::{Branch, Dilated, Pattern};
/// use longspan_candle::{MultiheadConfig, MultiheadDilatedAttention};
///
/// let branches = [(64, 1), (128, 2)].map(|(segment, rate)| Branch::new(segment, rate).unwrap());
/// let dilated = Dilated::new(branches).map_err(Error::wrap)?.within(Pattern::causal());
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let config = MultiheadConfig::magneto(32, 4, 12);
/// let layer = MultiheadDilatedAttention::new(&config, dilated.into(), vb)?;
/// let x = Tensor::randn(0f32, 1.0, (1, 300, 32), &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), x.dims());
/// # Ok::<_, Error>(())
/// ```
pub type MultiheadDilatedAttention = Multihead<DilatedAttention>;

impl<A: Attend> Multihead<A> {
    /// With weights of `vb`.
    pub fn new(config: &MultiheadConfig, attention: A, vb: VarBuilder<'_>) -> Result<Self> {
        let MultiheadConfig { hidden_size, num_attention_heads: heads, .. } = *config;
        if heads == 0 || hidden_size == 0 || !hidden_size.is_multiple_of(heads) {
            bail!("hidden size {hidden_size} and {heads} heads, expected a multiple of the heads")
        }
        let linear = |name, gain| Linear::new(hidden_size, hidden_size, gain, vb.pp(name));
        Ok(Multihead {
            q_proj: linear("q_proj", 1.0)?,
            k_proj: linear("k_proj", 1.0)?,
            v_proj: linear("v_proj", config.gain)?,
            out_proj: linear("out_proj", config.gain)?,
            inner_attn_ln: match config.inner_norm {
                InnerNorm::None => None,
                InnerNorm::LayerNorm { eps } => {
                    Some(LayerNorm::new(hidden_size, eps, vb.pp("inner_attn_ln"))?)
                }
            },
            rotary: match config.positions {
                Positions::None => None,
                Positions::Rotary { base } => Some(Rotary::new(hidden_size / heads, base)?),
            },
            heads,
            attention,
        })
    }

    /// The attention between the projections.
    pub fn attention(&self) -> &A {
        &self.attention
    }

    /// [`forward`](Module::forward) within each sequence of a batch; positions count from its first
    /// token.
    pub fn forward_lengths(&self, x: &Tensor, lengths: &Lengths) -> Result<Tensor> {
        let (batch, tokens, hidden) = x.dims3()?;
        let positions = lengths.positions(batch, tokens)?;
        let x = x.contiguous()?;
        let heads = |x: Tensor| x.reshape((batch, tokens, self.heads, hidden / self.heads));
        let turned = |x: Tensor| match &self.rotary {
            Some(rotary) => rotary.forward(&x, positions.clone()),
            None => Ok(x),
        };
        let q = turned(heads(self.q_proj.forward(&x)?)?)?.transpose(1, 2)?;
        let k = turned(heads(self.k_proj.forward(&x)?)?)?.transpose(1, 2)?;
        let v = heads(self.v_proj.forward(&x)?)?.transpose(1, 2)?;
        let seen = self.attention.attend(&q, &k, &v, lengths)?;
        let seen = seen.transpose(1, 2)?.reshape((batch, tokens, hidden))?;
        let seen = match &self.inner_attn_ln {
            Some(norm) => norm.forward(&seen)?,
            None => seen,
        };
        self.out_proj.forward(&seen)
    }
}

impl<A: Attend> Module for Multihead<A> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_lengths(x, &Lengths::Whole)
    }
}
