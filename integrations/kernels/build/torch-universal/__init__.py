"""FlashAttention's functions on the CPU, by Longspan: ``pip install "longspan[torch]"``.

Tensors are ``(batch, token, head, dim)``, of ``flash_attn_varlen_func`` ``(token, head, dim)``; queries are the last
positions. Every argument is honoured or refused.
"""

from __future__ import annotations

from typing import Any

try:
    from longspan.torch import flash_attention
except ImportError as error:
    raise ImportError(
        'this kernel is a front end of the package longspan: pip install "longspan[torch]"'
    ) from error

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Any | None = None,
) -> Any:
    """Attention with gradients. ``s_aux`` are sink logits, one per query head. With ``return_attn_probs`` a tuple
    of the output, the log-sum-exp ``(batch, head, token)`` and None, since no probabilities are stored."""
    out, lse = flash_attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=tuple(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        sink_logits=s_aux,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any | None = None,
    s_aux: Any | None = None,
) -> Any:
    """The same over sequences side by side. With ``return_attn_probs`` the log-sum-exp is ``(head, token)``."""
    if block_table is not None:
        raise NotImplementedError(
            "block_table: expected None, longspan reads no pages: gather those of each sequence"
        )
    for name, bounds, most in (("q", cu_seqlens_q, max_seqlen_q), ("k", cu_seqlens_k, max_seqlen_k)):
        longest = int(bounds.diff().max()) if len(bounds) > 1 else 0
        if longest > most:
            raise ValueError(f"max_seqlen_{name} is {most}, but a sequence has {longest} tokens")
    out, lse = flash_attention(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=tuple(window_size),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        sink_logits=s_aux,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out
