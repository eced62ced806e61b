//! Warnings: what costs time on this machine, and the remedy.

use longspan::Isa;

use super::Diagnosis;
use super::sets::MatrixUnit;
use crate::number::{bytes, count, significant};

/// Free memory below which a million tokens don't fit.
const LITTLE_MEMORY: u64 = 2 << 30;

/// One sentence per warning.
pub(super) fn warnings(found: &Diagnosis) -> Vec<String> {
    let mut warnings = Vec::new();
    if !found.optimized {
        warnings.push(
            "this command was built without optimization, kernels are many times slower: use \
             `cargo build --release` or `cargo install`"
                .to_string(),
        );
    }
    let best = Isa::best().to_string();
    if let Some(isa) = found.isa.as_ref().filter(|isa| **isa != best) {
        warnings.push(format!(
            "LONGSPAN_ISA selects {isa}, this CPU has {best}: unset it to be faster"
        ));
    }
    if found.matrix_unit == MatrixUnit::Forbidden {
        warnings.push(
            "this CPU has AMX, but the system doesn't permit this process to use it: bf16 is computed \
             without; Linux permits it from 5.16 on, unless a sandbox forbids the request"
                .to_string(),
        );
    }
    threads(found, &mut warnings);
    if let Some(quota) = found.cpu_quota.filter(|quota| quota.fract() > 0.05) {
        warnings.push(format!(
            "the container's quota is {} CPUs: the part beyond a whole number goes unused, or makes \
             all threads wait at times",
            significant(quota)
        ));
    }
    if let (Some(load), Some(cpus)) = (found.load, found.cpus)
        && load > 0.75 * cpus as f64
    {
        warnings.push(format!(
            "the machine is busy, with {} on {}: measurements are too low",
            count(load.round() as u64, "thread"),
            count(cpus, "CPU"),
        ));
    }
    if let Some(free) = found.free_memory_bytes.filter(|&free| free < LITTLE_MEMORY) {
        warnings.push(format!("only {} of memory are free", bytes(free as usize)));
    }
    warnings
}

fn threads(found: &Diagnosis, warnings: &mut Vec<String>) {
    let Some(threads) = found.threads else { return };
    let used = count(threads, "thread");
    match found.allowed_cpus {
        Some(allowed) if threads > allowed => warnings.push(format!(
            "{used} on {}: more threads than CPUs wait for each other; set LONGSPAN_THREADS={allowed}",
            count(allowed, "CPU"),
        )),
        Some(allowed) if threads < allowed && found.cpu_quota.is_none() => warnings.push(format!(
            "{used} on {}: unset LONGSPAN_THREADS to use all of them",
            count(allowed, "CPU"),
        )),
        _ => {}
    }
    if let (Some(cores), Some(cpus)) = (found.cores, found.cpus)
        && cores < cpus
        && threads > cores
    {
        warnings.push(format!(
            "{used} on {}: threads of one core share its multiply-add units; \
             LONGSPAN_THREADS={cores} may be as fast",
            count(cores, "core"),
        ));
    }
    // Threads on separate cores reach nearly the sum of their peaks.
    if let (Some(one), Some(all)) = (found.one_thread_gflops, found.peak_gflops)
        && all < 0.8 * one * threads as f64
        && found.allowed_cpus.is_none_or(|allowed| threads <= allowed)
    {
        warnings.push(format!(
            "{used} reach {} times the FMA peak of one: other work, a quota or shared cores take \
             the rest",
            significant(all / one)
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Diagnosis {
        Diagnosis {
            version: "1.0.0",
            optimized: true,
            architecture: "x86_64",
            cpu: None,
            cpus: Some(4),
            cores: Some(4),
            affinity: Some("0-3".into()),
            allowed_cpus: Some(4),
            cpu_quota: None,
            load: Some(0.5),
            caches: vec![],
            memory_bytes: Some(32 << 30),
            free_memory_bytes: Some(16 << 30),
            memory_limit_bytes: None,
            huge_pages: None,
            instruction_sets: vec![],
            matrix_unit: MatrixUnit::None,
            isa: Some(Isa::best().to_string()),
            isa_why: None,
            kernels: vec![],
            threads: Some(4),
            threads_why: None,
            one_thread_gflops: Some(100.0),
            peak_gflops: Some(390.0),
            matrix_peak_gflops: None,
            warnings: vec![],
            environment_problems: vec![],
            kernel_problems: vec![],
        }
    }

    #[test]
    fn healthy_machines_get_no_warnings() {
        assert_eq!(warnings(&healthy()), [""; 0]);
    }

    #[test]
    fn warnings_name_cause_and_remedy() {
        let one = |found: Diagnosis, expected: &str| {
            let warnings = warnings(&found);
            assert!(warnings.len() == 1 && warnings[0].contains(expected), "{warnings:?}");
        };
        one(Diagnosis { optimized: false, ..healthy() }, "cargo build --release");
        one(Diagnosis { threads: Some(9), ..healthy() }, "set LONGSPAN_THREADS=4");
        let few = Diagnosis { threads: Some(1), peak_gflops: Some(100.0), ..healthy() };
        one(few, "1 thread on 4 CPUs: unset LONGSPAN_THREADS");
        one(Diagnosis { cores: Some(2), ..healthy() }, "LONGSPAN_THREADS=2 may be as fast");
        one(Diagnosis { peak_gflops: Some(200.0), ..healthy() }, "reach 2 times the FMA peak");
        let forbidden = Diagnosis { matrix_unit: MatrixUnit::Forbidden, ..healthy() };
        one(forbidden, "this CPU has AMX");
        one(Diagnosis { cpu_quota: Some(1.5), ..healthy() }, "quota is 1.5 CPUs");
        one(Diagnosis { load: Some(3.6), ..healthy() }, "4 threads on 4 CPUs");
        one(Diagnosis { free_memory_bytes: Some(1 << 29), ..healthy() }, "only 512 MiB");
        if Isa::best() != Isa::Portable {
            let slow = Diagnosis { isa: Some("portable".into()), ..healthy() };
            one(slow, "LONGSPAN_ISA selects portable");
        }
    }
}
