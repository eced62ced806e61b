//! Random tensors for benchmarks, generated in parallel.
//!
//! Element `i` is a function of `i` and the seed alone, so any thread can generate any part. It is
//! the sum of the four 16-bit parts of a hash, scaled to mean 0 and variance 1: approximately
//! normal, bounded by ±3.5, without logarithms.

use std::num::NonZeroUsize;

use longspan::{Element, splitmix64};

/// Elements per thread below which more threads don't help.
const SMALL: usize = 1 << 16;

/// `len` elements of mean 0 and variance 1.
pub(crate) fn normals<E: Element>(seed: u64, len: usize, threads: NonZeroUsize) -> Vec<E> {
    // Zeroed pages of f32 are allocated on first write.
    let mut numbers = vec![E::default(); len];
    by_parts(&mut numbers, threads, |first, part| {
        for (number, index) in part.iter_mut().zip(first as u64..) {
            *number = E::from_f32(normal(seed, index));
        }
    });
    numbers
}

/// Elements of the tokens at `positions` of a tensor `[head, token, dim]`, equal to those of
/// [`normals`].
pub(crate) fn rows<E: Element>(
    seed: u64,
    (heads, tokens, dim): (usize, usize, usize),
    positions: impl Iterator<Item = usize> + Clone,
) -> Vec<E> {
    let first = |head: usize, position: usize| (head * tokens + position) * dim;
    let rows = (0..heads).flat_map(|head| positions.clone().map(move |at| first(head, at)));
    let numbers = rows.flat_map(|first| first..first + dim);
    numbers.map(|index| E::from_f32(normal(seed, index as u64))).collect()
}

/// `len` NaNs, all written: missing results are detected, and page faults aren't timed.
pub(crate) fn poison<E: Element>(len: usize, threads: NonZeroUsize) -> Vec<E> {
    let mut numbers = vec![E::default(); len];
    by_parts(&mut numbers, threads, |_, part| part.fill(E::from_f32(f32::NAN)));
    numbers
}

/// Calls `each(index of the first element, part)` for one part per thread.
fn by_parts<E: Element>(
    numbers: &mut [E],
    threads: NonZeroUsize,
    each: impl Fn(usize, &mut [E]) + Send + Sync,
) {
    let size = numbers.len().div_ceil(threads.get()).max(SMALL);
    if numbers.len() <= size {
        return each(0, numbers);
    }
    std::thread::scope(|scope| {
        for (n, part) in numbers.chunks_mut(size).enumerate() {
            let each = &each;
            scope.spawn(move || each(n * size, part));
        }
    });
}

fn normal(seed: u64, index: u64) -> f32 {
    // Four sums of 65,536 equally likely integers: mean 131,070, variance 4 · (65,536² − 1) / 12.
    const MEAN: i64 = 4 * 65_535 / 2;
    const DEVIATION: f32 = 37_837.23;
    let hash = splitmix64(seed.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(index));
    let part = |n: u32| (hash >> (16 * n)) as u16 as i64;
    (part(0) + part(1) + part(2) + part(3) - MEAN) as f32 / DEVIATION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_and_variance() {
        for seed in 0..4 {
            let numbers = normals::<f32>(seed, 200_000, NonZeroUsize::MIN);
            let count = numbers.len() as f64;
            let moment = |n| numbers.iter().map(|&x| f64::from(x).powi(n)).sum::<f64>() / count;
            // Six standard deviations of these estimates.
            assert!(moment(1).abs() < 0.014 && (moment(2) - 1.0).abs() < 0.018, "seed {seed}");
        }
    }

    #[test]
    fn neighbors_and_seeds_are_uncorrelated() {
        let alike = |a: &[f32], b: &[f32]| {
            let sum: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a * b)).sum();
            sum / a.len().min(b.len()) as f64
        };
        let [a, b] = [3, 4].map(|seed| normals::<f32>(seed, 200_000, NonZeroUsize::MIN));
        for (what, likeness) in [("next", alike(&a, &a[1..])), ("seed", alike(&a, &b))] {
            assert!(likeness.abs() < 0.014, "{what}: {likeness}");
        }
    }

    #[test]
    fn rows_equal_those_of_the_whole() {
        let all = normals::<f32>(5, 3 * 7 * 4, NonZeroUsize::MIN);
        assert_eq!(rows::<f32>(5, (3, 7, 4), 0..7), all);
        let some = rows::<f32>(5, (3, 7, 4), [6, 1].into_iter());
        assert_eq!(some[..4], all[6 * 4..][..4]);
        assert_eq!(some[3 * 4..4 * 4], all[(7 + 1) * 4..][..4]);
    }

    #[test]
    fn threads_change_nothing() {
        let three = NonZeroUsize::new(3).unwrap();
        let (a, b) =
            (normals::<f32>(9, 300_001, NonZeroUsize::MIN), normals::<f32>(9, 300_001, three));
        assert_eq!(a, b);
        assert!(poison::<f32>(200_001, three).iter().all(|x| x.is_nan()));
        assert!(poison::<half::bf16>(200_001, three).iter().all(|x| x.is_nan()));
    }
}
