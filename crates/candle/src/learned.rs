//! Parameters of scores and softmax that are tensors, with gradients.
//!
//! candle's custom ops have three inputs, which are taken. So the parameters come in beside the
//! values, as one list:
//!
//! ```text
//! v, (sink_logits, bias_table, alibi_slopes) ──Join──▶ v'    the same values
//! q, k, v'  ──Forward, Normaliser──▶    leave the gradient of the list in the call on their way back
//! ```
//!
//! The backward pass of `Join` runs after those of all ops that read `v'`, and picks it up. The
//! values are copied.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};
use longspan::{Attend, BiasTable};

use crate::call::Call;
use crate::tensor::{self, foreign};

/// Parameters of attention that are tensors, each f32, bf16 or f16, with a gradient. They replace the
/// options of the same name; the other options of the attention stay.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Device, Error, Tensor, Var};
/// use longspan_candle::longspan::{Attention, Layout, Pattern, Shape};
/// use longspan_candle::{Learned, attention_with_learned};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(50, 50)).map_err(Error::wrap)?;
/// let causal = Arc::new(Attention::new(layout).softcap(30.0));
/// let x = Tensor::randn(0f32, 1.0, (1, 4, 50, 8), &Device::Cpu)?;
/// // Distances 0 to 14, and 15 or more.
/// let table = Var::zeros((4, 16), DType::F32, &Device::Cpu)?;
/// let slopes = Var::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu)?;
///
/// let learned = Learned::default().bias_table(&table, 0).alibi_slopes(&slopes);
/// let out = attention_with_learned(&causal, &x, &x, &x, &learned)?;
/// let gradients = out.sqr()?.mean_all()?.backward()?;
/// assert_eq!(gradients.get(&table).unwrap().dims(), [4, 16]);
/// assert_eq!(gradients.get(&slopes).unwrap().dims(), [4]);
/// # Ok::<_, candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Learned {
    sink_logits: Option<Tensor>,
    /// And its `right`.
    bias_table: Option<(Tensor, usize)>,
    alibi_slopes: Option<Tensor>,
}

impl Learned {
    /// Sink logits, `(heads,)`: each joins the denominator of the rows of its query head once, with
    /// value 0; see [`longspan::Options::sink_logits`].
    #[must_use]
    pub fn sink_logits(mut self, logits: &Tensor) -> Self {
        self.sink_logits = Some(logits.clone());
        self
    }

    /// A relative-position table, `(heads, left + 1 + right)`: scores of query head `h` are increased
    /// by `table[h, clamp(query − key, −right, left) + right]`; see [`longspan::BiasTable`].
    #[must_use]
    pub fn bias_table(mut self, table: &Tensor, right: usize) -> Self {
        self.bias_table = Some((table.clone(), right));
        self
    }

    /// Slopes of ALiBi, `(heads,)`: scores of query head `h` are decreased by
    /// `slopes[h] · |query − key|`.
    #[must_use]
    pub fn alibi_slopes(mut self, slopes: &Tensor) -> Self {
        self.alibi_slopes = Some(slopes.clone());
        self
    }

    /// The call, and the values that its ops read.
    fn call<R: Attend + 'static>(
        &self,
        attention: &Arc<R>,
        [q, k, v]: [&Tensor; 3],
    ) -> Result<(Call<R>, Tensor)> {
        tensor::check(q, k, v)?;
        self.check(q.dims4()?.1)?;
        // A cast has a gradient of its own.
        let flat = |list: Option<&Tensor>| {
            list.map(|list| list.to_dtype(DType::F32)?.flatten_all()).transpose()
        };
        let lists = [
            flat(self.sink_logits.as_ref())?,
            flat(self.bias_table.as_ref().map(|(table, _)| table))?,
            flat(self.alibi_slopes.as_ref())?,
        ];
        let values = |list: &Option<Tensor>| list.as_ref().map(Tensor::to_vec1::<f32>).transpose();
        let (sinks, slopes) = (values(&lists[0])?, values(&lists[2])?);
        let table = match (values(&lists[1])?, &self.bias_table) {
            (Some(values), Some((table, right))) => {
                let left = table.dim(1)? - 1 - right;
                Some(BiasTable::new(&values, left, *right).map_err(foreign)?)
            }
            _ => None,
        };
        let attention = attention.with_options(|mut options| {
            if let Some(sinks) = sinks {
                options = options.sink_logits(sinks);
            }
            if let Some(table) = table {
                options = options.bias_table(table);
            }
            if let Some(slopes) = slopes {
                options = options.alibi_slopes(slopes);
            }
            options
        });

        let lists = lists.map(|list| list.filter(Tensor::track_op));
        let call = Call::new(&Arc::new(attention), lists.each_ref().map(Option::is_some));
        let lists: Vec<Tensor> = lists.into_iter().flatten().collect();
        let v = match lists.is_empty() {
            true => v.clone(),
            false => v.contiguous()?.apply_op2(&Tensor::cat(&lists, 0)?, Join(call.clone()))?,
        };
        Ok((call, v))
    }

    /// Refuses shapes that do not fit so many query heads.
    fn check(&self, heads: usize) -> Result<()> {
        for (name, list) in
            [("sink_logits", &self.sink_logits), ("alibi_slopes", &self.alibi_slopes)]
        {
            if let Some(list) = list
                && list.dims() != [heads]
            {
                bail!("{name} has shape {:?}, expected [{heads}]: one per query head", list.dims());
            }
        }
        match &self.bias_table {
            Some((table, right)) if !matches!(table.dims(), &[rows, len] if rows == heads && len > *right) =>
            {
                bail!(
                    "bias_table has shape {:?}, expected [{heads}, left + 1 + {right}]: one row per \
                     query head, distances from -{right} to left",
                    table.dims()
                )
            }
            _ => Ok(()),
        }
    }
}

/// [`attention`](crate::attention) with learned parameters.
pub fn attention_with_learned<R: Attend + 'static>(
    attention: &Arc<R>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    learned: &Learned,
) -> Result<Tensor> {
    let (call, v) = learned.call(attention, [q, k, v])?;
    call.attend(q, k, &v)
}

/// [`attention_with_learned`], and the log-sum-exp of each row, which includes its sink: f32,
/// `(batch, heads, tokens)`; see [`attention_with_lse`](crate::attention_with_lse).
pub fn attention_with_learned_and_lse<R: Attend + 'static>(
    attention: &Arc<R>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    learned: &Learned,
) -> Result<(Tensor, Tensor)> {
    let (call, v) = learned.call(attention, [q, k, v])?;
    Ok((call.attend(q, k, &v)?, call.lse_of(q, k, &v)?))
}

/// v, list of parameters → v.
struct Join<R>(Call<R>);

impl<R: Attend + 'static> CustomOp2 for Join<R> {
    fn name(&self) -> &'static str {
        "longspan learned parameters"
    }

    fn cpu_fwd(
        &self,
        v: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("v is not contiguous");
        };
        let copy = match v {
            CpuStorage::F32(v) => CpuStorage::F32(v[start..end].to_vec()),
            CpuStorage::BF16(v) => CpuStorage::BF16(v[start..end].to_vec()),
            CpuStorage::F16(v) => CpuStorage::F16(v[start..end].to_vec()),
            _ => bail!("v: expected f32, bf16 or f16"),
        };
        Ok((copy, layout.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        list: &Tensor,
        _: &Tensor,
        dv: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let sums = self.0.take_learned();
        let dlist = Tensor::from_vec(sums, list.shape(), list.device())?;
        Ok((Some(dv.clone()), Some(dlist)))
    }
}
