"""Layouts of masks that are tensors, kept for as long as the tensors stay what they are.

Models make a mask once and hand it to every layer: the first one reads it, the others find its layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan import Layout
from longspan.torch._engine import BLOCK, is_own
from longspan.torch._identity_cache import IdentityCache

#: Bytes of layouts that are kept.
CACHE_BYTES = 256 << 20

_LAYOUTS: IdentityCache[Layout] = IdentityCache(CACHE_BYTES, lambda layout: layout.nbytes)


def layout_of_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Layout:
    """The layout of a mask that broadcasts to ``(batch, head, query, key)``: bool, or 0 and -inf alone."""
    if torch.compiler.is_compiling():
        raise TypeError(
            "attn_mask is a tensor, expected a pattern under torch.compile: what a mask holds is known "
            "only when it runs"
        )
    if mask.ndim > 4 or any(size not in (1, full) for size, full in zip(mask.shape[::-1], shape[::-1])):
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}, expected one that broadcasts to {shape}"
        )
    if mask.requires_grad:
        raise ValueError(
            "attn_mask requires a gradient, which a mask of pairs has not: a bias by distance is "
            "bias_table of longspan.torch.attention"
        )
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        raise TypeError(f"attn_mask is a {mask.dtype} tensor, expected bool, or floating-point")
    return _LAYOUTS.get(shape, [mask], lambda: _read(mask, shape))


def _read(mask: Tensor, shape: tuple[int, int, int, int]) -> Layout:
    active = mask
    if mask.is_floating_point():
        active = mask == 0
        if not bool((active | (mask == -torch.inf)).all()):
            raise ValueError(
                "attn_mask adds numbers other than 0 and -inf, expected a mask of pairs: a bias by "
                "distance is bias_table or alibi_slopes of longspan.torch.attention"
            )
    active = active.reshape((1,) * (4 - active.ndim) + active.shape)
    # Axes along which it is the same are looked at once.
    for axis in (0, 1):
        if active.stride(axis) == 0:
            active = active.narrow(axis, 0, min(1, active.shape[axis]))
    active = active.expand(active.shape[0], active.shape[1], shape[2], shape[3])
    if active.shape[0] * active.shape[1] == 0:
        active = active.new_ones((1, 1, shape[2], shape[3]))
    block = None if is_own(mask.device) else BLOCK
    return Layout.from_mask(active.cpu().numpy(), block=block)
