"""What a typed program sees of the NumPy calls: `mypy --strict` and pyright check this file, and it
runs as a test."""

from __future__ import annotations

import pickle
from typing import Any

import longspan
import numpy
from numpy.typing import NDArray


def calls() -> None:
    q: NDArray[numpy.float32] = numpy.ones((1, 2, 40, 8), dtype=numpy.float32)
    pattern = longspan.causal() & (longspan.window(16, 0) | longspan.sinks(2))

    out: NDArray[numpy.float32] = longspan.attention(q, q, q, pattern)
    pair: tuple[NDArray[numpy.float32], NDArray[numpy.float32]]
    pair = longspan.attention(q, q, q, pattern, return_lse=True, scale=0.5)
    filled: NDArray[numpy.float32] = longspan.attention(q, q, q, "causal", out=out)
    assert filled is out and pair[1].shape == (1, 2, 40)

    output: longspan.Output = longspan.forward(q, q, q, pattern, alibi_slopes=[0.5, 0.25])
    lse: NDArray[numpy.float32] = output.lse
    gradients: longspan.Gradients = longspan.backward(q, q, q, output, out, dlse=lse)
    dq, _, _ = longspan.backward(q, q, q, (output.out, lse), out, pattern, threads=1)
    assert gradients.dq.shape == dq.shape

    weights: NDArray[numpy.float32] = longspan.attention_weights(q, q, pattern, [3], heads=[1])
    svg: str = longspan.weights_svg(weights)
    assert weights.shape == (1, 1, 1, 40) and svg
    scaled: tuple[int, longspan.Pattern] = longspan.scale_to_density("strided({})", 40, 0.1)
    assert scaled[0] == 10


def objects() -> None:
    q: NDArray[numpy.float32] = numpy.ones((1, 2, 40, 8), dtype=numpy.float32)
    attention = longspan.Attention("causal", scale=0.25, order="bhsd", isa="portable")
    out: NDArray[numpy.float32] = attention(q, q, q)
    with_lse: tuple[NDArray[numpy.float32], NDArray[numpy.float32]]
    with_lse = attention(q, q, q, return_lse=True)
    output = attention.forward(q, q, q)
    gradients = attention.backward(q, q, q, output, out, with_lse[1])
    assert gradients.dv.shape == q.shape

    layout: longspan.Layout = longspan.heads([longspan.causal(), "full"]).compile(40, block=32)
    heads: int | None = layout.heads
    dilated = longspan.Dilated([16, 32], [1, 2], within="causal")
    what: longspan.Pattern | longspan.Layout | longspan.Dilated
    for what in (longspan.full(), layout, dilated):
        again: Any = pickle.loads(pickle.dumps(what))
        assert again == what
    assert heads == 2


if __name__ == "__main__":
    calls()
    objects()
