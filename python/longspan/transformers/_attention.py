"""``attention``: what a layer of transformers calls.

Everything that a layer hands over is honored or refused. ``None`` and ``False`` ask for nothing. The user's pattern
is intersected with the layer's mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspan import BlockSelector
from longspan.torch import attention as over_pattern
from longspan.transformers import _bias, _packing, _pattern, _select
from longspan.transformers._mask import Mask

#: What layers hand over that attention has no use for, or that the mask says already.
_NOT_OURS = frozenset(
    (
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)

#: Queries from which a selector chooses: those of one block. Fewer, as in decoding, attend to all that the mask allows.
_SELECTED_FROM = 64

#: Why something is refused, and what to do.
_WHY = {
    "output_attentions": "weights of all pairs are never made",
    "seq_idx": "packing is read from position_ids that restart at 0",
    "cache": "there is no paged cache; use generate with another cache",
}


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: _bias.PositionBias | None = None,
    *,
    registered: _pattern.Registered | None = None,
    selector: BlockSelector | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Tensors ``(batch, head, token, dim)`` to ``(batch, token, head, dim)``, and no weights.

    ``dropout`` is for layers that train, as in eager attention. ``s_aux`` is a learned logit per head that joins each
    denominator (gpt-oss), ``position_bias`` a bias of relative positions (T5). ``registered`` and ``selector`` are
    those of the name under which transformers found this function.
    """
    packing = _packing.taken(others)
    mask = checked_mask(module, query, key, attention_mask, sliding_window, others)
    if packing:
        mask = _packing.applied(packing, mask)
    mask = with_pattern(module, mask, attention_mask, _pattern.of_layer(module, registered))
    scores = scores_of(module, scaling, dropout, softcap, s_aux, position_bias)
    if selector is not None and query.shape[2] >= _SELECTED_FROM:
        out = _select.attention(selector, mask, query, key, value, scores)
    elif mask.cu_seqlens is None:
        out = over_pattern(
            query,
            key,
            value,
            mask.pattern,
            query_offset=mask.query_offset,
            key_offset=mask.key_offset,
            key_padding=mask.key_padding,
            **scores,
        )
    elif len(mask.cu_seqlens) == 1:
        out = over_pattern(query, key, value, mask.pattern, cu_seqlens=mask.cu_seqlens[0], **scores)
    else:
        entries = zip(query.split(1), key.split(1), value.split(1), mask.cu_seqlens)
        out = torch.cat(
            [
                over_pattern(*qkv, mask.pattern, cu_seqlens=bounds, **scores)
                for *qkv, bounds in entries
            ]
        )
    return out.transpose(1, 2).contiguous(), None


def checked_mask(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Mask | None,
    sliding_window: int | None,
    others: dict[str, Any],
) -> Mask:
    """The mask of a layer, or an error about what else it hands over."""
    _refuse(module, others)
    mask = _whole(module, query, key, others) if attention_mask is None else attention_mask
    _check(module, mask, query, key, sliding_window)
    return mask


def with_pattern(module: torch.nn.Module, mask: Mask, attention_mask: Mask | None, user: str | None) -> Mask:
    """The mask of a layer, which it was given or not, and the user's pattern."""
    if user is None:
        return mask
    if attention_mask is None and mask.tokens_q != mask.tokens_k:
        raise NotImplementedError(
            f"the pattern {user} for {type(module).__name__}, which has {mask.tokens_q} queries, {mask.tokens_k} "
            "keys and no mask, so where its queries stand among the keys is unknown: expected as many of both"
        )
    return replace(mask, pattern=_pattern.joined(mask.pattern, user))


def scores_of(
    module: torch.nn.Module,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
    position_bias: _bias.PositionBias | None,
) -> dict[str, Any]:
    """What scores are made with, as arguments of ``longspan.torch``."""
    return {
        "scale": scaling,
        "softcap": softcap,
        "enable_gqa": True,
        "sink_logits": s_aux,
        **_bias.table(module, position_bias)._asdict(),
        "dropout_p": dropout if module.training else 0.0,
    }


def _refuse(module: torch.nn.Module, others: dict[str, Any]) -> None:
    if getattr(module, "compressor", None) is not None:
        raise NotImplementedError(
            f"{type(module).__name__} adds compressed keys, which the mask of longspan has no positions for: use "
            'attn_implementation="eager"'
        )
    for name, value in others.items():
        if name in _NOT_OURS or value is None or value is False:
            continue
        raise NotImplementedError(
            f"{name} is given, but {_WHY.get(name, 'longspan has no meaning for it')}: leave it out, "
            'or use attn_implementation="eager"'
        )
    if getattr(getattr(module, "config", None), "output_attentions", False):
        raise NotImplementedError(
            f"config.output_attentions: {_WHY['output_attentions']}; expected False, or "
            'attn_implementation="eager"'
        )


def _whole(module: torch.nn.Module, query: Tensor, key: Tensor, others: dict[str, Any]) -> Mask:
    """A layer that never asks for a mask sees everything, if it says that it isn't causal."""
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", None) if causal is None else causal
    if causal is not False:
        raise NotImplementedError(
            f"{type(module).__name__} has is_causal={causal} and no mask, so where its queries "
            "stand among the keys is unknown; expected a model that makes its masks with "
            'transformers.masking_utils, or attn_implementation="sdpa"'
        )
    return Mask("full", None, len(query), query.shape[2], key.shape[2], 0, 0, None, None, None)


def _check(module: torch.nn.Module, mask: Any, query: Tensor, key: Tensor, sliding_window: int | None) -> None:
    """The mask is one of ours, for these tensors and this window."""
    if not isinstance(mask, Mask):
        what = f"tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise NotImplementedError(
            f"attention_mask is a {what} for {type(module).__name__}, expected (batch, positions) of 0 and 1, or none: "
            'longspan takes no mask of every pair; use attn_implementation="sdpa" for it'
        )
    expected = (mask.batch, mask.tokens_q, mask.tokens_k)
    got = (query.shape[0], query.shape[2], key.shape[2])
    if got != expected:
        raise ValueError(
            f"{got[1]} queries and {got[2]} keys of {got[0]} batch entries, and a mask for "
            f"{expected[1]}, {expected[2]} and {expected[0]}: expected the mask of this layer's "
            "cache"
        )
    if mask.window == 0:
        raise ValueError("a window of 0 tokens, expected a whole number from 1 on: set config.sliding_window")
    if sliding_window is not None and sliding_window not in (mask.window, mask.reach):
        raise ValueError(
            f"a layer with sliding_window={sliding_window} and a mask with "
            f"{'none' if mask.window is None else mask.window}, expected the same: one of both "
            "would be ignored"
        )
