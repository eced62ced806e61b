//! A call: two custom ops that share what the forward pass found, whatever it is that runs.
//!
//! candle hands the backward pass of a custom op its inputs, its output and the output's gradient:
//! there is no slot for the log-sum-exp, and an op has one output. So each call makes its own
//! [`Call`], in which the forward pass leaves what it found of each row:
//!
//! ```text
//! q, k, v ──Forward──▶ out    leaves lse and its low part in the call; backward: dout
//!         ──Normaliser──▶ lse    takes it from there;             backward: dlse
//! ```
//!
//! The gradients of both are sums over the same probabilities, and candle adds them up. Only a
//! gradient through the log-sum-exp costs its pass.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use half::{bf16, f16};
use longspan::{Attend, Dims, Inputs, Order, Output, OutputGradient, OutputRef, Strides, View};

use crate::tensor::{self, Number, cpu, foreign, view};

/// Attention of `q` over `k` and `v`, each `(batch, heads, tokens, dim)`, with gradients.
///
/// `k` and `v` may have fewer heads than `q`, as many as divide them; `v` may have another head
/// dim. All hold f32, bf16 or f16, on the CPU. A query that sees no key has output and gradient 0.
/// The attention is shared with the graph, for the backward pass.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Device, Error, Tensor};
/// use longspan_candle::attention;
/// use longspan_candle::longspan::{Attention, Layout, Pattern, Shape};
///
/// // 300 queries behind a pre-allocated cache of 1,024 keys, 700 of which are filled.
/// let shape = Shape::new(300, 1_024).query_offset(400).key_padding(0..700);
/// let layout = Layout::compile(&Pattern::causal(), &shape).map_err(Error::wrap)?;
/// let causal = Arc::new(Attention::new(layout).scale(0.25));
///
/// let q = Tensor::randn(0f32, 1.0, (1, 4, 300, 32), &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let k = Tensor::randn(0f32, 1.0, (1, 4, 1_024, 32), &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let out = attention(&causal, &q, &k, &k)?;
/// assert_eq!((out.dims(), out.dtype()), (q.dims(), DType::BF16));
/// # Ok::<_, candle_core::Error>(())
/// ```
pub fn attention<R: Attend + 'static>(
    attention: &Arc<R>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<Tensor> {
    let call = Call::new(attention, [false; 3]);
    call.attend(q, k, v)
}

/// [`attention`], and the natural logarithm of each row's sum of exponentials of scores: f32,
/// `(batch, heads, tokens)`, −∞ where a query sees no key.
///
/// Gradients flow through both. Those through the log-sum-exp cost a backward pass of their own.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{Device, Error, Tensor, Var};
/// use longspan_candle::attention_with_lse;
/// use longspan_candle::longspan::{Attention, Layout, Pattern, Shape};
///
/// let layout = Layout::compile(&Pattern::causal(), &Shape::new(50, 50)).map_err(Error::wrap)?;
/// let causal = Arc::new(Attention::new(layout));
/// let x = Var::randn(0f32, 1.0, (1, 2, 50, 8), &Device::Cpu)?;
/// let (out, lse) = attention_with_lse(&causal, &x, &x, &x)?;
/// assert_eq!(lse.dims(), [1, 2, 50]);
/// // The z-loss, which keeps scores small.
/// let loss = (out.sqr()?.mean_all()? + (lse.sqr()?.mean_all()? * 1e-4)?)?;
/// assert!(loss.backward()?.get(&x).is_some());
/// # Ok::<_, candle_core::Error>(())
/// ```
pub fn attention_with_lse<R: Attend + 'static>(
    attention: &Arc<R>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<(Tensor, Tensor)> {
    let call = Call::new(attention, [false; 3]);
    let out = call.attend(q, k, v)?;
    let lse = call.lse_of(q, k, v)?;
    Ok((out, lse))
}

/// What the forward pass found of each row, `[batch, head, token]`, and how its output lies.
struct Found {
    lse: Vec<f32>,
    lse_lo: Vec<f32>,
    order: Order,
}

/// One call, shared by its ops.
pub(crate) struct Call<R> {
    attention: Arc<R>,
    found: Arc<OnceLock<Found>>,
    /// Which of sink logits, bias table and slopes are tensors with a gradient.
    learned: [bool; 3],
    /// Their gradients, one list behind the other, that backward passes have left, until
    /// [`take_learned`](Self::take_learned).
    sums: Arc<Mutex<Vec<f32>>>,
}

impl<R> Clone for Call<R> {
    fn clone(&self) -> Self {
        Call {
            attention: self.attention.clone(),
            found: self.found.clone(),
            learned: self.learned,
            sums: self.sums.clone(),
        }
    }
}

/// q, k, v → output, its axes in the order that [`Found`] has.
struct Forward<R>(Call<R>);

/// q, k, v → log-sum-exp.
struct Normaliser<R>(Call<R>);

/// Storage and layout of each input, as candle hands them to an op.
type Stored<'a> = [(&'a CpuStorage, &'a Layout); 3];

/// As candle wants gradients.
type Gradients = (Option<Tensor>, Option<Tensor>, Option<Tensor>);

/// Calls `$call::<E>` for the element type that candle names.
macro_rules! by_type {
    ($dtype:expr, $self:ident.$call:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $self.$call::<f32>($($argument),*),
            DType::BF16 => $self.$call::<bf16>($($argument),*),
            DType::F16 => $self.$call::<f16>($($argument),*),
            other => bail!("{}: expected f32, bf16 or f16", other.as_str()),
        }
    };
}

impl<R: Attend + 'static> Call<R> {
    pub(crate) fn new(attention: &Arc<R>, learned: [bool; 3]) -> Self {
        let attention = attention.clone();
        Call { attention, found: Arc::default(), learned, sums: Arc::default() }
    }

    /// The gradients of learned parameters over all backward passes since the last time.
    pub(crate) fn take_learned(&self) -> Vec<f32> {
        std::mem::take(&mut *self.sums.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The log-sum-exp, with gradients.
    pub(crate) fn lse_of(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        q.apply_op3(k, v, Normaliser(self.clone()))
    }

    pub(crate) fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        tensor::check(q, k, v)?;
        let out = q.apply_op3(k, v, Forward(self.clone()))?;
        match self.found.get() {
            Some(found) => tensor::heads_first(out, found.order),
            None => bail!("candle ran no forward pass"),
        }
    }

    fn forward<E: Number>(&self, stored: Stored<'_>) -> Result<(CpuStorage, Shape)> {
        let inputs = inputs::<E>(stored)?;
        let Output { out, lse, lse_lo } = self.attention.forward(inputs).map_err(foreign)?;
        // Where it has been found before, it was the same.
        let _ = self.found.set(Found { lse, lse_lo, order: out.order() });
        Ok(tensor::storage(out))
    }

    /// What the forward pass found; it runs once more if it has left nothing.
    fn found<E: Number>(&self, stored: Stored<'_>) -> Result<&Found> {
        if self.found.get().is_none() {
            self.forward::<E>(stored)?;
        }
        match self.found.get() {
            Some(found) => Ok(found),
            None => bail!("the forward pass left no log-sum-exp"),
        }
    }

    /// Gradients that arrive through the output.
    fn backward<E: Number>(
        &self,
        stored: Stored<'_>,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<Gradients> {
        let found = self.found::<E>(stored)?;
        let ((out, out_layout), (dout, dout_layout)) =
            (out.storage_and_layout(), dout.storage_and_layout());
        let (saved, gradient) = (
            OutputRef {
                out: view(cpu(&out)?, out_layout, found.order)?,
                lse: &found.lse,
                lse_lo: Some(&found.lse_lo),
            },
            OutputGradient { dout: view(cpu(&dout)?, dout_layout, found.order)?, dlse: None },
        );
        self.differentiate::<E>(stored, saved, gradient)
    }

    /// Gradients that arrive through the log-sum-exp, [batch, head, token].
    fn backward_lse<E: Number>(&self, stored: Stored<'_>, dlse: &[f32]) -> Result<Gradients> {
        let found = self.found::<E>(stored)?;
        let Inputs { q, v, .. } = inputs::<E>(stored)?;
        // No gradient arrives at the output: one zero, seen as a whole tensor.
        let zero = [E::default()];
        let dims = Dims { dim: v.dims().dim, ..q.dims() };
        let nowhere = Strides { batch: 0, tokens: 0, heads: 0, dim: 0 };
        let none = View::strided(&zero, 0, dims, nowhere).map_err(foreign)?;
        let (saved, gradient) = (
            OutputRef { out: none, lse: &found.lse, lse_lo: Some(&found.lse_lo) },
            OutputGradient { dout: none, dlse: Some(dlse) },
        );
        self.differentiate::<E>(stored, saved, gradient)
    }

    fn differentiate<E: Number>(
        &self,
        stored: Stored<'_>,
        saved: OutputRef<'_, E>,
        gradient: OutputGradient<'_, E>,
    ) -> Result<Gradients> {
        let inputs = inputs::<E>(stored)?;
        let longspan::Gradients { dq, dk, dv, dsink_logits, dbias_table, dalibi_slopes } =
            self.attention.backward(inputs, saved, gradient).map_err(foreign)?;
        let lists = [dsink_logits, dbias_table, dalibi_slopes].into_iter().zip(self.learned);
        let own: Vec<f32> =
            lists.filter_map(|(list, learned)| list.filter(|_| learned)).flatten().collect();
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.resize(own.len(), 0.0);
        sums.iter_mut().zip(own).for_each(|(sum, x)| *sum += x);
        let [dq, dk, dv] = [dq, dk, dv].map(tensor::from_longspan);
        Ok((Some(dq?), Some(dk?), Some(dv?)))
    }

    /// The log-sum-exp as candle has an op's output.
    fn lse<E: Number>(&self, stored: Stored<'_>) -> Result<(CpuStorage, Shape)> {
        let found = self.found::<E>(stored)?;
        let (batch, heads, tokens, _) = stored[0].1.shape().dims4()?;
        Ok((CpuStorage::F32(found.lse.clone()), (batch, heads, tokens).into()))
    }
}

fn inputs<'a, E: Number>([q, k, v]: Stored<'a>) -> Result<Inputs<'a, E>> {
    let view = |(storage, layout): (&'a CpuStorage, &Layout)| view(storage, layout, Order::Bhsd);
    Ok(Inputs { q: view(q)?, k: view(k)?, v: view(v)? })
}

/// Storages and layouts of three tensors, for as long as `work` takes.
fn with_stored<T>(
    [q, k, v]: [&Tensor; 3],
    work: impl FnOnce(Stored<'_>) -> Result<T>,
) -> Result<T> {
    let (q, k, v) = (q.storage_and_layout(), k.storage_and_layout(), v.storage_and_layout());
    work([(cpu(&q.0)?, q.1), (cpu(&k.0)?, k.1), (cpu(&v.0)?, v.1)])
}

impl<R: Attend + 'static> CustomOp3 for Forward<R> {
    fn name(&self) -> &'static str {
        "longspan attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (call, stored) = (&self.0, [(q, q_layout), (k, k_layout), (v, v_layout)]);
        by_type!(dtype(q), call.forward(stored))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<Gradients> {
        let call = &self.0;
        with_stored([q, k, v], |stored| by_type!(q.dtype(), call.backward(stored, out, dout)))
    }
}

impl<R: Attend + 'static> CustomOp3 for Normaliser<R> {
    fn name(&self) -> &'static str {
        "longspan log-sum-exp"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (call, stored) = (&self.0, [(q, q_layout), (k, k_layout), (v, v_layout)]);
        by_type!(dtype(q), call.lse(stored))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _lse: &Tensor,
        dlse: &Tensor,
    ) -> Result<Gradients> {
        let call = &self.0;
        let dlse = dlse.flatten_all()?.to_vec1::<f32>()?;
        with_stored([q, k, v], |stored| by_type!(q.dtype(), call.backward_lse(stored, &dlse)))
    }
}

fn dtype(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use longspan::{Pattern, Shape as Tokens};

    use super::*;

    /// An op whose call has seen no forward pass runs it, and finds the same.
    #[test]
    fn without_forward_pass() -> Result<()> {
        let layout = longspan::Layout::compile(&Pattern::causal(), &Tokens::new(70, 70));
        let attention = Arc::new(longspan::Attention::new(layout.map_err(foreign)?));
        let [q, k, v] = [(); 3].map(|()| Tensor::randn(0f32, 1.0, (1, 2, 70, 8), &Device::Cpu));
        let (q, k, v) = (q?, k?, v?);
        let (before, after) =
            (Call::new(&attention, [false; 3]), Call::new(&attention, [false; 3]));
        let out = before.attend(&q, &k, &v)?;
        let dout = out.cos()?;

        let numbers = |(dq, dk, dv): Gradients| -> Result<Vec<Vec<f32>>> {
            let gradients = [dq, dk, dv].into_iter().flatten();
            gradients.map(|gradient| gradient.flatten_all()?.to_vec1()).collect()
        };
        let expected = numbers(Forward(before.clone()).bwd(&q, &k, &v, &out, &dout)?)?;
        let found = numbers(Forward(after).bwd(&q, &k, &v, &out, &dout)?)?;
        assert_eq!((found.len(), &found), (3, &expected));

        let dlse = Tensor::ones((1, 2, 70), DType::F32, &Device::Cpu)?;
        let expected = numbers(Normaliser(before).bwd(&q, &k, &v, &dlse, &dlse)?)?;
        let after = Call::new(&attention, [false; 3]);
        assert_eq!(numbers(Normaliser(after).bwd(&q, &k, &v, &dlse, &dlse)?)?, expected);
        Ok(())
    }
}
