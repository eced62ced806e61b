"""Attentions for the FlexAttention engine, each with a mask written out from its definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

import longspan
import longspan.torch

#: ``(batch, heads, queries, keys)``, or what broadcasts to it.
Masks = Callable[["Case"], "list[numpy.ndarray]"]


def rule(predicate: Callable[[Any, Any], Any], query_offset: int | None = None, key_offset: int = 0) -> Masks:
    """A mask from a predicate over positions, which are arrays here."""

    def masks(case: Case) -> list[numpy.ndarray]:
        first = key_offset + case.keys - case.queries if query_offset is None else query_offset
        q = first + numpy.arange(case.queries)[:, None]
        k = key_offset + numpy.arange(case.keys)[None]
        return [numpy.broadcast_to(predicate(q, k), (case.queries, case.keys))]

    return masks


def per_head(*rules: Masks) -> Masks:
    return lambda case: [numpy.stack([each(case)[0] for each in rules])]


def per_entry(*rules: Masks) -> Masks:
    return lambda case: [numpy.stack([each(case)[0] for each in rules])[:, None]]


def branches(segments: list[int], rates: list[int], cut: Callable[[Any, Any], Any]) -> Masks:
    """One mask per branch of LongNet, per head: a key that two branches have counts twice."""

    def masks(case: Case) -> list[numpy.ndarray]:
        q = case.keys - case.queries + numpy.arange(case.queries)[:, None]
        k = numpy.arange(case.keys)[None]
        found = []
        for w, r in zip(segments, rates):
            own = [
                (q // w == k // w) & (q % w % r == h % r) & (k % w % r == h % r) & cut(q, k)
                for h in range(case.heads)
            ]
            found.append(numpy.stack(own))
        return found

    return masks


def packed(queries: list[int], keys: list[int], inner: Callable[[Any, Any], Any]) -> Masks:
    """Sequences side by side; positions count within each, queries are its last."""

    def masks(case: Case) -> list[numpy.ndarray]:
        found = numpy.zeros((case.queries, case.keys), dtype=bool)
        q0 = k0 = 0
        for q, k in zip(queries, keys):
            i, j = k - q + numpy.arange(q)[:, None], numpy.arange(k)[None]
            found[q0 : q0 + q, k0 : k0 + k] = numpy.broadcast_to(inner(i, j), (q, k))
            q0, k0 = q0 + q, k0 + k
        return [found]

    return masks


def causal(q: Any, k: Any) -> Any:
    return k <= q


def window_and_sinks(q: Any, k: Any) -> Any:
    return (k <= q) & ((q - k <= 100) | (k < 16))


@dataclass
class Case:
    """One call of ``longspan.torch.attention``."""

    name: str
    pattern: Any
    masks: Masks
    heads: int = 2
    key_heads: int = 2
    queries: int = 150
    keys: int = 0
    dim: int = 32
    value_dim: int = 0
    batch: int = 1
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of the call."""
    bias: Callable[[Case], numpy.ndarray] | None = None
    """What the options add to scores, ``(heads, queries, keys)``."""
    gradients: bool = True
    lse_gradient: bool = True
    default_tiles: bool = False
    kernels: list[str] | None = None
    """Attention templates of the forward pass."""

    def __post_init__(self) -> None:
        self.keys = self.keys or self.queries
        self.value_dim = self.value_dim or self.dim

    def __repr__(self) -> str:
        return self.name

    def tensors(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """``q, k, v``, and gradients of output and log-sum-exp."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        rows = (self.batch, self.heads, self.queries)
        made = {
            "q": normal(*rows, self.dim),
            "k": normal(self.batch, self.key_heads, self.keys, self.dim),
            "v": normal(self.batch, self.key_heads, self.keys, self.value_dim),
            "dout": normal(*rows, self.value_dim),
        }
        made = {name: x.to(self.dtype) for name, x in made.items()}
        return {**made, "dlse": normal(*rows)}


W = window_and_sinks
WINDOW = "causal & (window(100, 0) | sinks(16))"
SLOPES = torch.tensor([0.05, 0.3])
SINKS = torch.tensor([0.5, -1.0])
TABLE = torch.linspace(-1, 1, 2 * 41).view(2, 41)


def distances(case: Case) -> numpy.ndarray:
    return case.keys - case.queries + numpy.arange(case.queries)[:, None] - numpy.arange(case.keys)[None]


def alibi(case: Case) -> numpy.ndarray:
    return -SLOPES.double().numpy()[:, None, None] * abs(distances(case))


def alibi_packed(case: Case) -> numpy.ndarray:
    """Sequences of 60 and 91 queries, 100 and 80 keys: the last positions of each."""
    q = numpy.concatenate([40 + numpy.arange(60), -11 + numpy.arange(91)])[:, None]
    k = numpy.concatenate([numpy.arange(100), numpy.arange(80)])[None]
    return -SLOPES.double().numpy()[:, None, None] * abs(q - k)


def table(case: Case) -> numpy.ndarray:
    """Columns are distances from −8 to 32."""
    return TABLE.double().numpy()[:, numpy.clip(distances(case), -8, 32) + 8]


HALF = torch.bfloat16
bounds = lambda *lengths: torch.tensor([0, *numpy.cumsum(lengths)], dtype=torch.int32)
CASES = [
    Case("window", WINDOW, rule(W), 4, 2, 200, 300, 64),
    Case("window-bf16", WINDOW, rule(W), 4, 2, 200, 300, 64, dtype=HALF),
    Case("window-f16", WINDOW, rule(W), 4, 2, 200, 300, 64, dtype=torch.float16),
    Case("one-query", WINDOW, rule(W), 4, 1, 1, 300, 64, gradients=False, kernels=["decode"]),
    Case("16-queries", WINDOW, rule(W), 4, 2, 16, 257, 32, gradients=False, kernels=["decode"]),
    Case("decode-many-blocks", ["causal", "causal & window(1800, 0)"],
         per_entry(rule(causal), rule(lambda q, k: (k <= q) & (q - k <= 1800))), 4, 2, 3, 2500, 32, batch=2,
         gradients=False, kernels=["decode"]),
    Case("16-queries-gradients", WINDOW, rule(W), 4, 2, 16, 257, 32),
    Case("primes", "causal", rule(causal), 2, 2, 131, 257, 16),
    Case("below-a-block", "window(20, 20)", rule(lambda q, k: abs(q - k) <= 20), 2, 2, 127, 89, 16),
    Case("dim-128", WINDOW, rule(W), 2, 1, 130, 130, 128),
    Case("other-value-dim", "window(20, 20) | sinks(3)",
         rule(lambda q, k: (abs(q - k) <= 20) | (k < 3)), 2, 1, 200, 260, 48, 80),
    Case("per-head", "heads([window(20, 0), window(90, 0)])",
         per_head(*(rule(lambda q, k, w=w: (k <= q) & (q - k <= w)) for w in (20, 90))), 2, 1, 200),
    Case("per-head-other-structure", "heads([causal, strided(3) & causal, sinks(7), !causal])",
         per_head(rule(causal), rule(lambda q, k: (k <= q) & ((q - k) % 3 == 0)),
                  rule(lambda q, k: k < 7), rule(lambda q, k: k > q)), 4, 2, 140),
    Case("per-entry", ["causal", "window(9, 9)"],
         per_entry(rule(causal), rule(lambda q, k: abs(q - k) <= 9)), batch=2),
    Case("packed", "causal & window(30, 0)", packed([40, 1, 99], [40, 1, 99], lambda q, k: (k <= q) & (q - k <= 30)),
         queries=140, options={"cu_seqlens": bounds(40, 1, 99)}),
    Case("packed-other-keys", "causal", packed([60, 91], [100, 80], causal), 4, 2, 151, 180,
         options={"cu_seqlens": (bounds(60, 91), bounds(100, 80))}),
    Case("offsets", "dilated(24, 3, 1) | sinks(5)",
         rule(lambda q, k: (q >= 0) & (k >= 0) & (q // 24 == k // 24) & (q % 24 % 3 == 1) & (k % 24 % 3 == 1)
              | (k >= 0) & (k < 5), -30, -11), 2, 2, 140, 150, options={"query_offset": -30, "key_offset": -11}),
    Case("empty-rows", "causal & !window(40, 0)", rule(lambda q, k: q - k > 40)),
    Case("no-lse-gradient", WINDOW, rule(W), lse_gradient=False),
    Case("softcap", "causal", rule(causal), options={"softcap": 2.0}),
    Case("softcap-bf16", "window(50, 50)", rule(lambda q, k: abs(q - k) <= 50), dtype=HALF, options={"softcap": 2.0}),
    Case("alibi", "causal", rule(causal), options={"alibi_slopes": SLOPES}, bias=alibi),
    Case("alibi-packed", "causal", packed([60, 91], [100, 80], causal), 2, 1, 151, 180, bias=alibi_packed,
         options={"cu_seqlens": (bounds(60, 91), bounds(100, 80)), "alibi_slopes": SLOPES}),
    Case("sink-logits", WINDOW, rule(W), options={"sink_logits": SINKS}),
    Case("sink-logits-empty-rows-bf16", "causal & !window(40, 0)", rule(lambda q, k: q - k > 40), dtype=HALF,
         options={"sink_logits": SINKS}),
    Case("bias-table", "causal", rule(causal), options={"bias_table": TABLE, "bias_right": 8}, bias=table),
    Case("key-padding", "causal", per_entry(rule(lambda q, k: (k <= q) & (k < 90)), rule(lambda q, k: (k <= q) & (k >= 33))),
         batch=2, options={"key_padding": torch.tensor([[0, 90], [33, 150]])}),
    Case("key-padding-holes", "full", per_entry(rule(lambda q, k: k % 5 != 0), rule(lambda q, k: k > 40)), batch=2,
         options={"key_padding": torch.stack([torch.arange(150) % 5 != 0, torch.arange(150) > 40])}),
    Case("strides", "neighborhood([10, 15], [2, 3])",
         rule(lambda q, k: (abs(q // 15 - k // 15) <= 2) & (abs(q % 15 - k % 15) <= 3)), batch=2),
    Case("default-tiles", WINDOW, rule(W), 2, 1, 150, 200, 64, dtype=torch.float16, default_tiles=True),
    Case("default-tiles-bf16", "causal", rule(causal), 2, 2, 130, 130, 32, dtype=HALF, default_tiles=True),
    Case("layout-of-a-mask", longspan.Layout.from_mask(numpy.tri(150, 200, 3, dtype=bool) & (numpy.arange(200) % 7 != 0), block=128),
         lambda case: [numpy.tri(150, 200, 3, dtype=bool) & (numpy.arange(200) % 7 != 0)], 2, 1, 150, 200),
    Case("two-components", "window(30, 30) | strided(8)",
         rule(lambda q, k: (abs(q - k) <= 30) | ((q - k) % 8 == 0)), 1, 1, queries=1024, kernels=["forward", "forward"]),
    Case("two-components-bf16", "strided(8) | sinks(5)",
         rule(lambda q, k: ((q - k) % 8 == 0) | (k < 5)), 2, 1, 900, 1000, dtype=HALF, batch=2,
         kernels=["forward", "forward", "forward"]),
    Case("branches", longspan.Dilated([64, 128], [1, 4], within="causal"), branches([64, 128], [1, 4], causal),
         4, 2, 200, kernels=["forward"] * 5),
    Case("branches-sinks", longspan.Dilated([48, 300], [2, 3]),
         branches([48, 300], [2, 3], lambda q, k: k > -1), 2, 2, 290, batch=2, options={"sink_logits": SINKS}),
    Case("union-of-branches", longspan.Dilated([64, 256], [1, 4], within="causal", also="window(10, 0)", overlap="union"),
         lambda case: [numpy.logical_or.reduce(branches([64, 256], [1, 4], causal)(case)
                       + [numpy.stack([(distances(case) >= 0) & (distances(case) <= 10)] * case.heads)])], 4, 4, 270),
]

#: What ``.ci/run`` runs of them: each kind of call once.
IN_CI = {
    "window", "window-bf16", "16-queries", "per-head-other-structure", "packed-other-keys", "alibi-packed",
    "sink-logits-empty-rows-bf16", "two-components", "branches",
}
