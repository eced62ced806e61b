//! What the machine can do, measured: the ceilings that attention is compared with.
//!
//! Machines are shared and clocks vary, so a share of a ceiling means something only if both were
//! measured in the same minutes, with the same threads. `longspan bench` does.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::error::Result;
use crate::isa::Isa;
use crate::simd::{Operation, Simd, WithSimd, dispatch};
use crate::threads;

/// Billions of f32 operations a second that multiply-add instructions on registers alone reach on
/// `threads` threads at once: the ceiling of f32 attention. Takes about two milliseconds; take the best of several.
///
/// ```
/// use std::num::NonZeroUsize;
/// use longspan::{Isa, limits};
///
/// let peak = limits::fma_peak(Isa::best(), NonZeroUsize::MIN)?;
/// assert!(peak > 0.0);
/// # Ok::<_, longspan::Error>(())
/// ```
pub fn fma_peak(isa: Isa, threads: NonZeroUsize) -> Result<f64> {
    let isa = Isa::choose(Some(isa))?;
    /// Rounds a thread claims: about a tenth of a millisecond of work each.
    const ROUNDS: usize = 20;
    let left = AtomicUsize::new(ROUNDS * threads.get());
    let start = Instant::now();
    threads::run(threads.get(), &|| {
        while left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
        {
            black_box(dispatch(isa, Multiply(black_box(1.0))));
        }
    });
    let flops = (ROUNDS * threads.get()) as f64 * dispatch(isa, Flops);
    Ok(flops / start.elapsed().as_secs_f64() / 1e9)
}

/// Billions of bytes a second at which `threads` threads read `data`: the ceiling of decoding,
/// where every key is read and little is computed. Data that fits a cache measures the cache.
///
/// ```
/// use std::num::NonZeroUsize;
/// use longspan::limits;
///
/// let data = vec![1.0; 1 << 20];
/// assert!(limits::read_bandwidth(&data, NonZeroUsize::MIN) > 0.0);
/// ```
pub fn read_bandwidth(data: &[f32], threads: NonZeroUsize) -> f64 {
    const CHUNK: usize = 1 << 18;
    let chunks = Mutex::new(data.chunks(CHUNK));
    let start = Instant::now();
    threads::run(threads.get(), &|| {
        loop {
            let chunk = chunks.lock().map(|mut chunks| chunks.next());
            let Ok(Some(chunk)) = chunk else { break };
            black_box(dispatch(Isa::best(), Read(chunk)));
        }
    });
    size_of_val(data) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// Sums enough to keep both multiply-add ports busy, in as many registers as there are.
const SUMS: usize = 12;
const STEPS: usize = 40_000;

struct Flops;

impl WithSimd for Flops {
    type Output = f64;

    fn with<S: Simd>(self, _: S) -> f64 {
        (2 * SUMS * STEPS * S::WIDTH) as f64
    }
}

struct Multiply(f32);

impl WithSimd for Multiply {
    type Output = f32;

    fn with<S: Simd>(self, simd: S) -> f32 {
        simd.call(self)
    }
}

impl Operation for Multiply {
    type Output = f32;

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) -> f32 {
        let x = simd.splat(self.0);
        let mut sums = [x; SUMS];
        for _ in 0..STEPS {
            for sum in &mut sums {
                *sum = simd.fma(*sum, x, x);
            }
        }
        first(simd, sums)
    }
}

struct Read<'a>(&'a [f32]);

impl WithSimd for Read<'_> {
    type Output = f32;

    fn with<S: Simd>(self, simd: S) -> f32 {
        simd.call(self)
    }
}

impl Operation for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn eval<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); SUMS];
        for chunk in self.0.chunks_exact(SUMS * S::WIDTH) {
            for (n, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the chunk has SUMS vectors.
                *sum = simd.add(*sum, unsafe { simd.load(chunk.as_ptr().add(n * S::WIDTH)) });
            }
        }
        first(simd, sums)
    }
}

/// One number that depends on all sums.
#[inline(always)]
fn first<S: Simd>(simd: S, sums: [S::F; SUMS]) -> f32 {
    let mut lanes = [0.0_f32; 16];
    let mut total = simd.splat(0.0);
    for sum in sums {
        total = simd.add(total, sum);
    }
    // SAFETY: no vector has more lanes.
    unsafe { simd.store(lanes.as_mut_ptr(), total) };
    lanes[0]
}
