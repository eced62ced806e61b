//! What a user calls: `attention`, `forward`, `backward`.

use longspan::Pass;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};

use crate::call::{Call, Saved, new_list};
use crate::errors;
use crate::options::Options;
use crate::pattern::Pattern;
use crate::tensor::Tensor;

/// A class of the package's Python part.
fn class<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyType>>,
    name: &str,
) -> PyResult<&'py Bound<'py, PyType>> {
    cell.import(py, "longspan._results", name)
}

/// Exact attention: `softmax(scale * q @ k.T) @ v` over the pairs that `pattern` lets through, and
/// nothing else is computed.
///
/// `q`, `k`, `v` are NumPy arrays or any tensors with `__dlpack__` in the CPU's memory, of f32,
/// bf16 or f16, with axes `(batch, heads, tokens, dim)`, or `(batch, tokens, heads, dim)` for
/// `order="bshd"`. Any strides will do; nothing is copied. Query heads may be a multiple of key
/// heads. A query that sees no key has output 0 and log-sum-exp -inf.
///
/// `pattern` is a `Pattern`, its text, a `Layout`, or a `Dilated`. Layouts of patterns are kept from
/// call to call. With fewer queries than keys the queries are the *last* positions.
///
/// Returns a new array with the axes of `q` and the head dim of `v`, or `out` if that is given and
/// filled. A bf16 result is an array of the same type where `q` is NumPy's (`ml_dtypes.bfloat16`),
/// else a `longspan.Array` for `torch.from_dlpack`. With `return_lse` also the log-sum-exp of each
/// row, f32, `(batch, heads, tokens)`.
///
/// Other Python threads run meanwhile. Ctrl-C ends the call; the contents of `out` are then undefined.
///
/// - `block`, `query_offset`, `key_offset`, `key_padding`: see `Pattern.compile`.
/// - `scale`: what scores are multiplied by, `1 / sqrt(dim)` where left out.
/// - `softcap`: scores become `cap * tanh(score / cap)`.
/// - `alibi_slopes`: one per query head; `slope * |query - key|` is subtracted from scores.
/// - `bias_table`: `(head, distance)`, added to scores: column `query - key + bias_right`, distances
///   clamped to those that it has. `bias_right` is 0 where left out: no columns for later keys.
/// - `sink_logits`: one per query head, in `q`'s order of heads; `exp(sink_logit)` joins the
///   denominator of each row once, with value 0 (gpt-oss). The log-sum-exp includes it, and is the
///   logit itself where a query sees no key. -inf is a head without a sink.
/// - `dropout_p`, `dropout_seed`: pairs are dropped with this probability, the others multiplied by
///   `1 / (1 - dropout_p)`. Which ones is a function of the seed and of positions alone.
/// - `threads`: how many work on it, all CPUs where left out; results don't depend on it.
/// - `isa`: the instruction set, the fastest where left out.
/// - `precision`: `"highest"` (the default): products at the precision of the tensors; `"high"`: f32
///   products as three of bf16 numbers where the CPU has a matrix unit, faster and about 250 times less
///   exact; `"widened"`: f32 products of bf16, too, where a matrix unit would be faster.
///
/// >>> import longspan, numpy
/// >>> q = numpy.random.default_rng(0).standard_normal((1, 4, 1000, 32), dtype="float32")
/// >>> out = longspan.attention(q, q, q, "causal & (window(128, 0) | sinks(4))")
/// >>> out.shape
/// (1, 4, 1000, 32)
/// >>> numpy.allclose(out[0, :, 0], q[0, :, 0], rtol=2e-7)  # the first query attends to itself
/// True
#[pyfunction]
#[pyo3(
    signature = (q, k, v, pattern, *, out=None, return_lse=false, **options),
    text_signature = "(q, k, v, pattern, *, order='bhsd', block=None, out=None, return_lse=False, \
        scale=None, softcap=None, alibi_slopes=None, bias_table=None, bias_right=None, sink_logits=None, dropout_p=None, dropout_seed=None, query_offset=None, \
        key_offset=None, key_padding=None, threads=None, isa=None, precision=None)"
)]
#[expect(clippy::too_many_arguments, reason = "they are named in Python")]
pub(crate) fn attention<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    pattern: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    return_lse: bool,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let call = Call::import([q, k, v], pattern, Options::read("attention", options)?)?;
    let (result, mut tensor) = match out {
        Some(out) => (out.clone(), Tensor::import("out", out)?),
        None => call.new_tensor("out", call.output, q)?,
    };
    let (lse, mut rows) = call.new_rows(py, "lse")?;
    call.forward(py, &mut tensor, rows.rows_mut(call.output)?, None)?;
    match return_lse {
        true => Ok((result, lse).into_pyobject(py)?.into_any()),
        false => Ok(result),
    }
}

/// The forward pass, with all that `backward` needs: `Output(out, lse, lse_lo)`, which also holds
/// the pattern and the options.
///
/// `lse` is the log-sum-exp of each row in f32, `(batch, heads, tokens)`; `lse_lo` is what
/// rounding it left out, so that gradients are exact however large scores are. Arguments are those
/// of `attention`.
///
/// >>> import longspan, numpy
/// >>> x = numpy.random.default_rng(0).standard_normal((1, 2, 50, 8), dtype="float32")
/// >>> output = longspan.forward(x, x, x, "window(8, 8)")
/// >>> output.lse.shape
/// (1, 2, 50)
/// >>> dq, dk, dv = longspan.backward(x, x, x, output, numpy.ones_like(output.out))
/// >>> bool(abs(dv.sum() - output.out.size) < 1e-2)  # each row's weights sum to 1
/// True
#[pyfunction]
#[pyo3(
    signature = (q, k, v, pattern, *, out=None, **options),
    text_signature = "(q, k, v, pattern, *, order='bhsd', block=None, out=None, scale=None, \
        softcap=None, alibi_slopes=None, bias_table=None, bias_right=None, sink_logits=None, dropout_p=None, dropout_seed=None, query_offset=None, key_offset=None, \
        key_padding=None, threads=None, isa=None, precision=None)"
)]
pub(crate) fn forward<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    pattern: &Bound<'py, PyAny>,
    out: Option<&Bound<'py, PyAny>>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let options = Options::read("forward", options)?;
    let kept = options.to_dict(py)?;
    let call = Call::import([q, k, v], pattern, options)?;
    let (result, mut tensor) = match out {
        Some(out) => (out.clone(), Tensor::import("out", out)?),
        None => call.new_tensor("out", call.output, q)?,
    };
    let (lse, mut rows) = call.new_rows(py, "lse")?;
    let (rest, mut rest_rows) = call.new_rows(py, "lse_lo")?;
    let rest_rows = rest_rows.rows_mut(call.output)?;
    call.forward(py, &mut tensor, rows.rows_mut(call.output)?, Some(rest_rows))?;
    output_class(py)?.call1((result, lse, rest, pattern, kept))
}

/// The gradients of `forward`: `Gradients(dq, dk, dv)`, which has `dsink_logits`, `dbias_table`
/// and `dalibi_slopes`, f32, as attributes: None without these options.
///
/// `output` is what `forward` returned: it holds the pattern and the options of the forward pass,
/// which the backward pass uses. `block`, `threads`, `isa` and `precision` may be others here; a
/// pattern or any other option that is given again and contradicts is a `ValueError`. A plain tuple
/// `(out, lse, lse_lo)`, or `(out, lse)` at the cost of exactness where the log-sum-exp is large,
/// holds neither: give `pattern` and the options of the forward pass with it.
///
/// `dout` is the gradient with respect to `out`, `dlse` that with respect to the log-sum-exp, if
/// there is one.
///
/// >>> import longspan, numpy
/// >>> x = numpy.random.default_rng(0).standard_normal((1, 2, 50, 8), dtype="float32")
/// >>> output = longspan.forward(x, x, x, "causal")
/// >>> gradients = longspan.backward(x, x, x, output, x)
/// >>> gradients.dk.shape
/// (1, 2, 50, 8)
#[pyfunction]
#[pyo3(
    signature = (q, k, v, output, dout, pattern=None, *, dlse=None, **options),
    text_signature = "(q, k, v, output, dout, pattern=None, *, dlse=None, order=None, block=None, \
        scale=None, softcap=None, alibi_slopes=None, bias_table=None, bias_right=None, sink_logits=None, dropout_p=None, dropout_seed=None, query_offset=None, \
        key_offset=None, key_padding=None, threads=None, isa=None, precision=None)"
)]
#[expect(clippy::too_many_arguments, reason = "they are named in Python")]
pub(crate) fn backward<'py>(
    py: Python<'py>,
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    output: &Bound<'py, PyAny>,
    dout: &Bound<'py, PyAny>,
    pattern: Option<&Bound<'py, PyAny>>,
    dlse: Option<&Bound<'py, PyAny>>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    static GRADIENTS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let tensors = [Tensor::import("q", q)?, Tensor::import("k", k)?, Tensor::import("v", v)?];
    let (pattern, options) = of_forward(&tensors[0], output, pattern, options)?;
    let call = Call::new(tensors, &pattern, options)?;
    let (out, lse, lse_lo) = parts(output)?;
    let out = Tensor::import("out", &out)?;
    let lse = Tensor::import("lse", &lse)?;
    let lse_lo = lse_lo.map(|rest| Tensor::import("lse_lo", &rest)).transpose()?;
    let dout = Tensor::import("dout", dout)?;
    let dlse = dlse.map(|dlse| Tensor::import("dlse", dlse)).transpose()?;
    let saved =
        Saved { out: &out, lse: &lse, lse_lo: lse_lo.as_ref(), dout: &dout, dlse: dlse.as_ref() };
    let (dq, mut dq_tensor) = call.new_tensor("dq", call.queries, q)?;
    let (dk, mut dk_tensor) = call.new_tensor("dk", call.k.dims(call.order)?, q)?;
    let (dv, mut dv_tensor) = call.new_tensor("dv", call.v.dims(call.order)?, q)?;
    let tensors = [&mut dq_tensor, &mut dk_tensor, &mut dv_tensor];
    let [sinks, table, slopes] = call.backward(py, &saved, tensors, [true; 3])?;
    let list = |list: Option<Vec<f32>>| list.map(|list| new_list(py, &list)).transpose();
    let heads = call.queries.heads;
    let table = list(table)?.map(|table| table.call_method1("reshape", (heads, -1))).transpose()?;
    class(py, &GRADIENTS, "Gradients")?.call1((dq, dk, dv, list(sinks)?, table, list(slopes)?))
}

/// Bytes that the first call of `forward` with these arguments allocates, or of `backward` with
/// `backward=True`: its results, and the workspace of its threads. Layouts are not counted.
///
/// Only shapes and types of `q`, `k`, `v` matter, so arrays that take no memory will do.
///
/// >>> import longspan, numpy
/// >>> x = numpy.broadcast_to(numpy.float32(0), (1, 8, 100_000, 64))
/// >>> longspan.bytes_needed(x, x, x, "window(512, 0)", threads=1) > 8 * 100_000 * 64 * 4
/// True
#[pyfunction]
#[pyo3(
    signature = (q, k, v, pattern, *, backward=false, **options),
    text_signature = "(q, k, v, pattern, *, backward=False, order='bhsd', block=None, scale=None, \
        softcap=None, alibi_slopes=None, bias_table=None, bias_right=None, sink_logits=None, dropout_p=None, dropout_seed=None, query_offset=None, key_offset=None, \
        key_padding=None, threads=None, isa=None, precision=None)"
)]
pub(crate) fn bytes_needed(
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    pattern: &Bound<'_, PyAny>,
    backward: bool,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<usize> {
    let pass = if backward { Pass::Backward } else { Pass::Forward };
    Call::import([q, k, v], pattern, Options::read("bytes_needed", options)?)?.bytes_needed(pass)
}

/// The pattern and the options of the forward pass that made `output`, where it holds them, checked
/// against those that `backward` was given; else the latter.
fn of_forward<'py>(
    q: &Tensor,
    output: &Bound<'py, PyAny>,
    pattern: Option<&Bound<'py, PyAny>>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<(Bound<'py, PyAny>, Options)> {
    let py = output.py();
    let given = Options::read("backward", options)?;
    let held = match output.is_instance(output_class(py)?)? {
        true => output.getattr("options")?.extract::<Option<Bound<'py, PyDict>>>()?,
        false => None,
    };
    let Some(held) = held else {
        return match pattern {
            Some(pattern) => Ok((pattern.clone(), given)),
            None => Err(errors::kind(
                "pattern is missing, and output is a plain tuple, which doesn't hold that of the \
                 forward pass: give pattern, and the options of the forward pass",
            )),
        };
    };
    let forward = output.getattr("pattern")?;
    if let Some(pattern) = pattern.filter(|pattern| !pattern.is(&forward)) {
        let parsed = |pattern: &Bound<'py, PyAny>| match pattern.is_instance_of::<PyString>() {
            true => py.get_type::<Pattern>().call1((pattern,)),
            false => Ok(pattern.clone()),
        };
        let (pattern, forward) = (parsed(pattern)?, parsed(&forward)?);
        if !pattern.eq(&forward)? {
            return Err(errors::value(format!(
                "pattern is {}, but the forward pass had {}: leave pattern out, as `output` holds \
                 that of the forward pass",
                pattern.repr()?,
                forward.repr()?
            )));
        }
    }
    let options = Options::read("backward", Some(&held))?.again(py, given, q.head_dim())?;
    Ok((forward, options))
}

fn output_class(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static OUTPUT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    class(py, &OUTPUT, "Output")
}

/// The parts of what `forward` returned.
#[expect(clippy::type_complexity, reason = "three objects, the last of which may be missing")]
fn parts<'py>(
    output: &Bound<'py, PyAny>,
) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
    let parts = match output.cast::<PyTuple>() {
        Ok(parts) if [2, 3].contains(&parts.len()) => parts,
        _ => {
            return Err(errors::kind(format!(
                "output is a {}, expected what forward returned: (out, lse, lse_lo), or \
                 (out, lse)",
                output.get_type().name()?
            )));
        }
    };
    let rest = if parts.len() == 3 { Some(parts.get_item(2)?) } else { None };
    Ok((parts.get_item(0)?, parts.get_item(1)?, rest.filter(|rest| !rest.is_none())))
}
