//! Whether AMX is there, and permission to use its registers.

#[cfg(all(feature = "amx-emulation", target_os = "linux"))]
mod emulator;

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::{Isa, features};

/// Whether this CPU has the unit, all that goes with it, and the system lets this process use it; or
/// whether it is emulated.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| Isa::Avx512.is_available() && (is_emulated() || is_usable()))
}

fn is_usable() -> bool {
    features::amx!(detected) && unit().iter().all(|&(_, has)| has) && request_permission()
}

/// Whether tests run the kernels without the unit, on any CPU with AVX-512: where `LONGSPAN_EMULATE_AMX` is
/// set. A unit that is there is then not asked for, and its instructions are as illegal as elsewhere.
#[cfg(all(feature = "amx-emulation", target_os = "linux"))]
fn is_emulated() -> bool {
    std::env::var_os("LONGSPAN_EMULATE_AMX").is_some() && emulator::install()
}

#[cfg(not(all(feature = "amx-emulation", target_os = "linux")))]
fn is_emulated() -> bool {
    false
}

/// The features of the unit, by CPUID.
pub(crate) fn unit() -> [(&'static str, bool); 2] {
    let bits = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 };
    [("amx-tile", bits >> 24 & 1 == 1), ("amx-bf16", bits >> 22 & 1 == 1)]
}

/// Tile registers are large, so Linux saves them only for processes that request it, for all of
/// their threads.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: `arch_prctl` with this code takes a number, touches no memory of the process and
    // changes nothing but what the kernel saves for its threads; the call clobbers `rcx` and `r11`
    // alone.
    unsafe {
        asm!(
            "syscall",
            inout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}
