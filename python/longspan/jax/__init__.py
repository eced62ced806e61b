"""Attention for JAX on the CPU: ``jit``, ``grad``, ``vmap``.

>>> import jax, longspan.jax
>>> q = jax.random.normal(jax.random.key(0), (1, 2048, 4, 32))
>>> out = longspan.jax.attention(q, q, q, "causal & window(256, 0)")
>>> gradient = jax.grad(lambda q: longspan.jax.attention(q, q, q, "causal & window(256, 0)").sum())(q)

``dot_product_attention`` has the signature of ``jax.nn``'s, and a pattern beside it; ``attention_fn`` is
what flax's attention layers take. Tensors are ``(batch, token, head, dim)``, as everywhere in JAX.

Longspan's kernels compute inside of XLA's programs, by handlers that are part of this package: nothing is
compiled when it is installed, and Python has no part in a call.
"""

from longspan.jax._attention import attention
from longspan.jax._compat import attention_fn, dot_product_attention

__all__ = ["attention", "attention_fn", "dot_product_attention"]
