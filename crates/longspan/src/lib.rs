//! Attention for sequences too long for attention.
//!
//! A [`Pattern`] says which positions may see which, a [`Layout`] is that pattern compiled to
//! blocks, and [`Attention`] computes exactly those pairs: forward and backward, one softmax over
//! each row's whole set, in memory linear in the tokens.
//!
//! ```
//! use longspan::{Attention, Dims, Layout, Order, Pattern, Shape, Tensor};
//!
//! let pattern: Pattern = "causal & (window(256, 0) | sinks(16))".parse()?;
//! let layout = Layout::compile(&pattern, &Shape::new(2_000, 2_000))?;
//! println!("{:.1} % of all pairs", 100.0 * layout.density()?);
//!
//! let dims = Dims { batch: 1, tokens: 2_000, heads: 4, dim: 16 };
//! let data: Vec<f32> = (0..dims.elements().unwrap()).map(|i| (i as f32).sin()).collect();
//! let x = Tensor::new(data, dims, Order::BatchTokenHeadDim)?;
//! let output = Attention::new(layout).forward(x.view(), x.view(), x.view())?;
//! assert_eq!(output.lse.len(), 4 * 2_000);
//! # Ok::<_, longspan::Error>(())
//! ```
//!
//! # Crate layout
//!
//! | module | what it has |
//! |---|---|
//! | `attention`, `arguments`, `options`, `check` | what a caller writes, and whether it fits together |
//! | `dilated` | LongNet: branches on strided views, joined |
//! | `gradients` | from what arrives at an output to gradients, for both |
//! | `view`, `element` | tensors with four named axes, strided; what they hold |
//! | `state` | the partial softmax and its merge |
//! | `score` | what is done to scores before the softmax |
//! | `plan`, `run` | tasks of a call; from a checked call to kernels on threads |
//! | `exec` | worker threads, tasks, progress and cancellation, workspaces |
//! | `kernel` | one kernel a pass |
//! | `tile` | the matrix part, behind an interface |
//! | [`limits`] | what the machine can do, measured |
//! | `simd`, `isa` | vectors, whatever the instruction set; which one is used |

mod arguments;
mod attention;
mod check;
mod dilated;
mod element;
mod error;
mod exec;
mod gradients;
mod isa;
mod kernel;
pub mod limits;
mod options;
mod plan;
mod precision;
mod run;
mod score;
mod simd;
mod state;
mod tile;
mod view;

pub use arguments::{
    Arrived, Gradients, GradientsMut, Hook, Inputs, Output, OutputMut, Progress, RowStatistics,
};
pub use attention::{Attention, Layouts, row_deltas};
pub use dilated::{Branch, Counting, Dilated};
pub use element::{Element, ElementType};
pub use error::{Error, Result};
#[cfg(feature = "fault-injection")]
#[doc(hidden)]
pub use exec::fault;
pub use exec::{Executor, Pool, Step, Threads};
pub use isa::Isa;
pub use longspan_pattern::{
    BlockMasks, BlockSize, Blocks, Counts, Heads, Layout, LayoutCache, LayoutSet, Level, Masks,
    Padding, ParseError, Pattern, Positions, Progression, Run, RunKind, Shape,
};
pub use precision::{Numbers, Precision};
pub use score::Score;
pub use state::{State, merge_outputs};
pub use view::{Dims, Order, Strides, Tensor, View, ViewMut};

/// The README's example, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
