//! Properties of this machine and this process, from Linux's `/proc` and `/sys`.
//!
//! Functions return `None` where a file is missing. Parsers are separate from readers of files, for
//! tests.

mod cgroup;

use std::fs::read_to_string;
use std::path::Path;

use serde::Serialize;

pub(crate) use cgroup::{cpu_quota, memory_limit};

/// The number before ` kB` on the line of a name, in bytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1_024)
}

/// Memory of the machine in bytes: `MemTotal`, `MemAvailable`, …
pub(crate) fn memory(name: &str) -> Option<u64> {
    kilobytes(&read_to_string("/proc/meminfo").ok()?, name)
}

/// Bytes that this process could still use: of the machine, and of its container.
pub(crate) fn free_memory() -> Option<u64> {
    let machine = memory("MemAvailable")?;
    Some(match (memory_limit(), process("VmRSS")) {
        (Some(limit), Some(used)) => machine.min(limit.saturating_sub(used)),
        _ => machine,
    })
}

fn process(name: &str) -> Option<u64> {
    kilobytes(&read_to_string("/proc/self/status").ok()?, name)
}

/// Peak growth of this process since a moment.
pub(crate) struct Growth {
    before: u64,
}

impl Growth {
    /// From now on. Resets the kernel's peak where permitted; otherwise the peak of a process that
    /// has just started is small.
    pub(crate) fn since_now() -> Option<Self> {
        // Writing 5 resets the peak, see proc(5).
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        Some(Growth { before: process("VmRSS")? })
    }

    /// Peak bytes of memory beyond those at the start.
    pub(crate) fn peak(&self) -> Option<u64> {
        Some(process("VmHWM")?.saturating_sub(self.before))
    }
}

/// The CPU's model name.
pub(crate) fn cpu_model() -> Option<String> {
    let text = read_to_string("/proc/cpuinfo").ok()?;
    fields(&text, "model name").next().map(str::to_string)
}

/// Number of CPUs (hardware threads) and of cores.
pub(crate) fn cpus_and_cores() -> Option<(usize, usize)> {
    let text = read_to_string("/proc/cpuinfo").ok()?;
    count_cores(&text)
}

fn fields<'a>(text: &'a str, name: &'static str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

fn count_cores(text: &str) -> Option<(usize, usize)> {
    let cpus = fields(text, "processor").count();
    let mut cores: Vec<_> = fields(text, "physical id").zip(fields(text, "core id")).collect();
    cores.sort_unstable();
    cores.dedup();
    // Arm kernels don't number cores.
    let cores = if cores.is_empty() { cpus } else { cores.len() };
    (cpus > 0).then_some((cpus, cores))
}

/// The CPUs that this process may run on, as `0-3,8`, and how many they are.
pub(crate) fn affinity() -> Option<(String, usize)> {
    let text = read_to_string("/proc/self/status").ok()?;
    let list = fields(&text, "Cpus_allowed_list").next()?;
    Some((list.to_string(), listed(list)?))
}

/// The length of a list such as `0-3,8`.
fn listed(list: &str) -> Option<usize> {
    let mut count = 0;
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse().ok()?);
        count += usize::checked_sub(last, first)? + 1;
    }
    Some(count)
}

/// A cache of the first CPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Cache {
    pub(crate) level: u32,
    /// Data, Instruction or Unified.
    pub(crate) kind: String,
    pub(crate) bytes: u64,
    /// Number of CPUs that share it.
    pub(crate) shared_by: usize,
}

/// The caches of the first CPU, nearest first, without instruction caches.
pub(crate) fn caches() -> Vec<Cache> {
    let one = |index: usize| {
        let folder = format!("/sys/devices/system/cpu/cpu0/cache/index{index}");
        let read = |name: &str| read_to_string(Path::new(&folder).join(name)).ok();
        let size = read("size")?;
        Some(Cache {
            level: read("level")?.trim().parse().ok()?,
            kind: read("type")?.trim().to_string(),
            bytes: size.trim().strip_suffix('K')?.parse::<u64>().ok()? * 1_024,
            shared_by: listed(read("shared_cpu_list")?.trim())?,
        })
    };
    (0..8).filter_map(one).filter(|cache| cache.kind != "Instruction").collect()
}

/// The kernel's mode of huge pages: always, madvise or never.
pub(crate) fn huge_pages() -> Option<String> {
    let text = read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    let chosen = text.split_whitespace().find(|word| word.starts_with('['))?;
    Some(chosen.trim_matches(['[', ']']).to_string())
}

/// Load average of the last minute.
pub(crate) fn load() -> Option<f64> {
    read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc() {
        let text = "MemTotal:       24598008 kB\nMemFree:        1 kB\nHugePages_Total:       0\n";
        assert_eq!(kilobytes(text, "MemTotal"), Some(24_598_008 * 1_024));
        assert_eq!(kilobytes(text, "Mem"), None);
        assert_eq!(kilobytes(text, "HugePages_Total"), None);
    }

    #[test]
    fn lists_of_cpus() {
        assert_eq!(listed("0-3,8,10-11"), Some(7));
        assert_eq!(listed("5"), Some(1));
        assert_eq!(listed("3-1"), None);
        assert_eq!(listed(""), None);
    }

    #[test]
    fn two_threads_per_core() {
        let cpu = |cpu, package, core| {
            format!("processor\t: {cpu}\nphysical id\t: {package}\ncore id\t: {core}\n\n")
        };
        let text: String = (0..8).map(|n| cpu(n, n / 4, n % 2)).collect();
        assert_eq!(count_cores(&text), Some((8, 4)));
        assert_eq!(count_cores("processor\t: 0\nprocessor\t: 1\n"), Some((2, 2)));
        assert_eq!(count_cores(""), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn growth_is_seen() {
        let growth = Growth::since_now().unwrap();
        let held = vec![1_u8; 64 << 20];
        let most = growth.peak().unwrap();
        drop(std::hint::black_box(held));
        // Other tests of this process run concurrently: the growth may be larger or slightly smaller.
        assert!(most > 48 << 20, "{most}");
    }
}
