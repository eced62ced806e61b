"""Whether all engines compute the same.

A sum of n products in f32 is off by about √n roundings of half an ulp, 2⁻²⁴ of the largest term:
what a random walk of n steps gives. Outputs are such sums over the keys, gradients sums of such
sums. Engines add in different orders, so both sides of a comparison are off by that much; a few
times it is the tolerance, relative to the largest number of the tensor: 1.5e-5 forward at 16,384
tokens. A wrong mask, scale or row is off by a thousand times more.

In bf16 each engine rounds its results and, where a matrix unit multiplies, probabilities too: a
number is off by 2⁻⁹ of itself, a few of these in a row. torch's dK and dV were seen off by 3 times
that at 1,409 tokens and by 5 to 6 at 4,096, about as √n.
"""

import math
from collections.abc import Sequence

import torch

from engines import CAUSAL, FULL, Longspan, Mask, Problem, Sdpa, Tensors, window

# Multiples of √n · 2⁻²⁴: about five times the worst that any engine was seen off f64.
FORWARD = 2.0
BACKWARD = 4.0
# For bf16, these times so many 2⁻⁹, up to so many terms; √n from there on. Three times the worst
# that was seen.
BF16 = 4.0
BF16_TERMS = 4_096


# Tokens of a problem whose scores fit memory in f64; no block divides them.
SMALL = 1_409


class Disagreement(Exception):
    """Two engines differ by more than rounding."""


def tolerance(factor: float, problem: Problem) -> float:
    if problem.dtype == "bf16":
        return factor * BF16 * math.sqrt(max(problem.keys / BF16_TERMS, 1.0)) * 2.0**-9
    return factor * math.sqrt(max(problem.keys, 64)) * 2.0**-24


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest one, relative to the largest number expected."""
    if not all(bool(torch.isfinite(x).all()) for x in (got, expected)):
        return math.inf
    got, expected = got.double(), expected.double()
    return float((got - expected).abs().max() / expected.abs().max())


def require(
    what: str,
    got: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    bound: float,
) -> float:
    """The largest difference of all tensors, which must be below the bound."""
    worst = max(difference(a, b) for a, b in zip(got, expected, strict=True))
    if not worst <= bound:
        raise Disagreement(f"{what}: differs by {worst:.1e}, tolerance {bound:.1e}")
    return worst


def exact(problem: Problem, tensors: Tensors) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients in f64, with the whole matrix of scores."""
    inputs = [x.double().requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    groups = problem.heads // problem.kv_heads
    q, k, v = inputs[0], *(x.repeat_interleave(groups, 1) for x in inputs[1:])
    scores = q @ k.mT / math.sqrt(problem.dim)
    out = scores.masked_fill(~visible(problem), -math.inf).softmax(-1) @ v
    return out.detach(), list(torch.autograd.grad(out, inputs, tensors.dout.double()))


def visible(problem: Problem) -> torch.Tensor:
    query = torch.arange(problem.queries)[:, None] + problem.keys - problem.queries
    key = torch.arange(problem.keys)[None, :]
    match problem.mask:
        case Mask("full"):
            return torch.ones(problem.queries, problem.keys, dtype=torch.bool)
        case Mask("causal"):
            return key <= query
        case Mask(_, int(width)):
            return (query - key).abs() <= width
        case Mask("causal & (window(1024, 0) | sinks(64))"):
            return (key <= query) & ((key >= query - 1024) | (key < 64))
        case Mask("global_tokens(64)"):
            return (key < 64) | (query < 64)
    raise ValueError(f"no mask for {problem.mask.text}")


def small_problems(masks: Sequence[Mask], dims: Sequence[int], dtype: str) -> list[Problem]:
    """Lengths that no block divides, one beyond every window, and heads in groups."""
    found = [
        Problem.square(mask, SMALL, 2, dim, dtype)
        for mask in (FULL, CAUSAL, window(70), *masks)
        for dim in dims
    ]
    grouped = [Problem(FULL, queries, 4_093, 8, 2, dims[0], dtype) for queries in (1, 16)]
    return found + grouped


def check_small(problem: Problem, threads: int, isa: str | None) -> float:
    """Longspan, and SDPA where it can, against f64; the largest share of a tolerance."""
    tensors = Tensors.of(problem)
    out, gradients = exact(problem, tensors)
    engines: list[Longspan | Sdpa] = [Longspan(problem, tensors, threads, isa)]
    if problem.mask in (FULL, CAUSAL):
        engines.append(Sdpa(problem, tensors))
    share = 0.0
    for engine in engines:
        for direction, got, expected, factor in (
            ("forward", [engine.forward()], [out], FORWARD),
            ("backward", engine.backward()(), gradients, BACKWARD),
        ):
            what = f"{engine.name}, {direction}, {problem.mask.text}, d {problem.dim}"
            bound = tolerance(factor, problem)
            share = max(share, require(f"{what}, against f64", got, expected, bound) / bound)
    return share


def errors(
    problem: Problem, tensors: Tensors, engines: Sequence[Longspan | Sdpa]
) -> list[dict[str, float]]:
    """Root mean square errors of every engine's output and gradients against f64."""
    out, gradients = exact(problem, tensors)
    names = ("out", "dq", "dk", "dv")
    found = []
    for engine in engines:
        results = (engine.forward(), *engine.backward()())
        pairs = zip(names, results, (out, *gradients), strict=True)
        found.append({name: rms(got.double() - exact) for name, got, exact in pairs})
    return found


def rms(numbers: torch.Tensor) -> float:
    return float(numbers.square().mean().sqrt())
