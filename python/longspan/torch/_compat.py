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
from longspan.torch._engine import BLOCK, is_own

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
    read in every call, which costs more than attention over few pairs does: a mask that stays the same
    is best made a ``Layout.from_mask`` once, and one with a rule a pattern.

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
        pattern = _layout(attn_mask, (query.shape[0], query.shape[1], query.shape[2], key.shape[2]))
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


def _layout(mask: Tensor, shape: tuple[int, int, int, int]) -> Layout:
    """The layout of a mask of pairs."""
    if torch.compiler.is_compiling():
        raise TypeError(
            "attn_mask is a tensor, expected a pattern under torch.compile: what a mask holds is known "
            "only when it runs"
        )
    if mask.ndim > 4 or any(size not in (1, full) for size, full in zip(mask.shape[::-1], shape[::-1])):
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}, expected one that broadcasts to {shape}"
        )
    if mask.requires_grad:
        raise ValueError(
            "attn_mask requires a gradient, which a mask of pairs has not: a bias by distance is "
            "bias_table of longspan.torch.attention"
        )
    if mask.is_floating_point():
        active = mask == 0
        if not bool((active | (mask == -torch.inf)).all()):
            raise ValueError(
                "attn_mask adds numbers other than 0 and -inf, expected a mask of pairs: a bias by "
                "distance is bias_table or alibi_slopes of longspan.torch.attention"
            )
    elif mask.dtype == torch.bool:
        active = mask
    else:
        raise TypeError(f"attn_mask is a {mask.dtype} tensor, expected bool, or floating-point")
    active = active.reshape((1,) * (4 - active.ndim) + active.shape)
    # Axes along which it is the same are looked at once.
    for axis in (0, 1):
        if active.stride(axis) == 0:
            active = active.narrow(axis, 0, min(1, active.shape[axis]))
    active = active.expand(active.shape[0], active.shape[1], shape[2], shape[3])
    if active.shape[0] * active.shape[1] == 0:
        active = active.new_ones((1, 1, shape[2], shape[3]))
    block = None if is_own(mask.device) else BLOCK
    return Layout.from_mask(active.cpu().numpy(), block=block)


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
        _within(pattern, causal, window_size),
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


def _within(pattern: Pattern | str | None, causal: bool, window_size: tuple[int, int]) -> str:
    """The text of a pattern inside a window."""
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
