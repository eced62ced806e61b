//! Threads that stay on a CPU.

use crate::error::{Error, Result};

/// Refuses CPUs that this process may not use, and an empty list.
pub(super) fn check(cpus: &[usize]) -> Result<()> {
    let allowed = allowed();
    match cpus.iter().find(|cpu| !allowed.contains(cpu)) {
        Some(&cpu) => Err(Error::Cpu { cpu, allowed }),
        None if cpus.is_empty() => Err(Error::NoCpus),
        None => Ok(()),
    }
}

/// The CPUs of this process's affinity mask; none where the system has no such mask.
#[cfg(target_os = "linux")]
pub(super) fn allowed() -> Vec<usize> {
    let mut set = empty();
    // SAFETY: `set` is a valid set of the size given, and 0 is the calling thread.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
    // SAFETY: the index is below CPU_SETSIZE, the number of bits of a set.
    let has = |&cpu: &usize| unsafe { libc::CPU_ISSET(cpu, &set) };
    let cpus = 0..libc::CPU_SETSIZE as usize;
    if result == 0 { cpus.filter(has).collect() } else { Vec::new() }
}

#[cfg(target_os = "linux")]
fn empty() -> libc::cpu_set_t {
    // SAFETY: a set is an array of integers, for which zero bits are the empty set.
    unsafe { std::mem::zeroed() }
}

/// Pins the current thread to a CPU that [`check`] has accepted. If the CPU was taken away since,
/// the thread stays where the system puts it.
#[cfg(target_os = "linux")]
pub(super) fn current_thread(cpu: usize) {
    let mut set = empty();
    // SAFETY: `check` accepts CPUs below CPU_SETSIZE only; the set is valid and of the size given.
    unsafe {
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn allowed() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(super) fn current_thread(_: usize) {
    unreachable!("no CPU was accepted")
}
