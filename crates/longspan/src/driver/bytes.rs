//! Memory that a call takes before it is made.

use crate::arguments::{Inputs, Pass};
use crate::dims::{Dims, Sizes, Strides};
use crate::dtype::{Element, ElementType};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::tensor::View;

/// Inputs of given dims over one element: dims without memory.
pub(crate) fn inputs<E: Element>(element: &[E; 1], dims: [Dims; 3]) -> Result<Inputs<'_, E>> {
    let strides = Strides { batch: 0, tokens: 0, heads: 0, dim: 0 };
    let [q, k, v] = dims.map(|dims| match dims.elements() {
        None => Err(Error::Overflow { dims }),
        Some(_) => View::strided(element, 0, dims, strides),
    });
    Ok(Inputs::new(q?, k?, v?))
}

/// Bytes of the results of a pass, and of f32 numbers per row and f32 sums that it holds meanwhile.
pub(crate) fn of_results<E: Element>(options: &Options, sizes: &Sizes, pass: Pass) -> usize {
    let &Sizes { batch, queries, keys, heads, key_heads, dim, value_dim } = sizes;
    let (rows, element) = (batch * heads * queries, size_of::<E>());
    match pass {
        Pass::Forward => rows * (value_dim * element + 2 * size_of::<f32>()),
        Pass::Backward => {
            let elements = rows * dim + batch * key_heads * keys * (dim + value_dim);
            let sums = if E::TYPE == ElementType::F32 { 0 } else { size_of::<f32>() };
            let of_options: usize = options.gradient_lens().into_iter().flatten().sum();
            elements * (element + sums) + (rows + of_options) * size_of::<f32>()
        }
    }
}
