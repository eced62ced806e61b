"""Compares attention on a device with dense attention in f64: ``python -m longspan.torch.verify --device cuda``.

On CUDA tensors FlexAttention's kernels compute over Longspan's block lists. Longspan's tests run these kernels in
an interpreter on a CPU, never on a GPU; this command is for a machine that has one. ``--device cpu`` checks
Longspan's own kernels by the same cases.

The reference is written here, in plain torch, on the CPU: a matrix of all pairs, whose entries say how often a pair
counts, and the definition of attention and of its gradients. It shares nothing with engines, layouts or patterns.

**The error rule**, per result and as root mean squares over a tensor: *best* is what rounding the truth to f32
costs, at least a sixth of f32's unit roundoff (2⁻²⁴) of the size of the terms, since terms may cancel. f32 results
and every log-sum-exp may be off by 12 · best · (1 + 3 / rows). bf16 and f16 results may be off by what rounding the
truth to their type costs, a unit roundoff (2⁻⁸, 2⁻¹¹) of the terms' size (two for dq, dk: probabilities and gradients
of scores are rounded before matrix products), and twice the bound of f32.

f32 is checked with products in f32: the command sets ``torch.set_float32_matmul_precision("highest")`` while it
runs. With ``"high"`` FlexAttention multiplies in TF32, which has 11 bits and does not meet this rule.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import longspan
import longspan.torch
from longspan.torch._command import (
    DTYPES,
    add_device,
    highest_precision,
    opened,
    synchronize,
    title,
)

#: How many times the best possible error a result of f32 may be off.
MOST = 12.0
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

#: How often a pair counts, from batch entry, head, query position and key position, which broadcast.
Pairs = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """One call of ``longspan.torch.attention``."""

    name: str
    pattern: Any
    pairs: Pairs
    queries: int
    keys: int
    dtypes: str = "f32 bf16"
    batch: int = 1
    heads: tuple[int, int] = (4, 4)
    """Of queries, and of keys."""
    dims: tuple[int, int] = (64, 64)
    """Of queries and keys, and of values."""
    gradients: bool = True
    options: dict[str, Any] = {}
    """More arguments of the call."""


def cases(n: int) -> list[Case]:
    """The table, for sequences of about ``n`` tokens."""
    w, part = n // 3, n // 4
    tensor = torch.tensor
    slopes, logits = tensor([0.5, 0.25, 0.1, 0.01]), tensor([0.5, -1.0, 2.0, 0.0])

    def causal(b, h, q, k):
        return k <= q

    def window(b, h, q, k):
        return (k <= q) & ((q - k <= w) | (k < 16))

    def heads(b, h, q, k):
        two_sided, first = abs(q - k) <= w, k < 7
        return torch.where(
            h == 0, k <= q, torch.where(h == 1, two_sided, torch.where(h == 2, (q - k) % 3 == 0, first))
        )

    def packed(b, h, q, k):
        sequence = lambda x: (x >= part).int() + (x > part)
        return (sequence(q) == sequence(k)) & (k <= q) & (q - k <= w)

    def branch(h, q, k, segment, rate):
        """A branch of LongNet: tokens of one segment whose place in it has the remainder of the head."""
        place = lambda x: (x % segment % rate == h % rate)
        return (q // segment == k // segment) & place(q) & place(k) & (k <= q)

    def both(h, q, k):
        return branch(h, q, k, 64, 1), branch(h, q, k, 256, 4)

    own = "causal & (window({}, 0) | sinks(16))".format(w)
    branches = ([64, 256], [1, 4])
    return [
        Case("window and sinks", own, window, n, n, "f32 bf16 f16"),
        Case("grouped queries", f"window({w}, {w})", lambda b, h, q, k: abs(q - k) <= w, n, n,
             heads=(8, 2), dims=(128, 128)),
        Case("other lengths", own, window, n // 2 + 3, n + 1, heads=(4, 2), dims=(48, 80)),
        Case("one query", own, window, 1, n, "f32 bf16 f16", heads=(8, 2), gradients=False),
        Case("packed", f"causal & window({w}, 0)", packed, n, n,
             options={"cu_seqlens": tensor([0, part, part + 1, n])}),
        Case("per head", f"heads([causal, window({w}, {w}), strided(3), sinks(7)])", heads, n, n),
        Case("empty rows", f"causal & !window({w}, 0)", lambda b, h, q, k: q - k > w, n, n),
        Case("key padding", "causal",
             lambda b, h, q, k: (k <= q) & torch.where(b == 0, k < n - 40, k >= 33), n, n, batch=2,
             options={"key_padding": tensor([[0, n - 40], [33, n]])}),
        Case("softcap", "causal", causal, n, n, options={"softcap": 2.0}),
        Case("ALiBi", "causal", causal, n, n, options={"alibi_slopes": slopes}),
        Case("sink logits", own, window, n, n, options={"sink_logits": logits}),
        Case("two components", "causal & (window(30, 0) | strided(16))",
             lambda b, h, q, k: (k <= q) & ((q - k <= 30) | ((q - k) % 16 == 0)), n, n),
        Case("dilated, weighted", longspan.Dilated(*branches, within="causal"),
             lambda b, h, q, k: sum(x.int() for x in both(h, q, k)), n, n, heads=(4, 2)),
        Case("dilated, union", longspan.Dilated(*branches, within="causal", overlap="union"),
             lambda b, h, q, k: torch.logical_or(*both(h, q, k)), n, n),
    ]  # fmt: skip


class Reference(NamedTuple):
    """A result in f64, and the size of its terms: the same sums over absolute values."""

    truth: Tensor
    size: Tensor


def dense(case: Case, inputs: dict[str, Tensor]) -> dict[str, Reference]:
    """Attention and its gradients by definition, from f64 tensors on the CPU."""
    q, k, v, dout, dlse = (inputs[name].double() for name in ("q", "k", "v", "dout", "dlse"))
    share = case.heads[0] // case.heads[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    positions = case.keys - case.queries + torch.arange(case.queries)[:, None], torch.arange(case.keys)[None]
    b, h = torch.arange(case.batch).view(-1, 1, 1, 1), torch.arange(case.heads[0]).view(-1, 1, 1)
    counts = case.pairs(b, h, *positions).double()

    scale = case.dims[0] ** -0.5
    scores, slope = scale * (q @ k.mT), torch.ones(())
    if (cap := case.options.get("softcap")) is not None:
        capped = torch.tanh(scores / cap)
        scores, slope = cap * capped, 1 - capped**2
    if (slopes := case.options.get("alibi_slopes")) is not None:
        scores = scores - slopes.double()[:, None, None] * abs(positions[0] - positions[1])
    # A sink logit is one more term of each denominator.
    sinks = inputs["sink_logits"].double() if "sink_logits" in inputs else torch.tensor([-torch.inf])
    scores = scores + counts.log()
    joined = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], 3)
    lse = joined.logsumexp(3)
    p = torch.exp(joined - torch.where(lse == -torch.inf, 0, lse)[..., None])
    p, p_sink = p[..., :-1], p[..., -1]

    def sums(
        v: Tensor, dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, sign: int
    ) -> dict[str, Tensor]:
        """All results; with absolute values and a sign of +1, the sizes of their terms."""
        out = p @ v
        delta = sign * (dout * out).sum(3) + dlse
        ds = p * (dout @ v.mT + delta[..., None]) * slope * scale
        grouped = lambda x: x.unflatten(1, (-1, share)).sum(2)
        dk, dv, dsinks = grouped(ds.mT @ q), grouped(p.mT @ dout), (p_sink * delta).sum((0, 2))
        return {"out": out, "lse": lse, "dq": ds @ k, "dk": dk, "dv": dv, "dsinks": dsinks}

    truth = sums(v, dout, dlse, q, k, -1)
    size = sums(abs(v), abs(dout), abs(dlse), abs(q), abs(k), 1)
    size["lse"] = torch.where(lse == -torch.inf, 0, lse.abs())
    return {name: Reference(truth[name], size[name]) for name in truth}


def share_of_bound(name: str, got: Tensor, reference: Reference, dtype: torch.dtype) -> float:
    """The error of a result, relative to what the rule above allows."""
    truth, size = reference
    got = got.detach().double().cpu()
    live = size > 0 if size.ndim < 4 else (size > 0).any(3)
    rows = max(1, int(live.sum()))
    finite = torch.isfinite(truth)
    if got.shape != truth.shape or not torch.equal(got[~finite], truth[~finite]):
        return float("inf")
    got, truth, size = got[finite], truth[finite], size[finite]
    best = max(_rms(truth.float() - truth), UNIT[torch.float32] / 6 * _rms(size))
    limit = MOST * best * (1 + 3 / rows)
    if dtype != torch.float32 and name != "lse":
        roundings = 1 if name in ("out", "dv") else 2
        limit = 2 * limit + _rms(truth.to(dtype) - truth) + roundings * UNIT[dtype] * _rms(size)
    error = _rms(got - truth)
    # Where nothing is allowed, and where the error is not a number, only exact results hold.
    return error / limit if limit > 0 and error == error else (0.0 if error == 0 else float("inf"))


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def inputs_of(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random tensors on the CPU, the same for every device."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    (heads, key_heads), (dim, value_dim) = case.heads, case.dims
    rows = (case.batch, heads, case.queries)
    made = {
        "q": normal(*rows, dim),
        "k": normal(case.batch, key_heads, case.keys, dim),
        "v": normal(case.batch, key_heads, case.keys, value_dim),
        "dout": normal(*rows, value_dim),
    }
    made = {name: x.to(dtype) for name, x in made.items()}
    made["dlse"] = normal(*rows)
    if "sink_logits" in case.options:
        made["sink_logits"] = case.options["sink_logits"]
    return made


def check(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[str, float]:
    """The result with the largest share of its bound, and that share: at most 1 where all is well."""
    inputs = inputs_of(case, dtype)
    there = {name: x.to(device, copy=True) for name, x in inputs.items()}
    options: dict[str, Any] = {
        name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.options.items()
    }
    learned = [there[name] for name in ("q", "k", "v", "sink_logits") if name in there]
    for x in learned:
        x.requires_grad_(case.gradients)
    if "sink_logits" in there:
        options["sink_logits"] = there["sink_logits"]
    q, k, v = learned[:3]
    results = longspan.torch.attention(
        q, k, v, case.pattern, enable_gqa=True, return_lse=True, **options
    )
    found = dict(zip(("out", "lse"), results))
    if case.gradients:
        gradients = torch.autograd.grad(results, learned, (there["dout"], there["dlse"]))
        found.update(zip(("dq", "dk", "dv", "dsinks"), gradients))
    references = dense(case, inputs)
    shares = {
        name: share_of_bound(name, got, references[name], dtype) for name, got in found.items()
    }
    worst = max(shares, key=shares.__getitem__)
    return worst, shares[worst]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m longspan.torch.verify",
        description="Compare attention on a device with dense attention in f64, forward, log-sum-exp and gradients.",
        epilog="Each line has a case, its dtype, the largest error of its results relative to its bound, and the "
        "seconds it took, compilation included. The exit code is 1 if an error is above its bound.",
    )
    add_device(parser)
    parser.add_argument("--tokens", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of this dtype alone")
    parser.add_argument("--case", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="300 tokens, one dtype per case")
    chosen = parser.parse_args(arguments)
    if chosen.tokens < 200:
        parser.error(f"--tokens is {chosen.tokens}, expected at least 200")
    device, engine = opened(parser, chosen.device)

    rows = []
    for index, case in enumerate(cases(300 if chosen.quick else chosen.tokens)):
        names = case.dtypes.split()
        if chosen.dtype is not None:
            names = [chosen.dtype]
        elif chosen.quick:
            names = [names[index % len(names)]]
        if chosen.case is None or chosen.case in case.name:
            rows += [(case, name) for name in names]
    if not rows:
        parser.error(f"--case {chosen.case!r} is in no name of a case: " + ", ".join(x.name for x in cases(300)))

    print(title(device, engine))
    print(f"{'':>8}{'case':<20}{'dtype':<7}{'error / bound':<22}time", flush=True)
    failed = 0
    with highest_precision():
        for number, (case, name) in enumerate(rows, 1):
            print(f"{f'{number}/{len(rows)}':<8}{case.name:<20}{name:<7}", end="", flush=True)
            start = time.perf_counter()
            try:
                worst, share = check(case, DTYPES[name], device)
                synchronize(device)
            except Exception as error:  # a kernel that doesn't compile is a failed case, others follow
                failed += 1
                print(f"FAILED  {type(error).__name__}: {error}", flush=True)
                continue
            failed += not share <= 1
            seconds = time.perf_counter() - start
            told = f"{share:.2f} ({worst})"
            print(f"{told:<22}{seconds:.2f} s{'' if share <= 1 else '  FAILED'}", flush=True)
    print(f"{len(rows)} cases, {failed} failed" if failed else f"{len(rows)} cases, none failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
