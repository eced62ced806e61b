//! Attention weights of chosen rows, and a picture of them.

use longspan::{ElementType, Order, WeightRows};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{Whole, Wholes};
use crate::call::Call;
use crate::errors;
use crate::options::Options;
use crate::tensor::Tensor;

/// The weights of chosen queries over all keys: what `attention` multiplies values by. A new f32 array
/// `(batch, heads, rows, keys)`, 0 where a query does not see a key.
///
/// `rows` are the indices of queries in `q`. `heads` and `batch` choose query heads and batch entries,
/// all where left out. Weights of more than `max_bytes` bytes (1 GiB where left out) are a
/// `MemoryError`: choose fewer.
///
/// Other arguments are those of `attention`, and all apply: a sink logit takes its share, so that rows
/// of its head sum to less than 1; weights that dropout keeps are multiplied by `1 / (1 - dropout_p)`,
/// the others are 0. A torch tensor is given without its gradient, as `q.detach()`.
///
/// >>> import longspan, numpy
/// >>> x = numpy.random.default_rng(0).standard_normal((1, 4, 1000, 32), dtype="float32")
/// >>> weights = longspan.attention_weights(x, x, "causal & (window(8, 0) | sinks(2))", [0, 500])
/// >>> weights.shape
/// (1, 4, 2, 1000)
/// >>> numpy.flatnonzero(weights[0, 0, 1]).tolist()
/// [0, 1, 492, 493, 494, 495, 496, 497, 498, 499, 500]
/// >>> out = longspan.attention(x, x, x, "causal & (window(8, 0) | sinks(2))")
/// >>> numpy.allclose(weights @ x, out[:, :, [0, 500]], atol=1e-6)
/// True
#[pyfunction]
#[pyo3(
    signature = (q, k, pattern, rows, *, heads=None, batch=None, max_bytes=None, **options),
    text_signature = "(q, k, pattern, rows, *, heads=None, batch=None, max_bytes=1073741824, order='bhsd', block=None, \
        scale=None, softcap=None, alibi_slopes=None, bias_table=None, bias_right=None, sink_logits=None, dropout_p=None, dropout_seed=None, query_offset=None, \
        key_offset=None, key_padding=None, threads=None, isa=None, precision=None)"
)]
#[expect(clippy::too_many_arguments, reason = "they are named in Python")]
pub(crate) fn attention_weights<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    pattern: &Bound<'py, PyAny>,
    rows: Wholes,
    heads: Option<Wholes>,
    batch: Option<Wholes>,
    max_bytes: Option<Whole>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let indices = |list: Wholes| list.0.into_iter().map(|n| n as usize).collect::<Vec<_>>();
    let mut chosen = WeightRows::new(indices(rows));
    if let Some(heads) = heads {
        chosen = chosen.heads(indices(heads));
    }
    if let Some(batch) = batch {
        chosen = chosen.batch(indices(batch));
    }
    if let Some(bytes) = max_bytes {
        chosen = chosen.max_bytes(bytes.0 as usize);
    }
    let options = Options::read("attention_weights", options)?;
    // Weights don't depend on values.
    Call::import([q, k, k], pattern, options)?.weights(py, &chosen)
}

/// The SVG text of a picture of `attention_weights`: a strip per row, keys from left to right, at most
/// 1,000 cells of the largest weight among their keys.
///
/// The darkest shade is that of a row's largest weight; each lighter one is a factor of 4 below, and
/// what is not seen is empty. Weights that are not finite are orange. At most 512 rows.
///
/// >>> import longspan, numpy
/// >>> x = numpy.random.default_rng(0).standard_normal((1, 4, 1000, 32), dtype="float32")
/// >>> weights = longspan.attention_weights(x, x, "causal & window(64, 0)", [500, 999], heads=[0])
/// >>> longspan.weights_svg(weights)[:4]
/// '<svg'
#[pyfunction]
pub(crate) fn weights_svg(weights: &Bound<'_, PyAny>) -> PyResult<String> {
    let weights = Tensor::import("weights", weights)?;
    if weights.element() != ElementType::F32 {
        return Err(errors::kind(format!(
            "weights holds {}, expected f32, as attention_weights returns it",
            weights.element()
        )));
    }
    longspan::weights_svg(weights.view::<f32>(Order::Bhsd)?).map_err(errors::raise)
}
