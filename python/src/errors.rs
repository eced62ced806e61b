//! Errors of the library as Python's exceptions, with the same message.
//!
//! | exception | when |
//! |---|---|
//! | `ValueError` | a value breaks a rule: shapes, arguments of patterns, text, options |
//! | `TypeError` | an argument is of the wrong kind, or holds other numbers than f32, bf16, f16 |
//! | `OverflowError` | sizes that can't be counted in 64 bits |
//! | `MemoryError` | a layout or weights outgrew their bound, or memory for a result isn't there |
//! | `BufferError` | a producer's DLPack capsule can't be used |
//! | `KeyboardInterrupt` | Ctrl-C while a call computed |
//! | `RingError` | ranks of a ring that disagree, are late or gone, or sent something damaged |

use longspan::Error;
use longspan_pattern::Error as PatternError;
use longspan_ring::Error as RanksError;
use pyo3::exceptions::{PyMemoryError, PyOverflowError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    longspan,
    RingError,
    PyRuntimeError,
    "Ranks of a ring disagree, are late or gone, or sent something damaged. Every rank ends with \
     an error; the message says which rank, which step, and what was awaited."
);

/// An error of a call.
pub(crate) fn raise(error: Error) -> PyErr {
    match error {
        Error::Pattern(error) => raise_pattern(error),
        Error::Overflow { .. } | Error::TooManyHeads { .. } => {
            PyOverflowError::new_err(error.to_string())
        }
        Error::OutOfMemory { .. } | Error::TooManyWeights { .. } => {
            PyMemoryError::new_err(error.to_string())
        }
        error => PyValueError::new_err(error.to_string()),
    }
}

/// An error of a pattern or a layout.
pub(crate) fn raise_pattern(error: PatternError) -> PyErr {
    let message = error.to_string();
    match error {
        PatternError::TooLarge { .. } => PyMemoryError::new_err(message),
        PatternError::TooFar { .. } | PatternError::TooManyBlocks { .. } => {
            PyOverflowError::new_err(message)
        }
        _ => PyValueError::new_err(message),
    }
}

/// An error of a ring: of this rank's own arguments, or of the ranks.
pub(crate) fn raise_ring(error: RanksError) -> PyErr {
    match error {
        RanksError::Pattern(error) => raise_pattern(error),
        RanksError::Attention(error) => raise(error),
        RanksError::Elements { .. } => PyTypeError::new_err(error.to_string()),
        RanksError::NoRanks
        | RanksError::DilatedOptions
        | RanksError::NoGrain
        | RanksError::NoSuchToken { .. }
        | RanksError::TokenTwice { .. }
        | RanksError::Bound { .. }
        | RanksError::NotFinite { .. }
        | RanksError::Ranks { .. }
        | RanksError::Shape { .. } => PyValueError::new_err(error.to_string()),
        error => RingError::new_err(error.to_string()),
    }
}

/// A value that breaks a rule of the binding.
pub(crate) fn value(message: impl Into<String>) -> PyErr {
    PyValueError::new_err(message.into())
}

/// An argument of the wrong kind.
pub(crate) fn kind(message: impl Into<String>) -> PyErr {
    PyTypeError::new_err(message.into())
}

/// A producer's own error, with the argument that it is about where Python has notes (3.11).
pub(crate) fn noted(py: Python<'_>, error: PyErr, name: &str) -> PyErr {
    let note = format!("while {name} was read");
    match error.value(py).call_method1("add_note", (note,)) {
        Ok(_) | Err(_) => error,
    }
}

/// A tensor that lies elsewhere.
pub(crate) fn not_on_cpu(name: &str, device: &str) -> PyErr {
    value(format!(
        "{name} is on {device}, expected the CPU: copy it there, or stay on the GPU with \
         FlexAttention and the mask that Layout.to_block_mask makes"
    ))
}
