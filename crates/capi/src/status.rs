//! Status codes, the text of the last error, and panics that end here.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use longspan_pattern::Error as PatternError;

/// How a call has ended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// As asked.
    Ok = 0,
    /// An argument breaks a rule: a shape, a pointer, an option.
    InvalidArgument = 1,
    /// The text of a pattern does not parse, or a pattern does not fit the lengths.
    InvalidPattern = 2,
    /// Memory that the system does not have.
    OutOfMemory = 3,
    /// Sizes that can't be counted, or a pattern that would take too long or too much to compile.
    TooLarge = 4,
    /// This CPU or this library does not have what was asked for.
    Unsupported = 5,
    /// The hook has ended the call.
    Stopped = 6,
    /// A fault of the library.
    Internal = 7,
}

/// A status other than `Ok`, and what to say of it.
pub(crate) struct Failure {
    status: Status,
    message: String,
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Failure { status, message: message.into() }
    }
}

/// An argument that breaks a rule.
pub(crate) fn invalid(message: impl Into<String>) -> Failure {
    Failure::new(Status::InvalidArgument, message)
}

impl From<longspan::Error> for Failure {
    fn from(error: longspan::Error) -> Self {
        use longspan::Error;
        let status = match &error {
            Error::Pattern(error) => of_pattern(error),
            Error::OutOfMemory { .. } | Error::TooManyWeights { .. } => Status::OutOfMemory,
            Error::Overflow { .. } | Error::TooManyHeads { .. } => Status::TooLarge,
            Error::Isa { .. } => Status::Unsupported,
            Error::Stopped { .. } => Status::Stopped,
            _ => Status::InvalidArgument,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<PatternError> for Failure {
    fn from(error: PatternError) -> Self {
        Failure::new(of_pattern(&error), error.to_string())
    }
}

fn of_pattern(error: &PatternError) -> Status {
    match error {
        PatternError::TooLarge { .. }
        | PatternError::TooMuchWork { .. }
        | PatternError::TooFar { .. }
        | PatternError::TooManyBlocks { .. } => Status::TooLarge,
        PatternError::Stopped { .. } => Status::Stopped,
        PatternError::BlockSize { .. } | PatternError::Range { .. } | PatternError::Mask { .. } => {
            Status::InvalidArgument
        }
        _ => Status::InvalidPattern,
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// Runs a call; what goes wrong is its status, and the text of the last error.
pub(crate) fn call(work: impl FnOnce() -> Result<()>) -> Status {
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failure)) => failure,
        Err(payload) => {
            let said = payload.downcast_ref::<&str>().copied();
            let said = said.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            let said = said.unwrap_or("a panic without a text");
            let message = format!("a fault of the library, not of the caller: {said}");
            // A payload may panic when it is dropped.
            std::mem::forget(payload);
            Failure::new(Status::Internal, message)
        }
    };
    let text = CString::new(failure.message.replace('\0', "␀")).unwrap_or_default();
    // Not where the thread is ending.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
    failure.status
}

/// The text of the last error on this thread, in UTF-8; empty if there was none. It is valid until the
/// next call of a function of this library on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn longspan_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The name of a status, as `"invalid argument"`.
#[unsafe(no_mangle)]
pub extern "C" fn longspan_status_name(status: i32) -> *const c_char {
    let name: &CStr = match status {
        0 => c"ok",
        1 => c"invalid argument",
        2 => c"invalid pattern",
        3 => c"out of memory",
        4 => c"too large",
        5 => c"unsupported",
        6 => c"stopped",
        7 => c"internal error",
        _ => c"unknown status",
    };
    name.as_ptr()
}

/// The version of this library, as `"0.1.0"`.
#[unsafe(no_mangle)]
pub extern "C" fn longspan_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}
