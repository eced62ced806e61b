"""FlexAttention's ``BlockMask`` as a layout.

Full blocks are those of its lists. ``mask_mod`` is evaluated on the tiles of partial ones alone, many at a time,
as torch does it: under ``vmap``, with indices without axes.

A layout is kept for as long as the lists are what they are and ``mask_mod`` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.overrides import TorchFunctionMode

from longspan import Layout
from longspan.torch import _captured
from longspan.torch._identity_cache import IdentityCache

#: Bytes of layouts that are kept.
CACHE_BYTES = 256 << 20

#: Pairs that are evaluated at a time: indices and results of a step fit into the second-level cache.
_PAIRS = 1 << 20

_LAYOUTS: IdentityCache[Layout] = IdentityCache(CACHE_BYTES, lambda layout: layout.nbytes)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def layout_of(mask: BlockMask, sizes: tuple[int, int], lengths: tuple[int, int]) -> Layout:
    """The layout of a mask for ``sizes``, batch entries and heads, and ``lengths``, queries and keys."""
    _check(mask, sizes, lengths)
    lists = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    captured = _captured.read(mask.mask_mod)

    def make() -> Layout:
        with torch.no_grad():
            return _layout(mask, sizes, lengths)

    if captured is None:
        return make()
    key = (sizes, lengths, tuple(mask.BLOCK_SIZE), captured.values)
    sources = [x for x in (*lists, *captured.sources) if x is not None]
    return _LAYOUTS.get(key, sources, make)


def _check(mask: BlockMask, sizes: tuple[int, int], lengths: tuple[int, int]) -> None:
    if tuple(mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask is for {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys, expected "
            f"{lengths[0]} and {lengths[1]}, those of the tensors: make one for them, or slice it"
        )
    if mask.kv_num_blocks.ndim != 3:
        raise ValueError(
            f"block_mask has lists of shape {tuple(mask.kv_num_blocks.shape)}, expected (batch, head, rows)"
        )
    for name, own, of_tensors in zip(("batch entries", "heads"), mask.kv_num_blocks.shape, sizes):
        if own not in (1, of_tensors):
            raise ValueError(f"block_mask is for {own} {name}, expected 1 or {of_tensors}")
    if mask.kv_num_blocks.device.type != "cpu":
        raise ValueError(f"block_mask is on {mask.kv_num_blocks.device}, expected the CPU, as the tensors")


class _Blocks(NamedTuple):
    """Blocks of lists."""

    line: Tensor
    """The row among those of all batch entries and heads."""
    column: Tensor


def _listed(counts: Tensor | None, indices: Tensor | None) -> _Blocks:
    """The blocks of one pair of lists, by row."""
    if counts is None or indices is None:
        nothing = torch.empty(0, dtype=torch.int64)
        return _Blocks(nothing, nothing)
    counts = counts.flatten()
    # Lists have room for all columns, and what is behind the last block has no meaning.
    width = int(counts.max()) if counts.numel() else 0
    indices = indices.flatten(0, 2)[:, :width]
    line, place = (torch.arange(width) < counts[:, None]).nonzero(as_tuple=True)
    return _Blocks(line, indices[line, place].long())


def _layout(mask: BlockMask, sizes: tuple[int, int], lengths: tuple[int, int]) -> Layout:
    # A block that is longer than an axis ends with it.
    tile = tuple(min(size, max(length, 1)) for size, length in zip(mask.BLOCK_SIZE, lengths))
    rows, columns = (-(-length // size) for length, size in zip(lengths, tile))
    grid = mask.kv_num_blocks.shape[:2]
    if mask.kv_num_blocks.shape[2] != rows:
        raise ValueError(f"block_mask has {mask.kv_num_blocks.shape[2]} rows of blocks, expected {rows}")
    partial = _listed(mask.kv_num_blocks, mask.kv_indices)
    full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    if mask.mask_mod is noop_mask:
        partial, full = full._replace(line=full.line[:0], column=full.column[:0]), _Blocks(
            torch.cat([partial.line, full.line]), torch.cat([partial.column, full.column])
        )
    for blocks in (partial, full):
        if blocks.column.numel() and not 0 <= int(blocks.column.min()) <= int(blocks.column.max()) < columns:
            raise ValueError(f"block_mask lists a block of column {int(blocks.column.max())}, expected below {columns}")
    # One list for all is of more where the function looks at the entry or the head.
    if partial.line.numel():
        looks = _looks_at(mask.mask_mod)
        wide = tuple(size if look else own for own, size, look in zip(grid, sizes, looks))
        partial, full = (_widened(blocks, grid, wide, rows) for blocks in (partial, full))
        grid = torch.Size(wide)
    line = torch.cat([partial.line, full.line])
    column = torch.cat([partial.column, full.column])
    number = torch.cat([torch.arange(len(partial.line)), torch.full((len(full.line),), -1)])
    order = (line * columns + column).argsort()
    line, column, number = line[order], column[order], number[order]
    twice = (line[1:] == line[:-1]) & (column[1:] == column[:-1])
    if bool(twice.any()):
        at = int(twice.nonzero()[0])
        raise ValueError(f"block_mask lists block ({int(line[at]) % rows}, {int(column[at])}) twice")
    counts = torch.bincount(line, minlength=grid[0] * grid[1] * rows)
    masks = _evaluated(mask.mask_mod, partial, (grid[1], rows), tile, lengths)
    lists = (counts, column.to(torch.int32), number, masks)
    arrays = [numpy.ascontiguousarray(x.numpy()) for x in lists]
    return Layout._from_block_lists(tuple(grid), lengths, tile, arrays)


def _widened(blocks: _Blocks, grid: tuple[int, ...], wide: tuple[int, ...], rows: int) -> _Blocks:
    """The same blocks for each batch entry and head of ``wide``."""
    if tuple(grid) == wide:
        return blocks
    entry, rest = blocks.line // (grid[1] * rows), blocks.line % (grid[1] * rows)
    head, row = rest // rows, rest % rows
    entries = torch.arange(wide[0] // grid[0])[:, None, None] + entry
    heads = torch.arange(wide[1] // grid[1])[:, None] + head
    line = (entries * wide[1] + heads) * rows + row
    return _Blocks(line.flatten(), blocks.column.expand(line.shape).flatten())


class _Constants(TorchFunctionMode):
    """Tensors made with the shape and type of another one do not depend on it: ``and_masks`` begins with
    ``b.new_ones(…)``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _FACTORIES and args and isinstance(args[0], Tensor):
            args = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


_FACTORIES = frozenset(
    f"{prefix}{what}{suffix}"
    for what in ("ones", "zeros", "full", "empty")
    for prefix, suffix in (("new_", ""), ("", "_like"))
)


def _looks_at(function: MaskMod) -> tuple[bool, bool]:
    """Whether what a function returns depends on its first two arguments: those over which ``vmap`` has made a
    batch of it."""
    depends = [False, False]
    functorch: Any = torch._C._functorch

    def probe(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = x = function(b, h, q_idx, kv_idx)
        levels = set()
        while functorch.is_batchedtensor(x):
            levels.add(functorch.maybe_get_level(x))
            x = functorch.get_unwrapped(x)
        for place, argument in enumerate((b, h)):
            depends[place] = functorch.maybe_get_level(argument) in levels
        return result

    index = torch.zeros(1, dtype=torch.int64)
    over_heads = torch.vmap(probe, (None, 0, None, None))
    with _Constants():
        torch.vmap(over_heads, (0, None, None, None))(index, index, index[0], index[0])
    return depends[0], depends[1]


def _evaluated(
    function: MaskMod, blocks: _Blocks, of_line: tuple[int, int], tile: tuple[int, ...], lengths: tuple[int, int]
) -> Tensor:
    """The pairs of blocks, ``[block, query, key]`` of bools. Those past the last token are those of the last."""
    heads, rows = of_line
    masks = torch.empty((len(blocks.line), *tile), dtype=torch.bool)
    over_keys = torch.vmap(function, (None, None, None, 0))
    over_queries = torch.vmap(over_keys, (None, None, 0, None))
    over_blocks = torch.vmap(over_queries, (0, 0, 0, 0))
    entry, head, row = blocks.line // (heads * rows), blocks.line // rows % heads, blocks.line % rows
    step = max(1, _PAIRS // (tile[0] * tile[1]))
    for first in range(0, len(blocks.line), step):
        part = slice(first, first + step)
        queries, keys = (
            (index[part, None] * size + torch.arange(size)).clamp(max=length - 1)
            for index, size, length in zip((row, blocks.column), tile, lengths)
        )
        found = over_blocks(entry[part], head[part], queries, keys)
        if found.dtype != torch.bool:
            raise TypeError(f"mask_mod returns {found.dtype}, expected torch.bool")
        masks[part] = found
    return masks
