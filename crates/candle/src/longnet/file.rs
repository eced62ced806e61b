//! A model on disk: `config.json` and `model.safetensors` in a directory.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};

use super::Config;
use crate::tensor::foreign;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";

/// Writes a model to a directory, which is made where there is none: `config.json` and
/// `model.safetensors`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarMap};
/// use longspan_candle::longnet::{self, Config, LongNetLM};
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
/// # let directory = std::env::temp_dir().join(format!("longnet-{}", std::process::id()));
/// longnet::save(&directory, &config, &vars)?;
/// let (_, again) = LongNetLM::load(&directory, DType::F32)?;
/// # std::fs::remove_dir_all(&directory)?;
///
/// let ids = Tensor::new(&[[1_u32, 2, 3]], &Device::Cpu)?;
/// let logits = |model: &LongNetLM| model.forward(&ids)?.flatten_all()?.to_vec1::<f32>();
/// assert_eq!(logits(&model)?, logits(&again)?);
/// # Ok::<_, candle_core::Error>(())
/// ```
pub fn save(directory: impl AsRef<Path>, config: &Config, vars: &VarMap) -> Result<()> {
    let directory = directory.as_ref();
    std::fs::create_dir_all(directory)?;
    let text = serde_json::to_string_pretty(config).map_err(foreign)?;
    std::fs::write(directory.join(CONFIG), text + "\n")?;
    vars.save(directory.join(WEIGHTS))
}

/// A model from the files of a directory, made by `make`; every tensor of the file must be wanted.
pub(super) fn load<M>(
    directory: &Path,
    dtype: DType,
    make: impl FnOnce(&Config, VarBuilder<'_>) -> Result<M>,
) -> Result<(Config, M)> {
    let named = |path: &Path, error: Error| error.context(path.display().to_string());
    let path = directory.join(CONFIG);
    let text = std::fs::read_to_string(&path).map_err(|error| named(&path, error.into()))?;
    let config: Config =
        serde_json::from_str(&text).map_err(|error| named(&path, foreign(error)))?;
    let path = directory.join(WEIGHTS);
    let tensors =
        candle_core::safetensors::load(&path, &Device::Cpu).map_err(|error| named(&path, error))?;
    let unused = Arc::new(Mutex::new(tensors.keys().cloned().collect()));
    let backend = Strict { tensors, unused: unused.clone() };
    let vb = VarBuilder::from_backend(Box::new(backend), dtype, Device::Cpu);
    let model = make(&config, vb).map_err(|error| named(&path, error))?;
    let unused = unused.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(first) = unused.first() {
        bail!(
            "{}: {} tensors that the model hasn't, the first of them {first}",
            path.display(),
            unused.len()
        )
    }
    Ok((config, model))
}

/// Tensors by name, and which ones have not been read.
struct Strict {
    tensors: HashMap<String, Tensor>,
    unused: Arc<Mutex<BTreeSet<String>>>,
}

impl Strict {
    fn used(&self, name: &str) {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

impl SimpleBackend for Strict {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        self.used(name);
        SimpleBackend::get(&self.tensors, shape, name, init, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.used(name);
        SimpleBackend::get_unchecked(&self.tensors, name, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}
