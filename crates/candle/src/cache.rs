//! Keys and values of earlier tokens.

use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};
use longspan::{Heads, Inputs, KvCache as Engine, Options, Order, Output};

use crate::tensor::{Number, check, check_named, cpu, foreign, from_longspan, view};

/// Keys and values of the tokens so far, and attention of the next ones over them: a
/// [`longspan::KvCache`] for candle's tensors, `(batch, heads, tokens, dim)`. There are no gradients.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use longspan_candle::KvCache;
/// use longspan_candle::longspan::Pattern;
///
/// let pattern: Pattern = "causal & (window(64, 0) | sinks(4))".parse()?;
/// let mut cache = KvCache::new(pattern);
/// let x = Tensor::randn(0f32, 1.0, (1, 2, 300, 16), &Device::Cpu)?;
/// let prompt = x.narrow(2, 0, 200)?;
/// assert_eq!(cache.step(&prompt, &prompt, &prompt)?.dims(), [1, 2, 200, 16]);
/// for token in 200..300 {
///     let x = x.narrow(2, token, 1)?;
///     cache.step(&x, &x, &x)?;
/// }
/// assert!(cache.engine().slots() <= 4 + 64 + 200 + 64);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct KvCache(Engine);

impl KvCache {
    /// An empty cache. The patterns are those of the query heads.
    pub fn new(patterns: impl Into<Heads>) -> Self {
        KvCache(Engine::new(patterns))
    }

    /// Options of the steps.
    #[must_use]
    pub fn options(self, options: Options) -> Self {
        KvCache(self.0.options(options))
    }

    /// What holds the tokens: lengths, slots, bytes.
    pub fn engine(&self) -> &Engine {
        &self.0
    }

    /// Forgets the tokens of a batch entry, for another sequence in its place.
    ///
    /// # Panics
    ///
    /// If there is no such entry.
    pub fn clear(&mut self, entry: usize) {
        self.0.clear(entry);
    }

    /// Appends keys and values, of batch entry `b` the first `lengths[b]` tokens where lengths are given;
    /// no query attends yet.
    pub fn append(&mut self, k: &Tensor, v: &Tensor, lengths: Option<&[usize]>) -> Result<()> {
        check_named(&[("k", k), ("v", v)])?;
        match k.dtype() {
            DType::BF16 => self.append_as::<bf16>(k, v, lengths),
            DType::F16 => self.append_as::<f16>(k, v, lengths),
            _ => self.append_as::<f32>(k, v, lengths),
        }
    }

    fn append_as<E: Number>(
        &mut self,
        k: &Tensor,
        v: &Tensor,
        lengths: Option<&[usize]>,
    ) -> Result<()> {
        let (k, v) = (k.storage_and_layout(), v.storage_and_layout());
        let k = view::<E>(cpu(&k.0)?, k.1, Order::Bhsd)?;
        let v = view::<E>(cpu(&v.0)?, v.1, Order::Bhsd)?;
        match lengths {
            Some(lengths) => self.0.append_ragged(k, v, lengths),
            None => self.0.append(k, v),
        }
        .map_err(foreign)
    }

    /// Appends keys and values, and attends with the queries of the same tokens.
    pub fn step(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        Ok(self.step_any(q, k, v, None)?.0)
    }

    /// A step of which batch entry `b` has the first `lengths[b]` tokens; the other queries have output 0
    /// and log-sum-exp −∞. Returns the log-sum-exp, too: f32, `(batch, heads, tokens)`.
    pub fn step_ragged(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        lengths: &[usize],
    ) -> Result<(Tensor, Tensor)> {
        self.step_any(q, k, v, Some(lengths))
    }

    fn step_any(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        lengths: Option<&[usize]>,
    ) -> Result<(Tensor, Tensor)> {
        check(q, k, v)?;
        match q.dtype() {
            DType::BF16 => self.step_as::<bf16>(q, k, v, lengths),
            DType::F16 => self.step_as::<f16>(q, k, v, lengths),
            _ => self.step_as::<f32>(q, k, v, lengths),
        }
    }

    fn step_as<E: Number>(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        lengths: Option<&[usize]>,
    ) -> Result<(Tensor, Tensor)> {
        let (batch, heads, tokens, _) = q.dims4()?;
        let [q, k, v] = [q, k, v].map(Tensor::storage_and_layout);
        let inputs = Inputs::new(
            view::<E>(cpu(&q.0)?, q.1, Order::Bhsd)?,
            view::<E>(cpu(&k.0)?, k.1, Order::Bhsd)?,
            view::<E>(cpu(&v.0)?, v.1, Order::Bhsd)?,
        );
        let output = match lengths {
            Some(lengths) => self.0.step_ragged(inputs, lengths),
            None => self.0.step(inputs),
        };
        let Output { out, lse, .. } = output.map_err(foreign)?;
        let lse = Tensor::from_vec(lse, (batch, heads, tokens), &Device::Cpu)?;
        Ok((from_longspan(out)?, lse))
    }
}
