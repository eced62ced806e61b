//! Attention for sequences too long for attention.
//!
//! A [`Pattern`] says which positions may see which, a [`Layout`] is that pattern compiled to
//! blocks, and [`Attention`] computes exactly those pairs: forward and backward, one softmax over
//! each row's whole set, in memory linear in the tokens.
//!
//! ```
//! use longspan::{Attention, Dims, Inputs, Layout, Order, Pattern, Shape, Tensor};
//!
//! let pattern: Pattern = "causal & (window(256, 0) | sinks(16))".parse()?;
//! let layout = Layout::compile(&pattern, &Shape::new(2_000, 2_000))?;
//! println!("{:.1} % of all pairs", 100.0 * layout.density()?);
//!
//! let dims = Dims { batch: 1, tokens: 2_000, heads: 4, dim: 16 };
//! let data: Vec<f32> = (0..dims.elements().unwrap()).map(|i| (i as f32).sin()).collect();
//! let x = Tensor::new(data, dims, Order::Bshd)?;
//! let output = Attention::new(layout).forward(Inputs::new(x.view(), x.view(), x.view()))?;
//! assert_eq!(output.lse.len(), 4 * 2_000);
//! # Ok::<_, longspan::Error>(())
//! ```
//!
//! # Crate layout
//!
//! Each module imports only modules of the lines above it; `.ci/layers` checks that.
//!
//! | module | contents |
//! |---|---|
//! | `dims`, `error`, `isa` | sizes and strides; errors; instruction sets and their detection |
//! | `simd`, `dtype` | vectors of any instruction set; element types |
//! | `tensor`, `layouts` | strided views with four named axes; the layouts of a call |
//! | `gemm` | micro-kernels: register-tile products and packing |
//! | `exec` | worker threads, tasks, progress and cancellation, scratch memory |
//! | `score`, `softmax`, `rowwise` | score transforms; partial softmaxes; element-wise passes |
//! | `tasks` | partition of the work, a function of layouts and shapes alone |
//! | `kernel` | one forward kernel, one backward kernel, masks, decode |
//! | `workspace`, `precision`, `options` | memory kept between calls; what a call can be configured with |
//! | `arguments`, `state`, `check` | what calls take and return; validation |
//! | `driver` | from a validated call to tasks on workers; dispatch on instruction set and dtype |
//! | `components` | kernel calls over parts of tensors that continue one softmax state |
//! | `attention`, `dilated`, `attend`, [`limits`] | public API |
//! | `weights` | attention weights of chosen rows, and a picture of them |
//! | `cache` | keys and values of earlier tokens, for decoding |
//! | `select` | content-adaptive sparsity: layouts from queries and keys |

mod arguments;
mod attend;
mod attention;
mod cache;
mod check;
mod components;
mod dilated;
mod dims;
mod driver;
mod dtype;
mod error;
mod exec;
mod gemm;
mod isa;
mod kernel;
mod layouts;
pub mod limits;
mod options;
mod precision;
mod rowwise;
mod score;
mod select;
mod simd;
mod softmax;
mod state;
mod tasks;
mod tensor;
mod weights;
mod workspace;

pub use arguments::{
    Gradients, GradientsMut, Inputs, Output, OutputGradient, OutputMut, OutputRef, Pass,
};
pub use attend::Attend;
pub use attention::{Attention, row_deltas};
pub use cache::KvCache;
pub use components::{ComponentCall, Components, HeadMap, Prediction};
pub use dilated::{Branch, Dilated, DilatedWork, Overlap};
pub use dims::{Dims, Order, Strides};
pub use dtype::{Element, ElementType};
pub use error::{Error, Result};
#[cfg(feature = "fault-injection")]
#[doc(hidden)]
pub use exec::fault;
pub use exec::{Executor, Hook, Pool, Progress, Step, Threads};
pub use isa::Isa;
pub use layouts::Layouts;
#[doc(hidden)]
pub use longspan_pattern::splitmix64;
pub use longspan_pattern::{
    BlockMasks, BlockSize, Blocks, Counts, Heads, Layout, LayoutCache, LayoutSet, Level, Masks,
    Padding, ParseError, Pattern, PositionOrder, Positions, Progression, Reach, Run, RunKind,
    Shape, Split, TileCounts, Tiles, TokenSteps, residues, scale_to_density, scale_to_density_with,
};
pub use options::Options;
pub use precision::{ComputeTypes, Precision};
pub use score::{BiasTable, Dropout, Score};
pub use select::{BlockSelector, Estimator, KeptMass, ListedBlocks, Selection, Selector, Sharing};
pub use softmax::RowStatistics;
pub use state::{State, merge_outputs};
#[cfg(feature = "ndarray")]
pub use tensor::from_ndarray::TensorAxes;
pub use tensor::{Tensor, View, ViewMut};
pub use weights::{WeightRows, weights_svg};

/// The README's example, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

/// The guide's examples, likewise.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/adaptive.md")]
struct Adaptive;

/// The guide to decoding.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/decoding.md")]
struct Decoding;

/// The cookbook's.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/cookbook.md")]
struct Cookbook;
