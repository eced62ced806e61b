//! `longspan doctor`: what this machine has, what Longspan would use, why, and what is wrong.
//!
//! [`Diagnosis::make`] measures, `advice` derives warnings, `report` prints both. A *problem* makes
//! calls fail or results wrong, and is an error of the command; a *warning* costs time.

mod advice;
mod report;
mod self_check;
mod sets;

use std::io::{Write, stdout};
use std::num::NonZeroUsize;

use anyhow::Result;
use longspan::{Isa, limits};
use serde::Serialize;

use crate::args::Doctor;
use crate::choice::{self, Choice};
use crate::compile::BadInput;
use crate::machine::{self, Cache};
use crate::progress::Stage;
use sets::{Kernel, MatrixUnit, Set};

/// The diagnosis. Unknown values are `null`.
#[derive(Debug, Serialize)]
struct Diagnosis {
    version: &'static str,
    /// Whether this command was built with optimization.
    optimized: bool,
    architecture: &'static str,
    cpu: Option<String>,
    /// Hardware threads and cores of the machine.
    cpus: Option<usize>,
    cores: Option<usize>,
    /// The CPUs that this process may run on.
    affinity: Option<String>,
    allowed_cpus: Option<usize>,
    /// CPUs that the container may use on average.
    cpu_quota: Option<f64>,
    /// Load average of the last minute.
    load: Option<f64>,
    caches: Vec<Cache>,
    memory_bytes: Option<u64>,
    free_memory_bytes: Option<u64>,
    memory_limit_bytes: Option<u64>,
    huge_pages: Option<String>,
    instruction_sets: Vec<Set>,
    matrix_unit: MatrixUnit,
    /// The instruction set that would be used, unless the environment is invalid.
    isa: Option<String>,
    isa_why: Option<String>,
    /// The kernels that would be used per dtype.
    kernels: Vec<Kernel>,
    threads: Option<usize>,
    threads_why: Option<String>,
    /// FMA peak of what would be used, GFLOP/s, on one thread and on all of them.
    one_thread_gflops: Option<f64>,
    peak_gflops: Option<f64>,
    /// Peak of the matrix unit on all threads, where it would be used.
    matrix_peak_gflops: Option<f64>,
    warnings: Vec<String>,
    /// Invalid environment variables.
    environment_problems: Vec<String>,
    /// Failures of the CPU or this build.
    kernel_problems: Vec<String>,
}

/// `longspan doctor`
pub(crate) fn run(args: &Doctor) -> Result<()> {
    let stage = Stage::new("measuring");
    let diagnosis = Diagnosis::make()?;
    drop(stage);
    let mut out = stdout().lock();
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&diagnosis)?)?,
        false => report::text(&diagnosis, &mut out)?,
    }
    out.flush()?;
    if !diagnosis.kernel_problems.is_empty() {
        anyhow::bail!("{}", diagnosis.kernel_problems.join("\n"));
    }
    if !diagnosis.environment_problems.is_empty() {
        return Err(BadInput(diagnosis.environment_problems.join("\n")).into());
    }
    Ok(())
}

impl Diagnosis {
    fn make() -> Result<Self> {
        let mut environment_problems = Vec::new();
        let isa = or_problem(choice::isa(None), choice::ISA, &mut environment_problems);
        let threads = or_problem(choice::threads(None), choice::THREADS, &mut environment_problems);
        // Measured even if the environment is invalid.
        let measured_isa = isa.map_or(Isa::best(), |choice| choice.value);
        let measured_threads =
            choice::at_once(threads.map_or(NonZeroUsize::MAX, |choice| choice.value));
        let instruction_sets = sets::all(measured_threads)?;
        let kernel_problems =
            instruction_sets.iter().flat_map(|set| set.problems.clone()).collect();
        let kernels = isa.map_or(Vec::new(), |isa| sets::kernels(isa.value, &isa.why.to_string()));

        let cpus_and_cores = machine::cpus_and_cores();
        let affinity = machine::affinity();
        let mut diagnosis = Diagnosis {
            version: env!("CARGO_PKG_VERSION"),
            optimized: !cfg!(debug_assertions),
            architecture: std::env::consts::ARCH,
            cpu: machine::cpu_model(),
            cpus: cpus_and_cores.map(|(cpus, _)| cpus),
            cores: cpus_and_cores.map(|(_, cores)| cores),
            allowed_cpus: affinity.as_ref().map(|(_, count)| *count),
            affinity: affinity.map(|(list, _)| list),
            cpu_quota: machine::cpu_quota(),
            load: machine::load(),
            caches: machine::caches(),
            memory_bytes: machine::memory("MemTotal"),
            free_memory_bytes: machine::free_memory(),
            memory_limit_bytes: machine::memory_limit(),
            huge_pages: machine::huge_pages(),
            isa: isa.map(|choice| choice.value.to_string()),
            isa_why: isa.map(|choice| choice.why.to_string()),
            threads: threads.map(|choice| choice.value.get()),
            threads_why: threads.map(|choice| choice.why.to_string()),
            one_thread_gflops: Some(best_peak(measured_isa, NonZeroUsize::MIN)?),
            peak_gflops: Some(best_peak(measured_isa, measured_threads)?),
            matrix_peak_gflops: (measured_isa == Isa::Amx)
                .then(|| best_matrix_peak(measured_threads))
                .flatten(),
            instruction_sets,
            matrix_unit: MatrixUnit::here(),
            kernels,
            warnings: Vec::new(),
            environment_problems,
            kernel_problems,
        };
        diagnosis.warnings = advice::warnings(&diagnosis);
        Ok(diagnosis)
    }
}

/// The choice; an error of its environment variable is added to the problems.
fn or_problem<T>(
    chosen: longspan::Result<Choice<T>>,
    variable: &str,
    problems: &mut Vec<String>,
) -> Option<Choice<T>> {
    chosen
        .map_err(|error| {
            let advice = format!("`unset {variable}` selects the default");
            problems.push(match error {
                longspan::Error::Environment { .. } => format!("{error}; {advice}"),
                error => format!("environment variable {variable}: {error}; {advice}"),
            });
        })
        .ok()
}

/// The best of a few measurements, each about ten milliseconds: other processes interfere.
fn best_peak(isa: Isa, threads: NonZeroUsize) -> longspan::Result<f64> {
    (0..5).map(|_| limits::fma_peak(isa, threads)).try_fold(0.0, |best, peak| Ok(peak?.max(best)))
}

/// The same of the matrix unit.
fn best_matrix_peak(threads: NonZeroUsize) -> Option<f64> {
    (0..5).filter_map(|_| limits::amx_peak(threads)).reduce(f64::max)
}
