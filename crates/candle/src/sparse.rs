//! A pattern, compiled for the lengths that turn up.

use std::ops::Range;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Error, Result, Tensor, bail};
use longspan::{Attention, Heads, LayoutCache, LayoutSet, Options, Padding, Shape};

use crate::call;
use crate::tensor;

/// Bytes of layouts that are kept where no cache is handed in: a window over 16 M tokens takes
/// 13 MiB, its transpose as much again.
const CACHE_BYTES: usize = 64 << 20;

/// Attention with a pattern, or one per query head: what a layer of a model holds.
///
/// Layouts are compiled for each new length, and kept. With fewer queries than keys the queries
/// are the *last* positions, as behind a key-value cache.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{Device, Result, Tensor};
/// use longspan_candle::SparseAttention;
/// use longspan_candle::longspan::LayoutCache;
///
/// // A layer looks far, the next near; they share their layouts with all the others.
/// let layouts = Arc::new(LayoutCache::new(256 << 20));
/// let layers = ["causal", "causal & window(128, 0)"]
///     .into_iter()
///     .map(|text| Ok(text.parse::<SparseAttention>()?.cache(layouts.clone())))
///     .collect::<Result<Vec<_>>>()?;
///
/// let x = Tensor::randn(0f32, 1.0, (2, 500, 4, 16), &Device::Cpu)?;
/// let mut hidden = x.transpose(1, 2)?;
/// for layer in &layers {
///     hidden = layer.forward(&hidden, &hidden, &hidden)?;
/// }
/// assert_eq!(hidden.dims(), [2, 4, 500, 16]);
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct SparseAttention {
    patterns: Heads,
    options: Options,
    cache: Arc<LayoutCache>,
    /// Calls in a row mostly have the same lengths: the last attention, with its scratch.
    last: Mutex<Option<(Asked, Arc<Attention>)>>,
}

/// What decides the layouts of a call.
#[derive(Debug, Clone, PartialEq)]
struct Asked {
    shape: Shape,
    heads: usize,
    padding: Padding,
}

impl SparseAttention {
    /// Attention with a [`Pattern`](longspan::Pattern) for all query heads, or with one for each.
    /// Text is `parse`d instead.
    ///
    /// ```
    /// use candle_core::Error;
    /// use longspan_candle::SparseAttention;
    /// use longspan_candle::longspan::{Heads, Pattern};
    ///
    /// let near = Pattern::causal() & Pattern::window(64, 0).map_err(Error::wrap)?;
    /// let one = SparseAttention::new(near.clone());
    /// let each = SparseAttention::new(Heads::each([near, Pattern::causal()]).map_err(Error::wrap)?);
    /// let read: SparseAttention = "heads([causal & window(64, 0), causal])".parse()?;
    /// assert_eq!(each.patterns(), read.patterns());
    /// # Ok::<_, Error>(())
    /// ```
    pub fn new(patterns: impl Into<Heads>) -> Self {
        SparseAttention {
            patterns: patterns.into(),
            options: Options::default(),
            cache: Arc::new(LayoutCache::new(CACHE_BYTES)),
            last: Mutex::default(),
        }
    }

    /// Options of calls, the same as those of [`Attention`].
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self.last = Mutex::default();
        self
    }

    /// Where layouts are kept, in place of a cache of its own with 64 MiB: for the layers of a
    /// model to share one.
    #[must_use]
    pub fn cache(mut self, cache: Arc<LayoutCache>) -> Self {
        self.cache = cache;
        self
    }

    /// The patterns it was made with.
    pub fn patterns(&self) -> &Heads {
        &self.patterns
    }

    /// Attention within each of several sequences that lie behind one another in tensors of batch 1,
    /// with gradients: sequence `i` has the queries `cu_seqlens_q[i]..cu_seqlens_q[i + 1]` and keys
    /// likewise. Positions count within a sequence.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use longspan_candle::SparseAttention;
    ///
    /// let attention: SparseAttention = "causal & window(64, 0)".parse()?;
    /// let x = Tensor::randn(0f32, 1.0, (1, 4, 300, 16), &Device::Cpu)?;
    /// let ends = [0, 100, 180, 300];
    /// let out = attention.forward_packed(&x, &x, &x, &ends, &ends)?;
    /// assert_eq!(out.dims(), x.dims());
    /// # Ok::<_, candle_core::Error>(())
    /// ```
    pub fn forward_packed(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        cu_seqlens_q: &[u64],
        cu_seqlens_k: &[u64],
    ) -> Result<Tensor> {
        tensor::check(q, k, v)?;
        if q.dim(0)? != 1 {
            bail!("q has batch {}, expected 1: packed sequences lie behind one another", q.dim(0)?)
        }
        let patterns = self.patterns.packed_cu_seqlens(cu_seqlens_q, cu_seqlens_k);
        let patterns = patterns.map_err(tensor::foreign)?;
        let shape = Shape::new(q.dim(2)?, k.dim(2)?);
        let (heads, padding) = (q.dim(1)?, Padding::None(1));
        let layouts = LayoutSet::compile(&patterns, heads, &shape, &padding, Some(&self.cache));
        let attention = Attention::new(layouts.map_err(tensor::foreign)?);
        call::attention(&Arc::new(attention.options(self.options.clone())), q, k, v)
    }

    /// Attention of `q` over `k` and `v`, each `(batch, heads, tokens, dim)`, with gradients; see
    /// [`attention`](crate::attention).
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let attention = self.fitting(q, k, v, None)?;
        call::attention(&attention, q, k, v)
    }

    /// [`forward`](Self::forward) for a batch with padding: only the keys `valid[entry]` of each
    /// batch entry hold tokens, and no query attends to the others.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use longspan_candle::SparseAttention;
    ///
    /// let attention: SparseAttention = "causal".parse()?;
    /// let x = Tensor::randn(0f32, 1.0, (2, 1, 40, 8), &Device::Cpu)?;
    /// // The second entry is padded on the left.
    /// let out = attention.forward_padded(&x, &x, &x, &[0..40, 10..40])?;
    /// let padding = out.get(1)?.narrow(1, 0, 10)?;
    /// assert_eq!(padding.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
    /// # Ok::<_, candle_core::Error>(())
    /// ```
    pub fn forward_padded(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        valid: &[Range<usize>],
    ) -> Result<Tensor> {
        let attention = self.fitting(q, k, v, Some(valid))?;
        call::attention(&attention, q, k, v)
    }

    /// The attention for a shape of its own (offsets, position maps, another block size), so many
    /// query heads and this padding: for [`attention`](crate::attention) and
    /// [`attention_with_lse`](crate::attention_with_lse).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use longspan_candle::{SparseAttention, attention_with_lse};
    /// use longspan_candle::longspan::{Padding, Shape};
    ///
    /// let near: SparseAttention = "causal & window(16, 0)".parse()?;
    /// // The last 32 keys of a cache that rolls, and the token that comes next.
    /// let shape = Shape::new(1, 32).key_offset(1_000).query_offset(1_032);
    /// let compiled = near.compile(&shape, 4, &Padding::None(1))?;
    /// let q = Tensor::randn(0f32, 1.0, (1, 4, 1, 8), &Device::Cpu)?;
    /// let k = Tensor::randn(0f32, 1.0, (1, 2, 32, 8), &Device::Cpu)?;
    /// let (out, lse) = attention_with_lse(&compiled, &q, &k, &k)?;
    /// assert_eq!((out.dims(), lse.dims()), (q.dims(), &[1, 4, 1][..]));
    /// # Ok::<_, candle_core::Error>(())
    /// ```
    pub fn compile(
        &self,
        shape: &Shape,
        heads: usize,
        padding: &Padding,
    ) -> Result<Arc<Attention>> {
        let asked = Asked { shape: shape.clone(), heads, padding: padding.clone() };
        let lock = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((last, attention)) = &*lock()
            && *last == asked
        {
            return Ok(attention.clone());
        }
        let attention = match (&self.patterns, padding) {
            (Heads::Same(pattern), Padding::None(_)) => {
                Attention::new(self.cache.get(pattern, shape).map_err(tensor::foreign)?)
            }
            (patterns, padding) => Attention::new(
                LayoutSet::compile(patterns, heads, shape, padding, Some(&self.cache))
                    .map_err(tensor::foreign)?,
            ),
        };
        let attention = Arc::new(attention.options(self.options.clone()));
        *lock() = Some((asked, attention.clone()));
        Ok(attention)
    }

    /// The attention for the lengths of a call.
    fn fitting(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        valid: Option<&[Range<usize>]>,
    ) -> Result<Arc<Attention>> {
        tensor::check(q, k, v)?;
        let (batch, heads, queries, _) = q.dims4()?;
        let (_, _, keys, _) = k.dims4()?;
        let padding = match valid {
            None => Padding::None(batch),
            Some(valid) if valid.len() == batch => Padding::Each(valid.to_vec()),
            Some(valid) => candle_core::bail!(
                "key_padding of {} ranges, expected one for each of {batch} batch entries",
                valid.len()
            ),
        };
        self.compile(&Shape::new(queries, keys), heads, &padding)
    }
}

impl FromStr for SparseAttention {
    type Err = Error;

    /// Reads the text form of a pattern, or of `heads([…])`.
    fn from_str(text: &str) -> Result<Self> {
        text.parse::<Heads>().map(SparseAttention::new).map_err(tensor::foreign)
    }
}
