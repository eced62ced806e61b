"""Attention for torch: tensors on the CPU, autograd, autocast, ``torch.compile``.

>>> import torch, longspan.torch
>>> q = torch.randn(1, 4, 2048, 32, requires_grad=True)
>>> longspan.torch.attention(q, q, q, "causal & window(256, 0)").sum().backward()

``scaled_dot_product_attention`` stands in for torch's function of that name, ``flash_attention``
for that of the package flash-attn. All call the operator ``torch.ops.longspan.attention``, on as
many threads as torch itself is told to use.

``ring_attention`` is for one sequence that the ranks of a process group hold together;
``ring_positions`` says which tokens are whose.
"""

from longspan.torch._attention import attention
from longspan.torch._compat import flash_attention, scaled_dot_product_attention
from longspan.torch._ring import ring_attention, ring_positions

__all__ = [
    "attention",
    "flash_attention",
    "ring_attention",
    "ring_positions",
    "scaled_dot_product_attention",
]
