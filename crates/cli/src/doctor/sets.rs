//! The instruction sets that Longspan has kernels for, and how each fares here.

use std::num::NonZeroUsize;

use longspan::{Isa, Result};
use serde::Serialize;

use super::{best_peak, self_check};

/// An instruction set on this CPU.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Set {
    pub(super) name: String,
    pub(super) available: bool,
    /// Why it isn't.
    pub(super) missing: Option<String>,
    /// Where results differ most from those of the portable kernels, as a share of their size.
    pub(super) difference: Option<f64>,
    /// FMA peak with all threads, GFLOP/s.
    pub(super) peak_gflops: Option<f64>,
    /// What the self-check found.
    pub(super) problem: Option<String>,
}

/// All of them, slowest first.
pub(super) fn all(threads: NonZeroUsize) -> Result<Vec<Set>> {
    let expected = self_check::compute(Isa::Portable);
    [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512]
        .into_iter()
        .map(|isa| {
            let mut set = Set {
                name: isa.to_string(),
                available: isa.is_available(),
                missing: missing(isa),
                difference: None,
                peak_gflops: None,
                problem: None,
            };
            if set.available {
                let difference = self_check::compare(&expected, &self_check::compute(isa));
                set.problem = difference.as_ref().err().map(|why| format!("{isa} kernels: {why}"));
                set.difference = difference.ok();
                set.peak_gflops = Some(best_peak(isa, threads)?);
            }
            Ok(set)
        })
        .collect()
}

/// What a CPU needs for an instruction set, and whether this one has it.
fn features(isa: Isa) -> Option<Vec<(&'static str, bool)>> {
    macro_rules! x86 {
        ($($name:tt),*) => {{
            #[cfg(target_arch = "x86_64")]
            { Some(vec![$(($name, is_x86_feature_detected!($name))),*]) }
            #[cfg(not(target_arch = "x86_64"))]
            { None }
        }};
    }
    match isa {
        Isa::Portable => Some(vec![]),
        Isa::Avx2 => x86!("avx2", "fma"),
        Isa::Avx512 => x86!("avx512f", "avx512dq", "avx512vl", "avx512bw", "avx2", "fma"),
        Isa::Neon if cfg!(target_arch = "aarch64") => Some(vec![]),
        _ => None,
    }
}

/// Why an instruction set isn't available; nothing where it is.
fn missing(isa: Isa) -> Option<String> {
    if isa.is_available() {
        return None;
    }
    let Some(features) = features(isa) else {
        return Some(format!("not an instruction set of {}", std::env::consts::ARCH));
    };
    let lacks: Vec<&str> = features.iter().filter(|(_, has)| !has).map(|(name, _)| *name).collect();
    Some(match lacks.len() {
        0 => "this version of longspan doesn't say why".to_string(),
        _ => format!("this CPU, or what virtualises it, lacks {}", lacks.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_that_the_library_asks_for() {
        for isa in [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512] {
            let has_all = features(isa).is_some_and(|all| all.iter().all(|(_, has)| *has));
            assert_eq!(has_all, isa.is_available(), "{isa}");
            assert_eq!(missing(isa).is_none(), isa.is_available(), "{isa}");
        }
        let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
        assert!(missing(foreign).unwrap().starts_with("not an instruction set of"));
    }
}
