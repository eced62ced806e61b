"""Rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Cosines and sines of rotary positions, ``(tokens, dim / 2)`` or ``(batch, tokens, dim / 2)`` each.
Table = tuple[Tensor, Tensor]


def rotary_table(
    tokens: int, dim: int, base: float = 10000.0, device: Any = None, *, first: int = 0
) -> Table:
    """Cosines and sines for positions from ``first`` on and heads of ``dim`` numbers, angles in f64.

    >>> import longspan.torch
    >>> cosines, sines = longspan.torch.rotary_table(100, 16)
    >>> cosines.shape, cosines[0, 0].item(), sines[0, 0].item()
    (torch.Size([100, 8]), 1.0, 0.0)
    """
    if dim % 2:
        raise ValueError(f"dim is {dim}, expected an even number: pairs of numbers are turned")
    return rotary_at(torch.arange(first, first + tokens, device=device), dim, base)


def rotary_at(positions: Tensor, dim: int, base: float) -> Table:
    """Cosines and sines for positions of any shape."""
    steps = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    angles = positions.double()[..., None] * base**-steps
    return angles.cos().float(), angles.sin().float()


def turn(x: Tensor, table: Table) -> Tensor:
    """Numbers ``j`` and ``j + dim / 2`` of a head turned by its position's angle, in f32."""
    cosines, sines = (numbers.unsqueeze(-2) for numbers in table)
    first, second = x.float().chunk(2, -1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, -1).to(x.dtype)
