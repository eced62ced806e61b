"""Attention in the neighborhoods of a grid, in an order of tokens in which they are few blocks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import longspan
from longspan.torch._attention import attention
from longspan.torch._engine import BLOCK, is_own

#: Cells per tile by the number of axes: 64, a block.
_TILES = {1: (64,), 2: (8, 8), 3: (4, 4, 4), 4: (4, 4, 2, 2)}


def neighborhood_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sequence[int],
    radii: Sequence[int],
    *,
    tile: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """Attention over ``longspan.neighborhood(sizes, radii)``, with gradients.

    Tensors are ``(batch, head, token, dim)``, tokens the cells of the grid with the last axis fastest.
    They are put into the order of tiles (8 x 8 or 4 x 4 x 4 cells unless ``tile`` says otherwise), in
    which neighborhoods are few blocks, and the results back. ``options`` are those of ``attention`` that
    have no positions of their own: ``scale``, ``enable_gqa``, ``softcap``, ``return_lse``,
    ``sink_logits``, ``dropout_p``.

    >>> import torch, longspan.torch
    >>> q = torch.randn(1, 2, 32 * 32, 16, requires_grad=True)
    >>> out = longspan.torch.neighborhood_attention(q, q, q, (32, 32), (3, 3))
    >>> out.sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 1024, 16])
    """
    tile = _TILES.get(len(sizes), ()) if tile is None else tile
    block = None if is_own(q.device) else BLOCK
    layout, order, back = _tiled(tuple(sizes), tuple(radii), tuple(tile), block, q.device)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or x.shape[2] != len(order):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected (batch, head, token, dim) with {len(order)} "
                f"tokens, the cells of a grid of {' x '.join(map(str, sizes))}"
            )
    found = attention(*(x.index_select(2, order) for x in (q, k, v)), layout, **options)
    if isinstance(found, tuple):
        return tuple(x.index_select(2, back) for x in found)
    return found.index_select(2, back)


@functools.lru_cache(maxsize=32)
def _tiled(
    sizes: tuple[int, ...],
    radii: tuple[int, ...],
    tile: tuple[int, ...],
    block: int | None,
    device: torch.device,
) -> tuple[longspan.Layout, Tensor, Tensor]:
    """The layout in the order of tiles, that order, and the way back."""
    pattern = longspan.neighborhood(sizes, radii)
    parts = longspan.tiles(sizes, tile)
    order = torch.cat([torch.arange(part.start, part.stop, part.step) for part in parts])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    # Looking at pairs of ranges is more work than compiling an interval is, and linear in the cells. Most
    # blocks are partial, and their masks few: one per distance of tiles, and those at the borders.
    layout = pattern.compile(
        len(order), block=block, query_map=parts, key_map=parts, mask_bytes=1 << 24, max_work=1 << 36
    )
    return layout, order.to(device), back.to(device)
