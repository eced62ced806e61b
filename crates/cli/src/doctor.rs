//! `longspan doctor`: what this machine has, what Longspan would use, why, and what is wrong.
//!
//! [`Diagnosis::make`] looks at everything, `advice` draws conclusions from it, `report` prints
//! both. A *problem* is something that makes calls fail or results wrong, and ends the command
//! with an error; a *warning* is something that costs time.

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

/// All that was found. What can't be read here is `null`.
#[derive(Debug, Serialize)]
struct Diagnosis {
    version: &'static str,
    /// Whether this command was built with optimisation.
    optimised: bool,
    architecture: &'static str,
    cpu: Option<String>,
    /// CPUs of the machine, and cores that they are threads of.
    cpus: Option<usize>,
    cores: Option<usize>,
    /// The CPUs that this process may run on.
    affinity: Option<String>,
    allowed_cpus: Option<usize>,
    /// CPUs that the container may use on average.
    cpu_quota: Option<f64>,
    /// Threads that wanted to run, over the last minute.
    load: Option<f64>,
    caches: Vec<Cache>,
    memory_bytes: Option<u64>,
    free_memory_bytes: Option<u64>,
    memory_limit_bytes: Option<u64>,
    huge_pages: Option<String>,
    instruction_sets: Vec<Set>,
    matrix_unit: MatrixUnit,
    /// What would be used, unless the environment makes no sense.
    isa: Option<String>,
    isa_why: Option<String>,
    /// What that means for each type that tensors hold.
    kernels: Vec<Kernel>,
    threads: Option<usize>,
    threads_why: Option<String>,
    /// FMA peak of what would be used, GFLOP/s, on one thread and on all of them.
    one_thread_gflops: Option<f64>,
    peak_gflops: Option<f64>,
    /// Peak of the matrix unit on all threads, where it would be used.
    matrix_peak_gflops: Option<f64>,
    warnings: Vec<String>,
    /// What the environment has wrong.
    environment_problems: Vec<String>,
    /// What the CPU or this build has wrong.
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
        // What can be measured although the environment makes no sense.
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
            optimised: !cfg!(debug_assertions),
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

/// What was chosen; what is wrong with the variable that decides it goes to the problems.
fn or_problem<T>(
    chosen: longspan::Result<Choice<T>>,
    variable: &str,
    problems: &mut Vec<String>,
) -> Option<Choice<T>> {
    chosen
        .map_err(|error| {
            let advice = format!("`unset {variable}` leaves the choice to Longspan");
            problems.push(match error {
                longspan::Error::Environment { .. } => format!("{error}; {advice}"),
                error => format!("environment variable {variable}: {error}; {advice}"),
            });
        })
        .ok()
}

/// The best of a few measurements, each about ten milliseconds: something else always runs.
fn best_peak(isa: Isa, threads: NonZeroUsize) -> longspan::Result<f64> {
    (0..5).map(|_| limits::fma_peak(isa, threads)).try_fold(0.0, |best, peak| Ok(peak?.max(best)))
}

/// The same of the matrix unit.
fn best_matrix_peak(threads: NonZeroUsize) -> Option<f64> {
    (0..5).filter_map(|_| limits::amx_peak(threads)).reduce(f64::max)
}
