"""Views of some tokens and heads of tensors, as an engine's calls take them.

A call attends to every so many tokens of every so many heads: token ``t`` of segment ``s`` is token
``segments[s] + tokens[t]`` of the tensor. As a view that is an axis of segments beside that of batch
entries; kernels have one axis for both, so the two are joined where their strides allow it, and
otherwise the view is copied, which is a copy of what the call reads and no more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: ``(first, step, count)``.
Steps = tuple[int, int, int]

#: Kernels compute the offset of a token within a head in 32 bits.
OFFSETS = 1 << 31


class Selection(NamedTuple):
    """Some tokens and heads of ``(batch, head, token, …)``."""

    entry: int | None
    """One batch entry, or None for all."""
    segments: Steps
    tokens: Steps
    heads: Steps
    chosen: tuple[int, int] | Tensor | None = None
    """Of these tokens a range ``(first, count)``, some by index, or None for all."""

    @property
    def ranged(self) -> Selection:
        """Without the tokens that are chosen by index."""
        if not isinstance(self.chosen, tuple):
            return self._replace(chosen=None)
        (first, step, _), (start, count) = self.tokens, self.chosen
        return self._replace(tokens=(first + step * start, step, count), chosen=None)


def select(x: Tensor, selection: Selection) -> Tensor:
    """The view ``(batch, segment, head, token, …)`` of a tensor, tokens chosen by index left out."""
    entry, segments, tokens, heads, _ = selection.ranged
    first_entry, entries = (0, x.shape[0]) if entry is None else (entry, 1)
    batch, head, token, *rest = x.stride()
    first = first_entry * batch + heads[0] * head + (segments[0] + tokens[0]) * token
    return x.as_strided(
        (entries, segments[2], heads[2], tokens[2], *x.shape[3:]),
        (batch, segments[1] * token, heads[1] * head, tokens[1] * token, *rest),
        x.storage_offset() + first,
    )


def gather(x: Tensor, selection: Selection) -> Tensor:
    """What a kernel reads, ``(batch · segments, head, token, …)``: a view where one exists."""
    selected = select(x, selection)
    if isinstance(selection.chosen, Tensor):
        selected = selected.index_select(3, selection.chosen)
    return selected.flatten(0, 1)


def unflatten(x: Tensor, selection: Selection) -> Tensor:
    """A kernel's result with an axis of segments again."""
    return x.unflatten(0, (-1, selection.segments[2]))


def within_32_bits(name: str, x: Tensor) -> Tensor:
    """A tensor whose token offsets fit 32 bits: itself, a copy, or an error."""
    if _reach(x) < OFFSETS:
        return x
    tokens, dim = x.shape[2], x.shape[3]
    if tokens * dim >= OFFSETS:
        raise ValueError(
            f"{name} has {tokens} tokens of {dim} elements per head, expected fewer than 2^31 elements per "
            "head on this device, whose kernels compute offsets in 32 bits: shard the sequence over ranks "
            "with longspan.torch.ring_attention"
        )
    return x.contiguous()


def _reach(x: Tensor) -> int:
    """Distance of the last token's last element from the first token's first."""
    return max(0, x.shape[2] - 1) * abs(x.stride(2)) + max(0, x.shape[3] - 1) * abs(x.stride(3))


def dense_like(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor without gaps whose axes lie in memory in the order of those of ``x``, elements of a
    head first: the layout of FlexAttention's results."""
    others = sorted(range(x.ndim - 1), key=lambda axis: (x.stride(axis), -axis))
    strides, size = [0] * x.ndim, 1
    for axis in (x.ndim - 1, *others):
        strides[axis] = size
        size *= shape[axis]
    return torch.empty_strided(shape, strides, dtype=dtype or x.dtype, device=x.device)
