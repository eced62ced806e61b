"""FlexAttention's call on the CPU, with gradients. Imported when it is first used, since torch's FlexAttention
imports the compiler."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from longspan.torch._attention import attention
from longspan.torch._block_mask_layouts import layout_of
from longspan.torch._engine import is_own
from longspan.torch._score_mods import ScoreMod, scores_of


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: None = None,
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: Literal[True],
    kernel_options: dict[str, Any] | None = None,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: flex.AuxRequest,
) -> tuple[Tensor, flex.AuxOutput]: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch's function of that name for tensors on the CPU, where torch has no gradients.

    ``block_mask`` is torch's ``BlockMask``, also one that differs by batch entry and head. Its ``mask_mod`` is
    evaluated on partial blocks alone, once for as long as its lists and what it captures are not written to.
    Rows that see no key are zero, as torch's are.

    ``score_mod`` is one that ``longspan.torch.score_mod`` made; others are refused by name.

    ``return_aux=AuxRequest(lse=True)`` adds the log-sum-exp (natural, f32, with gradients), ``return_lse`` too.

    Under ``torch.compile`` it is a break of the graph: what a mask holds is known only when it runs. A pattern is
    part of a graph: ``longspan.torch.attention``.

    >>> import torch, longspan.torch
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> window = create_block_mask(lambda b, h, q, kv: (kv <= q) & (q - kv <= 64), None, None, 500, 500, device="cpu")
    >>> q = torch.randn(1, 4, 500, 32, requires_grad=True)
    >>> longspan.torch.flex_attention(q, q, q, block_mask=window).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 4, 500, 32])
    """
    return _outside_of_graphs(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux
    )


@torch.compiler.disable
def _outside_of_graphs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: dict[str, Any] | None,
    return_aux: Any,
) -> Any:
    if not is_own(query.device):
        raise ValueError(
            f"query is on {query.device}, expected the CPU: on other devices use torch's flex_attention, which has "
            "gradients there"
        )
    if kernel_options:
        raise ValueError(f"kernel_options is {kernel_options}, expected none: they are for kernels of GPUs")
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux: expected one of both, return_aux=AuxRequest(lse=True)")
    if getattr(return_aux, "max_scores", False):
        raise NotImplementedError(
            "return_aux asks for max_scores, which longspan does not return: ask for lse, whose exponential is the "
            "denominator of a row"
        )
    scores = scores_of(score_mod)
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} axes, expected 4: (batch, head, "
            "token, dim)"
        )
    if key.shape[0] == value.shape[0] == 1 < query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    pattern: Any = "full"
    if block_mask is not None:
        pattern = layout_of(block_mask, (query.shape[0], query.shape[1]), (query.shape[2], key.shape[2]))
    out, lse = attention(
        query,
        key,
        value,
        pattern,
        scale=scale,
        enable_gqa=enable_gqa,
        softcap=scores.softcap,
        bias_table=scores.bias_table,
        bias_right=scores.bias_right,
        alibi_slopes=scores.alibi_slopes,
        # Positions of a layout are its own.
        query_offset=0 if block_mask is None else None,
        return_lse=True,
    )
    if return_aux is not None:
        return out, flex.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out
