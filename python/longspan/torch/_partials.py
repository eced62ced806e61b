"""Partial softmaxes of an engine's calls, and their merge.

A call returns ``(out, lse)`` over its own keys. The state of all rows is the same pair, ``out`` in f32 and ``lse``
in f64: a rounded log-sum-exp would be the largest error of gradients of long rows, and there is one per row.
Joining a partial weights both with their denominators:

    lse = log(exp(lse_a) + exp(lse_b))
    out = out_a · exp(lse_a − lse) + out_b · exp(lse_b − lse)

A row without keys has ``lse = −inf`` and ``out = 0``, and joining it changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longspan.torch._views import Selection, select, unflatten


class Partial(NamedTuple):
    """Attention over some of the keys of each row."""

    out: Tensor
    """``(batch, head, token, dim)``, f32."""
    lse: Tensor
    """``(batch, head, token)``, f64, natural logarithm."""

    def merge(self, other: Partial, rows: Selection) -> None:
        """Joins a call's results, ``(batch · segments, head, token, …)``, to the rows that it has."""
        out, lse = select(self.out, rows), select(self.lse[..., None], rows)[..., 0]
        other_out = unflatten(other.out, rows)
        other_lse = unflatten(other.lse, rows)
        index = rows.chosen if isinstance(rows.chosen, Tensor) else None
        some_out, some_lse = out, lse
        if index is not None:
            some_out, some_lse = out.index_select(3, index), lse.index_select(3, index)
        joint = torch.logaddexp(some_lse, other_lse)
        # Differences of two infinities are not numbers: rows without keys are weighted relative to 0.
        reference = joint.masked_fill(joint == -torch.inf, 0)
        joint_out = some_out * _weight(some_lse, reference)
        joint_out.addcmul_(other_out.float(), _weight(other_lse, reference))
        if index is None:
            out.copy_(joint_out)
            lse.copy_(joint)
        else:
            out.index_copy_(3, index, joint_out)
            lse.index_copy_(3, index, joint)

    def with_sinks(self, logits: Tensor) -> Partial:
        """The state with one more logit per head in each denominator, of value 0."""
        logits = logits.to(self.lse.dtype)[:, None]
        lse = torch.logaddexp(self.lse, logits)
        reference = lse.masked_fill(lse == -torch.inf, 0)
        # In place: nothing else has the accumulator.
        return Partial(self.out.mul_(_weight(self.lse, reference)), lse)

    def rounded_lse(self) -> tuple[Tensor, Tensor]:
        """The log-sum-exp in f32, and what rounding left out."""
        lse = self.lse.float()
        return lse, (self.lse - lse).masked_fill(lse == -torch.inf, 0).float()


def _weight(lse: Tensor, reference: Tensor) -> Tensor:
    return torch.exp(lse - reference).float()[..., None]


def sink_gradient(
    logits: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Tensor:
    """``ds = Σ exp(s − lse) · (dlse − out · dout)``, over the rows of each head."""
    total = torch.zeros_like(lse, dtype=torch.float32)
    if dout is not None:
        total -= (out.float() * dout.float()).sum(-1)
    if dlse is not None:
        total += dlse
    # Rows without a sink, those of padding, have a log-sum-exp of −∞.
    weight = torch.exp(logits.to(lse.dtype)[:, None] - lse).masked_fill(lse == -torch.inf, 0)
    return (weight * total).sum((0, 2)).float()


def add_rows(sums: Tensor, part: Tensor, rows: Selection) -> None:
    """Adds a call's gradients to the rows that it has."""
    into, part = select(sums, rows), unflatten(part, rows)
    if isinstance(rows.chosen, Tensor):
        into.index_add_(3, rows.chosen, part.to(sums.dtype))
    else:
        into += part
