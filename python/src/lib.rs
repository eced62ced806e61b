//! The Rust side of the Python package: `longspan._longspan`.
//!
//! | module | what it has |
//! |---|---|
//! | `attention`, `raw`, `direct` | what users call, what the package's own glue calls |
//! | `call` | tensors checked against each other, and the passes over them |
//! | `options` | what they take by keyword; layouts and scratch that outlive a call |
//! | `tensor`, `dlpack`, `array` | tensors that come in, how they are handed over, those that go out |
//! | `pattern`, `primitives`, `layout` | the classes `Pattern` and `Layout`, functions that make patterns |
//! | `dilated` | the class `Dilated`, LongNet's branches |
//! | `select` | the class `BlockSelector`, layouts by content |
//! | `weights` | attention weights of chosen rows, and a picture of them |
//! | `density` | patterns scaled to a density |
//! | `cache` | the class `KvCache`, keys and values of earlier tokens |
//! | `ring`, `carrier` | a ring's class; its messages, through a process group that Python holds |
//! | `ring_schedule` | a ring's schedule, for engines whose tensors are on a device |
//! | `ring_problem` | what ranks compute, from arguments |
//! | `block_lists` | a layout as FlexAttention's lists of blocks |
//! | `device_calls` | attention as calls of FlexAttention: views, block lists, what masks are made of |
//! | `xla`, `jax` | XLA's interface to functions of others; JAX's calls behind it |
//! | `picture` | what notebooks and terminals show |
//! | `arguments` | sizes, offsets and key ranges as keyword arguments |
//! | `signals`, `errors` | Ctrl-C, the interpreter's lock; exceptions |

mod additions;
mod arguments;
mod array;
mod attention;
mod block_lists;
mod cache;
mod call;
mod carrier;
mod components;
mod density;
mod device_calls;
mod dilated;
mod direct;
mod dlpack;
mod engine;
mod errors;
mod jax;
mod layout;
mod limits;
mod options;
mod pattern;
mod picture;
mod primitives;
mod raw;
mod ring;
mod ring_problem;
mod ring_schedule;
mod select;
mod signals;
mod tensor;
mod weights;
mod xla;

/// Attention for sequences too long for attention.
#[pyo3::pymodule]
mod _longspan {
    #[pymodule_export]
    use crate::array::Array;
    #[pymodule_export]
    use crate::attention::{attention, backward, bytes_needed, forward};
    #[pymodule_export]
    use crate::cache::KvCache;
    #[pymodule_export]
    use crate::components::{Component, tiles};
    #[pymodule_export]
    use crate::density::scale_to_density;
    #[pymodule_export]
    use crate::device_calls::{DeviceCall, DevicePart, device_calls};
    #[pymodule_export]
    use crate::dilated::Dilated;
    #[pymodule_export]
    use crate::direct::direct_forward;
    #[pymodule_export]
    use crate::errors::RingError;
    #[pymodule_export]
    use crate::jax::jax_handlers;
    #[pymodule_export]
    use crate::layout::Layout;
    #[pymodule_export]
    use crate::limits::{amx_peak, best_isa, fma_peak, read_bandwidth};
    #[pymodule_export]
    use crate::options::{cache_stats, check_options};
    #[pymodule_export]
    use crate::pattern::{Pattern, layout_source};
    #[pymodule_export]
    use crate::primitives::{
        batch, blocks, blocks_dilated, butterfly, causal, dilated, documents, full, global_tokens,
        heads, hierarchical, keys, neighborhood, packed, packed_cu_seqlens, queries, random, sinks,
        sliding_window, strided, window,
    };
    #[pymodule_export]
    use crate::raw::{raw_backward, raw_forward};
    #[pymodule_export]
    use crate::ring::{Ring, ring_check, ring_gather, ring_shards, ring_wire};
    #[pymodule_export]
    use crate::ring_schedule::RingSchedule;
    #[pymodule_export]
    use crate::select::{BlockSelector, KeptMass, ListedBlocks, Selection};
    #[pymodule_export]
    use crate::weights::{attention_weights, weights_svg};

    /// Options that choose how a result is computed, not which.
    #[pymodule_export]
    const EXECUTION_OPTIONS: [&str; 4] = crate::options::EXECUTION;

    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "as Python spells it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
