//! candle's tensors as Longspan's views and back; which ones are refused.

use candle_core::{
    CpuStorage, DType, Device, Error, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use longspan::{Dims, Element, Order, Strides, View};

/// A number that both know.
pub(crate) trait Number: Element + WithDType {}

impl<T: Element + WithDType> Number for T {}

/// Refuses tensors that there are no views of.
pub(crate) fn check(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
    check_named(&[("q", q), ("k", k), ("v", v)])
}

/// The same for tensors by their names, queries first.
pub(crate) fn check_named(tensors: &[(&str, &Tensor)]) -> Result<()> {
    let [(_, q), ..] = tensors else { return Ok(()) };
    for (name, tensor) in tensors {
        if !tensor.device().is_cpu() {
            bail!(
                "{name} is on {:?}, expected the CPU: move it with `to_device(&Device::Cpu)`",
                tensor.device().location()
            )
        }
        if tensor.rank() != 4 {
            bail!(
                "{name} has shape {:?}, expected four axes: (batch, heads, tokens, dim)",
                tensor.dims()
            )
        }
        if !matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            bail!(
                "{name} holds {}, expected f32, bf16 or f16: convert it with `to_dtype`",
                tensor.dtype().as_str()
            )
        }
        if tensor.dtype() != q.dtype() {
            bail!(
                "{name} holds {} and q {}, expected the same: convert one of them with `to_dtype`",
                tensor.dtype().as_str(),
                q.dtype().as_str()
            )
        }
    }
    Ok(())
}

/// An error of Longspan's as candle's.
pub(crate) fn foreign(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::wrap(error)
}

/// A tensor whose axes lie in the given order, wherever its elements are.
pub(crate) fn view<'a, E: Number>(
    storage: &'a CpuStorage,
    layout: &Layout,
    order: Order,
) -> Result<View<'a, E>> {
    let (batch, second, third, dim) = layout.shape().dims4()?;
    let &[batch_stride, second_stride, third_stride, dim_stride] = layout.stride() else {
        bail!("{:?} has other than four strides", layout)
    };
    // candle counts elements of memory that exists.
    let stride = |stride: usize| stride as isize;
    let (heads, tokens) = match order {
        Order::Bhsd => ((second, second_stride), (third, third_stride)),
        Order::Bshd => ((third, third_stride), (second, second_stride)),
    };
    let dims = Dims { batch, tokens: tokens.0, heads: heads.0, dim };
    let strides = Strides {
        batch: stride(batch_stride),
        tokens: stride(tokens.1),
        heads: stride(heads.1),
        dim: stride(dim_stride),
    };
    View::strided(storage.as_slice::<E>()?, layout.start_offset(), dims, strides).map_err(foreign)
}

/// The memory of a tensor.
pub(crate) fn cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        other => bail!("a tensor on {:?}, expected the CPU", other.device().location()),
    }
}

/// A tensor of Longspan's as storage and shape, its axes in its own order.
pub(crate) fn storage<E: Number>(tensor: longspan::Tensor<E>) -> (CpuStorage, Shape) {
    let shape = shape(&tensor);
    (E::to_cpu_storage_owned(tensor.into_vec()), shape)
}

/// A tensor of Longspan's as candle's, `(batch, heads, tokens, dim)`.
pub(crate) fn from_longspan<E: Number>(tensor: longspan::Tensor<E>) -> Result<Tensor> {
    let (shape, order) = (shape(&tensor), tensor.order());
    heads_first(Tensor::from_vec(tensor.into_vec(), shape, &Device::Cpu)?, order)
}

fn shape<E: Number>(tensor: &longspan::Tensor<E>) -> Shape {
    let Dims { batch, tokens, heads, dim } = tensor.dims();
    match tensor.order() {
        Order::Bhsd => (batch, heads, tokens, dim).into(),
        Order::Bshd => (batch, tokens, heads, dim).into(),
    }
}

/// A tensor whose axes lie in the given order as `(batch, heads, tokens, dim)`.
pub(crate) fn heads_first(tensor: Tensor, order: Order) -> Result<Tensor> {
    match order {
        Order::Bhsd => Ok(tensor),
        Order::Bshd => tensor.transpose(1, 2),
    }
}
