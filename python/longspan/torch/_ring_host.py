"""A ring whose tensors are on the CPU: the compiled part's own hops and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from longspan._longspan import Ring
from longspan.torch import _run
from longspan.torch._run import Found, Scores

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AnyRing(Protocol):
    """The ring of a rank for one kind of problem; passes are called by all ranks in the same order."""

    def forward(
        self, group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor, scores: Scores, saves: bool
    ) -> Found:
        """Output and log-sum-exp of this rank's queries."""

    def backward(
        self,
        group: ProcessGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        found: Found,
        dout: Tensor | None,
        dlse: Tensor | None,
        scores: Scores,
        wanted: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        """Gradients of this rank's tokens, and what it contributes to those of sink logits, bias table and
        slopes."""

    def traffic(self) -> tuple[int, int]:
        """Bytes that this rank has received and sent in passes."""


class HostRing:
    """A ring on the CPU; messages go through the group that it was made with."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self.traffic = ring.traffic

    def forward(
        self, group: ProcessGroup, q: Tensor, k: Tensor, v: Tensor, scores: Scores, saves: bool
    ) -> Found:
        found = _run.empty_found(q, v)
        raw = [_run.raw(x) for x in (q, k, v, *found)]
        self._ring.forward(*raw, **_run.additions(scores))
        return found

    def backward(
        self,
        group: ProcessGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        found: Found,
        dout: Tensor | None,
        dlse: Tensor | None,
        scores: Scores,
        wanted: Sequence[bool],
    ) -> tuple[Tensor, ...]:
        out = found.out
        # Held by name until the call returns: only addresses are handed over.
        lse, lse_lo = found.lse.contiguous(), found.lse_lo.contiguous()
        dout = out.new_zeros(()).expand(out.shape) if dout is None else dout
        dlse = None if dlse is None else dlse.contiguous()
        gradients = tuple(_run.empty(x, x.shape) for x in (q, k, v))
        raw = [_run.raw(x) for x in (q, k, v, out, lse, lse_lo, dout)]
        raw.append(None if dlse is None else _run.raw(dlse))
        raw += [_run.raw(x) for x in gradients]
        lists = self._ring.backward(*raw, wanted, **_run.additions(scores))
        return (*gradients, *_run.learned_gradients(lists, scores.learned))
