//! The instruction set and the number of threads of a call, and the reason for each.
//!
//! The library chooses: an option, else an environment variable that isn't empty, else the best
//! available. This module adds the reason.

use std::env::var_os;
use std::fmt;
use std::num::NonZeroUsize;

use longspan::{ElementType, Isa, Result, Threads};

pub(crate) const ISA: &str = "LONGSPAN_ISA";
pub(crate) const THREADS: &str = "LONGSPAN_THREADS";

/// What determined a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    Option(&'static str),
    Variable(&'static str),
    Default(&'static str),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Option(name) => write!(f, "set by {name}"),
            Why::Variable(name) => write!(f, "set by {name}"),
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
        None if is_set(ISA) => Why::Variable(ISA),
        None => Why::Default("the fastest that this CPU has"),
    };
    Ok(Choice { value: Isa::choose(option)?, why })
}

/// The instruction set of the kernels that a call on tensors of `dtype` runs: AMX multiplies bf16
/// only, so other dtypes run AVX-512 kernels there.
pub(crate) fn kernel_isa(isa: Isa, dtype: ElementType) -> Isa {
    if dtype == ElementType::Bf16 { isa } else { vector_isa(isa) }
}

/// The instruction set of the kernels that have no matrix unit.
pub(crate) fn vector_isa(isa: Isa) -> Isa {
    if isa == Isa::Amx { Isa::Avx512 } else { isa }
}

/// The number of threads of a call.
pub(crate) fn threads(option: Option<NonZeroUsize>) -> Result<Choice<NonZeroUsize>> {
    let why = match option {
        Some(_) => Why::Option("--threads"),
        None if is_set(THREADS) => Why::Variable(THREADS),
        None => Why::Default("as many as this process may use"),
    };
    let count = option.map_or(Threads::Auto, |count| Threads::Count(count.get())).count()?;
    Ok(Choice { value: NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN), why })
}

/// Whether an environment variable is set and not empty.
fn is_set(variable: &str) -> bool {
    var_os(variable).is_some_and(|text| !text.is_empty())
}

/// Threads to measure peaks with: at most one per CPU.
pub(crate) fn at_once(threads: NonZeroUsize) -> NonZeroUsize {
    std::thread::available_parallelism().map_or(threads, |cpus| cpus.min(threads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amx_kernels_are_for_bf16() {
        let of = |isa| ElementType::ALL.map(|dtype| kernel_isa(isa, dtype));
        assert_eq!(ElementType::ALL.map(|dtype| dtype.to_string()), ["f32", "bf16", "f16"]);
        assert_eq!(of(Isa::Amx), [Isa::Avx512, Isa::Amx, Isa::Avx512]);
        for isa in [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512] {
            assert_eq!(of(isa), [isa; 3]);
        }
    }

    /// The mapping agrees with the operand types that the library reports.
    #[test]
    fn kernels_are_those_of_the_library() -> Result<()> {
        fn multiplies_bf16<E: longspan::Element>(isa: Isa) -> Result<bool> {
            let shape = longspan::Shape::new(1, 1);
            let layout = longspan::Layout::compile(&longspan::Pattern::full(), &shape)?;
            let numbers = longspan::Attention::new(layout).isa(isa).compute_types::<E>()?;
            Ok(numbers.multiplied == ElementType::Bf16)
        }
        for isa in Isa::available() {
            let on_amx = |dtype| kernel_isa(isa, dtype) == Isa::Amx;
            assert_eq!(multiplies_bf16::<f32>(isa)?, on_amx(ElementType::F32));
            assert_eq!(multiplies_bf16::<half::bf16>(isa)?, on_amx(ElementType::Bf16));
            assert_eq!(multiplies_bf16::<half::f16>(isa)?, on_amx(ElementType::F16));
        }
        Ok(())
    }

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
