//! Whether AMX is there, and permission to use its registers.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::{Isa, features};

/// Whether this CPU has the unit, all that goes with it, and the system lets this process use it.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        Isa::Avx512.is_available()
            && features::amx!(detected)
            && unit().iter().all(|&(_, has)| has)
            && request_permission()
    })
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
