"""Attention in f64 as the engine's options have it, and how exact a result has to be.

Truth and rule are those of ``oracle``: 12 times what rounding the truth to f32 costs, and for half
types the roundings on the way, as `longspan verify` has it. What the options add is said in its terms:
a score function with its derivative, and sink logits as one more key whose score is the logit and whose
value is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import oracle
import torch


class Reference(NamedTuple):
    """Results by name: ``out, lse, dq, dk, dv``, and ``dsinks`` (query heads) where there are sinks."""

    truth: oracle.Truth
    gross: oracle.Truth
    dsinks: numpy.ndarray | None = None


def array(x: torch.Tensor | numpy.ndarray | None) -> numpy.ndarray | None:
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) else x


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: numpy.ndarray | torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: numpy.ndarray | torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> Reference:
    """``mask`` and ``bias`` broadcast to (batch, heads, queries, keys); ``bias`` is added to scaled and
    capped scores. Rows that see nothing have ``out`` 0, ``lse`` −∞ and no gradients."""
    q, k, v, dout, dlse, bias, sinks = (array(x) for x in (q, k, v, dout, dlse, bias, sinks))
    mask = numpy.asarray(mask, dtype=bool)
    tokens = k.shape[2]
    if sinks is not None:
        k, v = (numpy.concatenate([x, numpy.zeros_like(x[:, :, :1])], axis=2) for x in (k, v))
        mask = numpy.broadcast_to(mask, (q.shape[0], q.shape[1], q.shape[2], tokens))
        mask = numpy.concatenate([mask, numpy.ones_like(mask[..., :1])], axis=3)

    def score(scores: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        slope = numpy.ones_like(scores)
        if softcap is not None:
            capped = numpy.tanh(scores / softcap)
            scores, slope = softcap * capped, 1 - capped**2
        if bias is not None:
            scores[..., :tokens] += bias
        if sinks is not None:
            scores[..., tokens], slope[..., tokens] = sinks[:, None], 0
        return scores, slope

    truth, gross = oracle.attention(q, k, v, mask, dout, dlse, scale, score)
    if sinks is None:
        return Reference(truth, gross)
    truth, gross = (x._replace(dk=x.dk[:, :, :tokens], dv=x.dv[:, :, :tokens]) for x in (truth, gross))
    share = numpy.exp(sinks[:, None] - numpy.where(numpy.isinf(truth.lse), 0, truth.lse))
    slope = (0 if dlse is None else dlse) - (dout * truth.out).sum(axis=3)
    return Reference(truth, gross, (share * slope).sum(axis=(0, 2)))


def check(results: dict[str, torch.Tensor], reference: Reference, dtype: torch.dtype) -> None:
    """Asserts that results, by name, are as exact as the rule says; those that are there."""
    for name, value in results.items():
        oracle.check(name, array(value), reference.truth, reference.gross, str(dtype).removeprefix("torch."))
