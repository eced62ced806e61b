//! Which instruction set and how many threads are used, and why.
//!
//! The library's rule: what an option says, else what the environment says, else the best there
//! is. A variable that is empty says nothing; one that makes no sense is an error, also where a
//! library that can't read it would go on.

use std::env::var_os;
use std::ffi::OsString;
use std::fmt;
use std::num::NonZeroUsize;

use longspan::{Error, Isa, Result, Threads};

pub(crate) const ISA: &str = "LONGSPAN_ISA";
pub(crate) const THREADS: &str = "LONGSPAN_THREADS";

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    Option(&'static str),
    Variable(&'static str),
    Default(&'static str),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Option(name) => write!(f, "{name} says so"),
            Why::Variable(name) => write!(f, "{name} says so"),
            Why::Default(reason) => f.write_str(reason),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Choice<T> {
    pub(crate) value: T,
    pub(crate) why: Why,
}

/// The instruction set that a call uses.
pub(crate) fn isa(option: Option<Isa>) -> Result<Choice<Isa>> {
    isa_of(option, var_os(ISA))
}

fn isa_of(option: Option<Isa>, variable: Option<OsString>) -> Result<Choice<Isa>> {
    let choice = match (option, variable.filter(|text| !text.is_empty())) {
        (Some(value), _) => Choice { value, why: Why::Option("--isa") },
        (None, Some(text)) => {
            let parsed = text.to_str().and_then(|text| text.parse().ok());
            let value = parsed.ok_or_else(|| Error::Environment {
                name: ISA,
                value: text.to_string_lossy().into_owned(),
                expected: "portable, neon, avx2 or avx512",
            })?;
            Choice { value, why: Why::Variable(ISA) }
        }
        (None, None) => {
            Choice { value: Isa::best(), why: Why::Default("the fastest that this CPU has") }
        }
    };
    if !choice.value.is_available() {
        return Err(Error::Isa { asked: choice.value, has: Isa::available() });
    }
    Ok(choice)
}

/// How many threads a call uses.
pub(crate) fn threads(option: Option<NonZeroUsize>) -> Result<Choice<NonZeroUsize>> {
    if let Some(value) = option {
        return Ok(Choice { value, why: Why::Option("--threads") });
    }
    let why = match var_os(THREADS).filter(|text| !text.is_empty()) {
        Some(text) if text.to_str().is_none() => {
            let value = text.to_string_lossy().into_owned();
            let expected = "a number of threads, at least 1";
            return Err(Error::Environment { name: THREADS, value, expected });
        }
        Some(_) => Why::Variable(THREADS),
        None => Why::Default("as many as this process may use"),
    };
    let count = Threads::Auto.count()?;
    Ok(Choice { value: NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN), why })
}

/// Threads to measure ceilings with: more than there are CPUs reach no more, and take longer.
pub(crate) fn at_once(threads: NonZeroUsize) -> NonZeroUsize {
    std::thread::available_parallelism().map_or(threads, |cpus| cpus.min(threads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_go_before_the_environment_and_that_before_the_best() -> Result<()> {
        let variable = || Some(OsString::from("Portable"));
        let chosen = isa_of(None, variable())?;
        assert_eq!((chosen.value, chosen.why), (Isa::Portable, Why::Variable(ISA)));
        let chosen = isa_of(Some(Isa::best()), variable())?;
        assert_eq!((chosen.value, chosen.why), (Isa::best(), Why::Option("--isa")));
        for nothing in [None, Some(OsString::new())] {
            assert_eq!(isa_of(None, nothing)?.value, Isa::best());
        }
        Ok(())
    }

    #[test]
    fn what_makes_no_sense_or_is_not_there_is_an_error() {
        let message = |option, variable: Option<&str>| {
            isa_of(option, variable.map(OsString::from)).unwrap_err().to_string()
        };
        assert_eq!(
            message(None, Some("sse9")),
            "environment variable LONGSPAN_ISA is \"sse9\", expected portable, neon, avx2 or avx512"
        );
        let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx512 };
        assert!(message(Some(foreign), None).contains("this CPU has portable"));
    }
}
