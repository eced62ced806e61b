//! AdamW whose moments can be saved; candle-nn's keeps them to itself.
//!
//! ```text
//! m = β₁ m + (1 − β₁) g        v = β₂ v + (1 − β₂) g²
//! x = x − rate (m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε) + decay · x)
//! ```

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::VarMap;

/// The paper's.
const BETA_1: f64 = 0.9;
const BETA_2: f64 = 0.98;
const DECAY: f64 = 0.01;
const EPSILON: f64 = 1e-8;
/// Gradients longer than this are cut to it. The paper's is 2, for batches of half a million tokens.
const LONGEST: f64 = 1.0;

pub(crate) struct AdamW {
    /// By name, so that sums over all of them have one order.
    parameters: Vec<Parameter>,
}

struct Parameter {
    name: String,
    var: Var,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl AdamW {
    pub(crate) fn new(vars: &VarMap) -> Self {
        let vars = vars.data().lock().expect("no thread panicked while it held the lock");
        let mut parameters: Vec<_> = vars
            .iter()
            .map(|(name, var)| Parameter {
                name: name.clone(),
                var: var.clone(),
                first: vec![0.0; var.elem_count()],
                second: vec![0.0; var.elem_count()],
            })
            .collect();
        parameters.sort_by(|a, b| a.name.cmp(&b.name));
        AdamW { parameters }
    }

    /// Takes step number `step`, from 0; returns the length of the gradient before it was cut.
    pub(crate) fn step(&mut self, gradients: &GradStore, step: usize, rate: f64) -> Result<f64> {
        let mut numbers = Vec::with_capacity(self.parameters.len());
        for Parameter { name, var, .. } in &self.parameters {
            let gradient = gradients.get(var).with_context(|| format!("no gradient for {name}"))?;
            numbers.push(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        let squares = numbers.iter().flatten().map(|&x| f64::from(x) * f64::from(x));
        let length = squares.sum::<f64>().sqrt();
        ensure!(length.is_finite(), "step {step}: the gradient's length is {length}");
        let cut = (LONGEST / length).min(1.0);
        let time = (step + 1) as i32;
        let (unbias_1, unbias_2) = (1.0 - BETA_1.powi(time), 1.0 - BETA_2.powi(time));
        for (parameter, gradient) in self.parameters.iter_mut().zip(numbers) {
            let Parameter { var, first, second, .. } = parameter;
            // Biases and norms don't decay.
            let decay = if var.rank() > 1 { DECAY } else { 0.0 };
            let mut x = var.flatten_all()?.to_vec1::<f32>()?;
            let moments = first.iter_mut().zip(second.iter_mut());
            for ((x, gradient), (first, second)) in x.iter_mut().zip(gradient).zip(moments) {
                let g = f64::from(gradient) * cut;
                *first = (BETA_1 * f64::from(*first) + (1.0 - BETA_1) * g) as f32;
                *second = (BETA_2 * f64::from(*second) + (1.0 - BETA_2) * g * g) as f32;
                let mean = f64::from(*first) / unbias_1;
                let deviation = (f64::from(*second) / unbias_2).sqrt();
                let to = mean / (deviation + EPSILON) + decay * f64::from(*x);
                *x = (f64::from(*x) - rate * to) as f32;
            }
            var.set(&Tensor::from_vec(x, var.shape(), &Device::Cpu)?)?;
        }
        Ok(length)
    }

    /// Weights and moments by name.
    pub(crate) fn state(&self) -> Result<HashMap<String, Tensor>> {
        let mut state = HashMap::new();
        for Parameter { name, var, first, second } in &self.parameters {
            state.insert(name.clone(), var.as_tensor().clone());
            for (moment, numbers) in [("first", first), ("second", second)] {
                let tensor = Tensor::from_slice(numbers, var.shape(), &Device::Cpu)?;
                state.insert(format!("adamw.{moment}.{name}"), tensor);
            }
        }
        Ok(state)
    }

    /// Takes up weights and moments that [`state`](Self::state) gave.
    pub(crate) fn restore(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        for Parameter { name, var, first, second } in &mut self.parameters {
            let get = |name: String| {
                let tensor = state.get(&name).with_context(|| format!("no tensor {name}"))?;
                ensure!(
                    tensor.shape() == var.shape(),
                    "{name} has shape {:?}, expected {:?}",
                    tensor.dims(),
                    var.dims()
                );
                Ok(tensor)
            };
            let moment = |moment: &str| -> Result<Vec<f32>> {
                Ok(get(format!("adamw.{moment}.{name}"))?.flatten_all()?.to_vec1()?)
            };
            (*first, *second) = (moment("first")?, moment("second")?);
            var.set(get(name.clone())?)?;
        }
        Ok(())
    }
}
