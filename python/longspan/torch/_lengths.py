"""Sequences of different lengths in one batch: padded ones, and ones packed side by side.

Both are a range of keys that is a sequence of its own. Branches of dilated attention and rotary
positions count from its first key on.
"""

from __future__ import annotations

import torch
from torch import Tensor

import longspan
from longspan import Dilated

#: Where packed sequences begin, and the last one ends; a pair of them for queries and keys.
Bounds = Tensor | tuple[Tensor, Tensor]


def one_of_both(key_padding: Tensor | None, cu_seqlens: Bounds | None) -> None:
    """Refuses both at once."""
    if key_padding is not None and cu_seqlens is not None:
        raise ValueError(
            "key_padding and cu_seqlens: expected one of both; a packed sequence is as long as its "
            "tokens, so leave padding out of it"
        )


def places_in_sequences(
    tokens: int, key_padding: Tensor | None, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor:
    """The position of each token in its own sequence, ``(tokens,)`` or ``(batch, tokens)``: int64,
    below 0 before the first key."""
    places = torch.arange(tokens, device=device)
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(torch.int64)
        rows = places.expand(*bounds.shape[:-1], tokens).contiguous()
        index = torch.searchsorted(bounds, rows, right=True) - 1
        return places - bounds.gather(-1, index)
    if key_padding is not None:
        is_mask = key_padding.dtype == torch.bool
        first = key_padding.int().argmax(1) if is_mask else key_padding[:, 0]
        return places - first[:, None]
    return places


def has_lengths(pattern: str | Dilated) -> bool:
    """Whether branches are for sequences of given lengths already."""
    given = isinstance(pattern, Dilated)
    return given and not (pattern.key_padding is None and pattern.cu_seqlens is None)


def placed(
    pattern: str | Dilated,
    key_padding: Tensor | None,
    cu_seqlens: Tensor | None,
    batch: int,
    tokens: int | None,
) -> str | Dilated:
    """A pattern, or branches, over sequences of a whole batch whose tokens ranks hold together."""
    one_of_both(key_padding, cu_seqlens)
    if (key_padding is not None or cu_seqlens is not None) and has_lengths(pattern):
        raise ValueError(
            "key_padding or cu_seqlens beside a Dilated that is padded or packed already: expected one of both"
        )
    if cu_seqlens is not None:
        bounds = _bounds(cu_seqlens, tokens)
        if isinstance(pattern, Dilated):
            return pattern.packed_cu_seqlens(bounds)
        return str(longspan.packed_cu_seqlens(bounds, bounds, pattern))
    if key_padding is None:
        return pattern
    if not isinstance(pattern, Dilated):
        raise ValueError(
            "key_padding beside a pattern: expected None over ranks, where a longspan.Dilated alone "
            "has padding; leave the padding out of the sequence, or pack sequences with cu_seqlens"
        )
    return pattern.padded(padding_ranges(key_padding, batch, tokens))


def padding_ranges(padding: Tensor, batch: int, tokens: int | None) -> list[tuple[int, int]]:
    """The first and the end of the keys that hold tokens, per batch entry."""
    if not isinstance(padding, Tensor):
        raise TypeError(f"key_padding is a {type(padding).__name__}, expected a torch.Tensor")
    shape = tuple(padding.shape)
    if padding.dtype == torch.bool:
        if len(shape) == 2 and shape[0] == batch and tokens in (None, shape[1]):
            return [_range(row, entry) for entry, row in enumerate(padding)]
    elif padding.dtype in (torch.int32, torch.int64) and shape == (batch, 2):
        return [(first, end) for first, end in padding.tolist()]
    length = "tokens" if tokens is None else tokens
    raise ValueError(
        f"key_padding is a {str(padding.dtype)[6:]} tensor of shape {shape}, expected int64 of shape "
        f"({batch}, 2), the first key with a token and the end of them, or bool of shape ({batch}, "
        f"{length}): those of the whole sequence"
    )


def _range(row: Tensor, entry: int) -> tuple[int, int]:
    places = row.nonzero()[:, 0]
    if not len(places):
        return 0, 0
    first, end = int(places[0]), int(places[-1]) + 1
    if end - first != len(places):
        raise ValueError(
            f"key_padding has {end - first - len(places)} keys without tokens between others in batch "
            f"entry {entry}, expected one range of keys: branches count within it"
        )
    return first, end


def _bounds(bounds: Tensor, tokens: int | None) -> list[int]:
    if not isinstance(bounds, Tensor):
        raise TypeError(
            f"cu_seqlens is a {type(bounds).__name__}, expected a torch.Tensor: over ranks queries and "
            "keys are of the same sequences"
        )
    if bounds.ndim != 1 or bounds.dtype not in (torch.int32, torch.int64) or not len(bounds):
        raise ValueError(
            f"cu_seqlens is a {str(bounds.dtype)[6:]} tensor of shape {tuple(bounds.shape)}, expected "
            "int32 or int64 of shape (sequences + 1,) over ranks: 0, then where each sequence of the "
            "whole batch entry ends, the same in all of them"
        )
    values = bounds.tolist()
    if tokens is not None and values[-1] != tokens:
        raise ValueError(
            f"cu_seqlens ends at {values[-1]}, expected {tokens}, the length of the whole sequence"
        )
    return values
