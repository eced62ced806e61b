//! Layouts from the content of queries and keys.

use candle_core::{DType, Result, Tensor};
use half::{bf16, f16};
use longspan::{Order, Selection, Selector};

use crate::tensor::{Number, check_named, cpu, foreign, view};

/// What a selector chooses for queries and keys, `(batch, heads, tokens, dim)`. The choice is a
/// constant for gradients; [`attention`](crate::attention) over its layouts is exact.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{Device, Tensor};
/// use longspan_candle::longspan::{Attention, BlockSelector, Pattern};
/// use longspan_candle::{attention, select};
///
/// let x = Tensor::randn(0f32, 2.0, (1, 2, 2_048, 32), &Device::Cpu)?;
/// let selector = BlockSelector::new(Pattern::causal()).max_blocks(8);
/// let selection = select(&selector, &x, &x)?;
/// assert!(selection.density() < 0.5);
/// let over_choice = Arc::new(Attention::new(selection.layouts().clone()));
/// let out = attention(&over_choice, &x, &x, &x)?;
/// assert_eq!(out.dims(), x.dims());
/// # Ok::<_, candle_core::Error>(())
/// ```
pub fn select(selector: &impl Selector, q: &Tensor, k: &Tensor) -> Result<Selection> {
    check_named(&[("q", q), ("k", k)])?;
    match q.dtype() {
        DType::BF16 => select_as::<bf16>(selector, q, k),
        DType::F16 => select_as::<f16>(selector, q, k),
        _ => select_as::<f32>(selector, q, k),
    }
}

fn select_as<E: Number>(selector: &impl Selector, q: &Tensor, k: &Tensor) -> Result<Selection> {
    let (q, k) = (q.storage_and_layout(), k.storage_and_layout());
    let q = view::<E>(cpu(&q.0)?, q.1, Order::Bhsd)?;
    let k = view::<E>(cpu(&k.0)?, k.1, Order::Bhsd)?;
    selector.select(q, k).map_err(foreign)
}
