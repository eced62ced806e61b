"""A causal window with sinks, forward and backward, on NumPy arrays."""

import json
from typing import Any

import longspan
import numpy
from numpy.typing import NDArray

TOKENS = 301
HEAD_DIM = 16


def tensor(seed: int, heads: int) -> NDArray[numpy.float32]:
    """The same numbers in every program of this folder."""
    i = numpy.arange(heads * TOKENS * HEAD_DIM)
    values = ((7 * i + 13 * seed) % 31 / 16 - 0.9375).astype(numpy.float32)
    return values.reshape(1, heads, TOKENS, HEAD_DIM)


def squares(values: NDArray[Any]) -> float:
    return float((values.astype(numpy.float64) ** 2).sum())


pattern = longspan.Pattern("causal & (window(64, 0) | sinks(4))")
layout = pattern.compile(TOKENS)
attention = longspan.Attention(pattern, scale=0.3, softcap=5.0, threads=2)

q, k, v = tensor(0, 4), tensor(1, 2), tensor(2, 2)
output = attention.forward(q, k, v)
dq, dk, dv = attention.backward(q, k, v, output, tensor(3, 4))

results = {"out": output.out, "lse": output.lse, "dq": dq, "dk": dk, "dv": dv}
sums = {name: squares(numpy.asarray(values)) for name, values in results.items()}
print(json.dumps({"active_pairs": layout.active_pairs, **sums}))
