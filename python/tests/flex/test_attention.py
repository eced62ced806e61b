"""``longspan.torch`` by FlexAttention: front end, autograd, Dynamo, Inductor's CUDA kernels, interpreted.

All cases run with ``LONGSPAN_FLEX=all``, in minutes; without it those of ``cases.IN_CI``."""

import os

import numpy
import pytest
import reference
import torch
from cases import CASES, IN_CI, Case, rule
from interpreter import InterpretedCuda
from operators import TILES

import longspan
import longspan.torch
from longspan.torch import _call_cache
from longspan.torch._engine import in_place_of
from longspan.torch._flex import FlexEngine

pytestmark = pytest.mark.filterwarnings("default")

SOME = [case for case in CASES if case.name in IN_CI or os.environ.get("LONGSPAN_FLEX") == "all"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_of(case, backend):
    tiles = {} if case.default_tiles else dict.fromkeys(TILES, 64)
    return FlexEngine(backend=backend, dynamic=False, options=tiles)


def inputs_of(case):
    tensors = case.tensors()
    if case.name == "strides":
        # As projections make them: (batch, token, head, dim).
        for name in ("q", "k", "v"):
            tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    options = dict(case.options)
    if "sink_logits" in options:
        options["sink_logits"] = options["sink_logits"].clone().requires_grad_(case.gradients)
    qkv = [tensors[name].requires_grad_(case.gradients) for name in ("q", "k", "v")]
    return qkv, tensors["dout"], tensors["dlse"], options


def loss_of(case, out, lse, dout, dlse):
    loss = (out * dout).sum()
    if case.lse_gradient:
        # Rows without keys have a log-sum-exp of −∞, and no gradient.
        loss = loss + torch.where(torch.isfinite(lse), lse * dlse, 0).sum()
    return loss


def run(case, attention):
    """Results by name."""
    (q, k, v), dout, dlse, options = inputs_of(case)
    out, lse = attention(q, k, v, case.pattern, enable_gqa=True, return_lse=True, **options)
    found = {"out": out, "lse": lse}
    if case.gradients:
        inputs = {"dq": q, "dk": k, "dv": v}
        if "sink_logits" in options:
            inputs["dsinks"] = options["sink_logits"]
        gradients = torch.autograd.grad(loss_of(case, out, lse, dout, dlse), list(inputs.values()))
        found.update(zip(inputs, gradients))
    return found


def check(case, found):
    (q, k, v), dout, dlse, options = inputs_of(case)
    masks = [numpy.broadcast_to(m, (case.batch, case.heads, case.queries, case.keys)) for m in case.masks(case)]
    if not case.lse_gradient:
        dlse = None
    count = len(masks)
    bias = None if case.bias is None else numpy.concatenate([case.bias(case)] * count, axis=-1)
    truth = reference.attention(
        q, torch.cat([k] * count, 2), torch.cat([v] * count, 2), numpy.concatenate(masks, 3), dout, dlse,
        softcap=options.get("softcap"), bias=bias, sinks=options.get("sink_logits"),
    )

    def joined(x):
        """Gradients of a key that several branches have."""
        apart = numpy.split(x.dk, count, axis=2), numpy.split(x.dv, count, axis=2)
        return x._replace(dk=sum(apart[0]), dv=sum(apart[1]))

    truth = truth._replace(truth=joined(truth.truth), gross=joined(truth.gross))
    dsinks = found.pop("dsinks", None)
    reference.check(found, truth, case.dtype)
    if dsinks is not None:
        # A sum over rows of products that are as exact as the rows are.
        exact = 1e-5 if case.dtype == torch.float32 else 2e-2
        numpy.testing.assert_allclose(dsinks.numpy(), truth.dsinks, rtol=exact, atol=exact * abs(truth.dsinks).max())


@pytest.mark.parametrize("case", SOME, ids=repr)
def test_results(case):
    backend = InterpretedCuda()
    with in_place_of("cpu", engine_of(case, backend)):
        with backend.watch() as launches:
            found = run(case, longspan.torch.attention)
    kinds = [launch.attention for launch in launches if launch.attention]
    forward = [kind for kind in kinds if kind != "backward"]
    assert forward and (case.kernels is None or forward == case.kernels)
    assert kinds.count("backward") == (len(forward) if case.gradients else 0)
    check(case, found)


@pytest.mark.parametrize(
    "pattern, predicate, kernels",
    [
        ("window(20, 20) | sinks(3)", lambda q, k: (abs(q - k) <= 20) | (k < 3), 2),
        (
            "window(20, 20) | sinks(3) | keys(600, 605) | queries(300, 304)",
            lambda q, k: (abs(q - k) <= 20) | (k < 3) | (k >= 600) & (k < 605) | (q >= 300) & (q < 304),
            3,
        ),
    ],
    ids=["columns", "columns-and-rows"],
)
def test_wide_columns_and_rows(pattern, predicate, kernels, monkeypatch):
    """Keys that most queries attend to, and queries that attend to most keys, are calls of their own."""
    monkeypatch.setattr(_call_cache, "LONG_LISTS", 1)
    layout = longspan.Pattern(pattern).compile(1_300, block=64)
    case = Case("wide", layout, rule(predicate), 1, 1, 1_300, dim=16, kernels=["forward"] * kernels)
    test_results(case)


OUTER = ["window", "packed-other-keys", "sink-logits-empty-rows-bf16", "branches"]


@pytest.mark.parametrize("name", OUTER if len(SOME) == len(CASES) else OUTER[:1])
def test_inside_of_a_compiled_function(name):
    case = next(case for case in CASES if case.name == name)
    inner, outer = InterpretedCuda(), InterpretedCuda()

    def function(q, k, v, pattern, **options):
        out, lse = longspan.torch.attention(q * 1.0, k, v, pattern, **options)
        return out * 1.0, lse

    compiled = torch.compile(function, backend=outer, fullgraph=True)
    with in_place_of("cpu", engine_of(case, inner)), inner.watch() as launches:
        found = run(case, compiled)
    kinds = {launch.attention for launch in launches}
    assert {"forward", "backward"} <= kinds
    # The caller's own graphs, forward and backward, have the operator in them.
    stages = {graph.stage for graph in outer.graphs}
    assert stages == {"forward", "backward"}
    assert all("longspan" in str(graph.graph.code) for graph in outer.graphs)
    check(case, found)
