//! Longspan's C library: `longspan.h`, and the functions behind it.
//!
//! The header is generated from this crate (`cbindgen.toml`, `tests/header.rs`) and committed. What a
//! function does is in the documentation of the type of `longspan` that it stands for; here are the
//! rules of the boundary.
//!
//! | module | contents |
//! |---|---|
//! | `status` | status codes, the text of the last error, panics |
//! | `sized` | option structs that carry their size |
//! | `tensor` | tensors as {pointer, dtype, shape, strides} |
//! | `hook` | progress and cancellation; threads of the caller |
//! | `options` | `longspan_options` |
//! | `layout` | a pattern's text, or a mask, as a layout |
//! | `attention` | forward, backward, merge; dilated attention |
//! | `cache` | keys and values of earlier tokens |
//!
//! # ABI
//!
//! - A function that can fail returns `longspan_status`; 0 is success. `longspan_last_error` has the text
//!   of the last failure on the calling thread. A function that fails writes nothing but results that are
//!   not to be used.
//! - Panics end at the boundary as `LONGSPAN_STATUS_INTERNAL`.
//! - Structs with options begin with `size`, which the caller sets to the `sizeof` that it was compiled
//!   with (`LONGSPAN_OPTIONS_INIT` and its like). Fields are only ever added at the end; 0 means that an
//!   option isn't given. A library reads the fields that the caller has, and refuses a larger struct
//!   unless what it doesn't know is 0. `longspan_tensor`, `longspan_hook` and `longspan_executor` never change.
//! - Constants keep their values, functions their signatures. What has to change gets another name; the
//!   old one stays within a major version. `abi/abi.txt` lists every symbol, field and constant, and
//!   `.ci/abi` fails when the library differs from it.
//! - Handles are made by `…_create` or `…_compile` and released by `…_free`, which accepts null. A handle
//!   may be used by several threads at once where the function takes it as `const`.
//! - The caller's memory stays the caller's: the library writes to the arguments that say so, and keeps no
//!   pointer after a call but that of an executor.

mod attention;
mod cache;
mod hook;
mod layout;
mod options;
mod sized;
mod status;
mod tensor;

pub use attention::*;
pub use cache::*;
pub use hook::{Executor, Hook};
pub use layout::*;
pub use options::*;
pub use status::*;
pub use tensor::*;

/// Threads share these handles where a function takes them as `const`.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Attention>();
    shared::<Layout>();
    shared::<Cache>();
};
