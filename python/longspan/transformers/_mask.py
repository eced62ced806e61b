"""``mask``: what transformers asks of a mask, in a small object.

A model asks for a mask once a pass (once for each kind of layer), with lengths, offsets, padding
and a function over positions. All of that goes into one ``Mask``, which every layer hands to
``attention``. Its size follows the batch, and the number of packed sequences.

**Offsets are taken as given.** A static cache hands over keys whose last slots are empty, a sliding
cache keys whose first positions are gone: where queries stand can't be seen from lengths. A static
cache's offset is the cache's own counter, which it moves on before attention is called, so it is
copied.

**generate** makes masks in advance where a cache is static, and hands them to the model as its
``attention_mask``, which asks for a mask again. ``mask`` takes the padding out of such a one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.transformers import _read


@dataclass(frozen=True, eq=False)
class Mask:
    """Which queries attend to which keys in a pass through layers of one kind."""

    pattern: str
    window: int | None
    """The ``sliding_window`` that goes with the pattern, by transformers' way of counting."""
    batch: int
    tokens_q: int
    tokens_k: int
    query_offset: int | Tensor
    key_offset: int
    key_padding: Tensor | None
    """The keys that hold tokens: ``(batch, 2)`` of first and end, or bools while compiling."""
    cu_seqlens: tuple[Tensor, ...] | None
    """Where packed sequences begin: one tensor for all batch entries, or one for each."""
    attention_mask: Tensor | None
    """The padding that the model was given, ``(batch, positions)``."""
    reach: int | None = None
    """What a window both ways was made with."""
    moves: bool = True
    """Whether the pattern looks at distances alone, so that positions may count from anywhere."""

    @property
    def ndim(self) -> int:
        """As many as the mask that others make has: not a padding of two axes."""
        return 4

    def contiguous(self) -> Mask:
        """Itself: ``generate`` asks for it."""
        return self

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(_as_tensor("sliced"))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_as_tensor(f"asked for {name}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(_as_tensor(f"given to torch's {getattr(function, '__name__', function)}"))


def _as_tensor(use: str) -> str:
    return (
        f"the mask of longspan is {use}, expected it handed on to attention: this model makes its own use of masks; "
        'use attn_implementation="sdpa" or "eager"'
    )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | Mask | None = None,
    device: torch.device | str = "cpu",
    **hints: Any,
) -> Mask:
    """Called by transformers, by keyword. ``hints`` are for masks of every pair: their type, when
    to leave them out, and the width that ``mask_function`` has too."""
    found, reading = read(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device
    )
    if reading.ids:
        return _packed(found, reading)
    return replace(found, key_padding=key_padding(found, reading.padding))


def read(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | Mask | None = None,
    device: torch.device | str = "cpu",
    **hints: Any,
) -> tuple[Mask, _read.Reading]:
    """A mask without padding and packing, and what was read of them."""
    if torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"the model is on {device}, expected the CPU or a CUDA device: model.to('cpu')")
    if mask_function is None:
        raise TypeError("mask_function is missing, expected the function that says which queries attend to which keys")
    reading = _read.read(mask_function)
    if isinstance(attention_mask, Mask):
        attention_mask = attention_mask.attention_mask
    found = Mask(
        pattern=reading.pattern,
        window=reading.window,
        batch=batch_size,
        tokens_q=q_length,
        tokens_k=kv_length,
        query_offset=q_offset.clone() if isinstance(q_offset, Tensor) else q_offset,
        key_offset=kv_offset,
        key_padding=None,
        cu_seqlens=None,
        attention_mask=attention_mask,
        reach=reading.reach,
        moves=reading.moves,
    )
    if attention_mask is not None:
        reading.padding.append(attention_mask)
    # Lengths and padding are read on the host: one copy here for all layers of a model.
    reading.padding[:] = [padding.cpu() for padding in reading.padding]
    reading.ids[:] = [ids.cpu() for ids in reading.ids]
    return found, reading


def key_padding(found: Mask, paddings: list[Tensor]) -> Tensor | None:
    """The keys at hand that hold tokens; none where all do."""
    if not paddings:
        return None
    held = torch.ones((found.batch, found.tokens_k), dtype=torch.bool)
    for padding in paddings:
        held &= _at_hand(padding, found)
    if torch.compiler.is_compiling():
        return held
    if held.all():
        return None
    counts = held.sum(1)
    firsts = held.int().argmax(1)
    at = torch.arange(found.tokens_k)
    contiguous = (at >= firsts[:, None]) & (at < (firsts + counts)[:, None])
    if not torch.equal(held, contiguous):
        return held
    return torch.stack((firsts, firsts + counts), 1)


def _at_hand(padding: Tensor, found: Mask) -> Tensor:
    """The part of a padding that is about the keys at hand. Positions past its end hold no token:
    they are slots of a static cache that were never written."""
    if padding.ndim != 2 or padding.shape[0] != found.batch:
        raise ValueError(
            f"attention_mask has shape {tuple(padding.shape)}, expected ({found.batch}, positions)"
        )
    part = padding[:, found.key_offset : found.key_offset + found.tokens_k].bool()
    return torch.nn.functional.pad(part, (0, found.tokens_k - part.shape[1]))


def _packed(found: Mask, reading: _read.Reading) -> Mask:
    """Sequences side by side, which transformers knows without a cache alone."""
    if len(reading.ids) > 1 or reading.padding or not reading.moves:
        others = ["another packing"] * (len(reading.ids) > 1)
        others += ["padding"] * bool(reading.padding)
        others += [reading.pattern] * (not reading.moves)
        raise NotImplementedError(
            f"packed sequences together with {' and '.join(others)}, expected a causal, "
            "bidirectional or sliding-window mask and no attention_mask"
        )
    (ids,) = reading.ids
    shape = (found.batch, found.tokens_q)
    offset = int(found.query_offset)
    if ids.shape != shape or found.tokens_q != found.tokens_k or offset or found.key_offset:
        raise NotImplementedError(
            f"packed sequences of shape {tuple(ids.shape)} over {found.tokens_q} queries from "
            f"{offset} on and {found.tokens_k} keys from {found.key_offset} on, expected the same "
            "tokens as queries and keys: leave out past_key_values"
        )
    bounds = [_bounds(row) for row in ids]
    same = all(torch.equal(bounds[0], other) for other in bounds[1:])
    return replace(found, cu_seqlens=tuple(bounds[:1] if same else bounds))


def _bounds(ids: Tensor) -> Tensor:
    """Where sequences begin, and the last one ends."""
    starts = torch.nonzero(ids[1:] != ids[:-1])[:, 0] + 1
    distinct = len(torch.unique(ids))
    if distinct != len(starts) + 1:
        raise NotImplementedError(
            f"packed sequences whose tokens don't lie side by side: {distinct} sequences in "
            f"{len(starts) + 1} ranges, expected one each"
        )
    edges = starts.new_tensor([0]), starts, starts.new_tensor([len(ids)])
    return torch.cat(edges)
