//! The instruction sets that Longspan has kernels for, and their state on this CPU.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use longspan::{ElementType, Isa, Result};
use serde::Serialize;

use super::{best_peak, self_check};
use crate::choice;

/// An instruction set on this CPU.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Set {
    pub(super) name: String,
    pub(super) available: bool,
    /// Why it isn't available.
    pub(super) missing: Option<String>,
    /// Largest difference from the portable kernels per dtype, as a share of the norm; `None` above
    /// the limit.
    pub(super) differences: BTreeMap<String, Option<f64>>,
    /// FMA peak with all threads, GFLOP/s.
    pub(super) peak_gflops: Option<f64>,
    /// Failures of the self-check.
    pub(super) problems: Vec<String>,
}

const ALL: [Isa; 5] = [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx];

/// All of them, slowest first.
pub(super) fn all(threads: NonZeroUsize) -> Result<Vec<Set>> {
    let expected =
        ElementType::ALL.map(|element| (element, self_check::compute(Isa::Portable, element)));
    ALL.into_iter()
        .map(|isa| {
            let mut set = Set {
                name: isa.to_string(),
                available: isa.is_available(),
                missing: missing(isa),
                differences: BTreeMap::new(),
                peak_gflops: None,
                problems: Vec::new(),
            };
            if set.available {
                for (element, expected) in &expected {
                    let got = self_check::compute(isa, *element);
                    let difference = self_check::compare(*element, expected, &got);
                    let problem = difference.as_ref().err();
                    set.problems.extend(problem.map(|why| format!("{isa} kernels, {why}")));
                    set.differences.insert(element.to_string(), difference.ok());
                }
                set.peak_gflops = Some(best_peak(isa, threads)?);
            }
            Ok(set)
        })
        .collect()
}

/// The matrix unit of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum MatrixUnit {
    /// The CPU has none that Longspan knows.
    None,
    /// The CPU has AMX for bf16, but the system doesn't permit its use.
    Forbidden,
    /// Available.
    Amx,
}

impl MatrixUnit {
    pub(super) fn here() -> Self {
        match (has_all(Isa::Amx), Isa::Amx.is_available()) {
            (_, true) => MatrixUnit::Amx,
            (true, false) => MatrixUnit::Forbidden,
            (false, false) => MatrixUnit::None,
        }
    }
}

fn has_all(isa: Isa) -> bool {
    isa.features().is_some_and(|all| all.iter().all(|(_, has)| *has))
}

/// The kernels for one dtype.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Kernel {
    pub(super) dtype: String,
    /// The instruction set of the products.
    pub(super) isa: String,
    pub(super) why: String,
}

/// The kernels per dtype with an instruction set.
pub(super) fn kernels(isa: Isa, why: &str) -> Vec<Kernel> {
    let one = |element: ElementType| {
        let used = choice::kernel_isa(isa, element);
        let why = match (isa, used) {
            (Isa::Amx, Isa::Amx) => "AMX multiplies bf16",
            (Isa::Amx, _) => "AMX multiplies bf16 only",
            _ => why,
        };
        Kernel { dtype: element.to_string(), isa: used.to_string(), why: why.to_string() }
    };
    ElementType::ALL.map(one).into()
}

/// Why an instruction set isn't available; `None` where it is.
fn missing(isa: Isa) -> Option<String> {
    if isa.is_available() {
        return None;
    }
    let Some(features) = isa.features() else {
        return Some(format!("not an instruction set of {}", std::env::consts::ARCH));
    };
    let lacks: Vec<&str> = features.iter().filter(|(_, has)| !has).map(|(name, _)| *name).collect();
    Some(match lacks.len() {
        0 if isa == Isa::Amx => "the system doesn't permit its use".to_string(),
        0 => "unknown reason".to_string(),
        _ => format!("this CPU, or its hypervisor, lacks {}", lacks.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_agree_with_the_library() {
        for isa in ALL {
            let expected = isa.is_available()
                || (isa == Isa::Amx && MatrixUnit::here() == MatrixUnit::Forbidden);
            assert_eq!(has_all(isa), expected, "{isa}");
            assert_eq!(missing(isa).is_none(), isa.is_available(), "{isa}");
        }
        let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
        assert!(missing(foreign).unwrap().starts_with("not an instruction set of"));
    }

    #[test]
    fn amx_is_for_bf16() {
        let isas = |isa| kernels(isa, "").into_iter().map(|kernel| kernel.isa).collect::<Vec<_>>();
        assert_eq!(isas(Isa::Amx), ["avx512", "amx", "avx512"]);
        assert_eq!(isas(Isa::Avx2), ["avx2"; 3]);
    }
}
