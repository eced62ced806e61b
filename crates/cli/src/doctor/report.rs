//! The diagnosis as text.

use std::io::{Result, Write};

use super::Diagnosis;
use super::sets::{MatrixUnit, Set};
use crate::number::{bytes, count, significant};
use crate::table;

/// One line per property, a table of instruction sets, and the warnings.
pub(super) fn text(found: &Diagnosis, out: &mut impl Write) -> Result<()> {
    let unknown = || "unknown".to_string();
    let size = |number: Option<u64>| number.map(|number| bytes(number as usize));
    let mut line = |name: &str, text: String| writeln!(out, "{name:<15}{text}");
    let how = if found.optimized { "optimized" } else { "not optimized" };
    line("longspan", format!("{}, {how}", found.version))?;
    let model = found.cpu.clone().unwrap_or_else(unknown);
    line("CPU", format!("{model}, {}", found.architecture))?;
    if let (Some(cpus), Some(cores)) = (found.cpus, found.cores) {
        let (cpus, cores) = (count(cpus, "CPU"), count(cores, "core"));
        line("cores", format!("{cores}, {cpus}"))?;
    }
    let affinity = match (&found.affinity, found.allowed_cpus) {
        (Some(list), Some(allowed)) => format!("{} ({list})", count(allowed, "CPU")),
        _ => unknown(),
    };
    line("affinity", affinity)?;
    let quota = found.cpu_quota.map(|quota| format!("{} CPUs", significant(quota)));
    line("quota", quota.unwrap_or_else(|| "none".into()))?;
    if !found.caches.is_empty() {
        let one = |cache: &crate::machine::Cache| {
            let size = bytes(cache.bytes as usize);
            let whose = match cache.shared_by {
                1 => String::new(),
                sharers => format!(" for {sharers} CPUs"),
            };
            format!("L{} {size}{whose}", cache.level)
        };
        let all: Vec<String> = found.caches.iter().map(one).collect();
        line("caches", all.join(", "))?;
    }
    let total = size(found.memory_bytes).unwrap_or_else(unknown);
    let free = size(found.free_memory_bytes).unwrap_or_else(unknown);
    let limit = match size(found.memory_limit_bytes) {
        Some(limit) => format!(", {limit} for this container"),
        None => String::new(),
    };
    line("memory", format!("{total}, {free} free{limit}"))?;
    if let Some(mode) = &found.huge_pages {
        line("huge pages", mode.clone())?;
    }
    let unit = match found.matrix_unit {
        MatrixUnit::None => "this CPU has none for bf16",
        MatrixUnit::Forbidden => "AMX, and the system doesn't let this process use it",
        MatrixUnit::Amx => "AMX for bf16, and the system lets this process use it",
    };
    line("matrix unit", unit.into())?;
    let chosen = |value: Option<String>, why: &Option<String>| match (value, why) {
        (Some(value), Some(why)) => format!("{value}: {why}"),
        _ => "none, see below".to_string(),
    };
    line("would use", chosen(found.isa.clone(), &found.isa_why))?;
    for kernel in &found.kernels {
        line("", format!("  {} for {}: {}", kernel.isa, kernel.dtype, kernel.why))?;
    }
    let threads = found.threads.map(|threads| count(threads, "thread"));
    line("", chosen(threads, &found.threads_why))?;
    if let (Some(one), Some(all)) = (found.one_thread_gflops, found.peak_gflops) {
        let (one, all) = (significant(one), significant(all));
        line("FMA peak", format!("{all} GFLOP/s, one thread {one}"))?;
    }
    if let Some(peak) = found.matrix_peak_gflops {
        line("AMX peak", format!("{} GFLOP/s", significant(peak)))?;
    }

    writeln!(out)?;
    let header = ["self-check", "f32", "bf16", "f16", "FMA peak", ""];
    let mut rows = vec![header.map(String::from)];
    for set in &found.instruction_sets {
        let [f32, bf16, f16] = ["f32", "bf16", "f16"].map(|element| check(set, element));
        let peak = set.peak_gflops.map_or_else(String::new, significant);
        let used = if found.isa.as_ref() == Some(&set.name) { "used" } else { "" };
        let note = set.missing.clone().unwrap_or_else(|| used.to_string());
        rows.push([set.name.clone(), f32, bf16, f16, peak, note]);
    }
    table::print(&rows, 4, out)?;

    let problems = found.environment_problems.iter().chain(&found.kernel_problems);
    let remarks: Vec<String> = problems
        .map(|problem| format!("problem: {problem}"))
        .chain(found.warnings.iter().map(|warning| format!("warning: {warning}")))
        .collect();
    writeln!(out)?;
    match remarks.is_empty() {
        true => writeln!(out, "no problems found"),
        false => writeln!(out, "{}", remarks.join("\n")),
    }
}

/// How results of an instruction set compare with those of the portable kernels.
fn check(set: &Set, element: &str) -> String {
    match set.differences.get(element).copied() {
        _ if !set.available => "unavailable".to_string(),
        _ if set.name == "portable" => "reference".to_string(),
        Some(Some(0.0)) => "identical".to_string(),
        Some(Some(difference)) => format!("agrees to {difference:.0e}"),
        _ => "WRONG".to_string(),
    }
}
