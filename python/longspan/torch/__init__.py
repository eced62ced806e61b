"""Attention for torch: tensors on the CPU, autograd, autocast, ``torch.compile``.

>>> import torch, longspan.torch
>>> q = torch.randn(1, 4, 2048, 32, requires_grad=True)
>>> longspan.torch.attention(q, q, q, "causal & window(256, 0)").sum().backward()

``scaled_dot_product_attention`` stands in for torch's function of that name, ``flash_attention``
for that of the package flash-attn. All call the operator ``torch.ops.longspan.attention``, on as
many threads as torch itself uses. ``neighborhood_attention`` is for the cells of a grid, near each
other on every axis.

``DilatedAttention`` is LongNet's, ``MultiheadDilatedAttention`` the layer around it, and
``LongNetEncoder`` and ``LongNetLM`` are the models; their weights are those of ``longspan-candle``.

``MultiheadAttention`` stands in for torch's module of that name, over a pattern or LongNet's branches.

``flex_attention`` takes torch's ``BlockMask`` and, from ``score_mod``, score modifications.

Importing this module registers ``"longspan"`` with ``torch.nn.attention``: after
``activate_flash_attention_impl("longspan")``, torch's own ``scaled_dot_product_attention`` and ``varlen_attn`` are
computed by Longspan on the CPU. ``impl_calls`` counts their calls.

``ring_attention`` is for one sequence that the ranks of a process group hold together, over a pattern
or a ``longspan.Dilated``; ``ring_positions`` says which tokens are whose. Modules take a process group
as ``group``. ``Shards``, ``ring_loss``, ``sum_gradients`` and ``scale_loss`` are the rest of a training
step over ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longspan.torch._attention import attention
from longspan.torch._compat import flash_attention, scaled_dot_product_attention
from longspan.torch._dilated import DilatedAttention, MultiheadDilatedAttention
from longspan.torch._flash_impl import impl_calls, register
from longspan.torch._longnet import LongNetEncoder, LongNetLM
from longspan.torch._longnet_config import LongNetConfig
from longspan.torch._multihead import MultiheadAttention
from longspan.torch._neighborhood import neighborhood_attention
from longspan.torch._ring import ring_attention, ring_positions
from longspan.torch._rotary import rotary_table
from longspan.torch._score_mods import score_mod
from longspan.torch._shards import Shards, ring_loss, scale_loss, sum_gradients

if TYPE_CHECKING:
    from longspan.torch._flex_attention import flex_attention

__all__ = [
    "DilatedAttention",
    "LongNetConfig",
    "LongNetEncoder",
    "LongNetLM",
    "MultiheadAttention",
    "MultiheadDilatedAttention",
    "Shards",
    "attention",
    "flash_attention",
    "flex_attention",
    "impl_calls",
    "neighborhood_attention",
    "ring_attention",
    "ring_loss",
    "ring_positions",
    "rotary_table",
    "scale_loss",
    "scaled_dot_product_attention",
    "score_mod",
    "sum_gradients",
]

register()
del register


def __getattr__(name: str) -> Any:
    # It imports torch's compiler, in seconds, for those too who never use it.
    if name == "flex_attention":
        from longspan.torch._flex_attention import flex_attention

        globals()[name] = flex_attention
        return flex_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
