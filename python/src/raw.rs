//! What the package's own glue calls.
//!
//! Tensors are given as they are where their type has DLPack's functions for that, else as `(address,
//! shape, strides, name of the type)`: reading these off a tensor that one holds anyway costs less than
//! a capsule for each. Nothing here is for users: an address can't be checked.

use longspan::Dims;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::additions::bytes;
use crate::call::{Call, Saved};
use crate::options::Options;
use crate::tensor::Tensor;

/// `forward` on such tensors; writes `out` and, unless they are None, `lse` and `lse_lo`. For the
/// package's own glue, which holds on to the tensors.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, lse, lse_lo, pattern, threads=None, precision=None, **options))]
#[expect(clippy::too_many_arguments, reason = "only the glue calls it")]
pub(crate) fn raw_forward(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: Option<&Bound<'_, PyAny>>,
    lse_lo: Option<&Bound<'_, PyAny>>,
    pattern: &Bound<'_, PyAny>,
    threads: Option<usize>,
    precision: Option<&str>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    let options = Options::read("raw_forward", options)?.executed(threads, precision)?;
    let call = raw_call([q, k, v], pattern, options)?;
    let mut out = raw("out", out)?;
    let mut lse = lse.map(|lse| raw("lse", lse)).transpose()?;
    let mut rest = lse_lo.map(|rest| raw("lse_lo", rest)).transpose()?;
    let rest = rest.as_mut().map(|rest| rest.rows_mut(call.output)).transpose()?;
    let mut own = Vec::new();
    let lse = match &mut lse {
        Some(lse) => lse.rows_mut(call.output)?,
        None => {
            let Dims { batch, heads, tokens, .. } = call.output;
            own.resize(batch * heads * tokens, 0.0);
            &mut own
        }
    };
    call.forward(py, &mut out, lse, rest)
}

/// `backward` on such tensors; writes `dq`, `dk` and `dv`, and returns the gradients of sink logits, of
/// the bias table and of slopes as f32 in bytes, or None where there are none or they aren't
/// `wanted`. `lse_lo` and `dlse` may be None.
#[pyfunction]
#[pyo3(signature = (q, k, v, out, lse, lse_lo, dout, dlse, dq, dk, dv, pattern, wanted=[true; 3], threads=None, precision=None, **options))]
#[expect(clippy::too_many_arguments, reason = "only the glue calls it")]
pub(crate) fn raw_backward(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    lse: &Bound<'_, PyAny>,
    lse_lo: Option<&Bound<'_, PyAny>>,
    dout: &Bound<'_, PyAny>,
    dlse: Option<&Bound<'_, PyAny>>,
    dq: &Bound<'_, PyAny>,
    dk: &Bound<'_, PyAny>,
    dv: &Bound<'_, PyAny>,
    pattern: &Bound<'_, PyAny>,
    wanted: [bool; 3],
    threads: Option<usize>,
    precision: Option<&str>,
    options: Option<&Bound<'_, PyDict>>,
) -> PyResult<[Option<Py<PyBytes>>; 3]> {
    let options = Options::read("raw_backward", options)?.executed(threads, precision)?;
    let call = raw_call([q, k, v], pattern, options)?;
    let (out, lse, dout) = (raw("out", out)?, raw("lse", lse)?, raw("dout", dout)?);
    let lse_lo = lse_lo.map(|rest| raw("lse_lo", rest)).transpose()?;
    let dlse = dlse.map(|dlse| raw("dlse", dlse)).transpose()?;
    let found =
        Saved { out: &out, lse: &lse, lse_lo: lse_lo.as_ref(), dout: &dout, dlse: dlse.as_ref() };
    let (mut dq, mut dk, mut dv) = (raw("dq", dq)?, raw("dk", dk)?, raw("dv", dv)?);
    let lists = call.backward(py, &found, [&mut dq, &mut dk, &mut dv], wanted)?;
    Ok(bytes(py, lists))
}

fn raw(name: &'static str, tuple: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    // SAFETY: only the package's Python calls this module's functions; it reads these numbers off
    // tensors that it holds on to, and hands to nothing else, until the call returns.
    unsafe { Tensor::raw(name, tuple) }
}

fn raw_call(
    [q, k, v]: [&Bound<'_, PyAny>; 3],
    pattern: &Bound<'_, PyAny>,
    options: Options,
) -> PyResult<Call> {
    Call::new([raw("q", q)?, raw("k", k)?, raw("v", v)?], pattern, options)
}
