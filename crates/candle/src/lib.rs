//! Longspan's exact sparse attention on candle's CPU tensors, with gradients.
//!
//! Tensors have candle's usual axes, `(batch, heads, tokens, dim)`, and hold f32, bf16 or f16.
//! [`SparseAttention`] is what a model holds: a pattern, whose layouts are compiled for the lengths
//! that turn up.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use longspan_candle::SparseAttention;
//!
//! let attention: SparseAttention = "causal & (window(256, 0) | sinks(16))".parse()?;
//! // Eight query heads that share two key heads.
//! let q = Var::randn(0f32, 1.0, (1, 8, 1_000, 32), &Device::Cpu)?;
//! let k = Var::randn(0f32, 1.0, (1, 2, 1_000, 32), &Device::Cpu)?;
//! let v = Var::randn(0f32, 1.0, (1, 2, 1_000, 32), &Device::Cpu)?;
//!
//! let out = attention.forward(&q, &k, &v)?;
//! assert_eq!(out.dims(), [1, 8, 1_000, 32]);
//! let gradients = out.sqr()?.mean_all()?.backward()?;
//! assert_eq!(gradients.get(&k).unwrap().dims(), k.dims());
//! # Ok::<_, candle_core::Error>(())
//! ```
//!
//! [`DilatedAttention`] is LongNet's, several branches of segments and rates joined.
//!
//! [`attention`] and [`attention_with_lse`] run a [`longspan::Attention`] or a [`longspan::Dilated`]
//! that was made elsewhere: for positions with offsets (a cache that is pre-allocated or rolls),
//! foreign blocks, layouts chosen from the content. [`attention_with_learned`] has [`Learned`] sink
//! logits (gpt-oss), relative-position tables (T5) and ALiBi slopes; [`longspan::Options`] has constant
//! ones, everywhere.
//!
//! # Modules
//!
//! [`MultiheadAttention`] and [`MultiheadDilatedAttention`] put projections around them, [`Block`] is
//! a layer of a transformer, and [`longnet`] has whole models. They are made from a
//! `candle_nn::VarBuilder`, as candle-nn's are, and have gradients everywhere; candle-nn's own layer
//! norm and rotary embedding have none, so [`LayerNorm`] is one with.
//!
//! # What is read, and where results lie
//!
//! Transposed, narrowed and broadcast views are read where they are; nothing is made contiguous.
//! Where `q` is a `(batch, tokens, heads, dim)` tensor with its axes 1 and 2 transposed, so is the
//! output: `out.transpose(1, 2)?.flatten_from(2)?` then copies nothing.
//!
//! # Crate layout
//!
//! | module | what it has |
//! |---|---|
//! | `call` | a call: two custom ops that share what the forward pass found |
//! | `learned` | sink logits, tables and slopes that are tensors, with gradients |
//! | `select` | layouts from the content of queries and keys |
//! | `cache` | keys and values of earlier tokens, for decoding |
//! | `sparse`, `dilated` | a pattern, compiled for the lengths that turn up; LongNet's branches |
//! | `multihead`, `block`, [`longnet`] | projections around an attention; a layer; whole models |
//! | `norm`, `gelu`, `rotary`, `linear`, `rows` | ops that candle has without gradients, or with coarse or slow ones |
//! | `lengths` | sequences of several lengths in one batch |
//! | `init` | how weights begin |
//! | `tensor` | candle's tensors as Longspan's views and back; which ones are refused |

#![forbid(unsafe_code)]

mod block;
mod cache;
mod call;
mod dilated;
mod gelu;
mod init;
mod learned;
mod lengths;
mod linear;
pub mod longnet;
mod multihead;
mod norm;
mod rotary;
mod rows;
mod select;
mod sparse;
mod tensor;

pub use block::{Block, BlockConfig};
pub use cache::KvCache;
pub use call::{attention, attention_with_lse};
pub use dilated::DilatedAttention;
pub use init::seeded;
pub use learned::{Learned, attention_with_learned, attention_with_learned_and_lse};
pub use lengths::Lengths;
pub use longspan;
pub use multihead::{
    Attend, InnerNorm, Multihead, MultiheadAttention, MultiheadConfig, MultiheadDilatedAttention,
    Positions,
};
pub use norm::LayerNorm;
pub use select::select;
pub use sparse::SparseAttention;
