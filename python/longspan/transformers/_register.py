"""``register``: the name "longspan", for transformers. ``set_pattern``: a pattern for one model."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import longspan
from longspan.transformers import _pattern, _read, _ring, _support
from longspan.transformers._attention import attention
from longspan.transformers._mask import mask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Positions looked at: past the window and past the chunk of the samples below.
_POSITIONS = 11


def register(
    name: str = "longspan",
    pattern: _pattern.UserPattern = None,
    *,
    selector: longspan.BlockSelector | None = None,
    group: ProcessGroup | None = None,
    shards: str = "contiguous",
) -> None:
    """Makes ``attn_implementation="longspan"`` known to transformers, or whatever ``name`` says.

    >>> import longspan.transformers
    >>> longspan.transformers.register()

    With ``pattern``, models that use the name attend to the pairs that it and their own mask allow. It is a
    ``longspan.Pattern``, its text, or a function of ``(layer_idx, layer_type, config)`` that returns one of these or
    ``None``, for the model's own mask alone. ``layer_type`` is ``config.layer_types[layer_idx]``, if there are any,
    and ``"cross_attention"`` for cross-attention, which can't have a pattern.

    >>> longspan.transformers.register("longspan_sinks", "window(256, 0) | sinks(4)")
    >>> def pattern(layer_idx, layer_type, config):
    ...     return None if layer_idx % 4 == 3 else "window(256, 0) | sinks(4)"
    >>> longspan.transformers.register("longspan_mixed", pattern)

    Positions are those of the whole sequence, and padding counts. With packed sequences they count within each
    sequence. Called again with another pattern, it replaces the one before.

    With ``selector``, layers choose key blocks by content, of those that its base, the pattern and their own mask
    allow. Passes of fewer than 64 queries, as in decoding, attend to all of these.

    >>> selector = longspan.BlockSelector("full", always="window(64, 0) | sinks(1)", mass=0.95)
    >>> longspan.transformers.register("longspan_adaptive", selector=selector)

    With ``group``, a process group of torch with Gloo, models that use the name take this rank's tokens of one sequence
    that all ranks of the group hold together (context parallel), and their ``position_ids`` in the whole sequence.
    ``shards`` says which tokens a rank holds, as in ``longspan.torch.Shards``: ``"contiguous"``, ``"zigzag"`` or
    ``"striped"``. Masks and ``pattern`` are of positions in the whole sequence. Gradients of parameters are this rank's
    part, which ``longspan.torch.sum_gradients`` sums. Caches, ``generate``, padding, ``labels`` and ``selector`` are
    refused, and an error of one rank is one of all: ``docs/context-parallel.md``.

    Both halves are registered, attention and mask: with the first alone transformers would hand
    over no mask at all. Models that would ignore the name or its pattern are refused when they are made.
    """
    if not isinstance(name, str) or not name or not name.isidentifier():
        raise ValueError(
            f"name is {name!r}, expected a word such as 'longspan': transformers reads '/', ':', "
            "'@' and '|' as parts of other names"
        )
    if name in ("eager", "sdpa") or "flash" in name or "flex_attention" in name:
        raise ValueError(f"name is {name!r}, which is transformers' own, expected another word")
    pattern = _pattern.checked(pattern)
    if pattern is None and _support.patterns.get(name) is not None:
        raise ValueError(
            f"name is {name!r}, which is registered with a pattern, and pattern is None: expected another name, or "
            "pattern='full', which removes it"
        )
    if selector is not None and not isinstance(selector, longspan.BlockSelector):
        raise TypeError(f"selector is a {type(selector).__name__}, expected a longspan.BlockSelector")
    ring = _ring_of(name, group, shards, selector)
    _check_meanings()
    _support.extend()
    registered = None if pattern is None else _pattern.Registered(pattern, uuid.uuid4().hex)
    _support.patterns[name] = registered
    given: dict[str, Any] = {"registered": registered, "selector": selector}
    given = {key: value for key, value in given.items() if value is not None}
    call: Callable = attention
    if ring is not None:
        _ring.extend()
        _ring.rings[name] = given["ring"] = ring
        call = _ring.attention
    AttentionInterface.register(name, functools.partial(call, **given) if given else call)
    AttentionMaskInterface.register(name, mask if ring is None else functools.partial(_ring.mask, ring=ring))


def _ring_of(
    name: str, group: ProcessGroup | None, shards: str, selector: longspan.BlockSelector | None
) -> _ring.Ring | None:
    """What a name does over ranks, or an error."""
    if group is None:
        if name in _ring.rings:
            raise ValueError(
                f"name is {name!r}, which is registered with a process group, and group is None: expected another name"
            )
        if shards != "contiguous":
            raise ValueError(f"shards is {shards!r} and group is None: expected a process group of torch.distributed")
        return None
    if selector is not None:
        raise NotImplementedError("selector and group: expected one of both, a choice of blocks is of one process")
    return _ring.Ring(name, group, shards)


def set_pattern(model: torch.nn.Module, pattern: _pattern.UserPattern) -> None:
    """Gives one model, or a part of one, a pattern of its own, in place of the one that ``register`` was given.

    >>> import longspan.transformers
    >>> longspan.transformers.register()
    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(
    ...     vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    ...     attn_implementation="longspan",
    ... )
    >>> model = LlamaModel(config)
    >>> longspan.transformers.set_pattern(model, "window(256, 0) | sinks(4)")

    ``None`` removes it. A function is called once per layer, now. Copies of the model have the pattern; files that
    ``save_pretrained`` writes don't.
    """
    pattern = _pattern.checked(pattern)
    layers = [module for module in model.modules() if _support.calls_interface(type(module))]
    if pattern is None:
        for module in layers:
            module.__dict__.pop(_pattern.ATTRIBUTE, None)
        return
    _support.check_layers(model, _pattern.Registered(pattern, ""))
    for module in layers:
        name = _support.name_in_use(module)
        if name not in _support.patterns:
            raise ValueError(
                f'{type(module).__name__} uses attn_implementation="{name}", which would ignore the pattern: call '
                'longspan.transformers.register() and model.set_attn_implementation("longspan") first'
            )
    for module, text in [(module, _pattern.resolved(module, pattern)) for module in layers]:
        setattr(module, _pattern.ATTRIBUTE, (text,))


def _check_meanings() -> None:
    """The functions of this release of transformers mean what their patterns say.

    They are recognised by what they are, not by what they compute. So a release in which a window
    is one token wider under the same name is found here, and not in a model's output.
    """
    at = torch.arange(_POSITIONS)
    zero = torch.zeros((1, 1), dtype=torch.int64)
    samples = (
        masking_utils.causal_mask_function,
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_overlay(3),
        masking_utils.sliding_window_bidirectional_overlay(3),
        masking_utils.sliding_window_causal_mask_function(4),
        masking_utils.sliding_window_bidirectional_mask_function(4),
        masking_utils.chunked_overlay(3, torch.zeros(1, dtype=torch.int64)),
        masking_utils.or_masks(
            masking_utils.causal_mask_function,
            masking_utils.sliding_window_bidirectional_overlay(2),
        ),
    )
    for sample in samples:
        pattern = longspan.Pattern(_read.read(sample).pattern)
        theirs = sample(zero, zero, at[:, None], at[None, :]).expand(_POSITIONS, _POSITIONS)
        for query, row in enumerate(theirs.tolist()):
            for key, seen in enumerate(row):
                if pattern.allows(query, key) != seen:
                    raise RuntimeError(
                        f"{_read.named(sample)} of this release of transformers "
                        f"{'shows' if seen else 'hides'} key {key} to query {query}, and {pattern} "
                        "doesn't: use a release of transformers that longspan is tested with"
                    )
