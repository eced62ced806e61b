//! A linear layer whose bias has a cheap gradient.
//!
//! The product is candle's. Its broadcast sum has a gradient that goes through the tensor number by
//! number, dividing to find out where each belongs, on one core, with one sum for all rows. Here
//! rows are added to rows, by pieces.

use candle_core::{CpuStorage, CustomOp2, DType, Device, Layout, Result, Shape, Tensor};
use candle_nn::{Init, Module, VarBuilder};
use rayon::prelude::*;

use crate::rows::{self, PIECE};

/// `x Wᵀ + b`.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    product: candle_nn::Linear,
    bias: Tensor,
}

impl Linear {
    /// Its weight begins as xavier's normal distribution times `gain`, its bias as 0.
    pub(crate) fn new(inner: usize, outer: usize, gain: f64, vb: VarBuilder<'_>) -> Result<Self> {
        let stdev = gain * (2.0 / (inner + outer) as f64).sqrt();
        let init = Init::Randn { mean: 0.0, stdev };
        let weight = vb.get_with_hints((outer, inner), "weight", init)?;
        let bias = vb.get_with_hints(outer, "bias", Init::Const(0.0))?;
        Ok(Linear { product: candle_nn::Linear::new(weight, None), bias })
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let bias = self.bias.to_dtype(DType::F32)?.contiguous()?;
        rows::in_f32("linear", &self.product.forward(x)?, |y| y.apply_op2(&bias, AddToRows))
    }
}

/// A row added to every row.
struct AddToRows;

impl CustomOp2 for AddToRows {
    fn name(&self) -> &'static str {
        "longspan bias"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, bias) = (rows::numbers(x, x_layout)?, rows::numbers(bias, bias_layout)?);
        let size = bias.len();
        let mut y = vec![0.0; x.len()];
        let pieces = y.par_chunks_mut(PIECE * size).zip(x.par_chunks(PIECE * size));
        pieces.for_each(|(y, x)| {
            for (y, x) in y.chunks_exact_mut(size).zip(x.chunks_exact(size)) {
                y.iter_mut().zip(x).zip(bias).for_each(|((y, x), bias)| *y = x + bias);
            }
        });
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        _x: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let sums = rows::with_numbers([dy], |[dy]| Ok(rows::sum_rows(dy, bias.elem_count())))?;
        Ok((Some(dy.clone()), Some(Tensor::from_vec(sums, bias.shape(), &Device::Cpu)?)))
    }
}
