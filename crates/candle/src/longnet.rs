//! LongNet (arXiv 2307.02486): an encoder and a language model from one [`Config`].
//!
//! Both are a stack of [`Block`]s with LongNet's dilated attention, or with any pattern in its place
//! to compare it with. The paper's XPOS is rotary here: XPOS leaves the range of f32 at about 72
//! thousand tokens.
//!
//! # Weights
//!
//! Names and shapes are torchscale's, so that a torch module with the same names loads them; a
//! linear layer's weight is `[out, in]`. With `h`, `f` and `v` the sizes of hidden, intermediate
//! and vocabulary:
//!
//! | name | shape |
//! |---|---|
//! | `embed_tokens.weight` (language model) | `[v, h]` |
//! | `layers.{i}.self_attn_layer_norm.{weight, bias}` | `[h]` |
//! | `layers.{i}.self_attn.{q_proj, k_proj, v_proj, out_proj}.{weight, bias}` | `[h, h]`, `[h]` |
//! | `layers.{i}.self_attn.inner_attn_ln.{weight, bias}` | `[h]` |
//! | `layers.{i}.final_layer_norm.{weight, bias}` | `[h]` |
//! | `layers.{i}.ffn.fc1.{weight, bias}` | `[f, h]`, `[f]` |
//! | `layers.{i}.ffn.ffn_layernorm.{weight, bias}` | `[f]` |
//! | `layers.{i}.ffn.fc2.{weight, bias}` | `[h, f]`, `[h]` |
//! | `layer_norm.{weight, bias}` | `[h]` |
//! | `output_projection.weight` (language model) | `[v, h]` |
//!
//! `docs/longnet-weights.md` has the arithmetic and the initialisation as well.

mod config;
mod file;

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::{Embedding, Init, Linear, Module, VarBuilder};

pub use self::config::{AttentionConfig, Config};
pub use self::file::save;
use crate::block::{Block, BlockConfig};
use crate::dilated::DilatedAttention;
use crate::init;
use crate::lengths::Lengths;
use crate::multihead::{Attend, InnerNorm, MultiheadConfig};
use crate::norm::LayerNorm;
use crate::sparse::SparseAttention;

/// Which queries may attend to which keys, beside what the configuration says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Both,
    Causal,
}

/// An attention of either kind; layers share it, with its layouts and scratch.
#[derive(Debug)]
enum Either {
    Dilated(DilatedAttention),
    Pattern(Box<SparseAttention>),
}

impl Attend for Either {
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, lengths: &Lengths) -> Result<Tensor> {
        match self {
            Either::Dilated(attention) => attention.attend(q, k, v, lengths),
            Either::Pattern(attention) => attention.attend(q, k, v, lengths),
        }
    }
}

/// The layers, and the norm after them.
#[derive(Debug)]
struct Stack {
    layers: Vec<Block<Arc<Either>>>,
    layer_norm: LayerNorm,
}

impl Stack {
    fn new(config: &Config, reach: Reach, vb: &VarBuilder<'_>) -> Result<Self> {
        config.check()?;
        let attention = Arc::new(config.attention.make(reach)?);
        let block = BlockConfig {
            attention: MultiheadConfig {
                hidden_size: config.hidden_size,
                num_attention_heads: config.num_attention_heads,
                positions: config.positions,
                inner_norm: InnerNorm::LayerNorm { eps: config.layer_norm_eps },
                gain: init::magneto_gain(config.num_hidden_layers),
            },
            intermediate_size: config.intermediate_size,
            layer_norm_eps: config.layer_norm_eps,
        };
        let layer = |index| Block::new(&block, attention.clone(), vb.pp("layers").pp(index));
        Ok(Stack {
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
            layer_norm: LayerNorm::new(
                config.hidden_size,
                config.layer_norm_eps,
                vb.pp("layer_norm"),
            )?,
        })
    }

    fn forward(&self, x: Tensor, lengths: &Lengths) -> Result<Tensor> {
        let x = self.layers.iter().try_fold(x, |x, layer| layer.forward_lengths(&x, lengths))?;
        self.layer_norm.forward(&x)
    }
}

/// LongNet as an encoder: vectors in, vectors out, every token sees both ways.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarMap};
/// use longspan_candle::longnet::{AttentionConfig, Config, LongNetEncoder};
/// use longspan_candle::seeded;
///
/// let config = Config {
///     hidden_size: 32,
///     num_hidden_layers: 2,
///     num_attention_heads: 4,
///     intermediate_size: 64,
///     attention: AttentionConfig::dilated([64, 128, 256], [1, 2, 4]),
///     ..Config::default()
/// };
/// let vars = VarMap::new();
/// let encoder = LongNetEncoder::new(&config, seeded(&vars, 1, DType::F32))?;
/// let x = Tensor::randn(0f32, 1.0, (1, 500, 32), &Device::Cpu)?;
/// assert_eq!(encoder.forward(&x)?.dims(), [1, 500, 32]);
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct LongNetEncoder {
    stack: Stack,
    hidden_size: usize,
}

impl LongNetEncoder {
    /// With weights of `vb`.
    pub fn new(config: &Config, vb: VarBuilder<'_>) -> Result<Self> {
        let stack = Stack::new(config, Reach::Both, &vb)?;
        Ok(LongNetEncoder { stack, hidden_size: config.hidden_size })
    }

    /// From the files that [`save`] writes; numbers are converted to `dtype`.
    pub fn load(directory: impl AsRef<Path>, dtype: DType) -> Result<(Config, Self)> {
        file::load(directory.as_ref(), dtype, Self::new)
    }

    /// [`forward`](Module::forward) within each sequence of a batch. Rows of padding mean nothing.
    pub fn forward_lengths(&self, x: &Tensor, lengths: &Lengths) -> Result<Tensor> {
        match *x.dims() {
            [_, _, hidden] if hidden == self.hidden_size => {
                self.stack.forward(x.contiguous()?, lengths)
            }
            ref other => {
                bail!("a tensor of shape {other:?}, expected (batch, tokens, {})", self.hidden_size)
            }
        }
    }
}

impl Module for LongNetEncoder {
    /// `x` is `(batch, tokens, hidden)`, as is what comes back.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_lengths(x, &Lengths::Whole)
    }
}

/// LongNet as a language model: ids in, logits of the next ones out. No token sees a later one,
/// whatever the configuration says.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarMap};
/// use longspan_candle::longnet::{Config, LongNetLM};
/// use longspan_candle::seeded;
///
/// let config = Config {
///     hidden_size: 32,
///     num_hidden_layers: 1,
///     num_attention_heads: 4,
///     intermediate_size: 64,
///     ..Config::default()
/// };
/// let vars = VarMap::new();
/// let model = LongNetLM::new(&config, seeded(&vars, 1, DType::F32))?;
/// let text = Tensor::new(&b"Attention, please"[..], &Device::Cpu)?.unsqueeze(0)?;
/// assert_eq!(model.forward(&text)?.dims(), [1, 17, 256]);
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct LongNetLM {
    embed_tokens: Embedding,
    stack: Stack,
    output_projection: Linear,
}

impl LongNetLM {
    /// With weights of `vb`.
    pub fn new(config: &Config, vb: VarBuilder<'_>) -> Result<Self> {
        let stack = Stack::new(config, Reach::Causal, &vb)?;
        let Config { vocab_size, hidden_size, .. } = *config;
        let stdev = 1.0 / (hidden_size as f64).sqrt();
        let matrix = |name| {
            let init = Init::Randn { mean: 0.0, stdev };
            vb.pp(name).get_with_hints((vocab_size, hidden_size), "weight", init)
        };
        Ok(LongNetLM {
            embed_tokens: Embedding::new(matrix("embed_tokens")?, hidden_size),
            stack,
            output_projection: Linear::new(matrix("output_projection")?, None),
        })
    }

    /// From the files that [`save`] writes; numbers are converted to `dtype`.
    pub fn load(directory: impl AsRef<Path>, dtype: DType) -> Result<(Config, Self)> {
        file::load(directory.as_ref(), dtype, Self::new)
    }

    /// [`forward`](Module::forward) within each sequence of a batch. Logits of padding mean nothing.
    pub fn forward_lengths(&self, ids: &Tensor, lengths: &Lengths) -> Result<Tensor> {
        if ids.rank() != 2 || !ids.dtype().is_int() {
            bail!(
                "ids of shape {:?} and type {}, expected whole numbers, (batch, tokens)",
                ids.dims(),
                ids.dtype().as_str()
            )
        }
        let x = self.embed_tokens.forward(&ids.contiguous()?)?;
        self.output_projection.forward(&self.stack.forward(x, lengths)?)
    }
}

impl Module for LongNetLM {
    /// `ids` are `(batch, tokens)` of u8, u32 or i64; logits are `(batch, tokens, vocabulary)`.
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward_lengths(ids, &Lengths::Whole)
    }
}
