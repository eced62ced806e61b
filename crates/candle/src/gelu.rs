//! GELU by the normal distribution's integral, `x Φ(x)`, with gradients to f32's precision.
//!
//! candle's own has a derivative with constants of six digits, `Φ(x) + x φ(x)` in a dozen passes
//! over the tensor.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use candle_core::cpu::erf::erf_f32;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use crate::rows;

/// Numbers that are worked on at once.
const PIECE: usize = 1 << 14;

/// GELU of every number.
pub(crate) fn gelu(x: &Tensor) -> Result<Tensor> {
    rows::in_f32("gelu", x, |x| x.apply_op1(Gelu))
}

struct Gelu;

/// Φ.
fn integral(x: f32) -> f32 {
    0.5 * (1.0 + erf_f32(x * FRAC_1_SQRT_2))
}

/// φ.
fn density(x: f32) -> f32 {
    0.5 * FRAC_1_SQRT_2 * FRAC_2_SQRT_PI * (-0.5 * x * x).exp()
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "longspan gelu"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::numbers(x, layout)?;
        let y = x.par_iter().with_min_len(PIECE).map(|&x| x * integral(x)).collect();
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        rows::with_numbers([x, dy], |[numbers, dy]| {
            let both = numbers.par_iter().zip(dy).with_min_len(PIECE);
            let dx: Vec<_> = both.map(|(&x, dy)| dy * (integral(x) + x * density(x))).collect();
            Ok(Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Var;
    use candle_core::cpu::erf::erf_f64;

    use super::*;

    /// Values and slopes over all that isn't 0 or 1 to f32, and past it.
    #[test]
    fn to_the_last_digits() -> Result<()> {
        let numbers: Vec<f32> = (-1_500..=1_500).map(|n| n as f32 / 100.0).collect();
        let x = Var::from_vec(numbers.clone(), numbers.len(), &Device::Cpu)?;
        let y = gelu(&x)?;
        let slopes = y.sum_all()?.backward()?.get(&x).expect("a gradient").to_vec1::<f32>()?;
        for ((x, y), slope) in numbers.into_iter().zip(y.to_vec1::<f32>()?).zip(slopes) {
            let x = f64::from(x);
            let integral = 0.5 * (1.0 + erf_f64(x / 2_f64.sqrt()));
            let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
            // Φ is off by 2⁻²⁴ or so of 1, however small it is.
            let near = |found: f32, expected: f64| {
                (f64::from(found) - expected).abs() <= 4.0 * 2_f64.powi(-24) * (1.0 + x.abs())
            };
            assert!(near(y, x * integral), "{x}: {y}");
            assert!(near(slope, integral + x * density), "{x}: slope {slope}");
        }
        Ok(())
    }
}
