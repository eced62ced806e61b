"""Score modifications that Longspan computes, as functions that FlexAttention takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longspan.torch._run import Scores

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def score_mod(
    *,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias_table: Tensor | None = None,
    bias_right: int = 0,
) -> ScoreMod:
    """A ``score_mod`` for ``flex_attention``, Longspan's and torch's: ``softcap * tanh(score / softcap)``, less
    ``alibi_slopes[head] * |query - key|``, plus ``bias_table[head, query - key + bias_right]``, distances clamped
    to those that the table has. What is left out is not done. Slopes and tables have gradients.

    >>> import torch, longspan.torch
    >>> q = torch.randn(1, 4, 300, 32)
    >>> capped = longspan.torch.score_mod(softcap=20.0)
    >>> longspan.torch.flex_attention(q, q, q, capped).shape
    torch.Size([1, 4, 300, 32])
    """
    if bias_table is None and bias_right:
        raise ValueError(f"bias_right is {bias_right} without a bias_table: leave it out")

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        distance = q_idx - kv_idx
        if alibi_slopes is not None:
            score = score - alibi_slopes[h] * distance.abs()
        if bias_table is not None:
            score = score + bias_table[h, (distance + bias_right).clamp(0, bias_table.shape[1] - 1)]
        return score

    mod.scores = Scores(  # type: ignore[attr-defined]
        softcap=softcap, bias_table=bias_table, alibi_slopes=alibi_slopes, bias_right=bias_right
    )
    return mod


def scores_of(mod: ScoreMod | None) -> Scores:
    """What a function that ``score_mod`` made does; others are refused by name."""
    if mod is None:
        return Scores()
    scores = getattr(mod, "scores", None)
    if isinstance(scores, Scores):
        return scores
    name = getattr(mod, "__qualname__", None)
    name = repr(mod) if name is None else f"{mod.__module__}.{name}"
    raise NotImplementedError(
        f"score_mod is {name}, which longspan can't read: expected what longspan.torch.score_mod makes of softcap, "
        "alibi_slopes and bias_table, or torch's own flex_attention, which has no gradients on the CPU"
    )
