"""Selectors in models: the layout of a layer's queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan import BlockSelector, Layout
from longspan.transformers import _pattern
from longspan.transformers._mask import Mask


def layout(selector: BlockSelector, mask: Mask, query: Tensor, key: Tensor, scores: dict[str, Any]) -> Layout:
    """The blocks that a selector chooses of those that both its base and the layer's mask allow."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "a selector under torch.compile: its choice depends on the values of queries and keys. Run the model "
            "without torch.compile, or register the name without a selector"
        )
    if mask.cu_seqlens is not None:
        raise NotImplementedError(
            "a selector with packed sequences: expected one sequence per batch entry; pad them, or register the name "
            "without a selector"
        )
    for name in ("softcap", "bias_table", "alibi_slopes"):
        if scores.get(name) is not None:
            raise NotImplementedError(
                f"a selector for a layer with {name}, which its estimates don't know: register the name without a "
                "selector"
            )
    base = _pattern.joined(mask.pattern, str(selector.base))
    padding = None if mask.key_padding is None else [(first, end) for first, end in mask.key_padding.tolist()]
    selection = selector.over(base).select(
        query.detach(),
        key.detach(),
        scale=scores["scale"],
        query_offset=_whole(mask.query_offset),
        key_offset=_whole(mask.key_offset),
        key_padding=padding,
    )
    return selection.layout


def _whole(offset: int | Tensor | None) -> int | None:
    return None if offset is None else int(offset)
