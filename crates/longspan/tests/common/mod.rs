//! What the tests of the kernels share: tensors laid out in every way, and a case run on them.
//!
//! | file | what |
//! |---|---|
//! | `buffer.rs` | dense numbers put into strided memory with poisoned gaps, and read back |
//! | `observed.rs` | executors that tell which threads took part |
//! | `run.rs` | a case as layouts and options; both passes over it; the verdict |
//! | `shapes.rs` | sizes that divide no tile, and few queries |
//! | `strides.rs` | strides of every kind against the oracle |

// Each test file uses another part of it.
#![allow(dead_code, unused_imports)]

mod buffer;
mod observed;
mod run;
mod shapes;
mod strides;

pub(crate) use buffer::{Buffer, BufferOf, Number, Placement, dense_order};
pub(crate) use observed::{CallerOnly, Observed};
pub(crate) use run::{
    Engine, Rest, Run, Tensors, TensorsOf, attention, bits, check, check_all, check_all_with,
    check_with, compile, compile_set, dims_k, dims_out, dims_q, dims_v, layouts, measures,
    measures_of, number, score, short,
};
pub(crate) use shapes::{few_queries, odd_sizes};
pub(crate) use strides::{check_mixed_strides, check_strides, check_strides_with};
