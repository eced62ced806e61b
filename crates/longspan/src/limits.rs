//! What the machine can do, measured: the ceilings that attention is compared with.
//!
//! Machines are shared and clocks vary, so a share of a ceiling means something only if both were
//! measured in the same minutes, with the same threads. `longspan bench` does.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::dtype::Element;
use crate::error::Result;
use crate::exec::{Executor, Pool};
use crate::isa::Isa;
use crate::simd::{Operation, Simd, WithSimd, dispatch};

/// Billions of f32 operations per second that multiply-add instructions on registers alone reach on
/// `threads` threads at once: the ceiling of f32 attention. Takes about two milliseconds; take the
/// best of several.
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
    let rounds = rounds_per_second(threads, &|| {
        black_box(dispatch(isa, Multiply(black_box(1.0))));
    });
    Ok(rounds * dispatch(isa, Flops) / 1e9)
}

/// Billions of operations per second that the matrix unit for bf16 reaches on tile registers alone,
/// on `threads` threads at once: the ceiling of bf16 attention on [`Isa::Amx`]. `None` where that
/// isn't available. Takes about two milliseconds; take the best of several.
///
/// ```
/// use std::num::NonZeroUsize;
/// use longspan::{Isa, limits};
///
/// let peak = limits::amx_peak(NonZeroUsize::MIN);
/// assert_eq!(peak.is_some(), Isa::Amx.is_available());
/// ```
pub fn amx_peak(threads: NonZeroUsize) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if Isa::Amx.is_available() {
        return Some(rounds_per_second(threads, &tiles::multiply) * tiles::FLOPS / 1e9);
    }
    let _ = threads;
    None
}

/// How often a second `round`, about a tenth of a millisecond of work, is done by all threads
/// together.
fn rounds_per_second(threads: NonZeroUsize, round: &(dyn Fn() + Sync)) -> f64 {
    /// A thread's share.
    const ROUNDS: usize = 20;
    let left = AtomicUsize::new(ROUNDS * threads.get());
    let start = Instant::now();
    Pool::global().run(threads.get(), &|| {
        let take = |left: usize| left.checked_sub(1);
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
            return ControlFlow::Break(());
        }
        round();
        ControlFlow::Continue(())
    });
    (ROUNDS * threads.get()) as f64 / start.elapsed().as_secs_f64()
}

/// Billions of bytes per second at which `threads` threads read `data`: the ceiling of decoding,
/// where every key is read and little is computed. Data that fits a cache measures the cache.
///
/// ```
/// use std::num::NonZeroUsize;
/// use longspan::limits;
///
/// let data = vec![1.0_f32; 1 << 20];
/// assert!(limits::read_bandwidth(&data, NonZeroUsize::MIN) > 0.0);
/// ```
pub fn read_bandwidth<E: Element>(data: &[E], threads: NonZeroUsize) -> f64 {
    const CHUNK: usize = 1 << 18;
    // What the bits mean doesn't matter to reading.
    // SAFETY: `Element` is sealed; f32, bf16 and f16 have no padding, and any 32 bits are an f32.
    let (_, words, _) = unsafe { data.align_to::<f32>() };
    let chunks = Mutex::new(words.chunks(CHUNK));
    let start = Instant::now();
    Pool::global().run(threads.get(), &|| {
        let chunk = chunks.lock().map(|mut chunks| chunks.next());
        let Ok(Some(chunk)) = chunk else { return ControlFlow::Break(()) };
        black_box(dispatch(Isa::best(), Read(chunk)));
        ControlFlow::Continue(())
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
        // SAFETY: `Multiply` has no condition.
        unsafe { simd.call(self) }
    }
}

impl Operation for Multiply {
    type Output = f32;

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) -> f32 {
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
        // SAFETY: `Read` has no condition.
        unsafe { simd.call(self) }
    }
}

impl Operation for Read<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn eval<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); SUMS];
        for chunk in self.0.chunks_exact(SUMS * S::WIDTH) {
            for (n, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `chunks_exact` gives SUMS vectors, of which this is number `n`.
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
    // SAFETY: `lanes` has `WIDEST` elements, and no vector is wider.
    unsafe { simd.store(lanes.as_mut_ptr(), total) };
    lanes[0]
}

#[cfg(target_arch = "x86_64")]
mod tiles {
    use std::arch::asm;

    use crate::gemm::MicroKernel;
    use crate::gemm::amx::Amx;

    /// Sums that hide the time until a product is there: an instruction starts every 16 cycles and
    /// takes 52.
    const SUMS: usize = 6;
    const STEPS: usize = 2_500;

    /// Operations of [`multiply`]: 16 × 16 sums of 32 products an instruction.
    pub(super) const FLOPS: f64 = (2 * 16 * 16 * 32 * SUMS * STEPS) as f64;

    /// Multiplies tiles of ones.
    pub(super) fn multiply() {
        let ones = [half::bf16::ONE; 512];
        let _session = Amx::new().session();
        // SAFETY: the session has configured the registers of this thread, and ends below. A tile
        // is 16 rows of 64 bytes, 64 apart: the 1,024 bytes of `ones`. `STEPS` isn't 0, so that the
        // loop ends.
        unsafe {
            asm!(
                "tileloadd tmm6, [{ones} + {row}]",
                "tileloadd tmm7, [{ones} + {row}]",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tilezero tmm4",
                "tilezero tmm5",
                "2:",
                "tdpbf16ps tmm0, tmm6, tmm7",
                "tdpbf16ps tmm1, tmm6, tmm7",
                "tdpbf16ps tmm2, tmm6, tmm7",
                "tdpbf16ps tmm3, tmm6, tmm7",
                "tdpbf16ps tmm4, tmm6, tmm7",
                "tdpbf16ps tmm5, tmm6, tmm7",
                "dec {steps}",
                "jnz 2b",
                ones = in(reg) ones.as_ptr(),
                row = in(reg) 64_usize,
                steps = inout(reg) STEPS => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
    }
}
