//! Timed calls, alternating with measurements of the machine's peaks.

use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use longspan::{Element, Hook, Isa, Progress, Result, limits};

use crate::progress::Stage;

/// Number of calls per pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    /// Within a time budget.
    Auto,
    Exactly(NonZeroUsize),
}

impl Repeat {
    /// Least number of calls, for a median.
    const MIN_CALLS: usize = 3;
    /// Largest number of calls.
    const MAX_CALLS: usize = 100;
    /// Time budget of all calls, peaks included.
    const BUDGET: Duration = Duration::from_secs(2);
    /// A longer call is not repeated: its noise is relatively small.
    const LONG: Duration = Duration::from_secs(10);

    /// Estimated number of calls after `done` calls in `took`.
    fn calls(self, done: usize, took: Duration) -> usize {
        match self {
            Repeat::Exactly(count) => count.get(),
            Repeat::Auto if done == 0 => Repeat::MIN_CALLS,
            Repeat::Auto if took > Repeat::LONG => done,
            Repeat::Auto if took >= Repeat::BUDGET => done.max(Repeat::MIN_CALLS),
            Repeat::Auto => {
                let more = (Repeat::BUDGET - took).div_duration_f64(took / done as u32);
                (done + more.ceil().min(1e6) as usize).clamp(Repeat::MIN_CALLS, Repeat::MAX_CALLS)
            }
        }
    }
}

/// The peaks to measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peaks<'a, E> {
    /// The instruction set of the kernels.
    pub(super) isa: Isa,
    pub(super) threads: NonZeroUsize,
    /// Keys and values, where reading them may be the bottleneck.
    pub(super) reads: Option<[&'a [E]; 2]>,
}

/// The measurements, in their order.
#[derive(Debug, Default)]
pub(super) struct Samples {
    pub(super) seconds: Vec<f64>,
    /// FMA peaks, GFLOP/s.
    pub(super) peaks: Vec<f64>,
    /// Peaks of the matrix unit, likewise, where it is used.
    pub(super) matrix_peaks: Vec<f64>,
    /// Bytes that a call reads, where the bandwidth was measured.
    pub(super) read_bytes: Option<u64>,
    /// Bandwidths, GB/s.
    pub(super) reads: Vec<f64>,
}

impl Samples {
    pub(super) fn best_seconds(&self) -> f64 {
        self.seconds.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(super) fn median_seconds(&self) -> f64 {
        median(&self.seconds)
    }

    pub(super) fn peak(&self) -> f64 {
        self.peaks.iter().copied().fold(0.0, f64::max)
    }

    pub(super) fn matrix_peak(&self) -> Option<f64> {
        self.matrix_peaks.iter().copied().reduce(f64::max)
    }

    pub(super) fn median_peak(&self) -> f64 {
        median(&self.peaks)
    }

    /// Bytes that a call reads, and the best bandwidth.
    pub(super) fn bandwidth(&self) -> Option<(u64, f64)> {
        Some((self.read_bytes?, self.reads.iter().copied().fold(0.0, f64::max)))
    }

    fn measure<E: Element>(&mut self, peaks: &Peaks<'_, E>) -> Result<()> {
        self.peaks.push(limits::fma_peak(peaks.isa, peaks.threads)?);
        if peaks.isa == Isa::Amx {
            self.matrix_peaks.extend(limits::amx_peak(peaks.threads));
        }
        if let Some(tensors) = peaks.reads {
            let bytes = tensors.map(|elements| size_of_val(elements) as f64);
            let time = |n: usize| bytes[n] / limits::read_bandwidth(tensors[n], peaks.threads);
            self.reads.push((bytes[0] + bytes[1]) / (time(0) + time(1)));
            self.read_bytes = Some((bytes[0] + bytes[1]) as u64);
        }
        Ok(())
    }
}

/// Calls `pass` several times, with the peaks measured before each call and after the last.
pub(super) fn several<E: Element>(
    name: &str,
    repeat: Repeat,
    peaks: &Peaks<'_, E>,
    mut pass: impl FnMut(Hook<'_>) -> Result<()>,
) -> Result<Samples> {
    let stage = Stage::share(name);
    let start = Instant::now();
    let mut samples = Samples::default();
    loop {
        samples.measure(peaks)?;
        let (done, took) = (samples.seconds.len(), start.elapsed());
        let calls = repeat.calls(done, took);
        if done >= calls {
            return Ok(samples);
        }
        let mut between = |progress: Progress| {
            let (part, whole) = (progress.done as u64, progress.total as u64);
            stage.at(done as u64 * whole + part, calls as u64 * whole);
            ControlFlow::Continue(())
        };
        let start = Instant::now();
        pass(Hook::new(&mut between))?;
        samples.seconds.push(start.elapsed().as_secs_f64());
    }
}

/// Calls `pass` once and measures nothing.
pub(super) fn once(name: &str, pass: impl FnOnce(Hook<'_>) -> Result<()>) -> Result<()> {
    let stage = Stage::share(name);
    let mut between = |progress: Progress| {
        stage.at(progress.done as u64, progress.total as u64);
        ControlFlow::Continue(())
    };
    pass(Hook::new(&mut between))
}

fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n.is_multiple_of(2) => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        n => sorted[n / 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_fit_the_budget() {
        let calls = |done, ms| Repeat::Auto.calls(done, Duration::from_millis(ms));
        // No call yet; 1 ms each; 500 ms; 3 s; 11 s.
        assert_eq!(calls(0, 0), 3);
        assert_eq!(calls(1, 1), 100);
        assert_eq!(calls(1, 500), 4);
        assert_eq!(calls(1, 3_000), 3);
        assert_eq!(calls(3, 9_000), 3);
        assert_eq!(calls(1, 11_000), 1);
        assert_eq!(calls(100, 1_000), 100);
        let exactly = Repeat::Exactly(NonZeroUsize::new(7).unwrap());
        assert_eq!(exactly.calls(1, Duration::from_secs(60)), 7);
    }

    #[test]
    fn peaks_surround_calls() -> Result<()> {
        let data = vec![1.0_f32; 1 << 12];
        let peaks = Peaks {
            isa: Isa::Portable,
            threads: NonZeroUsize::MIN,
            reads: Some([&data, &data[..1 << 10]]),
        };
        let twice = Repeat::Exactly(NonZeroUsize::new(2).unwrap());
        let mut calls = 0;
        let samples = several("test", twice, &peaks, |_| {
            calls += 1;
            Ok(())
        })?;
        assert_eq!((calls, samples.seconds.len(), samples.peaks.len()), (2, 2, 3));
        assert_eq!(samples.bandwidth().map(|(bytes, _)| bytes), Some(5 << 12));
        assert!(samples.peak() >= samples.median_peak() && samples.median_peak() > 0.0);
        Ok(())
    }

    #[test]
    fn matrix_unit_is_measured_where_used() -> Result<()> {
        fn samples<E: Element>(isa: Isa) -> Result<Samples> {
            let peaks = Peaks::<E> { isa, threads: NonZeroUsize::MIN, reads: None };
            several("test", Repeat::Exactly(NonZeroUsize::MIN), &peaks, |_| Ok(()))
        }
        assert_eq!(samples::<half::bf16>(Isa::Portable)?.matrix_peak(), None);
        if Isa::Amx.is_available() {
            let samples_of_bf16 = samples::<half::bf16>(Isa::Amx)?;
            assert!(samples_of_bf16.matrix_peak() > Some(samples_of_bf16.peak()));
        }
        Ok(())
    }

    #[test]
    fn medians() {
        assert_eq!([median(&[]), median(&[3.0]), median(&[4.0, 1.0])], [0.0, 3.0, 2.5]);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
    }
}
