//! Which instruction set the kernels use.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod features;

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// An instruction set that the kernels are compiled for.
///
/// The fastest one that this CPU has is used, unless [`Attention::isa`](crate::Attention::isa) or
/// the environment variable `LONGSPAN_ISA` names another.
///
/// ```
/// use longspan::Isa;
///
/// assert!(Isa::available().contains(&Isa::Portable));
/// assert_eq!("avx2".parse::<Isa>()?, Isa::Avx2);
/// println!("this CPU uses {}", Isa::best());
/// # Ok::<_, longspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, for any CPU.
    Portable,
    /// Arm's 128-bit vectors.
    Neon,
    /// 256-bit vectors with fused multiply-add (Haswell, Zen and later).
    Avx2,
    /// 512-bit vectors (Skylake-SP, Zen 4 and later).
    Avx512,
    /// The same, and a matrix unit for products of bf16 (Sapphire Rapids and later).
    Amx,
}

/// Names the instruction set to use, where no option does.
pub(crate) const VARIABLE: &str = "LONGSPAN_ISA";

impl Isa {
    const ALL: [Isa; 5] = [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// Its name, as options and `LONGSPAN_ISA` spell it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

    /// Those that this CPU has, slowest first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest one that this CPU has.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().rfind(|isa| isa.is_available()).unwrap_or(Isa::Portable)
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => features::avx2!(detected),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => features::avx512!(detected),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => amx::is_available(),
            // Part of every target that `simd::Neon` compiles for.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The CPU features that its kernels are compiled for, and whether this CPU has each of them.
    /// `None` where it is an instruction set of another architecture.
    ///
    /// A CPU may have all that [`Isa::Amx`] needs, and a system that doesn't let the process use
    /// it.
    ///
    /// ```
    /// use longspan::Isa;
    ///
    /// for (feature, has) in Isa::Avx2.features().unwrap_or_default() {
    ///     println!("{feature}: {has}");
    /// }
    /// ```
    pub fn features(self) -> Option<Vec<(&'static str, bool)>> {
        match self {
            Isa::Portable => Some(Vec::new()),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(features::avx2!(named).into()),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Some(features::avx512!(named).into()),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => {
                let mut all = Isa::Avx512.features()?;
                let others = features::amx!(named).into_iter().chain(amx::unit());
                for feature in others {
                    if !all.contains(&feature) {
                        all.push(feature);
                    }
                }
                Some(all)
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Some(vec![("neon", true)]),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }

    /// The one that a call uses: what was asked for, else what the environment variable
    /// `LONGSPAN_ISA` names, else the [best](Self::best). An error where this CPU hasn't got it, or
    /// where the variable names none.
    ///
    /// ```
    /// use longspan::Isa;
    ///
    /// assert_eq!(Isa::choose(Some(Isa::Portable))?, Isa::Portable);
    /// println!("calls without an option use {}", Isa::choose(None)?);
    /// # Ok::<_, longspan::Error>(())
    /// ```
    pub fn choose(asked: Option<Isa>) -> Result<Isa> {
        let asked = match asked {
            Some(isa) => isa,
            None => {
                match std::env::var_os(VARIABLE).map(|text| text.to_string_lossy().into_owned()) {
                    Some(text) if !text.is_empty() => {
                        text.parse().map_err(|_| Error::Environment {
                            name: VARIABLE,
                            value: text,
                            expected: "portable, neon, avx2, avx512 or amx",
                        })?
                    }
                    _ => return Ok(Isa::best()),
                }
            }
        };
        if asked.is_available() {
            Ok(asked)
        } else {
            let has = Isa::available().into_iter().map(Isa::name).collect();
            Err(Error::Isa { asked: asked.name(), has })
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let same = |isa: &Isa| isa.to_string().eq_ignore_ascii_case(text.trim());
        Isa::ALL.into_iter().find(same).ok_or_else(|| Error::IsaName { name: text.to_owned() })
    }
}
