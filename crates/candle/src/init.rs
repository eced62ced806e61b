//! How weights begin.

use std::f64::consts::TAU;
use std::sync::{MutexGuard, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::init::{Init, NormalOrUniform};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{VarBuilder, VarMap};
use longspan::splitmix64;

/// MAGNETO's gain for a stack of so many layers that attends to itself alone (arXiv 2210.06423):
/// `√(ln 2N)`.
pub(crate) fn magneto_gain(layers: usize) -> f64 {
    (2.0 * layers as f64).ln().sqrt()
}

/// Variables that begin the same for the same seed, on every machine: what
/// `VarBuilder::from_varmap` does, whose random numbers can't be seeded on the CPU.
///
/// A variable's numbers follow from the seed and its name.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::VarMap;
/// use longspan_candle::longnet::{Config, LongNetLM};
/// use longspan_candle::seeded;
///
/// let config = Config {
///     hidden_size: 16,
///     num_hidden_layers: 1,
///     num_attention_heads: 2,
///     intermediate_size: 32,
///     ..Config::default()
/// };
/// let vars = VarMap::new();
/// let model = LongNetLM::new(&config, seeded(&vars, 7, DType::F32))?;
/// assert_eq!(vars.all_vars().len(), 24);
/// # Ok::<_, candle_core::Error>(())
/// ```
pub fn seeded(vars: &VarMap, seed: u64, dtype: DType) -> VarBuilder<'static> {
    let backend = Seeded { vars: vars.clone(), seed };
    VarBuilder::from_backend(Box::new(backend), dtype, Device::Cpu)
}

struct Seeded {
    vars: VarMap,
    seed: u64,
}

impl Seeded {
    fn data(&self) -> MutexGuard<'_, std::collections::HashMap<String, Var>> {
        self.vars.data().lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn draw(&self, shape: &Shape, name: &str, init: Init, dtype: DType) -> Result<Var> {
        let mut numbers = Numbers::new(self.seed, name);
        let (dist, centre, spread) = match init {
            Init::Const(_) => return init.var(shape, dtype, &Device::Cpu),
            Init::Randn { mean, stdev } => (NormalOrUniform::Normal, mean, stdev),
            Init::Uniform { lo, up } => {
                (NormalOrUniform::Uniform, (lo + up) / 2.0, (up - lo) / 2.0)
            }
            Init::Kaiming { dist, fan, non_linearity } => {
                let deviation = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
                match dist {
                    NormalOrUniform::Normal => (dist, 0.0, deviation),
                    NormalOrUniform::Uniform => (dist, 0.0, 3_f64.sqrt() * deviation),
                }
            }
        };
        let number = |_| {
            let x = match dist {
                NormalOrUniform::Normal => numbers.normal(),
                NormalOrUniform::Uniform => 2.0 * numbers.uniform() - 1.0,
            };
            centre + spread * x
        };
        let data: Vec<f64> = (0..shape.elem_count()).map(number).collect();
        Var::from_tensor(&Tensor::from_vec(data, shape, &Device::Cpu)?.to_dtype(dtype)?)
    }
}

impl SimpleBackend for Seeded {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        if !self.contains_tensor(name) {
            let var = self.draw(&shape, name, init, dtype)?;
            self.data().insert(name.to_owned(), var);
        }
        self.vars.get(shape, name, init, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        match self.data().get(name) {
            Some(var) => var.to_dtype(dtype),
            None => candle_core::bail!("there is no variable {name}, and no shape to make it of"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.data().contains_key(name)
    }
}

/// Splitmix, and normal numbers by Box and Muller.
struct Numbers {
    state: u64,
}

impl Numbers {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a of the name.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut numbers = Numbers { state: seed };
        numbers.state = numbers.bits() ^ hash;
        numbers
    }

    fn bits(&mut self) -> u64 {
        let bits = splitmix64(self.state);
        // The increment of the generator's state.
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        bits
    }

    /// From 0 to below 1.
    fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (TAU * self.uniform()).cos()
    }
}
