//! Layer norm with gradients.
//!
//! With `m` the mean of a row of `n` numbers, `s = 1 / √(variance + ε)`, `x̂ = (x − m) s` and `g` the
//! gradient that arrives times the weight:
//!
//! ```text
//! y  = x̂ · weight + bias
//! dx = s (g − Σg / n − x̂ Σ(g x̂) / n)        dweight = Σ dy x̂        dbias = Σ dy
//! ```

use candle_core::{CpuStorage, CustomOp3, Device, Layout, Result, Shape, Tensor, bail};
use candle_nn::{Init, Module, VarBuilder};
use rayon::prelude::*;

use crate::rows::{self, PIECE, sum};

/// Layer norm over the last axis, with a weight and a bias.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use longspan_candle::LayerNorm;
///
/// let vars = VarMap::new();
/// let norm = LayerNorm::new(8, 1e-5, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let x = Var::randn(3f32, 2.0, (5, 8), &Device::Cpu)?;
/// let y = norm.forward(&x)?;
/// assert!(y.mean_all()?.to_scalar::<f32>()?.abs() < 1e-5);
/// // candle-nn's has no gradient here.
/// assert!(y.sqr()?.sum_all()?.backward()?.get(&x).is_some());
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// Over rows of `size`, with `weight` and `bias` of `vb`, which begin as 1 and 0.
    pub fn new(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(LayerNorm {
            weight: vb.get_with_hints(size, "weight", Init::Const(1.0))?,
            bias: vb.get_with_hints(size, "bias", Init::Const(0.0))?,
            eps,
        })
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let size = self.weight.elem_count();
        if x.dims().last() != Some(&size) {
            bail!("layer norm: a tensor of shape {:?}, expected {size} as its last axis", x.dims())
        }
        let f32 = |weight: &Tensor| weight.to_dtype(candle_core::DType::F32)?.contiguous();
        rows::in_f32("layer norm", x, |x| {
            x.apply_op3(&f32(&self.weight)?, &f32(&self.bias)?, Normalise { eps: self.eps as f32 })
        })
    }
}

struct Normalise {
    eps: f32,
}

impl Normalise {
    /// The mean, and one over the deviation.
    fn statistics(&self, row: &[f32]) -> (f32, f32) {
        let n = row.len() as f32;
        let mean = sum([row], |[x]| x) / n;
        let variance = sum([row], |[x]| (x - mean) * (x - mean)) / n;
        (mean, 1.0 / (variance + self.eps).sqrt())
    }

    fn forward(&self, x: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f32> {
        let size = weight.len();
        let mut y = vec![0.0; x.len()];
        let pieces = y.par_chunks_mut(PIECE * size).zip(x.par_chunks(PIECE * size));
        pieces.for_each(|(y, x)| {
            for (y, x) in y.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
                let (mean, scale) = self.statistics(x);
                for (((y, x), weight), bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                    *y = (x - mean) * scale * weight + bias;
                }
            }
        });
        y
    }

    fn backward(&self, x: &[f32], weight: &[f32], dy: &[f32]) -> [Vec<f32>; 3] {
        let size = weight.len();
        let n = size as f32;
        let mut dx = vec![0.0; x.len()];
        let pieces = dx.par_chunks_mut(PIECE * size).zip(x.par_chunks(PIECE * size));
        let sums = pieces.zip(dy.par_chunks(PIECE * size)).map(|((dx, x), dy)| {
            let mut dweight = vec![0.0; size];
            let mut dbias = vec![0.0; size];
            let rows = dx.chunks_exact_mut(size).zip(x.chunks_exact(size));
            for ((dx, x), dy) in rows.zip(dy.chunks_exact(size)) {
                let (mean, scale) = self.statistics(x);
                let along = sum([dy, weight], |[dy, weight]| dy * weight) / n;
                let across =
                    sum([dy, weight, x], |[dy, weight, x]| dy * weight * ((x - mean) * scale)) / n;
                for index in 0..size {
                    let unit = (x[index] - mean) * scale;
                    dx[index] = scale * (dy[index] * weight[index] - along - unit * across);
                    dweight[index] += dy[index] * unit;
                    dbias[index] += dy[index];
                }
            }
            [dweight, dbias]
        });
        let sums: Vec<_> = sums.collect();
        let (mut dweight, mut dbias) = (vec![0.0; size], vec![0.0; size]);
        for [weight, bias] in &sums {
            rows::add(&mut dweight, weight);
            rows::add(&mut dbias, bias);
        }
        [dx, dweight, dbias]
    }
}

impl CustomOp3 for Normalise {
    fn name(&self) -> &'static str {
        "longspan layer norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let weight = rows::numbers(weight, weight_layout)?;
        let bias = rows::numbers(bias, bias_layout)?;
        let y = self.forward(rows::numbers(x, x_layout)?, weight, bias);
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        rows::with_numbers([x, weight, dy], |[numbers, weights, arrived]| {
            let [dx, dweight, dbias] = self.backward(numbers, weights, arrived);
            let tensor = |data, like: &Tensor| Tensor::from_vec(data, like.shape(), &Device::Cpu);
            Ok((Some(tensor(dx, x)?), Some(tensor(dweight, weight)?), Some(tensor(dbias, bias)?)))
        })
    }
}
