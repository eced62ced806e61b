//! A layer of a transformer: attention and a feed-forward network, each behind a norm.

use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

use crate::gelu::gelu;
use crate::lengths::Lengths;
use crate::linear::Linear;
use crate::multihead::{Attend, Multihead, MultiheadConfig};
use crate::norm::LayerNorm;

/// `fc2(ffn_layernorm(gelu(fc1(x))))`, MAGNETO's feed-forward network.
#[derive(Debug)]
struct FeedForward {
    fc1: Linear,
    ffn_layernorm: LayerNorm,
    fc2: Linear,
}

/// Sizes and choices of a [`Block`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockConfig {
    /// Those of its attention; the gain is that of the feed-forward network too.
    pub attention: MultiheadConfig,
    /// Elements per token inside the feed-forward network.
    pub intermediate_size: usize,
    /// What norms add to the variance.
    pub layer_norm_eps: f64,
}

/// A pre-norm layer of a transformer with norms inside its halves too, as MAGNETO has them
/// (arXiv 2210.06423):
///
/// ```text
/// x = x + self_attn(self_attn_layer_norm(x))
/// x = x + ffn.fc2(ffn.ffn_layernorm(gelu(ffn.fc1(final_layer_norm(x)))))
/// ```
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarMap};
/// use longspan_candle::{Block, BlockConfig, MultiheadConfig, SparseAttention, seeded};
///
/// let vars = VarMap::new();
/// let config = BlockConfig {
///     attention: MultiheadConfig::magneto(32, 4, 1),
///     intermediate_size: 64,
///     layer_norm_eps: 1e-5,
/// };
/// let near: SparseAttention = "window(20, 20)".parse()?;
/// let block = Block::new(&config, near, seeded(&vars, 1, DType::F32))?;
/// let x = Tensor::randn(0f32, 1.0, (1, 100, 32), &Device::Cpu)?;
/// assert_eq!(block.forward(&x)?.dims(), x.dims());
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Block<A> {
    self_attn_layer_norm: LayerNorm,
    self_attn: Multihead<A>,
    final_layer_norm: LayerNorm,
    ffn: FeedForward,
}

impl<A: Attend> Block<A> {
    /// With weights of `vb`.
    pub fn new(config: &BlockConfig, attention: A, vb: VarBuilder<'_>) -> Result<Self> {
        let BlockConfig { attention: multihead, intermediate_size: inner, layer_norm_eps: eps } =
            config;
        let hidden = multihead.hidden_size;
        let norm = |name| LayerNorm::new(hidden, *eps, vb.pp(name));
        let ffn = vb.pp("ffn");
        Ok(Block {
            self_attn_layer_norm: norm("self_attn_layer_norm")?,
            self_attn: Multihead::new(multihead, attention, vb.pp("self_attn"))?,
            final_layer_norm: norm("final_layer_norm")?,
            ffn: FeedForward {
                fc1: Linear::new(hidden, *inner, multihead.gain, ffn.pp("fc1"))?,
                ffn_layernorm: LayerNorm::new(*inner, *eps, ffn.pp("ffn_layernorm"))?,
                fc2: Linear::new(*inner, hidden, multihead.gain, ffn.pp("fc2"))?,
            },
        })
    }
}

impl<A: Attend> Block<A> {
    /// [`forward`](Module::forward) within each sequence of a batch.
    pub fn forward_lengths(&self, x: &Tensor, lengths: &Lengths) -> Result<Tensor> {
        let normed = self.self_attn_layer_norm.forward(x)?;
        let x = (x + self.self_attn.forward_lengths(&normed, lengths)?)?;
        &x + self.ffn.forward(&self.final_layer_norm.forward(&x)?)?
    }
}

impl Module for FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = gelu(&self.fc1.forward(x)?)?;
        self.fc2.forward(&self.ffn_layernorm.forward(&inner)?)
    }
}

impl<A: Attend> Module for Block<A> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_lengths(x, &Lengths::Whole)
    }
}
