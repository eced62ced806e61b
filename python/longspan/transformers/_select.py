"""Selectors in models: attention over the blocks that are chosen from a layer's queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan import BlockSelector
from longspan.torch import attention as over_layout
from longspan.transformers import _pattern
from longspan.transformers._mask import Mask


@torch.compiler.disable
def attention(
    selector: BlockSelector, mask: Mask, query: Tensor, key: Tensor, value: Tensor, scores: dict[str, Any]
) -> Tensor:
    """Attention over the blocks that a selector chooses of those that both its base and the layer's mask allow.

    The choice depends on the values of queries and keys: under ``torch.compile`` it is a break between graphs.
    """
    if query.device.type != "cpu":
        raise NotImplementedError(
            f"a selector with a model on {query.device}, expected the CPU: estimates are computed by Longspan's own "
            "kernels; register the name without a selector"
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
    selection = selector.over(base).select(
        query.detach(),
        key.detach(),
        scale=scores["scale"],
        query_offset=int(mask.query_offset),
        key_offset=int(mask.key_offset),
        key_padding=None if mask.key_padding is None else _ranges(mask.key_padding),
    )
    return over_layout(query, key, value, selection.layout, **scores)


def _ranges(padding: Tensor) -> list[tuple[int, int]]:
    """The first key and the end of each batch entry, of pairs or of bools that are true in one range."""
    if padding.dtype != torch.bool:
        return [(first, end) for first, end in padding.tolist()]
    counts = padding.sum(1)
    first = padding.int().argmax(1)
    if not bool((padding.flip(1).int().argmax(1) == padding.shape[1] - first - counts)[counts > 0].all()):
        raise NotImplementedError(
            "a selector with an attention_mask that is 1 in more than one range of a row, expected one: register the "
            "name without a selector"
        )
    return [(start, start + count) for start, count in zip(first.tolist(), counts.tolist())]
