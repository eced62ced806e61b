"""A causal window with sinks, forward and backward, on JAX arrays."""

import json

import jax
import jax.numpy as jnp
import longspan
import longspan.jax
import numpy

TOKENS = 301
HEAD_DIM = 16


def tensor(seed: int, heads: int) -> jax.Array:
    """The same numbers in every program of this folder, ``(batch, token, head, dim)``."""
    i = numpy.arange(heads * TOKENS * HEAD_DIM)
    values = ((7 * i + 13 * seed) % 31 / 16 - 0.9375).astype(numpy.float32)
    return jnp.asarray(values.reshape(1, heads, TOKENS, HEAD_DIM).transpose(0, 2, 1, 3))


def squares(values: jax.Array) -> float:
    return float((numpy.asarray(values).astype(numpy.float64) ** 2).sum())


pattern = longspan.Pattern("causal & (window(64, 0) | sinks(4))")
layout = pattern.compile(TOKENS)


@jax.jit
def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> dict[str, jax.Array]:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return longspan.jax.attention(q, k, v, pattern, scale=0.3, softcap=5.0, threads=2, return_lse=True)

    (out, lse), vjp = jax.vjp(attend, q, k, v)
    dq, dk, dv = vjp((dout, jnp.zeros_like(lse)))
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


results = run(tensor(0, 4), tensor(1, 2), tensor(2, 2), tensor(3, 4))
sums = {name: squares(values) for name, values in results.items()}
print(json.dumps({"active_pairs": layout.active_pairs, **sums}))
