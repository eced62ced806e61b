"""``MultiheadAttention``: a stand-in for ``torch.nn.MultiheadAttention`` with a pattern."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan import Dilated, Pattern
from longspan.torch import _run
from longspan.torch._attention import attention
from longspan.torch._context import (
    checkpointed,
    context_of,
    own_part,
    sharding,
    whole_length,
)
from longspan.torch._dilated import cut_causal, probability
from longspan.torch._lengths import Bounds, has_lengths, one_of_both
from longspan.torch._shards import Shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MultiheadAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` over the pairs that a pattern allows, in one process or over ranks.

    >>> import torch, longspan.torch
    >>> layer = longspan.torch.MultiheadAttention(
    ...     64, 8, batch_first=True, pattern="causal & (window(256, 0) | sinks(4))"
    ... )
    >>> x = torch.randn(2, 1000, 64)
    >>> out, _ = layer(x, x, x)
    >>> out.shape
    torch.Size([2, 1000, 64])

    ``pattern`` is a pattern, its text, or a ``longspan.Dilated``. Parameters have the names, shapes and
    initial values of torch's module, so each loads the ``state_dict`` of the other:

    >>> theirs = torch.nn.MultiheadAttention(64, 8, batch_first=True)
    >>> layer.load_state_dict(theirs.state_dict())
    <All keys matched successfully>

    With ``num_kv_heads`` below ``num_heads`` (grouped queries) there are ``q_proj_weight``,
    ``k_proj_weight`` and ``v_proj_weight`` in place of ``in_proj_weight``, and ``in_proj_bias`` has as many
    elements as they have rows together. ``add_bias_kv`` and ``add_zero_attn`` are refused.

    With a ``group`` the inputs are this rank's tokens of a sequence that the ranks of a process group
    hold together, in self-attention; ``shards`` is that of ``ring_attention``, and ``sharding`` says which
    tokens are whose. ``checkpoint=True`` keeps no activations for the backward pass, which computes
    them once more.
    """

    #: Read by torch's ``TransformerEncoderLayer``, which otherwise would use the weights without the
    #: pattern in evaluation.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        pattern: Pattern | Dilated | str = "full",
        num_kv_heads: int | None = None,
        group: ProcessGroup | None = None,
        shards: str = "contiguous",
        checkpoint: bool = False,
    ):
        super().__init__()
        if add_bias_kv:
            _refuse("add_bias_kv", "a learned key beside the others (bias_k)", "leave it out")
        if add_zero_attn:
            _refuse("add_zero_attn", "a key of zeros beside the others", "leave it out")
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim is {embed_dim}, expected a multiple of num_heads, which is {num_heads}"
            )
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {num_kv_heads}, expected a divisor of num_heads, which is {num_heads}"
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim = embed_dim // num_heads
        self.dropout, self.batch_first = probability("dropout", dropout), batch_first
        self.pattern, self.causal = _known(pattern), _causal(_known(pattern))
        self.context, self.checkpoint = context_of(group, shards), checkpoint
        self._make_parameters(bias, {"device": device, "dtype": dtype})

    def _make_parameters(self, bias: bool, where: dict[str, Any]) -> None:
        embed, (_, keys, values) = self.embed_dim, self._sizes()
        shapes = {
            "in_proj_weight": (3 * embed, embed),
            "q_proj_weight": (embed, embed),
            "k_proj_weight": (keys, self.kdim),
            "v_proj_weight": (values, self.vdim),
        }
        joint = (self.kdim, self.vdim, keys) == (embed, embed, embed)
        for name, shape in shapes.items():
            made = nn.Parameter(torch.empty(shape, **where)) if (name[0] == "i") == joint else None
            self.register_parameter(name, made)
        in_bias = nn.Parameter(torch.empty(embed + keys + values, **where)) if bias else None
        self.register_parameter("in_proj_bias", in_bias)
        self.out_proj = nn.Linear(embed, embed, bias=bias, **where)
        self.reset_parameters()

    def _sizes(self) -> tuple[int, int, int]:
        """Of queries, keys and values of all heads."""
        keys = self.num_kv_heads * self.head_dim
        return self.embed_dim, keys, keys

    def reset_parameters(self) -> None:
        """Those that torch's module begins with."""
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        for weight in (getattr(self, name) for name in names):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Bounds | None = None,
        tokens: int | None = None,
    ) -> tuple[Tensor, None]:
        """Inputs are ``(token, batch, embed_dim)``, ``(batch, token, embed_dim)`` with ``batch_first``,
        or ``(token, embed_dim)``. Returns the output and None, where torch's module has weights.

        ``key_padding_mask``, bool ``(batch, token)``, is true where a key holds *no* token. ``is_causal``
        cuts the pattern with ``causal``; with fewer queries than keys the queries are the last
        positions. ``cu_seqlens`` is that of ``attention``: sequences packed side by side.

        With a group ``key_padding_mask`` (for a ``longspan.Dilated`` alone) and ``cu_seqlens`` are those of
        the whole sequence, the same on every rank, and so is ``tokens``, its length; left out, ranks tell
        each other."""
        given = (key_padding_mask, need_weights, attn_mask, average_attn_weights, cu_seqlens)
        padding = own_part(self.context, self._checked, query, key, value, *given)
        out = checkpointed(
            self.checkpoint, self._forward, query, key, value, padding, is_causal, cu_seqlens, tokens
        )
        return out, None

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        is_causal: bool,
        cu_seqlens: Bounds | None,
        tokens: int | None,
    ) -> Tensor:
        q, k, v = own_part(self.context, self._project, query, key, value)
        options: dict[str, Any] = {
            "key_padding": padding,
            "cu_seqlens": cu_seqlens,
            "dropout_p": self.dropout if self.training else 0,
        }
        pattern = self.causal if is_causal else self.pattern
        if self.context is None:
            whole_length(k.shape[2], tokens)
            out = attention(q, k, v, pattern, enable_gqa=True, **options)
        else:
            out = self.context.attend(q, k, v, pattern, tokens=tokens, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if query.ndim == 2:
            return out[0]
        return out if self.batch_first else out.transpose(0, 1)

    def _checked(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        cu_seqlens: Bounds | None,
    ) -> Tensor | None:
        """The keys that hold tokens, or an error of what is refused."""
        if need_weights:
            _refuse("need_weights", "weights of all pairs, which are never made", "leave it out")
        if attn_mask is not None:
            _refuse("attn_mask", "a mask of all pairs", "give what it allows as pattern=")
        if not average_attn_weights:
            _refuse("average_attn_weights=False", "weights of all pairs", "leave it out")
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim not in (2, 3) or x.ndim != query.ndim:
                raise ValueError(
                    f"{name} has {x.ndim} axes, expected 3, or 2 without a batch, as query"
                )
        if mask is None:
            return None
        if mask.dtype != torch.bool:
            raise ValueError(
                f"key_padding_mask is {str(mask.dtype)[6:]}, expected bool, true where a key holds no "
                "token: key_padding_mask == -inf makes one of a float mask"
            )
        one_of_both(mask, cu_seqlens)
        return ~(mask[None] if mask.ndim == 1 and query.ndim == 2 else mask)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(batch, head, token, dim)``."""
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = self.in_proj_weight.chunk(3)
        bias = self.in_proj_bias
        biases = (None, None, None) if bias is None else bias.split(self._sizes())
        q, k, v = (
            F.linear(self._batched(x), weight, bias).unflatten(-1, (-1, self.head_dim))
            for x, weight, bias in zip((query, key, value), weights, biases)
        )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _batched(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def sharding(
        self,
        tokens: int,
        is_causal: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Shards:
        """Which tokens this rank of the group holds of a sequence of ``tokens``, for calls with these
        arguments."""
        pattern = self.causal if is_causal else self.pattern
        padding = None if key_padding_mask is None else ~key_padding_mask
        return sharding(self.context, tokens, pattern, padding, cu_seqlens)

    def extra_repr(self) -> str:
        shown = f"{self.embed_dim}, {self.num_heads}, pattern={self.pattern!r}"
        if self.num_kv_heads != self.num_heads:
            shown += f", num_kv_heads={self.num_kv_heads}"
        if self.context is not None:
            shown += f", {self.context}"
        return f"{shown}, checkpoint=True" if self.checkpoint else shown


def _refuse(name: str, what: str, instead: str) -> NoReturn:
    raise ValueError(f"{name} asks for {what}, expected it left out: {instead}")


def _known(pattern: Any) -> str | Dilated:
    if isinstance(pattern, Dilated):
        if has_lengths(pattern):
            raise ValueError(
                "pattern is a Dilated that is padded or packed already: give lengths to each call, as "
                "key_padding_mask or cu_seqlens"
            )
        return pattern
    if isinstance(pattern, (str, Pattern)):
        return str(_run.read(str(pattern)))
    raise TypeError(
        f"pattern is a {type(pattern).__name__}, expected a longspan.Pattern, its text, or a "
        "longspan.Dilated"
    )


def _causal(pattern: str | Dilated) -> str | Dilated:
    """Without keys after their query."""
    if isinstance(pattern, str):
        return cut_causal(pattern)
    lists = pattern.segment_lengths, pattern.dilation_rates
    within = cut_causal(str(pattern.within))
    return Dilated(*lists, within=within, also=pattern.also, overlap=pattern.overlap)
