"""A pattern's expression as FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)``.

A mask is a program: Python source of arithmetic on tensors, which torch compiles into its kernels on any
device, and its numbers as tensors. The source has only the structure of patterns; offsets, windows, lengths,
packings are numbers. So masks that differ in numbers share one compilation: constants would be
compiled into kernels, again for each offset of a ring or of a cache of keys.

Numbers are 32 bits wide, as in FlexAttention's kernels, unless positions need 64.

``_mask_text`` reads patterns, ``_mask_axis`` has the positions of tokens, ``_mask_primitives`` the
primitives, ``_mask_block_rows`` the tables of some, and ``_mask_program`` writes the source.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Sequence

import numpy
import torch
from torch import Tensor

from longspan import _longspan
from longspan._mask_axis import Progression, Tokens
from longspan._mask_program import Program, build
from longspan._mask_text import Integers, Node, tree

__all__ = ["Functions", "MaskMod", "Program", "at", "functions", "mask_mod", "program"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: ``DeviceCall.masks``: queries have positions of each entry, keys those of each or one for all; the
#: choice is that of entries × heads, flat or nested.
Masks = tuple[
    Sequence[str],
    "Sequence[int] | Sequence[Sequence[int]]",
    Sequence[Sequence[Progression]],
    Sequence[Sequence[Progression]],
    "Sequence[tuple[int, int] | None] | None",
]


class Functions(NamedTuple):
    """What a program's source defines, over ``(b, h, q_idx, kv_idx, numbers, *tables)``."""

    mask: Callable[..., Tensor]
    """Whether the query attends to the key."""
    distance: Callable[..., Tensor] | None
    """Query position minus key position as score additions use it: within sequences of ``packed``. None
    where parts of the pattern use different positions."""


def program(masks: Masks, query_tokens: Tokens = None, key_tokens: Tokens = None) -> Program:
    """The program of the masks of a ``DeviceCall``, over all its tokens or over those of a part."""
    patterns, choice, query_positions, key_positions, valid = masks
    positions = (query_positions, key_positions)
    indices = numpy.asarray(choice)
    if indices.ndim == 1:
        indices = indices.reshape(len(query_positions), -1)
    lists: dict[str, Integers] = {}
    nodes = [tree(text, lists) for text in patterns]
    return build(nodes, indices, positions, valid, (query_tokens, key_tokens))


def at(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]``, by the operator. Where torch derives the gradient of a score function, brackets would
    copy an index without axes to the host."""
    element: Tensor = torch.ops.aten.index(table, [index])
    return element


@functools.lru_cache(maxsize=None)
def functions(source: str) -> Functions:
    """The functions of a source: the same ones for equal sources, so that torch compiles them once."""
    scope: dict[str, Any] = {"torch": torch, "at": at}
    exec(compile(source, "<longspan mask>", "exec"), scope)  # noqa: S102
    return Functions(scope["mask"], scope.get("distance"))


def mask_mod(layout: _longspan.Layout, device: torch.device) -> MaskMod:
    """The ``mask_mod`` of a layout: what its pattern says, its offsets and its padding."""
    pattern, (query_offset, key_offset), key_padding = _longspan.layout_source(layout)
    nodes, choice = by_entry_and_head(tree(str(pattern)))
    valid = key_padding and [(first + key_offset, end + key_offset) for first, end in key_padding]
    positions = (
        [[(query_offset, 1, layout.tokens_q)]],
        [[(key_offset, 1, layout.tokens_k)]],
    )
    made = build(nodes, choice, positions, valid)
    mask = functions(made.source).mask
    numbers, *tables = (torch.from_numpy(x).to(device) for x in (made.numbers, *made.tables))
    return lambda b, h, q_idx, kv_idx: mask(b, h, q_idx, kv_idx, numbers, *tables)


def by_entry_and_head(node: Node) -> tuple[list[Node], numpy.ndarray]:
    """Patterns without ``batch`` and ``heads``, and which of them each entry and head has."""
    entries = node[1] if node[0] == "batch" else (node,)
    rows = [entry[1] if entry[0] == "heads" else (entry,) for entry in entries]
    heads = max(map(len, rows))
    rows = [row * (heads // len(row)) for row in rows]
    indices: dict[Node, int] = {}
    choice = [[indices.setdefault(each, len(indices)) for each in row] for row in rows]
    return list(indices), numpy.array(choice)
