//! GELU by the normal distribution's integral, `x Φ(x)`, with gradients to f32's precision.
//!
//! candle's own has a derivative with constants of six digits, `Φ(x) + x φ(x)` in ten passes over
//! the tensor.

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
