"""The same attention under the names and rules of other libraries.

| | tensors | causal, where queries and keys differ in number |
|---|---|---|
| ``scaled_dot_product_attention``, of torch | ``(batch, head, token, dim)`` | the *first* positions (top left) |
| ``flash_attention``, of flash-attn | ``(batch, token, head, dim)`` | the *last* positions (bottom right) |

Every argument is honoured, or refused with what to do.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from longspan import Layout, Pattern
from longspan.torch._attention import attention, text_of
from longspan.torch._mask_layouts import layout_of_mask

#: Further than any key: the longest side of a window.
_FAR = 1 << 60


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Pattern | str | Layout | Tensor | None = None,
    dropout_p: float = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """torch's function of that name; ``attn_mask`` may be a pattern in place of a tensor.

    A tensor is bool, or holds 0 and -inf alone, and broadcasts to ``(batch, head, query, key)``. It is
    read once for as long as it is the same tensor and not written to; a mask with a rule is best given
    as a pattern, which is not read at all.

    ``sink_logits`` is that of ``attention``, which torch's function has not.

    ``is_causal`` counts from the first query and the first key, as torch does; the positions of a
    pattern are those of ``attention``, where queries are the last ones.

    >>> import torch, longspan.torch
    >>> q, k = torch.randn(1, 4, 10, 32), torch.randn(1, 4, 30, 32)
    >>> ours = longspan.torch.scaled_dot_product_attention(q, k, k, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-5)
    True
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal: expected one of both; a pattern has `causal & …`")
    axes = query.ndim
    if not 2 <= axes <= 4 or key.ndim != axes or value.ndim != axes:
        raise ValueError(
            f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} axes, expected 2 to "
            "4, as many each: (batch, head, token, dim); flatten further ones into the batch"
        )
    for _ in range(4 - axes):
        query, key, value = query[None], key[None], value[None]
    pattern, offset = attn_mask, None
    if isinstance(attn_mask, Tensor):
        pattern = layout_of_mask(attn_mask, (*query.shape[:3], key.shape[2]))
    elif attn_mask is None:
        pattern, offset = ("causal", 0) if is_causal else ("full", None)
    out = attention(
        query,
        key,
        value,
        pattern,
        scale=scale,
        enable_gqa=enable_gqa,
        query_offset=offset,
        sink_logits=sink_logits,
        dropout_p=dropout_p,
    )
    for _ in range(4 - axes):
        out = out[0]
    return out


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    pattern: Pattern | str | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: Literal[True],
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    pattern: Pattern | str | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    pattern: Pattern | str | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    pattern: Pattern | str | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as flash-attn's functions have it: ``(batch, token, head, dim)``, fewer key heads
    than query heads allowed, and queries the last positions.

    ``window_size`` is ``(left, right)``, both ends included, -1 for no end; ``causal`` makes the
    right one 0. ``pattern`` narrows what these allow. ``softcap`` 0 is none. ``sink_logits`` is that
    of ``attention`` (FlashAttention's ``learnable_sink``, vLLM's ``s_aux``). Results are the same
    from call to call with or without ``deterministic``.

    With ``cu_seqlens_q`` (and ``cu_seqlens_k`` where it differs) tensors may also be
    ``(tokens, head, dim)``; each sequence sees itself.

    ``return_lse`` adds the log-sum-exp, ``(batch, head, token)``, or ``(head, token)`` of tensors
    without a batch.

    >>> import torch, longspan.torch
    >>> q = torch.randn(2, 100, 4, 32)
    >>> longspan.torch.flash_attention(q, q, q, causal=True, window_size=(16, 0)).shape
    torch.Size([2, 100, 4, 32])
    """
    if isinstance(alibi_slopes, Tensor) and alibi_slopes.ndim == 2:
        raise ValueError(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}, expected (heads,): slopes are the "
            "same for all batch entries; call once per entry where they differ"
        )
    if cu_seqlens_k is not None and cu_seqlens_q is None:
        raise ValueError("cu_seqlens_k without cu_seqlens_q: expected both, or the latter alone")
    packed = q.ndim == 3 and cu_seqlens_q is not None
    if packed:
        q, k, v = q[None], k[None], v[None]
    cu_seqlens = cu_seqlens_q if cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    out, lse = attention(
        _turned("q", q),
        _turned("k", k),
        _turned("v", v),
        within_window(causal, window_size, pattern),
        scale=softmax_scale,
        enable_gqa=True,
        softcap=None if softcap == 0 else softcap,
        return_lse=True,
        cu_seqlens=cu_seqlens,
        sink_logits=sink_logits,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
    )
    out = out.transpose(1, 2)
    if packed:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _turned(name: str, x: Tensor) -> Tensor:
    if x.ndim != 4:
        raise ValueError(
            f"{name} has {x.ndim} axes, expected 4: (batch, token, head, dim), or with cu_seqlens_q "
            "3: (tokens, head, dim)"
        )
    return x.transpose(1, 2)


def within_window(
    causal: bool, window_size: tuple[int, int], pattern: Pattern | str | None = None
) -> str:
    """The text of a pattern inside a window of flash-attn."""
    left, right = window_size
    for side in (left, right):
        if side < -1:
            raise ValueError(f"window_size has {side}, expected 0 or more, or -1 for no end")
    if causal:
        right = 0
    if left == -1 and right == -1:
        text = "full"
    elif (left, right) == (-1, 0):
        text = "causal"
    else:
        text = f"window({_FAR if left == -1 else left}, {_FAR if right == -1 else right})"
    return text if pattern is None else f"{text} & ({text_of(pattern)})"
