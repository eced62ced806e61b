//! Sink logits that are a tensor, with its gradient.
//!
//! candle's custom ops have three inputs, which are taken. So the logits come in beside the values:
//!
//! ```text
//! v, logits ──Sinks──▶ v'               the same values
//! q, k, v'  ──Forward, Normaliser──▶    leave the gradient of the logits in the call on their way back
//! ```
//!
//! The backward pass of `Sinks` runs after those of all ops that read `v'`, and picks it up. The
//! values are copied.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};
use longspan::Attend;

use crate::call::Call;
use crate::tensor;

/// [`attention`](crate::attention) with learned sink logits: `sink_logits` is `(heads,)`, one per
/// query head, f32, bf16 or f16, with a gradient. Each joins the denominator of the rows of its head
/// once, with value 0; see [`longspan::Options::sink_logits`]. Those of `attention`'s options, if any,
/// are replaced.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{Device, Error, Tensor, Var};
/// use longspan_candle::attention_with_sinks;
/// use longspan_candle::longspan::{Attention, Layout, Pattern, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(50, 50)).map_err(Error::wrap)?;
/// let causal = Arc::new(Attention::new(layout));
/// let x = Tensor::randn(0f32, 1.0, (1, 4, 50, 8), &Device::Cpu)?;
/// let sinks = Var::zeros(4, candle_core::DType::F32, &Device::Cpu)?;
/// let out = attention_with_sinks(&causal, &x, &x, &x, &sinks)?;
/// let gradients = out.sqr()?.mean_all()?.backward()?;
/// assert_eq!(gradients.get(&sinks).unwrap().dims(), [4]);
/// # Ok::<_, candle_core::Error>(())
/// ```
pub fn attention_with_sinks<R: Attend + 'static>(
    attention: &Arc<R>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sink_logits: &Tensor,
) -> Result<Tensor> {
    let (call, v) = with_sinks(attention, [q, k, v], sink_logits)?;
    call.attend(q, k, &v)
}

/// [`attention_with_sinks`], and the log-sum-exp of each row, which includes its sink: f32,
/// `(batch, heads, tokens)`; see [`attention_with_lse`](crate::attention_with_lse).
pub fn attention_with_sinks_and_lse<R: Attend + 'static>(
    attention: &Arc<R>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sink_logits: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let (call, v) = with_sinks(attention, [q, k, v], sink_logits)?;
    Ok((call.attend(q, k, &v)?, call.lse_of(q, k, &v)?))
}

/// The call, and the values that its ops read.
fn with_sinks<R: Attend + 'static>(
    attention: &Arc<R>,
    [q, k, v]: [&Tensor; 3],
    sink_logits: &Tensor,
) -> Result<(Call<R>, Tensor)> {
    tensor::check(q, k, v)?;
    let heads = q.dims4()?.1;
    if sink_logits.dims() != [heads] {
        bail!(
            "sink_logits has shape {:?}, expected [{heads}]: one per query head",
            sink_logits.dims()
        );
    }
    // A cast has a gradient of its own.
    let logits = sink_logits.to_dtype(DType::F32)?;
    let attention = Arc::new(attention.with_sink_logits(logits.to_vec1::<f32>()?.into()));
    let call = Call::new(&attention);
    let v = match logits.track_op() {
        true => v.contiguous()?.apply_op2(&logits, Sinks(call.clone()))?,
        false => v.clone(),
    };
    Ok((call, v))
}

/// v, sink logits → v.
struct Sinks<R>(Call<R>);

impl<R: Attend + 'static> CustomOp2 for Sinks<R> {
    fn name(&self) -> &'static str {
        "longspan sink logits"
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
        logits: &Tensor,
        _: &Tensor,
        dv: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let sums = self.0.take_sinks();
        let dlogits = Tensor::from_vec(sums, logits.shape(), logits.device())?;
        Ok((Some(dv.clone()), Some(dlogits)))
    }
}
