//! MPI's return codes as errors.

use std::ffi::{c_char, c_int};

use mpi_sys as ffi;

use crate::transport::Failure;

pub(super) fn engine(message: impl Into<String>) -> Failure {
    Failure::Engine { message: message.into() }
}

/// Class and text of an MPI error.
pub(super) struct CodeError {
    pub(super) class: c_int,
    pub(super) message: String,
}

pub(super) fn code_to_result(code: c_int) -> Result<(), CodeError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let (mut class, mut len) = (0, 0);
    let mut text = [0_u8; ffi::MPI_MAX_ERROR_STRING as usize];
    // SAFETY: MPI accepts any code that its functions return, as this one was; the text has as many
    // bytes as MPI may write.
    unsafe {
        ffi::MPI_Error_class(code, &mut class);
        ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut len);
    }
    let text = &text[..(len.max(0) as usize).min(text.len())];
    Err(CodeError { class, message: String::from_utf8_lossy(text).into_owned() })
}

pub(super) fn check(code: c_int) -> Result<(), Failure> {
    code_to_result(code).map_err(|error| engine(error.message))
}
