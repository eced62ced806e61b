"""LongNet's dilated attention as modules of torch.

Argument names are those of the package dilated-attention-pytorch (``segment_lengths``,
``dilation_rates``), and torchscale's (``segment_length``, ``dilated_ratio``) are taken too. The
arithmetic is the paper's, which is neither's: ``docs/longnet.md`` has the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan import Dilated, Pattern
from longspan.torch import _run
from longspan.torch._attention import Branches, attention, checked, checked_scores, over_branches
from longspan.torch._context import (
    checkpointed,
    context_of,
    own_part,
    sharding,
    whole_length,
)
from longspan.torch._lengths import Bounds
from longspan.torch._rotary import Table, turn
from longspan.torch._run import Learned, Places
from longspan.torch._shards import Shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DilatedAttention(nn.Module):
    """LongNet's dilated attention (arXiv 2307.02486) of queries, keys and values.

    Branch ``b`` cuts the sequence into segments of ``segment_lengths[b]`` tokens. Of each, head
    ``h`` has the tokens whose number in it is ``h % r`` modulo ``r = dilation_rates[b]``. Branches
    are weighted by their softmax denominators, and gradients go through the weights. Any length will
    do.

    >>> import torch, longspan.torch
    >>> attention = longspan.torch.DilatedAttention([64, 128, 256], [1, 2, 4])
    >>> q, k, v = torch.randn(3, 1, 1000, 8, 16).requires_grad_()
    >>> out = attention(q, k, v, is_causal=True)
    >>> out.shape
    torch.Size([1, 1000, 8, 16])
    >>> out.sum().backward()

    ``softmax_scale`` is ``1 / sqrt(dim)`` unless given. ``within`` is a pattern, or its text, that
    every branch is cut with besides ``is_causal``, ``also`` one that queries see besides their
    branches, such as a window. ``overlap="union"`` is attention over the union of all of them, in
    place of ``"weighted"``, the paper's, where a key that two branches have counts twice. In
    training, ``attention_dropout`` is the ``dropout_p`` of ``attention``. There is one way to compute:
    ``op`` is None.

    With a ``group`` the tensors are this rank's tokens of a sequence that the ranks of a process group hold
    together, and it calls ``ring_attention``; ``shards`` is its argument. ``checkpoint=True`` keeps no
    activations for the backward pass, which computes them once more.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        op: None = None,
        *,
        segment_length: Sequence[int] | None = None,
        dilated_ratio: Sequence[int] | None = None,
        within: Pattern | str = "full",
        also: Pattern | str | None = None,
        overlap: str = "weighted",
        group: ProcessGroup | None = None,
        shards: str = "contiguous",
        checkpoint: bool = False,
    ):
        super().__init__()
        self.context, self.checkpoint = context_of(group, shards), checkpoint
        self.attention_dropout = probability("attention_dropout", attention_dropout)
        if op is not None:
            raise ValueError(f"op is {op!r}, expected None: there is one way to compute here")
        segments = one_of("segment_lengths", segment_lengths, "segment_length", segment_length)
        rates = one_of("dilation_rates", dilation_rates, "dilated_ratio", dilated_ratio)
        also = None if also is None else str(also)
        self.branches = Branches(tuple(segments), tuple(rates), str(within), also, overlap)
        self.causal = self.branches._replace(within=cut_causal(self.branches.within))
        self.softmax_scale = softmax_scale
        for branches in (self.branches, self.causal):
            _run.dilated(*branches)  # what is wrong is an error here, not in the first call

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        sink_logits: Tensor | None = None,
        key_padding: Tensor | None = None,
        cu_seqlens: Bounds | None = None,
        tokens: int | None = None,
    ) -> Tensor:
        """Tensors are ``(batch, token, head, dim)``; with fewer queries than keys the queries are
        the last positions. Query heads may be a multiple of key heads. ``sink_logits`` is that of
        ``attention``: a sink counts once per row, not once per branch.

        ``key_padding`` and ``cu_seqlens`` are those of ``attention``. The keys of a batch entry that hold
        tokens, or each packed sequence, are a sequence of their own: branches count from its first key,
        and queries outside of it give zeros. With a group both are those of the whole sequence, and so is
        ``tokens``, its length; left out, ranks tell each other."""
        given = (query, key, value, is_causal, sink_logits, key_padding, cu_seqlens, tokens)
        return checkpointed(self.checkpoint, self._forward, *given)

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        sink_logits: Tensor | None,
        key_padding: Tensor | None,
        cu_seqlens: Bounds | None,
        tokens: int | None,
    ) -> Tensor:
        q, k, v = own_part(self.context, _turned, query, key, value)
        dropout_p = self.attention_dropout if self.training else 0
        if self.context is not None:
            return self.context.attend(
                q,
                k,
                v,
                self.over(is_causal),
                tokens=tokens,
                key_padding=key_padding,
                cu_seqlens=cu_seqlens,
                scale=self.softmax_scale,
                sink_logits=sink_logits,
                dropout_p=dropout_p,
            ).transpose(1, 2)
        whole_length(k.shape[2], tokens)
        q, k, v = checked(q, k, v)
        scores = checked_scores(
            q, self.softmax_scale, None, Learned(sink_logits), dropout_p=dropout_p
        )
        places = Places(key_padding, *pair(cu_seqlens))
        branches = self.causal if is_causal else self.branches
        return over_branches(q, k, v, branches, scores, places)[0].transpose(1, 2)

    def over(self, is_causal: bool) -> Dilated:
        """What it attends over."""
        return _run.dilated(*(self.causal if is_causal else self.branches))

    def extra_repr(self) -> str:
        segments, rates, within, also, overlap = self.branches
        shown = f"{list(segments)}, {list(rates)}"
        if self.softmax_scale is not None:
            shown += f", softmax_scale={self.softmax_scale}"
        if within != "full":
            shown += f", within={within!r}"
        if also is not None:
            shown += f", also={also!r}"
        if overlap != "weighted":
            shown += f", overlap={overlap!r}"
        if self.context is not None:
            shown += f", {self.context}"
        return f"{shown}, checkpoint=True" if self.checkpoint else shown


class PatternAttention(nn.Module):
    """Attention over a pattern, called as ``DilatedAttention`` is."""

    def __init__(
        self,
        pattern: Pattern | str,
        *,
        group: ProcessGroup | None = None,
        shards: str = "contiguous",
    ):
        super().__init__()
        self.context = context_of(group, shards)
        self.pattern = str(pattern)
        self.causal = cut_causal(self.pattern)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        key_padding: Tensor | None = None,
        cu_seqlens: Bounds | None = None,
        tokens: int | None = None,
    ) -> Tensor:
        q, k, v = own_part(self.context, _turned, query, key, value)
        places = {"key_padding": key_padding, "cu_seqlens": cu_seqlens}
        pattern = self.over(is_causal)
        if self.context is not None:
            return self.context.attend(q, k, v, pattern, tokens=tokens, **places).transpose(1, 2)
        whole_length(k.shape[2], tokens)
        return attention(q, k, v, pattern, enable_gqa=True, **places).transpose(1, 2)

    def over(self, is_causal: bool) -> str:
        """What it attends over."""
        return self.causal if is_causal else self.pattern

    def extra_repr(self) -> str:
        return self.pattern if self.context is None else f"{self.pattern}, {self.context}"


def _turned(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads before tokens."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} axes, expected 4: (batch, token, head, dim)")
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def pair(cu_seqlens: Bounds | None) -> tuple[Tensor | None, Tensor | None]:
    """Those of queries and of keys."""
    if isinstance(cu_seqlens, (tuple, list)):
        cu_q, cu_k = cu_seqlens
        return cu_q, cu_k
    return cu_seqlens, cu_seqlens


class KeysAndValues:
    """Keys and values of one layer, of the tokens so far; room for ``tokens``."""

    def __init__(self, tokens: int):
        self.tokens, self.length = tokens, 0
        self.held: tuple[Tensor, Tensor] | None = None

    def append(self, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values, ``(batch, token, head, dim)``; all of them."""
        if self.held is None:
            keys, values = (x.new_empty(x.shape[0], self.tokens, *x.shape[2:]) for x in new)
            self.held = keys, values
        end = self.length + new[0].shape[1]
        for held, x in zip(self.held, new):
            held[:, self.length : end] = x
        self.length = end
        return self.held[0][:, :end], self.held[1][:, :end]


class Multihead(nn.Module):
    """Projections, attention, MAGNETO's norm of what heads found, and the projection of that."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: nn.Module,
        *,
        bias: bool,
        layer_norm: bool,
        layer_norm_eps: float,
        gamma_init: float,
        device: Any,
        dtype: torch.dtype | None,
        checkpoint: bool = False,
    ):
        super().__init__()
        self.checkpoint = checkpoint
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim is {embed_dim}, expected a multiple of num_heads, which is {num_heads}"
            )
        where = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads, self.gamma_init = embed_dim, num_heads, gamma_init
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **where)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **where)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **where)
        self.attention = attention
        norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps, **where) if layer_norm else None
        self.inner_attn_ln = norm
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """MAGNETO's beginning (arXiv 2210.06423): gain ``gamma_init`` for values and outputs."""
        for linear, gain in (
            (self.q_proj, 1.0),
            (self.k_proj, 1.0),
            (self.v_proj, self.gamma_init),
            (self.out_proj, self.gamma_init),
        ):
            begin_linear(linear, gain)
        if self.inner_attn_ln is not None:
            self.inner_attn_ln.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        *,
        rotary: Table | None = None,
        cache: KeysAndValues | None = None,
        key_padding: Tensor | None = None,
        cu_seqlens: Bounds | None = None,
        tokens: int | None = None,
    ) -> tuple[Tensor, None]:
        """Tensors are ``(batch, token, embed_dim)``. Returns the output and None, where
        ``torch.nn.MultiheadAttention`` has weights. ``rotary`` is a table of ``rotary_table`` that
        queries and keys are turned by, in a self-attention. ``cache`` has the tokens before these.
        ``key_padding``, ``cu_seqlens`` and ``tokens`` are those of the attention inside."""
        given = (query, key, value, is_causal, rotary, cache, key_padding, cu_seqlens, tokens)
        return checkpointed(self.checkpoint, self._forward, *given), None

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        rotary: Table | None,
        cache: KeysAndValues | None,
        key_padding: Tensor | None,
        cu_seqlens: Bounds | None,
        tokens: int | None,
    ) -> Tensor:
        q, k, v = own_part(self.attention.context, self._project, query, key, value, rotary)
        if cache is not None:
            k, v = cache.append(k, v)
        x = self.attention(
            q,
            k,
            v,
            is_causal=is_causal,
            key_padding=key_padding,
            cu_seqlens=cu_seqlens,
            tokens=tokens,
        ).flatten(2)
        if self.inner_attn_ln is not None:
            x = self.inner_attn_ln(x)
        return self.out_proj(x)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Table | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1))
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        if rotary is not None:
            q, k = turn(q, rotary), turn(k, rotary)
        return q, k, v

    def sharding(
        self,
        tokens: int,
        is_causal: bool = False,
        *,
        key_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Shards:
        """Which tokens this rank of the group holds of a sequence of ``tokens``, for calls with these
        arguments."""
        context, pattern = self.attention.context, self.attention.over(is_causal)
        return sharding(context, tokens, pattern, key_padding, cu_seqlens)


class MultiheadDilatedAttention(Multihead):
    """Multi-head dilated attention with MAGNETO's norm before the last projection, as LongNet has
    it and the package dilated-attention-pytorch calls it.

    >>> import torch, longspan.torch
    >>> layer = longspan.torch.MultiheadDilatedAttention(
    ...     embed_dim=64, num_heads=8, dilation_rates=[1, 2, 4], segment_lengths=[64, 128, 256]
    ... )
    >>> x = torch.randn(2, 500, 64)
    >>> out, _ = layer(x, x, x, is_causal=True)
    >>> out.shape
    torch.Size([2, 500, 64])

    ``layer_norm=False`` leaves the norm out. ``gamma_init`` is the gain that projections of values
    and outputs begin with: MAGNETO's is ``sqrt(log(2 * layers))`` in a model of so many layers.
    ``softmax_scale``, ``within``, ``also`` and ``overlap`` are those of ``DilatedAttention``;
    ``dropout`` is its ``attention_dropout``, and ``op`` is None. ``group``, ``shards`` and ``checkpoint``
    are those of ``DilatedAttention``, with the activations of the whole layer.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int] | None = None,
        segment_lengths: Sequence[int] | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        op: None = None,
        *,
        dilated_ratio: Sequence[int] | None = None,
        segment_length: Sequence[int] | None = None,
        softmax_scale: float | None = None,
        within: Pattern | str = "full",
        also: Pattern | str | None = None,
        overlap: str = "weighted",
        group: ProcessGroup | None = None,
        shards: str = "contiguous",
        checkpoint: bool = False,
    ):
        attention = DilatedAttention(
            segment_lengths,
            dilation_rates,
            softmax_scale,
            probability("dropout", dropout),
            op,
            segment_length=segment_length,
            dilated_ratio=dilated_ratio,
            within=within,
            also=also,
            overlap=overlap,
            group=group,
            shards=shards,
        )
        super().__init__(
            embed_dim,
            num_heads,
            attention,
            bias=bias,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
            checkpoint=checkpoint,
        )


def begin_linear(linear: nn.Linear, gain: float) -> None:
    """Xavier's normal weights, no bias."""
    nn.init.xavier_normal_(linear.weight, gain=gain)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def one_of(name: str, value: Any, other: str, other_value: Any) -> Sequence[int]:
    """An argument under either of its names."""
    if (value is None) == (other_value is None):
        state = "missing" if value is None else f"{value!r} and {other} is {other_value!r}"
        raise ValueError(f"{name} is {state}, expected one of the two names, {name} or {other}")
    return other_value if value is None else value


def cut_causal(within: str) -> str:
    """The text of a pattern, ``heads([…])`` too, and no key after its query."""
    if within == "full":
        return "causal"
    if within.startswith("heads("):
        inner = ", ".join(f"causal & ({one})" for one in of_heads(within))
        return f"heads([{inner}])"
    return f"causal & ({within})"


def of_heads(text: str) -> list[str]:
    """The patterns inside ``heads([…])``, cut at commas that stand in no parentheses."""
    inner = text[text.index("[") + 1 : text.rindex("]")]
    parts, depth = [""], 0
    for letter in inner:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def probability(name: str, dropout: float) -> float:
    """A probability of dropout, or an error. 0 is an integer: dynamo takes floats for variables."""
    if not 0 <= dropout < 1:
        raise ValueError(f"{name} is {dropout}, expected a number from 0 to below 1")
    return dropout or 0
