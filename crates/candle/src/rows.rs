//! Numbers of tensors in f32, for ops that go through them row by row.
//!
//! candle-nn's own layer norm and rotary embedding have no backward pass, and no error either:
//! whatever stands before them stops learning. The ones here have it. Rows are handed to rayon,
//! whose threads candle's products run on too, in pieces that don't depend on how many there are:
//! sums over rows have the same bits whatever the machine.

use candle_core::{CpuStorage, DType, Layout, Result, Tensor, bail};
use rayon::prelude::*;

use crate::tensor::cpu;

/// Rows that are worked on at once.
pub(crate) const PIECE: usize = 64;

/// Terms that are summed side by side: what vectors of f32 have at most.
const LANES: usize = 16;

/// Runs `work` on f32, whatever `x` holds, and gives back what `x` holds.
pub(crate) fn in_f32(
    name: &str,
    x: &Tensor,
    work: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if !x.device().is_cpu() {
        bail!("{name}: a tensor on {:?}, expected the CPU", x.device().location())
    }
    match x.dtype() {
        DType::F32 => work(&x.contiguous()?),
        DType::BF16 | DType::F16 => {
            work(&x.to_dtype(DType::F32)?.contiguous()?)?.to_dtype(x.dtype())
        }
        other => bail!("{name}: a tensor of {}, expected f32, bf16 or f16", other.as_str()),
    }
}

/// The numbers of an op's contiguous argument.
pub(crate) fn numbers<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => bail!("strides {:?}, expected a contiguous tensor", layout.stride()),
    }
}

/// The numbers of tensors, for as long as `work` takes.
pub(crate) fn with_numbers<const N: usize, T>(
    tensors: [&Tensor; N],
    work: impl FnOnce([&[f32]; N]) -> Result<T>,
) -> Result<T> {
    let tensors = tensors.map(Tensor::contiguous).into_iter().collect::<Result<Vec<_>>>()?;
    let stored: Vec<_> = tensors.iter().map(Tensor::storage_and_layout).collect();
    let mut slices = [&[][..]; N];
    for (slice, (storage, layout)) in slices.iter_mut().zip(&stored) {
        *slice = numbers(cpu(storage)?, layout)?;
    }
    work(slices)
}

/// The sum of `of` over a row.
pub(crate) fn sum<const N: usize>(rows: [&[f32]; N], of: impl Fn([f32; N]) -> f32) -> f32 {
    let len = rows[0].len();
    let rows = rows.map(|row| &row[..len]);
    let whole = len / LANES * LANES;
    let mut lanes = [0.0; LANES];
    for first in (0..whole).step_by(LANES) {
        let pieces = rows.map(|row| &row[first..first + LANES]);
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += of(pieces.map(|piece| piece[lane]));
        }
    }
    let rest: f32 = (whole..len).map(|index| of(rows.map(|row| row[index]))).sum();
    lanes.iter().sum::<f32>() + rest
}

/// The sum of all rows of `size` numbers.
pub(crate) fn sum_rows(rows: &[f32], size: usize) -> Vec<f32> {
    let sum = |piece: &[f32]| {
        let mut total = vec![0.0; size];
        piece.chunks_exact(size).for_each(|row| add(&mut total, row));
        total
    };
    // In the order of the rows, not of completion.
    let pieces: Vec<_> = rows.par_chunks(PIECE * size).map(sum).collect();
    let mut total = vec![0.0; size];
    pieces.iter().for_each(|piece| add(&mut total, piece));
    total
}

/// Adds numbers to numbers.
pub(crate) fn add(totals: &mut [f32], numbers: &[f32]) {
    totals.iter_mut().zip(numbers).for_each(|(total, number)| *total += number);
}
