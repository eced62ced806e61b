//! Which instruction set and how many threads are used, and why.
//!
//! The choice is the library's: what an option says, else what the environment says, else the best
//! there is. A variable that is empty says nothing. Here it only gets its reason.

use std::env::var_os;
use std::fmt;
use std::num::NonZeroUsize;

use longspan::{Isa, Result, Threads};

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
    let why = match option {
        Some(_) => Why::Option("--isa"),
        None if says_something(ISA) => Why::Variable(ISA),
        None => Why::Default("the fastest that this CPU has"),
    };
    Ok(Choice { value: Isa::choose(option)?, why })
}

/// How many threads a call uses.
pub(crate) fn threads(option: Option<NonZeroUsize>) -> Result<Choice<NonZeroUsize>> {
    let why = match option {
        Some(_) => Why::Option("--threads"),
        None if says_something(THREADS) => Why::Variable(THREADS),
        None => Why::Default("as many as this process may use"),
    };
    let count = option.map_or(Threads::Auto, Threads::Count).count()?;
    Ok(Choice { value: NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN), why })
}

/// Whether an environment variable is there and not empty.
fn says_something(variable: &str) -> bool {
    var_os(variable).is_some_and(|text| !text.is_empty())
}

/// Threads to measure ceilings with: more than there are CPUs reach no more, and take longer.
pub(crate) fn at_once(threads: NonZeroUsize) -> NonZeroUsize {
    std::thread::available_parallelism().map_or(threads, |cpus| cpus.min(threads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_decide() -> Result<()> {
        let chosen = isa(Some(Isa::Portable))?;
        assert_eq!((chosen.value, chosen.why), (Isa::Portable, Why::Option("--isa")));
        let chosen = threads(Some(NonZeroUsize::MIN))?;
        assert_eq!((chosen.value, chosen.why), (NonZeroUsize::MIN, Why::Option("--threads")));
        let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx512 };
        let message = isa(Some(foreign)).unwrap_err().to_string();
        assert!(message.contains("this CPU has portable"), "{message}");
        Ok(())
    }
}
