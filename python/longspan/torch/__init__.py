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

``ring_attention`` is for one sequence that the ranks of a process group hold together, over a pattern
or a ``longspan.Dilated``; ``ring_positions`` says which tokens are whose.
"""

from longspan.torch._attention import attention
from longspan.torch._compat import flash_attention, scaled_dot_product_attention
from longspan.torch._dilated import DilatedAttention, MultiheadDilatedAttention, rotary_table
from longspan.torch._longnet import LongNetConfig, LongNetEncoder, LongNetLM
from longspan.torch._neighborhood import neighborhood_attention
from longspan.torch._ring import ring_attention, ring_positions

__all__ = [
    "DilatedAttention",
    "LongNetConfig",
    "LongNetEncoder",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "attention",
    "flash_attention",
    "neighborhood_attention",
    "ring_attention",
    "ring_positions",
    "rotary_table",
    "scaled_dot_product_attention",
]
