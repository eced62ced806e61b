"""An engine that computes what a call of FlexAttention's kernels does, densely on the CPU, and rounds as they do.

Masks and block lists are those that the kernels read: a pair is active where its block is listed as full, or as
partial and the mask says so. Results of a call are those of f64, rounded to the types that FlexAttention writes:
``out``, ``dq``, ``dk``, ``dv`` to that of the inputs, ``lse`` to f32 in base 2.
"""

from __future__ import annotations

import math

import torch

from longspan import _mask_mod
from longspan.torch._device_engine import DeviceEngine

_LN2 = math.log(2)


class Rounding(DeviceEngine):
    name = "rounding per call"

    def __init__(self):
        super().__init__()
        self.counts = {"attend": 0, "differentiate": 0}

    def check(self, q, k, v):
        if q.shape[3] < 16:
            raise ValueError(f"q has {q.shape[3]} elements per head, expected at least 16")

    def attend(self, call, q, k, v, scores, saves):
        self.counts["attend"] += 1
        _, (logits, _) = _logits(call, q, k, scores)
        lse = torch.logsumexp(logits, -1)
        p = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        out = p @ _of_queries(v, q)
        return out.to(q.dtype), (lse / _LN2).float().double() * _LN2

    def differentiate(self, call, q, k, v, rows, scores):
        self.counts["differentiate"] += 1
        out, lse, dout, dlse = (None if x is None else x.double() for x in rows)
        scale, (logits, slope) = _logits(call, q, k, scores)
        lse = (lse / _LN2).float().double() * _LN2
        p = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        delta = (out * dout).sum(-1)
        if dlse is not None:
            delta = delta - dlse
        ds = p * (dout @ _of_queries(v, q).mT - delta[..., None]) * slope * scale
        dq, dk, dv = ds @ _of_queries(k, q), ds.mT @ q.double(), p.mT @ dout
        return tuple(x.to(q.dtype) for x in (dq, _of_keys(dk, k), _of_keys(dv, v)))


def _logits(call, q, k, scores):
    """The scale; scores with −inf for inactive pairs, and the slope of softcap."""
    scale = q.shape[3] ** -0.5 if scores.scale is None else scores.scale
    logits = scale * (q.double() @ _of_queries(k, q).mT)
    slope = torch.ones(())
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
        slope = 1 - (logits / scores.softcap).square()
    where = _indices(q, k)
    if scores.alibi_slopes is not None:
        apart = _mask_mod.functions(call.source).distance(*where, call.numbers, *call.tables)
        logits = logits - scores.alibi_slopes.double()[:, None, None] * apart.abs()
    return scale, (logits.masked_fill(~_active(call, q, k, where), -torch.inf), slope)


def _indices(q, k):
    """Entry, head, query and key of every pair."""
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    axes = [torch.arange(size, dtype=torch.int32) for size in sizes]
    return [x.view([-1 if axis == own else 1 for axis in range(4)]) for own, x in enumerate(axes)]


def _active(call, q, k, where):
    by_rows, by_columns = _kinds(call.lists[:4], k, call), _kinds(call.lists[4:], q, call)
    lines, across = -(-q.shape[2] // call.block), -(-k.shape[2] // call.block)
    kinds = by_rows[:, :, :lines, :across]
    assert torch.equal(kinds, by_columns[:, :, :across, :lines].mT), "the transpose is inconsistent"
    kinds = kinds.repeat_interleave(call.block, 2).repeat_interleave(call.block, 3)
    kinds = kinds[:, :, : q.shape[2], : k.shape[2]]
    kinds = kinds.repeat(q.shape[0] // kinds.shape[0], q.shape[1] // kinds.shape[1], 1, 1)
    mask = _mask_mod.functions(call.source).mask(*where, call.numbers, *call.tables)
    return (kinds == 2) | ((kinds == 1) & mask)


def _kinds(lists, across, call):
    """0, 1 and 2 for every block that isn't listed, listed as partial, and as full."""
    counts, width = lists[0], max(2, -(-across.shape[2] // call.block))
    kinds = torch.zeros((*counts.shape, width), dtype=torch.int8)
    for kind, (counts, indices) in enumerate(zip(lists[::2], lists[1::2]), 1):
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        entry, head, line, _ = listed.nonzero(as_tuple=True)
        where = entry, head, line, indices[listed].long()
        assert (kinds[where] == 0).all(), "a block is listed twice"
        kinds[where] = kind
        assert int(listed.sum()) == int((kinds == kind).sum()), "a block is listed twice"
    return kinds


def _of_queries(x, q):
    """Keys or values of every query head, in f64."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _of_keys(gradient, x):
    batch, heads, tokens, dim = x.shape
    return gradient.view(batch, heads, -1, tokens, dim).sum(2)
