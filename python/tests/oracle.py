"""Attention written out naively in f64, and how exact a result has to be.

Nothing here is shared with what it tests: a mask is a predicate over positions, evaluated at every
pair, and attention is a matrix of scores.

**How exact.** ``best`` is what rounding the truth to the result's type costs: a lower bound.
A result of f32 may be off by 12 times that (root mean squares over a tensor): a sum of a few dozen
terms, of a tile, and of all tiles, as `crates/testing/src/attention/measure.rs` derives. Where
terms cancel ``best`` isn't possible, so it is taken to be at least a sixth of the unit roundoff of
the terms' size (``gross``, the same sums over absolute values). Over ``n`` rows the bound is
``1 + 3 / n`` times as wide: a mean over few is luck.

A result of bf16 or f16 is rounded once, at the end, which is ``best``. On the way each term may be
rounded once more (a matrix unit multiplies probabilities as bf16), and gradients of scores use an
output that was rounded: each at most a unit roundoff of the terms' size.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import numpy

#: How many times the best possible error a result of f32 may be off.
MOST = 12.0
#: Half the distance from 1 to the next number.
UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class Truth(NamedTuple):
    """Results in f64, ``(batch, heads, tokens, dim)``, or the sizes of their terms."""

    out: numpy.ndarray
    lse: numpy.ndarray
    dq: numpy.ndarray
    dk: numpy.ndarray
    dv: numpy.ndarray


def mask(
    rule: Callable[[int, int], bool],
    queries: int,
    keys: int,
    query_offset: int | None = None,
    key_offset: int = 0,
) -> numpy.ndarray:
    """Every pair of a query and a key, by position."""
    first = key_offset + keys - queries if query_offset is None else query_offset
    pairs = [[rule(i + first, j + key_offset) for j in range(keys)] for i in range(queries)]
    return numpy.array(pairs, dtype=bool).reshape(queries, keys)


def attention(q, k, v, mask, dout, dlse=None, scale=None, score=None):
    """Truth and the sizes of its terms. ``mask`` broadcasts to (batch, heads, queries, keys);
    ``score`` maps scaled scores to new ones and their derivative."""
    q, k, v, dout = (numpy.asarray(x, dtype="float64") for x in (q, k, v, dout))
    share = q.shape[1] // k.shape[1]
    k_all, v_all = (numpy.repeat(x, share, axis=1) for x in (k, v))
    scale = 1 / numpy.sqrt(q.shape[3]) if scale is None else scale
    scores = scale * (q @ k_all.swapaxes(2, 3))
    slope = numpy.ones_like(scores)
    if score is not None:
        scores, slope = score(scores)
    scores = numpy.where(mask, scores, -numpy.inf)
    largest = scores.max(axis=3, keepdims=True, initial=-numpy.inf)
    largest = numpy.where(numpy.isfinite(largest), largest, 0)
    weights = numpy.exp(scores - largest)
    total = weights.sum(axis=3, keepdims=True)
    p = weights / numpy.where(total > 0, total, 1)
    with numpy.errstate(divide="ignore"):
        lse = (largest + numpy.log(total))[..., 0]
    dlse = numpy.zeros_like(lse) if dlse is None else numpy.asarray(dlse, dtype="float64")

    out = p @ v_all
    delta = (dout * out).sum(axis=3) - dlse
    ds = p * (dout @ v_all.swapaxes(2, 3) - delta[..., None]) * slope * scale
    truth = Truth(
        out, lse, ds @ k_all, heads(ds.swapaxes(2, 3) @ q, share), heads(p.swapaxes(2, 3) @ dout, share)
    )
    q, k_all, v_all, dout = (abs(x) for x in (q, k_all, v_all, dout))
    gross_out = p @ v_all
    gross_delta = (dout * gross_out).sum(axis=3) + abs(dlse)
    ds = p * (dout @ v_all.swapaxes(2, 3) + gross_delta[..., None]) * abs(slope) * scale
    gross = Truth(
        gross_out,
        abs(numpy.where(numpy.isfinite(lse), lse, 0)),
        ds @ k_all,
        heads(ds.swapaxes(2, 3) @ q, share),
        heads(p.swapaxes(2, 3) @ dout, share),
    )
    return truth, gross


def heads(x, share):
    """Sums over the query heads that share a key head."""
    batch, heads, tokens, dim = x.shape
    return x.reshape(batch, heads // share, share, tokens, dim).sum(axis=2)


def rms(x) -> float:
    return float(numpy.sqrt(numpy.mean(numpy.square(x)))) if x.size else 0.0


def rounded(x: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """The nearest numbers of a type, as f64."""
    if dtype != "bfloat16":
        return x.astype(dtype).astype("float64")
    exponent = numpy.frexp(x)[1] - 1
    ulp = numpy.ldexp(1.0, exponent - 7)
    return numpy.rint(x / ulp) * ulp


def check(name: str, got, truth: Truth, gross: Truth, dtype: str = "float32") -> None:
    """Asserts that one result is as exact as the rule above says."""
    t, size = getattr(truth, name), getattr(gross, name)
    got = numpy.asarray(got, dtype="float64")
    assert got.shape == t.shape, f"{name} has shape {got.shape}, expected {t.shape}"
    assert not numpy.isnan(got).any(), f"{name} has NaNs"
    live = size > 0 if name == "lse" else (size > 0).any(axis=3)
    rows = max(1, int(live.sum()))
    infinite = numpy.isinf(t)
    assert (got[infinite] == t[infinite]).all(), f"{name} isn't -inf where nothing is seen"
    t, size, got = (x[~infinite] for x in (t, size, got))
    if name == "lse":
        dtype = "float32"
    best = max(rms(rounded(t, "float32") - t), UNIT["float32"] / 6 * rms(size))
    limit = MOST * best * (1 + 3 / rows)
    if dtype != "float32":
        roundings = 1 if name in ("out", "dv") else 2
        limit = rms(rounded(t, dtype) - t) + roundings * UNIT[dtype] * rms(size) + 2 * limit
    error = rms(got - t)
    assert error <= limit, f"{name}: error {error:.3e}, at most {limit:.3e}"
