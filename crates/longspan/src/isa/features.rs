//! The CPU features of each instruction set, written once.
//!
//! A list is a macro that passes its features to another macro:
//!
//! ```text
//! avx2!(detected)               whether this CPU has all of them
//! avx2!(named)                  each name, and whether this CPU has it
//! avx2! { enable fn f() {…} }   `f`, compiled for all of them
//! ```
//!
//! `#[target_feature]` stands nowhere but in [`enable`], so no function can be compiled for a
//! feature that [`Isa::is_available`](crate::Isa::is_available) doesn't detect.

/// What [`Avx2`](crate::simd::Avx2) stands for.
macro_rules! avx2 {
    ($then:ident $($rest:tt)*) => {
        $crate::isa::features::$then! { ["avx2" "fma" "f16c"] $($rest)* }
    };
}

/// What [`Avx512`](crate::simd::Avx512) stands for.
macro_rules! avx512 {
    ($then:ident $($rest:tt)*) => {
        $crate::isa::features::$then! {
            ["avx512f" "avx512bw" "avx512dq" "avx512vl" "avx2" "fma" "bmi1" "bmi2" "f16c"] $($rest)*
        }
    };
}

/// What packing for AMX needs. The unit itself is no feature that Rust
/// detects: [`unit`](super::amx::unit) reads its bits.
macro_rules! amx {
    ($then:ident $($rest:tt)*) => {
        $crate::isa::features::$then! {
            ["avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512bf16"] $($rest)*
        }
    };
}

/// Whether this CPU has all features of a list.
macro_rules! detected {
    ([$($feature:tt)*]) => { $(is_x86_feature_detected!($feature))&&* };
}

/// Each feature of a list, and whether this CPU has it.
macro_rules! named {
    ([$($feature:tt)*]) => { [$(($feature, is_x86_feature_detected!($feature))),*] };
}

/// A function, compiled for all features of a list.
macro_rules! enable {
    ([$($feature:tt)*] $($function:tt)*) => {
        #[target_feature($(enable = $feature),*)]
        $($function)*
    };
}

pub(crate) use {amx, avx2, avx512, detected, enable, named};

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// Calls `look(path, text)` for every source below a folder.
    fn sources(folder: &Path, look: &mut impl FnMut(&Path, &str)) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, look);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                look(&path, &std::fs::read_to_string(&path).unwrap());
            }
        }
    }

    #[test]
    fn features_are_enabled_by_the_lists_alone() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let mut enabling = Vec::new();
        sources(&folder, &mut |path, text| {
            // In two pieces, or this line would be found too.
            let attribute = concat!("#[target", "_feature(");
            let count = text.matches(attribute).count();
            let name = path.strip_prefix(&folder).unwrap().to_owned();
            enabling.extend((count > 0).then_some((name, count)));
        });
        assert_eq!(enabling, [(Path::new("isa").join("features.rs"), 1)]);
    }

    #[test]
    fn sets_are_available_where_their_features_are() {
        use crate::Isa;
        for isa in [Isa::Avx2, Isa::Avx512] {
            let all = isa.features().unwrap();
            assert_eq!(isa.is_available(), all.iter().all(|&(_, has)| has), "{isa}: {all:?}");
        }
        // Names that no other feature of the list implies.
        let names: Vec<&str> = Isa::Avx512.features().unwrap().into_iter().map(|it| it.0).collect();
        assert!(names.contains(&"bmi1") && names.contains(&"bmi2"), "{names:?}");
        // A unit may be there without permission to use it, but not the reverse.
        let unit = Isa::Amx.features().unwrap().iter().all(|&(_, has)| has);
        let emulated = std::env::var_os("LONGSPAN_EMULATE_AMX").is_some();
        assert!(unit || emulated || !Isa::Amx.is_available());
    }
}
