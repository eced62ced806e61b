"""How far implementations of dilated attention are from the paper's equations, in f64."""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from engines import Case, make

TESTS = Path(__file__).resolve().parents[2] / "python" / "tests"


@dataclass(frozen=True)
class Question:
    """A shape, and what it shows."""

    title: str
    tokens: int
    case: Case


def largest(errors: list[float]) -> float:
    """The largest one, NaN if there is one: which of them ``max`` returns depends on their order."""
    return sum(errors) if any(map(math.isnan, errors)) else max(errors)


def questions() -> list[Question]:
    """From what everybody agrees on to everything at once."""
    one = lambda causal: Case((64,), (1,), 4, 16, causal)
    return [
        Question("one branch of rate 1, lengths divide", 256, one(True)),
        Question("one branch of rate 1, a short last segment", 230, one(False)),
        Question("the same, causal", 230, one(True)),
        Question("two branches of rate 1, lengths divide", 256, Case((64, 256), (1, 1), 4, 16, True)),
        Question("one branch of rate 4, 4 heads, lengths divide", 256, Case((64,), (4,), 4, 16, True)),
        Question("rates 1 and 4, 4 heads, lengths divide", 256, Case((64, 256), (1, 4), 4, 16, True)),
        Question("one branch of rate 4, 8 heads, lengths divide", 256, Case((64,), (4,), 8, 16, True)),
        Question("a rate that doesn't divide its segment", 256, Case((64,), (3,), 6, 16, False)),
        Question("three branches", 256, Case((64, 128, 256), (1, 2, 4), 8, 16, True)),
        Question("three branches, a short last segment", 230, Case((64, 128, 256), (1, 2, 4), 8, 16, False)),
    ]


def gradients(engine, inputs, dout):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = engine(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def table(given: argparse.Namespace) -> list[str]:
    """Root mean square of the difference over that of the truth: output; largest of dq, dk, dv."""
    sys.path[:0] = [str(TESTS), str(TESTS / "torch")]
    import longnet

    lines = [
        "## Distance from the paper",
        "",
        "Difference from equations 3 to 11 in f64, root mean square over that of the truth: output, "
        "and the largest of dq, dk, dv. f32 tensors, rounding is about 1e-7.",
        "",
        "| case | " + " | ".join(given.engine) + " |",
        "|---|" + "---|" * len(given.engine),
    ]
    for question in questions():
        case, tokens = question.case, question.tokens
        torch.manual_seed(0)
        q, k, v, dout = torch.randn(4, 1, tokens, case.heads, case.dim)
        allowed = torch.ones(tokens, tokens, dtype=torch.bool)
        allowed = allowed.tril() if case.causal else allowed
        branches = list(zip(case.segments, case.rates))
        paper = lambda *inputs: longnet.equations(*inputs, branches, allowed)[0]
        truth = gradients(paper, [x.double() for x in (q, k, v)], dout.double())
        cells = []
        for name in given.engine:
            try:
                found = gradients(make(name, case, given.torchscale), (q, k, v), dout)
            except Exception as error:  # what an engine can't do is a result
                cells.append(f"error: {str(error).splitlines()[0][:60]}")
                continue
            off = [
                ((a.double() - b).square().mean() / b.square().mean()).sqrt().item()
                for a, b in zip(found, truth)
            ]
            cells.append(f"{off[0]:.1e}; {largest(off[1:]):.1e}")
        lines.append(f"| {question.title} | " + " | ".join(cells) + " |")
    return lines
