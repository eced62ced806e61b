"""Sink logits of NumPy arrays, against a softmax with one column more in f64."""

import numpy
import pytest

import longspan

HEADS, DIM, TOKENS = 4, 8, 60
LOGITS = numpy.array([0.5, -1.0, 3.0, -numpy.inf], dtype="float32")


def tensors(rng):
    shapes = [(2, HEADS, TOKENS, DIM), *[(2, 2, TOKENS, DIM)] * 2, (2, HEADS, TOKENS, DIM)]
    return [rng.standard_normal(shape, dtype="float32") for shape in shapes]


def naive(q, k, v, mask, dout, dlse, logits):
    """Output, log-sum-exp, and gradients of q, k, v and the logits."""
    q, k, v, dout, dlse = (x.astype("float64") for x in (q, k, v, dout, dlse))
    k, v = (x.repeat(2, axis=1) for x in (k, v))
    scale = q.shape[3] ** -0.5
    scores = numpy.where(mask, scale * q @ k.swapaxes(2, 3), -numpy.inf)
    column = numpy.broadcast_to(logits.astype("float64")[:, None, None], (*scores.shape[:3], 1))
    scores = numpy.concatenate([scores, column], axis=3)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        lse = numpy.log(numpy.exp(scores).sum(3))
        p = numpy.nan_to_num(numpy.exp(scores - lse[..., None]), nan=0.0)
    # The value of the sink is 0.
    values = numpy.concatenate([v, numpy.zeros_like(v[:, :, :1])], axis=2)
    out = p @ values
    dp = dout @ values.swapaxes(2, 3)
    ds = p * (dp - (dout * out).sum(3, keepdims=True) + dlse[..., None])
    dsinks, ds, p = ds[..., -1].sum((0, 2)), ds[..., :-1] * scale, p[..., :-1]
    shared = lambda x: x.reshape(2, 2, 2, TOKENS, DIM).sum(2)
    dk, dv = shared(ds.swapaxes(2, 3) @ q), shared(p.swapaxes(2, 3) @ dout)
    return out, lse, ds @ k, dk, dv, dsinks


# `~sinks(1)`: the first query sees nothing but the sink of its head.
@pytest.mark.parametrize("text", ["causal & ~sinks(1)", "full", "~full"])
def test_both_passes(rng, text):
    q, k, v, dout = tensors(rng)
    dlse = rng.standard_normal((2, HEADS, TOKENS), dtype="float32")
    dlse[:, 3] = 0  # rows without a sink may have no log-sum-exp
    at = numpy.arange(TOKENS)
    mask = {
        "causal & ~sinks(1)": (at <= at[:, None]) & (at != 0),
        "full": numpy.ones((TOKENS, TOKENS), dtype=bool),
        "~full": numpy.zeros((TOKENS, TOKENS), dtype=bool),
    }[text]
    expected = naive(q, k, v, mask, dout, dlse, LOGITS)
    attention = longspan.Attention(text, sink_logits=LOGITS)
    output = attention.forward(q, k, v)
    gradients = attention.backward(q, k, v, output, dout, dlse)
    dq, dk, dv = gradients
    for got, value in zip((*output[:2], dq, dk, dv, gradients.dsink_logits), expected):
        numpy.testing.assert_allclose(got, value, rtol=1e-5, atol=2e-5)
    assert gradients.dsink_logits.dtype == numpy.float32
    assert gradients.dsink_logits[3] == 0
    # The functions are the same; the backward pass has the logits of the forward pass.
    out, lse = longspan.attention(q, k, v, text, sink_logits=LOGITS, return_lse=True)
    assert numpy.array_equal(out, output.out) and numpy.array_equal(lse, output.lse)
    again = longspan.backward(q, k, v, output, dout, dlse=dlse)
    assert numpy.array_equal(again.dsink_logits, gradients.dsink_logits)
    pair = longspan.backward(q, k, v, tuple(output), dout, text, dlse=dlse, sink_logits=LOGITS)
    assert numpy.array_equal(pair.dsink_logits, gradients.dsink_logits)


def test_empty_rows_are_their_sink(rng):
    q, k, v, _ = tensors(rng)
    out, lse = longspan.attention(q, k, v, "~full", sink_logits=list(LOGITS), return_lse=True)
    assert (out == 0).all()
    assert (lse == LOGITS[:, None]).all()


def test_dilated_counts_them_once(rng):
    q, k, v, dout = tensors(rng)
    # Two branches over everything: every key counts twice, its sink once.
    dilated = longspan.Dilated([TOKENS, TOKENS], [1, 1])
    with_sinks = longspan.forward(q, k, v, dilated, sink_logits=LOGITS)
    without = longspan.forward(q, k, v, dilated)
    expected = numpy.logaddexp(without.lse.astype("float64"), LOGITS[:, None])
    numpy.testing.assert_allclose(with_sinks.lse, expected, rtol=1e-6)
    expected = without.out * numpy.exp(without.lse - expected)[..., None]
    numpy.testing.assert_allclose(with_sinks.out, expected, atol=1e-6)
    gradients = longspan.backward(q, k, v, with_sinks, dout)
    p = numpy.exp(LOGITS[:, None].astype("float64") - with_sinks.lse)
    sums = -(p * (with_sinks.out * dout).sum(3)).sum((0, 2))
    numpy.testing.assert_allclose(gradients.dsink_logits, sums, rtol=1e-4, atol=1e-4)


def test_without_sinks_there_is_no_gradient(rng):
    q, k, v, dout = tensors(rng)
    output = longspan.forward(q, k, v, "causal")
    gradients = longspan.backward(q, k, v, output, dout)
    assert gradients.dsink_logits is None and len(gradients) == 3
    kept = gradients._replace(dq=None)
    assert kept.dq is None and kept.dk is gradients.dk and kept.dsink_logits is None


def test_what_is_refused(rng):
    q, k, v, dout = tensors(rng)
    for wrong, message in [
        (LOGITS[:3], "sink_logits has 3 elements, expected 4"),
        ([0.0, 0.0, 0.0, float("nan")], "a sink logit is NaN, expected a finite number"),
        ([0.0, 0.0, 0.0, float("inf")], "a sink logit is inf, expected a finite number"),
    ]:
        with pytest.raises(ValueError, match=message):
            longspan.attention(q, k, v, "causal", sink_logits=wrong)
    with pytest.raises(TypeError, match="sink_logits: "):
        longspan.attention(q, k, v, "causal", sink_logits=1.0)
    output = longspan.forward(q, k, v, "causal", sink_logits=LOGITS)
    with pytest.raises(ValueError, match="sink_logits is .*, but the forward pass had"):
        longspan.backward(q, k, v, output, dout, sink_logits=LOGITS * 2)
    with pytest.raises(ValueError, match="sink_logits is left out of this Attention"):
        longspan.Attention("causal").backward(q, k, v, output, dout)
